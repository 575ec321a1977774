"""Comparisons say what hand-made metrics files say; the numbers are derived beside them."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cutlayer import recipes
from cutlayer.cli import papers
from cutlayer.cli.tables import sections_for_people
from cutlayer.core.text import human_bytes, human_seconds, percent, time_unit
from cutlayer.errors import CheckpointError, ConfigError
from cutlayer.recipes import Published, Recipe
from cutlayer.recipes.recipe import Statement
from cutlayer.results import report
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder

MIB = 2**20
FEDAVG = Run(name="paper/fedavg", method=Choice("fedavg"), rounds=4)
SPLIT = Run(name="paper/sfl_v1", method=Choice("sfl_v1"), rounds=4)


def left(
    root: Path,
    run: Run,
    accuracies: Sequence[float | None],
    seed: int = 0,
    stopped: int = 0,
    simulated: float | None = None,
) -> Folder:
    """The folder of a run with these accuracies: every round 1 MiB of model goes down, and 2 MiB in two kinds up.

    A round takes so many simulated seconds, if it is told.
    """
    folder = Folder(root / run.name / f"seed-{seed}")
    folder.path.mkdir(parents=True)
    folder.config.write_text(config.dumps(replace(run, seed=seed)))
    lines: list[dict[str, Any]] = []
    for number, accuracy in enumerate(accuracies, start=1):
        crossed = {"down_model": number * MIB, "up_model": number * MIB, "up_activations": number * MIB}
        record: dict[str, Any] = {
            "round": number,
            "loss": 1.0,
            "stopped": stopped,
            "samples": 8 * number,
            "bytes": crossed,
        }
        if simulated is not None:
            record["simulated_seconds"] = number * simulated
        lines.append(record if accuracy is None else {**record, "test_accuracy": accuracy})
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.timing.write_text("".join(json.dumps({"round": r["round"], "seconds": 0.5}) + "\n" for r in lines))
    return folder


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """Two seeds of FedAvg and SFL-V1, and two other methods that arrive sometimes and never."""
    left(tmp_path, FEDAVG, [0.2, 0.5, 0.8, 0.7], seed=0)
    left(tmp_path, FEDAVG, [0.3, 0.6, 0.6, 0.9], seed=1)
    left(tmp_path, SPLIT, [0.1, 0.8, 0.8, 0.8], seed=0)
    left(tmp_path, SPLIT, [0.2, 0.9, 0.8, 0.8], seed=1)
    left(tmp_path, replace(FEDAVG, name="paper/sl", method=Choice("sl")), [0.1, 0.1, 0.8, 0.1], seed=0)
    left(tmp_path, replace(FEDAVG, name="paper/sl", method=Choice("sl")), [0.1, 0.1, 0.1, 0.1], seed=1)
    left(tmp_path, replace(FEDAVG, name="paper/sfl_v2", method=Choice("sfl_v2")), [0.1] * 4, seed=0, stopped=3)
    left(tmp_path, replace(FEDAVG, name="paper/sfl_v2", method=Choice("sfl_v2")), [0.1] * 4, seed=1)
    return tmp_path


def rows(comparison: report.Comparison) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in comparison.as_dict()["runs"]}


def alone(comparison: report.Comparison) -> report.Panel:
    (panel,) = comparison.panels
    return panel


def printed(comparison: report.Comparison, width: int = 140) -> list[str]:
    """The lines of the tables, blanks squeezed."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(sections_for_people(papers.sections(comparison)))
    return [" ".join(line.split()) for line in console.export_text().splitlines() if line.strip()]


def test_means_deviations_and_rounds_to_target(paper: Path) -> None:
    comparison = report.compare(report.find([paper]))
    # FedAvg's best are 0.8 and 0.9: mean 0.85, deviation 0.1 / sqrt(2); its final ones 0.7 and 0.9
    assert alone(comparison).target == pytest.approx(0.9 * 0.85)
    assert alone(comparison).rule == "0.9 × the best accuracy of fedavg"
    found = rows(comparison)
    fedavg, split = found["fedavg"], found["sfl_v1"]
    assert fedavg["best_accuracy"] == pytest.approx({"mean": 0.85, "std": 0.1 / math.sqrt(2)})
    assert fedavg["final_accuracy"] == pytest.approx({"mean": 0.8, "std": 0.2 / math.sqrt(2)})
    # 0.765 is reached in rounds 3 and 4 by FedAvg, in round 2 twice by SFL-V1: 3.5 / 2
    assert fedavg["rounds_to_target"] == {"mean": 3.5, "earliest": 3.5, "reached": 2, "seeds": 2}
    assert split["rounds_to_target"] == {"mean": 2.0, "earliest": 2.0, "reached": 2, "seeds": 2}
    assert (fedavg["speed_up"], split["speed_up"], split["speed_up_range"]) == (1.0, 1.75, [1.75, 1.75])
    assert (fedavg["seeds"], fedavg["rounds"], fedavg["seconds"]) == ([0, 1], [4, 4], 2.0)
    assert fedavg["bytes"] == {"up": 8 * MIB, "down": 4 * MIB, "inter_server": 0}


def test_a_target_that_some_or_no_seeds_reach(paper: Path) -> None:
    found = rows(report.compare(report.find([paper])))
    assert found["sl"]["rounds_to_target"] == {"mean": 3.0, "earliest": 3.0, "reached": 1, "seeds": 2}
    assert found["sl"]["speed_up"] is None
    assert found["sfl_v2"]["rounds_to_target"] == {"mean": None, "earliest": None, "reached": 0, "seeds": 2}
    assert (found["sfl_v2"]["best_accuracy"], found["sfl_v2"]["stopped"]) == ({"mean": 0.1, "std": 0.0}, 12)


def test_the_table(paper: Path) -> None:
    lines = printed(report.compare(report.find([paper])))
    assert lines[1] == "run accuracy % [95 %] R up clients accuracy % seeds rounds MiB MiB seconds"
    # t of one degree of freedom is 12.706: SFL-V2 is 70 and 80 points below, 12.706 · 7.07 / sqrt(2) around the mean
    assert lines[3] == "fedavg 85.0 ± 7.1 – 3.5 1.00× 0 80.0 ± 14.1 2 4 8.0 4.0 2.0"
    assert lines[4] == "sfl_v1 85.0 ± 7.1 +0.0 [0.0, 0.0] 2 1.75× 0 80.0 ± 0.0 2 4 8.0 4.0 2.0"
    assert lines[5] == "sfl_v2 10.0 ± 0.0 -75.0 [-138.5, -11.5] >4 – 12 10.0 ± 0.0 2 4 8.0 4.0 2.0"
    assert lines[6] == "sl 45.0 ± 49.5 -40.0 [-548.2, 468.2] 3 (1/2) – 0 10.0 ± 0.0 2 4 8.0 4.0 2.0"
    assert " ".join(lines[7:]) == (
        "R: first round that reaches the target 76.5 % (0.9 × the best accuracy of fedavg); speed-up against fedavg "
        "vs fedavg: points of best accuracy above it, seed by seed, with the 95 % interval of Student's t where there "
        "are two seeds stopped clients: those that diverged, summed over rounds and seeds"
    )


def test_a_given_target(paper: Path) -> None:
    comparison = report.compare(report.find([paper]), target=0.85)
    panel = alone(comparison)
    assert (panel.target, panel.rule) == (0.85, "as given")
    reach = {"mean": 2.0, "earliest": 2.0, "reached": 1, "seeds": 2}
    assert rows(comparison)["sfl_v1"]["rounds_to_target"] == reach


def test_without_fedavg_the_best_run_is_the_reference(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [0.1, 0.5])
    left(tmp_path, replace(SPLIT, name="paper/sl", method=Choice("sl")), [0.1, 0.4])
    panel = alone(report.compare(report.find([tmp_path])))
    assert (panel.target, panel.rule) == (0.45, "0.9 × the best accuracy of all runs, that of sfl_v1")


def test_one_run_alone_has_no_target(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [0.1, 0.5], seed=0, simulated=60)
    left(tmp_path, SPLIT, [0.1, 0.5], seed=1, simulated=60)
    comparison = report.compare(report.find([tmp_path]))
    row = rows(comparison)["sfl_v1"]
    assert (row["rounds_to_target"]["mean"], row["speed_up"]) == (None, None)
    assert printed(comparison)[-1] == (
        "no target: this run has no other to be compared with; `cutlayer compare --target` sets one; "
        "simulated time of all rounds: 120.0 s"
    )
    given = printed(report.compare(report.find([tmp_path]), 0.4))
    assert given[3] == "sfl_v1 50.0 ± 0.0 2 2.00 ± 0.00 50.0 ± 0.0 2 2 4.0 2.0 1.0"


def test_a_run_of_that_name_is_the_reference_whatever_its_options(tmp_path: Path) -> None:
    uniform = Choice("fedavg", {"agg": "uniform"})
    left(tmp_path, replace(FEDAVG, method=uniform), [0.1, 0.5])
    left(tmp_path, replace(FEDAVG, name="paper/fedavg-sgd", method=uniform, clients=5), [0.1, 0.8])
    left(tmp_path, replace(FEDAVG, name="paper/fedprox", clients=6), [0.1, 0.7])
    left(tmp_path, SPLIT, [0.1, 0.9])
    panel = alone(report.compare(report.find([tmp_path])))
    assert (panel.target, panel.rule) == (0.45, "0.9 × the best accuracy of fedavg")
    others = [f for f in report.find([tmp_path]) if f.run().name != "paper/fedavg"]
    assert alone(report.compare(others)).rule == "0.9 × the best accuracy of FedAvg, fedprox"  # the one without options


def test_accuracy_that_is_measured_now_and_then(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [None, 0.7, None, 0.6])
    (trial,) = alone(report.compare(report.find([tmp_path]))).groups[0].trials
    assert (trial.best, trial.final, trial.rounds_to(0.5)) == (0.7, 0.6, 2)


def test_runs_without_accuracy(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [None, None])
    comparison = report.compare(report.find([tmp_path]))
    assert (alone(comparison).target, alone(comparison).rule) == (None, "no accuracy was measured")
    assert rows(comparison)["sfl_v1"]["best_accuracy"] is None
    assert printed(comparison)[-1] == "no accuracy was measured"


def test_labels_are_as_short_as_tells_them_apart(tmp_path: Path) -> None:
    def labels() -> list[str]:
        return [g.label for g in alone(report.compare(report.find([tmp_path]), together=True)).groups]

    left(tmp_path, FEDAVG, [0.5])
    left(tmp_path, replace(FEDAVG, name="other/fedavg", clients=5), [0.5])
    assert labels() == ["other/fedavg", "paper/fedavg"]
    left(tmp_path / "again", replace(FEDAVG, clients=7), [0.5])
    assert labels() == [str(tmp_path / name) for name in ("again/paper/fedavg", "other/fedavg", "paper/fedavg")]


def test_seeds_of_different_length_are_one_group(tmp_path: Path) -> None:
    left(tmp_path, replace(FEDAVG, rounds=2), [0.5, 0.5], seed=10)
    left(tmp_path, FEDAVG, [0.5, 0.5, 0.5], seed=2)
    (group,) = alone(report.compare(report.find([tmp_path, tmp_path / "paper"]))).groups
    assert [(t.run.seed, len(t.history)) for t in group.trials] == [(2, 3), (10, 2)]


def test_engines_are_compared(tmp_path: Path) -> None:
    for engine in ("loop", "vmap"):
        left(tmp_path / engine, replace(FEDAVG, engine=engine), [0.5])
    assert len(alone(report.compare(report.find([tmp_path]))).groups) == 2


def test_seeds_of_older_runs_are_grouped_whatever_engine_auto_was(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.5])  # as written before engines were resolved
    left(tmp_path, replace(FEDAVG, engine="vmap", server_engine="loop"), [0.5], seed=1)
    (group,) = alone(report.compare(report.find([tmp_path]))).groups
    assert [t.run.seed for t in group.trials] == [0, 1]


def test_the_same_run_with_the_same_seed_twice_is_refused(tmp_path: Path) -> None:
    left(tmp_path / "a", FEDAVG, [0.5])
    left(tmp_path / "b", FEDAVG, [0.5])
    one, two = (tmp_path / name / "paper/fedavg/seed-0" for name in "ab")
    with pytest.raises(ConfigError) as caught:
        report.compare(report.find([tmp_path]))
    assert str(caught.value) == (
        f"{one} and {two} hold the same run with the same seed 0, which is no second opinion; name only one of them"
    )


def test_folders_with_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        report.find([tmp_path])
    assert str(caught.value) == (
        f"there is no run under {tmp_path}; a run's folder holds config.toml and metrics.jsonl, "
        "and `cutlayer run` makes one"
    )
    folder = left(tmp_path, FEDAVG, [])
    with pytest.raises(ConfigError, match=r"^none of these runs has finished a round yet; try again later$"):
        report.compare([folder])
    folder.metrics.write_text("{}}\n")
    with pytest.raises(CheckpointError, match=r"line 1 of .* is damaged"):
        report.compare([folder])


# -- panels, and a paper beside them -----------------------------------------------------------------------------------

BASE = Run(name="table/images/fedavg", method=Choice("fedavg"), rounds=4, clients=100)
RUNS = {
    "fedavg": BASE,
    "fedprox": replace(BASE, name="table/images/fedprox", method=Choice("fedprox")),
    "fedprox+split": replace(BASE, name="table/images/fedprox+split", method=Choice("sfl_v1")),
    "split": replace(BASE, name="table/images/split", method=Choice("sfl_v1", {"sync": "epoch"})),
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe with a paper's numbers."""
    recipe = Recipe(
        runs=tuple(RUNS.values()),
        source="A Paper, Table 1",
        published={
            "table/images/fedavg": Published(accuracy=77.16, std=0.11, rounds="258", speed_up=1.0, hours="28.62"),
            "table/images/split": Published(accuracy=80.0, rounds=">1000"),
        },
        claims=("splitting helps.",),
        notes=("the paper gives no seeds.",),
        share=0.5,
        targets={"table/sounds": 0.7},
        against={"table/images/fedprox+split": "table/images/fedprox", "table/images/fedprox": "table/images/fedprox"},
    )
    monkeypatch.setitem(recipes.RECIPES, "table", lambda: recipe)
    return recipe


def test_names_that_agree_up_to_the_last_word_are_one_panel(table: Recipe, tmp_path: Path) -> None:
    left(tmp_path, BASE, [0.2, 0.8])
    left(tmp_path, RUNS["split"], [0.2, 0.3])
    left(tmp_path, replace(BASE, name="table/sounds/fedavg"), [0.6, 0.9])
    left(tmp_path, SPLIT, [0.5])
    comparison = report.compare(report.find([tmp_path]))
    assert [(p.name, [g.label for g in p.groups], p.target, p.rule) for p in comparison.panels] == [
        ("paper", ["sfl_v1"], None, report.ALONE),
        ("table/images", ["fedavg", "split"], 0.4, "0.5 × the best accuracy of fedavg"),
        ("table/sounds", ["fedavg"], 0.7, "as the paper sets it"),
    ]
    assert {p.target for p in report.compare(report.find([tmp_path]), 0.8).panels} == {0.8}


def test_speed_ups_of_a_family_are_against_its_own_base(table: Recipe, tmp_path: Path) -> None:
    left(tmp_path, RUNS["split"], [0.5, 0.5, 0.5, 0.5])
    left(tmp_path, RUNS["fedprox+split"], [0.1, 0.5, 0.5, 0.5])
    left(tmp_path, RUNS["fedprox"], [0.1, 0.1, 0.5, 0.5])
    left(tmp_path, BASE, [0.1, 0.1, 0.1, 0.6])
    comparison = report.compare(report.find([tmp_path]))  # to 0.3
    assert [g.label for g in alone(comparison).groups] == [*RUNS]  # the recipe's order
    speed_ups = {label: row["speed_up"] for label, row in rows(comparison).items()}
    assert speed_ups == {"fedavg": 1.0, "fedprox": 1.0, "fedprox+split": 1.5, "split": 4.0}
    assert "speed-up against the base of each family: fedavg, fedprox" in " ".join(printed(comparison))
    without = [f for f in report.find([tmp_path]) if f.run().name != "table/images/fedprox"]
    assert rows(report.compare(without))["fedprox+split"]["speed_up"] is None


def test_a_papers_numbers_stand_beside_ours(table: Recipe, tmp_path: Path) -> None:
    left(tmp_path, BASE, [0.2, 0.5, 0.8, 0.7], simulated=3600, seed=0)
    left(tmp_path, BASE, [0.2, 0.2, 0.6, 0.7], simulated=7200, seed=1)
    for seed in (0, 1):
        left(tmp_path, RUNS["split"], [0.1, 0.1, 0.1, 0.12345], simulated=1800, seed=seed)
    comparison = report.compare(report.find([tmp_path]))
    # the target 0.5 · (0.8 + 0.7) / 2 = 0.375 is reached in rounds 2 and 3: after 2 and 6 hours
    lines = printed(comparison)
    # (2 ± 4) hours: the deviation of 2 and 6 is 2.83
    assert lines[3] == "fedavg 75.00 ± 7.07 77.16 ± 0.11 – 2.5 258 1.00× 1.00× 4.00 ± 2.83 28.62 2 4"
    assert lines[4] == "split 12.35 ± 0.00 80.00 -62.65 [-126.19, 0.88] >4 >1000 – – >2.00 – 2 4"
    assert lines[-3:] == [
        "source: A Paper, Table 1",
        "the paper says: splitting helps.",
        "note: the paper gives no seeds.",
    ]
    fedavg = rows(comparison)["fedavg"]
    assert (fedavg["simulated_seconds"], fedavg["simulated_seconds_to_target"]) == (21600, 14400)
    printed_there = {"accuracy": 77.16, "std": 0.11, "rounds": "258", "speed_up": 1.0, "hours": "28.62"}
    assert fedavg["published"] == {**printed_there, "points_below": "", "times_first": ""}


def test_runs_that_are_not_the_papers_say_so(table: Recipe, tmp_path: Path) -> None:
    sgd = Choice("sgd", {"lr": 0.1, "momentum": 0.9})
    changed = replace(BASE, name="table@0.1/images/fedavg", clients=10, rounds=2, engine="loop", optimiser=sgd)
    left(tmp_path, changed, [0.2, 0.5], seed=3)
    watched = {"engine": "ray", "server_engine": "loop", "meters": ("memory",)}
    left(tmp_path, replace(RUNS["split"], name="table@0.1/images/split", clients=10, **watched), [0.2, 0.5])
    panel = alone(report.compare(report.find([tmp_path])))
    assert panel.departures == (
        "clients 10 instead of 100",
        "optimiser.lr 0.1 instead of 0.05",
        "rounds 2 instead of 4",
        "optimiser.momentum 0.9 instead of none",
    )
    text = " ".join(printed(report.compare(report.find([tmp_path])), 200))
    assert "these runs are not the paper's setting: clients 10 instead of 100, optimiser.lr 0.1 " in text
    assert "77.16 ± 0.11" in text


# -- by samples --------------------------------------------------------------------------------------------------------


def test_runs_compared_by_samples_have_targets_in_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A round is 8 samples of all clients here, and means nothing between methods with rounds of their own length."""
    runs = tuple(replace(BASE, name=f"paced/all/{label}") for label in ("first", "second", "third"))
    recipe = Recipe(runs=runs, source="ours", axis="samples", targets={"paced/all": 0.5})
    monkeypatch.setitem(recipes.RECIPES, "paced", lambda: recipe)
    found = ([0.1, 0.1, 0.5], [0.6, 0.4, 0.4], [0.1, 0.2, 0.3])
    for run, clients, accuracies in zip(runs, (5, 6, 7), found, strict=True):
        left(tmp_path, replace(run, clients=clients), accuracies)
    comparison = report.compare(report.find([tmp_path]))
    panel = alone(comparison)
    assert [g.samples_to(panel.target) for g in panel.groups] == [(24, 24), (8, 8), None]
    assert [panel.speed_up(g) for g in panel.groups] == [(1 / 3, 1 / 3, 1 / 3), (1.0, 1.0, 1.0), None]
    assert printed(comparison)[3] == "first 50.0 -10.0 24 0.33× 50.0 1 3 24 6.0 3.0 1.5"


# -- by simulated time -------------------------------------------------------------------------------------------------

CLOCKED = {label: replace(BASE, name=f"clock/all/{label}") for label in ("first", "second", "third")}


def clocked(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    runs = tuple(replace(run, clients=5 + i) for i, run in enumerate(CLOCKED.values()))
    recipe = Recipe(runs=runs, source="ours", **settings)
    monkeypatch.setitem(recipes.RECIPES, "clock", lambda: recipe)


def test_ratios_of_simulated_time_are_against_the_first_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clocked(monkeypatch, race="time", targets={"clock/all": 0.5})
    first, second, third = recipes.runs("clock")
    left(tmp_path, first, [0.1, 0.5, 0.5], seed=0, simulated=10)  # 20 s
    left(tmp_path, first, [0.1, 0.1, 0.5], seed=1, simulated=10)  # 30 s: 25 +- 7.07
    left(tmp_path, second, [0.6, 0.6], seed=0, simulated=50)  # 50 s
    left(tmp_path, second, [0.6, 0.6], seed=1, simulated=50)
    left(tmp_path, third, [0.5, 0.1], seed=0, simulated=100)  # 100 s, and one that needs more than 200 s: 150 at least
    left(tmp_path, third, [0.1, 0.1], seed=1, simulated=100)
    comparison = report.compare(report.find([tmp_path]))
    panel = alone(comparison)
    assert (panel.target, panel.rule) == (0.5, "as the recipe sets it")
    assert [panel.times_reference(g) for g in panel.groups] == [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (6.0, 6.0, math.inf)]
    lines = printed(comparison)
    assert lines[3].startswith("first 50.0 ± 0.0 – 2.5 0.42 ± 0.12 1.00× ")
    assert lines[5].startswith("third 30.0 ± 28.3 -20.0 [-274.1, 234.1] 1 (1/2) 1.67 >6.00× ")
    found = rows(comparison)
    assert found["third"]["times_reference"] == {"value": 6.0, "low": 6.0, "high": None}
    assert found["first"]["simulated_seconds_to_target"] == 25


def test_no_ratio_is_given_if_the_reference_misses_the_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clocked(monkeypatch, race="time", targets={"clock/all": 0.5})
    first, second, _ = recipes.runs("clock")
    left(tmp_path, first, [0.1, 0.4], simulated=10)
    left(tmp_path, second, [0.1, 0.6], simulated=10)
    panel = alone(report.compare(report.find([tmp_path])))
    assert [panel.times_reference(g) for g in panel.groups] == [None, None]


LEVEL = [0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]  # converged in round 2
LATER = [0.1, 0.3, 0.4, 0.52, 0.5, 0.5, 0.5, 0.5, 0.5]  # in round 4


def test_converged_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {label: f"clock/all/{label}" for label in CLOCKED}
    stated = {"run": names["first"], "than": (names["second"],)}
    clocked(
        monkeypatch,
        race="converged",
        published={names["second"]: Published(points_below="1.3", times_first="~6")},
        statements=(
            Statement(id="a", says="first is 3 times as fast as second", measure="time", **stated),
            Statement(id="b", says="first is 1 point better than second", measure="accuracy", **stated),
            Statement(id="c", says="first is the fastest", measure="time", run=names["first"], than=(names["third"],)),
        ),
    )
    first, second, third = recipes.runs("clock")
    left(tmp_path, first, LEVEL, simulated=10)
    left(tmp_path, second, LATER, simulated=30)
    left(tmp_path, third, LEVEL[:6], simulated=10)
    comparison = report.compare(report.find([tmp_path]))
    panel = alone(comparison)
    # 4 rounds of 30 s over 2 of 10 s; 60 - 52 points
    assert [panel.times_reference(g) for g in panel.groups] == [(1.0, 1.0, 1.0), (6.0, 6.0, 6.0), None]
    assert [panel.points_below(g) for g in panel.groups] == [0.0, pytest.approx(8.0), None]
    assert [(s.id, ours) for s, ours in panel.statements] == [("a", 6.0), ("b", pytest.approx(8.0)), ("c", None)]
    lines = printed(comparison)
    assert lines[3:6] == [
        "first 60.00 60.00 0.00 – 10.00 2 0.33 1.00× – 1 8",
        "second 52.00 52.00 8.00 1.3 30.00 4 2.00 6.00× ~6 1 9",
        "third 60.00 – – – 10.00 >6 – – – 1 6",
    ]
    text = " ".join(lines[6:])
    assert "the paper states: first is 3 times as fast as second; ours: 6.00 times " in text
    assert "the paper states: first is the fastest; ours: not all of these runs have converged" in text
    row = rows(comparison)["second"]
    assert row["converged"] == {
        "accuracy": {"mean": 0.52, "std": None},
        "round": 4,
        "simulated_seconds": {"mean": 120, "std": None},
        "seeds": 1,
    }
    assert comparison.as_dict()["panels"][0]["statements"][0]["ours"] == 6.0
    raced = alone(report.compare(report.find([tmp_path]), 0.4))  # a target that is given comes first
    assert (raced.race, raced.rule) == ("time", "as given")


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (1023, 3 * MIB // 2, 2**42)] == ["1023 B", "1.5 MiB", "4096.0 GiB"]
    assert [human_seconds(s) for s in (0.4, 59.6, 750, 3723)] == ["0:00", "1:00", "12:30", "1:02:03"]
    assert [time_unit(s) for s in (59, 60, 3600)] == [("s", 1), ("min", 60), ("h", 3600)]
    assert (percent(0.1234), percent(None)) == ("12.3 %", "–")
