"""Planning: the costs of a model by unit, the devices, and the best cuts and batch sizes for them.

Imports: core, errors, registry, split.
"""
