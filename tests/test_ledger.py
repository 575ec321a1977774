"""Specifies the bytes and round trips that each method costs, in closed form."""

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import GENERAL, SIZES, TOLD, fit_for, images, resnet, run, simulation

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.state import Model
from cutlayer.meters.ledger import Ledger
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

ROUNDS = 2
SETTINGS = 8  # the round's number
STATISTICS = 3 * 8  # loss, batches and stops of a client that keeps its own count
LOSS = 4  # of a batch, from a client that keeps its labels
BATCHES = {0: [4] * 3, 1: [4] * 5, 2: [4] * 2, 3: [4] * 5, 4: [3]}  # of SIZES
SPLIT_METHODS = ("sl", "sfl_v1", "sfl_v2", "mergesfl", "smofi")
WHOLE_MODEL = ("fedavg", "fedprox", "fednar", "fedavgm", "slowmo")  # and fednag, which sends its moments too
OPT = optim.sgd(0.1, momentum=0.9)
JOINT = optim.sgd(0.1, clip=0.5, clip_scope="joint")


def ran(name: str, cut: int, head: int | None = None, opt: optim.Transform = OPT, **options: Any) -> Simulation:
    net = fit_for(name, resnet(dtype=torch.float32))
    method = methods.build(name, Split(net, cut, head=head), opt, opt, **TOLD.get(name, {}))
    sim = simulation(method, images(dtype=torch.float32), **options)
    run(sim, ROUNDS)
    return sim


def parameters(cut: int, head: int | None = None) -> tuple[int, int]:
    """Number of parameters at the client and at the server."""
    lower, upper = Split(resnet(), cut, head=head).initial()
    return tuple(sum(p.numel() for p in model.params.values()) for model in (lower, upper))  # type: ignore[return-value]


# Elements per sample between the units of a width-2 network on 8x8 images: after stem, layer1, layer2, layer3.
ACTIVATIONS = {1: 2 * 8 * 8, 2: 2 * 8 * 8, 3: 4 * 4 * 4, 4: 8 * 2 * 2}


def expected(batches: list[int], cut: int, head: int | None = None) -> Counter[str]:
    """Bytes of one client in all rounds of a method that crosses the cut."""
    samples, size = sum(batches), 4
    model = size * parameters(cut, head)[0]
    at_cut = size * samples * ACTIVATIONS[cut]
    bytes_ = {"down_model": model, "down_settings": SETTINGS, "up_model": model}
    if head is None:
        bytes_ |= {"up_activations": at_cut, "up_labels": 8 * samples, "down_gradients": at_cut}
    else:
        at_head = size * samples * ACTIVATIONS[head]
        bytes_ |= {"up_activations": at_cut, "down_activations": at_head, "up_gradients": at_head}
        bytes_ |= {"down_gradients": at_cut, "up_scalars": LOSS * len(batches)}
    return Counter({name: ROUNDS * size for name, size in bytes_.items()})


@pytest.mark.parametrize(("cut", "head"), [(1, None), (3, None), (1, 4), (2, 3)])
@pytest.mark.parametrize("name", SPLIT_METHODS)
def test_a_split_method_costs_its_batches_at_the_cut_and_its_layers_twice(
    name: str, cut: int, head: int | None
) -> None:
    """4 b A + 8 b up and 4 b A down a batch, and 4 d_c down and up a round; T + 1 round trips, or 2 T + 1."""
    ledger = ran(name, cut, head).ledger  # every engine counts what loop counts: test_engines_agree
    assert ledger.per_client == {j: expected(batches, cut, head) for j, batches in BATCHES.items()}
    assert ledger.totals == sum(ledger.per_client.values(), Counter())
    trips = 1 if head is None else 2
    assert ledger.trips == {j: ROUNDS * (trips * len(batches) + 1) for j, batches in BATCHES.items()}


@pytest.mark.parametrize("name", WHOLE_MODEL)
def test_fedavg_costs_the_whole_model_twice_in_one_round_trip(name: str) -> None:
    ledger = ran(name, 1).ledger
    model = 4 * sum(parameters(1))
    a_round = {"down_model": model, "down_settings": SETTINGS, "up_model": model, "up_statistics": STATISTICS}
    for j in range(len(SIZES)):
        assert ledger.per_client[j] == {name: ROUNDS * size for name, size in a_round.items()}
        assert ledger.trips[j] == ROUNDS


@pytest.mark.parametrize("head", (None, 4))
@pytest.mark.parametrize("name", ("sl", "sfl_v1", "smofi"))
def test_the_joint_norm_costs_a_round_trip_and_16_bytes_a_step(name: str, head: int | None) -> None:
    joint, apart = ran(name, 1, head, JOINT).ledger, ran(name, 1, head).ledger
    for j, batches in BATCHES.items():
        steps = ROUNDS * len(batches)
        assert joint.trips[j] == apart.trips[j] + steps
        extra = {"up_scalars": 8 * steps, "down_scalars": 8 * steps}
        assert joint.per_client[j] == apart.per_client[j] + Counter(extra)


@pytest.mark.parametrize("name", GENERAL)
def test_running_statistics_are_counted_where_asked(name: str) -> None:
    full = Ledger(count_buffers=True)
    plain = ran(name, 1, meters=(full,)).ledger
    lower, upper = Split(resnet(dtype=torch.float32), 1).initial()
    split = name not in (*WHOLE_MODEL, "fednag")
    buffers = tree.num_bytes(lower.buffers) + (0 if split else tree.num_bytes(upper.buffers))
    times = {"down_setup": 1} if name == "hosfl" else {"up_model": ROUNDS, "down_model": ROUNDS}
    assert buffers > 0
    more = full.totals - plain.totals
    assert (more.pop("down_auxiliary", 0) > 0) == (name == "fsl_sage")  # a copy of the server's first layers
    assert more == {kind: n * len(SIZES) * buffers for kind, n in times.items()}


@pytest.mark.parametrize("engine", ("loop", "vmap"))
def test_layers_between_the_servers_count_once_for_each_client(engine: str) -> None:
    """Three clients have all layers up to the deepest cut; of the others the rest goes from server to server."""
    cuts, full = (1, 3, 2, 3, 3), Ledger(count_buffers=True)
    split = Split(resnet(dtype=torch.float32), 3)
    method = methods.hasfl(model=split, client_opt=OPT, server_opt=OPT, interval=1, batches="fixed", cuts=cuts)
    sim = simulation(method, images(dtype=torch.float32), engine=engine, meters=(full,))
    run(sim, ROUNDS)
    lower = {cut: Split(resnet(dtype=torch.float32), cut).initial()[0] for cut in (1, 2, 3)}
    for ledger, sized in ((sim.ledger, lambda m: m.params), (full, lambda m: (m.params, m.buffers))):
        size = {cut: tree.num_bytes(sized(model)) for cut, model in lower.items()}
        expected = ROUNDS * sum(size[3] - size[cut] for cut in cuts)
        assert ledger.totals["inter_server_model"] == ledger.totals["inter_server_sync"] == expected > 0
    assert not any(name.startswith("inter_server") for counts in sim.ledger.per_client.values() for name in counts)


def test_only_the_clients_of_a_round_cost_anything() -> None:
    ledger = ran("sfl_v1", 1, per_round=2).ledger
    model = 4 * parameters(1)[0]
    assert ledger.totals["up_model"] == ledger.totals["down_model"] == ROUNDS * 2 * model


def test_more_epochs_cost_more_batches_but_no_more_models() -> None:
    once, thrice = (ran("sfl_v1", 1, batching=Batching(size=4, epochs=e)).ledger.totals for e in (1, 3))
    for name in once:
        assert thrice[name] == once[name] * (1 if name.endswith(("model", "settings")) else 3), name


def test_a_model_is_its_parameters_trained_or_not() -> None:
    four, eight = torch.zeros(1), torch.zeros(2)
    model = Model({"w": four}, {"frozen": eight}, {"mean": eight})
    assert Ledger().size(model) == 12
    assert Ledger(count_buffers=True).size(model) == 20
    assert Ledger().size((four, 3, None)) == 12  # a plain number counts 8
