"""Units from the graph of a whole forward pass: where it can be cut, and each piece as a module of its own.

A cut is possible after a call wherever only tensors are needed later. One tensor crosses as it is, several as a dict.
Values that depend on no input and no parameter, such as positions, are computed again on the other side.
"""

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from cutlayer.errors import CutError
from cutlayer.split.inputs import alone, named, reads_dict
from cutlayer.split.untrained import received, sent, untrained

HIDDEN = "hidden"  # the name of the hidden state among several tensors that cross
MOST_CROSSING = 8  # tensors at a cut that nobody asked for by name
_NUMBERS = frozenset({"size", "dim", "ndimension", "numel", "item", "tolist", "stride"})
_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad"})


class Unit(NamedTuple):
    """A piece of a model: it takes the previous unit's output, and its tensors have their names in the whole model."""

    name: str
    module: nn.Module
    begins: tuple[str, ...] = ()  # paths of the modules whose first call begins with this unit
    ends: tuple[str, ...] = ()  # and of those whose last call ends with it
    masks: frozenset[str] | None = None  # of what it hands over: the tensors that depend on no parameter, if traced
    by_fx: bool = False  # from a trace without tensors, which does not show all that a forward does


@dataclass(frozen=True)
class Traced:
    """The graph of a forward pass, and what its nodes refer to besides the model's own values."""

    graph: fx.Graph
    by_name: bool  # whether the inputs come as a dict
    extras: Mapping[str, Any] = field(default_factory=dict)
    recomputed: frozenset[fx.Node] = frozenset()  # computed again wherever they are needed
    early: frozenset[fx.Node] = frozenset()  # made of inputs alone; run first, so that they cross and not the inputs
    every_piece: bool = False  # whether a unit ends with each piece of the model, not only where one tensor is alive

    @cached_property
    def steps(self) -> list[fx.Node]:
        """The calls in order, and the output."""
        passive = ("placeholder", "get_attr")
        nodes = [node for node in self.graph.nodes if node.op not in passive and node not in self.recomputed]
        return sorted(nodes, key=lambda node: node not in self.early)

    @cached_property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @cached_property
    def crossing(self) -> list[list[fx.Node]]:
        """The values that are needed after each step, in the order in which they are made."""
        order = {node: i for i, node in enumerate(self.steps)}
        last_use = {
            node: max((order[user] for user in node.users if user in order), default=-1)
            for node in (*self.inputs, *self.steps)
        }
        alive = [node for node in self.inputs if last_use[node] >= 0]
        found = []
        for i, step in enumerate(self.steps):
            alive = [node for node in (*alive, step) if last_use[node] > i]
            found.append(alive)
        return found

    @cached_property
    def ends(self) -> list[list[str]]:
        """The modules that end with each step, the outermost first."""
        return _edges(self._stacks()[::-1])[::-1]

    @cached_property
    def begins(self) -> list[list[str]]:
        """The modules that begin with each step, the outermost first."""
        return _edges(self._stacks())

    def _stacks(self) -> list[dict[str, str]]:
        """Return, for each step, the path of each module call that it belongs to, by a name of the call."""
        stacks = [{} if step in self.early else step.meta.get("nn_module_stack") or {} for step in self.steps]
        return [{call: path for call, (path, _) in stack.items() if path} for stack in stacks]

    def is_raw(self, node: fx.Node) -> bool:
        """Return whether a value is a real-valued input or made of inputs of which one is."""
        if node.op == "placeholder":
            value = node.meta.get("val")
            return isinstance(value, Tensor) and value.is_floating_point()
        return node in self.early and any(self.is_raw(other) for other in node.all_input_nodes)


def _edges(stacks: list[dict[str, str]]) -> list[list[str]]:
    """Return the modules of which each stack is the first; a list of modules, which is not called, is there once."""
    called = {path for stack in stacks for path in stack.values()}
    seen: set[str] = set()
    found: list[list[str]] = []
    before: dict[str, str] = {}
    for stack in stacks:
        inside = [path[:i] for path in stack.values() for i, letter in enumerate(path) if letter == "."]
        lists = {path for path in inside if path not in called and path not in seen}
        seen |= lists
        found.append(sorted({*lists, *(path for call, path in stack.items() if call not in before)}, key=len))
        before = stack
    return found


def blocks_of(model: nn.Module) -> frozenset[str]:
    """Return the paths of repeated blocks: the members of a list or sequence of modules alike that have parts."""
    found: set[str] = set()
    for path, module in model.named_modules():
        members = list(module.named_children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        alike = len({type(member) for _, member in members}) == 1 and len(members) > 1
        if alike and all(next(member.children(), None) is not None for _, member in members):
            found |= {f"{path}.{name}" if path else name for name, _ in members}
    return frozenset(found)


def units_from(
    traced: Traced, model: nn.Module, places: Collection[str], pieces: Collection[str] | None = None
) -> tuple[Unit, ...]:
    """Return the units of a traced model, which hold the values of `model`.

    One ends after each of these places, and wherever one ends without being asked for: after these pieces, if given.
    """
    stops = _automatic(traced, model) if pieces is None else _after(pieces, traced)
    for path in places:
        stops[_end_of(path, traced, type(model).__name__)] = path
    output = len(traced.steps) - 1
    stops[output] = stops.pop(output - 1, "")  # the output node belongs to the last unit
    masks = untrained(traced.graph, model)
    used: set[str] = set()
    units = []
    start: list[fx.Node] = []
    first = 0
    for last in sorted(stops):
        piece = traced.steps[first : last + 1]
        graph = _graph_of(traced, piece, start, masks, first == 0)
        module = fx.GraphModule(_referred(model, traced, graph), graph, type(model).__name__)
        end = last - 1 if piece[-1].op == "output" and len(piece) > 1 else last
        name = _unique(stops[last] or _named_by(traced.steps[end]), used)
        begins, ends = tuple(traced.begins[first]), tuple(traced.ends[end])
        handed = names_of(traced.crossing[last], masks)
        own = frozenset(handed[node] for node in handed if node in masks and handed[node] != HIDDEN)
        units.append(Unit(name, module, begins, ends, own, by_fx=not traced.every_piece))
        start, first = traced.crossing[last], last + 1
    return tuple(units)


def _automatic(traced: Traced, model: nn.Module) -> dict[int, str]:
    """Return the steps after which a unit ends, with its name, or "" for that of the last call."""
    blocks = blocks_of(model)
    opened = {"", *(path[:i] for path in blocks for i, letter in enumerate(path) if letter == ".")}
    most = {path: len(traced.crossing[i]) for i, ends in enumerate(traced.ends) for path in ends if path in blocks}

    def piece(i: int) -> str:
        """Return the innermost block that ends here; or a module outside of blocks, which may contain lists of them."""
        ends = traced.ends[i]
        block = next((path for path in reversed(ends) if path in blocks), "")
        own = block or next((path for path in ends if path not in opened and path.rpartition(".")[0] in opened), "")
        around = [most[path] for path in blocks if own.startswith(f"{path}.") and path in most]
        return own if len(traced.crossing[i]) <= min(around, default=MOST_CROSSING) else ""  # not beside a residual

    found: dict[int, str] = {}
    for i, step in enumerate(traced.steps[:-1]):
        name = piece(i)
        if traced.crossing[i] == [step] and _is_tensor(step) and not traced.every_piece:
            found[i] = ""
        elif (name if traced.every_piece else name in blocks) and _may_cross_unasked(i, traced):
            found[i] = name
    return found


def _after(pieces: Collection[str], traced: Traced) -> dict[int, str]:
    """Return the last steps of these modules, where tensors can cross."""
    ends = {i: path for i, paths in enumerate(traced.ends) for path in paths if path in pieces}
    return {i: path for i, path in ends.items() if _can_cross(i, traced)}


def _may_cross_unasked(i: int, traced: Traced) -> bool:
    """Return whether a few tensors cross after this step: no real-valued input, and the newest has a row a sample."""
    alive = traced.crossing[i]
    if not alive or len(alive) > MOST_CROSSING or any(traced.is_raw(node) for node in alive):
        return False
    newest = alive[-1].meta.get("val")
    per_sample = not isinstance(newest, Tensor) or (newest.dim() > 0 and not isinstance(newest.shape[0], int))
    return per_sample and _can_cross(i, traced)


def _end_of(path: str, traced: Traced, kind: str) -> int:
    """Return the last step of the last call of a module."""
    found = [i for i, ends in enumerate(traced.ends) if path in ends]
    if not found:
        raise CutError(f"{kind} has no module {path!r} to cut after, or its forward does not call it.")
    if len(found) > 1:
        raise CutError(
            f"{kind} cannot be cut after {path!r}: it runs {len(found)} times. "
            "Cut after a module that contains all of its calls."
        )
    if not _can_cross(found[-1], traced):
        raise CutError(
            f"{kind} cannot be cut after {path!r}: something other than a tensor, such as a size, is needed later. "
            "Give a batch of inputs, Split(..., sample=x): torch.export reads sizes anew."
        )
    return found[-1]


def _can_cross(i: int, traced: Traced) -> bool:
    """Return whether the values alive after this step can cross, and sizes that are needed later can be read there."""
    alive = traced.crossing[i]
    if not alive or not all(_is_tensor(node) for node in alive):
        return False
    later = traced.steps[i + 1 :]
    sizes = {node for step in later for node in _sizes(step.all_input_nodes, traced)}
    early = {node for node in sizes if node.args[0] not in set(later)}
    return all(_read_size(node, alive) is not None for node in early)


def _sizes(nodes: Iterable[fx.Node], traced: Traced) -> set[fx.Node]:
    """Return the sizes on which these nodes depend through values that are computed again."""
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if node in traced.recomputed]
    while waiting:
        node = waiting.pop()
        if is_size(node):
            found.add(node)
        else:
            waiting += [other for other in node.all_input_nodes if other in traced.recomputed]
    return found


def is_size(node: fx.Node) -> bool:
    """Return whether a node reads the size of a tensor that may differ from batch to batch."""
    return node.target is torch.ops.aten.sym_size.int


def _read_size(size: fx.Node, tensors: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return one of these tensors, and its dimension, that has this size for every batch."""
    for node in tensors:
        for dimension, other in enumerate(node.meta["val"].shape):
            if not isinstance(other, int) and str(other) == str(size.meta["val"]):
                return node, dimension
    return None


def _is_tensor(node: fx.Node) -> bool:
    """Return whether a value is a tensor; in a symbolic trace: one that is indexed by integers is a tuple."""
    if "val" in node.meta:
        return isinstance(node.meta["val"], Tensor)
    indexed = any(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)
    return not indexed and not _is_number(node)


def _is_number(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _NUMBERS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    inputs = node.all_input_nodes
    return node.target in (operator.getitem, *_ARITHMETIC) and bool(inputs) and all(_is_number(n) for n in inputs)


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod)


def names_of(crossing: list[fx.Node], masks: Collection[fx.Node]) -> dict[fx.Node, str]:
    """Return the names of several tensors in the dict that crosses: the newest that is no mask is the hidden state."""
    used: set[str] = {HIDDEN}
    hidden = next((node for node in reversed(crossing) if node not in masks), crossing[-1]) if crossing else None
    return {node: HIDDEN if node is hidden else _unique(_role(node), used) for node in crossing}


def _role(node: fx.Node) -> str:
    value = node.meta.get("val")
    is_mask = isinstance(value, Tensor) and value.dtype == torch.bool
    return str(node.target) if node.op == "placeholder" else "mask" if is_mask else node.name


def _graph_of(
    traced: Traced, piece: list[fx.Node], start: list[fx.Node], masks: Collection[fx.Node], is_first: bool
) -> fx.Graph:
    """Return the steps of a piece as a graph of one input, `x`: what the piece before hands over, or the model's.

    Among several tensors that cross, masks have no gradient.
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    known: dict[fx.Node, fx.Node] = {}
    given = traced.inputs if is_first else start
    if is_first:
        names = tuple(str(node.target) for node in given)
        if traced.by_name:
            known = {n: graph.call_function(named, (x, name, names)) for n, name in zip(given, names, strict=True)}
        else:
            known[given[0]] = x if reads_dict(given[0]) else graph.call_function(alone, (x, names))
    elif len(start) > 1:
        known = {
            node: graph.call_function(operator.getitem, (x, name)) for node, name in names_of(given, masks).items()
        }
        known |= {node: graph.call_function(received, (known[node],)) for node in given if node in masks}
    else:
        known[given[0]] = x
    first_tensor = known[given[0]]

    def local(node: fx.Node) -> fx.Node:
        if node not in known:  # a parameter, a buffer, or a value that is computed where it is needed
            known[node] = size(node) if is_size(node) else copied(node)
        return known[node]

    def size(node: fx.Node) -> fx.Node:
        place = (node.all_input_nodes[0], node.args[1])
        tensor, dimension = place if place[0] in known else _read_size(node, given) or place
        return graph.call_function(
            operator.getitem, (graph.call_function(getattr, (known[tensor], "shape")), dimension)
        )

    def copied(node: fx.Node) -> fx.Node:
        new = graph.node_copy(node, local)
        follow_device(new, first_tensor)
        return new

    for node in piece:
        known[node] = copied(node)
    last = piece[-1]
    if last.op != "output":
        crossing = traced.crossing[traced.steps.index(last)]
        if len(crossing) > 1:
            known |= {node: graph.call_function(sent, (known[node],)) for node in crossing if node in masks}
        out = {name: known[node] for node, name in names_of(crossing, masks).items()}
        graph.output(out if len(out) > 1 else known[crossing[0]])
    return graph


def follow_device(node: fx.Node, tensor: fx.Node) -> None:
    """Let a node that names a device take that of a tensor when it runs, so that a graph runs anywhere."""
    place: list[fx.Node] = []

    def here(value: Any) -> Any:
        if not isinstance(value, torch.device):
            return value
        if not place:
            with node.graph.inserting_before(node):
                place.append(node.graph.call_function(getattr, (tensor, "device")))
        return place[0]

    node.args, node.kwargs = map_aggregate(node.args, here), map_aggregate(node.kwargs, here)


def _referred(model: nn.Module, traced: Traced, graph: fx.Graph) -> dict[str, Any]:
    """Return what the nodes of a graph refer to, by name."""
    targets = [str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")]
    return {t: traced.extras[t] if t in traced.extras else _attribute(model, t) for t in targets}


def _attribute(model: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(model.get_submodule(path), name)


def _unique(stem: str, used: set[str]) -> str:
    name = next(n for n in (stem, *(f"{stem}_{i}" for i in range(1, len(used) + 2))) if n not in used)
    used.add(name)
    return name


def _named_by(node: fx.Node) -> str:
    """Return the name of the module or function that ends a unit."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return str(node.target) if node.op in ("call_module", "call_method") else node.name
