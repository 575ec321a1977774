"""The command line: run, compare, cuts, profile, plan, overlap, bench, list; and on real devices keys, serve, join.

Imports: benching, codecs, core, data, errors, methods, models, optim, planning, plugins, recipes, registry,
remote/device, remote/identity, remote/joining, remote/monitor, remote/server, results, runs, split, studies, version.
"""

from cutlayer.cli.commands import app, main

__all__ = ["app", "main"]
