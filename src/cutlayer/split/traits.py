"""Side effects of modules: random numbers, batch statistics, and writing into the input."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from cutlayer.core.torch_private import BatchNorm, Dropout, children
from cutlayer.split.calling import function_name

# fmt: off
_DRAWS = frozenset({
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu",
    "gumbel_softmax", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "poisson",
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like",
})
# fmt: on


def draws(module: nn.Module) -> bool:
    """Return whether a module, in its current mode, draws random numbers."""
    return any(_draws_itself(m) for m in module.modules())


def normalises(module: nn.Module) -> bool:
    """Return whether a module, in its current mode, uses batch statistics."""
    return any((isinstance(m, BatchNorm) and m.training) or _graph_normalises(m) for m in module.modules())


def writes(module: nn.Module) -> bool:
    """Return whether a module may change its input in place."""
    return any(getattr(m, "inplace", False) is True or _graph_writes(m) for m in module.modules())


def _draws_itself(module: nn.Module) -> bool:
    if isinstance(module, fx.GraphModule):
        return any(_node_draws(node) for node in module.graph.nodes)
    if not module.training:
        return False
    if isinstance(module, Dropout):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, nn.RReLU) or _source_draws(module)


def _source_draws(module: nn.Module) -> bool:
    """Return whether the code of a user's forward names a function that draws random numbers."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or type(module).__module__.startswith("torch."):
        return False
    mentioned = set(code.co_names) - set(children(module)) - set(vars(module))  # self.dropout is checked by itself
    return bool(mentioned & _DRAWS) or any("dropout_p" in c for c in code.co_consts if isinstance(c, tuple))


def _node_draws(node: fx.Node) -> bool:
    name = _called(node)
    given = _arguments(node)
    if name == "scaled_dot_product_attention":
        return bool(given.get("dropout_p", 0) != 0)
    return name in _DRAWS and given.get("training") is not False and given.get("p") != 0


def _graph_normalises(module: nn.Module) -> bool:
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return any(node.target is F.batch_norm and _arguments(node).get("training") for node in nodes)


def _graph_writes(module: nn.Module) -> bool:
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return any(node.kwargs.get("inplace") or _in_place(node) for node in nodes)


def _in_place(node: fx.Node) -> bool:
    """Return whether a call writes into a tensor that is no value of the model, such as a count of batches."""
    name = _called(node)
    written = node.args[0] if node.args else None
    is_value = isinstance(written, fx.Node) and written.op == "get_attr"
    return name.endswith("_") and not name.endswith("__") and not is_value


def _called(node: fx.Node) -> str:
    if node.op == "call_function":
        return function_name(node.target)
    return str(node.target) if node.op == "call_method" else ""


def _arguments(node: fx.Node) -> Mapping[str, Any]:
    """Return the arguments of a call by name; only keyword arguments if the function has no signature."""
    if node.op != "call_function" or not callable(node.target):
        return node.kwargs
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # built-in functions have no signature
        return node.kwargs
    bound.apply_defaults()
    return bound.arguments
