"""Runs: configuration, rounds, evaluation, checkpoints, folders. May import all packages below `remote`."""
