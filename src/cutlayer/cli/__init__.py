"""The command line: run, compare, cuts, profile, plan, overlap, bench, list; and on real devices keys, serve, join."""

from cutlayer.cli.commands import app, main

__all__ = ["app", "main"]
