"""Specifies, by recording what crosses, that in every method each server sees only its own half."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import TOLD, fit_for, images, resnet, run, simulation
from torch import Tensor

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.batches import Index
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import ACTIVATIONS, MODEL, SETTINGS, Kind
from cutlayer.core.meter import Direction, Meter
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.program import Program, at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Part, State
from cutlayer.core.values import Block, PerClient
from cutlayer.data.arrays import Arrays
from cutlayer.engines.loop import Loop
from cutlayer.pieces.client import SplitClient
from cutlayer.split import Split

OPT = optim.sgd(0.1, momentum=0.9)


class Watched(Loop):
    """The reference engine, which also keeps the secrets of the clients as they come to be."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.data: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.layers: list[Tensor] = []  # values, momenta and gradients of the clients' layers

    def load(self, data: Arrays, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        x, y = super().load(data, index)
        self.data += contents(x)
        self.labels += contents(y)
        return x, y

    def call(self, fn: Fn, values: Any, ids: Ids) -> list[Block]:
        made = super().call(fn, values, ids)
        if any(fn == own for name, own in self.program.functions.items() if name.endswith(("begin", "update"))):
            self.layers += [t for b in made for t in tree.tensors((b.tree.params, b.tree.moments))]
        return made

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        made = super().pull(pullbacks, gradient)
        if pullbacks.place == "clients":
            self.layers += [t for b in made for t in tree.tensors(b.tree.params)]
        return made


class Crossings(Meter):
    """Keeps all that crosses: kind, direction, the server's place and each client's tensors."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, list[Tensor]]] = []

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        self.seen.append((kind.name, direction, value.place, contents(value)))

    def between(self, place: str) -> list[Tensor]:
        """All tensors that went from the clients to a server."""
        return [t for _, direction, at, tensors in self.seen if (direction, at) == ("up", place) for t in tensors]


def contents(value: PerClient) -> list[Tensor]:
    return [t for j in value.ids for t in tree.tensors(value.at(j))]


def leaks(crossed: list[Tensor], secrets: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of something that crossed and a secret that share memory or hold the same numbers."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for secret in secrets:
        by_shape.setdefault(secret.shape, []).append(secret)
    places = {secret.data_ptr() for secret in secrets if secret.numel()}
    for a in crossed:
        same = (b for b in by_shape.get(a.shape, ()) if a.dtype == b.dtype and torch.equal(a, b))
        match = a if a.numel() and a.data_ptr() in places else next(same, None)
        if match is not None:
            yield a, match


def watch(method: methods.Method) -> tuple[Watched, Crossings]:
    meter = Crossings()
    sim = simulation(method, images(), meters=(meter,))
    sim.backend.engine = engine = Watched(sim.program)
    run(sim, rounds=1)
    return engine, meter


SPLIT_METHODS = ("sl", "sfl_v1", "sfl_v2", "mergesfl", "smofi", "hasfl")
JOINT = optim.sgd(0.1, clip=0.5, clip_scope="joint")
RUNS = [
    *((name, None, OPT, TOLD.get(name, {})) for name in methods.METHODS if name not in SPLIT_METHODS),
    *((name, head, OPT, TOLD.get(name, {})) for name in SPLIT_METHODS for head in (None, 4)),
    *((name, head, JOINT, {}) for name in ("sl", "sfl_v1", "smofi") for head in (None, 4)),
    *(("smofi", head, OPT, {"random_cut": (2, 3)}) for head in (None, 4)),
]
TO_SERVER = {"activations", "labels", "gradients", "scalars"}
TO_FED = {"model", "slopes", "statistics"}
WHOLE_MODEL = ("fedavg", "fedprox", "fednar", "fedavgm", "slowmo", "fednag")


@pytest.mark.parametrize(("name", "head", "opt", "options"), RUNS)
def test_no_method_lets_a_server_see_more_than_its_own_half(
    name: str, head: int | None, opt: optim.Transform, options: dict[str, Any]
) -> None:
    engine, meter = watch(methods.build(name, Split(fit_for(name, resnet()), 1, head=head), opt, opt, **options))
    for kind, direction, place, _ in meter.seen:
        if direction == "up":
            assert (place, kind) in {("server", k) for k in TO_SERVER} | {("fed", k) for k in TO_FED}
        else:
            # A setting is a round's number or a client's own cut; whoever is set up gets a whole model.
            homes = {"settings": ("clients", "server"), **dict.fromkeys(("model", "slopes", "setup"), ("fed",))}
            assert place in homes.get(kind, ("server",)), f"{kind} came down from {place}"
    to_server, to_fed = meter.between("server"), meter.between("fed")
    at_the_cut = [t for k, _, _, tensors in meter.seen if k in TO_SERVER for t in tensors]
    assert not list(leaks(to_server, engine.data + engine.layers))
    assert not list(leaks(to_fed, engine.data + engine.labels + at_the_cut))
    assert to_fed and bool(to_server) == (name not in WHOLE_MODEL)


@pytest.mark.parametrize("name", SPLIT_METHODS)
def test_labels_never_cross_in_a_u_shape(name: str) -> None:
    engine, meter = watch(methods.build(name, Split(resnet(), 1, head=4), OPT, OPT, **TOLD.get(name, {})))
    assert "labels" not in {kind for kind, *_ in meter.seen}
    everything = [t for *_, tensors in meter.seen for t in tensors]
    assert not list(leaks(everything, engine.labels))
    two_part, crossings = watch(methods.build(name, Split(resnet(), 1), OPT, OPT, **TOLD.get(name, {})))
    batches = 5 * TOLD[name]["interval"] if name in TOLD else 16
    assert len(list(leaks(crossings.between("server"), two_part.labels))) == batches  # the search does find


@method
@dataclass(frozen=True, kw_only=True)
class Liar:
    """A method with a function that lies about what it gives; that is the law's limit, and for its reader to see."""

    model: Split
    client: SplitClient

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), {})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, 0))
        clients.up(ACTIVATIONS(clients.do(self.leak, c)))
        return state

    @at_client(gives=ACTIVATIONS)
    def leak(self, part: Part) -> Tensor:
        return part.params["conv1.weight"]


def test_the_search_finds_a_model_under_another_name() -> None:
    model = Split(resnet(), 1)
    engine, meter = watch(Liar(model=model, client=SplitClient(model=model, opt=OPT)))
    assert len(list(leaks(meter.between("server"), engine.layers))) == 5  # one a client
