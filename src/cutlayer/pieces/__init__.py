"""What methods share: the client's side, the exchange of a mini-batch, what is fused, and what ends a round.

Imports: core, errors, optim, planning, registry, split.
"""
