"""Specifies that a run that was stopped, at any moment and in any way, ends as if it had never stopped."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GENERAL, using
from killed_run import MOMENTS
from stopping import SMALL, Stopped, outcome, stop_after, stopped, unbroken

from cutlayer.core import tree
from cutlayer.core.state import State
from cutlayer.engines import auto
from cutlayer.errors import CheckpointError
from cutlayer.results import report
from cutlayer.runs import build, checkpoint, config
from cutlayer.runs import run as running
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.simulation import Simulation


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "stopped")


# -- stopped between rounds ------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "engine"), [*((method, "vmap") for method in GENERAL), ("sfl_v1", "loop")])
def test_every_method_goes_on_as_if_it_had_not_stopped(
    method: str, engine: str, folder: Folder, tmp_path: Path
) -> None:
    run = replace(using(SMALL, method), engine=engine)
    execute(run, stopped(run, folder), resume=True)
    assert outcome(folder) == outcome(unbroken(run, tmp_path))


OPTIONS = {
    "u-shape": replace(SMALL, head=3),
    "adam": replace(SMALL, optimiser=Choice("adam", {"lr": 0.01})),
    "another server optimiser": replace(SMALL, server_optimiser=Choice("adamw", {"lr": 0.01}), method=Choice("sfl_v2")),
    "schedule": replace(
        SMALL, optimiser=Choice("sgd", {"lr": {"schedule": "exponential", "lr": 0.1, "decay": 0.3}, "momentum": 0.5})
    ),
    "validation": replace(SMALL, validation=0.1, per_client=True),
    "rare evaluation": replace(SMALL, eval_every=2),
    "rare checkpoints": replace(SMALL, checkpoint_every=2),
    "no checkpoint yet": replace(SMALL, checkpoint_every=4),
    "another seed": replace(SMALL, seed=7),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_runs_with_options_go_on_as_if_they_had_not_stopped(name: str, folder: Folder, tmp_path: Path) -> None:
    run = OPTIONS[name]
    execute(run, stopped(run, folder), resume=True)
    assert outcome(folder) == outcome(unbroken(run, tmp_path))


def test_a_run_that_stops_after_every_round_is_still_the_same(folder: Folder, tmp_path: Path) -> None:
    stopped(SMALL, folder, 1)
    for number in (2, 3, 4):
        with pytest.raises(Stopped):
            execute(SMALL, folder, resume=True, on_round=stop_after(number))
    execute(SMALL, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(SMALL, tmp_path))


def test_the_state_between_rounds_is_what_a_checkpoint_gives_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an engine leaves views with strides of their own."""
    one_round = Simulation.round

    def with_views(self: Simulation, state: State) -> Any:
        return tree.map(lambda a: torch.stack([a, a], -1)[..., 1], one_round(self, state))

    monkeypatch.setattr(Simulation, "round", with_views)
    for a in tree.tensors(execute(SMALL, folder).state):
        assert (a.is_contiguous(), a.storage_offset(), a.untyped_storage().nbytes()) == (True, 0, a.nbytes)


# -- an engine that was chosen by the rule ---------------------------------------------------------


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make auto choose vmap the first time and loop afterwards."""
    made: list[str] = []

    def rule(*_: Any) -> tuple[str, str]:
        made.append("loop" if made else "vmap")
        return made[-1], "as the test wants"

    monkeypatch.setattr(auto, "rule", rule)
    yield made


@pytest.mark.parametrize("checkpoint_every", [1, 4], ids=["from a checkpoint", "from the start"])
def test_a_resumed_run_keeps_the_engine_and_does_not_choose_again(
    checkpoint_every: int, timings: list[str], folder: Folder, tmp_path: Path
) -> None:
    run = replace(SMALL, engine="auto", checkpoint_every=checkpoint_every)
    stopped(run, folder)
    assert folder.surroundings()["engine"] == "vmap"
    training = execute(run, folder, resume=True)
    assert training.runner.backend.engine is not None
    assert (timings, training.runner.backend.engine.name, folder.surroundings()["engine"]) == (["vmap"], "vmap", "vmap")
    reference = Folder(tmp_path / "unbroken")
    execute(replace(run, engine="vmap"), reference)
    assert folder.metrics.read_bytes() == reference.metrics.read_bytes()
    assert folder.model.read_bytes() == reference.model.read_bytes()


@pytest.mark.parametrize("left", [None, "", '{"engine": "loop"}'], ids=["gone", "damaged", "of another engine"])
def test_the_checkpoint_knows_the_engine_too(left: str | None, timings: list[str], folder: Folder) -> None:
    run = replace(SMALL, engine="auto")
    stopped(run, folder)
    if left is None:
        folder.environment.unlink()
    else:
        folder.environment.write_text(left)
    training = execute(run, folder, resume=True)
    assert training.runner.backend.engine is not None
    assert (timings, training.runner.backend.engine.name) == (["vmap"], "vmap")
    assert folder.store.load()[1]["config"]["engine"] == "vmap"


# -- killed ----------------------------------------------------------------------------------------


def kill(run: Run, folder: Folder, moment: str, number: int = 3) -> None:
    """Run it in a process of its own that is killed at this moment of a round."""
    file = folder.path.parent / "run.toml"
    file.write_text(config.dumps(run), encoding="utf-8")
    script = Path(__file__).with_name("killed_run.py")
    command = [sys.executable, str(script), str(file), str(folder.path), moment, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr


# Lines of metrics and the newest checkpoint that a kill in round 3 leaves.
LEFT_BY = {"in_a_round": (2, 2), "after_a_metrics_line": (3, 2), "in_a_checkpoint": (3, 2)}


@pytest.mark.parametrize("moment", LEFT_BY)
def test_a_killed_run_goes_on_as_if_it_had_not_been(moment: str, folder: Folder, tmp_path: Path) -> None:
    kill(SMALL, folder, moment)
    assert (len(folder.history()), max(folder.store.rounds())) == LEFT_BY[moment]
    execute(SMALL, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(SMALL, tmp_path))
    assert not list(folder.path.rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "moment", "checkpoint_every"),
    [
        *((method, "in_a_round", 1) for method in GENERAL),
        *(("hosfl", moment, every) for moment in MOMENTS for every in (1, 2) if (moment, every) != ("in_a_round", 1)),
    ],
)
def test_a_run_survives_a_kill_with_every_method_and_at_every_moment(
    method: str, moment: str, checkpoint_every: int, folder: Folder, tmp_path: Path
) -> None:
    run = replace(using(SMALL, method), checkpoint_every=checkpoint_every, engine="vmap", rounds=6)
    kill(run, folder, moment, number=4)
    execute(run, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(run, tmp_path))


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_warned_of_and_the_one_before_is_used(
    folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = stopped(SMALL, folder).store.path(3)
    newest.write_bytes(newest.read_bytes()[:-100])
    execute(SMALL, folder, resume=True)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(f"{newest} is damaged or no checkpoint: ")
    assert warning.endswith("; resuming from round 2 instead")
    assert outcome(folder) == outcome(unbroken(SMALL, tmp_path))


def test_without_a_usable_checkpoint_nothing_is_changed(folder: Folder) -> None:
    stopped(SMALL, folder)
    for number in (2, 3):
        folder.store.path(number).write_bytes(b"no")
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=rf"^no usable checkpoint in {folder.store.folder}: .*round-000003"):
        execute(SMALL, folder, resume=True)
    assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before


def test_metrics_that_are_missing_or_cut_are_refused(folder: Folder) -> None:
    stopped(SMALL, folder)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    message = (
        f"{folder.metrics} holds {{}} of the 3 rounds that the checkpoint has behind it; "
        "put the file back, or start over with --overwrite"
    )
    folder.metrics.write_text("".join(lines[:1]))
    with pytest.raises(CheckpointError) as error:
        execute(SMALL, folder, resume=True)
    assert str(error.value) == message.format(1)
    folder.metrics.unlink()
    with pytest.raises(CheckpointError) as error:
        execute(SMALL, folder, resume=True)
    assert str(error.value) == message.format(0)


def test_a_damaged_line_is_named(folder: Folder) -> None:
    stopped(SMALL, folder)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(CheckpointError) as error:
        execute(SMALL, folder, resume=True)
    assert str(error.value) == (
        f"line 2 of {folder.metrics} is damaged; put the file back, or start over with --overwrite"
    )


def test_a_digit_that_flips_in_the_metrics_is_noticed(folder: Folder) -> None:
    """On resuming and in comparisons; numbers that were written by an earlier version have no digests to check."""
    stopped(SMALL, folder)
    text = folder.metrics.read_text()
    lines = text.splitlines(keepends=True)
    place = lines[1].index('"loss": ') + len('"loss": 2.')
    flipped = lines[1][:place] + str((int(lines[1][place]) + 1) % 10) + lines[1][place + 1 :]
    folder.metrics.write_text(lines[0] + flipped + lines[2])
    message = (
        f"line 2 of {folder.metrics} is not what its round wrote, by the digest in timing.jsonl; put the file back, or "
        "start over with --overwrite"
    )
    with pytest.raises(CheckpointError) as resumed:
        execute(SMALL, folder, resume=True)
    with pytest.raises(CheckpointError) as compared:
        report.compare([folder])
    assert str(resumed.value) == str(compared.value) == message
    times = [{key: line[key] for key in ("round", "seconds")} for line in folder.times()]
    folder.timing.write_text("".join(json.dumps(line) + "\n" for line in times))
    assert folder.history()[1]["loss"] == json.loads(flipped)["loss"]
    folder.metrics.write_text(text)
    assert execute(SMALL, folder, resume=True).state.round == SMALL.rounds


def test_no_flipped_bit_in_the_metrics_changes_a_number(folder: Folder) -> None:
    stopped(SMALL, folder)
    known, content = folder.history(), folder.metrics.read_bytes()
    for place in range(0, len(content) - 1, 7):  # the last byte ends the last line: without it, that one is left out
        for bit in (1, 16, 128):
            damaged = bytearray(content)
            damaged[place] ^= bit
            folder.metrics.write_bytes(damaged)
            try:
                assert folder.history() == known, (place, bit)
            except CheckpointError as error:
                assert "of " + str(folder.metrics) in str(error)


def test_checkpoints_that_are_gone_are_not_taken_for_a_run_that_never_had_any(folder: Folder) -> None:
    stopped(SMALL, folder)
    for number in folder.store.rounds():
        folder.store.path(number).unlink()
    with pytest.raises(CheckpointError) as error:
        execute(SMALL, folder, resume=True)
    assert str(error.value) == (
        f"{folder.path} holds 3 rounds but no checkpoint; put {folder.store.folder} back, "
        "or start over with --overwrite"
    )
    assert len(folder.history()) == 3


# -- another configuration -------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_every", [1, 4], ids=["with a checkpoint", "without one"])
def test_a_run_of_another_configuration_is_refused(checkpoint_every: int, folder: Folder) -> None:
    run = replace(SMALL, checkpoint_every=checkpoint_every)
    stopped(run, folder)
    with pytest.raises(CheckpointError) as error:
        execute(replace(run, optimiser=Choice("sgd", {"lr": 0.1, "momentum": 0.9})), folder, resume=True)
    assert str(error.value) == (
        f"{folder.path} holds a run of another configuration: optimiser.lr is 0.05 there and 0.1 here; "
        "resume it with its own, start over with --overwrite, or choose another --out"
    )


def test_a_checkpoint_from_before_a_key_goes_on_with_its_default(folder: Folder, tmp_path: Path) -> None:
    content, manifest = stopped(SMALL, folder).store.load()
    del manifest["config"]["freeze_norms"]
    folder.store.save(3, content, manifest)
    execute(SMALL, folder, resume=True)
    assert folder.metrics.read_bytes() == unbroken(SMALL, tmp_path).metrics.read_bytes()


def test_a_checkpoint_from_before_init_goes_on_with_he_and_refuses_torch(folder: Folder, tmp_path: Path) -> None:
    he, torchs = (
        replace(SMALL, model=Choice("resnet_tiny", {"width": 2, "init": init}), cut=1) for init in ("he", "torch")
    )
    content, manifest = stopped(he, folder).store.load()
    assert manifest["config"]["model"].pop("init") == "he"
    folder.store.save(3, content, manifest)
    with pytest.raises(CheckpointError, match=r"model\.init is 'he' there and 'torch' here; "):
        execute(torchs, folder, resume=True)
    execute(he, folder, resume=True)
    assert folder.metrics.read_bytes() == unbroken(he, tmp_path).metrics.read_bytes()
    assert unbroken(torchs, tmp_path / "torch").metrics.read_bytes() != folder.metrics.read_bytes()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_second_process_in_the_same_folder_is_refused(resumed: bool, folder: Folder, tmp_path: Path) -> None:
    if resumed:
        stopped(SMALL, folder)
    refusals: list[str] = []

    def intrude(*_: Any) -> None:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(CheckpointError) as error:
                execute(SMALL, folder, **options)
            refusals.append(str(error.value))

    execute(SMALL, folder, resume=resumed, on_round=intrude)
    assert set(refusals) == {
        f"{folder.path} is in use: another process trains this run; wait until it ends, or choose another --out"
    }
    assert folder.metrics.read_bytes() == unbroken(SMALL, tmp_path).metrics.read_bytes()
    execute(SMALL, folder, resume=True)  # free again


@pytest.mark.parametrize("options", [{}, {"resume": True}])
def test_a_run_that_began_meanwhile_is_not_lost(options: dict[str, bool], folder: Folder) -> None:
    def slowly(run: Run) -> Any:
        execute(SMALL, folder)
        return build.training(run)

    with pytest.raises(CheckpointError, match="already holds a run"):
        execute(SMALL, folder, make=slowly, **options)
    assert len(folder.history()) == SMALL.rounds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_was_forked_does_not_keep_the_lock(folder: Folder) -> None:
    with folder.guarded() as hold:
        folder.path.mkdir()
        hold()
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            os.read(ready, 1)  # until the parent closes its end
            os._exit(0)
    with folder.guarded() as hold:
        hold()
    os.close(told)
    os.close(ready)
    os.waitpid(child, 0)
    assert not folder.holds_run()


def test_a_run_may_be_given_more_rounds_but_not_fewer_than_it_has_done(folder: Folder, tmp_path: Path) -> None:
    execute(replace(SMALL, rounds=3), folder)
    with pytest.raises(CheckpointError) as error:
        execute(replace(SMALL, rounds=2), folder, resume=True)
    assert str(error.value) == f"{folder.path} is at round 3 already; resume it with at least as many rounds"
    execute(SMALL, folder, resume=True)
    left, expected = outcome(folder), outcome(unbroken(SMALL, tmp_path))
    # The checkpoint of round 3 was written by the shorter run, and is gone by now.
    assert left == expected


def test_how_often_a_run_leaves_checkpoints_and_how_many_clients_have_memory_may_change(
    folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(replace(SMALL, checkpoint_every=4), folder)  # before the first checkpoint
    with pytest.raises(Stopped):
        execute(replace(SMALL, checkpoint_every=2), folder, resume=True, on_round=stop_after(3))
    assert folder.store.rounds() == [2]
    execute(replace(SMALL, chunk=1), folder, resume=True)
    expected = (
        f"{folder.path} was started with chunk None and goes on with 1: its numbers may differ in their last digits"
    )
    assert caplog.messages == [expected]
    assert folder.metrics.read_bytes() == unbroken(SMALL, tmp_path).metrics.read_bytes()  # the loop engine's do not


def test_a_finished_run_has_nothing_to_do_and_says_so(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    execute(SMALL, folder)
    before = {p: p.stat().st_mtime_ns for p in folder.path.rglob("*")}
    caplog.set_level(logging.INFO)
    training = execute(SMALL, folder, resume=True, on_round=stop_after(5))
    assert caplog.messages == [f"{folder.path}: all 5 rounds are done already"]
    assert {p: p.stat().st_mtime_ns for p in folder.path.rglob("*")} == before
    assert (training.state.round, len(training.history)) == (5, 5)


def test_another_environment_is_warned_of(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    stopped(SMALL, folder)
    known = json.loads(folder.environment.read_text())
    folder.environment.write_text(json.dumps({**known, "torch": "1.0"}))
    execute(SMALL, folder, resume=True)
    assert caplog.messages == [
        f"{folder.path} was started with torch 1.0 and goes on with {torch.__version__}: "
        "its numbers may differ in their last digits"
    ]


def test_another_gpu_is_warned_of(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = running.environment
    for name in ("one GPU", "another GPU"):
        monkeypatch.setattr(running, "environment", lambda device, gpu=name: known(device) | {"gpu": gpu})
        if name == "one GPU":
            stopped(SMALL, folder)
    execute(SMALL, folder, resume=True)
    assert caplog.messages == [
        f"{folder.path} was started with gpu one GPU and goes on with another GPU: "
        "its numbers may differ in their last digits"
    ]


def test_a_checkpoint_is_committed_after_its_metrics_line(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    lines_at_commit: list[int] = []
    write = checkpoint.write_to_disk

    def count(path: Path, data: bytes) -> None:
        lines_at_commit.append(len(folder.history()))
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_to_disk", count)
    execute(SMALL, folder)
    assert lines_at_commit == [1, 2, 3, 4, 5]
