"""The graph of a forward pass by torch.export, for models that torch.fx cannot trace; it needs sample inputs.

The graph holds for any batch size. Its calls are functions that Python knows (`F.dropout`, not `aten.dropout`), its
values keep their names in the model, and it runs on the device of its input: it is used as a graph of torch.fx is.
"""

import contextlib
import copy
import inspect
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cutlayer.core import tree
from cutlayer.core.checks import reason
from cutlayer.core.torch_private import is_inside_vmap, is_random, mutates
from cutlayer.errors import CutError
from cutlayer.split.accepted import ChangedError, constant_attributes
from cutlayer.split.calling import call, function_name, takes
from cutlayer.split.generators import kept
from cutlayer.split.graphs import Traced, follow_device, is_size
from cutlayer.split.padding import embedding

aten, higher_order = torch.ops.aten, torch.ops.higher_order
PREFIX = "model."  # of every name, from the class `Called`


class Called(nn.Module):
    """A model as a function of one input, a tensor or a dict; it tells the structure of its output."""

    def __init__(self, model: nn.Module, tell: Callable[[tree.Structure], None]) -> None:
        super().__init__()
        self.model, self.tell = model, tell

    def forward(self, x: Any) -> Any:
        with constant_attributes(self.model):  # torch.export puts them back when it is done
            out = call(self.model, x)
        self.tell(tree.flatten(out)[0])
        return out


def exported(model: nn.Module, sample: Any) -> Traced:
    """Return the graph of a model in its present mode, whose attributes may change in the first pass only."""
    try:
        return _exported(model, sample)
    except ChangedError:
        settled = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        with kept(()), torch.no_grad(), contextlib.suppress(Exception):
            call(settled, sample)
        return _exported(settled, sample)


def _exported(model: nn.Module, sample: Any) -> Traced:
    structures: list[tree.Structure] = []
    called = Called(model, structures.append)
    few, batch = tree.map(_three_rows, sample), torch.export.Dim("batch")
    try:
        with _silence(), torch.enable_grad():
            sizes = tree.map(lambda _: {0: batch}, few)
            program = torch.export.export(called, (few,), dynamic_shapes=(sizes,), strict=False)
    except CutError:
        raise
    except Exception as error:  # a forward may do anything
        kind = type(model).__name__
        if isinstance(sample, dict) and not takes(model, sample):
            names, given = ", ".join(inspect.signature(model.forward).parameters), ", ".join(sample)
            raise CutError(f"{kind} takes the inputs {names}, but the sample has {given}: rename those.") from error
        raise CutError(
            f"{kind} cannot be cut because torch.export cannot trace its forward ({_why(error)}). "
            "Write it as nn.Sequential or give it a units() method."
        ) from error
    graph, extras = _unlifted(program)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    recomputed, early = _independent(graph, parameters, extras)
    _simplify(graph)
    for inner in extras.values():
        if isinstance(inner, fx.GraphModule):
            _make_portable(inner)
    (out,) = (node for node in graph.nodes if node.op == "output")
    out.args = (tree.unflatten(structures[-1], out.args[0]),)
    return Traced(graph, isinstance(sample, dict), extras, recomputed, early, every_piece=True)


def _three_rows(value: Tensor) -> Tensor:
    """Return three samples: torch.export would take a batch of 0 or 1 for a constant."""
    return torch.cat([value[:1].detach()] * 3) if len(value) < 3 else value[:3].detach()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep torch from printing a graph that it cannot finish: the error says why."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


def _why(error: Exception) -> str:
    """Return the kind of an error, its first line, and where in the model it happened."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        lines.append((file.rpartition("/")[2], trace.tb_lineno, "/torch/" in file or "/cutlayer/split/" in file))
        trace = trace.tb_next
    own = [f", {file} line {line}" for file, line, foreign in lines if not foreign]
    what = f"{type(error).__name__}: {reason(error).rstrip('. ')}"
    if "DataDependent" in what:
        what = "a branch depends on the values of tensors"
    elif "Constraints violated (batch)" in what:
        what = "it works for one batch size only"
    return f"{what}{own[-1] if own else ''}"


def _unlifted(program: torch.export.ExportedProgram) -> tuple[fx.Graph, dict[str, Any]]:
    """Return a graph that reads values by their names in the model; and its constants and inner graphs by name."""
    signature, graph = program.graph_signature, program.graph
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    extras: dict[str, Any] = {}
    for node in list(graph.nodes):
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {
            key: (path.removeprefix(PREFIX), kind) for key, (path, kind) in stack.items() if path.startswith(PREFIX)
        }
        if node.op == "get_attr":
            name = f"inner_{node.target}"
            extras[name] = program.graph_module.get_submodule(str(node.target))
            node.target = name
        elif node.op == "placeholder" and (node.name in named or node.name in constants):
            if node.name in constants:
                name = f"constant_{node.name}"
                extras[name] = program.constants[constants[node.name]]
            else:
                name = named[node.name].removeprefix(PREFIX)
            with graph.inserting_before(node):
                read = graph.create_node("get_attr", name)
            read.meta = node.meta
            node.replace_all_uses_with(read)
            graph.erase_node(node)
        elif node.op == "placeholder":
            node.target = node.target.removeprefix("x_")  # an item of the dict x
    return graph, extras


def _independent(
    graph: fx.Graph, parameters: set[str], extras: dict[str, Any]
) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """Return the calls that depend on constants and sizes alone, and those that depend on inputs, too.

    Neither depend on parameters or random numbers, and nothing writes into them.
    """
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if mutates(node.target):
            changed |= {node, *_ancestors(node.args[0])}
    constant: set[fx.Node] = set()
    early: set[fx.Node] = set()
    for node in graph.nodes:
        is_read = node.op == "get_attr" and node.target not in parameters
        is_call = node.op == "call_function" and not _draws(node, extras)
        if node.op == "placeholder":
            early.add(node)
        elif node not in changed and (
            is_read or (is_call and (is_size(node) or constant.issuperset(node.all_input_nodes)))
        ):
            constant.add(node)
        elif node not in changed and is_call and (constant | early).issuperset(node.all_input_nodes):
            early.add(node)
    return _calls(constant), _calls(early)


def _calls(nodes: set[fx.Node]) -> frozenset[fx.Node]:
    return frozenset(node for node in nodes if node.op == "call_function")


def _ancestors(node: Any) -> set[fx.Node]:
    """Return the tensors of which a value may be a view; sizes are numbers, which nothing changes."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = waiting.pop()
        if isinstance(new, fx.Node) and new not in found and not isinstance(new.meta.get("val"), int | torch.SymInt):
            found.add(new)
            waiting += new.all_input_nodes
    return found


def _draws(node: fx.Node, extras: dict[str, Any]) -> bool:
    """Return whether a call, or one of the inner graphs that it runs, draws random numbers."""
    inner = [extras[other.target] for other in node.all_input_nodes if other.target in extras]
    graphs = [module.graph for module in inner if isinstance(module, fx.GraphModule)]
    called = [node.target, *(other.target for graph in graphs for other in graph.nodes)]
    return any(is_random(target) for target in called)


def _simplify(graph: fx.Graph) -> None:
    """Remove assertions and dead code, and call Python's functions where a unit must see what they do."""
    for node in list(graph.nodes):
        if node.op == "call_function" and function_name(node.target).startswith(("_assert", "sym_constrain")):
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        acts = mutates(node.target) or node.target in UPDATES
        if not node.users and node.op in ("call_function", "get_attr") and not acts:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and (replace := REPLACED.get(node.target)) is not None:
            node.target, node.args, node.kwargs = replace(node)


def _make_portable(module: fx.GraphModule) -> None:
    """Let an inner graph run on the device of its first input."""
    _simplify(module.graph)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in list(module.graph.nodes):
        if inputs:
            follow_device(node, inputs[0])
    module.recompile()
    for inner in module.children():
        if isinstance(inner, fx.GraphModule):
            _make_portable(inner)


def with_gradients(enabled: bool, body: Callable[..., Any], *args: Any) -> Any:
    """Run an inner graph with gradients switched on or off."""
    with torch.set_grad_enabled(enabled):
        return body(*args)


def with_autocast(device: str, dtype: Any, enabled: bool, cached: bool, body: Callable[..., Any], *args: Any) -> Any:
    """Run an inner graph with its own autocast."""
    place = next((a.device.type for a in args if isinstance(a, Tensor) and not a.is_meta), device)
    with torch.autocast(place, dtype=dtype, enabled=enabled, cache_enabled=cached):
        return body(*args)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Attention; inside vmap without fused kernels, which cannot be stacked, nor give the gradient of a bias."""
    with sdpa_kernel(SDPBackend.MATH) if is_inside_vmap() else contextlib.nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)


Replaced = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _same(function: Callable[..., Any]) -> Callable[[fx.Node], Replaced]:
    return lambda node: (function, node.args, dict(node.kwargs))


def _in_place(node: fx.Node) -> Replaced:
    return F.dropout, (*node.args, True), {}


def _channels(node: fx.Node) -> Replaced:
    by_rank = {2: F.dropout1d, 3: F.dropout1d, 4: F.dropout2d, 5: F.dropout3d}
    return by_rank[node.meta["val"].dim()], node.args, {}


def _batch_norm(node: fx.Node) -> Replaced:
    x, weight, bias, mean, var, training, momentum, eps, _ = node.args
    return F.batch_norm, (x, mean, var, weight, bias, training, momentum, eps), {}


UPDATES = (aten.batch_norm.default, aten.instance_norm.default)  # of running statistics, of which no schema tells
REPLACED: dict[Any, Callable[[fx.Node], Replaced]] = {
    aten.dropout.default: _same(F.dropout),
    aten.dropout_.default: _in_place,
    aten.feature_dropout.default: _channels,
    aten.alpha_dropout.default: _same(F.alpha_dropout),
    aten.feature_alpha_dropout.default: _same(F.feature_alpha_dropout),
    aten.scaled_dot_product_attention.default: _same(scaled_dot_product_attention),
    aten.rrelu.default: lambda node: (F.rrelu, node.args[:4], {}),
    aten.embedding.default: _same(embedding),
    aten.rand.default: _same(torch.rand),
    aten.batch_norm.default: _batch_norm,
    higher_order.wrap_with_set_grad_enabled: _same(with_gradients),
    higher_order.wrap_with_autocast: _same(with_autocast),
}
