"""Specifies that an engine, a meter, a data set or a method of a plug-in file is as good as those of the package."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SEED, agree, clients_of, images, run, simulation
from in_process import deployment
from test_engines_agree import CASES, OPTIMISERS, Outcome, must_agree, on_loop
from test_remote import method_of

from cutlayer import methods, plugins, registry
from cutlayer.core.batches import Batching
from cutlayer.core.method import global_model
from cutlayer.engines.auto import ENGINES
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.vmap import Vmap
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute
from cutlayer.split import Split

ENGINE = '''
from cutlayer.engines.loop import Loop

class Backwards(Loop):
    """Loop, with the clients in the other order."""

    name = "backwards"

    def call(self, fn, values, ids):
        return super().call(fn, values, tuple(reversed(ids)))

    def grad(self, fn, values, ids, *, cut):
        return super().grad(fn, values, tuple(reversed(ids)), cut=cut)

ENGINES = {"backwards": lambda setting: Backwards()}
'''
METER = '''
class Steps:
    """Counts the mini-batches of all clients."""

    def __init__(self):
        self.steps = 0

    def stepped(self, sizes):
        self.steps += len(sizes)

    def crossed(self, kind, direction, value): ...
    def waited(self, ids): ...
    def sent(self, kind, origin, to, value): ...

    def content(self):
        return {"steps": self.steps}

    def restore(self, content):
        self.steps = content["steps"]

    def metrics(self):
        return {"client_steps": self.steps}

METERS = {"steps": Steps}
'''
DATA = '''
import torch
import cutlayer as cl
from cutlayer.data import Dataset

def stripes(root):
    """Rows or columns of ones in noise."""
    random = torch.Generator().manual_seed(0)
    def some(num):
        y = torch.randint(2, (num,), generator=random)
        x = 0.3 * torch.randn(num, 1, 8, 8, generator=random)
        for i, upright in enumerate(y.tolist()):
            x[i, 0, ::2] += 1.0 - upright
            x[i, 0, :, ::2] += float(upright)
        return cl.from_arrays(x, y, num_classes=2)
    return Dataset("stripes", some(160), some(80))

DATA = {"stripes": stripes}
'''


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = {word: (dict(table.data), dict(table.origins)) for word, table in registry.TABLES.items()}
    loaded = list(plugins.LOADED)
    yield
    for word, table in registry.TABLES.items():
        table.data, table.origins = before[word]
    plugins.LOADED[:] = loaded


def load(folder: Path, text: str) -> None:
    file = folder / "mine.py"
    file.write_text(text, encoding="utf-8")
    plugins.load([file])


@pytest.mark.parametrize("case", ["fedavg", "sfl_v1", "smofi", "mergesfl", "hosfl"])
def test_an_engine_gives_loops_numbers(case: str, tmp_path: Path) -> None:
    load(tmp_path, ENGINE)
    sim = simulation(method_of(case), batching=CASES[case].batching, engine="backwards")
    assert sim.engine_name == "backwards" and "backwards" in ENGINES
    must_agree(Outcome(run(sim), sim.ledger), on_loop(case, "momentum", "two-part", torch.float64), 1e-12)


SMALL = Run(clients=4, rounds=2, method=Choice("sfl_v1"), batching=Batching(size=8, steps=3), engine="loop")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_meter_reports_in_the_metrics_and_goes_on_with_its_run(engine: str, tmp_path: Path) -> None:
    load(tmp_path, METER)
    folder = Folder(tmp_path / "run")
    given = replace(SMALL, meters=("steps",), engine=engine)
    execute(given, folder)
    execute(replace(given, rounds=4), folder, resume=True)
    assert [record["client_steps"] for record in folder.history()] == [12, 24, 36, 48]
    assert folder.run().meters == ("steps",)


def test_a_meter_that_learnt_to_be_restored_starts_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after = METER.index("    def content"), METER.index("    def metrics")
    load(tmp_path, METER[:before] + METER[after:])
    folder = Folder(tmp_path / "run")
    given = replace(SMALL, meters=("steps",))
    execute(given, folder)
    (tmp_path / "newer").mkdir()
    registry.TABLES["METERS"].data.pop("steps")
    load(tmp_path / "newer", METER)
    execute(replace(given, rounds=4), folder, resume=True)
    assert [record["client_steps"] for record in folder.history()] == [12, 24, 12, 24]
    assert caplog.messages == [f"{folder.path}: the checkpoint has no state of Steps, which starts over"]


def test_a_data_set_trains_and_is_written_down(tmp_path: Path) -> None:
    load(tmp_path, DATA)
    folder = Folder(tmp_path / "run")
    execute(replace(SMALL, data="stripes", rounds=5), folder)
    assert folder.history()[-1]["test_accuracy"] > 0.9 and folder.run().data == "stripes"


def outside(tmp_path: Path) -> Any:
    """The method of the page about methods."""
    page = (Path(__file__).parents[1] / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    (text,) = (block for block in blocks if "class SplitSGD" in block)
    ending = (
        "\n\nMETHODS = {'split_sgd': lambda *, model, client_opt, server_opt: SplitSGD(model=model, opt=client_opt)}\n"
    )
    load(tmp_path, text + ending)
    opt = OPTIMISERS["momentum"]
    return methods.build("split_sgd", Split(method_of("sfl_v1").model.model, 1), opt, opt)


@pytest.mark.parametrize("place", ["loop", "vmap", "graph", "devices", "devices and a stacking server"])
def test_a_method_gives_loops_numbers_everywhere(place: str, tmp_path: Path) -> None:
    mine, batching = outside(tmp_path), CASES["sfl_v1"].batching
    if place.startswith("devices"):
        engine = Vmap() if "stacking" in place else None
        runner: Any = deployment(mine, images(), clients_of(), batching=batching, seed=SEED, engine=engine)
    else:
        engine = Graph(Again(torch.device("cpu")), 5) if place == "graph" else place
        runner = simulation(mine, batching=batching, engine=engine)
    expected = simulation(mine, batching=batching, engine="loop")
    agree(global_model(run(runner)), global_model(run(expected)), 1e-12)
    assert runner.ledger.content() == expected.ledger.content()
