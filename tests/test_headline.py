"""Runs that are trained within a time limit: they end cleanly, go on to the same numbers, and are packed small."""

import json
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import headline
import pytest

from cutlayer import recipes
from cutlayer.runs import config
from cutlayer.runs.folder import Folder

SMALL = ("--set", "clients=4", "--set", "per_round=2", "--engine", "loop", "--rounds", "4")
RUN = "digits/fedavg"


@pytest.fixture
def kept(tmp_path: Path) -> Folder:
    """A run of four rounds of 64 samples and half a second each, the first and the third the first of a session."""
    (run,) = (run for run in recipes.runs("digits") if run.name == RUN)
    folder = Folder(tmp_path / RUN / "seed-0")
    folder.path.mkdir(parents=True)
    folder.config.write_text(config.dumps(replace(run, rounds=4, checkpoint_every=5, engine="vmap")))
    rounds = range(1, 5)
    records = [{"round": n, "samples": 64 * n, "bytes": {}, "test_accuracy": n / 10} for n in rounds]
    times = [{"round": n, "seconds": 60.0 if n in (1, 3) else 0.5} for n in rounds]
    sessions = [{"round": 1}, {"round": 3}]
    for name, lines in (("metrics", records), ("timing", times), ("sessions", sessions)):
        (folder.path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.store.save(4, {}, {})
    return folder


def train(runs: Path, *words: str) -> Folder:
    assert headline.main(["--runs", str(runs), *SMALL, *words]) == 0
    return Folder(runs / RUN / "seed-0")


def test_a_run_that_ran_out_of_time_goes_on_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = train(tmp_path / "straight", RUN)
    with monkeypatch.context() as patched:
        patched.setattr(headline, "TO_FINISH", 1000.0)  # so there is never time for more than one further round
        halted = train(tmp_path / "halted", "--seconds", "1000", RUN, "digits/sfl_v1")
    assert halted.store.rounds() == [2]
    assert "digits/fedavg: 2 of 4 rounds, best " in capsys.readouterr().out
    train(tmp_path / "halted", RUN)
    assert "digits/fedavg: from round 3 to 4\n" in capsys.readouterr().out
    assert halted.metrics.read_text() == straight.metrics.read_text()
    assert halted.run() == straight.run()
    assert headline.sessions(halted) == {1, 3}
    train(tmp_path / "halted", RUN)
    said = capsys.readouterr().out
    assert said.startswith("digits/fedavg: 4 of 4 rounds, best ") and "; finished before\n" in said


def test_a_run_on_an_engine_that_was_chosen_for_it_is_skipped_or_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--engine", "auto", f"{RUN}:2")
    folder = train(tmp_path, *words)
    assert folder.run().engine == "vmap"
    capsys.readouterr()
    train(tmp_path, *words)
    assert "; finished before\n" in capsys.readouterr().out
    train(tmp_path, "--engine", "auto", f"{RUN}:3")
    assert "digits/fedavg: from round 3 to 3\n" in capsys.readouterr().out
    folder.metrics.unlink()  # as of a run that was stopped in its first round
    shutil.rmtree(folder.store.folder)
    train(tmp_path, *words)
    assert "digits/fedavg: from round 1 to 2\n" in capsys.readouterr().out


def test_no_run_is_begun_without_time_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "--seconds", "1", RUN)
    assert capsys.readouterr().out.startswith("digits/fedavg: not begun, as less than 30 s are left\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_trained_leaves_the_time_to_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--runs", str(tmp_path), *SMALL, "smofi_table1/cifar10/fedavg", "--data", str(tmp_path), f"{RUN}:1"]
    assert headline.main(words) == 2
    out, err = capsys.readouterr()
    assert out.endswith(" s in all; failed: smofi_table1/cifar10/fedavg\n")
    assert err.startswith("error: smofi_table1/cifar10/fedavg: ") and len(err.splitlines()) == 1
    assert Folder(tmp_path / RUN / "seed-0").store.rounds() == [1]


def test_only_unexpected_errors_print_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(headline, "execute", broken)
    assert headline.main(["--runs", str(tmp_path), RUN, "digits/sl"]) == 1
    out, err = capsys.readouterr()
    assert out.endswith(" s in all; failed: digits/fedavg, digits/sl\n")
    assert err.count("Traceback") == err.count("ZeroDivisionError: a bug") == 2


def test_a_run_that_is_interrupted_says_how_far_it_came(
    tmp_path: Path, kept: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(headline, "execute", stopped)
    assert headline.main(["--runs", str(tmp_path), f"{RUN}:9", "digits/sl"]) == 130
    out, err = capsys.readouterr()
    assert err == "stopped; digits/fedavg is saved up to round 4; the same command goes on\n"
    assert out.endswith(" s in all\n") and out.count("\n") == 1  # nothing of the next run


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("digitz", "unknown recipe 'digitz'; did you mean 'digits'?"),
        ("digits/fedavk", "unknown run 'digits/fedavk'; did you mean 'digits/fedavg' or "),
        ("digits --data nowhere", "there is no folder nowhere; --data is the one that holds the data sets"),
        ("digits:x", "the rounds of 'digits:x' are no number above 0; write for example digits:20"),
        ("--seconds -5 digits:1", "--seconds is to be above 0, and not -5; see --help"),
        ("digits:0", "digits:0: rounds is 0; it must be at least 1"),
        ("digits --set method", "--set 'method' is not key=value; "),
        ("digits --set seed=3", "--set cannot change seed; use --seed"),
        ("--collect out", "there is no run under "),
        ("", "name at least one run, take those of the list with --next, or pack some with --collect; see --help"),
    ],
)
def test_a_mistake_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, error: str
) -> None:
    assert headline.main(["--runs", str(tmp_path / "runs"), *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"error: {error}")
    assert list(tmp_path.iterdir()) == []


def test_the_advice_is_in_the_words_of_this_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert headline.main(["--runs", str(tmp_path / "file"), f"{RUN}:1"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'} is no folder; choose another --runs\n"


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ("--set optimiser.lr=0.5", "optimiser.lr is 0.1 there and 0.5 here"),
        ("--set clients=3 --engine loop", "clients is 20 there and 3 here, engine is 'vmap' there and 'loop' here"),
    ],
)
def test_a_folder_that_holds_another_run_is_refused(
    tmp_path: Path, kept: Folder, capsys: pytest.CaptureFixture[str], words: str, difference: str
) -> None:
    assert headline.main(["--runs", str(tmp_path), f"{RUN}:4", *words.split()]) == 2
    advice = "ask for it as it is, or choose another --runs"
    assert capsys.readouterr() == ("", f"error: {kept.path} holds another run: {difference}; {advice}\n")


def test_the_pace_leaves_out_the_first_round_of_each_session(kept: Folder) -> None:
    assert headline.pace(kept) == 2 * 64
    headline.note_session(kept, 2, {})  # rounds from 2 on were lost
    assert headline.sessions(kept) == {1, 2}
    kept.timing.write_text('{"round": 1, "seconds": 60.0}\n')
    assert headline.pace(kept) is None


def test_names_are_runs_or_panels_with_rounds_of_their_own() -> None:
    words = ["--runs", "x", "--rounds", "120", "smofi_table2/cifar10:7", "cut_table3_as_run/cifar10/sfl_v2-cut1"]
    runs = headline.chosen(headline.parsed([*words, "--precision", "bf16", "--seed", "3"]))
    names = [run.name for run in recipes.runs("smofi_table2") if "/cifar10/" in run.name]
    assert [run.name for run in runs] == [*names, "cut_table3_as_run/cifar10/sfl_v2-cut1"]
    assert [run.rounds for run in runs] == [7] * 6 + [100]  # no more than the recipe has
    assert {(run.precision, run.seed, run.checkpoint_every) for run in runs} == {("bf16", 3, 5)}
    assert headline.named("digits") == recipes.runs("digits")


def test_schedules_stay_those_of_the_whole_run() -> None:
    (run,) = headline.chosen(headline.parsed(["--runs", "x", "cut_table4_as_run/cifar10/sfl_v2-cut1:20"]))
    assert run.optimiser.options["lr"] == {"schedule": "cosine", "lr": 0.001, "rounds": 200}


def test_settings_are_those_of_the_command_line() -> None:
    words = ["--runs", "x", RUN, "--set", "method=smofi", "--set", "method.beta=0.3", "--set", "clients=4"]
    (run,) = headline.chosen(headline.parsed(words))
    assert (run.name, run.method.name, run.method.options, run.clients) == (RUN, "smofi", {"beta": 0.3}, 4)


def test_settings_without_the_packages_of_the_command_line_are_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cutlayer.cli", None)
    assert headline.main(["--runs", "x", RUN, "--set", "clients=4"]) == 2
    assert capsys.readouterr().err.startswith("error: --set needs the packages of the command line: ")


def test_runs_are_packed_with_what_is_needed_of_each_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path / "runs", f"{RUN}:2", "--collect", str(tmp_path / "out"))
    packed = tmp_path / "out" / "headline.tar.gz"
    assert f"{packed}: 1 run, {packed.stat().st_size / 1024:.1f} KiB\n" in capsys.readouterr().out
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = Folder(tmp_path / "back" / RUN / "seed-0")
    names = {"config.toml", "environment.json", "metrics.jsonl", "sessions.jsonl", "timing.jsonl"}
    assert {path.name for path in back.path.iterdir()} == names
    assert back.run() == folder.run()
    kept = {"round", "loss", "stopped", "samples", "bytes", "test_loss", "test_accuracy"}
    assert [set(record) for record in back.history()] == [kept] * 2
    assert [r["test_accuracy"] for r in back.history()] == [r["test_accuracy"] for r in folder.history()]
    assert json.loads(back.environment.read_text())["engine"] == "loop"
