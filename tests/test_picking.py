"""Specifies functions in which convolutions of 1x1 that stride are given only the pixels that they read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import agree
from test_batch_norm import called, drawn, pictures
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from cutlayer.engines.graph import compiling
from cutlayer.engines.graph.kernels.picking import CONVOLUTION, with_picked_pixels
from cutlayer.models.resnet import resnet18

PICKED = ({"stride": 2}, {"stride": (3, 1)}, {"stride": 2, "groups": 2}, {"stride": 2, "bias": True})
LEFT = ({}, {"stride": 2, "padding": 1}, {"stride": 2, "side": 3}, {"stride": 2, "side": 3, "padding": 1})


def convolution(stride: Any = 1, side: int = 1, bias: bool = False, groups: int = 1, **options: Any) -> Any:
    """A function of images, and of the kernel and bias that come with it."""
    weight, shift = drawn(6, 4 // groups, side, side, seed=1), drawn(6, seed=2)

    def run(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.conv2d(2 * x, weight, shift if bias else None, stride, groups=groups, **options)

    return run, weight, shift


def rewritten(fn: Any, *given: Tensor) -> GraphModule:
    module = with_picked_pixels(make_fx(fn, pre_dispatch=True)(*given))
    module.graph.lint()
    return module


def strides(module: GraphModule) -> list[list[int]]:
    return [node.args[3] for node in module.graph.nodes if node.target is CONVOLUTION and len(node.args) > 3]


def results(fn: Any, *values: Tensor) -> list[Tensor]:
    given = [v.clone().requires_grad_() for v in values]
    out = fn(*given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("options", PICKED, ids=str)
@pytest.mark.parametrize("shape", ((3, 4, 6, 8), (2, 4, 7, 5), (2, 4, 1, 1)))
def test_no_convolution_of_1x1_strides_and_all_gradients_are_the_same(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    run, *values = convolution(**options)
    module = rewritten(run, pictures(*shape), *values)
    assert strides(module) == [[1, 1]]
    agree(results(module, pictures(*shape), *values), results(run, pictures(*shape), *values), 1e-12)


@pytest.mark.parametrize("options", LEFT, ids=str)
def test_every_other_convolution_is_left_as_it_is(options: dict[str, Any]) -> None:
    run, *values = convolution(**options)
    given = pictures(2, 4, 6, 6), *values
    before = make_fx(run, pre_dispatch=True)(*given)
    assert rewritten(run, *given).code == before.code


def test_the_three_shortcuts_of_a_residual_network_are_picked_and_nothing_else() -> None:
    run, values = called(resnet18(width=4).to(memory_format=torch.channels_last))
    x = pictures(2, 3, 16, 16, dtype=torch.float32)
    before = strides(make_fx(run, pre_dispatch=True)(x, *values))
    assert before.count([2, 2]) == 6
    assert strides(rewritten(run, x, *values)).count([2, 2]) == 3


def test_compiled_functions_have_their_pixels_picked(monkeypatch: pytest.MonkeyPatch, eager: list[int]) -> None:
    run, *values = convolution(stride=2)
    given = pictures(3, 4, 6, 8), *values
    sizes = []
    for places in ((), ("cpu",)):
        monkeypatch.setattr(compiling, "REWRITTEN_ON", places)
        compiling._compiled.cache_clear()
        with compiling.compiling():
            agree(results(compiling.compiled(run), *given), results(run, *given), 1e-12)
        sizes.append(eager[-1])
    assert sizes[1] == sizes[0] + 3
