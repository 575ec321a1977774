"""Specifies that the examples run as they stand, in an empty folder, and show what they claim."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutlayer as cl

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
NOTEBOOK = json.loads((FOLDER / "tour.ipynb").read_text(encoding="utf-8"))


def ran(folder: Path, script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in this folder, on one core, with the cutlayer of this process."""
    here = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(Path(cl.__file__).parents[1])}
    env = {**os.environ, **here, **variables}
    return subprocess.run([sys.executable, script], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def printed(folder: Path, name: str) -> str:
    done = ran(folder, FOLDER / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert shape_of(done.stdout) == shape_of(shown(name))
    return done.stdout


def shown(name: str) -> str:
    """The output of an example in the README."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^\$ (?:\S+=\S+ )?python {name}\.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return block


def shape_of(text: str) -> str:
    return re.sub(r"\d[\d,.]*", "#", text)


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)]


@pytest.mark.slow
def test_each_hospital_tests_the_regression_on_its_own_patients(tmp_path: Path) -> None:
    whole, *hospitals = numbers(r"R2 (-?[\d.]+)", printed(tmp_path, "hospital"))
    assert whole > 0.6  # a constant has 0 at most
    assert len(hospitals) == 5 and min(hospitals) > 0.3


@pytest.mark.slow
def test_bert_learns_across_a_cut(tmp_path: Path) -> None:
    if not (Path(os.environ.get("CUTLAYER_DATA") or ".") / "sst2.parquet").is_file():
        pytest.skip("needs sst2.parquet in CUTLAYER_DATA")
    out = printed(tmp_path, "bert")
    losses = numbers(r"loss ([\d.]+)", out)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.55 < 0.67 < losses[0]
    assert numbers(r"accuracy ([\d.]+)", out)[-1] > 0.6


@pytest.mark.slow
def test_bert_says_which_file_it_needs(tmp_path: Path) -> None:
    done = ran(tmp_path, FOLDER / "bert.py", CUTLAYER_DATA="")
    assert done.returncode == 1
    assert done.stderr == f"no sst2.parquet in {tmp_path}; point CUTLAYER_DATA or --data at its folder\n"


@pytest.mark.slow
def test_the_own_method_sends_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    out = printed(tmp_path, "own_method")
    sfl_v1, one_byte = numbers(r"([\d,]+) bytes", out)
    assert 0.25 < one_byte / sfl_v1 < 0.26
    assert min(numbers(r"accuracy ([\d.]+)", out)) > 0.85


@pytest.mark.slow
def test_the_segmentation_finds_the_discs_and_no_mask_leaves(tmp_path: Path) -> None:
    out = printed(tmp_path, "segmentation")
    assert numbers(r"IoU ([\d.]+)", out)[-1] > 0.7
    assert "crosses the cut: first_1 (8, 24, 24), hidden (8, 12, 12)\n" in out
    assert "sent by clients: up_activations, up_gradients, up_model, up_scalars\n" in out


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    out = printed(tmp_path, "resume")  # asserts it itself
    assert out.endswith("the same bits: 6 tensors and 6 records\n")
    assert "stopped: round 2, on_round stopped it: enough for today\n" in out
    for folder in ("whole", "parts"):
        assert len((tmp_path / "runs" / folder / "metrics.jsonl").read_text().splitlines()) == 6


def test_every_example_is_listed() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert SCRIPTS == ["bert", "hospital", "own_method", "resume", "segmentation"]
    for name in (*(f"{name}.py" for name in SCRIPTS), "tour.ipynb"):
        assert f"[`{name}`]({name})" in page
    assert "(examples/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text("\n".join(code_cells()), encoding="utf-8")
    done = ran(tmp_path, script)
    assert done.returncode == 0, done.stderr
    fedavg, sfl_v1, sfl_v2 = numbers(r": ([\d.]+) over all clients", done.stdout)
    assert fedavg == sfl_v1 < sfl_v2
    assert (tmp_path / "tour.png").stat().st_size > 0
    assert [line.split()[0] for line in done.stdout.splitlines() if re.match(r" \w+ +\d+\.\d ± ", line)] == [
        "fedavg",
        "sfl_v1",
        "sfl_v2",
    ]


def test_the_notebook_is_one_that_readers_take() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    keys = {"markdown": {"cell_type", "id", "metadata", "source"}}
    keys["code"] = keys["markdown"] | {"execution_count", "outputs"}
    assert all(set(cell) == keys[cell["cell_type"]] for cell in NOTEBOOK["cells"])
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_the_notebook_begins_with_the_ten_lines_of_the_readme() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        r"^## Ten lines of Python\n.*?^```python\nimport .*?\n\n(.*?)print", page, re.MULTILINE | re.DOTALL
    )
    assert set(block.splitlines()) <= set(code_cells()[0].splitlines())


@pytest.mark.parametrize("build", [cl.sfl_v1, cl.sfl_v2])
def test_bert_trains_to_the_same_numbers_on_every_engine(build: Callable[..., Any]) -> None:
    data = phrases()
    loop = trained(build, data, "loop")
    for engine in ("vmap", "auto"):
        other = trained(build, data, engine)
        assert other.engine == "vmap"
        torch.testing.assert_close(other.state_dict, loop.state_dict, rtol=1e-9, atol=1e-9)
        for key in ("loss", "test_loss"):
            assert other.history[-1][key] == pytest.approx(loop.history[-1][key], abs=1e-9)
    assert trained(build, data, "loop", dropout=0.0).history[-1]["loss"] != pytest.approx(loop.history[-1]["loss"])


def test_the_trained_bert_is_one_of_transformers() -> None:
    data = phrases()
    result = trained(cl.sfl_v1, data, "auto")
    whole = bert().eval()
    whole.load_state_dict(result.state_dict)
    with torch.no_grad():
        loss = whole(**data.x, labels=data.y).loss
    assert result.history[-1]["test_loss"] == pytest.approx(loss.item(), abs=1e-9)


def test_bert_resumes_with_the_same_bits(tmp_path: Path) -> None:
    data = phrases()
    whole = trained(cl.sfl_v2, data, rounds=3, out=tmp_path / "whole")
    trained(cl.sfl_v2, data, rounds=1, out=tmp_path / "parts")
    resumed = trained(cl.sfl_v2, data, rounds=3, out=tmp_path / "parts", resume=True)
    assert all(torch.equal(resumed.state_dict[name], value) for name, value in whole.state_dict.items())


def phrases() -> cl.Arrays:
    """Items of different lengths, as `transformers.Trainer` takes them."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (46,), generator=random).tolist()
    items = [
        {
            "input_ids": torch.randint(5, 60, (length,), generator=random).tolist(),
            "attention_mask": [1] * length,
            "labels": length % 2,
        }
        for length in lengths
    ]
    return cl.from_dataset(items, pad=0)


def bert(dropout: float = 0.1) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config).double()


def trained(
    build: Callable[..., Any], data: cl.Arrays, engine: str = "auto", dropout: float = 0.1, **options: Any
) -> cl.Result:
    split, opt = cl.Split(bert(dropout), cut="bert.encoder.layer.0", sample=data.x), cl.adamw(0.01)
    method = build(model=split, client_opt=opt, server_opt=opt)
    options = {"rounds": 1, "test": data, "batching": cl.Batching(size=4, drop_last=False), **options}
    return cl.train(method, data, cl.iid(46, 3, key=0), engine=engine, **options)
