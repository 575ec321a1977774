"""Specifies how models go up as changes: with what was lost before, from the base that each client has, and as one
vector where a codec wants that."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import agree, clients_of, images, run, sgd_by_hand, simulation, walk
from torch import Tensor, nn

from cutlayer import codecs, methods, optim
from cutlayer.core import tree
from cutlayer.core.coders import coder
from cutlayer.core.kinds import MODEL
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.program import at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Model, State
from cutlayer.core.values import united
from cutlayer.pieces.sampler import Draw
from cutlayer.split import Split

OPT = optim.sgd(0.05)
SPARSE = {"name": "topk", "share": 0.2}
ByHand = Callable[[Tensor], Tensor]  # what arrives of a tensor
CLIENTS = ((0, 1, 3), (0, 2), (1, 2, 3), (0, 3), (0, 1, 2))  # of each round


def mlp() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()


def drawn(draw: Draw) -> tuple[int, ...]:
    return CLIENTS[draw.round]


# -- error feedback ----------------------------------------------------------------------------------------------------


def topk_by_hand(a: Tensor) -> Tensor:
    kept = a.flatten().abs().topk(math.ceil(0.2 * a.numel())).indices
    return torch.zeros_like(a).flatten().scatter(0, kept, a.flatten()[kept]).reshape(a.shape)


def rounded_by_hand(most: int) -> ByHand:
    def rounded(a: Tensor) -> Tensor:
        scale = (a.abs().max() / most).float().double()
        return (a / scale).round() * scale

    return rounded


def chained_by_hand(a: Tensor) -> Tensor:
    return topk_by_hand(a).bfloat16().double()


def trained_by_hand(rounds: int, sent_of: ByHand) -> dict[str, Tensor]:
    """FedAvg whose clients get whole models, send a part of what they have to say, and keep the rest for next time."""
    data, partition, net = images(), clients_of(), mlp()
    model = {name: value.clone() for name, value in net.state_dict().items()}
    rest = {j: {name: torch.zeros_like(a) for name, a in model.items()} for j in range(len(partition))}
    for number, ids in enumerate(CLIENTS[:rounds]):
        batches, arrived = walk(partition, number=number), []
        for j in ids:
            net.load_state_dict(model)
            own = [batches.samples(j, step) for step in range(batches.per_round(j))]
            after = sgd_by_hand(net, data, own, 0.05)
            wanted = {name: after[name] - model[name] + rest[j][name] for name in model}
            sent = {name: sent_of(a) for name, a in wanted.items()}
            rest[j] = {name: wanted[name] - sent[name] for name in model}
            arrived.append({name: model[name] + sent[name] for name in model})
        sizes = [len(partition.clients[j]) for j in ids]
        model = {
            name: torch.stack([n * a[name] for n, a in zip(sizes, arrived, strict=True)]).sum(0) / sum(sizes)
            for name in model
        }
    return model


BY_HAND: dict[str, tuple[dict[str, Any], ByHand]] = {
    "topk": (SPARSE, topk_by_hand),
    "int8": ({"name": "int8"}, rounded_by_hand(127)),
    "int4": ({"name": "int4"}, rounded_by_hand(7)),
    "bf16": ({"name": "bf16"}, lambda a: a.bfloat16().double()),
    "chain": ({"chain": [SPARSE, "bf16"]}, chained_by_hand),
}


@pytest.mark.parametrize(("codec", "engine"), [*((name, "loop") for name in BY_HAND), ("topk", "vmap")])
def test_error_feedback_of_clients_that_come_and_go_is_that_by_hand(codec: str, engine: str) -> None:
    method = methods.build("fedavg", Split(mlp(), 1), OPT, OPT)
    spec, sent_of = BY_HAND[codec]
    given = {"model": {**spec, "error_feedback": True}}
    sim = simulation(method, sampler=drawn, per_round=3, codecs=given, engine=engine)
    rounds = len(CLIENTS)
    found = method.model.export(methods.global_model(run(sim, rounds)))
    agree(found, trained_by_hand(rounds, sent_of), 1e-12)
    assert "down_model" not in sim.ledger.before


def test_what_was_lost_of_a_layer_waits_until_the_client_holds_it_again() -> None:
    """The second tensor is at the client in every second round."""
    own = coder("model", codecs.build({**SPARSE, "error_feedback": True}))
    assert own is not None
    steps = {"low": torch.arange(1.0, 12).double().sqrt(), "high": torch.arange(3.0, 14).double().log()}
    rest: Any = own.no_rest({"low": steps["low"]})
    left, arrived = ({name: torch.zeros_like(a) for name, a in steps.items()} for _ in range(2))
    for number in range(6):
        there = {name: steps[name] for name in (("low", "high") if number % 2 else ("low",))}
        coded, rest = own.encode_with_rest(there, tree.map(torch.zeros_like, there), rest)
        got = own.decode_change(coded, tree.map(torch.zeros_like, there))
        for name in there:
            wanted = steps[name] + left[name]
            sent = topk_by_hand(wanted)
            left[name] = wanted - sent
            arrived[name] += sent
            agree(got[name], sent)
        agree(rest, {name: left[name] for name in rest})
    assert rest.keys() == steps.keys()
    for name, times in (("low", 6), ("high", 3)):
        agree(arrived[name] + rest[name], times * steps[name])


# -- the base of a change ----------------------------------------------------------------------------------------------


@method
@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Sends one model to the first clients, another to the others, and adds to both at the clients."""

    model: Split
    first: int  # clients that get zeros
    others: int = 0  # from this client on they get eights
    assigns: bool = False  # puts the result in the place of what came down
    calls_nobody: bool = False  # asks no client for its model, before it asks all

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), None)

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        some, others = clients.only(clients.ids[: self.first]), clients.only(clients.ids[self.others :])
        there = united(
            some.down(MODEL, fed.do(_zeros, state.client))[_without(some, others)],
            others.down(MODEL, fed.do(_eights, state.client)),
        )
        moved = clients.do(self.moved, there)
        if self.assigns:
            there[clients] = moved
            moved = there
        if self.calls_nobody:
            clients.only(()).up(MODEL(moved))
        up = clients.up(MODEL(clients.do(self.same, moved)))
        return State(state.round + 1, fed.mean(up, dict.fromkeys(up.ids, 1.0)), state.server, None)

    @at_client(gives=MODEL)
    def moved(self, model: Model) -> Model:
        return model._replace(params=tree.map(lambda a: a + _numbers(a), model.params))

    @at_client(gives=MODEL)
    def same(self, model: Model) -> Model:
        return model


def _without(clients: Clients, others: Clients) -> Clients:
    return clients.only(tuple(j for j in clients.ids if j not in others.ids))


def _numbers(a: Tensor) -> Tensor:
    return torch.arange(a.numel(), dtype=a.dtype).reshape(a.shape)


def _zeros(model: Model) -> Model:
    return tree.map(torch.zeros_like, model)


def _eights(model: Model) -> Model:
    return tree.map(lambda a: torch.full_like(a, 8), model)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("first", "others"), [(2, 2), (5, 2), (5, 0), (0, 0)])
def test_each_clients_change_is_from_the_model_that_it_got_last(
    first: int, others: int, feedback: bool, engine: str
) -> None:
    method: Any = Grouped(model=Split(mlp(), 2), first=first, others=others)
    given = {"model": {**SPARSE, "error_feedback": feedback}}
    found = run(simulation(method, codecs=given, engine=engine), 1).client.tree.params
    base = 8 * (5 - others) / 5
    agree(found, tree.map(lambda a: topk_by_hand(_numbers(a)) + base, found))


def test_each_clients_losses_belong_to_the_model_that_it_got_last() -> None:
    """Clients that get another model in between keep what they lose of it by itself."""
    method: Any = Grouped(model=Split(mlp(), 2), first=5, others=2)
    found = run(simulation(method, codecs={"model": {**SPARSE, "error_feedback": True}}), 3).client.tree.params
    total = tree.map(lambda a: _numbers(a), found)
    lost = tree.map(torch.zeros_like, found)
    for _ in range(3):
        wanted = tree.map(torch.add, total, lost)
        lost = tree.map(lambda a: a - topk_by_hand(a), wanted)
    agree(found, tree.map(lambda a: topk_by_hand(a) + 8 * 3 / 5, wanted))


@pytest.mark.parametrize("codec", ["int8", SPARSE, {**SPARSE, "error_feedback": True}])
def test_nothing_goes_up_from_nobody(codec: Any) -> None:
    sim = simulation(Grouped(model=Split(mlp(), 2), first=2, others=2, calls_nobody=True), codecs={"model": codec})  # type: ignore[arg-type]
    assert run(sim, 1).round == 1


def test_a_method_that_assigns_to_what_came_down_leaves_the_base_as_it_was() -> None:
    one, other = (
        run(simulation(Grouped(model=Split(mlp(), 2), first=2, others=2, assigns=assigns), codecs={"model": SPARSE}), 1)  # type: ignore[arg-type]
        for assigns in (False, True)
    )
    agree(other.client.tree, one.client.tree, 0)


# -- all tensors as one vector -----------------------------------------------------------------------------------------

CLIP = {"name": "clip", "norm": 1.0}
EACH: list[Any] = [
    CLIP,
    {"name": "gaussian", "std": 0.1},
    {"name": "laplace", "scale": 0.1},
    [CLIP, SPARSE],
    [CLIP, "int8"],
    {**SPARSE, "error_feedback": True},
]


@pytest.mark.parametrize("codec", EACH, ids=lambda codec: str(codecs.build(codec)))
@pytest.mark.parametrize("cut", [0, 1])
def test_clients_without_parameters_send_nothing(cut: int, codec: Any) -> None:
    given = {"model": codec}
    bare, coded = (simulation(methods.build("sfl_v1", Split(mlp(), cut), OPT, OPT), codecs=own) for own in ({}, given))
    agree(run(coded, 1).server.tree, run(bare, 1).server.tree, 0)
    assert coded.ledger.totals == bare.ledger.totals and not coded.ledger.before


def test_only_numbers_with_a_fraction_are_part_of_the_vector() -> None:
    own = coder("model", codecs.build([CLIP, "int8"]))
    assert own is not None
    base = {"whole": torch.arange(3), "a": torch.zeros(2, 2), "none": torch.zeros(0, 3), "b": torch.zeros(3).bfloat16()}
    moved = {
        "whole": torch.arange(3) + 5,
        "a": torch.ones(2, 2),
        "none": torch.zeros(0, 3),
        "b": torch.ones(3).bfloat16(),
    }
    coded = own.encode_change(moved, base)
    own.check(coded)
    assert tree.num_bytes(coded) == 3 * 8 + 7 + 4
    got = own.decode_change(coded, base)
    assert tree.signature(got) == tree.signature(moved)
    assert torch.equal(got["whole"], moved["whole"])
    torch.testing.assert_close(got["a"], torch.full((2, 2), 7**-0.5))
    torch.testing.assert_close(got["b"], torch.full((3,), 7**-0.5).bfloat16())


@pytest.mark.parametrize("value", [{}, {"n": torch.arange(3)}, {"none": torch.zeros(0, 3)}, [torch.arange(2)]])
def test_a_value_with_nothing_to_encode_crosses_as_it_is(value: Any) -> None:
    own = coder("model", codecs.build(CLIP))
    assert own is not None
    coded = own.encode_change(value, value)
    own.check(coded)
    assert tree.equal(coded, value) and tree.equal(own.decode_change(coded, value), value)
