"""Specifies values with one entry per client: selection, masked assignment, fields, and how engines line them up."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cutlayer import optim
from cutlayer.core.kinds import ACTIVATIONS, MODEL
from cutlayer.core.servers import Fed, Ids, Server
from cutlayer.core.state import Model
from cutlayer.core.values import Block, Held, PerClient, aligned, common, pair, shared
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.errors import LawError


class Pair(NamedTuple):
    number: Tensor
    same: int


def stacked(*ids: int, place: Any = "server") -> Block:
    """Client j's value is 10 j."""
    return Block(ids, torch.tensor([10.0 * j for j in ids]), stacked=True)


def apart(*ids: int) -> PerClient:
    return PerClient("server", [Block((j,), torch.tensor(10.0 * j), stacked=False) for j in ids])


def numbers(value: PerClient) -> dict[int, float]:
    return {j: float(value.at(j)) for j in value.ids}


LAYOUTS = {
    "stacked": lambda: PerClient("server", [stacked(0, 1, 2, 3)]),
    "apart": lambda: apart(0, 1, 2, 3),
    "two blocks, out of order": lambda: PerClient("server", [stacked(1, 3), stacked(0, 2)], (0, 1, 2, 3)),
    "one shared among them": lambda: PerClient(
        "server", [stacked(0, 1, 3), Block((2,), torch.tensor(20.0), stacked=False)], (0, 1, 2, 3)
    ),
}


@pytest.fixture(params=LAYOUTS)
def value(request: pytest.FixtureRequest) -> PerClient:
    """The same four values, however an engine keeps them."""
    return LAYOUTS[request.param]()


# -- Selection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [(0, 1, 2, 3), (1, 2), (0, 3), (3,), ()])
def test_a_selection_keeps_the_clients_it_names(value: PerClient, who: tuple[int, ...]) -> None:
    assert numbers(value[Ids(who)]) == {j: 10.0 * j for j in who}


def test_a_selection_keeps_the_order_of_the_value_and_ignores_strangers(value: PerClient) -> None:
    assert value[Ids((9, 3, 1))].ids == (1, 3)


def test_a_server_looks_at_rows_and_nobody_at_a_clients_value(value: PerClient) -> None:
    assert float(value.row(2)) == 20
    with pytest.raises(LawError) as caught:
        PerClient("clients", value.blocks).row(2)
    assert str(caught.value) == ("the value of client 2 is at the client; `up` is the only way to bring it to a server")


def test_consecutive_clients_are_selected_without_a_copy() -> None:
    block = stacked(0, 1, 2, 3)
    assert block.take((1, 2)).tree.data_ptr() == block.tree[1:].data_ptr()
    assert block.take(block.ids) is block


def test_a_shared_value_is_held_once() -> None:
    value = shared("server", (0, 1, 2), torch.arange(2.0))
    (block,) = value.blocks
    assert block.take((0, 2)).tree is block.tree
    wide = block.wide()
    assert wide.shape == (3, 2) and wide.data_ptr() == block.tree.data_ptr()
    assert shared("server", (), 1.0).ids == ()


# -- Masked assignment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [apart, lambda *ids: PerClient("server", [stacked(*ids)] if ids else [])])
@pytest.mark.parametrize("who", [(0, 1, 2, 3), (1, 2), (0, 3), (3,), ()])
def test_assignment_replaces_the_values_of_those_clients_only(value: PerClient, who: tuple[int, ...], new: Any) -> None:
    changed = new(*who)
    for block in changed.blocks:
        block.tree.add_(1)
    value[Ids(who)] = changed
    assert numbers(value) == {j: 10.0 * j + (j in who) for j in range(4)}
    assert value.ids == (0, 1, 2, 3)


def test_assignment_takes_only_the_selected_of_what_it_is_given(value: PerClient) -> None:
    """A client that vanished has no new value; one that was not selected keeps its old one."""
    value[Ids((0, 1))] = PerClient("server", [Block((1, 2), torch.tensor([-1.0, -2.0]), stacked=True)])
    assert numbers(value) == {0: 0, 1: -1, 2: 20, 3: 30}


def test_a_selection_is_not_changed_by_a_later_assignment(value: PerClient) -> None:
    before = value[Ids((0, 1, 2, 3))]
    value[Ids((0,))] = PerClient("server", [Block((0,), torch.tensor(-1.0), stacked=False)])
    assert numbers(before) == {j: 10.0 * j for j in range(4)}


@pytest.mark.parametrize(
    ("new", "who", "message"),
    [
        (
            PerClient("fed", [stacked(0)]),
            (0,),
            "a value at the fed cannot be put among values at the server; send it there first",
        ),
        (apart(0, 7), (0, 7), "clients [7] hold no value here yet; only clients that do can be assigned to"),
    ],
)
def test_assignment_refuses_other_places_and_other_clients(
    value: PerClient, new: PerClient, who: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LawError) as caught:
        value[Ids(who)] = new
    assert str(caught.value) == message
    assert numbers(value) == {j: 10.0 * j for j in range(4)}


# -- Fields ------------------------------------------------------------------------------------------------------------


def test_a_field_of_a_value_is_a_value() -> None:
    value = PerClient("server", [Block((0, 1), Pair(torch.tensor([1.0, 2.0]), 5), stacked=True)])
    assert numbers(value.number) == {0: 1, 1: 2}
    assert [value.same.at(j) for j in (0, 1)] == [5, 5]
    with pytest.raises(AttributeError):
        value._private  # noqa: B018


def test_a_field_of_what_is_held_is_held_with_it() -> None:
    held = Held("server", Pair(torch.tensor(2.0), 5), stays=True, ready=3.0)
    assert held.number == Held("server", held.tree.number, stays=True, ready=3.0)
    assert held.same == Held("server", 5, stays=True, ready=3.0)
    with pytest.raises(AttributeError):
        held._private  # noqa: B018
    part = Held("fed", optim.adam(0.1).begin(Model({"w": torch.ones(2)}, {}, {}), 0))
    assert (part.model.tree, part.count.tree, part.stays) == (part.tree.model, 0, False)


@pytest.mark.parametrize("name", ["place", "ready", "stays", "tree"])
def test_a_field_of_a_held_value_that_cannot_be_read_is_refused(name: str) -> None:
    inner: Any = NamedTuple("Inner", [("number", Tensor), (name, Tensor)])
    with pytest.raises(LawError) as caught:
        Held("server", inner(torch.zeros(()), torch.ones(())))
    assert str(caught.value) == (
        f"Inner has a field '{name}', but `value.{name}` of a value that is held is an attribute of its own; rename "
        "the field (these names are taken: place, tree, stays, ready)"
    )


@pytest.mark.parametrize("name", ["at", "blocks", "ids", "kind", "place", "ready", "row"])
def test_a_field_of_a_value_that_cannot_be_read_is_refused(name: str) -> None:
    inner: Any = NamedTuple("Inner", [("number", Tensor), (name, Tensor)])
    outer: Any = NamedTuple("Outer", [("inner", inner)])
    value = inner(torch.zeros(()), torch.ones(()))
    with pytest.raises(LawError) as caught:
        PerClient("server", [Block((0,), value, stacked=False)])
    assert str(caught.value) == (
        f"Inner has a field '{name}', but `value.{name}` of a value per client is an attribute of its own; rename the "
        "field (these names are taken: at, blocks, ids, kind, place, ready, row)"
    )
    with pytest.raises(LawError, match=f"Inner has a field '{name}'"):
        PerClient("server", [Block((0,), outer(value), stacked=False)]).inner  # noqa: B018


@pytest.mark.parametrize(
    ("gives", "expected"),
    [(None, None), (ACTIVATIONS, None), ({"number": MODEL}, MODEL), ({"same": MODEL}, None)],
)
def test_a_field_may_leave_as_its_function_said(gives: Any, expected: Any) -> None:
    block = Block((0,), Pair(torch.zeros(()), 5), stacked=False, gives=gives)
    assert block.field("number").gives == expected


def test_a_pair_comes_apart() -> None:
    both = PerClient("server", [Block((0, 1), (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])), stacked=True)])
    first, second = pair(both)
    assert (numbers(first), numbers(second)) == ({0: 1, 1: 2}, {0: 3, 1: 4})


# -- Lining up ---------------------------------------------------------------------------------------------------------


def test_common_clients_keep_the_order_asked_for() -> None:
    assert common([apart(0, 1, 2), apart(3, 2, 1)], (2, 1, 0)) == (2, 1)
    assert common([], (2, 1)) == (2, 1)


def layouts(ids: Iterable[int]) -> st.SearchStrategy[PerClient]:
    """These clients' values in blocks of any kind."""
    members = tuple(ids)
    kinds = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=len(members), max_size=len(members))

    def build(choices: list[tuple[int, bool]]) -> PerClient:
        groups: dict[tuple[int, bool], list[int]] = {}
        for j, choice in zip(members, choices, strict=True):
            groups.setdefault(choice, []).append(j)
        blocks = []
        for (_, together), group in groups.items():
            blocks += [stacked(*group)] if together else apart(*group).blocks
        return PerClient("server", blocks, members)

    return kinds.map(build)


@given(st.data())
def test_aligned_groups_cover_every_client_once_with_its_own_values(data: st.DataObject) -> None:
    values = [data.draw(layouts(range(6))) for _ in range(3)]
    ids = tuple(data.draw(st.permutations(range(6)))[: data.draw(st.integers(0, 6))])
    groups = aligned(values, ids)
    assert sorted(j for members, _ in groups for j in members) == sorted(ids)
    for members, blocks in groups:
        assert all(block.ids == members for block in blocks)
        assert all(float(block.row(j)) == 10 * j for block in blocks for j in members)


@given(st.data())
def test_engines_compute_the_same_whatever_the_layout(data: st.DataObject) -> None:
    values = [data.draw(layouts(range(5))) for _ in range(2)]
    for engine in (Loop(), Vmap(), Vmap(chunk=2)):
        found = PerClient("server", engine.call(torch.add, values, (4, 0, 2)))
        assert {j: float(found.at(j)) for j in (4, 0, 2)} == {4: 80, 0: 0, 2: 40}


@given(st.data())
def test_means_and_sums_do_not_depend_on_the_layout(data: st.DataObject) -> None:
    rows, server = data.draw(layouts(range(4))), Server(Loop())
    assert float(server.mean(rows).tree) == pytest.approx(15)
    assert float(server.mean(rows, {0: 1, 1: 1, 2: 0, 3: 2}).tree) == pytest.approx(17.5)
    assert float(server.sum(rows).tree) == pytest.approx(60)
    assert float(server.sum(rows, {0: 5, 1: 0.5, 2: 0, 3: 2}).tree) == pytest.approx(65)


@pytest.mark.parametrize("blocks", [[(0, 1, 2)], [(0,), (1,), (2,)], [(2, 0), (1,)]])
def test_a_mean_takes_the_largest_of_integers(blocks: list[tuple[int, ...]]) -> None:
    counters = (7, 9, 8)
    rows = PerClient("fed", [Block(ids, torch.tensor([counters[j] for j in ids]), stacked=True) for ids in blocks])
    assert int(Fed(Loop()).mean(rows).tree) == 9


def test_a_mean_over_nobody_is_refused() -> None:
    for rows, weights in ((apart(), None), (apart(0, 1), {0: 0.0, 1: 0.0})):
        with pytest.raises(LawError, match="a mean over no clients; a round without clients must be skipped"):
            Server(Loop()).mean(rows, weights)


def test_a_merged_batch_comes_apart_again() -> None:
    server = Server(Loop())
    rows = server.rows({3: server.hold(torch.tensor([1.0, 2.0])), 1: server.hold(torch.tensor([3.0]))})
    merged, back = server.concat(rows)
    assert merged.tree.tolist() == [1, 2, 3]
    doubled = back(server.do(torch.mul, merged, 2))
    assert {j: doubled.row(j).tolist() for j in doubled.ids} == {3: [2, 4], 1: [6]}
