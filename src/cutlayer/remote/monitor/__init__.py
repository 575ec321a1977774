"""Monitoring of a server: the status of its clients, a live table, logs and Prometheus metrics.

Imports: core, errors, runs.
"""
