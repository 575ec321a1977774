"""The command line: `cutlayer run`, `compare`, `cuts`, `profile`, `plan`, `overlap` and `list`."""

from cutlayer.cli.commands import app, main

__all__ = ["app", "main"]
