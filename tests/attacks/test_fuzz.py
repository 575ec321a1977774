"""Fifty thousand conversations that are nearly those of a method: no crash, no raw value out, no growth of memory."""

import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import pytest
import torch
from conftest import SEED, clients_of, images
from fuzzer import Conversation, Said, fuzzed, other_tensor
from in_process import carried, deployment, device, join, terms
from torch import Tensor, nn
from victims import BACK, NEXT, Attack, attack, first

from cutlayer import methods, optim
from cutlayer.core import keys
from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.remote.device.session import ClientDevice, Reply, Session
from cutlayer.remote.device.terms import Allowance, Attempts
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol.messages import Answer, Refusal, Work
from cutlayer.remote.server.sessions import Answered, Sessions
from cutlayer.split import Split

pytestmark = pytest.mark.slow

OWN = 1  # the client that is attacked
SIZES, SIDE = (8, 9, 6), 2
CONVERSATIONS = 50_000
MOST_GROWTH = 50 * 2**20
CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "sfl_v1": ("sfl_v1", {}, None),
    "u-shaped": ("sfl_v1", {}, 2),
    "fedavg": ("fedavg", {}, None),
    "mergesfl": ("mergesfl", {}, None),
    "hosfl": ("hosfl", {"smoothing": 0.1}, None),
    "hasfl": ("hasfl", {"interval": 2, "batches": "fixed", "cuts": "fixed"}, None),
    "fsl_sage": ("fsl_sage", {"align_epochs": 2}, None),
}


def method_of(case: str) -> tuple[Method, Batching]:
    name, options, head = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        lower = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 3), nn.ReLU())
        net = nn.Sequential(lower, nn.Linear(3, 3), nn.Linear(3, 10)).double()
    opt = optim.sgd(0.05)
    counts = name in ("hosfl", "hasfl")
    return methods.build(name, Split(net, 1, head=head), opt, opt, **options), Batching(size=4) if counts else Batching(
        size=4, steps=2
    )


@dataclass
class Target:
    """A device with terms, and the conversations that honest servers have with it."""

    case: str
    device: ClientDevice
    honest: list[Conversation]
    outcomes: Counter[str] = field(default_factory=Counter)


@cache
def target(case: str) -> Target:
    method, batching = method_of(case)
    data, parts = images(sum(SIZES), side=SIDE), clients_of(SIZES)
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
        there = deployment(method, data, parts, batching=batching, seed=SEED)
        state = there.start()
        for _ in range(2):
            state = there.round(state)
    finally:
        Session.work = work  # type: ignore[method-assign]
    own = terms(method, data, parts, batching, OWN, SEED)
    return Target(case, device(method, data, parts, batching, OWN, terms=own), heard)


def played(rng: random.Random, who: Target, said: Conversation) -> Iterator[Reply]:
    """Let the device answer; whatever it is asked, it neither crashes nor answers anything but its method's values."""
    assert who.device.terms is not None
    who.device.terms.attempts = Attempts(100, 255)
    session, round = Session(who.device, 7), rng.choice([0, 0, 0, 1, 99, 100, 2**62])
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
    """No number of the inputs leaves in whatever shape, no label of a U-shape, and nothing beside a refusal."""
    if isinstance(reply.message, Refusal):
        assert not reply.tensors and reply.message.reason
        return
    inputs = who.device.data.x.flatten()
    for value in reply.tensors:
        assert not torch.isin(value.flatten().double(), inputs).any()
        assert who.case not in ("u-shaped", "fedavg") or value.is_floating_point() or not value.dim()


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_fifty_thousand_conversations_take_nothing_from_a_device() -> None:
    rng = random.Random(0)
    targets = [target(case) for case in CASES]
    honest = [said for one in targets for said in one.honest]
    before = 0
    for number in range(CONVERSATIONS):
        if number == CONVERSATIONS // 10:
            before = resident()
        who = targets[number % len(targets)]
        said = fuzzed(rng, who.honest if rng.random() < 0.9 else honest)
        for reply in played(rng, who, said):
            check(who, reply)
            who.outcomes[type(reply.message).__name__] += 1
    assert resident() - before < MOST_GROWTH
    for who in targets:
        assert min(who.outcomes["Answer"], who.outcomes["Refusal"]) > CONVERSATIONS / 200, (who.case, who.outcomes)


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# -- in the other direction ----------------------------------------------------------------------------------------

ROUNDS = 2000


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


@pytest.mark.parametrize("case", ["sfl_v1", "fedavg", "hosfl"])
def test_a_client_that_answers_nearly_right_ends_no_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    method, batching = method_of(case)
    data, parts = images(sum(SIZES), side=SIDE), clients_of(SIZES)
    work, devices = Session.work, {j: device(method, data, parts, batching, j) for j in range(len(SIZES))}
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
    there = deployment(method, data, parts, batching=batching, seed=SEED)
    sessions = there.backend.sessions  # type: ignore[attr-defined]
    state = there.start()
    for _ in range(ROUNDS // len(CASES)):
        state = there.round(state)
        for client in set(devices) - sessions.present().keys():
            join(sessions, devices[client])
    values: Mapping[str, Tensor] = method.model.export(methods.global_model(state))
    assert all(value.isfinite().all() for value in values.values())


# -- over sockets --------------------------------------------------------------------------------------------------

OVER_SOCKETS = 500


@pytest.mark.xdist_group("attacks on devices")
def test_five_hundred_conversations_over_sockets_take_nothing_from_a_device() -> None:
    rng, seen = random.Random(2), Counter[str]()
    with attack(allowance=Allowance(attempts=255)) as a:
        who, inputs = a.who, a.own.data.x[a.own.data.x.abs() > 0].unique()
        honest = [honest_of(a)]
    conversations = iter(range(OVER_SOCKETS))
    left = OVER_SOCKETS
    while left:
        with attack(allowance=Allowance(attempts=255)) as a:
            assert a.who is who
            for _ in conversations:
                left -= 1
                if not spoken(rng, a, fuzzed(rng, honest), inputs, seen):
                    break  # it has hung up, and comes back
    assert seen["answer"] > 50 and seen["refusal"] > 200


def honest_of(a: Attack) -> Conversation:
    flat, z = a.model, torch.zeros(8, 2, 4, 4)
    numbers = (*flat.numbers, 0, 8, 0, 11, 0, 11)
    return [
        Said(True, first(flat.skeleton), numbers, tuple(flat.tensors)),
        Said(False, (*BACK, *NEXT), (8, 1, 11, 1, 11), (z,)),
    ]


def spoken(rng: random.Random, a: Attack, said: Conversation, inputs: Tensor, seen: Counter[str]) -> bool:
    """Have a conversation; return whether the device still listens."""
    round = rng.randrange(1000)
    for one in said:
        a.visit.tell(one.commands, one.numbers, one.tensors, begins=one.begins, round=round)
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
