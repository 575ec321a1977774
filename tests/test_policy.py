"""Specifies how a round's plan is made: every rule for batch sizes and cuts, what limits them, and what is noted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cutlayer.errors import ConfigError, InfeasibleError, UnknownNameError
from cutlayer.planning import batch_sizes, cut_layers, planner
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.policy import BASELINES, Policy, RoundPlan, by_resources
from cutlayer.planning.problem import Bound, Costs, Fleet, Problem


def costs_of(forward: list[float], crossing: list[float], model: list[float]) -> Costs:
    rho, psi = np.array(forward), np.array(crossing)
    return Costs(forward=rho, backward=2 * rho, up=psi, down=psi, model=np.array(model), state=np.zeros(len(forward)))


COSTS = costs_of([1e6, 3e6, 6e6, 8e6], [4e4, 2e4, 1e4, 100.0], [1e4, 5e4, 2e5, 1e6])
FAST = Device(flops=1e9, up=1e7, down=4e7)
SLOW = Device(flops=1e8, up=1e6, down=4e6)
DEVICES = Devices(clients=(FAST, SLOW, FAST, SLOW, FAST), server=1e10, lanes="shared", server_up=4e7, server_down=4e7)
EVERYONE = (0, 1, 2, 3, 4)
SOME = (1, 4)
BOUND = Bound(beta=2.0, lr=0.01, noise=np.full(4, 3.0), slope=np.full(4, 0.2), gap=2.3)
HOPELESS = replace(BOUND, target=1e-3)  # two devices with 64 samples: beta lr / 4 * 12 * 2 / 64 = 1.9e-3 of noise
SAMPLES = dict.fromkeys(EVERYONE, 64)


def plan(policy: Policy, ids: tuple[int, ...] = EVERYONE, **changes: Any) -> RoundPlan:
    """A round's plan with the usual settings."""
    settings: dict[str, Any] = {
        "batch": 16, "cut": 2, "samples": SAMPLES, "key": 7, "bound": BOUND if policy.estimates else None,
        "previous": None,
    }  # fmt: skip
    return policy(ids, **{**settings, **changes})


def policy(batches: Any, cuts: Any, **options: Any) -> Policy:
    return Policy(batches=batches, cuts=cuts, **{"devices": DEVICES, "costs": COSTS, **options})


def problem(ids: tuple[int, ...], bound: Bound = BOUND, devices: Devices = DEVICES, interval: int = 15) -> Problem:
    samples = np.full(len(ids), 64)
    return Problem(costs=COSTS, fleet=Fleet.of(devices, ids), bound=bound, interval=interval, samples=samples)


def with_memory(limits: Mapping[int, float]) -> Devices:
    """The usual devices, some with so many bits."""
    clients = (d._replace(memory=limits.get(j, d.memory)) for j, d in enumerate(DEVICES.clients))
    return replace(DEVICES, clients=tuple(clients))


def array(plan: RoundPlan, which: str, ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.array([getattr(plan, which)[j] for j in ids])


# -- fixed ----------------------------------------------------------------------------------------------------------


def test_fixed_is_the_runs_own_for_everyone() -> None:
    found = plan(Policy(batches="fixed", cuts="fixed"), SOME, batch=20, cut=3)
    assert found == RoundPlan({1: 20, 4: 20}, {1: 3, 4: 3}, ())


def test_tuples_hold_each_clients_own_numbers() -> None:
    found = plan(Policy(batches=(5, 6, 7, 8, 9), cuts=(1, 2, 3, 4, 1)), SOME)
    assert found == RoundPlan({1: 6, 4: 9}, {1: 2, 4: 1}, ())


def test_no_batch_is_larger_than_the_clients_samples() -> None:
    samples = {1: 5, 4: 100}
    assert plan(Policy(batches="fixed", cuts="fixed"), SOME, samples=samples).batches == {1: 5, 4: 16}
    assert plan(Policy(batches=(9,) * 5, cuts="fixed"), SOME, samples=samples).batches == {1: 5, 4: 9}
    drawn = plan(Policy(batches="random", cuts="fixed", random_batch=(50, 64)), SOME, samples=samples).batches
    assert drawn[1] == 5 and 50 <= drawn[4] <= 64


# At cut 2 a sample holds 2 (4e4 + 2e4) = 1.2e5 bits beside a model of 5e4, at cut 1 8e4 beside 1e4.
def test_no_batch_is_larger_than_what_memory_holds() -> None:
    devices = with_memory({1: 6.6e5, 3: 6.5e5})  # room for 6.1e5 and 6.0e5: 5 samples, and not quite 5
    assert plan(policy("fixed", "fixed", devices=devices)).batches == {0: 16, 1: 5, 2: 16, 3: 4, 4: 16}
    drawn = plan(policy("random", (2,) * 5, devices=devices, random_batch=(30, 64)))
    assert (drawn.batches[1], drawn.batches[3]) == (5, 4) and drawn.batches[0] >= 30


def test_a_fixed_cut_that_does_not_fit_leaves_the_client_out_with_a_note() -> None:
    devices = with_memory({1: 1.6e5})  # cut 2 needs 1.7e5 with one sample, cut 1 needs 9e4
    found = plan(policy("fixed", "fixed", devices=devices))
    assert found.batches.keys() == found.cuts.keys() == {0, 2, 3, 4}
    assert found.notes == (
        "infeasible_memory: client 1 is left out, because it does not hold one sample and the layers of cut 2; "
        "give its device more memory, or a smaller cut",
    )
    assert plan(policy("fixed", (2, 1, 2, 2, 2), devices=devices)).batches[1] == 1


# -- random ---------------------------------------------------------------------------------------------------------


def test_random_numbers_are_a_function_of_the_key_and_the_client_alone() -> None:
    chance = policy("random", "random")
    all_of_them, again, few = plan(chance), plan(chance), plan(chance, SOME, batch=3, cut=1)
    assert all_of_them == again
    assert few.batches == {j: all_of_them.batches[j] for j in SOME}
    assert few.cuts == {j: all_of_them.cuts[j] for j in SOME}
    assert plan(policy("fixed", "random", devices=None)).cuts == all_of_them.cuts  # whatever the rule for batches
    assert plan(policy("random", "fixed", devices=None)).batches == all_of_them.batches
    other = plan(chance, key=8)
    assert other.batches != all_of_them.batches and other.cuts != all_of_them.cuts


def test_random_numbers_are_uniform_over_their_ranges() -> None:
    chance = policy("random", "random", random_batch=(3, 6))
    plans = [plan(chance, key=key) for key in range(600)]
    for which, values in (("batches", (3, 4, 5, 6)), ("cuts", (1, 2, 3))):  # never all four layers
        counts = Counter(value for p in plans for value in getattr(p, which).values())
        assert sorted(counts) == list(values)
        expected = 3000 / len(values)
        assert all(abs(count - expected) < 4 * (expected * (1 - 1 / len(values))) ** 0.5 for count in counts.values())
    assert {b for key in range(600) for b in plan(policy("random", "fixed"), key=key).batches.values()} == {
        *range(1, 65)
    }


def test_a_random_cut_is_drawn_again_until_a_sample_fits_and_stays_where_it_does() -> None:
    chance, tight = policy("random", "random"), policy("random", "random", devices=with_memory({1: 1.8e5}))
    moved = 0
    for key in range(60):
        free, found = plan(chance, key=key), plan(tight, key=key)
        assert found.cuts[1] == free.cuts[1] if free.cuts[1] < 3 else found.cuts[1] < 3
        assert found.batches[1] == min(free.batches[1], {1: 2, 2: 1}[found.cuts[1]])  # 1.7e5 / 8e4, 1.3e5 / 1.2e5
        for mine, others in ((found.batches, free.batches), (found.cuts, free.cuts)):
            assert all(mine[j] == others[j] for j in (0, 2, 3, 4))
        moved += found.cuts[1] != free.cuts[1]
    assert moved > 5


# -- by resources ---------------------------------------------------------------------------------------------------

# Two devices, three layers; N / f_s = 2 / 60 of what is left to the server: 150, 90, 0 FLOPs take 5, 3, 0 s.
HAND = costs_of([10.0, 30.0, 60.0], [40.0, 20.0, 10.0], [30.0, 60.0, 300.0])
PAIR = (
    Device(flops=30.0, up=20.0, down=40.0, fed_up=10.0, fed_down=30.0),
    Device(flops=3.0, up=80.0, down=40.0, fed_up=60.0, fed_down=60.0),
)


# The first:  1/3 + 2 + 5 + 1 + 2/3 = 9       1 + 1 + 3 + 1/2 + 2 = 7.5      2 + 1/2 + 0 + 1/4 + 4 = 6.75   a sample,
#             30 (1/10 + 1/30) / 10 = 0.4     60 (1/10 + 1/30) / 10 = 0.8    300 (1/10 + 1/30) / 10 = 4     the model
# so 4 samples take 36.4, 30.8, 31 s, and 5 take 45.4, 38.3, 37.75 s.
# The second: 10/3 + 1/2 + 5 + 1 + 20/3 = 16.5 s, 33.75 s, 60.375 s a sample: always the first cut.
@pytest.mark.parametrize(("batch", "memory", "cut"), [(4, 1e9, 2), (5, 1e9, 3), (5, 1001.0, 3), (5, 999.0, 2)])
def test_resources_choose_the_cut_of_least_seconds_by_hand(batch: int, memory: float, cut: int) -> None:
    # 5 samples at cut 3 hold 5 x 2 x 70 + 300 = 1000 bits; at cut 2, 5 x 2 x 60 + 60 = 660.
    devices = Devices(clients=(PAIR[0]._replace(memory=memory), PAIR[1]), server=60.0)
    rule = Policy(batches=(batch, 2), cuts="resources", devices=devices, costs=HAND, interval=10)
    assert plan(rule, (0, 1)) == RoundPlan({0: batch, 1: 2}, {0: cut, 1: 1}, ())


def test_resources_count_a_share_of_the_server_for_each_that_takes_part() -> None:
    devices = Devices(clients=PAIR, server=60.0)
    rule = Policy(batches=(4, 2), cuts="resources", devices=devices, costs=HAND, interval=10)
    # Alone the first has the whole server: 4 x (6.5, 6, 6.75) + (0.4, 0.8, 4) = 26.4, 24.8, 31 s; with few samples
    assert plan(rule, (0,)).cuts == {0: 2}
    # its model weighs more: 6.9, 6.8, 10.75 s, and aggregated at each of them, 10.5, 14, 46.75 s.
    assert plan(replace(rule, batches=(1, 2)), (0,)).cuts == {0: 2}
    assert plan(replace(rule, batches=(1, 2), interval=1), (0,)).cuts == {0: 1}


def test_resources_lower_a_batch_that_fits_no_cut_first() -> None:
    devices = Devices(clients=(PAIR[0]._replace(memory=300.0), PAIR[1]), server=60.0)
    rule = Policy(batches=(5, 2), cuts="resources", devices=devices, costs=HAND, interval=10)
    # Cut 1 holds (300 - 30) / 80 = 3.4 samples; three of them fit neither cut 2, (300 - 60) / 120, nor cut 3.
    assert plan(rule, (0, 1)) == RoundPlan({0: 3, 1: 2}, {0: 1, 1: 1}, ())


def test_resources_do_not_look_at_the_bound() -> None:
    batches = np.array([16] * 5)
    assert (
        by_resources(problem(EVERYONE), batches).tolist() == by_resources(problem(EVERYONE, HOPELESS), batches).tolist()
    )


# -- planned --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["joint", "paper"])
def test_planned_is_the_planners_answer_by_client(mode: planner.Mode) -> None:
    found = plan(policy("planned", "planned", mode=mode, interval=5), SOME)
    solved = planner.solve(problem(SOME, interval=5), mode=mode)
    assert found.batches == dict(zip(SOME, solved.plan.batches, strict=True))
    assert found.cuts == dict(zip(SOME, solved.plan.cuts, strict=True))
    assert found.notes == ()


def test_random_batches_get_the_best_cuts() -> None:
    found = plan(policy("random", "planned"))
    assert found.batches == plan(policy("random", "random")).batches
    batches = array(found, "batches", EVERYONE)
    assert array(found, "cuts", EVERYONE).tolist() == cut_layers.best(problem(EVERYONE), batches).tolist()
    best = problem(EVERYONE).seconds(batches, array(found, "cuts", EVERYONE))
    assert all(best <= problem(EVERYONE).seconds(batches, np.full(5, cut)) for cut in (1, 2, 3, 4))


def test_random_cuts_get_the_best_batches() -> None:
    found = plan(policy("planned", "random"))
    assert found.cuts == plan(policy("random", "random")).cuts
    cuts = array(found, "cuts", EVERYONE)
    assert array(found, "batches", EVERYONE).tolist() == batch_sizes.joint(problem(EVERYONE), cuts).tolist()
    best = problem(EVERYONE).seconds(array(found, "batches", EVERYONE), cuts)
    assert all(best <= problem(EVERYONE).seconds(np.full(5, batch), cuts) for batch in (1, 4, 16, 64))


def test_either_may_be_fixed_and_the_other_planned() -> None:
    batches = plan(policy("planned", "fixed"), cut=3)
    assert set(batches.cuts.values()) == {3}
    assert array(batches, "batches", EVERYONE).tolist() == batch_sizes.joint(problem(EVERYONE), np.full(5, 3)).tolist()
    cuts = plan(policy("fixed", "planned"), batch=8)
    assert set(cuts.batches.values()) == {8}
    assert array(cuts, "cuts", EVERYONE).tolist() == cut_layers.best(problem(EVERYONE), np.full(5, 8)).tolist()


def test_batches_that_do_not_fit_at_all_are_lowered_before_the_cuts_are_planned() -> None:
    devices = with_memory({1: 3.5e5})  # cut 1 holds 4.25 samples
    found = plan(policy("fixed", "planned", devices=devices))
    assert found.batches == {0: 16, 1: 4, 2: 16, 3: 16, 4: 16}
    assert found.cuts[1] == 1  # (3.5e5 - 5e4) / 1.2e5 = 2.5 samples at cut 2
    assert plan(policy("fixed", "planned"), previous=found).cuts == plan(policy("fixed", "planned")).cuts


def test_planned_rules_need_a_bound() -> None:
    for name, (batches, cuts) in BASELINES.items():
        rule = policy(batches, cuts)
        assert rule.estimates == (name not in ("rbs_rms", "rbs_rhams"))
        if rule.estimates:
            with pytest.raises(ConfigError, match=r"^a plan needs a bound: estimate one before the first round$"):
                plan(rule, bound=None)
        else:
            assert set(plan(rule, bound=None).batches) == set(EVERYONE)


# -- notes ----------------------------------------------------------------------------------------------------------

TIGHT = with_memory({3: 8.9e4})  # one sample and the first layer take 9e4


@pytest.mark.parametrize("name", BASELINES)
def test_a_device_that_fits_no_cut_is_left_out_of_every_baseline_with_a_note(name: str) -> None:
    batches, cuts = BASELINES[name]
    found = plan(policy(batches, cuts, devices=TIGHT))
    assert found.notes == (
        "infeasible_memory: client 3 is left out, because it does not hold one sample and the layers of cut 1; "
        "give its device more memory",
    )
    assert found[:2] == plan(policy(batches, cuts), (0, 1, 2, 4))[:2]


@pytest.mark.parametrize("name", BASELINES)
def test_without_a_device_that_fits_there_is_no_round(name: str) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(policy(*BASELINES[name], devices=TIGHT), (3,))
    assert caught.value.why == "infeasible_memory"
    assert str(caught.value) == (
        "no client holds one sample and the layers of its cut; give the devices more memory, or a smaller cut"
    )


BEFORE = RoundPlan({0: 1, 1: 2, 2: 3, 3: 4, 4: 5}, {0: 1, 1: 3, 2: 2, 3: 1, 4: 3}, ("an old note",))
HABS = "no batch sizes reach the target 0.001 with these cuts"
HAMS = "no cuts reach the target 0.001 with these batch sizes"
RULES = {"hasfl": "no batch sizes reach the target 0.001", "habs_rms": HABS, "rbs_hams": HAMS}


@pytest.mark.parametrize("name", RULES)
def test_where_no_plan_reaches_the_target_the_previous_one_is_kept_with_a_note(name: str) -> None:
    batches, cuts = BASELINES[name]
    found = plan(policy(batches, cuts, interval=1), SOME, bound=HOPELESS, previous=BEFORE)
    drawn = plan(policy("random", "random"), SOME)
    assert found.batches == ({1: 2, 4: 5} if batches == "planned" else drawn.batches)
    assert found.cuts == ({1: 3, 4: 3} if cuts == "planned" else drawn.cuts)  # what is drawn is drawn anew
    (note,) = found.notes
    assert note.startswith(f"infeasible_eps: the previous plan is kept, because {RULES[name]}")


@pytest.mark.parametrize("previous", [None, RoundPlan({1: 9}, {1: 1})])  # none, and one of other clients
@pytest.mark.parametrize("name", RULES)
def test_without_a_previous_plan_the_runs_own_is_used_with_a_note(name: str, previous: RoundPlan | None) -> None:
    batches, cuts = BASELINES[name]
    devices = with_memory({1: 1.8e5})  # room for two samples at cut 1, one at cut 2, none at cut 3
    found = plan(policy(batches, cuts, interval=1, devices=devices), SOME, cut=3, bound=HOPELESS, previous=previous)
    drawn = plan(policy("random", "random", devices=devices), SOME)
    assert found.cuts == ({1: 2, 4: 3} if cuts == "planned" else drawn.cuts)
    assert found.batches[4] == (16 if batches == "planned" else drawn.batches[4])
    assert found.batches[1] == {1: 2, 2: 1}[found.cuts[1]]
    (note,) = found.notes
    used = "infeasible_eps: batch size 16 and cut 3 are used as far as they fit, because"
    assert note.startswith(f"{used} {RULES[name]}")


def test_the_planners_own_notes_are_passed_on() -> None:
    steep = replace(BOUND, target=1e-9)  # below the drift of one layer
    (note,) = plan(policy("planned", "planned"), bound=steep).notes
    assert note.startswith("raised_eps: the target 1e-09 is now ")


# -- settings -------------------------------------------------------------------------------------------------------


def test_the_five_of_the_paper() -> None:
    assert BASELINES == {
        "hasfl": ("planned", "planned"),
        "rbs_hams": ("random", "planned"),
        "habs_rms": ("planned", "random"),
        "rbs_rms": ("random", "random"),
        "rbs_rhams": ("random", "resources"),
    }


BATCH_RULES = "'planned', 'random', 'fixed', or a tuple of whole numbers from 1 up."
RANGE = "two whole numbers from 1 up, the smaller one first."
NEEDS_DEVICES = (
    "needs devices, how fast each client is: [devices] of a run, or in Python the devices and the costs of hasfl, such "
    "as costs=cutlayer.profile(model, sample)"
)
NEEDS_COSTS = "costs: what each layer of the model takes; give Costs.of(profile)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": None}, f"batches = 'planned' {NEEDS_DEVICES}"),
        (
            {"batches": "random", "cuts": "resources", "devices": None},
            f"cuts = 'resources' {NEEDS_DEVICES}",
        ),
        ({"costs": None}, f"a policy with devices needs {NEEDS_COSTS}"),
        (
            {"batches": "fixed", "cuts": "random", "devices": None, "costs": None},
            f"cuts = 'random' needs {NEEDS_COSTS}",
        ),
        (
            {"cuts": "random", "costs": costs_of([1.0], [1.0], [1.0])},
            "cuts = 'random' needs a model of 2 layers or more: one at the client, one at the server",
        ),
        (
            {"cuts": "resources"},
            "cuts = 'resources' are found for given batches, and batches = 'planned' for given cuts; take random or "
            "fixed batches, or plan both",
        ),
        ({"batches": (1, 0)}, f"batches is (1, 0), but it must be {BATCH_RULES}"),
        ({"batches": 16}, f"batches is 16, but it must be {BATCH_RULES}"),
        ({"batches": ()}, f"batches is (), but it must be {BATCH_RULES}"),
        ({"interval": 0}, "interval is 0, but it must be a whole number from 1 up."),
        ({"mode": "fast"}, "mode is 'fast', but it must be 'joint' or 'paper'."),
        ({"random_batch": (0, 4)}, f"random_batch is (0, 4), but it must be {RANGE}"),
        ({"random_batch": (5, 4)}, f"random_batch is (5, 4), but it must be {RANGE}"),
        ({"random_batch": (5,)}, f"random_batch is (5,), but it must be {RANGE}"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Policy(**{"devices": DEVICES, "costs": COSTS, **options})
    assert str(caught.value) == message


def test_a_rule_that_is_not_known_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        policy("fixed", "resource")
    assert str(caught.value) == "unknown rule for cuts 'resource'; did you mean 'resources'?"


def test_cuts_and_numbers_that_do_not_fit_the_round_are_refused() -> None:
    for rule, cut, message in (
        (policy("fixed", "fixed"), 5, "cut is 5, but it must be a number of layers from 1 to 4."),
        (policy("fixed", "fixed"), 0, "cut is 0, but it must be a number of layers from 1 to 4."),
        (
            policy("fixed", (1, 9, 1, 1, 1)),
            2,
            "the cut of client 1 is 9, but it must be a number of layers from 1 to 4.",
        ),
        (policy("fixed", (1,)), 2, "cuts has 1 numbers, but client 1 takes part; give one for each client"),
        (policy((1,), "fixed"), 2, "batches has 1 numbers, but client 1 takes part; give one for each client"),
    ):
        with pytest.raises(ConfigError) as caught:
            plan(rule, SOME, cut=cut)
        assert str(caught.value) == message


# -- the least batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", ["planned", "random", "fixed"])
def test_the_least_batch_is_what_a_client_must_hold(cuts: str) -> None:
    """Client 2 has fewer samples and takes them all; client 3 has no memory for 4 samples and is left out."""
    devices = with_memory({3: 2.5 * COSTS.held[0] + COSTS.model[0] + COSTS.state[0]})
    found = plan(policy("planned", cuts, least_batch=4, devices=devices), samples={**SAMPLES, 2: 3})
    assert set(found.batches) == set(found.cuts) == {0, 1, 2, 4}
    assert found.batches.pop(2) == 3 and min(found.batches.values()) >= 4
    at = 2 if cuts == "fixed" else 1
    assert found.notes[0] == (
        f"infeasible_memory: client 3 is left out, because it does not hold 4 samples and the layers of cut {at}; give "
        f"its device more memory{', or a smaller cut' if at == 2 else ''}"
    )


def test_the_least_batch_is_for_planned_ones() -> None:
    assert plan(policy("random", "random", least_batch=40), samples={**SAMPLES, 2: 3}).batches[2] <= 3


def test_a_probe_takes_what_fits() -> None:
    """Client 1 holds nothing, client 3 one sample and the first layer; nobody has more than its samples."""
    held, layer = COSTS.held[0], COSTS.model[0] + COSTS.state[0]
    devices = with_memory({1: 1.0, 3: layer + 1.2 * held})
    found = policy("planned", "planned", devices=devices).probe(EVERYONE, batch=32, cut=3, samples={**SAMPLES, 4: 5})
    assert found.batches == {0: 32, 2: 32, 3: 1, 4: 5}
    assert found.cuts == {0: 3, 2: 3, 3: 1, 4: 3}
    assert [note.split(":")[0] for note in found.notes] == ["infeasible_memory"]


def test_a_note_is_logged_when_it_is_new_and_not_every_round(caplog: pytest.LogCaptureFixture) -> None:
    mine = policy("planned", "planned", devices=with_memory({1: 1.0}))
    first = plan(mine, bound=HOPELESS)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        note.partition(":")[0] for note in first.notes
    ]
    assert first.notes[0].startswith("infeasible_memory: client 1 is left out")
    caplog.clear()
    second = plan(mine, bound=HOPELESS, previous=first)
    assert len(second.notes) == len(first.notes) and caplog.messages == []
