"""Specifies the laws of places: what clients run, what may leave them, and which server may see it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import BATCH, agree, clients_of, images, resnet, simulation
from in_process import device
from torch import Tensor

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, KINDS, LABELS, MODEL, SETTINGS, SLOPES, STATISTICS, SYNC, Kind
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.program import Program, at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Part, State, Tensors
from cutlayer.core.values import PerClient
from cutlayer.engines.loop import Loop
from cutlayer.errors import LawError
from cutlayer.methods.fedavg import FedAvg
from cutlayer.methods.fsl_sage import FslSage
from cutlayer.methods.hasfl import Hasfl
from cutlayer.methods.hosfl import HybridOrder
from cutlayer.methods.mergesfl import MergeSFL
from cutlayer.methods.mu_splitfed import UnbalancedZeroth
from cutlayer.methods.random_cut import RandomCut
from cutlayer.methods.relay import Relay
from cutlayer.methods.splitfed import SplitFed
from cutlayer.methods.splitfed_v2 import SplitFedV2
from cutlayer.methods.zo_sfl import ZerothOrder
from cutlayer.pieces.carry import AverageMoments
from cutlayer.pieces.client import SplitClient
from cutlayer.planning.devices import Pool
from cutlayer.planning.problem import Costs
from cutlayer.planning.profile import profile
from cutlayer.remote.device.session import Session
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol.messages import Refusal, Work
from cutlayer.remote.tensors.trees import flatten
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

OPT = optim.sgd(0.1, momentum=0.9)
ENGINES = ("loop", "vmap")


def stories(told: Mapping[str, tuple[Any, str]]) -> list[tuple[str, str]]:
    """All of them on loop; and on vmap, whose blocks are others but whose laws are not, one for each message."""
    one_each = {message: what for what, (_, message) in told.items()}
    return [*((what, "loop") for what in told), *((what, "vmap") for what in one_each.values())]


def test_every_kind_has_its_home() -> None:
    assert {kind.name: kind.home for kind in KINDS} == {
        "activations": "server",
        "labels": "server",
        "gradients": "server",
        "auxiliary": "server",
        "scalars": "server",
        "model": "fed",
        "slopes": "fed",
        "statistics": "fed",
        "settings": None,
        "setup": None,
        "sync": None,
    }


FINAL = (
    *(FedAvg, Relay, SplitFed, SplitFedV2, MergeSFL, RandomCut, Hasfl),
    *(HybridOrder, ZerothOrder, UnbalancedZeroth, FslSage),
)


@pytest.mark.parametrize("method", FINAL)
def test_methods_are_final(method: type) -> None:
    with pytest.raises(LawError) as caught:
        type("Mine", (method,), {})
    assert str(caught.value) == (
        f"Mine cannot derive from {method.__name__}: methods are final. "
        "Compose the pieces (Transform, Exchange, Fuse, Outer) or write a round of its own."
    )


# -- A method that tells whatever story a test gives it ----------------------------------------------------------------


@method
@dataclass(frozen=True, kw_only=True)
class Probe:
    model: Split
    client: SplitClient
    story: Callable[["Scene"], Any]

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), {})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        self.story(Scene(self, state, clients, server, fed))
        return state

    def unmarked(self, part: Part) -> Part:
        return part

    @at_client(passes="x")
    def passed_on(self, x: Tensor) -> tuple[Tensor, Tensors]:
        return x, {}

    @at_client(gives=LABELS, passes="y")
    def labels_passed_on(self, y: Tensor) -> tuple[Tensor, Tensors]:
        return y, {}

    @at_client(gives=ACTIVATIONS)
    def scored(self, part: Part, x: Tensor, key: int | None) -> tuple[Tensor, Tensors]:
        out, buffers = self.model.lower(part, x, key)
        return out.sum(), buffers


class Scene:
    """One lawful mini-batch, with something of everything at every place."""

    def __init__(self, me: Probe, state: State, clients: Clients, server: Server, fed: Fed) -> None:
        self.me, self.state, self.clients, self.server, self.fed = me, state, clients, server, fed
        self.sent = clients.down(MODEL, state.client), clients.down(SETTINGS, 0)
        self.c = clients.do(me.client.begin, *self.sent)
        self.step = next(iter(clients.steps()))
        self.z, self.pull = clients.vjp(me.client.forward, self.c, self.step.x, self.step.key)
        self.at_server = clients.up(ACTIVATIONS(self.z))
        self.at_fed = clients.up(MODEL(self.c.model))
        self.s = server.each(OPT.begin, server.copies(state.server, clients), 0)
        self.h, self.server_pull = server.vjp(me.model.upper, self.s, self.at_server)
        self.g = clients.do(self.pull, clients.down(GRADIENTS, self.at_server))


def tell(story: Callable[[Scene], Any], engine: str, model: Split | None = None) -> Simulation:
    model = model or Split(resnet(), 1)
    sim = simulation(Probe(model=model, client=SplitClient(model=model, opt=OPT), story=story), engine=engine)
    sim.round(sim.start())
    return sim


def refusal(story: Callable[[Scene], Any], engine: str, model: Split | None = None) -> str:
    with pytest.raises(LawError) as caught:
        tell(story, engine, model)
    return str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_scene_itself_is_lawful(engine: str) -> None:
    assert tell(lambda scene: None, engine).ledger.totals["up_activations"] > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_clients_own_seed_is_no_servers_to_read(engine: str) -> None:
    """With it and the scalar that it makes, the training server of ZO-SFL could compute the client's layers."""
    for place in ("server", "fed"):
        told = refusal(lambda scene, place=place: getattr(scene, place).each(torch.neg, scene.step.own), engine)
        assert told == f"the {place} place was given a value that is at the clients"
    assert tell(lambda scene: scene.server.each(torch.neg, scene.step.key), engine).ledger.samples > 0


# -- What clients run --------------------------------------------------------------------------------------------------

NAMELESS = (
    "{} has no name that a client could find: write it as a method marked @at_client on Probe or on one of its pieces"
)
STRANGER = SplitClient(model=Split(resnet(), 1), opt=OPT)


def local_function() -> Callable[..., Any]:
    def mine(*values: Any) -> Any:
        return values

    return mine


FOREIGN: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "a lambda": (lambda s: lambda *v: v, NAMELESS.format("<lambda>.<locals>.<lambda>")),
    "a local function": (lambda s: local_function(), NAMELESS.format("local_function.<locals>.mine")),
    "an unmarked method": (
        lambda s: s.me.unmarked,
        "Probe.unmarked is not marked @at_client, so no client runs it; mark it and say what it gives",
    ),
    "a library function": (
        lambda s: tree.detach,
        "detach is not marked @at_client, so no client runs it; mark it and say what it gives",
    ),
    "another method's function": (
        lambda s: FedAvg(model=s.me.model, opt=OPT).update,
        "FedAvg.update is not declared by Probe, so its clients refuse to run it",
    ),
    "another copy of its own piece": (
        lambda s: STRANGER.forward,
        "SplitClient.forward is not declared by Probe, so its clients refuse to run it",
    ),
    "another method's way to carry momenta": (
        lambda s: AverageMoments().moments,
        "AverageMoments.moments is not declared by Probe, so its clients refuse to run it",
    ),
}


@pytest.mark.parametrize("verb", ("do", "vjp", "grad"))
@pytest.mark.parametrize("what", FOREIGN)
def test_a_client_runs_only_what_its_own_copy_of_the_method_declares(what: str, verb: str) -> None:
    function, message = FOREIGN[what]
    assert refusal(lambda s: getattr(s.clients, verb)(function(s), s.c, s.step.x), "loop") == message


PLAIN = (
    "argument {} of {} is a plain {}, which would reach the clients uncounted; "
    "send it with `down` and pass what that returns"
)
AWAY = "argument {} of {} is at the {}; send it with `down` first"
ARGUMENTS: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "a tensor": (
        lambda s: s.clients.do(s.me.client.squared_norm, torch.zeros(3)),
        PLAIN.format(1, "client.squared_norm", "Tensor"),
    ),
    "a number": (
        lambda s: s.clients.do(s.me.client.begin, s.sent[0], 0.1),
        PLAIN.format(2, "client.begin", "float"),
    ),
    "a server's value": (
        lambda s: s.clients.vjp(s.me.client.forward, s.c, s.step.x, s.state.client),
        PLAIN.format(3, "client.forward", "Held"),
    ),
    "a tensor for a pullback": (
        lambda s: s.clients.do(s.pull, torch.zeros(3)),
        PLAIN.format(1, "a pullback", "Tensor"),
    ),
    "rows of the server": (
        lambda s: s.clients.grad(s.me.client.head_loss, s.c, s.at_server, s.step.y, s.step.key),
        AWAY.format(2, "client.head_loss", "server"),
    ),
    "rows of the fed server": (
        lambda s: s.clients.do(s.me.client.begin, s.at_fed, s.sent[1]),
        AWAY.format(1, "client.begin", "fed"),
    ),
    "rows of the server for a pullback": (
        lambda s: s.clients.do(s.pull, s.at_server),
        AWAY.format(1, "a pullback", "server"),
    ),
    "raw inputs in the place of gradients": (
        lambda s: s.clients.do(s.me.client.update, s.c, s.step.x),
        "argument 2 of client.update takes none of a client's own data, but it was given inputs",
    ),
    "labels in the place of inputs": (
        lambda s: s.clients.vjp(s.me.client.forward, s.c, s.step.y, s.step.key),
        "argument 2 of client.forward takes a client's own inputs, but it was given labels",
    ),
    "inputs of a server's choice": (
        lambda s: s.clients.vjp(s.me.client.forward, s.c, s.clients.down(GRADIENTS, s.at_server), s.step.key),
        "argument 2 of client.forward takes a client's own inputs, but it was given something else",
    ),
    "raw inputs for a pullback": (
        lambda s: s.clients.do(s.pull, s.step.x),
        "a pullback takes the gradient of its output, and no client's own data",
    ),
    "a pullback of the server": (
        lambda s: s.clients.do(s.server_pull, s.clients.down(GRADIENTS, s.h)),
        "this pullback is at the server; clients run only their own",
    ),
    "a function that came down": (
        lambda s: s.clients.down(SETTINGS, s.server.hold(lambda x: x)),
        "only tensors and numbers go down to clients; this is a function",
    ),
    "a value in place of a function": (
        lambda s: s.clients.do(s.c, s.step.x),
        "this value is no pullback of `vjp`, so it cannot be run; name a function that is declared",
    ),
}


@pytest.mark.parametrize(("what", "engine"), stories(ARGUMENTS))
def test_only_what_is_at_the_clients_is_an_argument(what: str, engine: str) -> None:
    story, message = ARGUMENTS[what]
    assert refusal(story, engine) == message


@pytest.mark.parametrize("verb", ("vjp", "grad"))
@pytest.mark.parametrize(("name", "data", "what"), [("passed_on", "x", "inputs"), ("labels_passed_on", "y", "labels")])
def test_a_function_that_passes_raw_data_on_is_not_differentiated(verb: str, name: str, data: str, what: str) -> None:
    """Its output is raw data, and a derivative has no mark that says so."""
    told = refusal(lambda s: getattr(s.clients, verb)(getattr(s.me, name), getattr(s.step, data)), "loop")
    assert told == f"{name} passes a client's own {what} on, so it is not differentiated; run it with `do`"


@pytest.mark.parametrize("engine", ENGINES)
def test_raw_data_that_a_function_has_passed_on_stay_raw(engine: str) -> None:
    told = refusal(lambda s: s.clients.do(s.me.client.update, s.c, s.clients.do(s.me.passed_on, s.step.x)), engine)
    assert told == "argument 2 of client.update takes none of a client's own data, but it was given inputs"
    told = refusal(lambda s: s.clients.do(s.pull, s.clients.do(s.me.labels_passed_on, s.step.y)), engine)
    assert told == "a pullback takes the gradient of its output, and no client's own data"


def test_a_device_pulls_nothing_of_its_own_data_back() -> None:
    """The gradients of its layers would be the data, weighted by how the layers react to them."""
    model = Split(resnet(), 1)
    method = Probe(model=model, client=SplitClient(model=model, opt=OPT), story=lambda scene: None)
    session, flat = Session(device(method, images(), clients_of(), BATCH, 0), 1), flatten(model.initial()[0])
    begin = (c.Put(0, flat.skeleton), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1)))
    step = (c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6)))
    for number, own in enumerate((3, 4), start=1):
        work = Work(
            session=1,
            number=number,
            round=0,
            key=11,
            token=1,
            begins=True,
            list=number,
            commands=(*begin, *step, c.Pull(9, 8, own)),
            numbers=(*flat.numbers, 0, 4, 0, 0, 0, 0),
        )
        reply = session.work(work, flat.tensors)
        assert reply is not None and isinstance(reply.message, Refusal)
        assert reply.message.reason == "a pullback takes the gradient of its output, and no client's own data"


def test_functions_have_addresses_by_their_place_in_the_method() -> None:
    model = Split(resnet(), 1)

    def addresses(name: str, **options: Any) -> set[str]:
        return set(Program(methods.build(name, model, OPT, OPT, **options)).functions)

    split = {
        f"client.{name}"
        for name in (
            "begin",
            "forward",
            "update",
            "head_loss",
            "both_ends",
            "squared_norm",
            "with_norm",
        )
    }
    assert addresses("sfl_v1") == addresses("smofi") == split
    assert addresses("smofi", random_cut=(2, 3)) == {f"methods.{k}.{name}" for k in (0, 1) for name in split}
    assert addresses("fedavg") == {"begin", "loss", "update", "report"}
    fixed = {"batches": "fixed", "cuts": "fixed"}
    planning = {"devices": Pool().draw(5, 1e6, 0), "costs": Costs.of(profile(resnet(), (1, 8, 8)))}
    assert addresses("hasfl", **fixed) == split
    looks = ("first_half", "second_half", "first_labels", "second_labels", "look", "compare")
    assert addresses("hasfl", **planning) == split | {f"observer.{name}" for name in looks}
    assert addresses("fednag") == addresses("fedavg") | {"carry.remember", "carry.moments"}


# -- What may leave a client -------------------------------------------------------------------------------------------

KEPT = (
    "client 0 refuses to send {0}: the value was not made by a function of Probe that gives {0} "
    "(it gives nothing that may leave whole)"
)
MADE = "client 0 refuses to send {0}: the value was not made by a function of Probe that gives {0} (it gives {1})"
HOMELESS = "nothing goes up as {}: it has no home at either server"
SECRETS: dict[str, Callable[[Scene], PerClient]] = {
    "raw data": lambda s: s.step.x,
    "a whole part": lambda s: s.c,
    "momenta": lambda s: s.c.moments,
    "progress": lambda s: s.c.progress,
    "gradients of its layers": lambda s: s.g,
    "one of those": lambda s: s.g.params,
    "those, asked of a loss": lambda s: s.clients.grad(s.me.scored, s.c, s.step.x, s.step.key),
    "single values of its model": lambda s: s.c.model.params,
    "a pullback": lambda s: s.pull,
    "what it was sent": lambda s: s.clients.down(GRADIENTS, s.at_server),
}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, "loop") for kind in KINDS), (ACTIVATIONS, "vmap")],
    ids=lambda v: getattr(v, "name", v),
)
@pytest.mark.parametrize("secret", SECRETS)
def test_some_values_leave_under_no_kind(secret: str, kind: Kind, engine: str) -> None:
    message = KEPT if kind.home else HOMELESS
    assert refusal(lambda s: s.clients.up(kind(SECRETS[secret](s))), engine) == message.format(kind.name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [ACTIVATIONS, MODEL], ids=lambda kind: kind.name)
def test_a_plain_tuple_is_told_that_a_kind_covers_one_value(kind: Kind, engine: str) -> None:
    """Activations with running statistics, though the function gives activations."""
    message = refusal(
        lambda s: s.clients.up(kind(s.clients.do(s.me.client.forward, s.c, s.step.x, s.step.key))), engine
    )
    assert message == (
        f"client 0 refuses to send {kind.name}: the function gives activations, but it returns a plain tuple, and a "
        "kind covers one value. Return one value; or a NamedTuple, with gives={field: kind}, and send its fields; or, "
        "if the tuple is (output, buffers), run the function with `vjp`"
    )


OTHER_NAMES: dict[str, tuple[Callable[[Scene], PerClient], Kind]] = {
    "activations": (lambda s: s.z, ACTIVATIONS),
    "labels": (lambda s: s.step.y, LABELS),
    "model": (lambda s: s.c.model, MODEL),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.home], ids=lambda kind: kind.name)
@pytest.mark.parametrize("what", OTHER_NAMES)
def test_a_value_leaves_only_as_what_it_was_made(what: str, kind: Kind, engine: str) -> None:
    value, made = OTHER_NAMES[what]
    if kind == made:
        tell(lambda s: s.clients.up(kind(value(s))), engine)
    else:
        expected = MADE.format(kind.name, made.name)
        assert refusal(lambda s: s.clients.up(kind(value(s))), engine) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_one_clients_secret_among_lawful_values_is_refused(engine: str) -> None:
    def story(s: Scene) -> None:
        labels, one = s.step.y, s.clients.only((3,))
        labels[one] = s.step.x[one]
        s.clients.up(LABELS(labels))

    assert refusal(story, engine) == KEPT.format("labels").replace("client 0", "client 3")


@pytest.mark.parametrize("engine", ENGINES)
def test_labels_of_a_u_shape_are_refused_by_the_client(engine: str) -> None:
    message = refusal(lambda s: s.clients.up(LABELS(s.step.y)), engine, Split(resnet(), 1, head=3))
    assert message == KEPT.format("labels")


def test_a_kind_of_ones_own_is_no_kind() -> None:
    mine = Kind("labels", "fed")
    expected = (
        "Kind(name='labels', home='fed') is not a kind of cutlayer.core.kinds; what crosses goes under one of those"
    )
    for story in (lambda s: s.clients.up(mine(s.step.y)), lambda s: s.clients.down(mine, s.state.client)):
        assert refusal(story, "loop") == expected
    with pytest.raises(LawError, match="is not a kind of"):
        at_client(gives={"x": mine})


def test_a_client_outside_the_round_cannot_be_asked() -> None:
    assert refusal(lambda s: s.clients.only((99,)), "loop") == "client 99 does not take part in this round"


def size_of(model: Any) -> Tensor:
    """A number that tells something of a model."""
    return sum(value.square().sum() for value in tree.tensors(model))  # type: ignore[return-value]


# -- Which server may see it -------------------------------------------------------------------------------------------

TELLING = "a value that may tell of a single client"
TOLD: dict[str, Callable[["Scene"], Any]] = {
    "one client's row": lambda s: s.fed.send(SYNC, s.fed.pick(s.at_fed, 0), s.server),
    "what was made of it": lambda s: s.fed.send(SYNC, s.fed.do(OPT.begin, s.fed.pick(s.at_fed, 0), 0), s.server),
    "a mean over one client": lambda s: s.fed.send(SYNC, s.fed.mean(s.at_fed[s.clients.only((1,))]), s.server),
    "a sum that counts one client": lambda s: s.fed.send(
        SYNC, s.fed.sum(s.at_fed, {j: float(j == 0) for j in s.clients.ids}), s.server
    ),
    "all activations side by side": lambda s: s.server.send(SYNC, s.server.concat(s.at_server)[0], s.fed),
    "their mean": lambda s: s.server.send(SYNC, s.server.mean(s.at_server[s.clients.only((0, 1))]), s.fed),
    "what the server made of one client's activations": lambda s: s.server.send(
        SYNC, s.server.vjp(s.me.model.upper, s.state.server, s.server.pick(s.at_server, 0))[0], s.fed
    ),
}
ROWS = (
    "single clients' values go from server to server only as model, whole models, or as statistics, lists of numbers, "
    "and only to the fed place; this goes to the {} as {}"
)
ROWS_TOLD: dict[str, tuple[Callable[["Scene"], Any], str]] = {
    "single clients' rows": (lambda s: s.fed.send(SYNC, s.at_fed, s.server), ROWS.format("server", "sync")),
    "their models to the training server": (
        lambda s: s.fed.send(MODEL, s.at_fed, s.server),
        ROWS.format("server", "model"),
    ),
    "numbers of them to the training server": (
        lambda s: s.fed.send(STATISTICS, s.fed.each(size_of, s.at_fed), s.server),
        ROWS.format("server", "statistics"),
    ),
    "activations as a model": (lambda s: s.server.send(MODEL, s.at_server, s.fed), ROWS.format("fed", "model")),
    "activations as themselves": (
        lambda s: s.server.send(ACTIVATIONS, s.at_server, s.fed),
        ROWS.format("fed", "activations"),
    ),
    "activations as statistics": (
        lambda s: s.server.send(STATISTICS, s.at_server, s.fed),
        ROWS.format("fed", "statistics"),
    ),
    "what was made of activations as statistics": (
        lambda s: s.server.send(STATISTICS, s.server.each(torch.neg, s.at_server), s.fed),
        ROWS.format("fed", "statistics"),
    ),
    "server-side parts with their momenta": (
        lambda s: s.server.send(MODEL, s.s, s.fed),
        ROWS.format("fed", "model"),
    ),
    "single values of a model": (
        lambda s: s.server.send(MODEL, s.s.model.params, s.fed),
        ROWS.format("fed", "model"),
    ),
    "rows as an aggregate": (lambda s: s.server.send(SYNC, s.s.model, s.fed), ROWS.format("fed", "sync")),
    "rows as slopes": (lambda s: s.server.send(SLOPES, s.s.model, s.fed), ROWS.format("fed", "slopes")),
}
STEERS = "what steers a round must be an aggregate; this value may tell of a single client"
LOOKS: dict[str, tuple[Callable[["Scene"], Any], str]] = {
    "one client's row": (lambda s: s.fed.look(s.fed.pick(s.at_fed, 0)), STEERS),
    "what was made of it": (lambda s: s.fed.look(s.fed.do(size_of, s.fed.pick(s.at_fed, 0))), STEERS),
    "a mean over one client": (lambda s: s.fed.look(s.fed.mean(s.at_fed[s.clients.only((1,))])), STEERS),
    "a mean of activations": (
        lambda s: s.server.look(s.server.mean(s.at_server[s.clients.only((0, 1))])),
        STEERS,
    ),
    "the other server's value": (
        lambda s: s.server.look(s.state.client),
        "the server place was given a value that is at the fed",
    ),
}
STRAY = "the {} place was given a value that is at the {}"
PLACES: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "each with fed rows": (lambda s: s.server.each(OPT.begin, s.at_fed, 0), STRAY.format("server", "fed")),
    "each with clients' values": (lambda s: s.server.each(torch.neg, s.z), STRAY.format("server", "clients")),
    "each with a fed value": (
        lambda s: s.server.each(torch.add, s.at_server, s.state.client),
        STRAY.format("server", "fed"),
    ),
    "each with a client's pullback": (
        lambda s: s.server.each(s.pull, s.at_server),
        STRAY.format("server", "clients"),
    ),
    "vjp with fed rows": (
        lambda s: s.server.vjp(s.me.model.upper, s.at_fed, s.at_server),
        STRAY.format("server", "fed"),
    ),
    "vjp with a fed value": (
        lambda s: s.server.vjp(s.me.model.lower, s.state.client, s.server.hold(torch.zeros(2, 1, 8, 8))),
        STRAY.format("server", "fed"),
    ),
    "grad with fed rows": (lambda s: s.server.grad(torch.neg, s.at_fed), STRAY.format("server", "fed")),
    "do with a fed value": (lambda s: s.server.do(OPT.begin, s.state.client, 0), STRAY.format("server", "fed")),
    "do with fed rows": (lambda s: s.server.do(OPT.begin, s.at_fed, 0), STRAY.format("server", "fed")),
    "do with own rows": (
        lambda s: s.server.do(torch.neg, s.at_server),
        "`do` computes on one value, but this is a row for each client; use `each`, `mean`, `sum` or `concat`",
    ),
    "copies of a fed value": (lambda s: s.server.copies(s.state.client, s.clients), STRAY.format("server", "fed")),
    "rows of fed values": (lambda s: s.server.rows({0: s.state.client}), STRAY.format("server", "fed")),
    "concat of fed rows": (lambda s: s.server.concat(s.at_fed), STRAY.format("server", "fed")),
    "pick of fed rows": (lambda s: s.server.pick(s.at_fed, 0), STRAY.format("server", "fed")),
    "mean of fed rows": (lambda s: s.server.mean(s.at_fed), STRAY.format("server", "fed")),
    "fed mean of server rows": (lambda s: s.fed.mean(s.at_server), STRAY.format("fed", "server")),
    "fed sum of server rows": (lambda s: s.fed.sum(s.at_server), STRAY.format("fed", "server")),
    "fed mean of clients' values": (lambda s: s.fed.mean(s.c.model), STRAY.format("fed", "clients")),
    "fed pick of server rows": (lambda s: s.fed.pick(s.at_server, 0), STRAY.format("fed", "server")),
    "fed do with a server value": (lambda s: s.fed.do(OPT.begin, s.state.server, 0), STRAY.format("fed", "server")),
    "row of clients' values": (
        lambda s: s.z.row(0),
        "the value of client 0 is at the client; `up` is the only way to bring it to a server",
    ),
    "gradients from fed": (
        lambda s: s.clients.down(GRADIENTS, s.at_fed),
        "what goes down as gradients is at the server, but this value is at the fed",
    ),
    "a model from the server": (
        lambda s: s.clients.down(MODEL, s.state.server),
        "what goes down as model is at the fed, but this value is at the server",
    ),
    "gradients from the clients themselves": (
        lambda s: s.clients.down(GRADIENTS, s.z),
        "what goes down as gradients is at the server, but this value is at the clients",
    ),
    "a number as a model": (
        lambda s: s.clients.down(MODEL, 0.1),
        "a plain number travels as settings, not as model",
    ),
    "up to two servers": (
        lambda s: s.clients.up(ACTIVATIONS(s.z), MODEL(s.c.model)),
        "one `up` goes to one server, but activations, model belong to fed and server",
    ),
    "up from a server": (
        lambda s: s.clients.up(ACTIVATIONS(s.at_server)),
        "what goes up as activations is at the clients, but this value is at the server",
    ),
    "send under another kind": (
        lambda s: s.fed.send(MODEL, s.state.client, s.server),
        "only aggregates go from server to server, as sync; this is model",
    ),
    **{
        f"send of {what}": (send, f"only aggregates go from server to server, as sync; this is {TELLING}")
        for what, send in TOLD.items()
    },
    **{f"send of {what}": told for what, told in ROWS_TOLD.items()},
    **{f"a look at {what}": told for what, told in LOOKS.items()},
    "fed each with server rows": (lambda s: s.fed.each(size_of, s.at_server), STRAY.format("fed", "server")),
    "fed each with clients' values": (lambda s: s.fed.each(size_of, s.c.model), STRAY.format("fed", "clients")),
    "fed rows of server values": (lambda s: s.fed.rows({0: s.state.server}), STRAY.format("fed", "server")),
    "fed copies of a server value": (
        lambda s: s.fed.copies(s.state.server, s.clients),
        STRAY.format("fed", "server"),
    ),
    "send of the other's rows": (lambda s: s.server.send(MODEL, s.at_fed, s.fed), STRAY.format("server", "fed")),
    "send of the other's value": (
        lambda s: s.server.send(SYNC, s.state.client, s.server),
        STRAY.format("server", "fed"),
    ),
    "assignment across places": (
        lambda s: s.at_fed.__setitem__(s.clients, s.at_server),
        "a value at the server cannot be put among values at the fed; send it there first",
    ),
}


@pytest.mark.parametrize(("what", "engine"), stories(PLACES))
def test_a_server_sees_only_what_is_its_own(what: str, engine: str) -> None:
    story, message = PLACES[what]
    assert refusal(story, engine) == message


def test_the_law_between_servers_does_not_depend_on_a_meter() -> None:
    server, fed = Server(Loop()), Fed(Loop())
    with pytest.raises(LawError, match=STRAY.format("server", "fed")):
        server.send(SYNC, fed.hold(torch.zeros(())), fed)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_aggregate_goes_from_server_to_server_and_is_counted(engine: str) -> None:
    def story(s: Scene) -> None:
        mean = s.fed.send(SYNC, s.fed.mean(s.at_fed), s.server)
        agree(s.server.do(OPT.begin, mean, 0).tree.params, s.state.client.tree.params)

    sim = tell(story, engine)
    assert sim.ledger.totals["inter_server_sync"] == tree.num_bytes(sim.start().client.tree.params)


@pytest.mark.parametrize("engine", ENGINES)
def test_whole_models_and_numbers_of_single_clients_go_to_the_fed_server_and_are_counted(engine: str) -> None:
    def story(s: Scene) -> None:
        models = s.server.send(MODEL, s.s.model, s.fed)
        numbers = s.server.send(STATISTICS, s.server.each(size_of, s.s.model), s.fed)
        assert (models.place, numbers.place) == ("fed", "fed")
        assert models.ids == numbers.ids == s.clients.ids
        agree(s.fed.mean(models).tree.params, s.state.server.tree.params)
        again = s.fed.each(size_of, models)
        for j in s.clients.ids:
            agree(again.row(j), numbers.row(j))
        mean = s.fed.mean(numbers)
        agree(s.fed.look(mean), numbers.row(0))
        agree(s.server.look(s.fed.send(SYNC, mean, s.server)), numbers.row(0))

    sim = tell(story, engine)
    totals, server = sim.ledger.totals, sim.start().server.tree
    assert totals["inter_server_model"] == 5 * tree.num_bytes(server.params)
    assert totals["inter_server_statistics"] == 5 * 8
    assert totals["inter_server_sync"] == 8


@pytest.mark.parametrize("engine", ENGINES)
def test_what_single_clients_sent_to_the_fed_server_stays_there(engine: str) -> None:
    def story(s: Scene) -> None:
        models = s.server.send(MODEL, s.s.model, s.fed)
        s.fed.send(SYNC, s.fed.pick(models, 0), s.server)

    assert refusal(story, engine) == f"only aggregates go from server to server, as sync; this is {TELLING}"
