"""A user's own methods and models: a Python file that every side of a run names, and that is the same on all of them.

    METHODS = {"my_method": my_method}      # as in cutlayer.methods: a function of model, client_opt and server_opt
    MODELS = {"my_model": MyModel}          # as in cutlayer.models

The file is code: each side runs the copy that its own user chose. Only the hash of it is ever sent.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cutlayer.checks import reason
from cutlayer.errors import ConfigError
from cutlayer.methods import METHODS
from cutlayer.models import MODELS


class Plugin(NamedTuple):
    """A file that was loaded."""

    name: str
    digest: str


LOADED: list[Path] = []  # what other processes of the same run load, too


def load(paths: Iterable[Path]) -> dict[str, str]:
    """Load these files; the hash of each by its name."""
    return dict(_load(path) for path in paths)


def _load(path: Path) -> Plugin:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the plugin {path} cannot be read: {error.strerror}") from None
    name = f"cutlayer_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigError(f"the plugin {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"the plugin {path} cannot be loaded: {type(error).__name__}: {reason(error)}") from error
    if not hasattr(module, "METHODS") and not hasattr(module, "MODELS"):
        raise ConfigError(f"the plugin {path} has neither METHODS nor MODELS, so it brings nothing")
    _add(path, "METHODS", getattr(module, "METHODS", {}), METHODS)
    _add(path, "MODELS", getattr(module, "MODELS", {}), MODELS)
    LOADED.append(path.absolute())
    return Plugin(path.name, hashlib.sha256(content).hexdigest())


def _add(path: Path, table: str, found: object, known: dict[str, Any]) -> None:
    if not isinstance(found, dict) or not all(callable(entry) for entry in found.values()):
        raise ConfigError(f"{table} of the plugin {path} must be a dict of names and functions")
    for name, entry in found.items():
        other = known.get(name)
        if other is not None and getattr(other, "__module__", "") != getattr(entry, "__module__", ""):
            raise ConfigError(f"the plugin {path} has {name!r} in {table}, which there is already; choose another name")
        known[name] = entry
