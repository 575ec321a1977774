"""Engines: where a method runs. Each gives the loop engine's numbers, to rounding.

Imports: core, data, errors, optim, registry, split.
"""
