"""Questions beyond one run: cuts, traffic, a client's memory, and work that hides in a wait.

Imports: core, errors, meters, methods, optim, pieces, planning, registry, results, runs, split.
"""
