"""Attacks of servers on the memory, the time and the terminal of a device."""

import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch
from evil_server import EvilServer
from victims import RUNS, answered, attack, credentials, first, process, refused, victim

from cutlayer.remote.device.terms import Allowance
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.protocol.messages import PROTOCOL
from cutlayer.remote.tensors.wire import encode

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks on devices")]

MOST_GROWTH = 50 * 2**20
FLOOD = 1000  # messages of a quarter of a MiB


def resident() -> int:
    return psutil.Process(process().pid).memory_info().rss


def settled(number: Callable[[], int]) -> int:
    """Wait until a number does not change for a second, and return it."""
    before, now = -1, number()
    while now != before:
        time.sleep(1)
        before, now = now, number()
    return now


def still_takes_part() -> None:
    with attack() as a:
        answered(a.first_step())


def left(*words: m.Message) -> str:
    """Return the last words of a device that these words end."""
    server = EvilServer(credentials("train"), RUNS["sfl_v1"])
    process().order(replace(victim().order, address=server.address))
    visit = server.visit()
    for one in words:
        visit.say(one)
    _, last = process().hear("left")
    server.close()
    return str(last)


@pytest.mark.parametrize(("header", "body"), [(100, 2**40), (60 * 2**20, 0), (2**32 - 1, 2**62)])
def test_a_server_wants_the_memory_of_a_device_by_a_large_message(header: int, body: int) -> None:
    still_takes_part()
    before = resident()
    with attack() as a:
        sizes = struct.pack("<3sBIQ", b"CUT", PROTOCOL, header, body)
        a.visit.out.put(sizes + struct.pack("<I", zlib.crc32(sizes)))
        for _ in range(50):
            a.visit.out.put(bytes(2**20))
        assert a.visit.hear() is None
    still_takes_part()
    assert resident() - before < MOST_GROWTH


def test_a_server_wants_the_memory_of_a_device_by_lists_of_commands() -> None:
    """A device remembers lists, but not those that it refuses."""
    still_takes_part()
    before = resident()
    with attack() as a:
        for _ in range(200):
            refused(a([c.Free(9)] * 30_000, begins=True), "slot 9 is empty")
        assert resident() - before < MOST_GROWTH
    still_takes_part()


def test_a_server_wants_the_memory_of_a_device_by_work_that_it_does_not_wait_for() -> None:
    """The device waits for a value of the fed server meanwhile. What it does not read stays at the evil server."""
    with attack(two=True) as a:  # once before, so that it has the memory that it needs
        answered(a.first_step())
    before = resident()
    with attack(two=True) as a:
        assert a.fed is not None
        a.visit.tell([c.Get(0)], [1], begins=True, round=a.round)
        work = m.Work(
            session=a.visit.session, number=9, round=0, key=0, token=1, begins=True, list=9, commands=(), numbers=()
        )
        chunks = list(encode(work, [torch.zeros(2**16)]))
        for chunk in chunks * FLOOD:
            a.visit.out.put(chunk)
        assert settled(a.visit.out.qsize) > len(chunks) * FLOOD * 3 / 4
        assert resident() - before < MOST_GROWTH
        a.fed.end()
    still_takes_part()


def test_a_fed_server_wants_the_memory_of_a_device_by_values_that_nobody_asked_for() -> None:
    with attack(two=True) as a:
        answered(a.first_step())
    before = resident()
    with attack(two=True) as a:
        assert a.fed is not None
        for number in range(FLOOD):
            a.fed.send(torch.zeros(2**16), number=number)
        assert a.visit.hear() is None
    assert resident() - before < MOST_GROWTH
    with attack(two=True) as a:
        answered(a.first_step())


def test_a_server_wants_the_memory_of_a_device_by_many_slots() -> None:
    with attack() as a:
        puts = [c.Put(slot, a.model.skeleton) for slot in range(100)]
        refused(
            a(puts, a.model.numbers * 100, a.model.tensors * 100, begins=True), "own run has 'receive settings' here, "
        )


@pytest.mark.parametrize("slot", [-1, 10_000, 2**62])
def test_a_server_wants_a_slot_that_does_not_exist(slot: int) -> None:
    with attack() as a:
        refused(a([c.Put(slot, a.model.skeleton)], a.model.numbers, a.model.tensors, begins=True), "there is no slot")


def test_a_server_wants_the_memory_of_a_device_by_a_deep_value() -> None:
    with attack() as a:
        deep: object = "tensor"
        for _ in range(30):
            deep = ["tuple", [deep]]
        refused(a([c.Put(0, deep)], begins=True), "nested deeper")


def test_a_server_wants_the_time_of_a_device_by_another_welcome_in_a_session() -> None:
    with attack() as a:
        a.visit.say(m.Welcome(session=77, client=1, run="rounds = 5"))
        assert a.visit.hear() is None
    still_takes_part()


def test_a_server_wants_more_work_than_the_owner_gives_in_a_round() -> None:
    with attack(allowance=Allowance(round_seconds=1e-9)) as a:
        refused(a.first_step(), "this device works at most 1e-09 seconds in a round")


def test_a_server_wants_more_work_than_the_owner_gives_in_a_day() -> None:
    """Another welcome makes the device anew, but not the seconds that it has worked."""
    terms = {"allowance": Allowance(day_seconds=1e-3)}
    with attack(**terms) as a:
        a.first_step()
        refused(a.first_step(), "this device works at most 0.001 seconds a day")
        a.who.train.client = 1
    with attack(**terms) as a:
        refused(a.first_step(), "this device works at most 0.001 seconds a day")


HARMFUL_NUMBERS: dict[str, list[float]] = {
    "none": [],
    "too many": [0.0] * 1000,
    "not finite": [float("nan")] * 9,
    "infinite": [float("inf")] * 9,
    "negative": [-1] * 9,
    "huge": [2**63 - 1] * 9,
    "fractions": [0.5] * 9,
}


@pytest.mark.parametrize("numbers", HARMFUL_NUMBERS)
def test_a_server_wants_a_device_to_crash_on_numbers(numbers: str) -> None:
    with attack() as a:
        refused(a(first(a.model.skeleton), HARMFUL_NUMBERS[numbers], a.model.tensors, begins=True))
    still_takes_part()


@pytest.mark.parametrize("round", [2**63 - 1, 2**31, 1001])
def test_a_server_wants_a_device_to_crash_on_the_number_of_a_round(round: int) -> None:
    with attack() as a:
        refused(a.first_step(round=round), "but this device's own run has 1000")
        a.visit.tell((), begins=True, round=a.round)
        refused(a([c.Free(9)], round=round), "another round came")
    still_takes_part()


def test_a_server_wants_to_write_on_the_terminal_of_a_device() -> None:
    said = left(m.Done("\x1b[2J\x1b]0;owned\x07[/nope][bold]done"))
    assert said == "\\x1b[2J\\x1b]0;owned\\x07[/nope][bold]done" and said.isprintable()


def test_a_server_wants_to_write_on_the_terminal_of_a_device_by_a_refusal() -> None:
    said = left(m.Denied("\x1b[31mno\r\nerror: forged", final=True))
    assert said == "LinkError: refused by the server: \\x1b[31mno\\r\\nerror: forged"


def test_a_server_wants_a_device_to_print_a_book() -> None:
    assert len(left(m.Done("x" * 2000))) == 1000


def test_a_server_wants_a_device_to_crash_on_a_message_that_does_not_belong_there() -> None:
    with attack() as a:
        for chunk in encode(m.Sent(token=1, number=1, tree="tensor", numbers=(), tensors=())):
            a.visit.out.put(chunk)
        a.visit.hear()
    still_takes_part()


def test_a_fed_server_wants_a_device_to_wait_for_ever() -> None:
    """A device that loses one server leaves the other, and comes back to both."""
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.end()
        assert a.visit.hear() is None
    with attack(two=True) as a:
        answered(a.first_step())
