"""Specifies random layers on a GPU: the CPU's bits, and recordings that draw anew at each replay."""

import pytest
import torch
from test_engines_agree import random_layers
from test_gpu_graph import BOUNDS, DOUBLE, after, apart, cuda, made, vector
from test_random_layers import KEY, UNIT, Gumbel, P, check_replays
from torch import nn

from cutlayer.core.masks import Masks
from cutlayer.core.state import Model
from cutlayer.engines.graph.compiling import compiling
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Cuda
from cutlayer.split import Split

pytestmark = pytest.mark.gpu
__all__ = ["cuda"]  # a fixture
CASE = "sfl_v1 random layers"


@pytest.mark.parametrize("shape", [(1,), (3, 5), (33, 64, 7, 7), (0, 4), (1 << 22,)])
@pytest.mark.parametrize("key", [0, KEY, 2**63 - 1])
def test_masks_have_the_same_bits_on_both_devices(shape: tuple[int, ...], key: int) -> None:
    drawn = []
    for device in ("cpu", "cuda"):
        own = Masks(torch.tensor(key, device=device))
        own.begin(UNIT)
        drawn.append([own.kept(shape, P).cpu(), own.uniform(shape).cpu(), own.kept(shape, 0.9).cpu()])
    for here, there in zip(*drawn, strict=True):
        assert torch.equal(here, there)


def test_a_stack_of_clients_has_the_same_bits() -> None:
    split, keys = Split(nn.Sequential(nn.Dropout(P)), 1), torch.tensor([KEY, 3, 2**63 - 1])

    def masks(device: str) -> torch.Tensor:
        """The keys stay on the CPU, as the engine vmap has them."""
        ones = torch.ones(3, 8, 9, device=device)
        stacked = torch.func.vmap(lambda x, key: split.whole(Model({}, {}, {}), x, key)[0])(ones, keys)
        return (stacked != 0).cpu()

    assert torch.equal(masks("cuda"), masks("cpu"))


@pytest.mark.parametrize("shape", [(1000, 37), (64, 128, 8, 8)])
def test_compiled_masks_have_the_same_bits(shape: tuple[int, ...]) -> None:
    split = Split(nn.Sequential(nn.Dropout(P), nn.Dropout(P)), 1)
    for key in (5, KEY, 2**63 - 1):
        here, _ = split.whole(Model({}, {}, {}), torch.ones(shape), key)
        with compiling():
            there, _ = split.whole(Model({}, {}, {}), torch.ones(shape, device="cuda"), key)
        assert torch.equal((there != 0).cpu(), here != 0)


@pytest.mark.parametrize("compiled", (False, True))
def test_a_recording_takes_the_key_of_each_step(compiled: bool) -> None:
    engine = Graph(Cuda(torch.device("cuda", 0)), 2)
    if compiled:
        engine.compile_at_once()
    check_replays(engine, "cuda")


@pytest.mark.parametrize("case", ("fedavg", "sfl_v1", "smofi", "sfl_v2", "mergesfl", "hosfl", "zo_sfl"))
def test_graph_gives_the_loop_engines_numbers_with_random_layers(case: str) -> None:
    for dtype, bound in BOUNDS.items():
        if dtype == torch.float32 and case in ("hosfl", "zo_sfl"):  # they divide rounding by the smoothing
            continue
        loop, graph = (made(case, dtype, engine, net=random_layers(dtype)) for engine in ("loop", "graph"))
        assert isinstance(graph.backend.engine, Graph)
        found = apart(after(graph), after(loop))
        print(f"{case}: {dtype} {found:.1e}")
        assert found <= bound


def test_replays_draw_anew_without_new_recordings() -> None:
    sim = made(CASE, torch.float64, "graph")
    state = after(sim, 3)
    engine = sim.backend.engine
    assert isinstance(engine, Graph)
    before = engine.num_recordings
    for _ in range(3):
        state = sim.round(state)
    assert 0 < engine.num_recordings == before and not engine.refused
    assert apart(state, after(made(CASE, torch.float64, "loop"), 6)) <= DOUBLE


def test_the_same_seed_gives_the_same_bits() -> None:
    one, two = (vector(after(made(CASE, torch.float32, "graph"), 3)) for _ in range(2))
    assert torch.equal(one, two)


def test_auto_is_graph_with_random_layers() -> None:
    assert isinstance(made(CASE, torch.float32, "auto").backend.engine, Graph)


def test_what_only_torch_can_draw_runs_on_the_loop_engine(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(256, 8), Gumbel()), nn.Linear(8, 10))
    assert made("sfl_v1", torch.float32, "graph", net=net).engine_name == "loop"
    assert caplog.messages == [
        "engine loop: in training, gumbel_softmax in Gumbel draws from torch's random generator, which graph cannot "
        "record"
    ]
