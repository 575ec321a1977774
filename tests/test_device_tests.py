"""Specifies tests on samples that devices hold: the figures of a simulation, and nothing leaves that may not."""

from collections.abc import Mapping
from typing import Any

import pytest
from conftest import BATCH, SEED, agree, clients_of, images, resnet
from in_process import device, join

from cutlayer import methods, optim
from cutlayer.core.program import Program
from cutlayer.data.hold_out import hold_out
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.remote.device.join import leaving
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.device_tests import DeviceTests
from cutlayer.remote.server.sessions import Sessions
from cutlayer.runs.examination import Examination, even
from cutlayer.runs.federated import ClientTests
from cutlayer.runs.metrics import accuracy, f1
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.training import Training
from cutlayer.split import Split

FRACTION = 0.3
METRICS = {"accuracy": accuracy, "f1": f1}
OPT = optim.sgd(0.05, momentum=0.9)
SIZES = (12, 20, 9, 16, 7)
TRAINED, HELD = hold_out(clients_of(SIZES), FRACTION, key=5)


def built(name: str, head: int | None = None) -> methods.Method:
    return methods.build(name, Split(resnet(), 1, head=head), OPT, OPT)


def simulated(method: methods.Method, metrics: Mapping[str, Any]) -> Training:
    sim = Simulation(method, images(), TRAINED, batching=BATCH, seed=SEED, engine="loop")
    return Training(runner=sim, client_tests=ClientTests(images(), HELD), metrics=metrics)


def on_devices(method: methods.Method, metrics: Mapping[str, Any], tested: tuple[int, ...], engine: Any) -> Training:
    sessions, examination = Sessions(), Examination.of(method, metrics)
    for client in range(len(TRAINED)):
        tests = images().take(HELD.clients[client]) if client in tested else None
        own = device(method, images(), TRAINED, BATCH, client, tests=tests)
        if tests is not None:
            object.__setattr__(own, "program", Program(method, examination=examination))
        join(sessions, own)
    backend = DeviceBackend(
        method=method,
        sessions=sessions,
        sample=images().take([0, 1]),
        examination=examination,
        gather=lambda _: tuple(sessions.present()),
        engine=engine,
    )
    tests = DeviceTests(backend=backend, examination=examination, certain=True, seed=SEED, precision="fp32")
    runner = Rounds(method, backend, batching=BATCH, seed=SEED)
    return Training(runner=runner, client_tests=tests, metrics=metrics)


EVERYBODY = tuple(range(5))
SHAPES = {
    "two-part": ("sfl_v1", None, METRICS),
    "u-shaped": ("sfl_v1", 4, METRICS),
    "whole models": ("fedavg", None, METRICS),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("engine", (Loop(), Vmap()), ids=("loop", "vmap"))
def test_devices_find_what_the_simulation_finds(shape: str, engine: Any) -> None:
    name, head, metrics = SHAPES[shape]
    expected = simulated(built(name, head), metrics)
    found = on_devices(built(name, head), metrics, EVERYBODY, engine)
    for _ in range(2):
        ours, theirs = found.round(), expected.round()
        tests, same = ours.pop("client_tests"), theirs.pop("client_tests")
        agree(list(tests.values()), list(same.values()), 1e-9)
        figures = {key: value for key, value in theirs.items() if key.startswith("federated_")}
        assert {"federated_loss", "federated_accuracy", "federated_accuracy_worst"} <= figures.keys()
        agree({key: ours[key] for key in figures}, figures, 1e-9)
        assert ours["bytes"] == theirs["bytes"]  # tests are not in the ledger


def test_only_devices_that_hold_test_samples_are_asked() -> None:
    record = on_devices(built("sfl_v1"), METRICS, (1, 3), Loop()).round()
    assert list(record["client_tests"]) == ["client-1", "client-3"]
    weights = [len(HELD.clients[j]) for j in (1, 3)]
    values = [record["client_tests"][f"client-{j}"]["accuracy"] for j in (1, 3)]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert record["federated_accuracy"] == pytest.approx(mean)


def test_without_test_samples_a_record_has_no_such_figures() -> None:
    record = on_devices(built("sfl_v1"), METRICS, (), Loop()).round()
    assert not [key for key in record if key.startswith(("federated", "client_tests"))]


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ("two-part", ["activations", "labels", "model"]),
        ("u-shaped", ["activations", "gradients", "scalars", "model"]),
        ("whole models", ["scalars", "model"]),
    ],
)
def test_labels_that_stay_in_training_stay_in_tests(shape: str, kinds: list[str]) -> None:
    name, head, metrics = SHAPES[shape]
    method = built(name, head)
    program = Program(method, examination=Examination.of(method, metrics))
    left = [kind.name for kind in leaving(program)]
    assert sorted(left) == sorted({*kinds, *(kind.name for kind in leaving(Program(method)))})
    assert ("labels" in left) == (shape == "two-part")


def test_batches_of_a_test_leave_no_sample_alone() -> None:
    for num in range(2, 3000):
        size = even(num)
        assert num % size != 1 and size <= 258
