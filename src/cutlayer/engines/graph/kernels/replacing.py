"""Where a traced function normalises batches of images, with a sum and a ReLU after it, one operation does it all."""

from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cutlayer.engines.graph.kernels.batch_norm import computed_in

_aten = torch.ops.aten
NORM = _aten.batch_norm.default
RELUS = (_aten.relu.default, _aten.relu_.default)
SUMS = (_aten.add.Tensor, _aten.add_.Tensor)


class Sequel(NamedTuple):
    """A normalisation with what follows it at once."""

    links: tuple[Node, ...]  # the norm, perhaps a sum, perhaps a ReLU
    residual: Node | None
    relu: bool


def with_own_norms(traced: GraphModule) -> GraphModule:
    """The same function, changed in place, with this package's normalisation wherever that can be."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target is NORM and _fits(node):
            _replace(graph, _sequel(node))
    traced.recompile()
    return traced


def _fits(node: Node) -> bool:
    """Whether this is a normalisation of images with the batch's own statistics and with all that such a layer has."""
    x, *per_channel, training, _momentum, _eps, _cudnn = node.args
    values = [_value(a) for a in (x, *per_channel)]
    if not training or any(value is None for value in values):
        return False
    images = values[0]
    return (
        _lies_channels_last(images)
        and images.numel() >= 2 * images.shape[1]
        and all(value.dtype == computed_in(images.dtype) for value in values[1:])
        and all(value.is_contiguous() for value in values[1:])
    )


def _lies_channels_last(value: Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)


def _value(node: Any) -> Any:
    """A tensor of the form that this one has when the function runs."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def _sequel(norm: Node) -> Sequel:
    """With nothing in between, nothing can tell that the norm is computed with what follows it."""
    links, residual = [norm], None
    if norm.next.target in SUMS and _is_all_for(norm, norm.next) and (other := _added(norm, norm.next)) is not None:
        links, residual = [norm, norm.next], other
    last = links[-1]
    relu = last.next.target in RELUS and _is_all_for(last, last.next)
    return Sequel((*links, last.next) if relu else tuple(links), residual, relu)


def _is_all_for(node: Node, user: Node) -> bool:
    return list(node.users) == [user]


def _added(norm: Node, total: Node) -> Node | None:
    """What is added to the norm, if it has the same form; in place only the norm itself may be changed."""
    if total.kwargs or (total.target is _aten.add_.Tensor and total.args[0] is not norm):
        return None
    (other,) = [a for a in total.args if a is not norm] or [None]
    mine, value = _value(norm), _value(other)
    if value is None or not isinstance(other, Node):
        return None
    same = (value.shape, value.dtype) == (mine.shape, mine.dtype)
    return other if same and _lies_channels_last(value) else None


def _replace(graph: Graph, sequel: Sequel) -> None:
    x, weight, bias, mean, var, _, momentum, eps, _ = sequel.links[0].args
    given = x, sequel.residual, weight, bias, mean, var, momentum, eps, sequel.relu
    with graph.inserting_after(sequel.links[-1]):
        made = graph.call_function(torch.ops.cutlayer.batch_norm.default, given)
    with graph.inserting_before(made.next):
        y, new_mean, new_var = (graph.call_function(getitem, (made, k)) for k in (0, 3, 4))
        y.meta = dict(sequel.links[-1].meta)
        sequel.links[-1].replace_all_uses_with(y)
        for node in reversed(sequel.links):
            graph.erase_node(node)
        for old, new in ((mean, new_mean), (var, new_var)):
            assert isinstance(old, Node)
            _renew(graph, old, new, made)


def _renew(graph: Graph, old: Node, new: Node, made: Node) -> None:
    """Let the new running value be seen wherever the old one was to change."""
    new.meta = dict(old.meta)
    others = [user for user in old.users if user is not made]
    if old.target is _aten.clone.default and all(made < user for user in others):  # nobody else sees this memory
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not made)
    else:
        graph.call_function(_aten.copy_.default, (old, new))
