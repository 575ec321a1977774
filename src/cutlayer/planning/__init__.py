"""Who computes what: the costs of a model, unit by unit, the devices, and the best cuts and batch sizes for them.

Imports: core, errors, registry, split.
"""
