"""Studies beyond one run: cuts, traffic, a client's memory, and work that overlaps with waiting.

Imports: core, errors, meters, methods, optim, pieces, planning, registry, results, runs, split.
"""
