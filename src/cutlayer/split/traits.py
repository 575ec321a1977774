"""Side effects of modules: random numbers, batch statistics, and writing into the input."""

import inspect
from collections.abc import Iterator, Set
from typing import Any

from torch import fx, nn

from cutlayer.core import masks
from cutlayer.core.torch_private import BatchNorm, Dropout, children

BY_KEY = masks.NAMES
# fmt: off
OTHERWISE = frozenset({
    "gumbel_softmax", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "exponential_",
    "poisson", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
})
# fmt: on


def draws_by_key(module: nn.Module) -> bool:
    """Return whether a module, in its current mode, draws random numbers that `core.masks` draws from a key."""
    return any(_drops(m) or any(_functions(m, BY_KEY)) for m in module.modules())


def draws_otherwise(module: nn.Module) -> str | None:
    """Return what else in a module, in its current mode, draws random numbers; None if nothing does."""
    for name, inner in module.named_modules():
        if isinstance(inner, nn.RNNBase) and inner.training and inner.dropout > 0:
            return f"the dropout of {name!r} ({type(inner).__name__})"
        for function in _functions(inner, OTHERWISE):
            return f"{function} in {type(inner).__name__}"
    return None


def normalises(module: nn.Module) -> bool:
    """Return whether a module, in its current mode, uses batch statistics."""
    return any(isinstance(m, BatchNorm) and m.training for m in module.modules())


def writes(module: nn.Module) -> bool:
    """Return whether a module may change its input in place."""
    return any(getattr(m, "inplace", False) is True or _graph_writes(m) for m in module.modules())


def _drops(module: nn.Module) -> bool:
    """Return whether a layer of torch draws random numbers that `core.masks` draws from a key."""
    if not module.training:
        return False
    if isinstance(module, Dropout):
        return module.p > 0
    return isinstance(module, nn.RReLU) or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)


def _functions(module: nn.Module, random: Set[str]) -> Iterator[str]:
    """Yield the functions of these names that a graph calls, or that the code of a user's forward mentions."""
    if isinstance(module, fx.GraphModule):
        yield from (_called(node) for node in module.graph.nodes if _called(node) in random and _draws(node, module))
        return
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or not module.training or type(module).__module__.startswith("torch."):
        return
    mentioned = set(code.co_names) - set(children(module)) - set(vars(module))  # self.dropout is checked by itself
    attention = "scaled_dot_product_attention"
    drops_nothing = not any("dropout_p" in c for c in code.co_consts if isinstance(c, tuple))
    yield from sorted(mentioned & random - ({attention} if drops_nothing else set()))


def _draws(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a call of a random function draws with the arguments that a graph gives it."""
    given = node.normalized_arguments(module, normalize_to_only_use_kwargs=True)
    arguments: dict[str, Any] = dict(node.kwargs) if given is None else given.kwargs
    training = arguments.get("training", arguments.get("train"))
    return training is not False and arguments.get("p") != 0 and arguments.get("dropout_p") != 0


def _graph_writes(module: nn.Module) -> bool:
    if not isinstance(module, fx.GraphModule):
        return False
    return any(node.kwargs.get("inplace") or _called(node).endswith("_") for node in module.graph.nodes)


def _called(node: fx.Node) -> str:
    """Return the name of the function that a node calls, without the overload of an operator such as aten's."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).split(".")[0]
    return str(node.target) if node.op == "call_method" else ""
