"""How a whole model is called, and which of its outputs count."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

MAIN_OUTPUTS = ("logits", "last_hidden_state")  # of objects that hold several outputs, as those of transformers


def call(model: nn.Module, x: Any) -> Any:
    """Run a model; a dict of inputs goes to the parameters of these names."""
    return main_output(model(**x) if isinstance(x, dict) and _takes(model, x) else model(x))


def main_output(out: Any) -> Any:
    """Return an output that is a tensor, or a plain tuple, list or dict; of other objects, their main tensor.

    That is `logits`, or else `last_hidden_state`, or else the first tensor.
    """
    if isinstance(out, Tensor | tuple | list) or type(out) is dict:
        return out
    for name in MAIN_OUTPUTS:
        if isinstance(found := getattr(out, name, None), Tensor):
            return found
    held = out.values() if isinstance(out, Mapping) else vars(out).values() if hasattr(out, "__dict__") else ()
    return next((value for value in held if isinstance(value, Tensor)), out)


def _takes(model: nn.Module, names: Mapping[str, Any]) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or all(name in parameters for name in names)
