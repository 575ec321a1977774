"""Specifies what clients keep between rounds: values by name and version, each client's own, equal ones once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cutlayer.core.memory import Memories, Memory
from cutlayer.core.values import Block, PerClient
from cutlayer.errors import LawError
from cutlayer.runs.checkpoint import pack, unpack

NAME = "part"


def own(**values: Any) -> PerClient:
    """A value of each client: `own(c0=tensor, c1=tensor)`, at the clients."""
    return PerClient("clients", [Block((int(j[1:]),), v, stacked=False) for j, v in values.items()])


def number(value: float, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.full((2,), value, dtype=dtype)}


def values(memory: Memory, name: str = NAME) -> dict[int, float]:
    return {j: float(k.value["w"][0]) for j, k in memory.of(name).items()}


def test_a_kept_value_is_recalled_with_its_version() -> None:
    memory = Memory()
    everyone = Memories(memory, (0, 1, 2))
    assert everyone.versions(NAME) == {} and everyone.recall(NAME).ids == ()
    everyone.keep(NAME, own(c0=number(1.0), c1=number(2.0)), 3)
    assert everyone.versions(NAME) == {0: 3, 1: 3}
    found = everyone.recall(NAME)
    assert (found.place, found.ids) == ("clients", (0, 1))
    assert [float(found.at(j)["w"][0]) for j in (0, 1)] == [1.0, 2.0]
    everyone.keep(NAME, own(c1=number(5.0)), 4)
    assert everyone.versions(NAME) == {0: 3, 1: 4} and values(memory) == {0: 1.0, 1: 5.0}


def test_values_of_different_names_do_not_mix() -> None:
    memory = Memory()
    everyone = Memories(memory, (0,))
    everyone.keep("a", own(c0=number(1.0)), 1)
    everyone.keep("b", own(c0=number(2.0)), 7)
    assert (everyone.versions("a"), everyone.versions("b")) == ({0: 1}, {0: 7})
    assert (values(memory, "a"), values(memory, "b")) == ({0: 1.0}, {0: 2.0})


def test_some_clients_see_and_change_only_their_own() -> None:
    memory = Memory()
    Memories(memory, (0, 1)).keep(NAME, own(c0=number(1.0), c1=number(2.0)), 1)
    one = Memories(memory, (1, 5))
    assert one.versions(NAME) == {1: 1} and one.recall(NAME).ids == (1,)
    brought = one.keep(NAME, own(c0=number(8.0), c1=number(9.0)), 2)
    assert brought.ids == (1,) and values(memory) == {0: 1.0, 1: 9.0}


def test_clients_keep_only_what_they_hold() -> None:
    with pytest.raises(LawError) as caught:
        Memories(Memory(), (0,)).keep(NAME, PerClient("fed", [Block((0,), number(1.0), stacked=False)]), 0)
    assert str(caught.value) == "clients keep only what they hold, but this value is at the fed; send it first"


def test_equal_values_of_one_version_are_one_copy_and_sit_together() -> None:
    memory = Memory()
    everyone = Memories(memory, (0, 1, 2, 3))
    everyone.keep(NAME, own(c0=number(1.0), c1=number(1.0), c2=number(2.0), c3=number(1.0)), 1)
    held = {j: k.value for j, k in memory.of(NAME).items()}
    assert held[0] is held[1] is held[3] and held[2] is not held[0]
    assert [(b.ids, b.stacked) for b in everyone.recall(NAME).blocks] == [((0, 1, 3), False), ((2,), False)]


def test_equal_values_kept_later_or_stacked_are_one_copy_too() -> None:
    memory = Memory()
    Memories(memory, (0,)).keep(NAME, own(c0=number(1.0)), 1)
    stacked = PerClient("clients", [Block((1, 2), {"w": torch.tensor([[1.0, 1.0], [2.0, 2.0]]).double()}, True)])
    Memories(memory, (1, 2)).keep(NAME, stacked, 1)
    held = {j: k.value for j, k in memory.of(NAME).items()}
    assert held[1] is held[0] and values(memory) == {0: 1.0, 1: 1.0, 2: 2.0}


ALMOST = {
    "another version": (number(1.0), 2),
    "a last bit": (number(1.0 + 2**-52), 1),
    "another type": (number(1.0, torch.float32), 1),
    "not a number": (number(float("nan")), 1),
    "another count": ({**number(1.0), "count": 3}, 1),
}


@pytest.mark.parametrize("case", ALMOST)
def test_almost_equal_values_are_not_one_copy(case: str) -> None:
    memory = Memory()
    value, version = ALMOST[case]
    Memories(memory, (0,)).keep(NAME, own(c0=number(1.0)), 1)
    Memories(memory, (1,)).keep(NAME, own(c1=value), version)
    assert memory.of(NAME)[1].value is not memory.of(NAME)[0].value


def test_a_kept_value_is_in_memory_of_its_own() -> None:
    memory = Memory()
    source = torch.arange(12.0).reshape(3, 4).T
    brought = Memories(memory, (0,)).keep(NAME, own(c0={"w": source}), 1)
    held = memory.of(NAME)[0].value["w"]
    assert brought.at(0)["w"] is held
    source.zero_()
    assert torch.equal(held, torch.arange(12.0).reshape(3, 4).T)
    assert held.is_contiguous() and held.untyped_storage().nbytes() == held.nbytes


def test_a_recalled_value_keeps_its_time() -> None:
    value = PerClient("clients", [Block((0,), number(1.0), stacked=False)], ready={0: 2.5})
    memory = Memories(Memory(), (0,))
    assert memory.keep(NAME, value, 1).ready == {0: 2.5}
    assert memory.recall(NAME).ready == {0: 2.5}


def test_a_checkpoint_gives_back_the_same_with_shared_values_stored_once() -> None:
    memory = Memory()
    Memories(memory, (0, 1, 12)).keep(NAME, own(c0=number(1.0), c1=number(1.0), c12=number(2.0)), 5)
    tensors, skeleton = pack(memory.content())
    assert len(tensors) == 2
    other = Memory()
    Memories(other, (3,)).keep(NAME, own(c3=number(9.0)), 1)  # forgotten
    other.restore(unpack(tensors, skeleton))
    assert values(other) == {0: 1.0, 1: 1.0, 12: 2.0}
    assert {j: k.version for j, k in other.of(NAME).items()} == {0: 5, 1: 5, 12: 5}
    assert other.of(NAME)[0].value is other.of(NAME)[1].value
    assert pack(other.content())[1] == skeleton
