"""How a whole model is called, and which of its outputs count."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

MAIN_OUTPUTS = ("logits", "last_hidden_state")


def call(model: nn.Module, x: Any) -> Any:
    """Run a model; a dict of inputs goes to the parameters of these names."""
    return main_output(model(**x) if isinstance(x, dict) and takes(model, x) else model(x))


def main_output(out: Any) -> Any:
    """Return the output of a model; of an object that holds several, as those of transformers, the main tensor.

    That is `logits`, or else `last_hidden_state`, or else the first tensor. Plain tuples and dicts stay as they are.
    """
    if not isinstance(out, Mapping) or type(out) is dict:
        return out
    found = [value for value in (*(out.get(name) for name in MAIN_OUTPUTS), *out.values()) if isinstance(value, Tensor)]
    return found[0] if found else out


def function_name(function: Any) -> str:
    """Return the name of a function or of an operator of torch, without its overload: of `aten.add.Tensor`, add."""
    return str(getattr(function, "__name__", "")).partition(".")[0]


def takes(model: nn.Module, names: Mapping[str, Any]) -> bool:
    """Return whether a forward has parameters of these names."""
    parameters = inspect.signature(model.forward).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or all(name in parameters for name in names)
