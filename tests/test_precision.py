"""Specifies what layers compute in: where it holds, what it leaves alone, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import BATCH, SEED, agree, clients_of, images, resnet, run, simulation
from in_process import device, join
from torch import Tensor, nn

from cutlayer import Split, adam, methods, sfl_v1, sgd, smofi, train
from cutlayer.core.batches import Batching
from cutlayer.core.precision import PRECISIONS, Precision, computing
from cutlayer.core.state import State
from cutlayer.engines.loop import Loop
from cutlayer.errors import CheckpointError, ConfigError, UnknownNameError
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.sessions import Sessions
from cutlayer.runs.config import Run
from cutlayer.runs.evaluation import evaluate
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.simulation import Simulation

DATA = images(dtype=torch.float32)


def method(net: nn.Module | None = None, loss: Any = F.cross_entropy) -> methods.Method:
    model = Split(net or resnet(dtype=torch.float32), 2, loss=loss)
    return smofi(model=model, client_opt=sgd(0.05, momentum=0.9), server_opt=sgd(0.05, momentum=0.9))


def played(precision: Precision, engine: str = "loop") -> tuple[Simulation, dict[str, Tensor]]:
    """The trained values of two rounds."""
    sim = simulation(method(), DATA, engine=engine, precision=precision)
    return sim, values(sim, run(sim))


def values(sim: Rounds, state: State) -> dict[str, Tensor]:
    return sim.method.model.export(methods.global_model(state))


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The relative distance of all parameters together."""
    ours, theirs = (torch.cat([v.double().flatten() for v in values.values()]) for values in (a, b))
    return float((ours - theirs).norm() / theirs.norm())


def settings() -> tuple[Any, ...]:
    """Return those settings of torch that a precision changes."""
    backends = torch.backends
    tf32 = [home.fp32_precision for home in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]
    return *tf32, backends.cudnn.deterministic, backends.cudnn.benchmark, torch.is_autocast_enabled("cpu")


class Probe(nn.Module):
    """A layer that tells what it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1))
        self.seen.add(out.dtype)
        return out

    def __deepcopy__(self, memo: Any) -> "Probe":
        twin = Probe()
        twin.load_state_dict(self.state_dict())
        twin.seen = self.seen
        return twin


@pytest.mark.parametrize(("precision", "products"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_torchs_settings_hold_inside_and_are_as_before_after(precision: Precision, products: str) -> None:
    torch.backends.cudnn.benchmark = True  # as a user may have it
    before = settings()
    try:
        with computing(precision):
            assert settings() == (products, products, products, True, False, False)
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (products == "tf32")
            with pytest.raises(ZeroDivisionError), computing("tf32"):
                raise ZeroDivisionError
            assert settings() == (products, products, products, True, False, False)
        assert settings() == before
        with pytest.raises(ZeroDivisionError), computing(precision):
            raise ZeroDivisionError
        assert settings() == before
    finally:
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_may_use_torchs_older_switches_inside(precision: Precision) -> None:
    before = settings()
    with computing(precision), torch.backends.cudnn.flags(enabled=False):
        assert not torch.backends.cudnn.enabled
    assert settings() == before and torch.backends.cudnn.enabled


def test_a_round_that_fails_leaves_the_settings_as_they_were() -> None:
    before = settings()
    calls = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        calls.append(settings())
        if len(calls) > 3:  # before them the rehearsal, and the comparison of the parts with the whole
            raise ZeroDivisionError
        return F.cross_entropy(out, y)

    sim = simulation(method(loss=loss), DATA, precision="tf32")
    with pytest.raises(ZeroDivisionError):
        run(sim)
    assert [call[0] for call in calls] == ["tf32", before[0], before[0], "tf32"]
    assert settings() == before


def test_only_layers_compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss, as everything between layers, gets and makes float32."""
    monkeypatch.setattr(Split, "prove", lambda *_: None)  # it compares in single precision
    probe, outside = Probe(), set()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        outside.update({out.dtype, (torch.eye(2) @ torch.eye(2)).dtype})
        return F.cross_entropy(out, y)

    model = Split(nn.Sequential(probe, nn.ReLU(), nn.Linear(10, 10)), 1, loss=loss)
    train(sfl_v1(model=model, client_opt=adam(0.01), server_opt=adam(0.01)), DATA, clients_of(), rounds=1,
          batching=BATCH, engine="loop", precision="bf16", test=DATA)  # fmt: skip
    assert probe.seen == {torch.bfloat16}
    assert outside == {torch.float32}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_bfloat16_is_near_single_precision_and_nothing_else_changes(engine: str) -> None:
    """After ten steps of the longest clients the parameters are within 1 % of each other, and not the same."""
    single, expected = played("fp32", engine)
    half, found = played("bf16", engine)
    assert half.engine_name == engine
    assert 1e-5 < difference(found, expected) < 0.01
    assert {v.dtype for v in found.values() if v.is_floating_point()} == {torch.float32}
    assert half.ledger.content() == single.ledger.content()


def test_tf32_is_single_precision_where_there_is_no_gpu() -> None:
    single, expected = played("fp32")
    rounded, found = played("tf32")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert rounded.ledger.content() == single.ledger.content()


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = played("bf16")[1], played("bf16")[1]
    assert all(torch.equal(first[name], value) for name, value in second.items())


def test_evaluation_computes_as_training_does() -> None:
    result = train(method(), DATA, clients_of(), rounds=1, batching=BATCH, engine="loop", precision="bf16", test=DATA)
    split, model = method().model, methods.global_model(result.state)
    with computing("bf16"):
        half = evaluate(split, model, DATA, {})
    single = evaluate(split, model, DATA, {})
    assert result.history[0]["test_loss"] == half["loss"]
    assert 0 < abs(half["loss"] - single["loss"]) < 0.02


def test_devices_compute_in_the_precision_of_their_run() -> None:
    """Clients behind the wire give the loop engine's numbers in bfloat16, and its bytes."""
    here, expected = played("bf16")
    sessions, partition = Sessions(), clients_of()
    for client in range(len(partition)):
        join(sessions, device(method(), DATA, partition, BATCH, client, precision="bf16"))
    mine = method()
    few = DATA.take([0, 1])
    devices = DeviceBackend(
        method=mine, sessions=sessions, sample=few, gather=lambda _: tuple(sessions.present()), engine=Loop()
    )
    there = Rounds(mine, devices, batching=BATCH, seed=SEED, precision="bf16")
    state = there.start()
    for _ in range(2):
        state = there.round(state)
    agree(values(there, state), expected, 1e-6)
    assert there.ledger.content() == here.ledger.content()


def test_an_unknown_precision_is_refused() -> None:
    assert PRECISIONS == ("fp32", "tf32", "bf16")
    with pytest.raises(UnknownNameError) as error:
        simulation(method(), DATA, precision="fp16")
    assert str(error.value) == "unknown precision 'fp16'; did you mean 'bf16' or 'fp32'?"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bfloat16_is_for_models_in_single_precision(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError) as error:
        simulation(method(resnet(dtype=dtype)), images(dtype=dtype), precision="bf16")
    assert str(error.value) == (
        f"precision 'bf16' is for models in float32, but this one has values in {str(dtype)[6:]}; "
        "use precision 'fp32', which leaves them as they are"
    )


def test_a_run_has_a_precision_and_goes_on_in_the_same(tmp_path: Path) -> None:
    def short(precision: Precision, rounds: int = 1) -> Run:
        return Run(clients=3, rounds=rounds, engine="loop", batching=Batching(steps=2), precision=precision)

    half, single = Folder(tmp_path / "half"), Folder(tmp_path / "single")
    losses = [execute(short(p), f).history[0]["test_loss"] for p, f in (("bf16", half), ("fp32", single))]
    assert 0 < abs(losses[0] - losses[1]) < 0.02
    assert half.run().precision == "bf16" and 'precision = "bf16"\n' in half.config.read_text()
    with pytest.raises(CheckpointError, match="precision is 'bf16' there and 'fp32' here"):
        execute(short("fp32", 2), half, resume=True)
    assert len(execute(short("bf16", 2), half, resume=True).history) == 2
