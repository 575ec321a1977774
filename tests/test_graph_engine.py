"""Specifies that recorded and replayed chains give the loop engine's numbers for every method.

Without a GPU a recording is the chain itself, run again on the same rows of memory: what is read from where, what is
kept and who takes turns is then just as on a GPU.
"""

import weakref
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import BATCH, OWN_LENGTH, SIZES, clients_of, fit_for, images, resnet, run, simulation
from test_engines_agree import (
    CASES,
    HETEROGENEOUS,
    ONE_OF_EACH,
    OPTIMISERS,
    PAIRS,
    SHAPES,
    TOLERANCE,
    Outcome,
    must_agree,
    net_of,
    on_loop,
)
from torch import Tensor, nn

from cutlayer import methods
from cutlayer.core.state import Part
from cutlayer.data.arrays import Arrays
from cutlayer.engines.graph import compiling, lane
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.kernels import batch_norm as kernels
from cutlayer.engines.graph.recorder import Again, Body, Trial
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError
from cutlayer.split import Split

CPU = torch.device("cpu")


def outcome(
    case: str, opt: str, shape: str, dtype: torch.dtype, slots: int = 5, recorder: Again | None = None
) -> Outcome:
    name, options, batching = CASES[case]
    cut, head = SHAPES[shape]
    model = Split(net_of(case, dtype), cut, head=head)
    method = methods.build(name, model, OPTIMISERS[opt], OPTIMISERS[opt], **options)
    sim = simulation(method, images(dtype=dtype), clients_of(), batching=batching, engine="loop")
    sim.backend.engine = engine = Graph(recorder or Again(CPU), slots)
    found = Outcome(run(sim), sim.ledger)
    assert engine.num_recordings and not engine.refused
    return found


@pytest.mark.parametrize(
    "case",
    ("fedavg", "smofi", "sl", "sfl_v2", "mergesfl", "hasfl own cuts", "hosfl", "fsl_sage", "sfl_v1 random layers"),
)
def test_graph_gives_the_loop_engines_numbers(case: str) -> None:
    found = outcome(case, "momentum", "two-part", torch.float64)
    must_agree(found, on_loop(case, "momentum", "two-part", torch.float64), TOLERANCE[torch.float64])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "opt", "shape", "dtype"), PAIRS)
def test_graph_gives_the_loop_engines_numbers_for_every_case_optimiser_and_shape(
    case: str, opt: str, shape: str, dtype: torch.dtype
) -> None:
    found = outcome(case, opt, shape, dtype)
    must_agree(found, on_loop(case, opt, shape, dtype), TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "slots"),
    [*((case, 2) for case in ONE_OF_EACH.values()), *((case, 1) for case in ("smofi", "sfl_v2", "hosfl"))],
)
def test_clients_beyond_the_slots_take_turns(case: str, slots: int) -> None:
    found = outcome(case, "momentum", "two-part", torch.float64, slots)
    must_agree(found, on_loop(case, "momentum", "two-part", torch.float64), TOLERANCE[torch.float64])


@pytest.mark.parametrize(("case", "num"), [("fedavg", 1), ("sfl_v1", 2), ("smofi", 2)])
def test_a_part_has_one_row_in_each_lane(case: str, num: int) -> None:
    name, options, batching = CASES[case]
    method = methods.build(name, Split(resnet(), 1), OPTIMISERS["adam"], OPTIMISERS["adam"], **options)
    sim = simulation(method, images(), clients_of(), batching=batching)
    sim.backend.engine = engine = Graph(Again(CPU), 5)
    run(sim, 3)
    parts = [form for _, form in engine._book.banks if isinstance(form.bare, Part)]
    assert len(parts) == num  # the client's, and where there is one the server's


class Short(Again):
    """A recorder that runs out of memory after the recordings of two lanes."""

    lanes = 2

    def record(self, lane: int, what: Hashable, trial: Trial, body: Body, *, apart: bool, compiled: bool) -> Body:
        if lane >= self.lanes:
            raise torch.OutOfMemoryError("out of memory")
        return super().record(lane, what, trial, body, apart=apart, compiled=compiled)


class Shorter(Short):
    lanes = 0


def test_out_of_memory_halves_the_slots(caplog: pytest.LogCaptureFixture) -> None:
    opt = OPTIMISERS["momentum"]
    outcomes, seconds = [], []
    for engine in (Graph(Short(CPU), 5), Loop()):
        method = methods.build("smofi", Split(resnet(dtype=torch.float64), 1), opt, opt)
        sim = simulation(method, images(dtype=torch.float64), clients_of(), devices=HETEROGENEOUS)
        sim.backend.engine = engine
        outcomes.append(Outcome(run(sim), sim.ledger))
        assert sim.clock is not None
        seconds.append(sim.clock.now)
        if isinstance(sim.backend.engine, Graph):
            assert sim.backend.engine.slots == 2 and sim.backend.engine.num_recordings
            assert not sim.backend.engine.refused  # the chains are not to blame
    must_agree(*outcomes, TOLERANCE[torch.float64])
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)
    assert "memory is too short for 5 clients at a time; retrying the round with 2" in caplog.text


def test_the_engine_that_ran_out_of_memory_is_freed() -> None:
    opt = OPTIMISERS["momentum"]
    sim = simulation(methods.build("sfl_v1", Split(resnet(), 1), opt, opt), images(), clients_of())
    sim.backend.engine = Graph(Short(CPU), 5)
    before = weakref.ref(sim.backend.engine)
    run(sim)
    assert before() is None


def test_too_little_memory_for_one_client_is_an_error() -> None:
    opt = OPTIMISERS["momentum"]
    sim = simulation(methods.build("sfl_v1", Split(resnet(), 1), opt, opt), images(), clients_of())
    sim.backend.engine = Graph(Shorter(CPU), 5)
    with pytest.raises(ConfigError, match="too short even for one client at a time; take smaller batches"):
        run(sim)


@pytest.mark.parametrize("case", ("smofi", pytest.param("sfl_v2", marks=pytest.mark.slow)))
def test_the_simulated_clock_shows_the_same_seconds(case: str) -> None:
    seconds = []
    for engine in (Loop(), Graph(Again(CPU), 5)):
        name, options, batching = CASES[case]
        method = methods.build(name, Split(resnet(), 1), OPTIMISERS["momentum"], OPTIMISERS["momentum"], **options)
        sim = simulation(method, images(), clients_of(), batching=batching, devices=HETEROGENEOUS)
        sim.backend.engine = engine
        run(sim)
        assert sim.clock is not None
        seconds.append(sim.clock.now)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12) and seconds[0] > 0


class Compiling(Again):
    """Compiles chains as on a GPU does, but to plain operations."""

    def record(self, lane: int, what: Hashable, trial: Trial, body: Body, *, apart: bool, compiled: bool) -> Body:
        def run() -> None:
            with compiling.compiling() if compiled else nullcontext():
                body()

        with compiling.compiling() if compiled else nullcontext():
            trial()
        return run


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ONE_OF_EACH.values(), "sfl_v1 random layers"])
def test_compiled_chains_give_the_loop_engines_numbers(
    case: str, eager: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    normalised: list[torch.Size] = []
    plain = kernels.plain_forward
    monkeypatch.setattr(kernels, "plain_forward", lambda x, *rest: (normalised.append(x.shape), plain(x, *rest))[1])
    monkeypatch.setattr(compiling, "REWRITTEN_ON", ("cpu",))
    monkeypatch.setattr(lane, "COMPILE_AFTER", 2)
    found = outcome(case, "momentum", "two-part", torch.float64, recorder=Compiling(CPU))
    assert "slower" not in caplog.text
    assert eager or CASES[case][0] in (*OWN_LENGTH, "zo_sfl")  # whose chains may not come often enough here
    assert normalised or case not in ("fedavg", "smofi")  # by the package's own operation
    must_agree(found, on_loop(case, "momentum", "two-part", torch.float64), TOLERANCE[torch.float64])


class Words(nn.Module):
    """Embeddings, a matrix of positions that is added, a linear layer: autocast converts only the last of these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 6)
        self.places = Places()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(24, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.places(self.words(x)))
        return out


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.at


def test_graph_computes_in_bfloat16_what_the_loop_engine_does() -> None:
    random = torch.Generator().manual_seed(0)
    count = sum(SIZES)
    x, y = (torch.randint(*drawn, generator=random) for drawn in ((11, (count, 4)), (10, (count,))))
    data = Arrays(x=x, y=y, num_classes=10)
    found = []
    for engine in (Loop(), Graph(Again(CPU), 5)):
        method = methods.build("sfl_v1", Split(Words(), 1), OPTIMISERS["momentum"], OPTIMISERS["momentum"])
        sim = simulation(method, data, clients_of(), precision="bf16")
        sim.backend.engine = engine
        found.append(Outcome(run(sim), sim.ledger))
    must_agree(found[1], found[0], 1e-6)


@pytest.mark.slow
def test_passes_side_by_side_are_recorded_when_others_are_compiled(
    eager: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lane, "COMPILE_AFTER", 2)
    found = []
    for engine in (Loop(), Graph(Compiling(CPU), 5)):
        name, options, batching = CASES["hosfl"]
        model = Split(fit_for(name, resnet()), 1)
        options = {**options, "perturbations": 4, "side_by_side": 2}
        method = methods.build(name, model, OPTIMISERS["momentum"], OPTIMISERS["momentum"], **options)
        sim = simulation(method, images(), clients_of(), batching=batching)
        sim.backend.engine = engine
        found.append(Outcome(run(sim, 8), sim.ledger))
    assert eager and "slower" not in caplog.text and "unrecorded" not in caplog.text
    must_agree(found[1], found[0], 1e-9)


class Noting(Again):
    """Records whether each recording is to be compiled."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.compiled: list[bool] = []

    def record(self, lane: int, what: Hashable, trial: Trial, body: Body, *, apart: bool, compiled: bool) -> Body:
        self.compiled.append(compiled)
        return super().record(lane, what, trial, body, apart=apart, compiled=compiled)


@pytest.mark.parametrize("at_once", (False, True))
def test_chains_are_compiled_when_they_have_come_often_unless_told_to_be_at_once(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "COMPILE_AFTER", 4)
    noting = Noting()
    opt = OPTIMISERS["momentum"]
    method = methods.build("sfl_v1", Split(resnet(), 1), opt, opt)
    sim = simulation(method, images(), clients_of())
    sim.backend.engine = engine = Graph(noting, 5)
    if at_once:
        engine.compile_at_once()
    run(sim)
    assert noting.compiled[0] is at_once and noting.compiled[-1]
    assert all(noting.compiled) is at_once


def test_a_part_that_goes_from_client_to_client_needs_no_host_sync_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    item = Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda self: (waits.append(1), item(self))[1])
    found = []
    for epochs in (2, 4):
        opt = OPTIMISERS["momentum"]
        method = methods.build("sfl_v2", Split(resnet(), 1), opt, opt, order="fixed")
        sim = simulation(method, images(), clients_of(), batching=replace(BATCH, epochs=epochs))
        sim.backend.engine = Graph(Again(CPU), 5)
        state = sim.start()
        for _ in range(3):  # until all chains are known
            state = sim.round(state)
        waits.clear()
        sim.round(state)
        found.append(len(waits))
    assert found[0] == found[1]  # of the whole round, not of its steps
