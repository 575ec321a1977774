"""Specifies what a run leaves in its folder, that the same run leaves the same bytes, and that the recipes work."""

import json
import logging
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GENERAL, using

from cutlayer import recipes, registry
from cutlayer.core.batches import Batching
from cutlayer.core.precision import Precision
from cutlayer.data import Arrays
from cutlayer.data.partition import PARTITIONS
from cutlayer.errors import CheckpointError, ConfigError, CutlayerError, UnknownNameError
from cutlayer.runs import build, config
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, environment, execute

SMALL = Run(
    name="small",
    clients=6,
    per_round=4,
    partition=Choice("dirichlet", {"alpha": 0.5, "min_size": 16}),
    model=Choice("mlp", {"hidden": (8,)}),
    optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.5}),
    batching=Batching(size=8, steps=2),
    rounds=3,
    engine="loop",
)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "runs" / "small")


def names(folder: Folder) -> set[str]:
    return {str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file()}


# -- the folder --------------------------------------------------------------------------------------


def test_a_run_leaves_these_files(folder: Folder) -> None:
    execute(SMALL, folder)
    assert names(folder) == {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "timing.jsonl",
        "ledger.json",
        "model.safetensors",
        "checkpoints/round-000002.safetensors",
        "checkpoints/round-000003.safetensors",
    }
    assert folder.run() == SMALL
    assert json.loads(folder.environment.read_text()) == {**environment(), "engine": "loop"}
    assert [set(line) for line in folder.times()] == [{"round", "seconds", "digest"}] * 3


def spin(started: Event) -> None:
    """Keep one core busy until the process is ended."""
    started.set()
    while True:
        pass


@contextmanager
def busy_core() -> Iterator[None]:
    """Load the machine with a process of our own."""
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Event()
    process = spawn.Process(target=spin, args=(started,), daemon=True)
    process.start()
    try:
        assert started.wait(60)
        yield
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_the_same_command_leaves_the_same_metrics_while_the_machine_is_busy(tmp_path: Path) -> None:
    def run_digits(out: Path) -> dict[str, bytes]:
        command = [sys.executable, "-m", "cutlayer", "run", "digits", "--rounds", "3", "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("metrics.jsonl")}

    idle = run_digits(tmp_path / "idle")
    with busy_core():
        busy = run_digits(tmp_path / "busy")
    assert len(idle) == len(recipes.runs("digits"))
    assert all(len(lines.splitlines()) == 3 for lines in idle.values())
    assert busy == idle
    assert {run.engine for run in recipes.runs("digits")} == {"auto"}
    engines = {Folder(path.parent).run().engine for path in tmp_path.rglob("config.toml")}
    assert len(engines) == 1 and engines < {"loop", "vmap"}  # what auto resolved to, the same for every method


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("method", GENERAL)
def test_the_same_run_leaves_the_same_bytes(method: str, engine: str, tmp_path: Path) -> None:
    run = replace(using(SMALL, method), engine=engine)
    one, other = Folder(tmp_path / "one"), Folder(tmp_path / "other")
    execute(run, one)
    execute(run, other)
    for a, b in ((one.metrics, other.metrics), (one.model, other.model), (one.ledger, other.ledger)):
        assert a.read_bytes() == b.read_bytes()


def test_another_seed_leaves_other_bytes(folder: Folder, tmp_path: Path) -> None:
    execute(SMALL, folder)
    other = Folder(tmp_path / "other")
    execute(replace(SMALL, seed=1), other)
    assert folder.metrics.read_bytes() != other.metrics.read_bytes()
    assert folder.model.read_bytes() != other.model.read_bytes()


def test_a_line_of_metrics_holds_the_record_of_its_round(folder: Folder) -> None:
    training = execute(replace(SMALL, validation=0.2, per_client=True, eval_every=2), folder)
    history = folder.history()
    assert history == training.history
    plain = ["round", "loss", "stopped", "samples", "bytes"]
    measured = [*plain, "test_loss", "test_accuracy", "validation_loss", "validation_accuracy", "clients"]
    assert [list(record) for record in history] == [plain, measured, measured]
    assert list(history[-1]["clients"]) == ["0", "1", "2", "3", "4", "5"]
    assert history[-1]["clients"]["0"].keys() == {"loss", "accuracy"}
    assert history[-1]["samples"] == 3 * 4 * 2 * 8
    # 1437 training samples, of which a fifth are held out.
    assert (len(training.runner.job.data), len(training.validation or ())) == (1150, 287)


def test_the_ledger_adds_up(folder: Folder) -> None:
    execute(SMALL, folder)
    ledger, last = json.loads(folder.ledger.read_text()), folder.history()[-1]
    assert ledger["totals"] == last["bytes"]
    assert ledger["samples"] == last["samples"]
    for kind, total in ledger["totals"].items():
        assert sum(client.get(kind, 0) for client in ledger["per_client"].values()) == total
    # Four clients a round, three rounds: two batches and the model at the end are one round trip each.
    assert sum(ledger["trips"].values()) == 4 * 3 * 3


def test_callbacks_are_called_after_the_commit(folder: Folder) -> None:
    told: list[Any] = []
    training = execute(
        SMALL,
        folder,
        on_start=lambda t: told.append(("start", t.state.round)),
        on_round=lambda t, record: told.append((t.state.round, record, max(folder.store.rounds()))),
    )
    # A round that is told of is already committed.
    assert told == [("start", 0), *((n, training.history[n - 1], n) for n in (1, 2, 3))]


def test_the_engine_that_was_chosen_is_written_down(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    training = execute(replace(SMALL, engine="auto"), folder)
    assert training.runner.backend.engine is not None
    assert folder.surroundings()["engine"] == training.runner.backend.engine.name
    assert caplog.messages[0].startswith(f"engine auto: {training.runner.backend.engine.name}; ")


# -- what was there before -----------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused(folder: Folder) -> None:
    execute(SMALL, folder)
    with pytest.raises(CheckpointError) as error:
        execute(SMALL, folder)
    assert str(error.value) == (
        f"{folder.path} already holds a run (3 rounds done); "
        "go on with --resume, start over with --overwrite, or choose another --out"
    )
    folder.config.unlink()
    with pytest.raises(CheckpointError, match="already holds a run"):
        execute(SMALL, folder)


def test_overwriting_replaces_the_run_and_nothing_else(folder: Folder) -> None:
    execute(SMALL, folder)
    (folder.path / "notes.txt").write_text("mine")
    inner = Folder(folder.path / "inner")
    execute(SMALL, inner)
    execute(replace(SMALL, rounds=1), folder, overwrite=True)
    assert folder.run().rounds == 1
    assert len(folder.history()) == len(folder.times()) == 1
    assert folder.store.rounds() == [1]
    assert (folder.path / "notes.txt").read_text() == "mine"
    assert len(inner.history()) == 3


def test_a_mistake_in_the_new_run_leaves_the_old_one(folder: Folder) -> None:
    execute(SMALL, folder)
    before = {name: (folder.path / name).read_bytes() for name in names(folder)}
    with pytest.raises(CutlayerError, match="has no unit 'nowhere'"):
        execute(replace(SMALL, cut="nowhere"), folder, overwrite=True)
    assert {name: (folder.path / name).read_bytes() for name in names(folder)} == before


def test_a_mistake_in_the_run_leaves_no_folder(folder: Folder) -> None:
    with pytest.raises(CutlayerError, match="has no unit 'nowhere'"):
        execute(replace(SMALL, cut="nowhere"), folder)
    assert not folder.path.exists()


def test_resuming_an_empty_folder_starts_the_run(folder: Folder) -> None:
    assert len(execute(SMALL, folder, resume=True).history) == 3


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as error:
        execute(SMALL, Folder(tmp_path / "file" / "run"))
    assert str(error.value) == (
        f"the run could not be written to {tmp_path}/file/run: Not a directory; nothing has been trained yet. "
        "Make room there or choose another --out, then start again."
    )


def test_a_line_that_a_crash_cut_short_is_left_out(folder: Folder) -> None:
    execute(SMALL, folder)
    whole = folder.metrics.read_text()
    lines = whole.splitlines(keepends=True)
    for end in range(len(whole) - len(lines[-1]), len(whole), 9):
        folder.metrics.write_text(whole[:end])
        assert len(folder.history()) == 2


# -- devices and models --------------------------------------------------------------------------------


def test_a_missing_device_is_refused(folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"^device 'cuda:99' cannot be used here: \S+"):
        execute(replace(SMALL, device="cuda:99"), folder)


@pytest.mark.parametrize("device", ["abacus", "gpu", "mps", "cuda:", "cuda:x", "cpu\n"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError) as found:
        Run(device=device)
    assert str(found.value) == f"unknown device {device!r}; known: cpu, cuda"


@pytest.mark.parametrize(
    ("method", "precision", "warned"),
    [("hosfl", "bf16", True), ("zo_sfl", "bf16", True), ("mu_splitfed", "bf16", True), ("hosfl", "tf32", False),
     ("sfl_v1", "bf16", False), ("fsl_sage", "bf16", False)],
)  # fmt: skip
def test_differences_in_bfloat16_are_warned_of(
    method: str, precision: Precision, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    build.training(replace(SMALL, method=Choice(method), batching=Batching(size=8), precision=precision))
    warning = (
        f"precision bf16: {method} compares passes that differ by little, and bfloat16 may round their differences "
        "away; fp32 and tf32 are safer"
    )
    assert caplog.messages == ([warning] if warned else [])


def test_the_environment_names_the_gpu_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU at {device}")
    assert environment("cuda:1") == {**environment(), "gpu": "the GPU at cuda:1"}


def test_the_global_random_state_is_left_alone(folder: Folder) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    execute(SMALL, folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_computes_with_its_own_number_of_threads(folder: Folder) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    execute(replace(SMALL, cpu_threads=2), folder, on_round=lambda *_: seen.append(torch.get_num_threads()))
    assert (seen, torch.get_num_threads()) == ([2, 2, 2], before)
    assert folder.surroundings()["threads"] == 2


# -- recipes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digits", "fashion_mnist", "cifar10"])
def test_a_recipe_gives_the_basic_methods_side_by_side(name: str) -> None:
    runs = recipes.runs(name)
    assert [run.name for run in runs] == [f"{name}/{m}" for m in ("fedavg", "sl", "sfl_v1", "sfl_v2", "mergesfl")]
    for run in runs:
        # What a file could not spell, a recipe must not hold either.
        assert config.changed(Run(), config.as_dict(run), "a recipe") == run


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(UnknownNameError) as error:
        recipes.runs("digts")
    assert str(error.value) == "unknown recipe 'digts'; did you mean 'digits'?"


ON_DISK = {"fashion_mnist": (60_000, (1, 28, 28)), "cifar10": (50_000, (3, 32, 32))}  # samples, and their shape


@pytest.mark.parametrize("name", ON_DISK)
def test_recipes_of_data_on_disk_build(name: str) -> None:
    """Without their files: the labels of the whole set can be dealt, and a few samples fit the model."""
    num, shape = ON_DISK[name]
    some = Arrays(x=torch.zeros(2, *shape), y=torch.zeros(2, dtype=torch.int64), num_classes=10)
    for run in recipes.runs(name):
        scheme = registry.make("partition", PARTITIONS, run.partition.name, run.partition.options)
        labels = Arrays(x=torch.zeros(num, 1), y=torch.arange(num) % 10, num_classes=10)
        partition = scheme.draw(labels, run.clients, key=run.seed)
        assert run.per_round is not None
        assert len(partition) == run.clients > run.per_round
        assert min(partition.sizes) >= run.batching.size
        model = build.model_of(run, some)
        assert model.predict(model.initial()[0].joined(model.initial()[1]), some.x).shape == (2, 10)


@pytest.mark.parametrize("run", recipes.runs("digits"), ids=lambda run: run.method.name)
def test_digits_runs(run: Run, folder: Folder) -> None:
    history = execute(replace(run, rounds=2), folder).history
    assert history[1]["loss"] < history[0]["loss"]
    assert history[1]["stopped"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("run", recipes.runs("digits"), ids=lambda run: run.method.name)
def test_digits_learns(run: Run, folder: Folder) -> None:
    assert execute(run, folder).history[-1]["test_accuracy"] > 0.93
