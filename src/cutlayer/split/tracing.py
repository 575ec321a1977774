"""Units of any model, found in its torch.fx graph: a cut is possible wherever exactly one tensor is alive."""

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn

from cutlayer.errors import CutError


def traced(model: nn.Module) -> list[tuple[str, fx.GraphModule]]:
    """Return the name and module of every unit. A forward with several inputs takes a dict of them."""
    kind = type(model).__name__
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # a forward may do anything with a traced value
        raise CutError(
            f"{kind} cannot be cut because its forward cannot be traced ({type(error).__name__}: {error}). "
            "Write it as nn.Sequential or give it a units() method."
        ) from error
    graph.eliminate_dead_code(lambda node: node.target is not operator.getitem)  # drop unused items of tuples
    used: set[str] = set()
    units = []
    start: fx.Node | None = None
    for piece in _pieces(graph):
        module = fx.GraphModule(model, _graph_of(graph, piece, start), class_name=kind)
        last = piece[-2] if piece[-1].op == "output" and len(piece) > 1 else piece[-1]
        units.append((_name(last, used), module))
        start = piece[-1]
    return units


class _Tracer(fx.Tracer):
    """Traces a forward with its required inputs; optional ones keep their defaults."""

    proxy_buffer_attributes = True  # read a buffer when the unit runs, not when it is traced

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        inputs = {name: self.create_proxy("placeholder", name, (), {}) for name in _required(root_fn)}

        @functools.wraps(root_fn)
        def forward(root: nn.Module) -> Any:
            return root_fn(root, **inputs)

        return forward, [self.root]


def _required(forward: Callable[..., Any]) -> list[str]:
    _, *parameters = inspect.signature(forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty] or [p.name for p in named[:1]]


def _pieces(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the nodes between possible cuts; the output node ends the last piece."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last_use = {node: max((order[user] for user in node.users), default=-1) for node in graph.nodes}
    alive: set[fx.Node] = set()
    piece: list[fx.Node] = []
    for node in graph.nodes:
        alive = {value for value in alive if last_use[value] > order[node]}
        if node.op == "get_attr":
            continue  # a parameter is available on the side that reads it
        if last_use[node] > order[node]:
            alive.add(node)
        if node.op == "placeholder":
            continue
        piece.append(node)
        followed_by_output = all(user.op == "output" for user in node.users)
        if node.op == "output" or (alive == {node} and _is_tensor(node) and not followed_by_output):
            yield piece
            piece = []


def _is_tensor(node: fx.Node) -> bool:
    """Return whether a value is a tensor: one that is indexed by integers is a tuple."""
    return not any(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)


def _graph_of(whole: fx.Graph, piece: list[fx.Node], start: fx.Node | None) -> fx.Graph:
    """Return the nodes of a piece as a graph with the input `start` or, for the first piece, the model's inputs."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in whole.nodes if node.op == "placeholder"]
    if start is not None:
        known[start] = graph.placeholder("x")
    elif len(inputs) == 1:
        known[inputs[0]] = graph.placeholder("x")
    else:
        every = graph.placeholder("x")
        known |= {node: graph.call_function(operator.getitem, (every, node.target)) for node in inputs}

    def local(node: fx.Node) -> fx.Node:
        if node not in known:  # a parameter or buffer, read where it is needed
            known[node] = graph.node_copy(node)
        return known[node]

    for node in piece:
        known[node] = graph.node_copy(node, local)
    if piece[-1].op != "output":
        graph.output(known[piece[-1]])
    return graph


def _name(node: fx.Node, used: set[str]) -> str:
    """Return a unique name: that of the module or function that ends a unit."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    stem = str(node.target) if node.op in ("call_module", "call_method") else node.name
    name = next(n for n in (stem, *(f"{stem}_{i}" for i in range(1, len(used) + 2))) if n not in used)
    used.add(name)
    return name
