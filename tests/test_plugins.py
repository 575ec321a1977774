"""Specifies how names are found: those of the package, of plug-in files, of installed packages, and of former times."""

import hashlib
import importlib.util
import logging
import os
import py_compile
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli import mistake, say  # noqa: F401
from test_report import left

import cutlayer as cl
from cutlayer import plugins, recipes, registry
from cutlayer.cli import catalogue
from cutlayer.data import sources
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.recipes.scale import scaled
from cutlayer.results import report
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run

ALL = (
    "METHODS, MODELS, DATA, ENGINES, PARTITIONS, OPTIMISERS, SCHEDULES, DEVICES, METERS, CODECS, SAMPLERS, LOSSES, "
    "METRICS"
)
ROOM = '''
import cutlayer as cl
from cutlayer.data import Dataset

def method(*, model, client_opt, server_opt, sync="step"):
    """Like SFL-V1."""
    return cl.sfl_v1(model=model, client_opt=client_opt, server_opt=server_opt, sync=sync)

def model(num_classes=10, in_features=64):
    """Like a perceptron."""
    return cl.models.mlp(in_features, (16,), num_classes)

def load(root):
    """Like digits."""
    found = cl.load("digits")
    return Dataset("mine", found.train, found.test)

def optimiser(rate: float):
    """Like SGD."""
    return cl.sgd(rate, momentum=0.9)
'''
TABLES = """
METHODS = {"mine": method}
MODELS = {"mine": model}
DATA = {"mine": load}
OPTIMISERS = {"mine": optimiser}
"""
MINE = {
    "data": "mine",
    "clients": 4,
    "rounds": 2,
    "engine": "loop",
    "model": {"name": "mine"},
    "method": {"name": "mine"},
    "optimiser": {"name": "mine", "rate": 0.1},
}
SAME = {
    **MINE,
    "data": "digits",
    "model": {"name": "mlp", "hidden": [16]},
    "method": {"name": "sfl_v1", "sync": "step"},
    "optimiser": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the tables after the test; installed packages are searched again."""
    tables = registry.TABLES.values()
    before = [(dict(table.data), dict(table.origins)) for table in tables]
    registry._groups[:] = ["cutlayer.plugins"]
    yield
    for table, (entries, origins) in zip(tables, before, strict=True):
        table.data, table.origins = entries, origins
    registry._groups[:] = []
    plugins.LOADED.clear()


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def toml(run: dict[str, Any]) -> str:
    return "".join(f"{key} = {config.literal(value)}\n" for key, value in run.items())


def installed(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip leaves it, with an entry point of the same name as its module."""
    described = folder / f"{name}-1.0.dist-info"
    described.mkdir(parents=True)
    written(described / "METADATA", f"Metadata-Version: 2.1\nName: {name}-kit\nVersion: 1.0\n")
    written(described / "entry_points.txt", f"[cutlayer.plugins]\n{name} = {name}_names\n")
    written(folder / f"{name}_names.py", text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, f"{name}_names", raising=False)


# -- files -------------------------------------------------------------------------------------------------------------


def test_one_file_brings_a_method_a_model_data_and_an_optimiser(say: Any, tmp_path: Path) -> None:  # noqa: F811
    written(tmp_path / "mine.py", ROOM + TABLES)
    written(tmp_path / "mine.toml", toml(MINE))
    written(tmp_path / "same.toml", toml(SAME))
    assert "unknown data set 'mine' in mine.toml" in mistake(say("run", "mine.toml"))
    assert say("run", "mine.toml", "--plugin", "mine.py", "--quiet").code == 0
    assert say("run", "same.toml", "--quiet").code == 0
    ours, theirs = (tmp_path / f"runs/{name}/seed-0/metrics.jsonl" for name in ("mine", "same"))
    assert ours.read_text() == theirs.read_text() and len(ours.read_text().splitlines()) == 2


def test_names_of_a_plugin_are_listed_with_its_file(say: Any, tmp_path: Path) -> None:  # noqa: F811
    written(
        tmp_path / "mine.py",
        ROOM + TABLES + 'SAMPLERS = {"first": lambda: lambda draw: tuple(draw.samples)[: draw.num]}',
    )
    found = say("list", "--plugin", "mine.py", "--json").json
    assert list(found) == ["recipes", *(word.lower() for word in ALL.split(", "))]
    assert found["methods"][-1] == {
        "name": "mine", "about": "Like SFL-V1.", "options": {"sync": "step"}, "needs": [], "source": "mine.py",
    }  # fmt: skip
    assert [(e["name"], e["about"], e["source"]) for e in found["data"]][-2:] == [
        ("text", catalogue.DATA["text"], ""),
        ("mine", "Like digits.", "mine.py"),
    ]
    assert found["optimisers"][-1]["needs"] == ["rate"]
    assert [(e["name"], e["source"]) for e in found["samplers"]] == [
        *((name, "") for name in ("uniform", "weighted", "availability")),
        ("first", "mine.py"),
    ]
    assert [e["name"] for e in found["codecs"]][:4] == ["none", "bf16", "int8", "int4"]
    assert [e["name"] for e in found["meters"]] == ["ledger"]
    assert [e["name"] for e in found["engines"]] == ["auto", "loop", "vmap", "graph", "ray"]
    lines = [" ".join(line.split()) for line in say("list", "methods", "--plugin", "mine.py").out.splitlines()]
    assert "mine Like SFL-V1. mine.py sync=step" in lines


def test_data_must_be_a_data_set(tmp_path: Path) -> None:
    plugins.load([written(tmp_path / "wrong.py", "DATA = {'wrong': lambda root: (1, 2)}")])
    with pytest.raises(ConfigError) as caught:
        sources.load("wrong")
    assert str(caught.value) == (
        "what the data set 'wrong' gives is a tuple; give a Dataset, with its training and its test samples"
    )


def test_a_data_set_of_a_plugin_is_told_the_data_folder(tmp_path: Path) -> None:
    plugins.load([written(tmp_path / "mine.py", ROOM.replace('cl.load("digits")', "root / 1") + TABLES)])
    with pytest.raises(TypeError, match="PosixPath"):
        cl.load("mine", tmp_path)


def test_codecs_of_a_plugin_have_names_in_a_run(tmp_path: Path) -> None:
    plugins.load([written(tmp_path / "codecs.py", "from cutlayer import codecs\nCODECS = {'mine': codecs.int8}")])
    run = config.changed(Run(), {"codecs": {"activations": {"name": "mine", "per": "channel"}}}, "a file")
    assert run.codecs == {"activations": {"name": "mine", "per": "channel"}}
    with pytest.raises(
        UnknownNameError, match=r"^a file, \[codecs.activations\]: unknown codec 'mime'; did you mean 'mine'"
    ):
        config.changed(Run(), {"codecs": {"activations": "mime"}}, "a file")


def test_a_codec_of_a_plugin_needs_its_decorator(tmp_path: Path) -> None:
    bare = """
from dataclasses import dataclass
@dataclass(frozen=True)
class MinMax:
    levels: int = 3
    def encode(self, a, key):
        return a
    def decode(self, code, shape, dtype):
        return code
CODECS = {"minmax": MinMax}
"""
    plugins.load([written(tmp_path / "codecs.py", bare)])
    with pytest.raises(ConfigError) as caught:
        config.changed(Run(), {"codecs": {"activations": "minmax"}}, "a file")
    assert str(caught.value) == ("a file, [codecs.activations]: MinMax is not a codec; decorate its class with @codec")


# -- collisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("METHODS", "sfl_v1"),
        ("MODELS", "cnn"),
        ("DATA", "digits"),
        ("DATA", "sst2"),
        ("ENGINES", "loop"),
        ("PARTITIONS", "iid"),
        ("OPTIMISERS", "sgd"),
        ("SCHEDULES", "cosine"),
        ("DEVICES", "pool"),
        ("METERS", "ledger"),
        ("SAMPLERS", "uniform"),
        ("METRICS", "f1"),
    ],
)
def test_a_name_that_is_taken_is_refused_with_all_of_the_file(tmp_path: Path, word: str, name: str) -> None:
    path = written(tmp_path / "taken.py", f"METHODS = {{'fresh': print}}\n{word} = {{'fresh': print, {name!r}: print}}")
    with pytest.raises(ConfigError) as caught:
        plugins.load([path])
    assert str(caught.value) == (
        f"the plugin {path} has {name!r} in {word}, which there is already; choose another name"
    )
    assert all("fresh" not in table for table in registry.TABLES.values()) and not plugins.LOADED


def test_a_file_may_be_loaded_again_and_name_things_of_the_package_but_not_of_another_file(tmp_path: Path) -> None:
    own = 'METHODS["sfl_v1"] = cl.sfl_v1\nfrom cutlayer.planning.devices import DEVICES'
    one = written(tmp_path / "one.py", ROOM + TABLES + own)
    plugins.load([one])
    plugins.load([one])
    assert registry.TABLES["METHODS"].origins == {"mine": str(one)}
    other = written(tmp_path / "other.py", ROOM + TABLES)
    with pytest.raises(ConfigError, match="'mine' in METHODS, which there is already"):
        plugins.load([other])


@pytest.mark.parametrize("content", ["METHODS = {3: print}", "METHODS = {'mine': 3}", "METHODS = [print]"])
def test_tables_hold_names_and_functions(tmp_path: Path, content: str) -> None:
    path = written(tmp_path / "wrong.py", content)
    with pytest.raises(ConfigError) as caught:
        plugins.load([path])
    assert str(caught.value) == f"METHODS of the plugin {path} must be a dict of names and functions"


# -- installed packages ------------------------------------------------------------------------------------------------


def test_an_installed_package_is_loaded_when_an_unknown_name_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "near", ROOM + TABLES, monkeypatch)
    Run(data="digits", model=Choice("cnn"))
    assert "sfl_v1" in registry.TABLES["METHODS"] and "near_names" not in sys.modules
    run = config.changed(Run(), MINE, "mine.toml")
    assert (run.method, run.optimiser) == (Choice("mine"), Choice("mine", {"rate": 0.1}))
    assert registry.TABLES["METHODS"].origins == {"mine": "near of near-kit"}


def test_installed_packages_are_listed(say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    installed(tmp_path, "near", ROOM + TABLES, monkeypatch)
    assert say("list", "models", "--json").json["models"][-1]["source"] == "near of near-kit"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("x = 1", f"ConfigError: the plugin broken of broken-kit has none of {ALL}, so it brings nothing"),
        (
            "MODELS = {'fresh': print, 'cnn': print}",
            "ConfigError: the plugin broken of broken-kit has 'cnn' in MODELS, which there is already; choose another "
            "name",
        ),
    ],
)
def test_a_broken_package_is_told_of_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    installed(tmp_path / "a", "broken", text, monkeypatch)
    installed(tmp_path / "b", "near", ROOM + TABLES, monkeypatch)
    caplog.set_level(logging.WARNING, "cutlayer")
    assert "mine" in registry.TABLES["MODELS"] and "fresh" not in registry.TABLES["MODELS"]
    assert caplog.messages == [f"the plugin broken of broken-kit is left out: {reason}"]


def test_a_package_that_asks_for_names_while_it_is_loaded_does_not_load_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(
        tmp_path,
        "asking",
        f"import cutlayer.methods as m\nlist(m.METHODS); 'x' in m.METHODS\n{ROOM}{TABLES}",
        monkeypatch,
    )
    assert "mine" in registry.TABLES["METHODS"] and not caplog.messages


# -- runs that were trained before -------------------------------------------------------------------------------------


def test_a_run_of_a_plugin_is_compared_without_it_and_resumed_only_with_it(say: Any, tmp_path: Path) -> None:  # noqa: F811
    written(tmp_path / "mine.py", ROOM + TABLES)
    written(tmp_path / "mine.toml", toml(MINE))
    assert say("run", "mine.toml", "--plugin", "mine.py", "--quiet").code == 0
    for table in registry.TABLES.values():
        table.data.pop("mine", None)
    assert say("run", "digits", "--only", "fedavg", "--rounds", "2", "--engine", "loop", "--quiet").code == 0
    for words in (["compare", "runs"], ["compare", "runs", "--together"], ["compare", "runs", "--traffic"]):
        assert say(*words).code == 0
    rows = say("compare", "runs", "--format", "json").json["runs"]
    assert [(row["name"], row["method"]) for row in rows] == [("digits/fedavg", "fedavg"), ("mine", "mine")]
    config_file = tmp_path / "runs/mine/seed-0/config.toml"
    assert "unknown data set 'mine'" in mistake(say("run", str(config_file), "--resume"))


def test_every_name_of_a_recorded_run_may_be_unknown_but_no_key() -> None:
    lr = {"schedule": "gone", "speed": 3}
    run = Run(
        name="old",
        data="gone",
        engine="gone",
        partition=Choice("gone", {"a": 1}),
        model=Choice("gone", {"sizes": (1, 2)}),
        method=Choice("gone"),
        optimiser=Choice("sgd", {"lr": lr}),
        server_optimiser=Choice("gone"),
        devices=Choice("gone"),
        weights="some.safetensors",
        codecs={"activations": {"name": "gone", "sizes": (1, 2)}, "model": ("gone", "int8")},
    )
    changes = tomllib.loads(config.dumps(run))
    assert config.recorded(changes, "old.toml") == run
    with pytest.raises(UnknownNameError, match=r"unknown key 'rond' in old\.toml"):
        config.recorded({**changes, "rond": 1}, "old.toml")
    with pytest.raises(ConfigError, match="rounds is 0"):
        config.recorded({**changes, "rounds": 0}, "old.toml")


@pytest.mark.parametrize("name", ["digits", "smofi_table2", "cut_table4_as_run", "hasfl_fig8", "hosfl_cifar10"])
def test_a_recorded_run_whose_names_are_known_is_read_as_any_file(name: str) -> None:
    for run in recipes.runs(name):
        changes = tomllib.loads(config.dumps(run))
        assert config.recorded(changes, "x") == config.changed(Run(), changes, "x") == run


# -- recipes of former names -------------------------------------------------------------------------------------------


def test_a_recipe_of_a_former_name_answers_with_the_new_one(say: Any, tmp_path: Path) -> None:  # noqa: F811
    assert mistake(say("run", "smofi_figure1")) == "recipe smofi_figure1 is now called smofi_fig1"
    written(tmp_path / "mine.toml", 'recipe = "smofi_figure11"')
    assert mistake(say("run", "mine.toml")) == "recipe smofi_figure11 is now called smofi_fig11 (in mine.toml)"
    assert set(recipes.RENAMED.values()) <= set(recipes.RECIPES)
    assert not set(recipes.RENAMED) & set(recipes.RECIPES)


@pytest.mark.parametrize("scale", [1, 0.1])
def test_runs_of_a_former_name_are_those_of_the_new_one(tmp_path: Path, scale: float) -> None:
    runs = [scaled(run, scale) for run in recipes.runs("smofi_fig10") if "/cifar10/smofi" in run.name]
    for run in runs:
        old = replace(run, name=run.name.replace("smofi_fig10", "smofi_figure10"))
        left(tmp_path, old, [0.2, 0.8])
    (panel,) = report.compare(report.find([tmp_path])).panels
    assert panel.name == runs[0].name.rpartition("/")[0]
    assert (panel.target, panel.rule) == (0.70, "as the paper sets it")  # of the recipe's, by panel
    assert [group.label for group in panel.groups] == [f"smofi-beta{beta:g}" for beta in (0.1, 0.2, 0.3, 0.4, 0.5)]


# -- as a newcomer writes them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["", "from __future__ import annotations\n"])
def test_signatures_need_no_types_and_no_defaults_for_what_follows_from_the_data(
    say: Any,  # noqa: F811
    tmp_path: Path,
    start: str,
) -> None:
    written(
        tmp_path / "mine.py",
        f"{start}import cutlayer as cl\n"
        "def model(in_features, num_classes, width=16, deep: bool = False):\n"
        "    return cl.models.mlp(in_features, (width,) * (1 + deep), num_classes)\n"
        "MODELS = {'mine': model}\n",
    )
    options = {"name": "mine", "width": 8, "deep": True}
    written(tmp_path / "mine.toml", toml({"clients": 4, "rounds": 1, "model": options}))
    assert say("run", "mine.toml", "--plugin", "mine.py", "--quiet").code == 0
    ran = tomllib.loads((tmp_path / "runs/mine/seed-0/config.toml").read_text())
    assert ran["model"] == options
    written(tmp_path / "mine.toml", toml({"clients": 4, "rounds": 1, "model": {"name": "mine", "wide": 8}}))
    assert "unknown key 'wide'" in mistake(say("run", "mine.toml", "--plugin", "mine.py"))


def test_the_code_that_runs_is_the_code_that_was_hashed(tmp_path: Path) -> None:
    """A forged cache of compiled code, with the size and the time of the file, is what Python itself would run."""
    path = tmp_path / "mine.py"
    path.write_text("SAMPLERS = {'mine': lambda: 'good'}\n")
    forged = tmp_path / "forged.py"
    forged.write_text("SAMPLERS = {'mine': lambda: 'evil'}\n")
    os.utime(forged, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    cache = Path(importlib.util.cache_from_source(str(path)))
    py_compile.compile(str(forged), cfile=str(cache), doraise=True)
    before = cache.read_bytes()
    assert plugins.load([path]) == {"mine.py": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert registry.TABLES["SAMPLERS"].data["mine"]() == "good"
    assert cache.read_bytes() == before  # and nothing is cached


def test_a_model_of_a_plugin_is_profiled(say: Any, tmp_path: Path) -> None:  # noqa: F811
    written(
        tmp_path / "mine.py",
        "from torch import nn\n"
        "def mine(num_classes=10, in_features=64):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, 8), nn.Linear(8, num_classes))\n"
        'MODELS = {"mine": mine}\n',
    )
    assert say("profile", "mine", "--plugin", "mine.py", "--input", "1x8x8").code == 0
    assert mistake(say("profile", "mine", "--plugin", "mine.py")) == (
        "the model 'mine' does not tell what it reads; give the shape of a sample with --input"
    )
