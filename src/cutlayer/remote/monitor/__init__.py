"""What people see of a server: the state of its clients, a live table, logs and Prometheus metrics.

Imports: core, errors, runs.
"""
