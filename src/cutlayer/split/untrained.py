"""Values that cross a cut and depend on no parameter, such as masks: nobody needs their gradients.

Masks that are added to scores may hold minus infinity, but a server accepts only finite numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from cutlayer.core.torch_private import mutates
from cutlayer.split.calling import function_name

STAND_IN = -(2.0**127)  # for minus infinity; exact in bfloat16, float32 and float64
# fmt: off
_VIEWS = frozenset({
    "alias", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "getattr", "getitem",
    "movedim", "narrow", "permute", "real", "reshape", "reshape_as", "select", "slice", "split", "split_with_sizes",
    "squeeze", "swapaxes", "t", "to", "transpose", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as",
})
_WRITERS = frozenset({"setitem", "iadd", "isub", "imul", "itruediv"})
# fmt: on


def untrained(graph: fx.Graph, model: nn.Module) -> frozenset[fx.Node]:
    """Return the values of a graph that depend on no parameter of the model."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    trained: set[fx.Node] = set()
    before = -1
    while len(trained) > before:  # what is written into a value changes those that were made of it earlier
        before = len(trained)
        for node in graph.nodes:
            if _reads(node, model, parameters) or not trained.isdisjoint(node.all_input_nodes):
                trained |= {node, *_written(node)}
    return frozenset(node for node in graph.nodes if node not in trained)


def _reads(node: fx.Node, model: nn.Module, parameters: set[str]) -> bool:
    if node.op == "call_module":
        return next(model.get_submodule(str(node.target)).parameters(), None) is not None
    return node.op == "get_attr" and node.target in parameters


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values into which a call writes: the first argument, and what that is a view of."""
    if not _writes(node):
        return
    while (_writes(node) or _name(node) in _VIEWS) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def _writes(node: fx.Node) -> bool:
    name = _name(node)
    return mutates(node.target) or name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


def _name(node: fx.Node) -> str:
    if node.op == "call_function":
        return function_name(node.target)
    return str(node.target) if node.op == "call_method" else ""


def sent(value: Tensor) -> Tensor:
    """Return an untrained value as it crosses a cut: finite."""
    return torch.where(value == -torch.inf, STAND_IN, value) if value.is_floating_point() else value


def received(value: Tensor) -> Tensor:
    """Return an untrained value as it was before it crossed, without a gradient."""
    return torch.where(value == STAND_IN, -torch.inf, value).detach() if value.is_floating_point() else value
