"""Specifies HO-SFL's perturbed passes side by side: the same slopes to rounding, for the memory that is told."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import agree, images, resnet, run
from hybrid_worlds import ENGINES, PLAIN, P, hosfl, kept, same, seeds_of, smooth, states, take_turns, world
from torch import Tensor, nn

from cutlayer import methods, models, optim
from cutlayer.core import directions
from cutlayer.errors import ConfigError
from cutlayer.meters.memory import peak
from cutlayer.methods.hosfl import HybridOrder
from cutlayer.planning.devices import Device, Devices
from cutlayer.runs.stopping import Limits
from cutlayer.runs.training import Training
from cutlayer.split import Split

BENCH = Path(__file__).parents[1] / "bench"
FIVE = 5
GROUPS = ((0, 2), (0, 5), (1, 3), (3, 2), (5, 5))  # passes ahead, and at once


def of_five(net: nn.Module, cut: int = 1, **options: Any) -> HybridOrder:
    return methods.hosfl(model=Split(net, cut), client_opt=PLAIN, server_opt=PLAIN, perturbations=FIVE, **options)


def slopes(method: HybridOrder, x: Tensor) -> Tensor:
    """What a client finds with some gradient at the cut."""
    client, part, seeds = method.client, PLAIN.begin(method.model.initial()[0], 0), seeds_of(0, FIVE)
    z = client.forward(part, x, None)
    gradient = torch.randn(z.shape, generator=torch.Generator().manual_seed(5), dtype=z.dtype)
    return client.slopes(part, x, None, seeds, z, gradient, client.ahead(part, x, None, seeds))


class Drifting(nn.Module):
    """Writes what it sees into a buffer, and adds what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(x.mean(0))
        return x + self.seen


def frozen() -> nn.Module:
    net = resnet()
    models.freeze_norms(net)
    return net


def drifting() -> nn.Module:
    net = smooth()
    net[0].append(Drifting())  # type: ignore[operator]
    return net


def decoder() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from cutlayer.models.adapters import adapted
    from cutlayer.models.decoders import CausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, attn_implementation="eager"))
    return CausalLM(adapted(base, rank=2, alpha=4.0))


def texts() -> Tensor:
    x = torch.arange(4 * 12).reshape(4, 12)
    x[1, :5] = -1  # padding
    return x


# -- the same numbers --------------------------------------------------------------------------------------------------

NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear layer": (smooth, 1),
    "convolutions and frozen norms": (frozen, 2),
    "buffers that are written": (drifting, 1),
    "decoder with adapters": (decoder, 3),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-4}  # of the largest slope, with a smoothing of 0.001


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", NETS)
def test_slopes_are_the_same_to_rounding(name: str, dtype: torch.dtype) -> None:
    """Rounding of the activations is divided by the smoothing."""
    make, cut = NETS[name]
    net = make().to(dtype)
    x = texts() if name.startswith("decoder") else images(4, dtype).x
    one_by_one = slopes(of_five(net, cut), x)
    assert float(one_by_one.abs().min()) > 0
    for overlap, num in GROUPS:
        found = slopes(of_five(net, cut, overlap=overlap, side_by_side=num), x)
        assert found.dtype == torch.float64
        assert float((found - one_by_one).abs().max() / one_by_one.abs().max()) < BOUNDS[dtype]


def test_one_at_a_time_is_the_formula_to_the_bit() -> None:
    method, x = of_five(frozen(), 2), images(4).x
    part, lower = PLAIN.begin(method.model.initial()[0], 0), method.model.lower
    z = lower(part, x)[0]
    gradient = torch.randn(z.shape, generator=torch.Generator().manual_seed(5), dtype=z.dtype)
    there = [part._replace(params=directions.shifted(part.params, s, 1e-3)) for s in seeds_of(0, FIVE)]
    by_hand = torch.stack([((lower(moved, x)[0] - z) * gradient).sum() for moved in there])
    assert torch.equal(slopes(method, x), by_hand)


def test_a_group_is_one_pass_through_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    lower = Split.lower
    monkeypatch.setattr(Split, "lower", lambda self, *given: calls.append(1) or lower(self, *given))
    for (overlap, num), passes in {(0, 1): 5, (0, 2): 3, (0, 5): 1, (1, 3): 3, (3, 2): 3, (5, 5): 1}.items():
        calls.clear()
        slopes(of_five(smooth(), overlap=overlap, side_by_side=num), images(4).x)
        assert len(calls) == 1 + passes


def test_buffers_are_unchanged_by_perturbed_passes() -> None:
    method = of_five(drifting(), side_by_side=FIVE)
    part, x = PLAIN.begin(method.model.initial()[0], 0), images(4).x
    z = method.client.forward(part, x, None)
    method.client.slopes(part, x, None, seeds_of(0, FIVE), z, z)
    assert [(name, int(b.count_nonzero())) for name, b in part.buffers.items()] == [("0.3.seen", 0)]


@pytest.mark.parametrize(("overlap", "num"), [(0, 3), (0, 2), (2, 2)])
def test_engines_agree_on_whole_rounds(overlap: int, num: int) -> None:
    """Clients side by side outside, passes side by side inside; also with a smaller batch and momentum."""
    opt = optim.sgd(0.1, momentum=0.9)
    reference = run(world(hosfl(opt=opt), (9, 8, 3)), 4)
    for engine in ENGINES:
        found = run(world(hosfl(opt=opt, overlap=overlap, side_by_side=num), (9, 8, 3), engine=engine), 4)
        for a, b in ((found.client, reference.client), (found.server, reference.server)):
            agree(a.tree, b.tree, 1e-12)
        agree(found.memory.log.tree.slopes, reference.memory.log.tree.slopes, 1e-12)


def test_convolutions_with_frozen_norms_stack_twice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cutlayer"):
        one, other = (run(world(of_five(frozen(), 2, side_by_side=3), (4, 4, 3), engine=e), 2) for e in ENGINES)
    assert caplog.messages == []  # vmap did not give way to loop
    agree(one.client.tree, other.client.tree, 1e-11)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replay_has_the_bits_of_those_who_stayed(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch, (0, 1, 2), (0,), (0, 2), (0,), (0, 1, 2))
    sim = world(hosfl(opt=optim.adamw(0.01), side_by_side=P), engine=engine)
    last = states(sim, 5)[-1]
    assert all(same(kept(sim, j).value, last.client.tree) for j in (0, 1, 2))


# -- what it takes -----------------------------------------------------------------------------------------------------

EXTRA = {
    (0, 1): 0, (2, 1): 2, (5, 1): 5, (0, 2): 1, (0, 5): 4, (2, 2): 3, (2, 5): 4, (4, 5): 4, (5, 5): 5,
}  # fmt: skip


@pytest.mark.parametrize(("overlap", "num"), EXTRA)
def test_the_cut_tensors_of_a_group_are_reported(overlap: int, num: int) -> None:
    training = Training(runner=world(of_five(smooth(), overlap=overlap, side_by_side=num)), limits=Limits(rounds=1))
    assert training.round()["extra_cut_tensors"] == EXTRA[overlap, num]


@pytest.mark.slow
def test_the_reported_cut_tensors_are_those_held() -> None:
    """A client of one layer makes nothing but cut tensors."""
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2))
    x = torch.randn(1 << 15, 8)
    cut_tensor = 4 * x.numel()
    held = {
        case: peak(lambda case=case: slopes(of_five(net, overlap=case[0], side_by_side=case[1]), x), x.device)
        for case in EXTRA
        if case[0] < FIVE
    }
    for case, size in held.items():
        assert abs(size - held[0, 1] - EXTRA[case] * cut_tensor) < cut_tensor / 4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_clock_counts_the_same_work(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    devices = Devices(clients=(Device(flops=2e3, up=3e2, down=9e2),) * 3, server=5e3)
    for num in (1, 2, P):
        sim = world(hosfl(smooth(torch.float32), side_by_side=num), (8, 8, 3), devices=devices, engine=engine)
        record = Training(runner=sim, limits=Limits(rounds=1)).round()
        found.append((record["client_flops"], record["simulated_seconds"]))
    assert found[0] == found[1] == found[2] and found[0][0] > 0
    assert caplog.messages == []


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", (0, 4, -1, 1.5, True))
def test_impossible_groups_are_refused(num: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        hosfl(side_by_side=num)
    wanted = "a whole number from 1 to 3, the perturbations."
    assert str(caught.value) == f"side_by_side is {num!r}, but it must be {wanted}"


DRAWS = (
    "HO-SFL cannot make passes side by side with this model: in training, {} draws from torch's random generator, "
    "which vmap cannot stack; leave side_by_side at 1"
)


def drawing(layer: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 3), layer), nn.Linear(3, 10)).double()


class Gumbel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x)


def test_a_model_that_draws_from_torchs_generator_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        hosfl(drawing(Gumbel()), side_by_side=2)
    assert str(caught.value) == DRAWS.format("gumbel_softmax in Gumbel")
    assert hosfl(drawing(Gumbel()), side_by_side=1).side_by_side == 1


def test_passes_side_by_side_share_the_masks_of_a_step() -> None:
    alone, together = (world(hosfl(drawing(nn.Dropout(0.5)), side_by_side=num)) for num in (1, 2))
    one, two = (sim.round(sim.start()) for sim in (alone, together))
    agree(one.client.tree.model.params, two.client.tree.model.params, 1e-9)


class Noisy(nn.Module):
    """Draws random numbers without declaring it."""

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = getattr(torch, "randn" + "_like")(x)
        return x + noise


def test_a_model_that_draws_unannounced_is_refused_in_its_first_round() -> None:
    net = smooth()
    net[0].append(Noisy())  # type: ignore[operator]
    sim = world(hosfl(net, side_by_side=2))
    with pytest.raises(ConfigError) as caught:
        sim.round(sim.start())
    assert str(caught.value) == DRAWS.format("torch.randn_like")


# -- the benchmark -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_tells_the_price_and_the_time() -> None:
    pytest.importorskip("peft")
    command = [sys.executable, BENCH / "client_memory.py", "--quick", "--json", "--side-by-side", "1", "5"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    one, *others, again, five = (row for row in found if row["client"].startswith("HO-SFL"))
    assert [row["client"] for row in (one, *others, five)] == ["HO-SFL", "HO-SFL, overlap 2", "HO-SFL, 5 side by side"]
    assert again["step, MiB"] == one["step, MiB"]  # measured twice, by either way
    assert five["step, MiB"] > 3 * one["step, MiB"] and five["bar"] is None
    assert one["step, ms"] > 0 and five["step, ms"] > 0
    assert [row["step, ms"] for row in found if row["client"] in ("inference", "SFL")] == [None, None]
