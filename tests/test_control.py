"""Specifies what ends a training early, which model is kept as the best, and that divergence is loud."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GENERAL, TOLD
from safetensors import safe_open
from safetensors.torch import load_file
from stopping import SMALL, outcome, stopped, unbroken
from torch import nn

import cutlayer
from cutlayer import Batching, DivergedError, Partition, Split, StopTraining, cli, from_arrays, iid, sgd, train
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.methods import METHODS
from cutlayer.runs.config import Choice
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute
from cutlayer.runs.stopping import Limits, Monitor, diverged, ends

RISING = Monitor("test_accuracy", "max")


def measured(*values: float | None, key: str = "test_accuracy") -> list[dict[str, Any]]:
    return [{"round": k, "samples": k, key: v} for k, v in enumerate(values, start=1)]


def blobs(num: int = 48) -> cutlayer.Arrays:
    random = np.random.default_rng(0)
    y = np.arange(num) % 3
    return from_arrays(random.normal(size=(num, 5)) + 6 * np.eye(5)[y], y)


def method(lr: float = 0.1) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return cutlayer.sfl_v1(model=Split(net, 2), client_opt=sgd(lr), server_opt=sgd(lr))


def trained(rounds: int = 6, **options: Any) -> cutlayer.Result:
    data = options.pop("data", blobs())
    options = {"test": data, "batching": Batching(size=4), "engine": "loop", **options}
    return train(options.pop("method", method()), data, iid(len(data), 4, key=0), rounds=rounds, **options)


# -- patience ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "min_delta", "idle"),
    [
        ((), 0.0, 0),
        ((0.5,), 0.0, 0),
        ((0.5, 0.5, 0.4), 0.0, 2),  # as good is no gain
        ((0.5, 0.4, 0.6), 0.0, 0),
        ((0.5, 0.55, 0.58, 0.59), 0.1, 3),  # small gains add up only against the last gain
        ((0.5, 0.55, 0.61, 0.62), 0.1, 1),
        ((None, None), 0.0, 1),  # what is not finite is the worst
        ((None, 0.1, None), 0.0, 1),
    ],
)
def test_evaluations_without_a_gain_are_counted(values: tuple[float, ...], min_delta: float, idle: int) -> None:
    assert RISING.idle(measured(*values), min_delta) == idle


def test_a_loss_should_fall() -> None:
    falling = Monitor("test_loss", "min")
    assert falling.idle(measured(3.0, 2.0, 2.5, 2.1, key="test_loss"), 0.0) == 2
    limits = Limits(rounds=9, patience=2)
    assert list(ends(limits, falling, measured(3.0, 2.0, 2.5, 2.1, key="test_loss"))) == [
        "patience: test_loss has gained nothing in 2 evaluations"
    ]
    assert list(ends(limits, falling, measured(3.0, 2.0, 2.5, 1.9, key="test_loss"))) == []


def test_patience_tells_the_gain_that_counts() -> None:
    limits = Limits(rounds=9, patience=2, min_delta=0.1)
    assert list(ends(limits, RISING, measured(0.5, 0.55, 0.58))) == [
        "patience: test_accuracy has gained no more than 0.1 in 2 evaluations"
    ]


def test_rounds_without_an_evaluation_do_not_count() -> None:
    history = [{"round": 1, "test_accuracy": 0.5}, {"round": 2}, {"round": 3}, {"round": 4, "test_accuracy": 0.5}]
    assert RISING.idle(history, 0.0) == 1


MONITORED = {
    "the accuracy of the validation set": ({}, ("test", "validation"), "validation_accuracy", "max"),
    "that of the clients' own sets": ({}, ("test", "federated"), "federated_accuracy", "max"),
    "what is asked for": ({"monitor": "test_loss"}, ("test",), "test_loss", "min"),
    "a metric of one's own": ({"monitor": "test_mine", "mode": "min"}, ("test",), "test_mine", "min"),
    "the worst client": ({"monitor": "federated_loss_worst"}, ("federated",), "federated_loss_worst", "min"),
}


def keys(*sets: str) -> list[str]:
    return [f"{of}_{metric}" for of in sets for metric in ("loss", "accuracy", "mine", "loss_worst")]


@pytest.mark.parametrize("what", MONITORED)
def test_patience_goes_by(what: str) -> None:
    options, sets, key, goal = MONITORED[what]
    assert Limits(patience=3, **options).monitored(keys(*sets)) == Monitor(key, goal)


def test_without_patience_and_monitor_nothing_is_monitored() -> None:
    assert Limits(rounds=3).monitored(keys("test")) is None


def test_monitors_that_cannot_be() -> None:
    with pytest.raises(UnknownNameError, match=r"^unknown metric 'test_acc' in monitor; did you mean 'test_accuracy'"):
        Limits(monitor="test_acc").monitored(keys("test"))
    with pytest.raises(ConfigError) as caught:
        Limits(monitor="test_mine").monitored(keys("test"))
    assert str(caught.value) == "monitor 'test_mine': say whether it should rise or fall, with mode 'max' or 'min'"
    with pytest.raises(ConfigError) as caught:
        trained(test=None, patience=2)
    assert str(caught.value) == "patience and monitor need samples to evaluate on; give a test or a validation set"
    with pytest.raises(ConfigError, match=r"^patience is 0; it must be a whole number of at least 1$"):
        trained(patience=0)
    with pytest.raises(ConfigError, match=r"^min_delta is about the monitored metric, but there is none; add monitor"):
        trained(min_delta=0.1)


IDLE = replace(SMALL, patience=2, rounds=9, optimiser=Choice("sgd", {"lr": 1e-9}), checkpoint_every=4, engine="vmap")


def test_a_run_file_ends_after_so_many_idle_evaluations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch statistics of its layers change nevertheless, so the accuracy is pinned to what is idle."""
    pinned(monkeypatch, [0.2, 0.5, 0.4, 0.5, 0.6])
    folder = Folder(tmp_path / "run")
    with caplog.at_level(logging.INFO, "cutlayer"):
        training = execute(IDLE, folder)
    assert training.state.round == 4 == max(folder.store.rounds())
    assert training.best is not None and training.best.round == 2
    assert caplog.messages[-1] == (
        f"{folder.path}: ended at round 4: patience: test_accuracy has gained nothing in 2 evaluations"
    )


def pinned(monkeypatch: pytest.MonkeyPatch, accuracies: list[float]) -> None:
    """Let the test accuracy of a run be this, round by round."""
    from cutlayer.runs.training import Training

    measure = Training._measured

    def scripted(self: Training) -> Any:
        return {**measure(self), "test_accuracy": accuracies[self.state.round - 1]}

    monkeypatch.setattr(Training, "_measured", scripted)


# -- the best model ----------------------------------------------------------------------------------------------

RISE_AND_FALL = [0.2, 0.6, 0.4, 0.6, 0.1]


@pytest.mark.parametrize("checkpoint_every", [1, 2, 5])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_run_that_was_stopped_keeps_the_same_best_model_and_ends_in_the_same_round(
    number: int, checkpoint_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned(monkeypatch, RISE_AND_FALL)
    run = replace(SMALL, monitor="test_accuracy", patience=3, checkpoint_every=checkpoint_every)
    folder = stopped(run, Folder(tmp_path / "stopped"), number)
    training = execute(run, folder, resume=True)
    whole = unbroken(run, tmp_path)
    assert outcome(folder) == outcome(whole)
    assert folder.best.read_bytes() == whole.best.read_bytes()
    assert training.best is not None and training.best.round == 2  # the first of equals


def test_the_best_model_tells_its_round_and_is_that_rounds_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned(monkeypatch, RISE_AND_FALL)
    run = replace(SMALL, monitor="test_accuracy")
    whole, short = Folder(tmp_path / "whole"), Folder(tmp_path / "short")
    execute(run, whole)
    execute(replace(SMALL, rounds=2), short)
    with safe_open(whole.best, "pt") as file:
        assert json.loads(file.metadata()["best"]) == {"round": 2, "test_accuracy": 0.6}
    best, expected = load_file(whole.best), load_file(short.model)
    assert best.keys() == expected.keys()
    assert all(torch.equal(best[name], expected[name]) for name in expected)
    assert not (short.best).exists()


def test_a_best_model_of_a_round_that_is_played_again_does_not_outlive_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned(monkeypatch, [0.2, 0.3, 0.9, 0.4, 0.1])
    run = replace(SMALL, monitor="test_accuracy", checkpoint_every=2)
    folder = stopped(run, Folder(tmp_path / "run"), 3)  # the checkpoint is of round 2
    with safe_open(folder.best, "pt") as file:
        assert json.loads(file.metadata()["best"])["round"] == 3
    execute(replace(run, rounds=2), folder, resume=True)
    with safe_open(folder.best, "pt") as file:
        assert json.loads(file.metadata()["best"])["round"] == 2


def test_python_returns_the_best_beside_the_last() -> None:
    result = trained(monitor="test_loss")
    losses = [record["test_loss"] for record in result.history]
    assert result.best_round == losses.index(min(losses)) + 1
    known = trained(rounds=result.best_round)
    assert result.best is not None
    assert all(torch.equal(result.best[name], value) for name, value in known.state_dict.items())
    assert trained().best is None


# -- on_round ----------------------------------------------------------------------------------------------------


def stop_at(number: int, *why: str) -> Any:
    def on_round(record: dict[str, Any]) -> None:
        if record["round"] >= number:
            raise StopTraining(*why)

    return on_round


def test_on_round_may_stop_the_training() -> None:
    result = trained(on_round=stop_at(2, "good enough"))
    assert (len(result.history), result.ended) == (2, "on_round stopped it: good enough")
    assert result.history == trained(rounds=6).history[:2]
    assert trained(on_round=stop_at(3)).ended == "on_round stopped it"
    assert trained(on_round=lambda record: True).ended == ""  # whatever it returns


def test_a_run_that_on_round_stopped_is_whole_and_stays_stopped_or_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained(out=out, on_round=stop_at(3), checkpoint_every=10)
    folder = Folder(out)
    assert folder.store.rounds() == [3] and len(folder.history()) == 3
    assert folder.model.exists() and folder.ledger.exists()
    again = trained(out=out, resume=True, on_round=stop_at(3), checkpoint_every=10)
    assert (len(again.history), again.ended) == (3, "on_round stopped it")
    whole = trained(out=out, resume=True)
    assert (whole.history, whole.ended) == (trained().history, "")


def test_an_error_in_on_round_is_no_wish_to_stop() -> None:
    def wrong(record: dict[str, Any]) -> None:
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        trained(on_round=wrong)


# -- divergence --------------------------------------------------------------------------------------------------


def poisoned(clients: int) -> cutlayer.Arrays:
    """Samples of four clients in a row, of which these have a value that is not finite in every sample."""
    x, y = blobs().x.clone(), blobs().y
    x[: 12 * clients] = torch.inf
    return from_arrays(x, y)


FOUR = Partition(tuple(np.arange(12 * k, 12 * (k + 1)) for k in range(4)))
BATCH = Batching(size=4)
WHY = (
    "no client had a batch with a finite loss and finite gradients; lower the learning rate, clip the gradients, or "
    "look for values in the data that are not finite"
)


def test_a_client_that_diverges_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    result = train(method(), poisoned(1), FOUR, rounds=3, batching=BATCH)
    assert [record["stopped"] for record in result.history] == [1, 1, 1]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "round 1: 1 client had gradients that were not finite, and changed nothing from there on; lower the learning "
        "rate or clip the gradients. `stopped` counts such clients in each round"
    ]


def test_the_warning_is_seen_without_any_logging_set_up() -> None:
    script = (
        "import torch, cutlayer as cl\n"
        "x, y = torch.randn(16, 4), torch.arange(16) % 2\n"
        "x[:8] = torch.inf\n"
        "split = cl.Split(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), 1)\n"
        "method = cl.sfl_v1(model=split, client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))\n"
        "parts = cl.Partition((range(8), range(8, 16)))\n"
        "cl.train(method, cl.from_arrays(x, y), parts, rounds=2, batching=cl.Batching(size=4))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stderr.count("1 client had gradients that were not finite") == 1


def test_if_nobody_can_train_python_raises_and_loses_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batching": BATCH, "test": blobs(), "eval_every": 5}
    with pytest.raises(DivergedError) as caught:
        train(method(), poisoned(4), FOUR, rounds=5, out=tmp_path / "run", **settings)
    assert str(caught.value) == f"nobody could train in round 1: {WHY}"
    result = caught.value.result
    assert result.history == Folder(tmp_path / "run").history()
    (record,) = result.history
    assert (record["stopped"], record["loss"], "test_accuracy" in record) == (4, None, True)
    assert Folder(tmp_path / "run").store.rounds() == [1] and Folder(tmp_path / "run").model.exists()
    assert all(torch.isfinite(value).all() for value in result.state_dict.values())
    with pytest.raises(DivergedError, match=r"^nobody could train in round 1: "):  # also when it is resumed
        train(method(), poisoned(4), FOUR, rounds=5, out=tmp_path / "run", resume=True, **settings)


@pytest.mark.parametrize("name", GENERAL)
def test_every_method_tells_that_nobody_could_train(name: str) -> None:
    opt = sgd(0.1, momentum=0.5)
    made = METHODS[name](model=method().model, client_opt=opt, server_opt=opt, **TOLD.get(name, {}))
    with pytest.raises(DivergedError) as caught:
        train(made, poisoned(4), FOUR, rounds=3, batching=BATCH)
    assert [(record["loss"], record["stopped"]) for record in caught.value.result.history] == [(None, 4)]


def dead(*rounds: bool) -> list[dict[str, Any]]:
    return [{"loss": None if d else 1.0, "stopped": 1, "round": k} for k, d in enumerate(rounds, start=1)]


def test_a_sampled_client_without_a_finite_batch_does_not_end_a_run_at_once() -> None:
    assert diverged(dead(False, True), everyone=True, last=False)
    assert not diverged(dead(False, True), everyone=False, last=False)
    assert diverged(dead(False, True, True, True), everyone=False, last=False)
    assert not diverged(dead(True, False, True), everyone=False, last=True)
    assert diverged(dead(True, True), everyone=False, last=True)  # no round of all
    assert not diverged(dead(False), everyone=True, last=True)
    assert not diverged([{"loss": None, "stopped": 0, "round": 1}], everyone=True, last=True)  # of no reports


DIVERGING = ["--set", "optimiser.lr=1e30", "--rounds", "3", "--set", "clients=4", "--set", "per_round=4", "--quiet"]


def test_the_command_line_shows_all_runs_and_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "digits", "--only", "sfl_v1", "--only", "fedavg", *DIVERGING, "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert left.value.code == 3
    assert "stopped" in told.out and "sfl_v1" in told.out and "fedavg" in told.out  # the table has a count
    told_of = " ".join(told.err.split())
    assert f"error: digits/fedavg: nobody could train in round 2: {WHY}" in told_of
    assert "warning: digits/fedavg, seed 0, round 1: 4 clients had gradients that were not finite" in told_of
    folder = Folder(tmp_path / "digits" / "sfl_v1" / "seed-0")
    assert json.loads(folder.ledger.read_text()) and folder.model.exists()
