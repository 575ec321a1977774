"""Real devices in a process of their own, whose servers are evil; each comes back for the next attack."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from device_pool import Devices, Process
from evil_server import EvilServer, Said, Visit
from test_grpc_faults import RUN

from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.remote.device.session import Session
from cutlayer.remote.device.terms import Allowance
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.joining.join import DeviceSettings
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.tensors.trees import Flat, flatten
from cutlayer.runs import build, config
from cutlayer.runs.config import Choice, Run

NAMES = ("ann", "bob", "eve")
VICTIM = 0  # the number of ann
LONG = replace(RUN, rounds=1000)  # each attack has a round of its own
WHOLE = Batching(size=8)  # of methods that count their steps themselves
RATE = 0.05
WIDE = Choice("mlp", {"hidden": (256,)})  # four units for each pixel
RUNS: Mapping[str, Run] = {
    "sfl_v1": LONG,
    "linear": replace(LONG, model=Choice("mlp", {"hidden": (128,)})),
    "u-shaped": replace(LONG, head="head"),
    "coded": replace(LONG, codecs={"activations": {"name": "gaussian", "std": 0.5, "clip": 1.0}}),
    "joint norm": replace(LONG, optimiser=Choice("sgd", {"lr": 0.05, "clip": 1.0, "clip_scope": "joint"})),
    "fedavg": replace(LONG, method=Choice("fedavg")),
    "hasfl": replace(
        LONG,
        method=Choice("hasfl", {"interval": 2, "batches": "planned", "cuts": "fixed"}),
        batching=WHOLE,
        devices=Choice("table1"),
    ),
    "deep": replace(
        LONG, method=Choice("hasfl", {"interval": 2, "batches": "fixed", "cuts": "fixed"}), batching=WHOLE, cut=2
    ),
    "held out": replace(LONG, hold_out=0.3),
    "wide": replace(
        LONG, subset=1.0, model=WIDE, optimiser=Choice("sgd", {"lr": RATE}), batching=Batching(size=16), rounds=4
    ),
    "zo_sfl": replace(LONG, method=Choice("zo_sfl"), model=WIDE, optimiser=Choice("sgd", {"lr": RATE})),
}


def keys_of(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """All keys of a trial, in this folder."""
    trial(folder, clients=",".join(names))
    return folder


@cache
def folder() -> Path:
    """Where the parties of this pytest worker have their keys and files."""
    made = Path(tempfile.mkdtemp(prefix="cutlayer-attacks-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    keys_of(made / "keys")
    return made


def credentials(of: str) -> Credentials:
    return Credentials.load(folder() / "keys" / (of if of in ("train", "fed") else f"clients/{of}"))


@cache
def process() -> Process:
    """The process of all victims."""
    made = Process()
    made.wait_until_warm()
    return made


class Own(NamedTuple):
    """What a device has: its samples, and its copy of the method."""

    data: Arrays
    method: Method
    model: Flat  # the layers at the client, as they are at the beginning


@cache
def own(name: str) -> Own:
    run = RUNS[name]
    whole = build.dealt(run)
    mine = whole.data.take(whole.partition.clients[VICTIM])
    split = build.model_of(run, mine)
    method, _ = build.planned_method(run, split, mine, run.clients)
    return Own(mine, method, flatten(split.initial()[0]))


class Victim:
    """A device that has agreed to one run, and the servers that it is joined to."""

    def __init__(self, name: str, two: bool, terms: Mapping[str, Any]) -> None:
        self.name, self.run = name, RUNS[name]
        self._rounds = count()
        here = Path(tempfile.mkdtemp(dir=folder()))
        file = here / f"{self.run.name}.toml"
        file.write_text(config.dumps(self.run), encoding="utf-8")
        self.state, self.audit = here / "state", here / "audit.jsonl"
        self.train = EvilServer(credentials("train"), self.run)
        self.fed = EvilServer(credentials("fed"), self.run) if two else None
        settings = {"config": file, "allowance": Allowance(attempts=3), "audit": self.audit, **terms}
        self.order = Devices(
            address=self.train.address,
            fed=None if self.fed is None else self.fed.address,
            keys=folder() / "keys",
            names=NAMES[:1],
            state=self.state,
            settings=settings,
            gives_up_after=1000,
        )
        process().order(self.order)

    def new_round(self) -> int:
        return next(self._rounds)


@cache
def victim(name: str = "sfl_v1", two: bool = False, **terms: Any) -> Victim:
    return Victim(name, two, terms)


@dataclass
class Attack:
    """One visit of a device, and a round of its own to attack it in."""

    visit: Visit
    fed: Visit | None
    own: Own
    round: int = 0
    who: Victim | None = None

    @property
    def run(self) -> Run:
        return self.visit.run

    @property
    def model(self) -> Flat:
        return self.own.model

    def __call__(self, *work: Any, **fields: Any) -> Said:
        return self.visit.ask(*work, **{"round": self.round, **fields})

    def first_step(self, *, size: int = 8, step: int = 0, model: Tree = None, **fields: Any) -> Said:
        """Ask for the activations and labels of a mini-batch, with these layers or those that an honest server has."""
        flat = self.model if model is None else flatten(model)
        if self.fed is not None:
            self.fed.send(flat.tree())
            return self(first(None), [1, self.round, size, *[step] * 4], begins=True, **fields)
        numbers = [*flat.numbers, self.round, size, *[step] * 4]
        return self(first(flat.skeleton), numbers, flat.tensors, begins=True, **fields)

    def batch(self, step: int = 0) -> Arrays:
        """The samples that the device loads in this mini-batch."""
        from cutlayer.core import keys
        from cutlayer.remote.device.worker import walk_of

        data = self.own.data
        walk = walk_of(self.run.batching, VICTIM, len(data), keys.fold(self.run.seed, "round", self.round))({})
        return data.take(walk.samples(VICTIM, step))


def attack(name: str = "sfl_v1", two: bool = False, **terms: Any) -> AbstractContextManager[Attack]:
    return attacking(victim(name, two, **terms))


@contextmanager
def attacking(who: Victim) -> Iterator[Attack]:
    made = Attack(who.train.visit(), who.fed and who.fed.visit(), own(who.name), who.new_round(), who)
    try:
        yield made
    finally:
        made.visit.end()
        if made.fed is not None:
            made.fed.end()


def trusting(name: str) -> Attack:
    """Attack a device in this process that has no terms: it runs whatever it is asked, and only the laws stop it."""
    run = RUNS[name]
    welcome = m.Welcome(session=1, client=VICTIM, run=config.dumps(run))
    session = Session(replace(DeviceSettings(data="digits").ready(welcome), terms=None), welcome.session)
    visit = Visit(run, VICTIM, welcome.session)

    def answer(message: m.Work, tensors: Sequence[torch.Tensor] = ()) -> None:
        reply = session.work(message, tensors)
        if reply is not None:
            visit.heard.put((reply.message, reply.tensors))

    visit.say = answer  # type: ignore[method-assign]
    return Attack(visit, None, own(name))


def first(model: Tree) -> tuple[c.AnyCommand, ...]:
    """What an honest server asks first; without a model, one that the fed server sends."""
    return (
        *(c.Get(0) if model is None else c.Put(0, model), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1))),
        *(c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6))),
        c.Up(("activations", "labels"), (7, 4)),
    )


BACK = (c.Put(9, "tensor"), c.Pull(10, 8, 9), c.Do(11, "client.update", (2, 10)))
NEXT = (
    *(c.Batch(12, 13), c.Own(14), c.Key(15), c.Vjp(16, 17, "client.forward", (11, 12, 15))),
    c.Up(("activations", "labels"), (16, 13)),
)


def answered(said: Said) -> list[torch.Tensor]:
    assert isinstance(said, list), said
    return said


def refused(said: Said, because: str = "") -> None:
    """The attack fails: nothing has left but a reason."""
    assert isinstance(said, str) and because in said, said


__all__ = [
    *("BACK", "NEXT", "Attack", "Victim", "Visit", "answered", "attack", "attacking", "credentials", "first", "m"),
    *("refused", "trusting", "victim"),
]
