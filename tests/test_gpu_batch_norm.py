"""Specifies the kernels of batch normalisation on a GPU: the plain formulas' numbers, and the same ones each time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_batch_norm import KINDS, called, norms
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cutlayer.engines.graph.compiling import Compiled
from cutlayer.engines.graph.kernels.batch_norm import (
    batch_norm,
    batch_norm_backward,
    computed_in,
    plain_backward,
    plain_forward,
)
from cutlayer.engines.graph.kernels.replacing import with_own_norms
from cutlayer.models.resnet import resnet18

pytestmark = pytest.mark.gpu

OF_A_NETWORK = ((32, 64, 32, 32), (32, 128, 16, 16), (32, 256, 8, 8), (32, 512, 4, 4))
ODD = ((3, 10, 5, 5), (3, 48, 5, 5), (3, 1, 5, 5), (4, 7, 1, 1), (7, 33, 19, 19), (5, 130, 31, 17))
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-5, torch.float64: 1e-12}  # of the largest number of a result


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def given(shape: tuple[int, ...], dtype: torch.dtype, adds: bool) -> tuple[Any, ...]:
    """Images far from zero, what is added, weight, bias, running values; and a gradient."""
    random = torch.Generator().manual_seed(0)

    def drawn(*of: int) -> Tensor:
        return torch.randn(of, generator=random, dtype=torch.float64).cuda()

    def pictures(offset: float = 0.0) -> Tensor:
        return (drawn(*shape) + offset).to(dtype).contiguous(memory_format=torch.channels_last)

    per_channel = [drawn(shape[1]).to(computed_in(dtype)) for _ in range(3)]
    values = pictures(3.0), pictures() if adds else None, *per_channel, per_channel[-1].square() + 1
    return *values, pictures()


def results(shape: tuple[int, ...], dtype: torch.dtype, adds: bool, relu: bool, own: bool) -> list[Tensor]:
    """Of both passes; the second one starts from the same values, whoever made the first."""
    forward, backward = (batch_norm, batch_norm_backward) if own else (plain_forward, plain_backward)
    *values, dy = given(shape, dtype, adds)
    x, _, weight, bias, *_ = values
    edge = plain_forward(*values, 0.1, 1e-5, False)[0].abs() < 1e-3
    dy = dy.masked_fill(edge, 0)  # rounding may decide there on which side of the ReLU's corner a number is
    first = forward(*values, 0.1, 1e-5, relu)
    y, mean, rstd, *_ = plain_forward(*values, 0.1, 1e-5, relu)
    return [*first, *backward(dy, x, y if adds and relu else None, weight, bias, mean, rstd, relu)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("adds", "relu"), KINDS)
@pytest.mark.parametrize("shape", (*OF_A_NETWORK, *ODD))
def test_the_kernels_compute_the_formulas_and_the_same_bits_each_time(
    shape: tuple[int, ...], adds: bool, relu: bool, dtype: torch.dtype
) -> None:
    expected = results(shape, dtype, adds, relu, own=False)
    found, again = (results(shape, dtype, adds, relu, own=True) for _ in range(2))
    for mine, same, plain in zip(found, again, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (plain.dtype, plain.shape, plain.stride())
        assert torch.equal(mine, same)
        if mine.numel():
            off = (mine.double() - plain.double()).abs().max() / plain.double().abs().max()
            assert off <= TOLERANCE[dtype]


@pytest.mark.parametrize("odd", (torch.nan, torch.inf))
@pytest.mark.parametrize("shape", (OF_A_NETWORK[0], OF_A_NETWORK[-1]))
def test_a_channel_with_no_number_is_told_of_by_all_its_values(shape: tuple[int, ...], odd: float) -> None:
    *values, _ = given(shape, torch.float32, adds=False)
    values[0][0, 0, 0, 0] = odd
    own, plain = (forward(*values, 0.1, 1e-5, True) for forward in (batch_norm, plain_forward))
    assert plain[0][:, 0].isnan().all() and plain[-1][0].isnan()
    assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(own, plain, strict=True))
    assert own[0][:, 0].isnan().all() and own[-1][0].isnan()  # a mean may be NaN where the plain one is infinite


def test_values_far_from_zero_keep_their_digits() -> None:
    x = torch.randn(32, 64, 16, 16, dtype=torch.float64, device="cuda").contiguous(memory_format=torch.channels_last)
    x, ones = (x + 1000).float(), torch.ones(64, device="cuda")
    _, mean, rstd, _, _ = batch_norm(x, None, ones, ones, ones, ones, 0.1, 0.0, False)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), exact.var((0, 2, 3), correction=0).rsqrt(), rtol=1e-5, atol=0)


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.usefixtures("exact_convolutions")
def test_a_compiled_residual_network_has_torchs_gradients_in_every_replay() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = resnet18(width=16).cuda().to(memory_format=torch.channels_last)
        x = torch.randn(8, 3, 32, 32).cuda().contiguous(memory_format=torch.channels_last)
    run, values = called(net)
    own, left = norms(with_own_norms(make_fx(run, pre_dispatch=True)(x, *values)))
    assert (len(own), left) == (20, 0)
    num = len(list(net.parameters()))
    leaves = [v.clone().requires_grad_(k < num) for k, v in enumerate(values)]

    def step(fn: Any) -> list[Tensor]:
        out, *buffers = fn(x, *leaves)
        return [out.detach(), *buffers, *torch.autograd.grad(out.square().mean(), leaves[:num])]

    expected, fast = step(run), Compiled(run)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step(fast)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=beside):
        found = step(fast)
    copies = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        copies.append([a.clone() for a in found])
    for mine, again, torchs in zip(*copies, expected, strict=True):
        assert torch.equal(mine, again)
        assert (mine - torchs).double().norm() <= 1e-2 * torchs.double().norm()
