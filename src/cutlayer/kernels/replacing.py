"""Where a traced function normalises batches of images, with a sum and a ReLU after it, one operation does it all."""

from collections.abc import Iterator
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cutlayer.kernels.batch_norm import computed_in

_aten = torch.ops.aten
NORM = _aten.batch_norm.default
RELUS = (_aten.relu.default, _aten.relu_.default)
SUMS = (_aten.add.Tensor, _aten.add_.Tensor)


class Chain(NamedTuple):
    """A normalisation and what follows it."""

    links: tuple[Node, ...]  # the norm, perhaps a sum, perhaps a ReLU
    residual: Node | None
    relu: bool


def with_own_norms(traced: GraphModule) -> GraphModule:
    """The same function, changed in place, with this package's normalisation wherever that can be."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target is NORM and _fits(node):
            _replace(graph, _chain(node))
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


def _chain(norm: Node) -> Chain:
    links, residual = [norm], None
    user = _only_user(norm)
    if user is not None and user.target in SUMS and (other := _added(norm, user)) is not None:
        links, residual = [norm, user], other
        user = _only_user(user)
    relu = user is not None and user.target in RELUS
    chain = Chain((*links, user) if user is not None and relu else tuple(links), residual, relu)
    return chain if _can_wait(chain) else Chain((norm,), None, False)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _added(norm: Node, total: Node) -> Node | None:
    """What is added to the norm, if it has the same form; in place only the norm itself may be changed."""
    if total.kwargs or len(total.args) != 2 or (total.target is _aten.add_.Tensor and total.args[0] is not norm):
        return None
    (other,) = [a for a in total.args if a is not norm] or [None]
    mine, value = _value(norm), _value(other)
    if value is None or not isinstance(other, Node):
        return None
    same = (value.shape, value.dtype, value.device) == (mine.shape, mine.dtype, mine.device)
    return other if same and _lies_channels_last(value) else None


def _can_wait(chain: Chain) -> bool:
    """Whether nothing between a norm and the end of its chain needs its running values or changes what is read."""
    norm, last = chain.links[0], chain.links[-1]
    running = {_memory(a) for a in norm.args[3:5]}
    read = {_memory(a) for a in (*norm.args[:3], chain.residual)}
    return not any(
        running & {_memory(a) for a in node.all_input_nodes} or read & set(_written(node))
        for node in _between(norm, last)
        if node not in chain.links
    )


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first
    while node is not last:
        yield node
        node = node.next


def _written(node: Node) -> Iterator[Any]:
    """The memory that a node writes to."""
    if node.target is NORM:
        yield from map(_memory, node.args[3:5])
    elif isinstance(node.target, torch._ops.OpOverload):
        for place, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                yield from map(_memory, given if isinstance(given, list | tuple) else [given])


def _memory(node: Any) -> Any:
    """The node that made the memory that this one is a view of."""
    while isinstance(node, Node) and (node.target is getitem or _is_view(node.target)):
        node = node.args[0]
    return node


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    ends = *target._schema.returns[:1], *target._schema.arguments[:1]
    return len(ends) == 2 and all(end.alias_info is not None for end in ends)


def _replace(graph: Graph, chain: Chain) -> None:
    x, weight, bias, mean, var, _, momentum, eps, _ = chain.links[0].args
    given = x, chain.residual, weight, bias, mean, var, momentum, eps, chain.relu
    with graph.inserting_after(chain.links[-1]):
        made = graph.call_function(torch.ops.cutlayer.batch_norm.default, given)
    with graph.inserting_before(made.next):
        y, new_mean, new_var = (graph.call_function(getitem, (made, k)) for k in (0, 3, 4))
        y.meta = dict(chain.links[-1].meta)
        chain.links[-1].replace_all_uses_with(y)
        for node in reversed(chain.links):
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
