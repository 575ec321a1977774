"""Specifies how long rounds wait: no slow, silent or refused client holds up or ends the others.

No real time passes.
"""

import heapq
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from attackers import filled, over_the_wire
from conftest import BATCH, SEED, agree, clients_of, images, round_key
from in_process import device, join
from test_engines_agree import plain
from test_remote import method_of

from cutlayer.core.state import State
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError
from cutlayer.pieces.sampler import shuffled
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.sessions import Answered, Event, Sessions
from cutlayer.remote.server.waits import GRACE, Wait, Waits
from cutlayer.runs.rounds import Rounds

NEVER = float("inf")
SLOW, QUICK = 3.0, 0.01
DEADLINE = 4.0
SLOW_ONE = 1  # it has the most steps: five of them


class Timed(Sessions):
    """Sessions whose answers arrive by a clock of their own."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.now, self._seconds = 0.0, seconds
        self._coming: list[tuple[float, int, Answered]] = []
        self._count = itertools.count()

    def take(self, event: Event) -> None:
        if not isinstance(event, Answered):
            super().take(event)
        elif (seconds := self._seconds(event.client)) < NEVER:
            heapq.heappush(self._coming, (self.now + seconds, next(self._count), event))

    def receive(self, seconds: float) -> Event | None:
        if (event := super().receive(0.0)) is not None:
            return event
        if self._coming and self._coming[0][0] <= self.now + seconds:
            self.now, _, answered = heapq.heappop(self._coming)
            return answered
        self.now += seconds
        return None


def served(
    case: str, took: Mapping[int, float], options: Mapping[str, Any] | None = None, **more: Any
) -> tuple[Rounds, Timed]:
    """A deployment whose devices take so long for each answer, and rejoin before each round."""
    method, data, partition = method_of(case), images(), clients_of()
    sessions = Timed(lambda client: took.get(client, QUICK))
    own = [device(method, data, partition, BATCH, j) for j in range(len(partition))]

    def gather(_: int) -> tuple[int, ...]:
        for one in own:
            if one.client not in sessions.present():
                join(sessions, one)
        return tuple(sessions.present())

    backend = DeviceBackend(
        method=method,
        sessions=sessions,
        sample=data.take([0, 1]),
        gather=gather,
        engine=Loop(),
        deadline=DEADLINE,
        waits=Waits(clock=lambda: sessions.now, **options or {}),
    )
    return Rounds(method, backend, batching=BATCH, seed=SEED, **more), sessions


def played(
    case: str, took: Mapping[int, float], options: Mapping[str, Any] | None = None, **more: Any
) -> tuple[State, float, list[float]]:
    """The state after one round, the seconds that it took, and each client's round trips."""
    there, sessions = served(case, took, options, **more)
    state = there.round(there.start())
    return state, sessions.now, [there.ledger.trips[j] for j in range(5)]


# -- slow clients ------------------------------------------------------------------------------------------------------


def test_a_client_that_answers_just_before_the_deadline_makes_a_long_round() -> None:
    _, seconds, trips = played("sfl_v1", {SLOW_ONE: SLOW})
    assert trips[SLOW_ONE] == 6
    assert seconds == pytest.approx(6 * SLOW)


def test_with_a_quorum_a_slow_client_is_lost_after_a_short_grace() -> None:
    state, seconds, trips = played("sfl_v1", {SLOW_ONE: SLOW}, {"quorum": 0.8})
    assert trips[SLOW_ONE] == 0
    assert seconds == pytest.approx(GRACE + 6 * QUICK)
    lost, _, _ = played("sfl_v1", {SLOW_ONE: NEVER})
    agree(plain(state)[1:3], plain(lost)[1:3], 0.0)  # as if it had been silent


def test_the_grace_is_as_long_as_the_quorum_took() -> None:
    took = dict.fromkeys(range(5), 1.0)
    _, _, trips = played("fedavg", {**took, SLOW_ONE: 1.9}, {"quorum": 0.8})
    assert trips == [1] * 5
    _, seconds, trips = played("fedavg", {**took, SLOW_ONE: 2.1}, {"quorum": 0.8})
    assert trips[SLOW_ONE] == 0
    assert seconds == pytest.approx(2.0)


def test_a_quorum_that_is_not_reached_waits_until_the_deadline() -> None:
    _, seconds, trips = played("fedavg", {1: NEVER, 2: NEVER}, {"quorum": 0.8})
    assert trips == [1, 0, 0, 1, 1]
    assert seconds == pytest.approx(DEADLINE)


def test_without_a_quorum_a_round_waits_as_before() -> None:
    slow, seconds, _ = played("sfl_v1", {SLOW_ONE: SLOW})
    quick, _, _ = played("sfl_v1", {})
    agree(plain(slow), plain(quick), 0.0)
    assert seconds == pytest.approx(6 * SLOW)


def test_a_round_that_has_lasted_long_enough_goes_on_without_the_slow_client() -> None:
    _, seconds, trips = played("sfl_v1", {SLOW_ONE: SLOW}, {"round_seconds": 7.0})
    assert trips == [4, 2, 3, 6, 2]
    assert seconds == pytest.approx(7.0 + 3 * QUICK)


def test_a_round_in_which_all_are_alike_is_not_cut_short() -> None:
    took = dict.fromkeys(range(5), 1.0)
    state, _, trips = played("sfl_v1", took, {"round_seconds": 0.5})
    assert trips == played("sfl_v1", {})[2]
    agree(plain(state), plain(played("sfl_v1", {})[0]), 0.0)


def test_a_client_whose_turn_comes_after_the_round_is_over_has_none() -> None:
    first, slow, *others = shuffled(range(5), round_key(0))
    _, seconds, trips = played("sl", {slow: SLOW}, {"round_seconds": 1.0})
    assert trips[first] > 0 and {trips[j] for j in (slow, *others)} == {0}
    assert seconds == pytest.approx(1.0)


def wait(took: list[float], *, asked: int, now: float, **options: Any) -> tuple[float, str]:
    """The end of a wait, and why it ends then."""
    clock = [0.0]
    given = {"deadline": 60.0, "round_end": NEVER, "others": False, **options}
    one = Wait(waits=Waits(clock=lambda: clock[0], quorum=given.pop("quorum", 1.0)), asked=asked, **given)
    for number, clock[0] in enumerate(took, start=1):
        one.left(number)
    clock[0] = now
    return now + one.left(len(took)), one.why


@pytest.mark.parametrize(
    ("took", "options", "end", "why"),
    [
        ([], {}, 60.0, "it gave no answer within 60 seconds"),
        ([1.0, 2.0, 3.0], {}, 60.0, "it gave no answer within 60 seconds"),
        ([1.0, 2.0, 3.0], {"quorum": 0.75}, 6.0, "most others had answered long before"),
        ([0.01] * 3, {"quorum": 0.75}, 0.01 + GRACE, "most others had answered long before"),
        ([0.01], {"round_end": 5.0}, 60.0, "it gave no answer within 60 seconds"),  # one quick client decides nothing
        ([0.01, 1.0], {"round_end": 0.5}, 2.0, "the round had lasted 0 seconds"),
        ([0.01, 1.0], {"round_end": 5.0}, 5.0, "the round had lasted 0 seconds"),
    ],
)
def test_the_end_of_a_wait(took: list[float], options: dict[str, Any], end: float, why: str) -> None:
    assert wait(took, asked=4, now=max(took, default=0.0), **options) == (pytest.approx(end), why)


def test_a_client_that_is_asked_alone_keeps_the_pace_of_the_others() -> None:
    assert wait([], asked=1, now=0.0, round_end=-9.0, others=True, pace=1.0)[0] == pytest.approx(2.0)
    assert wait([], asked=1, now=0.0, round_end=-9.0, others=True)[0] == -9.0
    assert wait([], asked=1, now=0.0, round_end=-9.0)[0] == 60.0  # the only one of the round


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quorum": 0.0}, "quorum is 0.0, but it must be a share above 0 and up to 1."),
        ({"quorum": 1.5}, "quorum is 1.5, but it must be a share above 0 and up to 1."),
        ({"round_seconds": 0}, "round_seconds is 0, but it must be a number above 0."),
    ],
)
def test_impossible_waits_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Waits(**options)
    assert str(caught.value) == said


# -- clients that failed -----------------------------------------------------------------------------------------------


def drawn_first() -> int:
    """The client that the key of the first round draws."""
    there, _ = served("fedavg", {}, per_round=1)
    there.round(there.start())
    (one,) = there.ledger.trips
    return int(one)


@pytest.mark.parametrize("how", ["refused", "silent", "dropped"])
def test_a_client_that_failed_is_not_drawn_again_in_the_round(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = drawn_first()
    if how != "silent":
        over_the_wire(monkeypatch, bad, filled(torch.nan if how == "refused" else 1e30))
    there, _ = served("fedavg", {bad: NEVER} if how == "silent" else {}, per_round=1)
    state = there.start()
    for _ in range(3):
        state = there.round(state)
    assert there.ledger.trips.total() == 3 and bad not in there.ledger.trips


def test_three_clients_that_are_refused_do_not_end_a_run_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (0, 1, 2, 4):
        over_the_wire(monkeypatch, bad, filled(torch.nan))
    there, _ = served("fedavg", {}, per_round=1)
    there.round(there.start())
    assert there.ledger.trips == {3: 1}


def test_if_everybody_is_refused_the_run_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in range(5):
        over_the_wire(monkeypatch, bad, filled(torch.nan))
    there, _ = served("fedavg", {}, per_round=1)
    with pytest.raises(ConfigError, match="3 times; what they sent could not be used: what came as model is not fin"):
        there.round(there.start())


def test_if_everybody_is_dropped_the_run_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in range(5):
        over_the_wire(monkeypatch, bad, filled(1e30))
    there, _ = served("fedavg", {}, per_round=1)
    with pytest.raises(ConfigError, match=r"3 times; .*the update of client \d is too large to be averaged\. Look at"):
        there.round(there.start())


def test_a_client_that_failed_may_be_drawn_in_the_next_round() -> None:
    bad, took = drawn_first(), {}
    took[bad] = NEVER
    there, _ = served("fedavg", took, per_round=5)
    state = there.round(there.start())
    took.clear()
    there.round(state)
    assert there.ledger.trips[bad] == 1


# -- heavy clients -----------------------------------------------------------------------------------------------------


def test_a_client_that_claims_most_samples_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    there, sessions = served("fedavg", {})
    there.backend.gather(0)  # type: ignore[attr-defined]
    claimed = sessions.get(2)
    assert claimed is not None
    state = there.start()
    with caplog.at_level(logging.WARNING):
        there.round(state)
        assert not caplog.records
        with there.backend.attempt(0, 0, {0: 10, 1: 10, 2: 21}), there.backend.attempt(0, 0, {0: 1, 2: 5}):
            pass
        with there.backend.attempt(0, 0, {0: 10, 1: 10, 2: 21}):
            pass
    (said,) = (r.getMessage() for r in caplog.records)
    assert said == (
        "client client-2 says that it has 21 of the 41 samples of this round, so it weighs more than all others "
        "together; most_weight limits that, and agg = 'uniform' weighs all alike"
    )


def test_the_most_weight_is_in_medians_of_the_round() -> None:
    there, _ = served("fedavg", {}, most_weight=2.0)
    assert there._weights({0: 10, 1: 20, 2: 30, 3: 10_000}) == {0: 10.0, 1: 20.0, 2: 30.0, 3: 50.0}
    assert served("fedavg", {})[0]._weights({0: 10, 1: 10_000}) == {0: 10.0, 1: 10_000.0}


def test_with_a_limit_of_one_median_equal_clients_weigh_alike_whatever_one_of_them_claims() -> None:
    """The clients have 12, 20, 9, 20 and 3 samples, so the limit is 12."""
    limited, _, _ = played("fedavg", {}, most_weight=1.0)
    lower = plain(limited).client.params
    alone = [played("fedavg", {j: NEVER for j in range(5) if j != only})[0] for only in range(5)]
    weights = (12, 12, 9, 12, 3)
    for name, value in lower.items():
        models = (plain(one).client.params[name] for one in alone)
        agree(value, sum(w / sum(weights) * model for w, model in zip(weights, models, strict=True)))


@pytest.mark.parametrize("given", [0.5, 0, "much"])
def test_a_most_weight_below_one_median_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"most_weight is .*, but it must be a number from 1 up\."):
        served("fedavg", {}, most_weight=given)
