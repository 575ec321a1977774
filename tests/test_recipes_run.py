"""Specifies that every recipe runs: two rounds of each, with a few random samples and narrow models."""

import json
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import distance
from safetensors.torch import load_file
from test_recipes import BY_NAME
from torch import Tensor

from cutlayer import recipes
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, execute

each_recipe = pytest.mark.parametrize("name", recipes.RECIPES)

CLIENTS = 2
SMALLER: dict[str, dict[str, Any]] = {  # options of models that make them small
    "cnn": {"width": 2},
    "resnet18": {"width": 2},
    "resnet34": {"width": 2},
    "resnet50": {"width": 2},
    "vgg11": {"width": 2, "classifier": (4,)},
    "vgg16": {"width": 2, "classifier": (4,)},
    "mobilenet_v2": {"width": 0.1},
    "densenet121": {"growth": 2},
    "densenet169": {"growth": 2},
    "char_transformer": {"width": 8, "heads": 2},
    "causal_lm": {"rank": 2},  # its path leads to a tiny one
}
STILL = Choice("sgd", {"lr": 1e-9})
FASTER: dict[str, dict[str, Any]] = {"hasfl": {"interval": 2}, "fsl_sage": {"align_epochs": 1}}  # options of methods


def shrunk(run: Run) -> Run:
    """The run with two clients of a few samples, a narrow model, and two rounds of a step or two."""
    steps = None if run.batching.steps is None else 1
    partition = run.partition
    if partition.name == "dirichlet":
        partition = Choice("dirichlet", {**partition.options, "alpha": 5.0, "min_size": 2})
    elif partition.name == "natural":
        partition = Choice("natural", {"min_size": 2})
    if run.method.name == "mu_splitfed":  # which diverges from random weights at its own rates
        run = replace(run, optimiser=STILL, server_optimiser=STILL)
    return replace(
        run,
        subset=0.01 if run.data == "digits" else run.subset,  # which are built in, not written for this test
        clients=CLIENTS,
        per_round=None,
        partition=partition,
        model=Choice(run.model.name, {**run.model.options, **SMALLER[run.model.name]}),
        weights=None,  # those of large models do not fit
        method=Choice(run.method.name, {**run.method.options, **FASTER.get(run.method.name, {})}),
        batching=replace(run.batching, size=2, epochs=1, steps=steps),
        rounds=2,
        until_samples=None,
        eval_every=1,
        engine="loop",
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random pixels, letters and sounds in the published formats, a few samples each."""
    root = tmp_path_factory.mktemp("data")
    for name, shape, classes in (
        ("fashion_mnist", (28, 28), 10),
        ("cifar10", (3, 32, 32), 10),
        ("cifar100", (3, 32, 32), 100),
        ("tiny_imagenet", (3, 64, 64), 200),
        ("ham10000", (3, 64, 64), 7),
    ):
        random = np.random.default_rng(0)
        x = {f"x_{part}": random.integers(0, 256, (num, *shape), np.uint8) for part, num in SETS.items()}
        y = {f"y_{part}": np.arange(num) % classes for part, num in SETS.items()}
        np.savez(root / f"{name}.npz", **x, **y)
    _write_shakespeare(root / "shakespeare")
    _write_speech(root / "speech_commands")
    _write_texts(root)
    return root


SETS = {"train": 8, "test": 2}


def _write_shakespeare(folder: Path) -> None:
    letters = np.random.default_rng(0).choice(list("abcdefgh .,"), 200)
    windows = ["".join(letters[i : i + 80]) for i in range(4)]
    said = {"x": windows, "y": list("abca")}
    for part in SETS:
        (folder / part).mkdir(parents=True)
        users = {"user_data": dict.fromkeys(("HAMLET", "OPHELIA"), said)}
        (folder / part / "all.json").write_text(json.dumps(users))


def _write_speech(folder: Path) -> None:
    random = np.random.default_rng(0)
    for word in ("yes", "no"):
        (folder / word).mkdir(parents=True)
        for number in range(5):
            with wave.open(str(folder / word / f"{number:08x}_nohash_0.wav"), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes(random.integers(-3000, 3000, 16_000, np.int16).tobytes())
    (folder / "testing_list.txt").write_text("yes/00000000_nohash_0.wav\nno/00000000_nohash_0.wav\n")
    (folder / "validation_list.txt").write_text("")


def _write_texts(root: Path) -> None:
    columns = {
        "sst2": {"text": "fine film"},
        "wsc": {"text": "It was a dull plot", "span1": "plot", "span2": "It"},
        "rte": {"premise": "a fine film", "hypothesis": "a film"},
    }
    for task, row in columns.items():
        (root / task).mkdir()
        for file, part in (("train", "train"), ("val", "test")):
            rows = [json.dumps({**row, "label": i % 2}) for i in range(SETS[part])]
            (root / task / f"{file}.jsonl").write_text("\n".join(rows))


def _write_decoder(folder: Path) -> None:
    from tiny_language import saved  # skips where cutlayer[llm] is not installed

    if not folder.exists():
        saved(folder, num_hidden_layers=9)


def ran(run: Run, data: Path, folder: Path) -> list[dict[str, Any]]:
    """The two rounds of a shrunk run, in numbers."""
    small = shrunk(run)
    if run.model.name == "causal_lm":
        _write_decoder(data / run.model.options["path"])
    execute(small, Folder(folder / run.name), root=data)
    records = Folder(folder / run.name).history()
    assert [record["round"] for record in records] == [1, 2]
    for record in records:
        assert record["loss"] is not None and record["test_loss"] is not None
        assert record.get("stopped", 0) == 0
        assert ("simulated_seconds" in record) == (run.devices is not None)
    return records


@each_recipe
def test_the_last_run_of_each_recipe_runs(name: str, data: Path, tmp_path: Path) -> None:
    assert len(ran(recipes.runs(name)[-1], data, tmp_path)) == 2  # a split one where there are any


@pytest.mark.slow
@each_recipe
def test_every_run_of_each_recipe_runs(name: str, data: Path, tmp_path: Path) -> None:
    for run in recipes.runs(name):
        assert len(ran(run, data, tmp_path)) == 2


def test_sfl_v1_with_the_optimiser_of_fedavg_is_fedavg(data: Path, tmp_path: Path) -> None:
    def weights(name: str) -> dict[str, Tensor]:
        run = BY_NAME[f"cut_table3_as_paper/cifar10/{name}"]
        ran(run, data, tmp_path)
        return load_file(Folder(tmp_path / run.name).path / "model.safetensors")

    fedavg = weights("fedavg")
    assert distance(fedavg, weights("sfl_v1-sgd-cut1")) < 1e-5
    assert distance(fedavg, weights("sfl_v1-cut1")) > 1e-3  # the length of one of Adam's four steps
