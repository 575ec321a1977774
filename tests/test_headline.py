"""Runs that are trained within a time limit: they end cleanly, go on to the same numbers, and are packed small."""

import json
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from cutlayer import recipes
from cutlayer.errors import UnknownNameError
from cutlayer.folder import Folder

ROOT = Path(__file__).parents[1]
SMALL = ("--set", "clients=4", "--set", "per_round=2", "--engine", "loop", "--rounds", "4")
RUN = "digits/fedavg"


@pytest.fixture
def headline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import headline

    return headline


def train(headline: ModuleType, runs: Path, *words: str) -> Folder:
    assert headline.main(["--runs", str(runs), *SMALL, *words]) == 0
    return Folder(runs / RUN / "seed-0")


@pytest.mark.slow
def test_a_run_that_ran_out_of_time_goes_on_to_the_same_numbers(
    headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = train(headline, tmp_path / "straight", RUN)
    with monkeypatch.context() as patched:
        patched.setattr(headline, "TO_FINISH", 1000.0)  # so there is never time for more than one further round
        halted = train(headline, tmp_path / "halted", "--seconds", "1000", RUN, "digits/sfl_v1")
    assert halted.store.rounds() == [2]
    assert "digits/fedavg: 2 of 4 rounds, best " in capsys.readouterr().out
    train(headline, tmp_path / "halted", RUN)
    assert "digits/fedavg: from round 3 to 4\n" in capsys.readouterr().out
    assert halted.metrics.read_text() == straight.metrics.read_text()
    assert halted.run() == straight.run()
    train(headline, tmp_path / "halted", RUN)
    assert "; finished before\n" in capsys.readouterr().out


def test_no_run_is_begun_without_time_for_it(
    headline: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(headline, tmp_path, "--seconds", "1", RUN)
    assert capsys.readouterr().out.startswith("digits/fedavg: no time left\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_the_time_to_the_others(
    headline: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--runs", str(tmp_path), *SMALL, "smofi_table1/cifar10/fedavg", "--data", str(tmp_path), f"{RUN}:1"]
    assert headline.main(words) == 1
    assert capsys.readouterr().out.endswith(" s in all; failed: smofi_table1/cifar10/fedavg\n")
    assert Folder(tmp_path / RUN / "seed-0").store.rounds() == [1]


def test_names_are_runs_or_panels_with_rounds_of_their_own(headline: ModuleType) -> None:
    words = ["--runs", "x", "--rounds", "120", "smofi_table2/cifar10:7", "cut_table3_as_run/cifar10/sfl_v2-cut1"]
    runs = headline.chosen(headline.parsed([*words, "--precision", "bf16", "--seed", "3"]))
    names = [run.name for run in recipes.runs("smofi_table2") if "/cifar10/" in run.name]
    assert [run.name for run in runs] == [*names, "cut_table3_as_run/cifar10/sfl_v2-cut1"]
    assert [run.rounds for run in runs] == [7] * 6 + [100]  # no more than the recipe has
    assert {(run.precision, run.seed, run.checkpoint_every) for run in runs} == {("bf16", 3, 20)}
    with pytest.raises(UnknownNameError, match="unknown run 'smofi_table1/cifar'"):
        headline.named("smofi_table1/cifar")


def test_schedules_stay_those_of_the_whole_run(headline: ModuleType) -> None:
    (run,) = headline.chosen(headline.parsed(["--runs", "x", "cut_table4_as_run/cifar10/sfl_v2-cut1:20"]))
    assert run.optimiser.options["lr"] == {"schedule": "cosine", "lr": 0.001, "rounds": 200}


def test_runs_are_packed_with_what_is_needed_of_each_round(headline: ModuleType, tmp_path: Path) -> None:
    folder = train(headline, tmp_path / "runs", f"{RUN}:2", "--collect", str(tmp_path / "out"))
    with tarfile.open(tmp_path / "out" / "headline.tar.gz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = Folder(tmp_path / "back" / RUN / "seed-0")
    names = {"config.toml", "environment.json", "machine.txt", "metrics.jsonl", "timing.jsonl"}
    assert {path.name for path in back.path.iterdir()} == names
    assert back.run() == folder.run()
    kept = {"round", "loss", "stopped", "samples", "bytes", "test_loss", "test_accuracy"}
    assert [set(record) for record in back.history()] == [kept] * 2
    assert [r["test_accuracy"] for r in back.history()] == [r["test_accuracy"] for r in folder.history()]
    assert json.loads(back.environment.read_text())["engine"] == "loop"
