"""Specifies tests on samples that devices hold: the figures of a simulation, and nothing leaves that may not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from conftest import BATCH, SEED, agree, clients_of, images, resnet
from in_process import device, join

from cutlayer import methods, optim
from cutlayer.core.program import Program
from cutlayer.core.state import Model
from cutlayer.data.arrays import Arrays
from cutlayer.data.hold_out import hold_out
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.remote.device.session import OwnTests, Session
from cutlayer.remote.joining.join import leaving
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol.messages import Refusal, Work
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.device_tests import DeviceTests
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.tensors.trees import flatten
from cutlayer.runs.examination import Examination, even
from cutlayer.runs.federated import ClientTests
from cutlayer.runs.metrics import accuracy, auc, f1
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


def on_devices(
    method: methods.Method, metrics: Mapping[str, Any], tested: tuple[int, ...], engine: Any, held: Arrays | None = None
) -> Training:
    held = images() if held is None else held
    sessions, examination = Sessions(), Examination.of(method, metrics)
    for client in range(len(TRAINED)):
        tests = OwnTests(held.take(HELD.clients[client]), examination) if client in tested else None
        join(sessions, device(method, images(), TRAINED, BATCH, client, tests=tests))
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
    left = [kind.name for kind in leaving(Program(method), Program(Examination.of(method, metrics)))]
    assert sorted(left) == sorted({*kinds, *(kind.name for kind in leaving(Program(method)))})
    assert ("labels" in left) == (shape == "two-part")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_metric_that_a_client_has_no_value_for_is_left_out_of_the_mean(shape: str) -> None:
    name, head, _ = SHAPES[shape]
    one_class = images().y.clone()
    one_class[HELD.clients[1]] = 0
    held = replace(images(), y=one_class)
    record = on_devices(built(name, head), {"auc": auc}, (1, 3), Loop(), held).round()
    assert record["client_tests"]["client-1"]["auc"] is None
    assert record["federated_auc"] == record["client_tests"]["client-3"]["auc"]
    assert record["federated_loss"] is not None


def asked(function: str, *, tests: bool, size: int) -> str:
    """The reason for which a device of FedAvg refuses to run a function on a batch; empty if it answers."""
    method = built("fedavg")
    own = OwnTests(images().take(range(4)), Examination.of(method, METRICS))
    session = Session(device(method, images(), TRAINED, BATCH, 0, tests=own), number=1)
    model = flatten(Model.joined(*method.model.initial()))
    commands = (
        c.Put(0, model.skeleton),
        c.Batch(1, 2),
        c.Do(3, function, (0, 1, 2)),
        c.Up(("scalars",), (3,)),
    )
    numbers = (*model.numbers, size, 0, 0)
    reply = session.work(
        Work(session=1, number=1, round=1, key=0, token=1, begins=True, tests=tests, list=1,
             commands=commands, numbers=numbers), model.tensors,
    )  # fmt: skip
    assert reply is not None
    return reply.message.reason if isinstance(reply.message, Refusal) else ""


def test_a_device_tests_on_its_test_samples_only_and_on_all_of_them_at_once() -> None:
    assert asked("own.of_whole", tests=True, size=4) == ""
    assert "unknown function 'own.of_whole'" in asked("own.of_whole", tests=False, size=4)
    assert "unknown function 'train'" in asked("train", tests=True, size=4)
    one = asked("own.of_whole", tests=True, size=1)
    assert one == "a batch of this client's test has 4 samples; a server asked for 1"


def test_batches_of_a_test_leave_no_sample_alone() -> None:
    for num in range(2, 3000):
        size = even(num)
        assert num % size != 1 and size <= 258
