"""Rewrite strided 1x1 convolutions of a traced function: pick out the pixels that they read first.

Shortcuts of residual networks are such convolutions. Without a stride they are matrix products, forwards and backwards;
with a stride, cuDNN uses slower kernels that go over all pixels.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
CONVOLUTION = _aten.conv2d.default
UNSAID: tuple[Any, ...] = (None, [1, 1], [0, 0])  # the defaults of bias, stride and padding
ROWS, COLUMNS, END = 2, 3, 2**63 - 1


def with_picked_pixels(traced: GraphModule) -> GraphModule:
    """Rewrite the function in place, so that no 1x1 convolution has a stride."""
    for node in list(traced.graph.nodes):
        if node.target is CONVOLUTION and _can_pick(node):
            _pick(traced, node)
    traced.recompile()
    return traced


def _can_pick(node: Node) -> bool:
    _, weight, _, stride, padding, *_ = _arguments(node)
    kernel = weight.meta.get("val") if isinstance(weight, Node) else None
    is_small = isinstance(kernel, Tensor) and kernel.shape[ROWS:] == (1, 1)
    return is_small and max(stride) > 1 and max(padding) == 0 and node.meta["val"].dim() == 4


def _arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments of a convolution, with the defaults of those that were left out."""
    return *node.args, *UNSAID[len(node.args) - 2 :]


def _pick(traced: GraphModule, node: Node) -> None:
    x, weight, bias, (down, across), *rest = _arguments(node)
    graph = traced.graph
    with graph.inserting_before(node):
        rows = graph.call_function(_aten.slice.Tensor, (x, ROWS, 0, END, down))
        pixels = graph.call_function(_aten.slice.Tensor, (rows, COLUMNS, 0, END, across))
        picked = graph.call_function(_aten.clone.default, (pixels,))  # contiguous, in the memory format of x
    node.args = picked, weight, bias, [1, 1], *rest
