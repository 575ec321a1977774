"""Runs: configuration, checks, rounds, evaluation, checkpoints and folders.

Imports: codecs, core, data, engines, errors, meters, methods, models, optim, pieces, planning, registry, split,
version.
"""
