"""Specifies that what a run leaves is the unsplit model itself: strict, bit for bit, and as accurate as it was."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import GENERAL, using
from safetensors.torch import load_file
from torch import nn

from cutlayer import models
from cutlayer.core.batches import Batching
from cutlayer.data import load
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, execute

SMALL = Run(
    name="small",
    clients=6,
    per_round=4,
    partition=Choice("dirichlet", {"alpha": 0.5, "min_size": 16}),
    model=Choice("resnet_tiny", {"width": 4}),
    optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.5}),
    batching=Batching(size=8, steps=3),
    rounds=2,
    engine="loop",
)
MODELS = {
    "batch normalisation": {},
    "u-shape": {"head": "head"},
    "all at the client": {"cut": "head"},
    "all at the server": {"cut": 0},
    "cnn": {"model": Choice("cnn", {"width": 4})},
    "mlp": {"model": Choice("mlp")},
}


def built(run: Run) -> nn.Module:
    """The model of the registry, with weights of its own."""
    return models.build(run.model.name, **run.model.options)


def accuracy_of(model: nn.Module) -> float:
    test = load("digits").test
    model.eval()
    with torch.no_grad():
        return float((model(test.x).argmax(1) == test.y).double().mean())


# How a method holds its model and how the model is cut do not meet: every method once, and every shape once.
SHAPES = [*((method, "batch normalisation") for method in GENERAL), *(("sfl_v1", s) for s in MODELS if MODELS[s])]


@pytest.mark.parametrize(("method", "shape"), SHAPES)
def test_the_file_loads_strictly_and_is_as_accurate_as_the_last_line(method: str, shape: str, tmp_path: Path) -> None:
    run = replace(using(SMALL, method), **MODELS[shape])
    folder = Folder(tmp_path / "run")
    training = execute(run, folder)
    model = built(run)
    assert str(model.load_state_dict(load_file(folder.model), strict=True)) == "<All keys matched successfully>"
    assert accuracy_of(model) == folder.history()[-1]["test_accuracy"]
    for name, value in training.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_integer_buffers_are_in_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    execute(SMALL, folder)
    counters = {k: v for k, v in load_file(folder.model).items() if k.endswith("num_batches_tracked")}
    assert len(counters) == len([m for m in built(SMALL).modules() if isinstance(m, nn.BatchNorm2d)])
    # Averaged by maximum: two rounds of three steps at every client, on either side of the cut.
    assert {(int(v), v.dtype) for v in counters.values()} == {(6, torch.int64)}


def tied() -> nn.Sequential:
    """Two layers that share their weights."""
    one, two = nn.Linear(64, 64), nn.Linear(64, 64)
    two.weight = one.weight
    return nn.Sequential(nn.Flatten(), one, nn.ReLU(), two, nn.ReLU(), nn.Linear(64, 10))


def test_tied_weights_are_in_it_under_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "tied", tied)
    folder = Folder(tmp_path / "run")
    execute(replace(SMALL, model=Choice("tied")), folder)
    model = tied()
    model.load_state_dict(load_file(folder.model), strict=True)
    assert model[1].weight is model[3].weight
    assert accuracy_of(model) == folder.history()[-1]["test_accuracy"]


def test_the_weights_did_move(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    initial = execute(replace(SMALL, rounds=1, optimiser=Choice("sgd", {"lr": 1e-30})), folder).state_dict()
    other = Folder(tmp_path / "other")
    execute(SMALL, other)
    trained = load_file(other.model)
    assert all(not torch.equal(trained[k], v) for k, v in initial.items() if v.is_floating_point())
