"""Plug-ins: Python files with a user's own methods, models, data sets and more; every side of a run names the same.

    METHODS = {"my_method": my_method}      # as in cutlayer.methods: a function of model, client_opt and server_opt
    MODELS = {"my_model": MyModel}          # as in cutlayer.models
    DATA = {"my_data": load_mine}           # as in cutlayer.data.sources: a function of the data folder

The file is code: each side runs its own copy, and only the hash of the file is sent. What is hashed is what runs, never
compiled code that Python cached earlier.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from cutlayer import registry
from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError

LOADED: list[Path] = []  # worker processes of the same run load these, too


def load(paths: Iterable[Path]) -> dict[str, str]:
    """Load these files and return the hash of each by its name."""
    return {path.name: _load(path) for path in paths}


def _load(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the plugin {path} cannot be read: {error.strerror}") from None
    name = f"cutlayer_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or spec is None:
        raise ConfigError(f"the plugin {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        exec(compile(content, str(path), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        raise ConfigError(f"the plugin {path} cannot be loaded: {type(error).__name__}: {reason(error)}") from error
    registry.add(str(path), vars(module))
    LOADED.append(path.absolute())
    return hashlib.sha256(content).hexdigest()
