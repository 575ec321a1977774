"""Fifty thousand conversations that are nearly those of a method: no crash, no raw value out, no growth of memory."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from conftest import SEED, clients_of, images
from device_pool import Served, shared
from fuzzer import Conversation, Said, fuzzed, other_tensor
from in_process import carried, deployment, device, join, terms
from safetensors.torch import load
from test_grpc_faults import RUN, devices, outcome, serving
from test_grpc_strangers import hello
from torch import Tensor, nn
from two_servers import trained_apart
from victims import BACK, NAMES, NEXT, Attack, attack, credentials, first, folder, process

from cutlayer import methods, optim
from cutlayer.core import keys, tree
from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.core.state import Model
from cutlayer.core.tree import Tree
from cutlayer.planning.devices import Pool
from cutlayer.planning.problem import Costs
from cutlayer.planning.profile import profile
from cutlayer.remote.device.client import _ready
from cutlayer.remote.device.session import ClientDevice, Reply, Session
from cutlayer.remote.device.stream import Stream, StreamEnded
from cutlayer.remote.device.terms import Allowance, Attempts
from cutlayer.remote.joining.join import DeviceSettings
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol.messages import Answer, Done, Refusal, Welcome, Work
from cutlayer.remote.server.sessions import Answered, Sessions
from cutlayer.remote.server.streams import OVER
from cutlayer.runs.codecs import coders
from cutlayer.split import Split

pytestmark = pytest.mark.slow

OWN = 1  # the client that is attacked
SIZES, SIDE = (8, 9, 6), 2
CONVERSATIONS = 50_000
MOST_GROWTH = 50 * 2**20


class Case(NamedTuple):
    """A method, and how it is split and coded."""

    method: str
    options: Mapping[str, Any] = MappingProxyType({})
    head: int | None = None
    codecs: Mapping[str, Any] = MappingProxyType({})
    two: bool = False  # owners
    share: int = 20  # of the conversations, in comparison


CASES = {
    "sfl_v1": Case("sfl_v1"),
    "two owners": Case("sfl_v1", two=True),
    "u-shaped": Case("sfl_v1", head=2),
    "coded": Case(
        "sfl_v1",
        codecs={
            "activations": {"name": "gaussian", "std": 0.5, "clip": 1.0},
            "gradients": "int8",
            "model": {"name": "topk", "share": 0.5, "error_feedback": True},
        },
    ),
    "fedavg": Case("fedavg"),
    "mergesfl": Case("mergesfl"),
    "hosfl": Case("hosfl", {"smoothing": 0.1}),
    "hasfl": Case("hasfl", {"interval": 2, "batches": "fixed", "cuts": "fixed"}),
    "hasfl with cuts that move": Case("hasfl", {"interval": 2, "batches": "planned", "cuts": "planned"}, share=1),
    "smofi with cuts that move": Case("smofi", {"random_cut": (1, 2)}, share=1),
    "fsl_sage": Case("fsl_sage", {"align_epochs": 2}),
}


def method_of(case: str) -> tuple[Method, Batching]:
    name, options, head, *_ = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        lower = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 3), nn.ReLU())
        net = nn.Sequential(lower, nn.Linear(3, 3), nn.Linear(3, 10)).double()
    if "planned" in options.values():
        costs = Costs.of(profile(net, (1, SIDE, SIDE)))
        options = {**options, "devices": Pool().draw(len(SIZES), 1e6, 0), "costs": costs}
    opt = optim.sgd(0.05, momentum=0.9 if name == "smofi" else 0.0)
    counts = name in ("hosfl", "hasfl")
    made = methods.build(name, Split(net, 1, head=head), opt, opt, **options)
    return made, Batching(size=4) if counts else Batching(size=4, steps=2)


@dataclass
class Target:
    """A device with terms, and the conversations that honest servers have with it."""

    case: str
    device: ClientDevice
    honest: list[Conversation]
    outcomes: Counter[str] = field(default_factory=Counter)

    @cached_property
    def layers(self) -> Model:
        """The layers at the client, as they are at the beginning."""
        return method_of(self.case)[0].model.initial()[0]


@cache
def target(case: str) -> Target:
    method, batching = method_of(case)
    data, parts, own = images(sum(SIZES), side=SIDE), clients_of(SIZES), CASES[case]
    coded = coders(own.codecs, method.model, data.take([0, 1]).x)
    heard: list[Conversation] = []
    work = Session.work

    def noted(self: Session, one: Work, tensors: Sequence[Tensor]) -> Any:
        if self.device.client == OWN:
            heard.extend([[]] if one.begins else [])
            commands = self._lists[one.list] if one.commands is None else one.commands
            heard[-1].append(Said(one.begins, commands, one.numbers, tuple(tensors)))
        return work(self, one, tensors)

    Session.work = noted  # type: ignore[method-assign]
    try:
        if own.two:
            trained_apart(lambda: method_of(case)[0], data, parts, batching=batching, seed=SEED)
        else:
            there = deployment(method, data, parts, batching=batching, seed=SEED, codecs=own.codecs)
            there.round(there.round(there.start()))
    finally:
        Session.work = work  # type: ignore[method-assign]
    agreed = terms(method, data, parts, batching, OWN, SEED, coded, two_servers=own.two)
    return Target(case, device(method, data, parts, batching, OWN, coded, terms=agreed), heard)


def from_fed(rng: random.Random, who: Target) -> Callable[[int, int], Tree] | None:
    """What a fed server sends of its own: layers, nearly as they should be."""
    if not CASES[who.case].two:
        return None
    changes = rng.choice([0.0, 0.0, 0.3])
    return lambda token, number: tree.map(lambda a: other_tensor(rng, a) if rng.random() < changes else a, who.layers)


def played(rng: random.Random, who: Target, said: Conversation) -> Iterator[Reply]:
    """Let the device answer; whatever it is asked, it neither crashes nor answers anything but its method's values."""
    assert who.device.terms is not None
    who.device.terms.attempts = Attempts(100, 255)
    session, round = Session(who.device, 7, from_fed(rng, who)), rng.choice([0, 0, 0, 1, 99, 100, 2**62])
    for number, one in enumerate(said):
        work = Work(
            session=7,
            number=number + 1,
            round=round if rng.random() < 0.95 else 1 - min(round, 1),
            key=keys.fold(SEED, "round", round) if rng.random() < 0.95 else rng.choice([0, 2**62]),
            token=1 if rng.random() < 0.95 else 2,
            begins=one.begins,
            tests=rng.random() < 0.02,
            list=number,
            commands=one.commands,
            numbers=one.numbers,
        )
        reply = session.work(work, list(one.tensors))
        if reply is not None:
            yield reply


def check(who: Target, reply: Reply) -> None:
    """No number of the inputs leaves in whatever shape, no label of a U-shape, and nothing beside a refusal. Of two
    owners, the fed server gets layers, and nobody else does."""
    if isinstance(reply.message, Refusal):
        assert not reply.tensors and reply.message.reason
        return
    inputs = who.device.data.x.flatten()
    for value in reply.tensors:
        assert not torch.isin(value.flatten().double(), inputs).any()
        assert who.case not in ("u-shaped", "fedavg") or value.is_floating_point() or not value.dim()
    if CASES[who.case].two:
        assert reply.to_fed == ([a.shape for a in reply.tensors] == [a.shape for a in who.layers.params.values()])


def resident(pid: int | None = None) -> int:
    return psutil.Process(pid).memory_info().rss


def test_fifty_thousand_conversations_take_nothing_from_a_device() -> None:
    rng = random.Random(0)
    targets = [target(case) for case in CASES]
    turns = [one for one in targets for _ in range(CASES[one.case].share)]
    honest = [said for one in targets for said in one.honest]
    before = 0
    for number in range(CONVERSATIONS):
        if number == CONVERSATIONS // 10:
            before = resident()
        who = turns[number % len(turns)]
        said = fuzzed(rng, who.honest if rng.random() < 0.9 else honest)
        for reply in played(rng, who, said):
            check(who, reply)
            who.outcomes[type(reply.message).__name__] += 1
    assert resident() - before < MOST_GROWTH
    for who in targets:
        fewest = CONVERSATIONS * CASES[who.case].share / len(turns) / 30
        assert min(who.outcomes["Answer"], who.outcomes["Refusal"]) > fewest, (who.case, who.outcomes)


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# -- in the other direction ----------------------------------------------------------------------------------------

ROUNDS = 285  # of each case


def fuzzed_reply(rng: random.Random, reply: Reply) -> list[Reply]:
    """Other tensors or numbers than were asked for, other tokens, or a refusal; twice, or not at all."""
    own = reply.message
    if not isinstance(own, Answer) or rng.random() < 0.3:
        return [reply]
    match rng.randrange(6):
        case 0:
            refusal = Refusal(session=own.session, number=own.number, where="\x1b[2J", reason="\r\n[bold]" * 90)
            return [Reply(refusal, [])]
        case 1:
            return [reply, reply]
        case 2:
            wrong = Answer(own.session, own.number, own.token + 1, own.seconds, own.numbers)
            return [Reply(wrong, reply.tensors)]
        case 3:
            return [Reply(own, reply.tensors[1:] if rng.random() < 0.5 else [*reply.tensors, torch.zeros(2)])]
        case 4:
            nan = Answer(own.session, own.number, own.token, float("nan"), (*own.numbers, float("nan")))
            return [Reply(nan, reply.tensors)]
        case _:
            others = [other_tensor(rng, a) if rng.random() < 0.5 else a for a in reply.tensors]
            return [
                Reply(
                    own,
                    [a if (b.double().abs() > 1e20).any() else b for a, b in zip(reply.tensors, others, strict=True)],
                )
            ]


@pytest.mark.parametrize("case", ["sfl_v1", "fedavg", "hosfl", "coded", "smofi with cuts that move"])
def test_a_client_that_answers_nearly_right_ends_no_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    method, batching = method_of(case)
    data, parts = images(sum(SIZES), side=SIDE), clients_of(SIZES)
    codecs = CASES[case].codecs
    coded = coders(codecs, method.model, data.take([0, 1]).x)
    work, devices = Session.work, {j: device(method, data, parts, batching, j, coded) for j in range(len(SIZES))}
    take, sessions_of = Sessions.take, list[Sessions]()

    def twisted(self: Session, one: Work, tensors: Sequence[Tensor]) -> Reply | None:
        reply = work(self, one, tensors)
        if self.device.client != 0 or reply is None:
            return reply
        *more, last = fuzzed_reply(rng, reply)
        for other in more:
            take(sessions_of[-1], Answered(0, self.number, *carried(other)))
        return last

    def noted(self: Sessions, event: Any) -> None:
        sessions_of[:] = [self]
        take(self, event)

    monkeypatch.setattr(Session, "work", twisted)
    monkeypatch.setattr(Sessions, "take", noted)
    there = deployment(method, data, parts, batching=batching, seed=SEED, codecs=codecs)
    sessions = there.backend.sessions  # type: ignore[attr-defined]
    state, before = there.start(), 0
    for number in range(ROUNDS):
        before = resident() if number == ROUNDS // 10 else before
        state = there.round(state)
        for client in set(devices) - sessions.present().keys():
            join(sessions, devices[client])
    assert resident() - before < MOST_GROWTH
    values: Mapping[str, Tensor] = method.model.export(methods.global_model(state))
    assert all(value.isfinite().all() for value in values.values())


# -- over sockets --------------------------------------------------------------------------------------------------

OVER_SOCKETS = 500


@pytest.mark.xdist_group("attacks on devices")
def test_five_hundred_conversations_over_sockets_take_nothing_from_a_device() -> None:
    rng, seen, before = random.Random(2), Counter[str](), 0
    with attack(allowance=Allowance(attempts=255)) as a:
        who, inputs = a.who, a.own.data.x[a.own.data.x.abs() > 0].unique()
    conversations = iter(range(OVER_SOCKETS))
    left = OVER_SOCKETS
    while left:
        with attack(allowance=Allowance(attempts=255)) as a:
            assert a.who is who
            for number in conversations:
                left -= 1
                if number == OVER_SOCKETS // 10:
                    before = resident(process().pid)
                a.round = rng.randrange(a.run.rounds)
                if not spoken(a, fuzzed(rng, [honest_of(a)]), inputs, seen):
                    break  # it has hung up, and comes back
    assert seen["answer"] > 50 and seen["refusal"] > 200
    assert resident(process().pid) - before < MOST_GROWTH


def honest_of(a: Attack) -> Conversation:
    flat, z = a.model, torch.zeros(8, 2, 4, 4)
    numbers = (*flat.numbers, a.round, 8, 0, 0, 0, 0)
    return [
        Said(True, first(flat.skeleton), numbers, tuple(flat.tensors)),
        Said(False, (*BACK, *NEXT), (8, 1, 1, 1, 1), (z,)),
    ]


def spoken(a: Attack, said: Conversation, inputs: Tensor, seen: Counter[str]) -> bool:
    """Have a conversation; return whether the device still listens."""
    for one in said:
        a.visit.tell(one.commands, one.numbers, one.tensors, begins=one.begins, round=a.round)
    a.visit.tell([c.Free(9)], begins=True)  # the last word
    while (answer := a.visit.hear()) is not None:
        if isinstance(answer, str):
            seen["refusal"] += 1
            if "slot 9 is empty" in answer:
                return True
            continue
        seen["answer"] += 1
        pixels = inputs.tolist()
        for value in answer:
            rows = value.flatten(1) if value.dim() > 1 else value[None]
            assert rows.shape[1] != 64 or not torch.isin(rows, torch.tensor(pixels, dtype=rows.dtype)).all(1).any()
    return False


TO_A_SERVER = 250


@pytest.mark.xdist_group("attacks of clients")
def test_a_client_that_answers_nearly_right_over_sockets_ends_no_run(tmp_path: Path) -> None:
    """In each round eve has a conversation; the next one waits until she has come again."""
    rng, seen, before = random.Random(3), Counter[str](), 0
    keys, run = folder() / "keys", replace(RUN, rounds=TO_A_SERVER, eval_every=TO_A_SERVER, checkpoint_every=100)
    order = Served(run=run, folder=tmp_path / "served", serving=serving(keys, patience=300, least=len(NAMES)))
    settings = DeviceSettings(data="digits")
    with shared().some(2) as (server, clients):
        server.order(order)
        server.hear("open")
        clients.order(devices(order, keys, tmp_path / "state", NAMES[:2]))
        while answering(rng, order.serving.listen, settings, seen) != OVER:
            seen["hung up"] += 1
            if seen["hung up"] == TO_A_SERVER // 10:
                before = resident(server.pid)
        growth = resident(server.pid) - before
        status, _ = server.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES[:2]) == [(name, OVER) for name in NAMES[:2]]
    assert growth < MOST_GROWTH
    assert seen["answers"] > TO_A_SERVER and seen["hung up"] > TO_A_SERVER / 2
    assert [c.state for c in status.clients.values()] == ["done"] * 3
    assert all(value.isfinite().all() for value in load(outcome(order.folder)["model.safetensors"]).values())


def answering(rng: random.Random, address: str, settings: DeviceSettings, seen: Counter[str]) -> str:
    """Take part as eve until the server hangs up; return its last words."""
    stream = Stream(address, "train", credentials("eve"))
    stream.say(hello("eve"))
    stream.most = (2**20, 2**20)
    try:
        for message, tensors in stream:
            if isinstance(message, Welcome):
                session = Session(settings.ready(message), message.session)
                stream.say(_ready(session.device, message.session))
            elif isinstance(message, Work) and (reply := session.work(message, tensors)) is not None:
                for one in fuzzed_reply(rng, reply):
                    stream.say(one.message, one.tensors)
                seen["answers"] += 1
            elif isinstance(message, Done):
                return OVER
    except StreamEnded as left:
        return str(left)
    finally:
        stream.close()
    return "closed"
