"""Random layers switched off, so that two passes through a model can be compared."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cutlayer.split.calling import function_name

# fmt: off
_DROPOUTS = frozenset({
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout",
    "feature_alpha_dropout",
})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_DRAWS = frozenset({
    "rand", "rand_like", "randn", "randn_like", "bernoulli", "bernoulli_", "normal", "normal_", "uniform_",
    "exponential_",
})
# fmt: on


class Quiet(TorchFunctionMode):
    """Makes dropout the identity, and every other random number that torch draws the same one, from 0 to 1."""

    def __init__(self, number: float = 0.5) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "rrelu":
            return _given(F.rrelu, {"training": False}, args, kwargs)
        if name == "scaled_dot_product_attention":
            return func(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **_without_dropout(kwargs))
        if name == "multi_head_attention_forward":
            return _given(F.multi_head_attention_forward, {"dropout_p": 0.0}, args, kwargs)
        if name in _RECURRENT:
            return func(*(0.0 if isinstance(a, float) else a for a in args), **kwargs)
        out = func(*args, **kwargs)
        return out.detach().fill_(self._number) if name in _DRAWS and isinstance(out, Tensor) else out


def _without_dropout(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}


def _given(function: Callable[..., Any], changed: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.arguments.update(changed)
    return function(*bound.args, **bound.kwargs)
