"""Estimates of the convergence bound's constants: by hand, on average, and for one client or many side by side."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import images, resnet
from torch import Tensor, nn

from cutlayer.errors import ConfigError
from cutlayer.planning import estimate
from cutlayer.planning.probe import probe
from cutlayer.split import Split

UNITS = (("a", "b"), (), ("c", "absent"))
GRADIENTS = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0]]), "c": torch.tensor(2.0)}


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (out - y).square().mean()


def line(weight: float = 0.0) -> Split:
    """out = weight * x, in double precision."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    nn.init.constant_(net[0].weight, weight)
    return Split(net, 1, loss=half_square)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_squared_norm_of_each_unit() -> None:
    assert estimate.unit_norms(UNITS, GRADIENTS).tolist() == [26.0, 0.0, 4.0]
    assert estimate.unit_norms(UNITS, {}).tolist() == [0.0, 0.0, 0.0]


def test_noise_of_each_unit() -> None:
    other = {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([[0.0]]), "c": torch.tensor(5.0)}
    # differences (2, 0), 1 and -3; a batch of 8 makes 8 / 4 of their squares
    assert estimate.noise(UNITS, GRADIENTS, other, 8).tolist() == [10.0, 0.0, 18.0]


def test_smoothness_has_floors() -> None:
    change2 = torch.tensor([9.0, 0.0, 1.0, 1e-30, math.nan])
    distance2 = torch.tensor([4.0, 1.0, 0.0, 1e-22, 1.0])
    found = estimate.smoothness(change2, distance2)
    torch.testing.assert_close(found, torch.tensor([1.5, 1e-5, 1e-5, 1e-5, math.nan]), equal_nan=True)


def test_smoothing_ignores_what_is_not_finite() -> None:
    old, new = torch.tensor([2.0, 2.0, math.nan, 2.0]), torch.tensor([4.0, math.nan, 4.0, math.inf])
    assert estimate.smoothed(old, new, 0.75).tolist() == [2.5, 2.0, 4.0, 2.0]


def test_noise_is_unbiased_for_clients_side_by_side() -> None:
    """Gradients of 6 samples a client, with the variances 3 * 4 and 5 * 0.25 of two units; vmap runs 5000 clients."""
    random = torch.Generator().manual_seed(0)
    samples = {
        "a": 1 + 2 * torch.randn(5000, 6, 3, generator=random),
        "b": -3 + 0.5 * torch.randn(5000, 6, 5, generator=random),
    }
    first = {name: value[:, :3].mean(1) for name, value in samples.items()}
    second = {name: value[:, 3:].mean(1) for name, value in samples.items()}
    units = (("a",), ("b",))
    found = torch.vmap(lambda a, b: estimate.noise(units, a, b, 6))(first, second)
    assert found.shape == (5000, 2)
    # an estimate is sigma^2 times a chi-square of d degrees over d: its deviation is sigma^2 sqrt(2 / d)
    error = (found.mean(0) - torch.tensor([12.0, 1.25])).abs() / torch.tensor([12.0, 1.25])
    assert bool((error < 3 * torch.tensor([2 / 3, 2 / 5]).sqrt() / math.sqrt(5000)).all())
    alone = estimate.noise(units, *({n: v[7] for n, v in half.items()} for half in (first, second)), 6)
    torch.testing.assert_close(found[7], alone)


def test_all_estimates_run_under_vmap() -> None:
    squares = torch.tensor([[4.0, 1.0], [9.0, 4.0]])
    beta = torch.vmap(estimate.smoothness)(squares[:, 0], squares[:, 1])
    assert beta.tolist() == [2.0, 1.5]
    assert torch.vmap(lambda a, b: estimate.smoothed(a, b, 0.5))(beta, squares[:, 0]).tolist() == [3.0, 5.25]
    empty_unit = torch.vmap(lambda a: estimate.unit_norms((("a",), ()), {"a": a}))(squares)
    assert empty_unit.tolist() == [[17.0, 0.0], [97.0, 0.0]]


def test_probe_of_a_line_by_hand() -> None:
    """A sample's gradient at weight 0 is -y; the fifth sample is dropped."""
    bound = probe(line(), column(1, 1, 1, 1, 1), column(1, 3, 2, 6, 100), lr=0.1)
    assert bound.noise.tolist() == [4.0]  # halves -2 and -4: 4 * 2^2 / 4
    assert bound.slope.tolist() == [9.0]
    assert bound.gap == (1 + 9 + 4 + 36) / 8
    assert bound.beta == pytest.approx(1.0, rel=1e-12)
    assert (bound.lr, bound.target, bound.valid) == (0.1, None, True)


@pytest.mark.parametrize("lr", [1e-4, 0.3])
def test_beta_is_the_curvature_of_a_quadratic(lr: float) -> None:
    bound = probe(line(weight=2.0), column(3, 3), column(0, 0), lr=lr)
    assert bound.beta == pytest.approx(9.0, rel=1e-9)
    assert bound.valid is (lr < 1 / 9)


def test_probe_wants_a_label_for_each_input() -> None:
    with pytest.raises(ConfigError, match=r"^there are 2 inputs for 3 labels; give one label for each input$"):
        probe(line(), column(1, 1), column(2, 2, 2), lr=0.1)


def test_probe_of_a_flat_place_keeps_the_floor() -> None:
    bound = probe(line(weight=2.0), column(1, 1), column(2, 2), lr=0.1)
    assert (bound.beta, bound.slope.tolist(), bound.noise.tolist(), bound.gap) == (1e-5, [0.0], [0.0], 1e-12)


def test_probe_is_unbiased_on_a_quadratic() -> None:
    """Targets of variance 2.25: so is a sample's gradient, and G^2 of a batch of 8 is mean^2 + 2.25 / 8."""
    split, random = line(), torch.Generator().manual_seed(1)
    found = []
    for _ in range(600):
        y = 1 + 1.5 * torch.randn(8, 1, generator=random, dtype=torch.float64)
        bound = probe(split, torch.ones_like(y), y, lr=0.01)
        found.append((bound.noise[0], bound.slope[0]))
    noise, slope = np.mean(found, axis=0)
    assert abs(noise - 2.25) < 3 * 2.25 * math.sqrt(2 / 600)
    assert abs(slope - (1 + 2.25 / 8)) < 3 * math.sqrt((4 * 2.25 / 8 + 2 * (2.25 / 8) ** 2) / 600)


def test_slopes_are_those_of_plain_autograd() -> None:
    net, data = resnet(), images(12)
    bound = probe(Split(net, 1), data.x, data.y, lr=0.01)
    net.train()
    loss = F.cross_entropy(net(data.x), data.y)
    loss.backward()
    squares = {name: float(p.grad.square().sum()) for name, p in net.named_parameters() if p.grad is not None}
    assert bound.gap == pytest.approx(loss.item(), rel=1e-12)
    expected = [sum(squares[name] for name in names) for names in Split(net, 1).unit_params]
    assert bound.slope == pytest.approx(expected, rel=1e-9)
    assert len(bound.noise) == len(expected) == 5 and (bound.noise > 0).all()


def test_the_cut_and_the_clock_of_randomness_change_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), torch.arange(6) % 3
    weights, state = [p.clone() for p in net.parameters()], torch.get_rng_state()
    bounds = [probe(Split(net, cut), x, y, lr=0.1, key=key) for cut, key in ((0, 5), (2, 5), (0, 6))]
    assert bounds[0].slope.tolist() == bounds[1].slope.tolist() != bounds[2].slope.tolist()
    assert bounds[0].slope[1] == 0  # dropout trains nothing
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))


def test_mistakes() -> None:
    with pytest.raises(ConfigError) as told:
        probe(line(), column(1), column(1), lr=0.1)
    assert str(told.value) == ("a batch of 1 cannot be halved, which estimates the noise; give at least 2 samples")
    with pytest.raises(ConfigError) as told:
        probe(line(), column(1, 1), column(1, 1), lr=-0.1)
    assert str(told.value) == "lr is -0.1, but it must be a number above 0."
    with pytest.raises(ConfigError) as told:
        probe(line(), column(1, math.inf), column(1, 1), lr=0.1)
    assert str(told.value) == (
        "the gradients of Sequential are not finite on this batch, or after one step with lr 0.1; "
        "check the samples, or use a smaller lr"
    )
