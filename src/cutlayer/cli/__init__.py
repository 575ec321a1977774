"""The command line: `run`, `compare`, `cuts`, `profile`, `plan`, `overlap`, `list`; on devices `keys`, `serve`, `join`."""

from cutlayer.cli.commands import app, main

__all__ = ["app", "main"]
