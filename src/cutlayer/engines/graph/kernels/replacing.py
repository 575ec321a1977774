"""Replace batch normalisation of images in a traced function, with the sum and the ReLU after it, by one operation."""

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cutlayer.engines.graph.kernels.batch_norm import computed_in

_aten = torch.ops.aten
NORM = _aten.batch_norm.default
RELUS = (_aten.relu.default, _aten.relu_.default)
SUMS = (_aten.add.Tensor, _aten.add_.Tensor)


def with_own_norms(traced: GraphModule) -> GraphModule:
    """Rewrite the function in place, with this package's normalisation wherever it fits."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target is NORM and _fits(node):
            _replace(graph, node)
    traced.recompile()
    return traced


def _fits(node: Node) -> bool:
    """Whether this normalises images by the batch's own statistics, with weight, bias and running statistics."""
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
    """Return the tensor that a node had in the trace, which has its type, shape and strides."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def _is_followed_by(node: Node, targets: tuple[Any, ...]) -> bool:
    """Whether one of these comes next and is the only reader of the node, so that both can be one operation."""
    return node.next.target in targets and list(node.users) == [node.next]


def _added(norm: Node) -> Node | None:
    """Return what the next node adds to the norm, if it has the same form; in place, only the norm may be changed."""
    total = norm.next
    if not _is_followed_by(norm, SUMS) or total.kwargs:
        return None
    if total.target is _aten.add_.Tensor and total.args[0] is not norm:
        return None
    (other,) = [a for a in total.args if a is not norm] or [None]
    mine, value = _value(norm), _value(other)
    if value is None or not isinstance(other, Node):
        return None
    same = (value.shape, value.dtype) == (mine.shape, mine.dtype)
    return other if same and _lies_channels_last(value) else None


def _replace(graph: Graph, norm: Node) -> None:
    """Replace the norm, and the sum and the ReLU that may follow it, by one operation."""
    residual = _added(norm)
    links = [norm] if residual is None else [norm, norm.next]
    if relu := _is_followed_by(links[-1], RELUS):
        links.append(links[-1].next)
    x, weight, bias, mean, var, _, momentum, eps, _ = norm.args
    given = x, residual, weight, bias, mean, var, momentum, eps, relu
    with graph.inserting_after(links[-1]):
        made = graph.call_function(torch.ops.cutlayer.batch_norm.default, given)
    with graph.inserting_before(made.next):
        y, new_mean, new_var = (graph.call_function(getitem, (made, k)) for k in (0, 3, 4))
        y.meta = dict(links[-1].meta)
        links[-1].replace_all_uses_with(y)
        for node in reversed(links):
            graph.erase_node(node)
        for old, new in ((mean, new_mean), (var, new_var)):
            assert isinstance(old, Node)
            _renew(graph, old, new, made)


def _renew(graph: Graph, old: Node, new: Node, made: Node) -> None:
    """Use the new running value wherever the norm would have changed the old one in place."""
    new.meta = dict(old.meta)
    others = [user for user in old.users if user is not made]
    if old.target is _aten.clone.default and all(made < user for user in others):  # a copy that only this function sees
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not made)
    else:
        graph.call_function(_aten.copy_.default, (old, new))
