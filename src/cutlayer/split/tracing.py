"""The graph of a forward pass by torch.fx, without running it."""

import functools
import inspect
import operator
from collections.abc import Callable, Collection
from typing import Any

from torch import fx, nn

from cutlayer.split.calling import main_output
from cutlayer.split.graphs import Traced


def traced(model: nn.Module, inputs: Collection[str] | None, places: Collection[str]) -> Traced:
    """Return the graph of a model's forward; a forward with several inputs takes a dict of them.

    `inputs` are the names of those that come as a dict, by default the required ones if there are several. The graph
    goes into the modules that contain one of these places.
    """
    required = _required(type(model).forward)
    graph = _Tracer(required if inputs is None else inputs, places).trace(model)
    graph.eliminate_dead_code(lambda node: node.target is not operator.getitem)  # drop unused items of tuples
    reads = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    constants = {name: getattr(model, name) for name in reads if name.startswith("_tensor_constant")}
    return Traced(graph, by_name=len(required) > 1 if inputs is None else True, extras=constants)


class _Tracer(fx.Tracer):
    """Traces a forward with these inputs; others keep their defaults."""

    proxy_buffer_attributes = True  # read a buffer when the unit runs, not when it is traced

    def __init__(self, inputs: Collection[str], places: Collection[str]) -> None:
        super().__init__()
        self._inputs, self._places = inputs, places

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        inputs = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}

        @functools.wraps(root_fn)
        def forward(root: nn.Module) -> Any:
            return main_output(root_fn(root, **inputs))

        return forward, [self.root]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inside = f"{module_qualified_name}."
        opened = any(place.startswith(inside) for place in self._places)
        return not opened and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if type(m) is nn.TransformerEncoder and not self.is_leaf_module(m, self.path_of_module(m)):
            forward = functools.partial(_layer_by_layer, m)
        return super().call_module(m, forward, args, kwargs)


def _layer_by_layer(encoder: nn.TransformerEncoder, src: Any, **masks: Any) -> Any:
    """Run an encoder without masks: what its forward does besides looks at values, which tracing cannot."""
    if any(mask is not None for mask in masks.values()):
        raise TypeError("an nn.TransformerEncoder with masks is traced as a whole only")
    for layer in encoder.layers:
        src = layer(src)
    return src if encoder.norm is None else encoder.norm(src)


def _required(forward: Callable[..., Any]) -> list[str]:
    _, *parameters = inspect.signature(forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty] or [p.name for p in named[:1]]
