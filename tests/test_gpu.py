"""Specifies that a GPU gives what a CPU gives: the bits of the directions, and replay and training to rounding."""

import numpy as np
import pytest
import torch
from conftest import SEED, agree, clients_of, images, run, simulation
from in_process import deployment
from test_engines_agree import CASES, plain
from test_remote import method_of
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core import directions, tree
from cutlayer.core.batches import Batching
from cutlayer.core.state import Part, State, Tensors
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Cuda
from cutlayer.engines.loop import Loop
from cutlayer.methods.hosfl import HybridOrder
from cutlayer.pieces.hybrid import History
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

pytestmark = pytest.mark.gpu

RESNET_18_BELOW = 683_072  # parameters of ResNet-18 up to its second stage
ROUNDS, REPLAYED, NUM = 100, 100_000, 5


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def on_gpu(value: Tensors) -> Tensors:
    return {name: a.cuda() for name, a in value.items()}


def params(num: int = RESNET_18_BELOW, dtype: torch.dtype = torch.float32) -> Tensors:
    """So many numbers in tensors of odd sizes."""
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(num, generator=random, dtype=torch.float64).to(dtype)
    sizes = [1, 9408, 64, 36_865]
    return {str(k): a for k, a in enumerate(whole.split([*sizes, num - sum(sizes)]))}


def assert_bits(a: Tensors, b: Tensors) -> None:
    for name in a:
        assert b[name].is_cuda and torch.equal(a[name], b[name].cpu()), name


# -- directions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", (0, 1, -1, 123456789, (1 << 63) - 1))
def test_the_numbers_of_a_seed_are_the_same_bits(seed: int) -> None:
    here = directions.normals(torch.tensor(seed), 0, RESNET_18_BELOW)
    there = directions.normals(torch.tensor(seed, device="cuda"), 0, RESNET_18_BELOW)
    assert there.is_cuda and torch.equal(here, there.cpu())


def test_a_seed_gives_the_recorded_bits_on_every_machine() -> None:
    first = directions.normals(torch.tensor(123456789, device="cuda"), 0, 4)
    assert [float(v).hex() for v in first] == [
        "0x1.04759a1c3a92fp+0",
        "-0x1.5303411aa8b04p+1",
        "0x1.0a7e5f63cce12p+1",
        "0x1.c4af9862601d2p-2",
    ]


def test_sixteen_million_normals_have_the_bits_of_the_cpu() -> None:
    """Sixteen million, of which a device of another rounding would not leave all alike."""
    seeds = directions.seeds(3, 16)
    for start in range(0, 1 << 20, 1 << 18):
        here = directions.normals(seeds[:, None], start, start + (1 << 18))
        assert torch.equal(here, directions.normals(seeds.cuda()[:, None], start, start + (1 << 18)).cpu())


def test_the_elementary_functions_are_the_same_bits() -> None:
    x = torch.arange(1, (1 << 32) + 1, 4099, dtype=torch.int64).double() / 2**32
    assert torch.equal(directions.log(x), directions.log(x.cuda()).cpu())
    assert torch.equal(directions.sqrt(64 * x), directions.sqrt(64 * x.cuda()).cpu())
    for here, there in zip(directions.sine_and_cosine(x % 1), directions.sine_and_cosine(x.cuda() % 1), strict=True):
        assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_moved_parameters_and_sums_of_directions_are_the_same_bits(dtype: torch.dtype) -> None:
    here, seeds = params(dtype=dtype), directions.seeds(8, NUM)
    there = on_gpu(here)
    assert_bits(directions.shifted(here, seeds[0], 1e-3), directions.shifted(there, seeds[0], 1e-3))
    factors = torch.randn(NUM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_bits(directions.combined(here, seeds, factors), directions.combined(there, seeds, factors))
    assert_bits(directions.combined(here, seeds, factors), directions.combined(there, seeds.cuda(), factors.cuda()))


def test_the_bits_do_not_depend_on_the_stretch_there_either(monkeypatch: pytest.MonkeyPatch) -> None:
    there, seed = on_gpu(params(200_001)), torch.tensor(5)
    whole = directions.shifted(there, seed, 0.1)
    monkeypatch.setattr(directions, "LONG_STRETCH", 4098)
    again = directions.shifted(there, seed, 0.1)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


# -- HO-SFL ------------------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(2)
    lower = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
    return nn.Sequential(lower, nn.Linear(8, 10)).double()


def hosfl(model: nn.Module, opt: optim.Transform) -> HybridOrder:
    return methods.hosfl(model=Split(model, 1), client_opt=opt, server_opt=opt, perturbations=NUM)


OPTIMISERS = {"sgd": optim.sgd(0.05), "adamw": optim.adamw(1e-3, weight_decay=5e-4)}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_replay_of_100_rounds_differs_by_rounding_at_most(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of single-precision values, relative to the largest of them; the directions are equal, the optimiser rounds."""
    client = hosfl(net(), OPTIMISERS[name]).client
    random = torch.Generator().manual_seed(3)
    slopes = 1e-5 * torch.randn(ROUNDS, NUM, generator=random, dtype=torch.float64)
    missed = History(torch.stack([directions.seeds(k, NUM) for k in range(ROUNDS)]), slopes)
    begin = OPTIMISERS[name].begin
    model = Split(net(), 1).initial()[0]._replace(params=params(REPLAYED))
    here = client.catch_up(begin(model, 0), missed)
    there: Part = client.catch_up(tree.map(Tensor.cuda, begin(model, 0)), tree.map(Tensor.cuda, missed))
    far = apart(here.params, there.params)
    with capsys.disabled():
        print(f"\n{name}: {ROUNDS} rounds of {REPLAYED} values, CUDA against CPU: {far:.2e} of the largest value")
    assert far < 1e-6
    assert apart(model.params, {k: v.cuda() for k, v in here.params.items()}) > 1e-3  # they did move


def apart(here: Tensors, there: Tensors) -> float:
    largest = max(float(a.abs().max()) for a in here.values())
    return max(float((a - there[k].cpu()).abs().max()) for k, a in here.items()) / largest


def trained(device: str, engine: str, opt: optim.Transform, rounds: int = 4) -> State:
    """Clients of which each round takes three, so that some replay."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, 8, 8, generator=random, dtype=torch.float64).to(device)
    y = torch.randint(0, 10, (40,), generator=random).to(device)
    clients = Partition(tuple(np.arange(8 * j, 8 * j + 8) for j in range(5)))
    sim = Simulation(
        hosfl(net().to(device), opt),
        Arrays(x=x, y=y, num_classes=10),
        clients,
        batching=Batching(size=4),
        per_round=3,
        engine=engine,
    )
    state = sim.start()
    for _ in range(rounds):
        state = sim.round(state)
    return state


@pytest.mark.parametrize("engine", ("loop", "vmap"))
@pytest.mark.parametrize("name", OPTIMISERS)
def test_rounds_on_a_gpu_are_rounds_on_a_cpu(name: str, engine: str) -> None:
    here, there = (trained(device, engine, OPTIMISERS[name]) for device in ("cpu", "cuda"))
    for one, other in ((here.client, there.client), (here.server, there.server)):
        assert all(a.is_cuda for a in other.tree.params.values())
        torch.testing.assert_close(one.tree.params, tree.map(Tensor.cpu, other.tree.params), rtol=1e-9, atol=1e-9)
    assert torch.equal(here.memory.log.tree.seeds, there.memory.log.tree.seeds.cpu())


# -- clients somewhere else --------------------------------------------------------------------------------------------


ON_A_GPU = ("fedavg", "sfl_v1", "smofi", "sfl_v2", "hasfl own cuts", "hosfl", "zo_sfl", "fsl_sage")


@pytest.mark.parametrize("engine", ("loop", "graph"))
@pytest.mark.parametrize("case", ON_A_GPU)
def test_remote_clients_and_servers_on_a_gpu_give_the_loop_engines_numbers(case: str, engine: str) -> None:
    method, again = (method_of(case, device="cuda") for _ in range(2))
    data, batching = images().to("cuda"), CASES[case].batching
    here = simulation(method, data, clients_of(), batching=batching)
    of_servers = Loop() if engine == "loop" else Graph(Cuda(torch.device("cuda")), len(clients_of()))
    there = deployment(again, data, clients_of(), batching=batching, seed=SEED, server_device="cuda", engine=of_servers)
    state = run(there)  # type: ignore[arg-type]
    assert all(a.is_cuda for a in tree.tensors((state.client.tree, state.server.tree)) if a.is_floating_point())
    agree(plain(state[1:3]), plain(run(here)[1:3]), tol=1e-9)
