"""Comparisons say what hand-made metrics files say; the numbers are derived beside them."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from cutlayer import config, figures, report
from cutlayer.cli import tables
from cutlayer.cli.text import human_bytes, human_seconds, percent
from cutlayer.config import Choice, Run
from cutlayer.errors import CheckpointError, ConfigError
from cutlayer.folder import Folder

MIB = 2**20
FEDAVG = Run(name="paper/fedavg", method=Choice("fedavg"), rounds=4)
SPLIT = Run(name="paper/sfl_v1", method=Choice("sfl_v1"), rounds=4)


def left(root: Path, run: Run, accuracies: Sequence[float | None], seed: int = 0, stopped: int = 0) -> Folder:
    """The folder of a run with these accuracies: every round 1 MiB of model goes down, and 2 MiB in two kinds up."""
    folder = Folder(root / run.name / f"seed-{seed}")
    folder.path.mkdir(parents=True)
    folder.config.write_text(config.dumps(replace(run, seed=seed)))
    lines: list[dict[str, Any]] = []
    for number, accuracy in enumerate(accuracies, start=1):
        crossed = {"down_model": number * MIB, "up_model": number * MIB, "up_activations": number * MIB}
        record = {"round": number, "loss": 1.0, "stopped": stopped, "samples": 8 * number, "bytes": crossed}
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
    left(tmp_path, replace(FEDAVG, name="paper/sfl_v2", method=Choice("sfl_v2")), [0.1, 0.1], stopped=3)
    return tmp_path


def rows(comparison: report.Comparison) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in comparison.as_dict()["runs"]}


def test_means_deviations_and_rounds_to_target(paper: Path) -> None:
    comparison = report.compare(report.find([paper]))
    # FedAvg's best are 0.8 and 0.9: mean 0.85, deviation 0.1 / sqrt(2); its final ones 0.7 and 0.9
    assert comparison.target == pytest.approx(0.9 * 0.85)
    assert comparison.rule == "0.9 × the best accuracy of fedavg"
    found = rows(comparison)
    fedavg, split = found["fedavg"], found["sfl_v1"]
    assert fedavg["best_accuracy"] == pytest.approx({"mean": 0.85, "std": 0.1 / math.sqrt(2)})
    assert fedavg["final_accuracy"] == pytest.approx({"mean": 0.8, "std": 0.2 / math.sqrt(2)})
    # 0.765 is reached in rounds 3 and 4 by FedAvg, in round 2 twice by SFL-V1: 3.5 / 2
    assert fedavg["rounds_to_target"] == {"mean": 3.5, "reached": 2, "seeds": 2}
    assert split["rounds_to_target"] == {"mean": 2.0, "reached": 2, "seeds": 2}
    assert (fedavg["speed_up"], split["speed_up"]) == (1.0, 1.75)
    assert (fedavg["seeds"], fedavg["rounds"], fedavg["seconds"]) == ([0, 1], [4, 4], 2.0)
    assert fedavg["bytes"] == {"up": 8 * MIB, "down": 4 * MIB, "inter_server": 0}


def test_a_target_that_some_or_no_seeds_reach(paper: Path) -> None:
    found = rows(report.compare(report.find([paper])))
    assert found["sl"]["rounds_to_target"] == {"mean": 3.0, "reached": 1, "seeds": 2}
    assert found["sl"]["speed_up"] is None
    assert found["sfl_v2"]["rounds_to_target"] == {"mean": None, "reached": 0, "seeds": 1}
    assert (found["sfl_v2"]["best_accuracy"], found["sfl_v2"]["stopped"]) == ({"mean": 0.1, "std": None}, 6)


def test_the_table(paper: Path) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables.comparison_table(report.compare(report.find([paper]))))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines() if line.strip()]
    assert lines[1] == "run seeds rounds accuracy % accuracy % R up MiB MiB seconds stopped"
    assert lines[3] == "fedavg 2 4 85.0 ± 7.1 80.0 ± 14.1 3.5 1.00× 8.0 4.0 2.0 0"
    assert lines[4] == "sfl_v1 2 4 85.0 ± 7.1 80.0 ± 0.0 2 1.75× 8.0 4.0 2.0 0"
    assert lines[5] == "sfl_v2 1 2 10.0 10.0 never – 4.0 2.0 1.0 6"
    assert lines[6] == "sl 2 4 45.0 ± 49.5 10.0 ± 0.0 3 (1/2) – 8.0 4.0 2.0 0"
    assert " ".join(lines[7:]) == (
        "R: first round that reaches the target 76.5 % (0.9 × the best accuracy of fedavg); speed-up against fedavg"
    )


def test_a_given_target(paper: Path) -> None:
    comparison = report.compare(report.find([paper]), target=0.85)
    assert (comparison.target, comparison.rule) == (0.85, "as given")
    assert rows(comparison)["sfl_v1"]["rounds_to_target"] == {"mean": 2.0, "reached": 1, "seeds": 2}


def test_without_fedavg_the_best_run_is_the_reference(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [0.1, 0.5])
    left(tmp_path, replace(SPLIT, name="paper/sl", method=Choice("sl")), [0.1, 0.4])
    comparison = report.compare(report.find([tmp_path]))
    assert (comparison.target, comparison.rule) == (0.45, "0.9 × the best accuracy of all runs, that of sfl_v1")


def test_accuracy_that_is_measured_now_and_then(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [None, 0.7, None, 0.6])
    (trial,) = report.compare(report.find([tmp_path])).groups[0].trials
    assert (trial.best, trial.final, trial.rounds_to(0.5)) == (0.7, 0.6, 2)


def test_runs_without_accuracy(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [None, None])
    comparison = report.compare(report.find([tmp_path]))
    assert (comparison.target, comparison.rule) == (None, "no accuracy was measured")
    assert rows(comparison)["sfl_v1"]["best_accuracy"] is None
    figures.draw(comparison, tmp_path / "empty.png")


def test_labels_are_as_short_as_tells_them_apart(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.5])
    left(tmp_path, replace(FEDAVG, name="other/fedavg", clients=5), [0.5])
    assert [g.label for g in report.compare(report.find([tmp_path])).groups] == ["other/fedavg", "paper/fedavg"]
    left(tmp_path / "again", replace(FEDAVG, clients=7), [0.5])
    labels = [g.label for g in report.compare(report.find([tmp_path])).groups]
    assert labels == [str(tmp_path / name) for name in ("again/paper/fedavg", "other/fedavg", "paper/fedavg")]


def test_the_length_of_a_run_does_not_part_seeds(tmp_path: Path) -> None:
    left(tmp_path, replace(FEDAVG, rounds=2), [0.5, 0.5], seed=10)
    left(tmp_path, FEDAVG, [0.5, 0.5, 0.5], seed=2)
    (group,) = report.compare(report.find([tmp_path, tmp_path / "paper"])).groups
    assert ([t.run.seed for t in group.trials], group.rounds) == ([2, 10], (3, 2))


def test_the_same_run_twice_is_no_evidence(tmp_path: Path) -> None:
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


def test_figures(paper: Path, tmp_path: Path) -> None:
    comparison = report.compare(report.find([paper]))
    figures.draw(comparison, tmp_path / "new" / "curves.png")
    image = matplotlib.image.imread(tmp_path / "new" / "curves.png")
    assert image.shape == (580, 1360, 4)  # 2.9 x 6.8 inches, 200 dots to the inch
    assert len(np.unique((10 * image).astype(int) @ [1, 11, 121, 0])) > 8  # white, black, greys and four colours
    figures.draw(comparison, tmp_path / "curves.pdf")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_a_figure_of_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        figures.check_format(Path("curves.gif"))
    assert str(caught.value) == "cannot draw a figure into curves.gif; use a name that ends in .png, .pdf, .svg"


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 3 * MIB // 2, 5 * 2**30, 2**42)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 GiB",
        "4096.0 GiB",
    ]
    assert [human_seconds(s) for s in (0.4, 59.6, 750, 3723)] == ["0:00", "1:00", "12:30", "1:02:03"]
    assert (percent(0.1234), percent(None)) == ("12.3 %", "–")
