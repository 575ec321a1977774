"""Optimisers as pure functions of a part and its gradients, the rules they consist of, and learning-rate schedules.

Imports: core, errors, registry.
"""

from cutlayer.optim.optimiser import OPTIMISERS, Optimiser, Transform, adam, adamw, build, co_clipped, proximal, sgd

__all__ = ["OPTIMISERS", "Optimiser", "Transform", "adam", "adamw", "build", "co_clipped", "proximal", "sgd"]
