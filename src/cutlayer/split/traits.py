"""Side effects of modules: random numbers, batch statistics, and writing into the input."""

import inspect
import logging
from collections.abc import Iterator, Set
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from cutlayer.core import masks
from cutlayer.core.torch_private import BatchNorm, Dropout, NormBase, children
from cutlayer.split.calling import function_name

log = logging.getLogger("cutlayer")

BY_KEY = masks.NAMES
ATTENTION = "scaled_dot_product_attention"
# fmt: off
OTHERWISE = frozenset({
    "gumbel_softmax", "multinomial", "normal", "normal_", "uniform_", "exponential_", "poisson", "randn", "randint",
    "randperm", "randn_like", "randint_like",
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
    return any((isinstance(m, BatchNorm) and m.training) or _graph_normalises(m) for m in module.modules())


def writes(module: nn.Module) -> bool:
    """Return whether a module may change its input in place."""
    return any(getattr(m, "inplace", False) is True or _graph_writes(m) for m in module.modules())


def warn_of_eval_mode(kind: str, structure: nn.Module) -> None:
    """Warn that a model trains in eval mode, if training mode would be something else; changes the structure's mode."""
    structure.train()
    moves = any(isinstance(m, NormBase) and m.training and m.track_running_stats for m in structure.modules())
    if moves or normalises(structure) or draws_by_key(structure) or draws_otherwise(structure):
        log.warning(
            "%s is in eval mode: while it trains, its dropout and BatchNorm stay as in evaluation; call model.train() "
            "before Split if that is not meant",
            kind,
        )


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
    drops_nothing = not any("dropout_p" in c for c in code.co_consts if isinstance(c, tuple))
    yield from sorted(mentioned & random - ({ATTENTION} if drops_nothing else set()))


def _draws(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a call of a random function draws with the arguments that a graph gives it."""
    arguments = _arguments(node, module)
    training = arguments.get("training", arguments.get("train"))
    if _called(node) == ATTENTION:
        return bool(arguments.get("dropout_p"))
    return training is not False and arguments.get("p") != 0


def _arguments(node: fx.Node, module: nn.Module) -> dict[str, Any]:
    """Return the arguments of a call by name; only keyword arguments if the function has no signature."""
    given = node.normalized_arguments(module, normalize_to_only_use_kwargs=True)
    return dict(node.kwargs) if given is None else given.kwargs


def _graph_normalises(module: nn.Module) -> bool:
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return any(node.target is F.batch_norm and _arguments(node, module).get("training") for node in nodes)


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
    """Return the name of the function that a node calls, without the overload of an operator such as aten's."""
    if node.op == "call_function":
        return function_name(node.target)
    return str(node.target) if node.op == "call_method" else ""
