"""Specifies a round in which clients disconnect: a lost client counts as one that finished early."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from conftest import BATCH, SEED, agree, clients_of, fit_for, images, resnet
from in_process import deployment, device, join
from test_engines_agree import CASES, OPTIMISERS, PIECES, SHAPES, fits, plain
from torch import Tensor

from cutlayer import methods, optim
from cutlayer.core import keys, tree
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.kinds import Parcel
from cutlayer.core.memory import Memory
from cutlayer.core.method import Method, TooFew, needs_of
from cutlayer.core.places import Clients, Step, World
from cutlayer.core.program import Program
from cutlayer.core.servers import Fed, Ids, Server
from cutlayer.core.state import State
from cutlayer.core.transport import Brought
from cutlayer.core.values import PerClient
from cutlayer.data.partition import Partition
from cutlayer.engines.local import Local
from cutlayer.engines.loop import Loop
from cutlayer.methods.hasfl import HasflMemory
from cutlayer.methods.splitfed import SplitFed
from cutlayer.pieces.fuse import Fuse
from cutlayer.remote.device.session import ClientDevice
from cutlayer.runs.rounds import Rounds
from cutlayer.split import Split

Losses = Mapping[int, int]  # client -> which of the round's waits it does not answer, from 0
EVERYONE = (0, 1, 2, 3, 4)
NOBODY: Losses = {}


class Deserted(Exception):
    """All clients are lost."""


@dataclass(kw_only=True)
class Leaky(Local):
    """Clients of which some are lost: at a given wait of the round, or just after their answer to the one before."""

    ids: tuple[int, ...]
    losses: Losses
    known: bool = False  # whether the loss is known when the wait before it ends
    waits: list[tuple[int, ...]] = field(default_factory=list)  # who was asked

    def lost(self, j: int, wait: int) -> bool:
        return j in self.losses and wait >= self.losses[j]

    def alive(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(j for j in ids if not self.lost(j, len(self.waits) - (0 if self.known else 1)))

    def up(self, parcels: Sequence[Parcel], ids: tuple[int, ...]) -> Brought:
        came = tuple(j for j in ids if not self.lost(j, len(self.waits)))
        self.waits.append(ids)
        if all(self.lost(j, len(self.waits) - 1) for j in self.ids):
            raise Deserted
        return Brought(came, [p.value[Ids(came)].blocks for p in parcels])


class Short(Walk):
    """A walk on which the data of some clients run out early."""

    def __init__(self, batching: Batching, index: Any, key: int, sizes: Mapping[int, int], most: Losses) -> None:
        super().__init__(batching, index, key, sizes)
        self.most = most

    def per_round(self, client: int, count: int | None = None) -> int:
        return min(super().per_round(client, count), self.most.get(client, 1000))


class Worlds:
    """Rounds of a method on the ragged clients, each with its own losses."""

    def __init__(self, method: Method, batching: Batching = BATCH, partition: Partition | None = None) -> None:
        self.method, self.batching = method, batching
        self.partition = partition or clients_of()
        self.data, self.memory = images(sum(map(len, self.partition.clients))), Memory()
        self.waits: list[tuple[int, ...]] = []  # of the last round

    def start(self) -> State:
        return self.method.start(Server(Loop()), Fed(Loop()))

    @torch.no_grad()
    def round(
        self,
        state: State,
        losses: Losses = NOBODY,
        *,
        ids: tuple[int, ...] = EVERYONE,
        known: bool = False,
        most: Losses = NOBODY,
    ) -> State:
        key, index = keys.fold(SEED, "round", state.round), self.partition.clients

        def walk(sizes: Mapping[int, int]) -> Walk:
            return Short(self.batching, index, key, sizes, most)

        reach = Leaky(engine=Loop(), data=self.data, kept=self.memory, key=key, ids=ids, losses=losses, known=known)
        self.waits = reach.waits
        sizes = {j: float(len(index[j])) for j in ids}
        world = World(program=Program(self.method), transport=reach, walk=walk, sizes=sizes, key=key)
        return self.method.round(state, Clients(world, ids), Server(Loop()), Fed(Loop()))


def method_of(case: str, shape: str = "two-part") -> Method:
    name, options, _ = CASES[case]
    cut, head = SHAPES[shape]
    opt = OPTIMISERS["momentum"]
    return methods.build(name, Split(fit_for(name, resnet()), cut, head=head), opt, opt, **options)


def worlds(case: str, shape: str = "two-part") -> Worlds:
    return Worlds(method_of(case, shape), CASES[case].batching)


@cache
def whole(case: str, shape: str) -> tuple[State, State, list[tuple[int, ...]]]:
    """Two rounds in which nobody is lost, and whom the first one asks."""
    there = worlds(case, shape)
    first = there.round(there.start())
    asked = there.waits
    return first, there.round(first), asked


def values(state: State) -> Any:
    return plain((state.client, state.server, state.memory, state.report))


def form(value: Any) -> Any:
    """The structure of a value without its numbers; what is kept by client has another length where one is lost."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if isinstance(value, dict):
        return {k: form(v) for k, v in value.items() if not str(k).isdigit()}
    return tuple(map(form, value)) if isinstance(value, tuple) else type(value)


def must_be_sound(state: State, like: State) -> None:
    numbers = [a for a in tree.tensors(values(state)) if a.is_floating_point()]
    assert numbers and all(bool(a.isfinite().all()) for a in numbers)
    # Where a plan is made for those who are left, layers may be at the other side.
    assert form(methods.global_model(state)) == form(methods.global_model(like))
    assert form(state.report.tree) == form(like.report.tree)
    assert type(state.server.tree) is type(like.server.tree) and type(state.client.tree) is type(like.client.tree)
    assert type(state.memory) is type(like.memory)
    if isinstance(state.memory, dict):
        assert state.memory.keys() == like.memory.keys()
    assert state.round == like.round


PLANS = ("hasfl random", "hasfl planned", "hasfl planned cuts", "hasfl by resources")  # no U-shape has a plan
RUNS = [
    (case, shape)
    for case in CASES
    for shape in ("two-part", "u-shaped")
    if fits(case, shape) and (shape == "two-part" or case not in PLANS)
]


def survived(case: str, shape: str, losses: Losses) -> None:
    leaky, (like, like_next, _) = worlds(case, shape), whole(case, shape)
    try:
        state = leaky.round(leaky.start(), losses)
    except TooFew:
        left = set(EVERYONE) - set(losses)
        assert len(left) == 1 and needs_of(leaky.method).fewest_clients == 2
        return
    must_be_sound(state, like)
    must_be_sound(leaky.round(state), like_next)


QUICK = ("sl", "sfl_v1 epoch", "sfl_v2", "mergesfl", "smofi", "hasfl own cuts")  # of U-shapes


@pytest.mark.parametrize(
    ("case", "shape"), [(c, s) for c, s in RUNS if c in QUICK or (s == "two-part" and c not in PIECES)]
)
def test_every_method_survives_losses_in_the_middle_of_a_round(case: str, shape: str) -> None:
    asked = whole(case, shape)[2]
    number = len(asked) // 2
    survived(case, shape, {asked[number][0]: number, asked[-1][-1]: len(asked) - 1})
    survived(case, shape, {j: number for j in EVERYONE if j != asked[number][-1]})


@pytest.mark.slow
@pytest.mark.parametrize(("case", "shape"), RUNS)
def test_every_method_survives_a_loss_at_any_wait(case: str, shape: str) -> None:
    """One client, then another, then all but one."""
    for number, asked in enumerate(whole(case, shape)[2]):
        first, last = asked[0], asked[-1]
        survived(case, shape, {first: number})
        survived(case, shape, {last: number, first: number + 1})
        for left in {first, EVERYONE[0]}:
            survived(case, shape, {j: number for j in EVERYONE if j != left})


# -- As if it had never been there -------------------------------------------------------------------------------------

ORDERED = ("sl", "sfl_v2 client")  # the order of the clients is drawn among all before anyone is asked


def must_be_the_same(found: State, expected: State, tol: float = 0.0) -> None:
    """Compare everything except the plan, which names its clients."""
    if isinstance(found.memory, HasflMemory):
        found, expected = (s._replace(memory=s.memory._replace(plan=None)) for s in (found, expected))
    agree(values(found), values(expected), tol)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ORDERED])
def test_a_client_that_never_answers_counts_as_absent(case: str) -> None:
    there, without = worlds(case), worlds(case)
    lost = there.round(there.start(), {0: 0})
    must_be_the_same(lost, without.round(without.start(), ids=(1, 2, 3, 4)))


@pytest.mark.parametrize("case", ORDERED)
def test_losing_a_client_does_not_redraw_the_order(case: str) -> None:
    there, without = worlds(case), worlds(case)
    lost = values(there.round(there.start(), {0: 0}))[1]
    never = values(without.round(without.start(), ids=(1, 2, 3, 4)))[1]
    with pytest.raises(AssertionError):
        agree(lost, never, 1e-9)


def test_a_fixed_order_of_turns_has_no_gap() -> None:
    opt = OPTIMISERS["momentum"]
    for make in (methods.sl, partial(methods.sfl_v2, interleave="client")):
        method = make(model=Split(resnet(), 1), client_opt=opt, server_opt=opt, order="fixed")
        there = Worlds(method)
        must_be_the_same(there.round(there.start(), {0: 0}), there.round(there.start(), ids=(1, 2, 3, 4)))


BOTH_HALVES = ("fedavg", "fednag", "sfl_v1", "smofi without alignment", "zo_sfl", "mu_splitfed", "splitlora", "hosfl")


@pytest.mark.parametrize("case", BOTH_HALVES)
def test_both_halves_are_means_over_the_clients_whose_layers_arrived(case: str) -> None:
    """If clients meet only at the end of a round, one that is lost there contributes to neither server."""
    there, last = worlds(case), len(whole(case, "two-part")[2]) - 1
    lost = there.round(there.start(), {1: last})
    without = worlds(case).round(there.start(), ids=(0, 2, 3, 4))
    agree(plain((lost.client, lost.server)), plain((without.client, without.server)), 0)


def test_steps_are_those_of_the_clients_that_arrived() -> None:
    """Clients 1 and 3 take five steps, the others three at most."""
    opt = OPTIMISERS["nesterov"]
    there = Worlds(methods.fednag(model=Split(resnet(), 1), client_opt=opt))
    assert there.round(there.start()).memory.carry.steps == 5
    assert there.round(there.start(), {1: 0, 3: 0}).memory.carry.steps == 3


# -- As if its data had run out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("smofi", "smofi literal", "sfl_v1", "sfl_v1 step", "sfl_v2", "mergesfl", "fsl_sage"))
def test_a_client_that_is_known_to_be_lost_has_finished_early(case: str) -> None:
    """Lost after its second answer, or out of data then and lost when the layers are collected: the same round."""
    there, early, last = worlds(case), worlds(case), len(whole(case, "two-part")[2]) - 1
    waits = 2 if case != "fsl_sage" else 1  # which asks at every second step
    lost = there.round(there.start(), {1: waits}, known=True)
    finished = early.round(early.start(), {1: last}, most={1: 2})
    must_be_the_same(lost, finished)


class Telling:
    """A fusion that records the arguments of each step."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse, self.barrier = fuse, fuse.barrier
        self.idle: list[dict[int, int]] = []
        self.staying: list[tuple[int, ...]] = []
        self.ends: list[int] = []

    def __call__(self, server: Server, opt: optim.Transform, s: PerClient, step: Step) -> None:
        self.idle.append(step.idle)
        self.staying.append(step.staying.ids)
        self.ends += [step.number] if step.ends_epoch else []
        self.fuse(server, opt, s, step)


def told(case: str, losses: Losses, known: bool = False) -> Telling:
    method = method_of(case)
    assert isinstance(method, SplitFed)
    telling = Telling(method.fuse)
    there = Worlds(replace(method, fuse=telling), CASES[case].batching)
    there.round(there.start(), losses, known=known)
    return telling


def test_a_lost_clients_momentum_fades_from_its_last_step_on() -> None:
    """Client 1 takes steps 0 and 1; client 2 is lost before its first and counts for nothing."""
    found = told("smofi literal", {1: 2, 2: 0})
    assert found.staying == [(0, 1, 3), (0, 1, 3), (3,), (3,), ()]
    assert found.idle == [
        {0: 0, 1: 0, 3: 0, 4: 0},
        {0: 0, 1: 0, 3: 0, 4: 1},
        {0: 0, 1: 1, 3: 0, 4: 2},
        {0: 1, 1: 2, 3: 0, 4: 3},
        {0: 2, 1: 3, 3: 0, 4: 4},
    ]
    # Where the loss is known at once, nothing is fused into the momentum that the others remember.
    assert told("smofi literal", {1: 2}, known=True).staying[1] == (0, 3)


def test_an_epoch_ends_when_its_last_clients_are_lost() -> None:
    """Clients 1 and 3 alone have a fourth and a fifth step in the first epoch; the second has three."""
    assert told("sfl_v1 epoch", {1: 3, 3: 3}).ends == [3, 6]


# -- One server model --------------------------------------------------------------------------------------------------


def test_a_turn_of_split_learning_happens_as_a_whole_or_not_at_all() -> None:
    """Client 0 is asked four times, then client 1 six times, the last time for its layers."""
    opt = OPTIMISERS["momentum"]
    method = methods.sl(model=Split(resnet(), 1), client_opt=opt, server_opt=opt, order="fixed")
    there = Worlds(method)
    without = there.round(there.start(), ids=(0, 2, 3, 4))
    for wait in (4, 6, 9):
        must_be_the_same(there.round(there.start(), {1: wait}), without)
    first = there.round(there.start(), ids=(0,))
    must_be_the_same(there.round(there.start(), dict.fromkeys((1, 2, 3, 4), 4)), first)


@pytest.mark.parametrize("case", ("sfl_v2", "sfl_v2 client", "fsl_sage"))
def test_steps_that_the_one_server_model_took_for_a_lost_client_stay(case: str) -> None:
    """The report counts the batches that it was moved by; the client's own layers are in no mean."""
    there = worlds(case)
    lost = there.round(there.start(), {1: len(whole(case, "two-part")[2]) - 1})
    kept = whole(case, "two-part")[0]
    agree(plain((lost.server, lost.report)), plain((kept.server, kept.report)), 0)
    with pytest.raises(AssertionError):
        agree(plain(lost.client), plain(kept.client), 1e-9)


def test_mergesfls_shares_are_over_the_samples_whose_loss_is_known() -> None:
    """In a U-shape a client can be lost when its activations are merged already: its rows then have no gradient."""
    opt = OPTIMISERS["momentum"]
    there = Worlds(methods.mergesfl(model=Split(resnet("group"), 1, head=4), client_opt=opt, server_opt=opt))
    without = there.round(there.start(), ids=(0, 1, 2, 4))
    must_be_the_same(there.round(there.start(), {3: 0}), without)
    must_be_the_same(there.round(there.start(), {3: 1}), without, 1e-12)


@pytest.mark.parametrize("case", ("hasfl own cuts", "hasfl random", "smofi random cut"))
def test_the_layers_of_a_single_client_do_not_change_servers(case: str) -> None:
    there, name = worlds(case), "a random cut" if case.startswith("smofi") else "hasfl"
    with pytest.raises(TooFew) as caught:
        there.round(there.start(), dict.fromkeys((0, 1, 2, 3), 1))
    assert str(caught.value) == (
        f"{name} needs at least 2 clients until the round has ended, but all others were lost; "
        "try the round again with more clients"
    )


# -- HO-SFL: what a lost client comes back with ------------------------------------------------------------------------


@dataclass
class Fleet:
    """A deployment whose client 0 can be lost at one of its requests, before or after it does what they say."""

    there: Rounds
    device: ClientDevice

    def lose(self, number: int, obeys: bool) -> None:
        """Lose client 0 at its request of this number, before it obeys the request or after."""
        sessions, session = self.there.backend.sessions, self.there.backend.sessions.get(0)
        assert session is not None
        send, count = session.send, itertools.count()

        def leaky(*request: Any, **how: Any) -> tuple[int, int]:
            going = next(count) >= number
            sent = (0, 0) if going and not obeys else send(*request, **how)
            if going:
                sessions.leave(0, session.number, "the link broke")
            return sent

        session.send = leaky  # type: ignore[method-assign]

    def back(self) -> None:
        join(self.there.backend.sessions, self.device)


def fleet(case: str) -> Fleet:
    method, batching = method_of(case), CASES[case].batching
    there = deployment(method, images(), clients_of(), batching=batching, seed=SEED, deadline=1.0)
    sessions = there.backend.sessions
    session = sessions.get(0)
    assert session is not None
    sessions.leave(0, session.number, "another one")
    own = device(method, images(), clients_of(), batching, 0)
    join(sessions, own)
    return Fleet(there, own)


@pytest.mark.parametrize("case", ("hosfl", "hosfl ahead"))
@pytest.mark.parametrize("obeys", (False, True))
@pytest.mark.parametrize("number", (0, 1, 2))
def test_a_lost_client_returns_to_the_same_bits_as_all(case: str, number: int, obeys: bool) -> None:
    """Lost at its activations, its slopes, or what it is told last; away for a round; then back.

    It replays, unless its slopes came and what it was told last did not: it is counted in, so the log has been cut.
    """
    found = fleet(case)
    there, state = found.there, found.there.start()
    for _ in range(2):
        state = there.round(state)
    found.lose(number, obeys)
    for _ in range(2):
        state = there.round(state)
    downloads = there.ledger.totals["down_setup"]
    found.back()
    state = there.round(state)
    replays = (number, obeys) not in ((1, True), (2, False))
    assert (there.ledger.totals["down_setup"] == downloads) is replays
    kept = found.device.store.entries["part"]
    assert kept.version == state.round == 5
    agree((kept.value.model, kept.value.moments), (state.client.tree.model, state.client.tree.moments), 0)
    assert state.memory.behind == {}
    assert state.memory.seen == dict.fromkeys(range(5), 5)


def test_the_log_reaches_back_to_what_a_lost_client_may_still_hold() -> None:
    """Client 0 is at 2 when it is lost in the third round: it may be there still, though nobody else is."""
    found = fleet("hosfl")
    there, state = found.there, found.there.start()
    for _ in range(2):
        state = there.round(state)
    found.lose(0, obeys=False)
    for _ in range(3):
        state = there.round(state)
    assert (state.memory.oldest, len(state.memory.log.tree.seeds)) == (2, 3)
    assert (state.memory.seen[0], state.memory.behind) == (2, {0: 2})
