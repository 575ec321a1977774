"""Specifies that the built wheel is complete: installed into an empty environment it trains, from an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import cutlayer
from cutlayer.methods import METHODS

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command that sees nothing of this environment."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CUTLAYER_DATA")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """The command line of a fresh environment, started in an empty folder."""
    home, empty = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", home, cwd=empty)
    version = torch.__version__.partition("+")[0]
    run(home / "bin" / "pip", "install", "--quiet", f"torch=={version}", wheel, cwd=empty)
    assert run(home / "bin" / "pip", "check", cwd=empty).strip() == "No broken requirements found."
    yield lambda *words: run(home / "bin" / "cutlayer", *words, cwd=empty)
    shutil.rmtree(home)  # about a gigabyte


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"cutlayer-{cutlayer.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"cutlayer", info}
    samples = {"cutlayer/data/digits.npz", "cutlayer/planning/samples/devices.csv"}
    assert {"cutlayer/py.typed", *samples, f"{info}/licenses/LICENSE"} <= set(names)
    for ending in (".py", ".toml"):
        source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob(f"*{ending}")}
        assert {name for name in names if name.endswith(ending)} == source


def test_the_installed_command_lists_every_method(installed: Callable[..., str]) -> None:
    found = json.loads(installed("list", "--json"))
    assert [method["name"] for method in found["methods"]] == list(METHODS)


def test_the_installed_command_trains_on_the_embedded_digits(installed: Callable[..., str]) -> None:
    found = json.loads(installed("run", "digits", "--rounds", "1", "--only", "fedavg", "--json"))
    (fedavg,) = found["runs"]
    assert (fedavg["name"], fedavg["rounds"], fedavg["stopped"]) == ("digits/fedavg", [1], 0)
    assert 0 < fedavg["best_accuracy"]["mean"] < 1
    assert fedavg["bytes"]["up"] - fedavg["bytes"]["down"] == 10 * (24 - 8)  # statistics against settings, 10 clients
