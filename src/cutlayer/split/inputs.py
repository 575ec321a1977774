"""The inputs of a traced model: several come as a dict with their names, and one may have a name."""

import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx, nn

from cutlayer.errors import ConfigError


def named(x: Any, name: str, names: Collection[str]) -> Any:
    """Return an input by its name; `names` are all that the model takes."""
    if not isinstance(x, Mapping) or x.keys() != set(names):
        raise _misnamed(x, names)
    return x[name]


def alone(x: Any, names: Collection[str]) -> Any:
    """Return the only input, which needs no name but may have any."""
    if not isinstance(x, Mapping):
        return x
    if len(x) != 1:
        raise _misnamed(x, names)
    return next(iter(x.values()))


def without_name(x: Any, first: nn.Module) -> Any:
    """Return inputs as the whole model takes them; `first` is the first of its units."""
    takes_one = isinstance(first, fx.GraphModule) and any(node.target is alone for node in first.graph.nodes)
    return alone(x, ()) if takes_one else x


def _misnamed(x: Any, names: Collection[str]) -> ConfigError:
    have = ", ".join(x) if isinstance(x, Mapping) else "one input without a name"
    return ConfigError(
        f"the model takes {', '.join(names)}; the data have {have}; choose with inputs= of from_dataset, or give "
        "sample= to Split"
    )


def reads_dict(node: fx.Node) -> bool:
    """Return whether the forward treats an input as a dict."""
    items = any(user.target is operator.getitem and isinstance(user.args[1], str) for user in node.users)
    return items or any(user.op == "call_method" and user.target in ("get", "items", "keys") for user in node.users)
