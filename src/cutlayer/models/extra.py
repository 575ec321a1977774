"""Packages that only language models need."""

import importlib
from typing import Any

from cutlayer.errors import ConfigError


def needs(package: str) -> Any:
    """The package, or how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"language models need {package}, which is missing; install it with: pip install 'cutlayer[llm]'"
        ) from error
