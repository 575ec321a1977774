"""Specifies the engine `graph` on a GPU: the loop engine's numbers for every method, and the same ones each time."""

import logging
from typing import Any

import pytest
import torch
from conftest import clients_of, fit_for, images, resnet
from test_engines_agree import CASES, RANDOM_LAYERS, random_layers
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core.batches import Batching
from cutlayer.core.method import global_model, needs_of
from cutlayer.core.state import State
from cutlayer.engines.graph import lane
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Cuda
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

pytestmark = pytest.mark.gpu

RAGGED = Batching(size=4, epochs=10)  # 50, 10, 30, 20 and 40 steps
SIZES = (20, 6, 13, 9, 17)
SHORT_ROUNDS = 10  # of the methods that have a few steps in a round, and can have no more
SIDE = 16  # of the images
SINGLE, DOUBLE, HALF = 1e-4, 1e-9, 5e-3  # how far from the loop engine, relative to the length of all parameters
BOUNDS = {torch.float64: DOUBLE, torch.float32: SINGLE}


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # thousands of empty lines
    monkeypatch.setattr(lane, "COMPILE_AFTER", 200)  # so that the second round is compiled for the most part


def smooth(dtype: torch.dtype) -> nn.Module:
    """The tiny residual network with softplus for ReLU.

    The engines round differently, and training must not make more of it. A ReLU near zero does, as its slope jumps;
    so does a normalisation of a few values, which is nearly their sign: hence SIDE, which leaves 16 to each image.
    """
    net = resnet(dtype=dtype)
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Softplus())
    return net


def made(
    case: str,
    dtype: torch.dtype,
    engine: str,
    batching: Batching | None = None,
    net: nn.Module | None = None,
    device: str = "cuda",
    **options: Any,
) -> Simulation:
    name, given, own = CASES[case]
    net = net or (random_layers(dtype) if case in RANDOM_LAYERS else smooth(dtype))
    model = Split(fit_for(name, net).to(device), 1)
    opt = optim.sgd(0.01, momentum=0.9)
    method = methods.build(name, model, opt, opt, **given)
    counts = needs_of(method).counts_steps or own.steps is not None
    return Simulation(
        method,
        images(sum(SIZES), dtype, SIDE).to(device),
        clients_of(SIZES),
        batching=batching or (own if counts else RAGGED),
        engine=engine,
        seed=3,
        **options,
    )


def after(sim: Simulation, rounds: int | None = None) -> State:
    state = sim.start()
    for _ in range(rounds or (2 if sim.batching == RAGGED else SHORT_ROUNDS)):
        state = sim.round(state)
    return state


def vector(state: State) -> Tensor:
    return torch.cat([v.flatten().double() for v in global_model(state).params.values()])


def apart(a: State, b: State) -> float:
    return float((vector(a) - vector(b)).norm() / vector(b).norm())


@pytest.mark.parametrize("case", CASES)
def test_graph_gives_the_loop_engines_numbers(case: str) -> None:
    for dtype, bound in BOUNDS.items():
        loop, graph = (after(made(case, dtype, engine)) for engine in ("loop", "graph"))
        found = apart(graph, loop)
        print(f"{case}: {dtype} {found:.1e}")
        assert found <= bound


@pytest.mark.parametrize("case", ("fedavg", "smofi", "sfl_v2", "mergesfl"))
def test_clients_beyond_the_slots_take_turns(case: str) -> None:
    assert apart(after(made(case, torch.float64, "graph", chunk=2)), after(made(case, torch.float64, "loop"))) <= DOUBLE


class Short(Cuda):
    """Has memory for the recordings of two lanes."""

    def record(self, lane: int, what: Any, trial: Any, body: Any, **how: Any) -> Any:
        def greedy() -> None:
            body()
            if lane >= 2:
                torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")  # more than there is

        return super().record(lane, what, trial, greedy, **how)


def test_out_of_memory_halves_the_slots(caplog: pytest.LogCaptureFixture) -> None:
    sim = made("smofi", torch.float64, "graph")
    sim.backend.engine = Graph(Short(sim.job.data.y.device), 5)
    assert apart(after(sim, 3), after(made("smofi", torch.float64, "loop"), 3)) <= DOUBLE
    assert isinstance(sim.backend.engine, Graph) and sim.backend.engine.slots == 2
    assert sim.backend.engine.num_recordings and not sim.backend.engine.refused
    assert "memory is too short for 5 clients at a time" in caplog.text


def test_lanes_that_share_a_stream_are_tried_once() -> None:
    sim = made("smofi", torch.float64, "graph")
    device = sim.job.data.y.device
    sim.backend.engine = Graph(Cuda(device, [torch.cuda.Stream(device) for _ in range(2)]), 5)
    assert apart(after(sim, 3), after(made("smofi", torch.float64, "loop"), 3)) <= DOUBLE
    assert sim.backend.engine.num_recordings and not sim.backend.engine.refused


@pytest.mark.parametrize("case", ("fedavg", "smofi", "sfl_v1", "sfl_v2"))
def test_bfloat16_stays_near_single_precision(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlayer.engines.graph.kernels import batch_norm_triton

    forward, normalised = batch_norm_triton.forward, []
    monkeypatch.setattr(
        batch_norm_triton, "forward", lambda x, *rest: (normalised.append(x.dtype), forward(x, *rest))[1]
    )
    monkeypatch.setattr(lane, "COMPILE_AFTER", 10)  # of 45 steps, so most are compiled
    few = Batching(size=4)
    exact = after(made(case, torch.float32, "loop", few), 3)
    for engine in ("loop", "graph"):
        found = apart(after(made(case, torch.float32, engine, few, precision="bf16"), 3), exact)
        print(f"{case}: {engine} bf16 {found:.1e}")
        assert 0 < found <= HALF
    assert set(normalised) == {torch.bfloat16}


@pytest.mark.parametrize("precision", ("fp32", "tf32", "bf16"))
def test_the_same_seed_gives_the_same_bits(precision: Any) -> None:
    one, two = (vector(after(made("smofi", torch.float32, "graph", precision=precision), 4)) for _ in range(2))
    assert torch.equal(one, two)


def test_active_sets_shrink_without_new_recordings() -> None:
    sim = made("smofi", torch.float32, "graph")
    state = after(sim, 3)
    assert isinstance(sim.backend.engine, Graph)
    before = sim.backend.engine.num_recordings
    for _ in range(3):
        state = sim.round(state)
    assert 0 < sim.backend.engine.num_recordings == before


def test_auto_picks_graph(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cutlayer"):
        sim = made("smofi", torch.float32, "auto")
    assert isinstance(sim.backend.engine, Graph)
    assert caplog.messages == ["engine auto: graph; the data are on a GPU"]
