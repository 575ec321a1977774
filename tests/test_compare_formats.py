"""Comparisons are fair, and print as tables, LaTeX, Markdown, CSV and JSON that fit a terminal and a paper."""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from test_cli import mistake, say, wide  # noqa: F401 (fixtures)
from test_report import FEDAVG, SPLIT, alone, left, printed, rows

from cutlayer.cli import formats, papers
from cutlayer.errors import CheckpointError
from cutlayer.results import report
from cutlayer.results.names import NAMES, method_of
from cutlayer.results.names import printed as printed_name
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder

MERGE = replace(FEDAVG, name="paper/mergesfl", method=Choice("mergesfl"))
MINE = replace(FEDAVG, name="paper/tilt_&_turn", method=Choice("tilted", {"angle": 3}))  # of a plug-in


def compared(root: Path, **options: Any) -> report.Comparison:
    return report.compare(report.find([root]), **options)


def surrounded(folder: Folder, **known: Any) -> None:
    folder.environment.write_text(json.dumps(known))


# -- common seeds ------------------------------------------------------------------------------------------------------


def test_three_seeds_against_one_are_compared_by_the_one(tmp_path: Path) -> None:
    for seed, best in enumerate((0.5, 0.9, 0.9)):
        left(tmp_path, FEDAVG, [0.1, best], seed=seed)
    left(tmp_path, SPLIT, [0.1, 0.6], seed=0)
    comparison = compared(tmp_path)
    found = rows(comparison)
    assert found["fedavg"]["best_accuracy"] == {"mean": 0.5, "std": None}  # not 0.77 of three seeds
    assert found["sfl_v1"]["difference"] == {"mean": pytest.approx(0.1), "half": None, "seeds": 1, "interval": None}
    lines = printed(comparison)
    assert lines[3].startswith("fedavg 50.0 – ") and lines[4].startswith("sfl_v1 60.0 +10.0 ")  # no interval: no claim
    assert "compared: seed 0, which all runs have; left out: seed 1, 2 of fedavg" in lines
    (panel,) = comparison.as_dict()["panels"]
    assert (panel["seeds"], panel["left_out"]) == ([0], {"fedavg": [1, 2]})
    every = [(seed["seed"], seed["compared"], seed["best_accuracy"]) for seed in found["fedavg"]["per_seed"]]
    assert every == [(0, True, 0.5), (1, False, 0.9), (2, False, 0.9)]


def test_runs_without_a_common_seed_are_not_compared(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.1, 0.5], seed=0)
    left(tmp_path, SPLIT, [0.5, 0.6], seed=1)
    comparison = compared(tmp_path)
    row = rows(comparison)["sfl_v1"]
    assert (row["best_accuracy"]["mean"], row["difference"], row["speed_up"]) == (0.6, None, None)
    assert "these runs have no seed in common, so they are shown and not compared" in printed(comparison)


def test_a_difference_is_paired_and_has_students_interval(tmp_path: Path) -> None:
    # The seeds are far apart, the differences are 2, 3 and 4 points: deviation 1, t of two degrees of freedom 4.303,
    # so the interval is 3 ± 4.303 / sqrt(3) = 3 ± 2.484.
    for seed, base, gain in ((0, 0.50, 0.02), (1, 0.70, 0.03), (2, 0.90, 0.04)):
        left(tmp_path, FEDAVG, [base], seed=seed)
        left(tmp_path, SPLIT, [base + gain], seed=seed)
    comparison = compared(tmp_path)
    difference = rows(comparison)["sfl_v1"]["difference"]
    assert difference["mean"] == pytest.approx(0.03) and difference["half"] == pytest.approx(0.02484, abs=1e-5)
    assert difference["interval"] == pytest.approx((0.00516, 0.05484), abs=1e-5)
    assert printed(comparison)[4].startswith("sfl_v1 73.0 ± 21.0 +3.0 [0.5, 5.5] ")


# -- the common grid ---------------------------------------------------------------------------------------------------


def every(step: int, accuracies: list[float]) -> list[float | None]:
    """The accuracies of runs that are evaluated after so many rounds each time."""
    return [a if number % step == 0 else None for number, a in enumerate(accuracies, start=1)]


def test_runs_are_compared_in_the_rounds_that_all_were_evaluated_in(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.1, 0.1, 0.1, 0.1, 0.9, 0.1, 0.1, 0.8])  # its best is in a round of its own
    left(tmp_path, SPLIT, every(4, [0.8] * 8))
    comparison = compared(tmp_path)
    found = rows(comparison)
    assert found["fedavg"]["best_accuracy"]["mean"] == 0.8
    assert found["fedavg"]["rounds_to_target"] == {"mean": 8.0, "earliest": 5.0, "reached": 1, "seeds": 1}
    # 5 to 8 rounds over 1 to 4: at least 5 / 4, at most 8 / 1
    assert (found["sfl_v1"]["speed_up"], found["sfl_v1"]["speed_up_range"]) == (2.0, [1.25, 8.0])
    lines = printed(comparison)
    assert lines[4].startswith("sfl_v1 80.0 +0.0 1–4 1.25–8.00× 80.0 ")
    assert "accuracies, R and T: of the 2 evaluations that all runs have" in lines
    assert "a–b: reached between two evaluations, from a to b" in lines


def test_a_speed_up_that_the_grid_cannot_resolve_is_not_told(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, every(4, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.8, 0.8]))
    left(tmp_path, SPLIT, every(2, [0.1, 0.1, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8]))  # after 6 rounds by its own grid
    found = rows(compared(tmp_path))
    assert found["sfl_v1"]["rounds_to_target"]["mean"] == found["fedavg"]["rounds_to_target"]["mean"] == 8
    assert (found["sfl_v1"]["speed_up"], found["fedavg"]["speed_up"]) == (None, 1.0)


def test_time_to_the_target_has_the_resolution_of_the_grid(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, every(4, [0.8] * 8), simulated=30)
    left(tmp_path, SPLIT, every(4, [0.1] * 4 + [0.8] * 4), simulated=30)
    lines = printed(compared(tmp_path))
    assert lines[3].startswith("fedavg 80.0 – 1–4 1.00× 0.50–2.00 ")  # minutes
    assert lines[4].startswith("sfl_v1 80.0 +0.0 5–8 0.12–0.80× 2.50–4.00 ")


def test_a_run_that_stopped_by_a_rule_of_its_own_does_not_cut_the_others_short(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.1, 0.2, 0.7, 0.8])
    left(tmp_path, replace(SPLIT, until_accuracy=0.75), [0.1, 0.8])
    found = rows(compared(tmp_path))
    assert (found["fedavg"]["best_accuracy"]["mean"], found["sfl_v1"]["speed_up"]) == (0.8, 2.0)  # 4 rounds over 2
    left(tmp_path, MERGE, [0.1, 0.2])  # this one has not finished: only two rounds can be compared
    assert rows(compared(tmp_path))["fedavg"]["best_accuracy"]["mean"] == 0.2


def lost(folder: Folder) -> None:
    """Nobody could train in its last round."""
    *records, last = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    lines = [json.dumps(record) + "\n" for record in (*records, {**last, "loss": None, "stopped": 4})]
    folder.metrics.write_text("".join(lines))


def test_a_run_that_diverged_does_not_cut_the_others_short(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.1, 0.2, 0.7, 0.8])
    lost(left(tmp_path, SPLIT, [0.1, 0.1]))
    found = rows(compared(tmp_path))
    assert (found["fedavg"]["best_accuracy"]["mean"], found["fedavg"]["final_accuracy"]["mean"]) == (0.8, 0.8)
    assert found["sfl_v1"]["best_accuracy"]["mean"] == 0.1


def test_a_run_that_diverged_before_the_first_evaluation_of_the_others_is_not_compared(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, every(4, [0.1] * 4 + [0.8] * 4))
    lost(left(tmp_path, SPLIT, [None, 0.1]))
    found = rows(compared(tmp_path))
    assert (found["fedavg"]["best_accuracy"]["mean"], found["sfl_v1"]["best_accuracy"]) == (0.8, None)


def test_runs_without_a_common_evaluation_are_not_compared(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, every(2, [0.8] * 5))
    left(tmp_path, SPLIT, every(3, [0.8] * 5))
    comparison = compared(tmp_path)
    row = rows(comparison)["sfl_v1"]
    assert (row["best_accuracy"]["mean"], row["difference"], row["speed_up"]) == (0.8, None, None)
    assert any(line.startswith("these runs have no evaluation in common") for line in printed(comparison))


def of_samples(folder: Folder, each: int) -> None:
    """Rounds of so many samples."""
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    lines = [json.dumps({**record, "samples": each * record["round"]}) + "\n" for record in records]
    folder.metrics.write_text("".join(lines))


def test_rounds_of_different_lengths_meet_in_the_evaluations_of_the_coarser_run(tmp_path: Path) -> None:
    """As in the README: HO-SFL's mini-batches are evaluated four times as often as SFL-V1's epochs."""
    epochs, batches = replace(SPLIT, until_samples=96), replace(MERGE, until_samples=96)
    of_samples(left(tmp_path, epochs, [0.2, 0.9, 0.95]), 32)  # after 64 samples
    of_samples(left(tmp_path, batches, [0.1, 0.1, 0.1, 0.2, 0.3, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]), 8)  # after 48
    comparison = compared(tmp_path)
    panel = alone(comparison)
    assert [list(t.values) for g in panel.groups for t in g.trials] == [[4, 8, 12], [1, 2, 3]]
    assert [g.samples_to(panel.target) for g in panel.groups] == [(40, 64), (64, 64)]
    assert [rows(comparison)[name]["speed_up"] for name in ("mergesfl", "sfl_v1")] == [None, 1.0]  # not 64 / 48


def unlike(root: Path, simulated: float | None = None) -> None:
    """SFL-V1's epochs of 32 samples and MergeSFL's mini-batches of 8; nothing says how long a run is in samples."""
    of_samples(left(root, SPLIT, [0.2, 0.9, 0.95], simulated=simulated), 32)
    of_samples(left(root, MERGE, [0.1, 0.1, 0.1, 0.2, 0.3, *[0.9] * 9], simulated=simulated), 8)


def test_runs_whose_rounds_differ_in_length_are_compared_by_samples(tmp_path: Path, say: Any) -> None:  # noqa: F811
    unlike(tmp_path)
    comparison = compared(tmp_path, target=0.9)
    panel, found = alone(comparison), rows(comparison)
    assert (panel.race, panel.axis) == ("rounds", "samples")
    assert [found[name]["compared_rounds"] for name in ("mergesfl", "sfl_v1")] == [[[4, 8, 12]], [[1, 2, 3]]]
    assert found["sfl_v1"]["samples_to_target"] == {"mean": 64.0, "earliest": 64.0}
    assert found["mergesfl"]["samples_to_target"] == {"mean": 64.0, "earliest": 40.0}
    assert found["mergesfl"]["speed_up"] is None  # not 2 rounds over 8, nor 64 / 48
    # 12 of MergeSFL's 14 rounds, with 2 MiB up, 1 MiB down and half a second each
    lines = printed(comparison)
    assert lines[1] == "run accuracy % [95 %] target up accuracy % seeds rounds samples MiB MiB seconds"
    assert lines[3] == "mergesfl 90.0 -5.0 40–64 – 90.0 1 12 96 24.0 12.0 6.0"
    assert lines[4] == "sfl_v1 95.0 – 64 1.00× 95.0 1 3 96 6.0 3.0 1.5"
    warning = "rounds differ in length, so runs are compared by samples; samples a round: mergesfl 8; sfl_v1 32"
    said = say("compare", ".", "--format", "json")
    assert said.json["warnings"] == [warning] and said.err == f"warning: {warning}\n"
    assert said.json["panels"][0]["axis"] == "samples"


def test_runs_with_devices_whose_rounds_differ_in_length_are_compared_by_simulated_time(tmp_path: Path) -> None:
    unlike(tmp_path, simulated=10)
    comparison = compared(tmp_path, target=0.9)
    panel, found = alone(comparison), rows(comparison)
    assert (panel.race, panel.axis, panel.reference.label) == ("time", "time", "sfl_v1")
    assert [found[name]["simulated_seconds_to_target"] for name in ("mergesfl", "sfl_v1")] == [60, 20]
    assert [found[name]["speed_up"] for name in ("mergesfl", "sfl_v1")] == [None, None]  # in rounds it would be 1 / 3
    assert found["mergesfl"]["times_reference"]["value"] == 3.0
    assert comparison.warnings == (
        "rounds differ in length, so runs are compared by simulated time; samples a round: mergesfl 8; sfl_v1 32",
    )


@pytest.mark.parametrize(("each", "told"), [(8.4, False), (8.5, True), (10.0, True)])
def test_rounds_that_differ_by_a_few_batches_are_compared_as_rounds(tmp_path: Path, each: float, told: bool) -> None:
    of_samples(left(tmp_path, FEDAVG, [0.1, 0.8]), 80)
    of_samples(left(tmp_path, SPLIT, [0.8, 0.8]), int(10 * each))
    comparison = compared(tmp_path)
    assert (alone(comparison).axis, rows(comparison)["sfl_v1"]["speed_up"]) == ("rounds", 2.0)
    warning = (
        "rounds differ in length, so a speed-up in rounds is off by as much; samples a round: fedavg 80; "
        f"sfl_v1 {10 * each:.0f}"
    )
    assert comparison.warnings == ((warning,) if told else ())


def test_clients_drawn_for_another_seed_make_no_rounds_longer(tmp_path: Path) -> None:
    for seed, each in ((0, 8), (1, 24)):
        for run in (FEDAVG, SPLIT):
            of_samples(left(tmp_path, run, [0.5, 0.8], seed=seed), each)
    assert (alone(compared(tmp_path)).axis, compared(tmp_path).warnings) == ("rounds", ())


def test_a_row_ends_with_the_last_evaluation_that_all_runs_have(tmp_path: Path, say: Any) -> None:  # noqa: F811
    left(tmp_path, FEDAVG, [0.1, 0.6])
    left(tmp_path, SPLIT, [0.1, 0.3, 0.5, 0.9], simulated=7)
    comparison = compared(tmp_path)
    found = rows(comparison)["sfl_v1"]
    assert (found["rounds"], found["trained_rounds"], found["compared_rounds"]) == ([2], [4], [[1, 2]])
    assert (found["best_accuracy"]["mean"], found["final_accuracy"]["mean"], found["samples"]) == (0.3, 0.3, 16)
    assert (found["bytes"]["up"], found["bytes"]["down"], found["seconds"]) == (4 * 2**20, 2 * 2**20, 1.0)
    assert found["simulated_seconds"] == 14
    lines = printed(comparison)
    assert lines[4].startswith("sfl_v1 30.0 -30.0 >2 – >14.00 30.0 1 2 4.0 2.0 1.0")
    remarks = [
        "accuracies, R and T: of the 2 evaluations that all runs have",
        "rounds, samples, MiB and seconds: up to the last evaluation that is compared, not of the whole runs",
    ]
    assert [line for line in lines if line in remarks] == remarks
    warning = "the numbers of rounds differ, and only those that all runs have are compared: fedavg 2; sfl_v1 4"
    said = say("compare", ".", "--format", "json")
    assert said.json["warnings"] == [warning]
    assert [line for line in said.json["panels"][0]["remarks"] if line in remarks] == remarks
    said = say("compare", ".", "--format", "csv")
    (record,) = [r for r in csv.DictReader(io.StringIO(said.out)) if r["label"] == "sfl_v1"]
    keys = ("rounds", "trained_rounds", "evaluations", "samples", "final_accuracy", "bytes_up", "seconds")
    assert [record[key] for key in keys] == ["2", "4", "2", "16", "0.3", str(4 * 2**20), "1.0"]
    assert said.err == f"warning: {warning}\n"
    total = say("compare", ".", "--traffic", "--format", "json").json["panels"][0]["runs"][1]
    assert (total["samples"], sum(total["bytes"].values())) == (32, 12 * 2**20)  # traffic is that of whole runs


def test_a_run_that_ended_by_a_rule_is_no_other_number_of_rounds(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.1, 0.2, 0.7, 0.8])
    left(tmp_path, replace(SPLIT, until_accuracy=0.75), [0.1, 0.8])
    comparison = compared(tmp_path)
    assert comparison.warnings == ()
    assert [row["rounds"] for row in rows(comparison).values()] == [[4], [2]]


def test_rows_follow_the_folders_that_are_named(tmp_path: Path) -> None:
    for run in (FEDAVG, MERGE, SPLIT):
        left(tmp_path, run, [0.5])
    folders = [tmp_path / "paper" / name for name in ("sfl_v1", "fedavg", "mergesfl")]
    assert list(rows(report.compare(report.find(folders)))) == ["sfl_v1", "fedavg", "mergesfl"]
    assert list(rows(compared(tmp_path))) == ["fedavg", "mergesfl", "sfl_v1"]


def test_a_run_that_diverged_does_not_cut_the_others_short_by_samples(tmp_path: Path) -> None:
    of_samples(left(tmp_path, replace(SPLIT, until_samples=96), [0.2, 0.9, 0.95]), 32)
    of_samples(left(tmp_path, replace(FEDAVG, until_samples=96), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), 16)
    folder = left(tmp_path, replace(MERGE, until_samples=96), [0.1])
    of_samples(folder, 32)
    lost(folder)
    found = {g.label: list(g.trials[0].values) for g in alone(compared(tmp_path)).groups}
    assert found == {"fedavg": [2, 4, 6], "mergesfl": [1], "sfl_v1": [1, 2, 3]}


# -- what makes it less than fair --------------------------------------------------------------------------------------


def test_runs_that_differ_in_engine_precision_device_or_version_are_warned_of(tmp_path: Path) -> None:
    surrounded(left(tmp_path, FEDAVG, [0.5]), engine="loop", torch="2.12.0", cutlayer="0.1.0", machine="x86_64")
    other = replace(SPLIT, engine="vmap", precision="bf16", device="cuda")
    surrounded(left(tmp_path, other, [0.5]), engine="vmap", torch="2.13.0", cutlayer="0.2.0", gpu="H200")
    assert compared(tmp_path).warnings == (
        "the engine differs, so the numbers may do so too: loop (fedavg); vmap (sfl_v1)",
        "the precision differs, so the numbers may do so too: fp32 (fedavg); bf16 (sfl_v1)",
        "the device differs, so the numbers may do so too: cpu (fedavg); cuda (sfl_v1)",
        "the machine differs, so the numbers may do so too: x86_64 (fedavg); H200 (sfl_v1)",
        "the version of torch differs, so the numbers may do so too: 2.12.0 (fedavg); 2.13.0 (sfl_v1)",
        "the version of cutlayer differs, so the numbers may do so too: 0.1.0 (fedavg); 0.2.0 (sfl_v1)",
    )


def test_what_is_unknown_of_an_older_run_is_no_difference(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.5])
    surrounded(left(tmp_path, replace(SPLIT, engine="vmap"), [0.5]), engine="vmap", torch="2.13.0")
    assert compared(tmp_path).warnings == ()


def test_seeds_of_different_length_are_warned_of(tmp_path: Path, say: Any) -> None:  # noqa: F811
    left(tmp_path, FEDAVG, [0.5, 0.5, 0.5], seed=0)
    left(tmp_path, FEDAVG, [0.5, 0.6], seed=1)
    said = say("compare", ".", "--format", "json")
    message = "the seeds of fedavg have different numbers of rounds: seed 0: 3, seed 1: 2"
    assert said.err == f"warning: {message}\n" and said.json["warnings"] == [message]


def test_seeds_that_stopped_early_by_a_rule_are_not_warned_of(tmp_path: Path) -> None:
    patient = replace(FEDAVG, patience=1)
    left(tmp_path, patient, [0.5, 0.6, 0.6], seed=0)
    left(tmp_path, patient, [0.5, 0.5], seed=1)
    assert compared(tmp_path).warnings == ()


def test_a_broken_folder_is_reported_and_the_rest_compared(tmp_path: Path, say: Any) -> None:  # noqa: F811
    left(tmp_path, FEDAVG, [0.5])
    left(tmp_path, SPLIT, [0.6]).metrics.write_text("{}}\n")
    left(tmp_path, MERGE, [0.6]).metrics.write_text('{"round": 1}\n')
    (left(tmp_path, MINE, [0.6]).path / "config.toml").write_text("rond = 1\n")
    left(tmp_path, replace(FEDAVG, name="paper/sl", method=Choice("sl")), [])
    said = say("compare", ".", "--format", "json")
    assert [row["label"] for row in said.json["runs"]] == ["fedavg"]
    assert said.json["warnings"] == [
        "paper/mergesfl/seed-0 is left out: line 1 of paper/mergesfl/seed-0/metrics.jsonl has no 'samples'; put the "
        "file back, or start over with --overwrite",
        "paper/sfl_v1/seed-0 is left out: line 1 of paper/sfl_v1/seed-0/metrics.jsonl is damaged; put the file back, "
        "or start over with --overwrite",
        "paper/sl/seed-0 is left out: it has not finished a round yet",
        "paper/tilt_&_turn/seed-0 is left out: unknown key 'rond' in paper/tilt_&_turn/seed-0/config.toml; did you "
        "mean 'rounds' or 'per_round' or 'mode'?",
    ]
    assert said.err.count("warning: ") == 4
    with pytest.raises(CheckpointError, match=r"line 1 of .* is damaged"):
        report.compare(report.find([tmp_path / "paper/sfl_v1"]))


def test_a_method_of_a_plug_in_that_is_not_loaded_blocks_nothing(tmp_path: Path, say: Any) -> None:  # noqa: F811
    left(tmp_path, FEDAVG, [0.5, 0.6])
    left(tmp_path, MINE, [0.5, 0.7])
    for form in formats.Format:
        said = say("compare", ".", "--format", form, "--figure", f"{form}.svg")
        assert (said.code, said.err) == (0, "") and "fedavg" in said.out.lower()
        assert "tilt_&_turn" in said.out or r"tilt\_\&\_turn" in said.out
        assert "tilt_&amp;_turn" in Path(f"{form}.svg").read_text()
    assert [row["method"] for row in say("compare", ".", "--format", "json").json["runs"]] == ["fedavg", "tilted"]


# -- formats -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three seeds of three runs: MergeSFL is above FedAvg with certainty, a plug-in's run sometimes."""
    for seed, base in enumerate((0.5, 0.6, 0.7)):
        left(tmp_path, FEDAVG, [0.2, base], seed=seed)
        left(tmp_path, MERGE, [0.2, base + 0.1], seed=seed)
        left(tmp_path, MINE, [0.2, base + 0.05 * seed], seed=seed)
    return tmp_path


LATEX = r"""% \usepackage{booktabs}

% R: first round that reaches the target 54.0 % (0.9 × the best accuracy of fedavg); speed-up against fedavg
% vs fedavg: points of best accuracy above it, seed by seed, with the 95 % interval of Student's t where there are two seeds
\begin{tabular}{lrrrrr}
  \toprule
  run & best accuracy \% & vs FedAvg [95 \%] & R & speed-up & final accuracy \% \\
  \midrule
  FedAvg & 60.0 $\pm$ 10.0 & -- & 2 (2/3) & -- & 60.0 $\pm$ 10.0 \\
  MergeSFL & 70.0 $\pm$ 10.0 & +10.0 [10.0, 10.0] & 2 & -- & 70.0 $\pm$ 10.0 \\
  tilt\_\&\_turn & 65.0 $\pm$ 15.0 & +5.0 [$-$7.4, 17.4] & 2 (2/3) & -- & 65.0 $\pm$ 15.0 \\
  \bottomrule
\end{tabular}
"""  # noqa: E501


def test_latex(three: Path, say: Any) -> None:  # noqa: F811
    said = say("compare", ".", "--format", "latex")
    assert (said.out, said.err) == (LATEX, "")  # no value is bold: the plug-in's run is not surely below MergeSFL
    bold = say("compare", ".", "--format", "latex", "--bold-best").out
    assert bold == LATEX.replace(r"MergeSFL & 70.0 $\pm$ 10.0", r"MergeSFL & \textbf{70.0 $\pm$ 10.0}")
    for line in said.out.splitlines():
        assert line.startswith(("%", "\\", "  \\")) or line == "" or line.count(" & ") == 5


def test_the_best_value_is_bold_if_it_is_above_each_other_with_confidence(three: Path) -> None:
    folders = [folder for folder in report.find([three]) if "turn" not in str(folder.path)]
    text = formats.latex(papers.sections(report.compare(folders)))
    assert r"MergeSFL & \textbf{70.0 $\pm$ 10.0} &" in text and text.count("textbf") == 1
    one_seed = [folder for folder in folders if folder.path.name == "seed-0"]
    assert "textbf" not in formats.latex(papers.sections(report.compare(one_seed)))


def test_every_sign_of_a_name_survives_latex() -> None:
    assert formats.escaped("a_b & 5 % of $x {#1} ~^ \\ <2×") == (
        r"a\_b \& 5 \% of \$x \{\#1\} \textasciitilde{}\textasciicircum{} \textbackslash{} $<$2$\times$"
    )
    assert formats.escaped("[-1.5, 2] fedavg-2 1–4 ±") == r"[$-$1.5, 2] fedavg-2 1--4 $\pm$"


def test_rows_of_seeds(three: Path, say: Any) -> None:  # noqa: F811
    lines = say("compare", ".", "--format", "latex", "--per-seed").out.splitlines()
    assert [line.split(" & ")[:3] for line in lines if "seed" in line and "&" in line][3:6] == [
        [r"  \quad seed 0", "60.0", "+10.0"],
        [r"  \quad seed 1", "70.0", "+10.0"],
        [r"  \quad seed 2", "80.0", "+10.0"],
    ]
    shown = [line.split() for line in say("compare", ".", "--per-seed").out.splitlines()]
    assert ["seed", "0", "50.0", "–", ">2", "–", "50.0"] in [line[:7] for line in shown]


def test_markdown(three: Path, say: Any) -> None:  # noqa: F811
    lines = say("compare", ".", "--format", "markdown").out.splitlines()
    assert lines[0].startswith("| run | best accuracy % | vs FedAvg [95 %] | R | speed-up | final accuracy % | seeds |")
    assert lines[1].startswith("| :-- | --: |") and lines[3].startswith("| MergeSFL | 70.0 ± 10.0 | +10.0 [10.0, 10.0]")
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert lines[6].startswith("- R: first round that reaches the target 54.0 %")


def test_csv_and_json_have_every_seed(three: Path, say: Any) -> None:  # noqa: F811
    left(three, FEDAVG, [0.2, 0.3], seed=9)
    records = list(csv.DictReader(io.StringIO(say("compare", ".", "--format", "csv").out)))
    assert len(records) == 10
    assert records[1] == {
        "panel": "paper",
        "label": "fedavg",
        "name": "paper/fedavg",
        "method": "fedavg",
        "seed": "1",
        "compared": "True",
        "rounds": "2",
        "trained_rounds": "2",
        "evaluations": "2",
        "samples": "16",
        "best_accuracy": "0.6",
        "final_accuracy": "0.6",
        "rounds_to_target": "2",
        "earliest_round": "2",
        "samples_to_target": "16",
        "simulated_seconds_to_target": "",
        "bytes_up": str(4 * 2**20),
        "bytes_down": str(2 * 2**20),
        "stopped": "0",
        "seconds": "1.0",
        "folder": "paper/fedavg/seed-1",
    }
    assert (records[3]["seed"], records[3]["compared"]) == ("9", "False")
    found = say("compare", ".", "--format", "json").json
    assert [list(map(str, seed.values())) for seed in found["runs"][0]["per_seed"]][1][:2] == ["1", "True"]


def test_traffic_in_every_format(three: Path, say: Any) -> None:  # noqa: F811
    tex = say("compare", ".", "--traffic", "--format", "latex").out
    assert r"  MiB & FedAvg & MergeSFL & tilt\_\&\_turn \\" in tex
    assert "| Uplink (Act) | 2.00 |" in say("compare", ".", "--traffic", "--format", "markdown").out
    first = say("compare", ".", "--traffic", "--format", "csv").out.splitlines()[:2]
    assert first == ["panel,run,samples,row,bytes", "paper,fedavg,16.0,Uplink (Act),2097152.0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bold-best", "--bold-best is about LaTeX; add --format latex"),
        ("--per-seed --traffic", "--per-seed is about accuracies and other metrics; leave out --traffic"),
    ],
)
def test_options_that_would_say_nothing(three: Path, say: Any, words: str, message: str) -> None:  # noqa: F811
    assert mistake(say("compare", ".", *words.split())) == message


def test_clients_that_diverged_are_counted_where_there_are_any(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.5, 0.6])
    assert not any("stopped" in line for line in printed(compared(tmp_path)))
    left(tmp_path, SPLIT, [0.5, 0.6], stopped=2)
    lines = printed(compared(tmp_path))
    assert lines[4].startswith("sfl_v1 60.0 +0.0 2 1.00× 4 60.0 ")
    assert "stopped clients: those that diverged, summed over rounds and seeds" in lines


# -- names -------------------------------------------------------------------------------------------------------------


def test_methods_are_called_as_in_print() -> None:
    assert printed_name("sfl_v1") == "SFL-V1" and printed_name("fedprox+smofi") == "FedProx+SMoFi"
    assert printed_name("runs/hosfl, iid") == "runs/HO-SFL, iid" and printed_name("tilted_1") == "tilted_1"
    assert method_of("fedprox (init he)", "fedavg") == "fedprox" and method_of("fedprox+smofi", "smofi") == "smofi"


def test_every_method_has_a_name() -> None:
    from cutlayer.methods import METHODS

    assert set(NAMES) == {name for name, make in METHODS.items() if make.__module__.startswith("cutlayer.")}


# -- 80 columns --------------------------------------------------------------------------------------------------------


def lines_of(text: str) -> Iterator[str]:
    yield from (line for line in text.splitlines() if not line.startswith("figure: "))


@pytest.fixture
def narrow(say: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Run a command in 80 columns; no line is longer, and nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> str:
        said = say(*words)
        assert said.code == 0, said.err
        assert [line for line in lines_of(said.out) if cell_len(line) > 80] == []
        return str(said.out)

    return call


def test_a_comparison_fits_80_columns_and_keeps_the_names(three: Path, narrow: Any) -> None:
    for seed in range(3):
        left(three, replace(SPLIT, name="paper/a-run-with-quite-a-long-name"), [0.2, 0.6], seed=seed, simulated=60)
    text = narrow("compare", ".")
    for head in ("best", "vs fedavg", "R", "up", "final", "seeds", "rounds", "seconds"):
        assert head in text
    for label in ("fedavg", "mergesfl", "tilt_&_turn", "a-run-with-quite-a-long-name"):
        blocks = [line for line in text.splitlines() if line.startswith(f" {label} ")]
        assert len(blocks) == 3  # in the table and wherever it continues
    assert "…" not in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith(" run")] == ["run"] * 3
    assert narrow("compare", ".", "--traffic").count(" Uplink (Act) ") == 2


def test_older_runs_are_still_read_and_fit_80_columns(narrow: Any) -> None:
    text = narrow("compare", str(Path(__file__).parents[1] / "bench" / "results" / "headline"))
    found = next(" ".join(line.split()) for line in text.splitlines() if line.startswith(" smofi  "))
    # The numbers grow with the recorded runs; the paper's stay.
    assert re.fullmatch(r"smofi [\d.]+ ± [\d.]+ 81\.82 ± 0\.61 [+-][\d.]+ \[.*\] [\d.–]+ 56 [\d.–]+×", found)


PLAN = "plan --model vgg16 --devices sample"


def test_a_plan_fits_80_columns_and_keeps_the_cuts(narrow: Any) -> None:
    text = narrow(*PLAN.split())
    head = next(line.split() for line in text.splitlines() if line.startswith(" device "))
    assert head == ["device", "cut", "last", "unit", "batch", "limit"]
    assert [" ".join(line.split()) for line in text.splitlines() if line.startswith("  6 board with accelerator")] == [
        "6 board with accelerator 2 conv1_2 10 optimum",
        "6 board with accelerator 0.0103 0.131 0.23 60",
    ]
    assert "…" not in text


@pytest.mark.parametrize(
    "words",
    [
        "profile resnet18 --cut layer1.1",
        "profile cnn --memory",
        "profile densenet121",
        "overlap",
        "list",
        "run smofi_table1 --dry-run --only cifar10",
    ],
)
def test_tables_fit_80_columns(narrow: Any, words: str) -> None:
    narrow(*words.split())


def test_a_study_of_the_cut_fits_80_columns(narrow: Any) -> None:
    text = narrow("cuts", "--rounds", "1", "--engine", "loop", "--set", "per_round=2", "--seeds", "2", "--quiet")
    assert [line.split()[:2] for line in text.splitlines() if line.startswith(" cut ")] == [["cut", "unit"]] * 2
    assert text.count("conv1") >= 2 and "…" not in " ".join(lines_of(text))


# -- nothing is overwritten by a subset --------------------------------------------------------------------------------


def test_a_subset_of_the_runs_leaves_the_others_in_the_figure(
    say: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        "cutlayer.results.figures.draw",
        lambda found, path, **_: drawn.append([g.label for panel in found.panels for g in panel.groups]),
    )
    short = ["--rounds", "1", "--engine", "loop", "--quiet"]
    for method in ("sl", "fedavg"):
        said = say("run", "digits", "--only", method, *short)
        assert said.code == 0
    assert drawn == [["sl"], ["fedavg", "sl"]]
    assert " sl " not in said.out  # the table is of what was trained


def test_a_subset_of_the_cuts_leaves_the_others_in_the_figure(
    say: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[list[int]] = []
    monkeypatch.setattr(
        "cutlayer.cli.commands.draw_cuts", lambda study, path: drawn.append([r.cut for r in study.rows])
    )
    for cut in ("1", "2"):
        words = ["cuts", "--cut", cut, "--rounds", "1", "--engine", "loop", "--set", "per_round=2", "--quiet"]
        assert say(*words).code == 0
    assert drawn == [[1], [1, 2]]


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_a_figure_is_not_replaced_by_one_of_fewer_runs(
    three: Path,
    say: Any,  # noqa: F811
    ending: str,
) -> None:
    file = Path(f"a.{ending}")
    assert say("compare", ".", "--figure", str(file)).code == 0
    drawn = file.read_bytes()
    for subset, lost in (
        (["paper/mergesfl", "paper/fedavg"], "paper/tilt_&_turn/seed-0, paper/tilt_&_turn/seed-1 and 1 more"),
        (["paper/mergesfl/seed-0"], "paper/fedavg/seed-0, paper/fedavg/seed-1 and 6 more"),
    ):
        said = say("compare", *subset, "--figure", str(file))
        assert said.out == "" and mistake(said) == (
            f"{file} shows runs that are not compared here: {lost}; add them, choose another --figure, or delete that "
            "file first"
        )
        assert file.read_bytes() == drawn
    left(three, SPLIT, [0.2, 0.6], seed=0)
    assert say("compare", ".", "--figure", str(file)).code == 0  # of more runs, though of fewer seeds in common
    assert file.read_bytes() != drawn
    assert say("compare", ".", "--figure", str(file)).code == 0


def test_another_picture_is_not_replaced(three: Path, say: Any) -> None:  # noqa: F811
    Path("photo.png").write_bytes(b"mine")
    assert mistake(say("compare", ".", "--figure", "photo.png")) == (
        "photo.png is there, and does not say which runs it shows; choose another --figure, or delete that file first"
    )
    assert Path("photo.png").read_bytes() == b"mine"


def test_a_run_whose_plug_in_is_gone_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    run: Run = report.load(left(tmp_path, MINE, [0.5])).run
    assert run.method == Choice("tilted", {"angle": 3})
