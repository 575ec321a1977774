"""What crosses, as a table: each byte of the ledger in one row, and HO-SFL's Table 3 to its printed digits."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import mistake, say
from test_figures import drawn, lines
from test_report import FEDAVG, MIB, SPLIT, left

import cutlayer as cl
from cutlayer import recipes
from cutlayer.cli.traffic_table import GIB, in_units
from cutlayer.core.batches import Batching
from cutlayer.core.kinds import KINDS
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.methods import METHODS
from cutlayer.recipes import Recipe
from cutlayer.recipes.scale import scaled
from cutlayer.results import figures, report
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute
from cutlayer.studies import traffic
from cutlayer.studies.traffic_forms import TrafficSetting, expected

__all__ = ["drawn", "say"]  # fixtures

# CIFAR-10 dealt to 100 clients, 10 a round; ResNet-18 with the ImageNet stem on 32x32 images, cut after layer2, which
# leaves 128 x 4 x 4 values of a sample; FSL-SAGE's auxiliary model is layer3 with a classifier of its own.
PAPER = TrafficSetting(
    samples=160_000,
    clients=100,
    per_round=10,
    client_samples=500,  # 15 x 32 + 20
    activation=2048,
    client_params=683_072,
    auxiliary_params=2_102_282,
    goes_on=True,
    exceed=True,
)
# An epoch of 10 clients has 5,000 samples, so 32 rounds are the 160,000 exactly. The paper's numbers are those of 33
# rounds and 165,000 samples: it stops once there are more. A round of one step has 10 batches of 32, or 20 at the end
# of a client's samples; on average more than 160,000 are reached in round 511, with 5,110 steps and 160,240 samples.
ROWS = tuple(traffic.PAPER_ROWS)
TABLE3 = {
    # 160,240 x 8192 B; no model; 5,110 x 5 x 8 B up; down 5,110 x 5 x 16 B x (1 + 9 rounds missed on average)
    "hosfl": ("1.22", "0.00", "0.0002", "1.22", "0.00", "0.004"),
    # 165,000 x 8192 B; 330 x 683,072 x 4 B
    "sfl_v1": ("1.26", "0.84", "0.00", "1.26", "0.84", "0.00"),
    # batches 0, 5, 10 and 15 of 16: 330 x (3 x 32 + 20) x 8192 B; down only 330 x 2,102,282 x 4 B
    "fsl_sage": ("0.29", "0.84", "0.00", "0.00", "2.58", "0.00"),
    # twice 165,000 x 8192 B; 330 x 16 x 4 B of scalars
    "zo_sfl": ("2.52", "0.84", "0.00", "0.00", "0.84", "0.00002"),
    # three times 160,240 x 8192 B; 5,110 x 683,072 x 4 B are 13.00, where the paper prints 12.97; 5,110 x 4 B
    "mu_splitfed": ("3.67", "13.00", "0.00", "0.00", "13.00", "0.00002"),
}
LENGTHS = {"hosfl": (511, 160_240), "mu_splitfed": (511, 160_240)}


@pytest.mark.parametrize("method", TABLE3)
def test_the_closed_form_gives_the_papers_table(method: str) -> None:
    found = expected(method, PAPER)
    rows = traffic.breakdown(found.crossed, paper_convention=True)
    assert tuple(rows) == ROWS
    assert tuple(in_units(size, GIB) for size in rows.values()) == TABLE3[method]
    assert (found.rounds, round(found.samples)) == LENGTHS.get(method, (33, 165_000))


def test_a_run_may_end_with_as_many_samples_and_draw_full_batches() -> None:
    ours = replace(PAPER, goes_on=False, exceed=False)
    assert expected("sfl_v1", ours)[:2] == (32, 160_000)
    assert expected("hosfl", ours)[:2] == (500, 160_000)  # 5,000 steps of 32 samples
    assert expected("mu_splitfed", ours).crossed["up_model"] == 5_000 * 4 * 683_072
    assert expected("hosfl", replace(ours, missed=0)).crossed["down_slopes"] == 5_000 * 5 * 16
    assert expected("hosfl", replace(ours, samples=160_001))[:2] == (501, 160_320)


def test_clients_that_always_take_part_go_through_their_samples_in_turn() -> None:
    # 5 steps are a pass over 18 samples: 4, 4, 4, 4, 2; in 7 rounds both clients take 18 + 2 x 4
    few = TrafficSetting(samples=52, clients=2, per_round=2, client_samples=18, activation=3, client_params=1,
                         goes_on=True, batching=Batching(size=4, drop_last=False))  # fmt: skip
    assert expected("hosfl", few)[:2] == (7, 52)
    assert expected("hosfl", replace(few, exceed=True))[:2] == (8, 60)


def test_everything_is_counted_without_the_papers_convention() -> None:
    rows = traffic.breakdown(expected("fsl_sage", PAPER).crossed)
    # the paper leaves out 0.84 GiB of clients' models that go down
    assert in_units(rows["Downlink (Model)"], GIB) == "3.42"
    assert rows["Uplink (Labels)"] == 330 * (3 * 32 + 20) * 8


def test_every_kind_and_direction_is_in_one_row() -> None:
    names = [f"{direction}_{kind.name}" for direction in ("up", "down", "inter_server") for kind in KINDS]
    crossed = {name: 2**i for i, name in enumerate(names)}
    rows = traffic.breakdown(crossed)
    assert sum(rows.values()) == 2 ** len(names) - 1
    assert list(rows) == [*ROWS, "Uplink (Labels)", "Downlink (Setup)", "Inter-server", "Other"]
    assert rows["Inter-server"] == sum(crossed[name] for name in names if name.startswith("inter_server"))
    assert rows["Other"] == sum(
        crossed[f"{direction}_{kind}"] for direction in ("up", "down") for kind in ("statistics", "settings", "sync")
    ) + sum(crossed[name] for name in ("up_setup", "down_labels"))


def ledger_of(method: Any, clients: int, client_samples: int, rounds: int, batching: Batching) -> dict[str, Any]:
    """The last record of a run on random samples, equally many of each client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * client_samples, 6, generator=generator)
    data = cl.from_arrays(x, torch.arange(len(x)) % 3, num_classes=3)
    dealt = cl.iid(len(x), clients, key=0)
    return cl.train(method, data, dealt, rounds=rounds, batching=batching, engine="loop").history[-1]


@pytest.mark.parametrize("name", TABLE3)
def test_the_closed_form_is_what_the_ledger_counts(name: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    method = METHODS[name](model=cl.Split(net, 1), client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
    batching = Batching(size=3, drop_last=False)  # of 17 samples five and one of two, which FSL-SAGE sends, too
    end = ledger_of(method, 2, 17, rounds=3, batching=batching)
    setting = TrafficSetting(
        samples=end["samples"],
        clients=2,
        per_round=2,
        client_samples=17,
        activation=5,
        client_params=6 * 5 + 5,
        auxiliary_params=(5 * 4 + 4) + (4 * 3 + 3),  # the server's first unit and a linear layer
        batching=batching,
    )
    found = expected(name, setting)
    beside = {"down_settings", "down_setup"}  # of which the formula knows nothing
    assert (found.rounds, found.samples) == (3, end["samples"])
    assert found.crossed == {kind: size for kind, size in end["bytes"].items() if kind not in beside and size}


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        replace(PAPER, samples=0)
    assert str(error.value) == "samples is 0, but it must be a whole number above 0."
    with pytest.raises(ConfigError) as error:
        replace(PAPER, per_round=101)
    assert str(error.value) == "per_round is 101, but it must be at most the 100 clients."
    with pytest.raises(UnknownNameError) as unknown:
        expected("sfl_v2", PAPER)
    assert str(unknown.value).startswith("unknown method with a closed form 'sfl_v2'; did you mean 'sfl_v1'")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.00"), (2**30, "1.00"), (0.0049 * 2**30, "0.005"), (0.00501 * 2**30, "0.01"), (1, "0.0000000009")],
)
def test_small_sizes_have_one_digit(size: float, text: str) -> None:
    assert in_units(size, GIB) == text


# -- of finished runs ------------------------------------------------------------------------------------------------


def test_a_run_that_is_finished_can_be_scaled(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [0.1, 0.2], seed=0)  # 8 samples a round; 1 MiB of activations, of models each way
    left(tmp_path, SPLIT, [0.1, 0.2, 0.3, 0.4], seed=1)
    (group,) = report.compare(report.find([tmp_path])).panels[0].groups
    whole = traffic.column(group)
    assert (whole.samples, whole.rows["Uplink (Act)"]) == (24, 3 * MIB)  # of 2 and 4 rounds
    scaled = traffic.column(group, 160)
    assert (scaled.samples, scaled.rows["Uplink (Act)"], scaled.rows["Other"]) == (160, 20 * MIB, 0)
    # whole rounds until there are more: 21 of 8 samples
    as_paper = traffic.column(group, 160, paper_convention=True)
    assert (as_paper.samples, as_paper.rows["Downlink (Model)"]) == (168, 21 * MIB)
    assert traffic.column(group, 161, paper_convention=True).samples == 168
    assert list(as_paper.rows) == list(ROWS)


def test_compare_shows_what_crossed(say: Any, tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.2, 0.6])
    left(tmp_path, SPLIT, [0.1, 0.7])
    said = say("compare", ".", "--traffic", "--samples", "16384")
    lines_ = [line.split() for line in said.out.splitlines()]
    assert ["GiB", "fedavg", "sfl_v1"] in lines_
    assert ["Uplink", "(Act)", "2.00", "2.00"] in lines_ and ["Uplink", "(Scalar)", "0.00", "0.00"] in lines_
    assert ["Total", "6.00", "6.00"] in lines_ and ["samples", "16,384", "16,384"] in lines_
    assert "Labels" not in said.out  # nothing crossed in that row
    assert "GiB of 2^30 bytes; bytes a sample × 16,384" in said.out
    found = say("compare", ".", "--traffic", "--samples", "16384", "--paper-convention", "--format", "json").json
    (panel,) = found["panels"]
    assert (found["samples"], found["paper_convention"], found["figure"]) == (16384, True, None)
    assert [(run["name"], run["samples"]) for run in panel["runs"]] == [
        ("paper/fedavg", 16392),
        ("paper/sfl_v1", 16392),
    ]
    assert panel["runs"][1]["bytes"]["Uplink (Act)"] == 2049 * MIB


def test_small_runs_are_told_in_smaller_units(say: Any, tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.2, 0.6])
    left(tmp_path, SPLIT, [0.1, 0.7])
    said = say("compare", ".", "--traffic", "--samples", "16")
    lines_ = [line.split() for line in said.out.splitlines()]
    assert ["MiB", "fedavg", "sfl_v1"] in lines_ and ["Total", "6.00", "6.00"] in lines_
    assert "MiB of 2^20 bytes; bytes a sample × 16" in said.out


def test_the_papers_cells_stand_beside_ours(say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {"paper/sfl_v1": ("1.26", "0.84", "0.0", "1.26", "0.84", "0.0")}
    monkeypatch.setitem(recipes.RECIPES, "paper", lambda: Recipe(runs=(), traffic=printed))
    left(tmp_path, FEDAVG, [0.2])
    left(tmp_path, SPLIT, [0.1])
    words = ["compare", ".", "--traffic", "--samples", "8192"]
    found = [line.split() for line in say(*words).out.splitlines()]
    assert ["GiB", "fedavg", "sfl_v1", "paper"] in found
    assert ["Uplink", "(Act)", "1.00", "1.00", "1.26"] in found and ["Total", "3.00", "3.00"] in found
    runs = say(*words, "--format", "json").json["panels"][0]["runs"]
    assert (runs[0]["published"], runs[1]["published"]["Downlink (Model)"]) == ({}, "0.84")


def test_traffic_and_its_figure(say: Any, tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [0.1, 0.7])
    said = say("compare", ".", "--traffic", "--paper-convention", "--figure", "a.png")
    assert "GiB of 2^30 bytes; of whole runs, means over seeds" in said.out
    assert "by the convention of HO-SFL's Table 3: without labels" in said.out
    assert said.out.endswith("figure: a.png\n") and Path("a.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--samples 10", "--samples is about the table of traffic; add --traffic"),
        ("--paper-convention", "--paper-convention is about the table of traffic; add --traffic"),
    ],
)
def test_options_that_would_be_ignored_are_refused(say: Any, tmp_path: Path, words: str, message: str) -> None:
    left(tmp_path, SPLIT, [0.1])
    assert mistake(say("compare", ".", *words.split())) == message


def test_set_up_takes_place_once_however_long_a_run_is(say: Any, tmp_path: Path) -> None:
    folder = left(tmp_path, SPLIT, [0.1])  # of 8 samples
    folder.metrics.write_text(folder.metrics.read_text().replace('"down_model"', '"down_setup"'))
    (run,) = say("compare", ".", "--traffic", "--samples", "80", "--format", "json").json["panels"][0]["runs"]
    assert (run["bytes"]["Downlink (Setup)"], run["bytes"]["Uplink (Act)"]) == (2**20, 10 * 2**20)


def test_a_run_without_samples_has_no_scale(say: Any, tmp_path: Path) -> None:
    folder = left(tmp_path, SPLIT, [0.1])
    folder.metrics.write_text(folder.metrics.read_text().replace('"samples": 8', '"samples": 0'))
    assert mistake(say("compare", ".", "--traffic", "--samples", "9")) == (
        "paper/sfl_v1/seed-0 has processed no sample, so its traffic has no scale; leave out --samples"
    )


# -- against samples -------------------------------------------------------------------------------------------------


def with_axis(monkeypatch: pytest.MonkeyPatch, axis: Any) -> None:
    monkeypatch.setitem(recipes.RECIPES, "paper", lambda: Recipe(runs=(), axis=axis))


@pytest.mark.parametrize(
    ("axis", "label", "other", "places"),
    [
        ("rounds", "communication round", "simulated seconds", [1, 2]),
        ("samples", "processed samples", "simulated seconds", [8, 16]),
        ("time", "simulated seconds", "traffic, up and down (MiB)", [2, 4]),
    ],
)
def test_curves_are_drawn_against_what_the_recipe_says(
    tmp_path: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch, axis: str, label: str, other: str, places: list[int]
) -> None:
    with_axis(monkeypatch, axis)
    left(tmp_path, SPLIT, [0.2, 0.6], simulated=2)
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    first, second = drawn[0].axes
    assert (first.get_xlabel(), second.get_xlabel()) == (label, other)
    assert lines(first) == {"SFL-V1": [(places[0], 20), (places[1], 60)]}


def test_many_samples_are_counted_in_thousands(tmp_path: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_axis(monkeypatch, "samples")
    folder = left(tmp_path, SPLIT, [0.2])
    folder.metrics.write_text(folder.metrics.read_text().replace('"samples": 8', '"samples": 20000'))
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    assert drawn[0].axes[0].get_xlabel() == "processed samples (thousands)"
    assert lines(drawn[0].axes[0]) == {"SFL-V1": [(20, 20)]}


def test_time_that_not_every_run_tells_is_no_axis(tmp_path: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_axis(monkeypatch, "time")
    left(tmp_path, SPLIT, [0.2, 0.6])
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    assert drawn[0].axes[0].get_xlabel() == "communication round"


@pytest.mark.parametrize("axis", ["rounds", "samples"])
def test_compare_has_a_column_of_samples_where_a_recipe_asks(
    say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str
) -> None:
    with_axis(monkeypatch, axis)
    left(tmp_path, SPLIT, [0.1, 0.2, 0.3])
    words = say("compare", ".").out.split()
    after = ["24"] if axis == "samples" else []  # 3 rounds of 8
    assert words[words.index("sfl_v1") :][: 5 + len(after)] == ["sfl_v1", "30.0", "30.0", "1", "3", *after]
    assert ("samples" in words) == (axis == "samples")
    assert say("compare", ".", "--format", "json").json["runs"][0]["samples"] == 24


# -- a budget of samples ---------------------------------------------------------------------------------------------

BUDGET = Run(
    data="digits",
    subset=0.1,
    clients=2,
    partition=Choice("iid"),
    model=Choice("mlp", {"hidden": (4,)}),
    batching=Batching(size=8, steps=3),  # 48 samples a round
    rounds=9,
    eval_every=4,
    checkpoint_every=5,
    engine="loop",
)


@pytest.mark.parametrize(("budget", "rounds"), [(1, 1), (96, 2), (97, 3), (10**6, 9)])
def test_a_run_ends_with_the_round_that_has_the_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, budget: int, rounds: int
) -> None:
    folder = Folder(tmp_path / "run")
    with caplog.at_level(logging.INFO, "cutlayer"):
        execute(replace(BUDGET, until_samples=budget), folder)
    early = [f"{folder.path}: ended at round {rounds}: until_samples {budget:,} reached"]
    assert caplog.messages == (early if rounds < 9 else [])
    history = folder.history()
    assert [record["samples"] for record in history] == [48 * (i + 1) for i in range(rounds)]
    assert "test_accuracy" in history[-1]  # measured, though only every fourth round is
    assert [r["round"] for r in history[:-1] if "test_accuracy" in r] == [4, 8][: (rounds - 1) // 4]
    assert folder.store.rounds()[-1] == rounds  # committed, though a checkpoint is due every fifth round


def test_a_run_whose_samples_are_used_up_may_go_on(tmp_path: Path) -> None:
    run, folder, whole = replace(BUDGET, eval_every=1), Folder(tmp_path / "run"), Folder(tmp_path / "whole")
    execute(replace(run, until_samples=48), folder)
    execute(replace(run, until_samples=100), folder, resume=True)
    assert len(folder.history()) == 3
    execute(run, folder, resume=True)
    execute(run, whole)
    assert folder.metrics.read_bytes() == whole.metrics.read_bytes()


def test_runs_of_other_budgets_are_the_same_run(tmp_path: Path) -> None:
    left(tmp_path, replace(SPLIT, until_samples=8), [0.1], seed=0)
    left(tmp_path, replace(SPLIT, until_samples=99), [0.1, 0.2], seed=1)
    (group,) = report.compare(report.find([tmp_path])).panels[0].groups
    assert [len(t.history) for t in group.trials] == [1, 2]


def test_a_scaled_run_has_a_scaled_budget() -> None:
    run = Run(clients=100, per_round=10, rounds=600, until_samples=160_000)
    assert scaled(run, 0.5).until_samples == 40_000  # half the rounds of half the clients
    assert scaled(replace(run, until_samples=None), 0.5).until_samples is None
