"""Runs are compared by any metric that they measured, in its own direction and unit."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli import mistake, say, wide  # noqa: F401 (fixtures)
from test_compare_formats import MERGE, compared, narrow  # noqa: F401 (fixtures)
from test_progress import record
from test_report import FEDAVG, SPLIT, alone, left, printed, rows

from cutlayer.cli.progress import Status
from cutlayer.errors import ConfigError
from cutlayer.results import figures
from cutlayer.results.figures.looks import LOOKS
from cutlayer.results.measures import ACCURACY, Measure, default
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder

RMSE = Measure("test_rmse", "min")


def measured(root: Path, run: Run, seed: int = 0, **series: Sequence[float | None]) -> Folder:
    """The folder of a run that measured these metrics in each of its rounds."""
    folder = left(root, run, [None] * len(next(iter(series.values()))), seed=seed)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    found = [{key: values[i] for key, values in series.items()} for i in range(len(lines))]
    texts = [json.dumps({**line, **more}) + "\n" for line, more in zip(lines, found, strict=True)]
    folder.metrics.write_text("".join(texts))
    return folder


@pytest.fixture
def stays(tmp_path: Path) -> Path:
    """Three seeds of a regression: SFL-V1 errs less than FedAvg, by 0.5, 0.6 and 0.7."""
    for seed, (worse, better) in enumerate(((2.0, 1.5), (3.0, 2.4), (4.0, 3.3))):
        first = [9.0, worse + 2, worse, worse + 0.5]
        second = [9.0, better + 0.1, better, better + 0.2]
        for run, rmse, r2 in ((FEDAVG, first, [-1.0, 0.2, 0.5, 0.4]), (SPLIT, second, [-1.0, 0.5, 0.6, 0.6])):
            measured(tmp_path, run, seed, test_loss=[v * v for v in rmse], test_rmse=rmse, test_r2=r2)
    return tmp_path


# -- direction ---------------------------------------------------------------------------------------------------------


def test_less_is_better_for_errors(stays: Path) -> None:
    comparison = compared(stays, target=4.0)
    found = rows(comparison)
    assert found["fedavg"]["best_rmse"] == {"mean": 3.0, "std": 1.0}
    assert found["fedavg"]["final_rmse"]["mean"] == 3.5
    assert found["sfl_v1"]["best_rmse"]["mean"] == pytest.approx(2.4)
    # 4 or less: FedAvg after 2, 3 and 3 rounds, SFL-V1 after 2 each time
    assert found["fedavg"]["rounds_to_target"]["mean"] == pytest.approx(8 / 3)
    assert (found["sfl_v1"]["rounds_to_target"]["mean"], found["sfl_v1"]["speed_up"]) == (2.0, pytest.approx(4 / 3))
    # The differences are -0.5, -0.6 and -0.7: deviation 0.1, t of two degrees of freedom 4.303
    difference = found["sfl_v1"]["difference"]
    assert difference["mean"] == pytest.approx(-0.6) and difference["half"] == pytest.approx(0.2484, abs=1e-4)
    assert found["fedavg"]["converged"] is None  # the rule of convergence is about accuracies
    panel = alone(comparison)
    assert panel.best is panel.winner is panel.groups[1]
    assert (panel.as_dict()["metric"], panel.as_dict()["goal"]) == ("rmse", "min")


def test_the_target_is_easier_than_the_best_value_in_every_direction(stays: Path) -> None:
    panel = alone(compared(stays))
    assert (panel.target, panel.rule) == (pytest.approx(3.0 / 0.9), "the best RMSE of fedavg ÷ 0.9")
    assert alone(compared(stays, metric="r2")).rule == "0.9 × the best R² of fedavg"
    r2 = Measure("test_r2", "max")
    assert (r2.share_of(0.9, 0.5), r2.share_of(0.9, -0.9)) == (0.45, -1.0)  # more is better: both are below
    assert (RMSE.share_of(0.9, 9.0), RMSE.share_of(0.9, -9.0)) == (10.0, -8.1)


def test_without_fedavg_the_best_run_is_the_one_that_errs_least(tmp_path: Path) -> None:
    measured(tmp_path, SPLIT, test_rmse=[3.0, 2.0])
    measured(tmp_path, MERGE, test_rmse=[3.0, 1.0])
    panel = alone(compared(tmp_path))
    assert (panel.reference.label, panel.rule) == ("mergesfl", "the best RMSE of all runs, that of mergesfl ÷ 0.9")


# -- which metric ------------------------------------------------------------------------------------------------------


def chosen(*runs: Sequence[str]) -> str:
    return default([[dict.fromkeys(keys, 0.5)] for keys in runs]).name


def test_the_default_is_the_accuracy_or_else_the_first_metric_that_all_runs_have() -> None:
    assert chosen(["loss", "test_loss", "test_f1", "test_accuracy"], ["loss", "test_loss"]) == "accuracy"
    assert chosen(["loss", "test_loss", "test_mae", "test_rmse"], ["loss", "test_rmse", "test_mae"]) == "mae"
    assert chosen(["loss", "test_loss", "test_mae", "test_rmse"], ["loss", "test_loss", "test_rmse"]) == "rmse"
    assert chosen(["loss", "validation_loss", "validation_r2", "test_loss"]) == "loss"  # the test set comes first
    assert chosen(["loss", "federated_accuracy", "federated_f1", "validation_f1"]) == "validation_f1"
    assert chosen(["loss", "federated_loss", "federated_f1", "federated_accuracy"]) == "federated_accuracy"
    assert chosen(["loss", "test_mine", "test_loss"]) == "loss"  # nobody knows whether mine should rise
    assert default([[{"loss": 1.0, "bytes": {}, "client_tests": {}}]]) == ACCURACY  # the loss of training is no test


def test_a_metric_by_its_name(tmp_path: Path) -> None:
    keys = {"validation_accuracy": 0.5, "federated_accuracy_worst": 0.1, "test_loss": 2.0, "test_accuracy": 0.6}
    measured(tmp_path, FEDAVG, **{key: [value] for key, value in keys.items()})
    for name, key, words in (
        ("validation_accuracy", "validation_accuracy", "validation accuracy"),
        ("federated_accuracy_worst", "federated_accuracy_worst", "federated accuracy worst"),
        ("loss", "test_loss", "test loss"),
        ("test_accuracy", "test_accuracy", "accuracy"),
        ("training_loss", "loss", "training loss"),
    ):
        measure = alone(compared(tmp_path, metric=name)).measure
        assert (measure.key, measure.words) == (key, words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--metric rsme", "unknown metric 'rsme' in these runs; did you mean 'rmse' or 'mine'?"),
        ("--metric accuracy", "unknown metric 'accuracy' in these runs; known: loss, mine, r2, rmse, training_loss."),
        ("--metric mine", "--metric mine: say whether it should rise or fall, with --mode max or min"),
        ("--metric mine --mode up", "unknown mode 'up'; known: max, min."),
        ("--mode min", "--mode is about one metric; add --metric"),
        ("--metric rmse --traffic", "--metric is about accuracies and other metrics; leave out --traffic"),
    ],
)
def test_mistakes(stays: Path, say: Any, words: str, message: str) -> None:  # noqa: F811
    measured(stays, MERGE, test_rmse=[1.0], test_mine=[1.0])
    assert mistake(say("compare", ".", *words.split())) == message


def test_a_metric_of_ones_own_has_the_mode_that_is_told_or_that_a_run_monitors_it_with(tmp_path: Path) -> None:
    measured(tmp_path, FEDAVG, test_mine=[3.0, 1.0])
    assert rows(compared(tmp_path, metric="mine", goal="min"))["fedavg"]["best_mine"]["mean"] == 1.0
    measured(tmp_path, replace(SPLIT, monitor="test_mine", mode="max"), test_mine=[3.0, 1.0])
    assert rows(compared(tmp_path, metric="mine"))["fedavg"]["best_mine"]["mean"] == 3.0


def test_a_target_is_a_fraction_for_shares_and_any_number_otherwise(stays: Path, tmp_path: Path) -> None:
    assert alone(compared(stays, target=90.0)).target == 90.0
    with pytest.raises(ConfigError, match=r"^--target is 90; for F1 it must be a fraction from 0 to 1$"):
        measured(tmp_path, MERGE, test_f1=[0.5])
        compared(tmp_path / "paper/mergesfl", metric="f1", target=90.0)


# -- fairness ----------------------------------------------------------------------------------------------------------


def test_an_error_that_is_not_finite_does_not_cut_the_others_short(tmp_path: Path) -> None:
    measured(tmp_path, FEDAVG, test_rmse=[3.0, 2.0, 1.0])
    measured(tmp_path, SPLIT, test_rmse=[3.0, 2.5, None])
    found = rows(compared(tmp_path))
    assert (found["fedavg"]["best_rmse"]["mean"], found["sfl_v1"]["best_rmse"]["mean"]) == (1.0, 2.5)
    assert found["sfl_v1"]["final_rmse"] is None


def test_a_run_in_which_nobody_could_train_does_not_cut_the_others_short(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.1, 0.5, 0.8])
    folder = left(tmp_path, SPLIT, [0.1], stopped=4)
    folder.metrics.write_text(folder.metrics.read_text().replace('"loss": 1.0', '"loss": null'))
    assert rows(compared(tmp_path))["fedavg"]["best_accuracy"]["mean"] == 0.8


# -- in print ----------------------------------------------------------------------------------------------------------


def test_a_table_of_errors(stays: Path) -> None:
    lines = printed(compared(stays, target=4.0))
    assert lines[:2] == [
        "best vs fedavg speed- final up down wall",
        "run RMSE ↓ [95 %] R up RMSE ↓ seeds rounds MiB MiB seconds",
    ]
    assert lines[3].startswith("fedavg 3.000 ± 1.000 – 2.7 1.00× 3.500 ± 1.000 3 ")
    assert lines[4].startswith("sfl_v1 2.400 ± 0.900 -0.600 [-0.848, -0.352] 2 1.33× 2.600 ± 0.900 3 ")
    assert lines[5] == "R: first round that reaches the target 4.000 or less (as given); speed-up against fedavg"
    assert lines[6].startswith("vs fedavg: best RMSE above it, so below 0 is better, seed by seed, with the 95 % ")


def test_only_shares_are_in_per_cent(tmp_path: Path) -> None:
    values = {"test_f1": [0.5], "test_auc": [0.9], "test_r2": [0.25], "test_mae": [1234.5], "test_mse": [0.0012]}
    measured(tmp_path, FEDAVG, **values)
    shown = {name: printed(compared(tmp_path, metric=name)) for name in ("f1", "auc", "r2", "mae", "mse")}
    heads = [lines[1].split(" seeds")[0] for lines in shown.values()]
    assert heads == ["run F1 % F1 %", "run AUC % AUC %", "run R² R²", "run MAE ↓ MAE ↓", "run MSE ↓ MSE ↓"]
    assert [lines[3].split()[1] for lines in shown.values()] == ["50.0", "90.0", "0.2500", "1234", "0.001200"]


def test_a_difference_that_rounds_to_nothing_has_no_minus(tmp_path: Path) -> None:
    left(tmp_path, FEDAVG, [0.5])
    left(tmp_path, SPLIT, [0.4999])
    assert printed(compared(tmp_path))[4].startswith("sfl_v1 50.0 +0.0 ")


LATEX = r"""\begin{tabular}{lrrrrr}
  \toprule
  run & best RMSE $\downarrow$ & vs FedAvg [95 \%] & R & speed-up & final RMSE $\downarrow$ \\
  \midrule
  FedAvg & 3.000 $\pm$ 1.000 & -- & 2.7 & 1.00$\times$ & 3.500 $\pm$ 1.000 \\
  SFL-V1 & \textbf{2.400 $\pm$ 0.900} & $-$0.600 [$-$0.848, $-$0.352] & 2 & 1.33$\times$ & 2.600 $\pm$ 0.900 \\
  \bottomrule
\end{tabular}
"""


def test_every_format(stays: Path, say: Any) -> None:  # noqa: F811
    given = ["compare", ".", "--metric", "rmse", "--target", "4", "--format"]
    assert say(*given, "latex").out.endswith(LATEX)  # the lowest error is bold: it is below the other with confidence
    lines = say(*given, "markdown").out.splitlines()
    assert lines[0].startswith("| run | best RMSE ↓ | vs FedAvg [95 %] | R | speed-up | final RMSE ↓ | seeds |")
    records = list(csv.DictReader(io.StringIO(say(*given, "csv").out)))
    assert [(r["label"], r["seed"], r["best_rmse"], r["rounds_to_target"]) for r in records[:2]] == [
        ("fedavg", "0", "2.0", "2"),
        ("fedavg", "1", "3.0", "3"),
    ]
    assert say(*given, "json").json["runs"][1]["per_seed"][0]["best_rmse"] == 1.5
    assert "best R$^2$ &" in say("compare", ".", "--metric", "r2", "--format", "latex").out


def test_panels_of_different_metrics(stays: Path, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    left(stays, replace(FEDAVG, name="digits/fedavg"), [0.5])
    records = list(csv.DictReader(io.StringIO(say("compare", ".", "--format", "csv", "--figure", "a.svg").out)))
    assert (records[0]["best_accuracy"], records[0]["best_rmse"]) == ("0.5", "")
    assert (records[1]["best_accuracy"], records[1]["best_rmse"]) == ("", "2.0")
    drawn = Path("a.svg").read_text()
    assert "test accuracy (%)" in drawn and "test RMSE" in drawn


def test_a_comparison_of_another_metric_fits_80_columns(stays: Path, narrow: Any) -> None:  # noqa: F811
    text = narrow("compare", ".", "--metric", "loss", "--per-seed")
    assert next(line.split() for line in text.splitlines() if line.startswith(" run"))[:3] == ["run", "loss", "↓"]


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_figure_of_errors(stays: Path, tmp_path: Path) -> None:
    figures.draw(compared(stays, target=4.0), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert "test RMSE" in drawn and "4.000" in drawn and "%" not in drawn.partition("<g ")[2].replace("100%", "")


def test_high_errors_of_the_first_rounds_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As low accuracies are: of 40 rounds, the first two may be off the axis."""
    from matplotlib.figure import Figure

    made: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: made.append(self))
    measured(tmp_path, FEDAVG, test_rmse=[900.0, 500.0, *(3.0 - 0.05 * i for i in range(38))])
    figures.draw(compared(tmp_path), tmp_path / "a.png")
    bottom, top = made[0].axes[0].get_ylim()
    assert 3.0 < top < 50 and bottom < 1.15


def test_methods_that_split_have_colours_of_their_own() -> None:
    split = [look.colour for look in LOOKS.values() if not look.hollow]
    assert len(set(split)) == len(split)


# -- progress ----------------------------------------------------------------------------------------------------------


def test_the_progress_of_a_run_shows_the_metric_that_there_is() -> None:
    regression = Run(metrics=("rmse", "r2"))
    assert str(Status(regression, [record(1)])) == "RMSE –, loss 0.500, 10 B"
    found = {"test_loss": 2.0, "test_rmse": 1.4, "test_r2": 0.5}
    assert str(Status(regression, [record(1, **found), record(2)])) == "RMSE 1.400, loss 0.500, 10 B"
    assert str(Status(Run(), [record(1, test_loss=2.0)])) == "test loss 2.000, loss 0.500, 10 B"
    assert str(Status(Run(), [record(1, test_rmse=None)])) == "RMSE –, loss 0.500, 10 B"
