"""Specifies batch normalisation with a sum and a ReLU as one operation, and the functions that are given it."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import agree, images, resnet
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from cutlayer.engines.graph import compiling
from cutlayer.engines.graph.compiling import Compiled
from cutlayer.engines.graph.kernels import batch_norm as kernels
from cutlayer.engines.graph.kernels import replacing
from cutlayer.engines.graph.kernels.batch_norm import batch_norm
from cutlayer.engines.graph.kernels.replacing import with_own_norms
from cutlayer.models.resnet import resnet18

KINDS = tuple(product((False, True), (False, True)))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
OWN = torch.ops.cutlayer.batch_norm.default


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "REWRITTEN_ON", ("cpu",))


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pictures(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return drawn(*shape, dtype=dtype, seed=seed).contiguous(memory_format=torch.channels_last)


def by_torch(x: Tensor, residual: Tensor | None, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, mean, var, momentum, eps, relu = values
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    y = y if residual is None else y + residual
    return y.relu() if relu else y, mean, var


def by_own(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, _, _, mean, var = batch_norm(*given)
    return y, mean, var


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("adds", "relu"), KINDS)
@pytest.mark.parametrize("shape", ((4, 6, 3, 5), (3, 1, 2, 2), (5, 7, 1, 1)))
def test_values_and_gradients_are_those_of_torchs_normalisation(
    shape: tuple[int, ...], adds: bool, relu: bool, dtype: torch.dtype
) -> None:
    def results(fn: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        x = (5 + 3 * pictures(*shape, dtype=dtype)).requires_grad_()
        residual = pictures(*shape, dtype=dtype, seed=1).requires_grad_() if adds else None
        weight, bias, mean = (drawn(shape[1], dtype=dtype, seed=k) for k in (2, 3, 4))
        leaves = [a for a in (x, residual, weight.requires_grad_(), bias.requires_grad_()) if a is not None]
        y, *running = fn(x, residual, weight, bias, mean, mean.square() + 1, 0.3, 1e-3, relu)
        assert not any(a.requires_grad for a in running)
        return [y.detach(), *running, *torch.autograd.grad(y, leaves, pictures(*shape, dtype=dtype, seed=5))]

    agree(results(by_own), results(by_torch), TOLERANCE[dtype])


def test_the_operation_is_registered_as_torch_asks() -> None:
    x, residual = (pictures(2, 3, 4, 4, seed=k).requires_grad_() for k in (0, 1))
    weight, bias = (drawn(3, seed=k).requires_grad_() for k in (2, 3))
    for adds, relu in KINDS:
        given = x, residual if adds else None, weight, bias, torch.zeros(3).double(), torch.ones(3).double()
        torch.library.opcheck(batch_norm, (*given, 0.1, 1e-5, relu))


def test_nan_stays_nan_through_the_relu() -> None:
    x = pictures(2, 1, 2, 2).fill_(torch.nan)
    ones = torch.ones(1, dtype=torch.float64)
    assert batch_norm(x, None, ones, ones, ones, ones, 0.1, 1e-5, True)[0].isnan().all()


@pytest.mark.parametrize("adds", (False, True))
def test_gradients_of_nan_inputs_are_torchs(adds: bool) -> None:
    def results(fn: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        x, bias = pictures(2, 2, 3, 3), drawn(2, seed=1).requires_grad_()
        x[0, 0, 0, 0] = torch.nan  # and so is all of the first channel
        shortcut = pictures(2, 2, 3, 3, seed=2).requires_grad_() if adds else None
        ones = torch.ones(2, dtype=torch.float64)
        y, *_ = fn(x, shortcut, ones, bias, ones, ones, 0.1, 1e-5, True)
        leaves = [a for a in (bias, shortcut) if a is not None]
        return list(torch.autograd.grad(y, leaves, pictures(2, 2, 3, 3, seed=3)))

    assert results(by_torch)[0][0] == pytest.approx(pictures(2, 2, 3, 3, seed=3)[:, 0].sum())
    agree(results(by_own), results(by_torch), 1e-12)


# -- functions that are given it ---------------------------------------------------------------------------------------


def traced(fn: Callable[..., Any], *given: Tensor) -> GraphModule:
    return with_own_norms(make_fx(fn, pre_dispatch=True)(*given))


def norms(module: GraphModule) -> tuple[list[tuple[bool, bool]], int]:
    """For each fused normalisation whether it adds and whether it ends in a ReLU; and how many of torch's are left."""
    own = [(node.args[1] is not None, node.args[-1]) for node in module.graph.nodes if node.target is OWN]
    return own, sum(node.target is replacing.NORM for node in module.graph.nodes)


def called(net: nn.Module) -> tuple[Callable[..., Any], list[Tensor]]:
    """The network as a function of its input and its values, which gives its output and its new buffers."""
    values = {k: v.detach() for k, v in (*net.named_parameters(), *net.named_buffers())}
    buffers = [k for k, _ in net.named_buffers()]

    def run(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip(values, given, strict=True))
        own |= {k: own[k].clone() for k in buffers}
        out = torch.func.functional_call(net, own, (x,))
        return out, *(own[k] for k in buffers)

    return run, list(values.values())


def compared(net: nn.Module, x: Tensor, tolerance: float) -> GraphModule:
    """Assert that the function gives the same with the fused operation, and return the fused one."""
    run, values = called(net.to(memory_format=torch.channels_last))
    module = traced(run, x, *values)
    module.graph.lint()
    found = []
    for fn in (module, run):
        leaves = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
        params = leaves[: len(list(net.parameters()))]
        given = [*params, *(v.detach() for v in leaves[len(params) :])]
        out, *buffers = fn(x, *given)
        assert not any(a.requires_grad for a in buffers)
        found.append([out.detach(), buffers, torch.autograd.grad(out.square().sum(), params)])
    agree(*found, tolerance)
    return module


def test_every_normalisation_of_a_residual_network_is_replaced() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = resnet18(width=4).double()
    module = compared(net, pictures(4, 3, 16, 16), 1e-10)
    own, left = norms(module)
    assert left == 0 and len(own) == 20
    assert (own.count((True, True)), own.count((False, True)), own.count((False, False))) == (8, 9, 3)
    assert not any(node.target is torch.ops.aten.copy_.default for node in module.graph.nodes)  # of running values


class Twice(nn.Module):
    """Two users of one normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y.relu() + y


class TwiceAfterSum(Twice):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y + x).relu() * y


class InPlace(Twice):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y += x
        return F.relu(y, inplace=True)


class Shared(Twice):
    """One layer that is used twice: its running values take the two batches one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(x)
        return (first + self.norm(2 * x + 1)).relu()


class ReadBetween(Twice):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        seen = self.norm.running_mean.sum()
        return y.relu() + seen


class ChangedBetween(Twice):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = 2.0 * x
        total = self.norm(x) + shortcut
        shortcut[:, :1].zero_()
        return total.relu() + shortcut


class OwnSum(Twice):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.add(y, x, alpha=2).relu() + (x + self.norm(x)[:1]).relu() + (self.norm(x) + 1).relu()


class ViewedBefore(Twice):
    """A view from before the normalisation shows what that wrote."""

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm.running_mean[:1]
        return self.norm(x).relu() + seen


class IntoShortcut(Twice):
    """A view of the shortcut shows the sum."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = 2.0 * x
        seen = shortcut[:1]
        shortcut += self.norm(x)
        return shortcut.relu() + seen


@pytest.mark.parametrize(
    ("net", "expected"),
    (
        (Twice(), [(False, False)]),
        (TwiceAfterSum(), [(False, False)]),
        (InPlace(), [(True, True)]),
        (Shared(), [(False, False), (True, True)]),
        (ReadBetween(), [(False, False)]),
        (ChangedBetween(), [(True, False)]),
        (OwnSum(), [(False, False)] * 3),
        (ViewedBefore(), [(False, True)]),
        (IntoShortcut(), [(False, False)]),
    ),
    ids=lambda value: type(value).__name__,
)
def test_only_what_nobody_else_sees_is_drawn_in(net: Twice, expected: list[tuple[bool, bool]]) -> None:
    net.double().norm.weight.data.uniform_(0.5, 1.5)
    assert norms(compared(net, pictures(4, 3, 5, 5), 1e-10)) == (expected, 0)


@pytest.mark.parametrize(
    "norm",
    (
        nn.BatchNorm2d(3).eval(),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3).bfloat16(),
    ),
    ids=("eval", "no weights", "no running values", "low precision"),
)
def test_other_normalisations_are_left_as_they_are(norm: nn.Module) -> None:
    dtype = next((p.dtype for p in norm.parameters()), torch.float32)
    run, values = called(nn.Sequential(norm, nn.ReLU()))
    assert norms(traced(run, pictures(4, 3, 5, 5, dtype=dtype), *values)) == ([], 1)


def test_images_that_do_not_lie_channels_last_are_left_alone() -> None:
    run, values = called(nn.BatchNorm2d(3).double())
    assert norms(traced(run, drawn(4, 3, 5, 5), *values)) == ([], 1)
    assert norms(traced(run, pictures(4, 3, 5, 5), *values)) == ([(False, False)], 0)


def normed(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return torch.batch_norm(x, weight, weight, mean, var, True, 0.1, 1e-5, True)


def ones_of(x: Tensor) -> tuple[Tensor, ...]:
    """The weight and the running values of a normalisation."""
    return tuple(x.new_ones(x.shape[1]) for _ in range(3))


@pytest.mark.parametrize(
    "shortcut",
    (
        pictures(4, 3, 5, 5, seed=1),
        pictures(4, 3, 1, 1, dtype=torch.float32, seed=1),
        drawn(4, 3, 5, 5, dtype=torch.float32, seed=1),
    ),
    ids=("type", "shape", "order"),
)
def test_a_shortcut_of_another_form_is_added_apart(shortcut: Tensor) -> None:
    def run(x: Tensor, shortcut: Tensor, *values: Tensor) -> Tensor:
        return (normed(x, *values) + shortcut).relu()

    x = pictures(4, 3, 5, 5, dtype=torch.float32)
    module = traced(run, x, shortcut, *ones_of(x))
    assert norms(module) == ([(False, False)], 0)
    agree(module(x, shortcut, *ones_of(x)), run(x, shortcut, *ones_of(x)), TOLERANCE[torch.float32])


def test_one_value_per_channel_is_left_to_torch() -> None:
    x, two = pictures(1, 3, 1, 1), pictures(2, 3, 1, 1)
    module, values = traced(normed, x, *ones_of(x)), ones_of(x)
    assert norms(module) == ([], 1) and norms(traced(normed, two, *ones_of(two))) == ([(False, False)], 0)
    agree(module(x, *values), normed(x, *ones_of(x)))
    assert values[-1].isnan().all()


def test_weights_that_do_not_lie_side_by_side_are_left_alone() -> None:
    def run(x: Tensor, weight: Tensor, *running: Tensor) -> Tensor:
        return normed(x, weight[::2], *running)

    x, (_, *running) = pictures(4, 3, 5, 5), ones_of(pictures(4, 3, 5, 5))
    assert norms(traced(run, x, drawn(6), *running)) == ([], 1)


def test_running_values_of_the_caller_are_written_to() -> None:
    def run(*given: Tensor) -> Tensor:
        return normed(*given).relu()

    x, weight = pictures(4, 3, 5, 5), drawn(3)
    running = [[torch.zeros(3).double(), torch.ones(3).double()] for _ in range(2)]
    module = traced(run, x, weight, *(a.clone() for a in running[0]))
    assert norms(module) == ([(False, True)], 0)
    agree(module(x, weight, *running[0]), run(x, weight, *running[1]), 1e-12)
    agree(*running, 1e-12)
    assert running[0][0].abs().sum() > 0


@pytest.fixture
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@pytest.mark.usefixtures("autocast")
def test_under_autocast_statistics_stay_in_single_precision(eager: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.dtype] = []
    plain = kernels.plain_forward
    monkeypatch.setattr(kernels, "plain_forward", lambda x, *rest: (taken.append(x.dtype), plain(x, *rest))[1])
    net = resnet(dtype=torch.float32).to(memory_format=torch.channels_last)
    x = images(6, torch.float32).x.contiguous(memory_format=torch.channels_last)
    run, values = called(net)
    found = [fn(x, *values) for fn in (Compiled(run), run)]
    assert len(eager) == 1 and taken == [torch.bfloat16] * 9
    for mine, torchs in zip(*found, strict=True):
        assert mine.dtype == torchs.dtype
        agree(mine, torchs, 0.03)


@pytest.mark.parametrize("adds", (False, True))
def test_a_normalisation_without_gradients_does_not_join_what_has_them(eager: list[int], adds: bool) -> None:
    def run(x: Tensor, shortcut: Tensor, *values: Tensor) -> Tensor:
        with torch.no_grad():
            y = normed(x, *values)
        return (y + shortcut if adds else y).relu() * shortcut

    found = []
    for fn in (Compiled(run), run):
        x, shortcut = (pictures(4, 3, 5, 5, seed=k).requires_grad_() for k in (0, 1))
        weight, *running = ones_of(x)
        leaves = x, shortcut, weight.requires_grad_()
        y = fn(x, shortcut, weight, *running)
        gradients = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        found.append((y.detach(), gradients[1], [g is None for g in gradients]))
    assert len(eager) == 1 and found[1][-1] == [True, False, True]
    agree(*found, 1e-12)


def test_a_relu_outside_autocast_does_not_join_a_normalisation_inside() -> None:
    def run(x: Tensor, *values: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = normed(x, *values)
        return y.relu()

    x = pictures(4, 3, 5, 5, dtype=torch.float32)
    assert norms(traced(run, x, *ones_of(x))) == ([(False, False)], 0)
