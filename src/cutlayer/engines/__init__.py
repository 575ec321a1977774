"""Engines compute what methods ask for. Each gives the loop engine's numbers, to rounding.

Imports: core, data, errors, optim, registry, split.
"""
