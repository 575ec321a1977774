"""Specifies runs of language models: they leave a normal peft or transformers folder, and go on where they stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping import stopped
from tiny_language import saved, texts, transformers, unsplit

from cutlayer.core.batches import Batching
from cutlayer.runs import build
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, execute

peft = pytest.importorskip("peft", reason="needs cutlayer[llm]")

METHODS: dict[str, dict[str, Any]] = {
    "hosfl": {"perturbations": 2},
    "zo_sfl": {},
    "splitlora": {},
    "splitlora shared": {"mode": "shared_server", "interval": 2},
}
SENTENCES = ("a fine film", "a dull plot", "good film", "a bad plot ?")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a tiny decoder and 48 sentences of SST-2's form."""
    saved(tmp_path / "tiny")
    rows = [f"{SENTENCES[i % 4]}\t{1 - i % 2}" for i in range(48)]
    folder = tmp_path / "SST-2"
    folder.mkdir()
    for name, lines in (("train.tsv", rows), ("dev.tsv", rows[:8])):
        (folder / name).write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return tmp_path


def run_of(name: str, rank: int = 4) -> Run:
    method, options = name.split()[0], METHODS[name]
    return Run(
        data="sst2",
        clients=4,
        per_round=2,
        partition=Choice("iid"),
        model=Choice("causal_lm", {"path": "tiny", "rank": rank}),
        cut="layer2",
        method=Choice(method, options),
        optimiser=Choice("adamw", {"lr": 0.01}),
        batching=Batching(size=4),
        rounds=4,
        engine="loop",
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_run_leaves_adapters_that_peft_puts_on_the_unsplit_model(name: str, data: Path) -> None:
    folder = Folder(data / "run")
    training = execute(run_of(name), folder, root=data)
    assert not folder.model.exists()  # the base is not written again
    assert {file.name for file in folder.pretrained.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    base = transformers.AutoModelForCausalLM.from_pretrained(data / "tiny")
    found = peft.PeftModel.from_pretrained(base, folder.pretrained).eval()
    split, x = training.runner.method.model, texts()
    expected = split.predict(training.model, x)
    answers = split.model.head.answers
    assert torch.allclose(unsplit(found, x)[:, -1][:, answers], expected, atol=1e-6)
    before = build.training(run_of(name), data)
    assert not torch.allclose(split.predict(before.model, x), expected, atol=1e-4)  # they have learnt something


def test_a_model_that_is_trained_in_full_is_left_for_transformers(data: Path) -> None:
    folder = Folder(data / "run")
    run = replace(run_of("hosfl", rank=0), method=Choice("sfl_v1"))
    training = execute(run, folder, root=data)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder.pretrained).eval()
    split, x = training.runner.method.model, texts()
    expected = split.predict(training.model, x)
    assert torch.allclose(unsplit(found, x)[:, -1][:, split.model.head.answers], expected, atol=1e-5)


def test_the_best_adapters_are_kept_beside_the_last(data: Path) -> None:
    best, short = Folder(data / "best"), Folder(data / "short")
    training = execute(replace(run_of("splitlora"), monitor="test_loss", mode="max"), best, root=data)
    assert training.best is not None and training.best.round < 4  # it learns, so the worst loss comes early
    execute(replace(run_of("splitlora"), rounds=training.best.round), short, root=data)
    kept, last = ((f / "adapter_model.safetensors").read_bytes() for f in (best.best_pretrained, short.pretrained))
    assert kept == last
    assert not best.best.exists() and not best.model.exists()


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_goes_on_to_the_same_numbers(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLAYER_DATA", str(data))
    broken, whole = stopped(run_of(name), Folder(data / "broken"), number=2), Folder(data / "whole")
    assert not broken.pretrained.exists()
    execute(run_of(name), broken, resume=True)
    execute(run_of(name), whole)
    assert broken.metrics.read_bytes() == whole.metrics.read_bytes()
    ours, theirs = ((f.pretrained / "adapter_model.safetensors").read_bytes() for f in (broken, whole))
    assert ours == theirs


def test_only_adapters_travel(data: Path) -> None:
    """Rank 4 at q and v of two layers of width 16, whose v is 8 wide: 2 x (4 x (16 + 16) + 4 x (16 + 8)) values."""
    folder = Folder(data / "run")
    execute(run_of("splitlora"), folder, root=data)
    bytes_ = json.loads(folder.ledger.read_text())["totals"]
    values = 2 * (4 * (16 + 16) + 4 * (16 + 8))
    assert bytes_["up_model"] == bytes_["down_model"] == 4 * 2 * 4 * values  # rounds, clients, bytes
