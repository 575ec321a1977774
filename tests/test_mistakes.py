"""Specifies errors that show only when a model meets its data: they come early, are explained, and change nothing."""

import functools
import logging
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GENERAL, SEED, TOLD, clients_of, images, simulation
from stopping import SMALL
from torch import Tensor, nn

import cutlayer
from cutlayer import cli, methods, sgd
from cutlayer.core.batches import Batching
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State
from cutlayer.core.values import shared
from cutlayer.data import Arrays, Partition, from_arrays
from cutlayer.errors import ConfigError, CutError, DataError, LawError, PartitionError, UnknownNameError, UsageError
from cutlayer.methods import METHODS, Method
from cutlayer.methods.fedavg import FedAvg
from cutlayer.pieces.losses import bce
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.training import Training
from cutlayer.split import Split

MLP = Choice("mlp", {"hidden": (8,)})


def method_of(name: str, model: nn.Module, cut: int = 1, loss: Any = F.cross_entropy, **options: Any) -> Method:
    return methods.build(name, Split(model, cut, loss=loss), sgd(0.1, momentum=0.5), sgd(0.1, momentum=0.5), **options)


def flat(*layers: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Fully connected layers on the 8x8 images, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers, nn.Linear(8, 10)).to(dtype)


def losses(sim: Any, rounds: int = 2) -> list[float | None]:
    training = Training(runner=sim)
    return [training.round()["loss"] for _ in range(rounds)]


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# -- a run that does not fit its data ------------------------------------------------------------------------

DIGITS = "check the model's options against inputs of shape (1, 8, 8)"
NO_FIT: dict[str, tuple[dict[str, Any], str]] = {
    "channels": (
        {"model": Choice("cnn", {"in_channels": 3})},
        "the model does not fit the data: Given groups=1, weight of size [16, 3, 3, 3], expected input[2, 1, 8, 8] to "
        f"have 3 channels, but got 1 channels instead; {DIGITS}",
    ),
    "classes": (
        {"model": Choice("cnn", {"num_classes": 5})},
        "the model has 5 outputs, but the data have 10 classes; give the model one for each",
    ),
    "a tiny image": (
        {"model": Choice("cnn", {"image_size": 2})},
        "the model 'cnn' with num_classes = 10, in_channels = 1, image_size = 2 is empty: fc1.1.weight has the shape "
        "(64, 0); make it larger",
    ),
    "another image": (
        {"model": Choice("cnn", {"image_size": 28})},
        "the model does not fit the data: mat1 and mat2 shapes cannot be multiplied (2x128 and 1568x64); " + DIGITS,
    ),
    "no width": (
        {"model": Choice("cnn", {"width": 0})},
        "the model 'cnn' with num_classes = 10, in_channels = 1, image_size = 8, width = 0 is empty: conv1.0.weight "
        "has the shape (0, 1, 3, 3); make it larger",
    ),
    "less than no width": (
        {"model": Choice("cnn", {"width": -3})},
        "the model 'cnn' cannot be built with num_classes = 10, in_channels = 1, image_size = 8, width = -3: "
        "Trying to create tensor with negative dimension -3: [-3, 1, 3, 3]",
    ),
    "a layer of nothing": (
        {"model": Choice("mlp", {"hidden": (0,)})},
        "the model 'mlp' with num_classes = 10, in_features = 64, hidden = [0] is empty: fc1.1.weight has the shape "
        "(0, 64); make it larger",
    ),
    "a device without values": (
        {"device": "meta"},
        "unknown device 'meta'; known: cpu, cuda",
    ),
    "an ingress below a sample each": (
        {"model": MLP, "method": Choice("mergesfl", {"seconds_per_sample": (1.0,) * 6, "ingress": 3})},
        "regulated batch sizes: ingress is 3, but each of the round's 4 clients sends at least one sample a step; "
        "give an ingress of at least 4, or fewer clients a round",
    ),
    "seconds for too few clients": (
        {"model": MLP, "method": Choice("mergesfl", {"seconds_per_sample": (1.0,) * 5})},
        "regulated batch sizes: no seconds per sample for client 5; 5 were given",
    ),
    "an ingress alone": (
        {"model": MLP, "method": Choice("mergesfl", {"ingress": 3})},
        "mergesfl: ingress regulates nothing without seconds_per_sample; give that too, or neither",
    ),
    "a largest batch alone": (
        {"model": MLP, "method": Choice("mergesfl", {"largest_batch": 3})},
        "mergesfl: largest_batch regulates nothing without seconds_per_sample; give that too, or neither",
    ),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A run that nobody may lose."""
    folder = Folder(tmp_path_factory.mktemp("done") / "run")
    execute(replace(SMALL, rounds=1), folder)
    return folder


def content(folder: Folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder.path)): p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", NO_FIT)
def test_a_run_that_cannot_work_says_so_and_leaves_the_one_before_it(name: str, done: Folder) -> None:
    changes, message = NO_FIT[name]
    before = content(done)
    with pytest.raises(UsageError) as error:
        execute(replace(SMALL, **changes), done, overwrite=True)
    assert str(error.value) == message
    assert content(done) == before


def test_the_command_line_prints_it_as_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "digits", "--only", "sfl_v1", "--rounds", "1", "--engine", "loop", "--quiet"]
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert not left.value.code
    folder = Folder(Path("runs/digits/sfl_v1/seed-0"))
    before = content(folder)
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "--overwrite", "--set", "model.in_channels=3"])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("error: the model does not fit the data: ") and said.err.endswith(DIGITS + "\n")
    assert content(folder) == before


# -- a rehearsal ---------------------------------------------------------------------------------------------


def test_a_dry_run_changes_neither_the_module_nor_the_generators() -> None:
    split = Split(flat(nn.BatchNorm1d(8), nn.Dropout(0.5)), 2)
    before = {k: v.clone() for k, v in split.model.state_dict().items()}
    state = torch.get_rng_state()
    few = images(2)
    split.rehearse(few.x, few.y, 10)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in split.model.state_dict().items())
    assert split.model.training and all(p.grad is None for p in split.model.parameters())


def test_one_sample_is_no_batch_for_batch_norm() -> None:
    method = method_of("sfl_v1", flat(nn.BatchNorm1d(8)))
    with pytest.raises(ConfigError) as error:
        simulation(method, batching=Batching(size=1))
    assert str(error.value) == (
        "the model does not fit the data: Expected more than 1 value per channel when training, got input size "
        f"torch.Size([1, 8]); {DIGITS}"
    )
    simulation(method, batching=Batching(size=2))
    simulation(method_of("sfl_v1", flat()), batching=Batching(size=1))
    regulated = method_of("mergesfl", flat(nn.BatchNorm1d(8)), seconds_per_sample=(1.0, 1.0, 1.0, 1.0, 9.0))
    with pytest.raises(ConfigError, match="Expected more than 1 value per channel"):
        simulation(regulated)


def test_inputs_and_model_of_different_types_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        simulation(method_of("sfl_v1", flat(dtype=torch.float32)))
    assert str(error.value) == (
        "the model does not fit the data: inputs are torch.float64 and the model is torch.float32; cast one of them, "
        "with data.cast(...) or model.to(...)"
    )


def test_a_model_and_data_on_different_devices_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        simulation(method_of("sfl_v1", flat().to("meta")))
    assert str(error.value) == (
        "the model is on meta and the data are on cpu; move one of them, with data.to(...) or model.to(...)"
    )


def test_several_inputs_are_named_with_their_shapes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 3), nn.Linear(2, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.left(a) + self.right(b)
            return out

    data = from_arrays({"a": np.ones((8, 5)), "b": np.ones((8, 4))}, np.arange(8) % 3)
    with pytest.raises(ConfigError, match=r"inputs of shape \{'a': \(5,\), 'b': \(4,\)\}$"):
        simulation(method_of("sfl_v1", Two()), data, clients_of((8,)))


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (functools.partial(F.cross_entropy, reduction="none"), "tensor of shape (2,)"),
        (nn.CrossEntropyLoss(reduction="none"), "tensor of shape (2,)"),
        (lambda out, y: 1.0, "float"),
    ],
)
def test_a_loss_is_one_number(loss: Any, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        simulation(method_of("sfl_v1", flat(), loss=loss))
    assert str(error.value) == f"the loss gives a {found}; it must be the mean over the batch"


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(), functools.partial(F.cross_entropy, label_smoothing=0.1)]
)
def test_fewer_outputs_than_classes_are_found_also_if_no_sample_shows_it(loss: Any) -> None:
    data = images()
    data = Arrays(x=data.x, y=data.y % 10, num_classes=11)
    with pytest.raises(ConfigError) as error:
        simulation(method_of("sfl_v1", flat(), loss=loss), data)
    assert str(error.value) == "the model has 10 outputs, but the data have 11 classes; give the model one for each"


def test_another_loss_may_have_any_number_of_outputs() -> None:
    def of_the_first(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out[:, 0], y.to(out.dtype))

    sim = simulation(method_of("sfl_v1", flat(nn.Linear(8, 8)), loss=of_the_first), replace(images(), num_classes=30))
    assert sim.round(sim.start()).round == 1


def regression() -> Arrays:
    data = images()
    return Arrays(x=data.x, y=data.x.mean((1, 2, 3)))


def test_cross_entropy_of_real_numbers_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        simulation(method_of("sfl_v1", flat()), regression())
    assert str(error.value) == (
        "the loss is cross entropy, which is for classes, but the targets are real numbers; choose another, such as "
        "loss = 'mse' in a run file, or loss=lambda out, y: F.mse_loss(out.squeeze(1), y) of a Split"
    )


OF_ALL_PAIRS = [
    *(F.mse_loss, nn.L1Loss(), lambda out, y: F.huber_loss(out, y)),
    *(lambda out, y: ((out - y) ** 2).mean(), lambda out, y: (out.double() - y).abs().mean()),
    lambda out, y: -(y * F.logsigmoid(out) + (1 - y) * F.logsigmoid(-out)).mean(),
]


@pytest.mark.parametrize("loss", OF_ALL_PAIRS)
def test_a_loss_that_would_compare_each_output_with_all_targets_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigError) as error:
        simulation(method_of("sfl_v1", flat().append(nn.Linear(10, 1).double()), loss=loss), regression())
    assert str(error.value) == (
        "the loss would broadcast outputs of the shape (2, 1) and targets of the shape (2,); make them equal, such as "
        "lambda out, y: F.mse_loss(out.squeeze(1), y)"
    )


def test_a_column_of_targets_is_not_compared_with_all_outputs_either() -> None:
    data = regression()
    net = flat().append(nn.Linear(10, 1).double()).append(nn.Flatten(0))
    with pytest.raises(ConfigError, match=r"such as lambda out, y: F.mse_loss\(out, y.squeeze\(1\)\)$"):
        simulation(
            method_of("fedavg", net, loss=lambda out, y: ((out - y) ** 2).mean()), replace(data, y=data.y[:, None])
        )


def pairwise(out: Tensor, y: Tensor) -> Tensor:
    """A ranking loss, of all pairs on purpose."""
    apart = (out - out.T) * torch.sign(y[:, None] - y)
    return F.softplus(-apart).mean()


OF_EQUAL_SHAPES = [
    *(lambda out, y: F.mse_loss(out.squeeze(1), y), lambda out, y: ((out.view_as(y) - y) ** 2).mean()),
    *(lambda out, y: ((out[:, 0] - y) ** 2).mean(), lambda out, y: ((out[..., 0] - y) ** 2).mean()),
    *(lambda out, y: ((out - y[:, None]) ** 2).mean(), lambda out, y: ((out.mean(-1) - y) ** 2).mean()),
    *(pairwise, lambda out, y: out.mean(), lambda out, y: (out.mean() - y.mean()) ** 2),
]


@pytest.mark.parametrize("loss", OF_EQUAL_SHAPES)
def test_a_loss_that_makes_the_shapes_equal_trains(loss: Any) -> None:
    sim = simulation(method_of("sfl_v1", flat().append(nn.Linear(10, 1).double()), loss=loss), regression())
    assert sim.round(sim.start()).round == 1


def test_probabilities_are_targets_of_cross_entropy() -> None:
    data = images()
    sim = simulation(method_of("sfl_v1", flat()), Arrays(x=data.x, y=F.one_hot(data.y, 10).double()))
    assert sim.round(sim.start()).round == 1


# -- random numbers that no module tells of -------------------------------------------------------------------


def noisy(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


class Noisy(nn.Module):
    """Its source mentions nothing that draws."""

    def forward(self, x: Tensor) -> Tensor:
        return noisy(x)


@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("cut", [2, 3])
def test_hidden_randomness_is_drawn_from_the_seed_as_well(
    cut: int, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for state, seed in ((0, SEED), (1, SEED), (1, SEED + 1)):
        torch.manual_seed(state)
        method = method_of("sfl_v1", flat(Noisy()), cut)
        assert not method.model.needs_key
        sim = simulation(method, engine=engine, seed=seed)
        assert method.model.needs_key and method.model.random is None
        found.append(losses(sim))
    assert found[0] == found[1] != found[2]
    assert messages(caplog) == []


def test_a_dry_runs_findings_stay_with_the_split() -> None:
    split, few = Split(flat(Noisy()), 1), images(2)
    split.rehearse(few.x, few.y)
    for other in (split.with_cut(3), pickle.loads(pickle.dumps(split))):
        whole = other.initial()[0].joined(other.initial()[1])
        assert other.needs_key and other.random is None
        assert torch.equal(other.whole(whole, few.x, 5)[0], other.whole(whole, few.x, 5)[0])
        assert torch.equal(other.predict(whole, few.x), other.predict(whole, few.x))
    calm = Split(flat(), 1)
    calm.rehearse(few.x, few.y)
    assert not calm.needs_key


class Coin(nn.Module):
    """Draws in Python for a whole batch: as a unit it is not traced."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x if self.draw() > 0.5 else 2 * x


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), random.random, lambda: np.random.rand()])
def test_a_unit_may_draw_on_the_host(draw: Callable[[], float]) -> None:
    found = []
    for state, seed in ((0, SEED), (1, SEED), (1, SEED + 1)):
        torch.manual_seed(state)
        random.seed(state)
        np.random.seed(state)
        sim = simulation(method_of("sfl_v1", flat(Coin(draw), Coin(draw))), engine="auto", seed=seed)
        assert sim.engine_name == "loop"
        found.append(losses(sim))
    assert found[0] == found[1] != found[2]


# -- models that cannot be stacked ------------------------------------------------------------------------------


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 0 else -x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x.unsqueeze(1))[0][:, 0]
        return out


UNSTACKABLE: dict[str, Callable[[], nn.Module]] = {
    "data decide the way": Branching,
    "a plain average": lambda: nn.BatchNorm1d(8, momentum=None),
    "a recurrent layer": Recurrent,
}


@pytest.mark.parametrize("name", UNSTACKABLE)
def test_a_model_that_vmap_cannot_run_runs_on_loop_and_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def sim(engine: str) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            layer = UNSTACKABLE[name]()
        return simulation(method_of("sfl_v1", flat(layer, nn.Tanh()), 3), engine=engine)

    expected = losses(sim("loop"))
    assert messages(caplog) == []
    stacked = sim("vmap")
    found = losses(stacked)
    if stacked.backend.engine.name == "vmap":  # a version of torch that can
        assert found == pytest.approx(expected, rel=1e-9)
        return
    assert found == expected
    (message,) = messages(caplog)
    assert message.startswith("engine loop: vmap cannot run this model (") and len(message) > 50
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert losses(sim("auto")) == expected
    told = messages(caplog, logging.INFO)
    assert told[0].startswith("engine auto: loop; vmap cannot run this model (") and len(told) == 1


def test_a_model_that_vmap_can_run_is_tried_without_a_trace() -> None:
    sim = simulation(method_of("sfl_v1", flat()), engine="vmap")
    assert losses(sim) == pytest.approx(losses(simulation(method_of("sfl_v1", flat()))), rel=1e-9)
    reference = simulation(method_of("sfl_v1", flat()))
    losses(reference)
    assert sim.backend.engine is not None and sim.backend.engine.name == "vmap"
    assert sim.ledger.content() == reference.ledger.content()


# -- the Python interface -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2.5}, "batching: size is 2.5; it must be a whole number"),
        ({"size": True}, "batching: size is True; it must be a whole number"),
        ({"size": None}, "batching: size is None; it must be a whole number"),
        ({"epochs": "2"}, "batching: epochs is '2'; it must be a whole number"),
        ({"steps": 1.0}, "batching: steps is 1.0; it must be a whole number"),
    ],
)
def test_batching_takes_whole_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Batching(**options)
    assert str(error.value) == message
    assert type(Batching(size=np.int64(4)).size) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2.0, True, None])
def test_a_cut_is_a_number_or_a_name(value: Any) -> None:
    with pytest.raises(CutError) as error:
        Split(flat(), value)
    assert str(error.value) == f"cut {value!r} is neither a number of units nor the name of one; give an int or a str"
    if value is not None:
        with pytest.raises(CutError, match=rf"^head {value!r} is neither a number"):
            Split(flat(), 1, head=value)


def test_an_order_that_sl_does_not_know_is_refused() -> None:
    with pytest.raises(UnknownNameError) as error:
        METHODS["sl"](model=Split(flat(), 1), client_opt=sgd(0.1), server_opt=sgd(0.1), order="randm")
    assert str(error.value) == "unknown order 'randm' in sl; did you mean 'random'?"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            [3, 64],
            "client b holds the index 64, but the data have the samples 0 to 63; draw the partition from these data",
        ),
        (
            [3, -1],
            "client b holds the index -1, but the data have the samples 0 to 63; draw the partition from these data",
        ),
        ([0.0, 1.0], "client b holds indices of type float64; give the numbers of its samples"),
    ],
)
def test_a_partition_of_other_data_is_refused(index: list[Any], message: str) -> None:
    partition = Partition((np.arange(8), np.array(index)), ("a", "b"))
    with pytest.raises(PartitionError) as error:
        simulation(method_of("sfl_v1", flat()), images(64), partition)
    assert str(error.value) == message


def test_a_partition_without_clients_and_a_chunk_of_none_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"^the partition has no clients; deal the data to at least one$"):
        Simulation(method_of("sfl_v1", flat()), images(), Partition(()))
    for chunk in (0, 2.5, "x"):
        with pytest.raises(
            ConfigError, match=rf"^chunk is {chunk!r}; it must be at least 1, or None for all clients at"
        ):
            simulation(method_of("sfl_v1", flat()), chunk=chunk)


@method
@dataclass(frozen=True, kw_only=True)
class Silent:
    """A method that tells nothing of its rounds."""

    inner: Any

    @property
    def model(self) -> Split:
        split: Split = self.inner.model
        return split

    def start(self, server: Server, fed: Fed) -> State:
        state: State = self.inner.start(server, fed)
        return state

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        after: State = self.inner.round(state, clients, server, fed)
        return after._replace(report=None)


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_a_method_without_a_report_trains(engine: str) -> None:
    silent, told = (Training(runner=simulation(m, engine="loop")) for m in (
        Silent(inner=method_of("sfl_v1", flat())), method_of("sfl_v1", flat())
    ))  # fmt: skip
    record, other = silent.round(), told.round()
    assert (record["loss"], record["stopped"], record["samples"]) == (None, 0, other["samples"])
    assert all(torch.equal(v, told.state_dict()[k]) for k, v in silent.state_dict().items())
    assert losses(simulation(Silent(inner=method_of("sfl_v1", flat())), engine=engine)) == [None, None]


@pytest.mark.parametrize("name", GENERAL)
def test_a_client_without_weights_is_warned_of_where_it_would_send_its_data(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first unit only flattens its input."""
    for cut in (0, 1):
        sim = simulation(method_of(name, flat(), cut, **TOLD.get(name, {})))
        losses(sim)
        raw = f"cut {cut} leaves no weights at the clients: what goes up as activations is their raw input"
        assert messages(caplog) == ([] if isinstance(sim.method, FedAvg) else [raw])
        caplog.clear()
    simulation(method_of(name, flat(), 2, **TOLD.get(name, {})))
    assert messages(caplog) == []


def test_threads_have_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"^cpu_threads is 4097; it must be at most 4096$"):
        Run(cpu_threads=4097)


X, Y = torch.zeros(8, 2), torch.arange(8) % 4
SOUND: dict[str, Any] = {
    "method": cutlayer.fedavg(model=cutlayer.Split(torch.nn.Linear(2, 4), 1), client_opt=cutlayer.sgd(0.1)),
    "data": cutlayer.from_arrays(X, Y),
    "partition": cutlayer.iid(8, 2, key=0),
    "rounds": 1,
    "batching": cutlayer.Batching(size=2),
}
MADE = "as cutlayer.from_arrays, from_dataset or load make them"
WRONG_TYPES = {
    "data": ((X, Y), f"data is a tuple; give an Arrays, {MADE}"),
    "partition": (
        [[0], [1]],
        "partition is a list; give a Partition, as cutlayer.iid, dirichlet, shards or natural draw one",
    ),
    "batching": (16, "batching is an int; give a Batching, such as Batching(size=32)"),
    "test": ((X, Y), f"the test set is a tuple; give an Arrays, {MADE}"),
    "method": (
        cutlayer.FedAvg(model=torch.nn.Linear(2, 4), opt=cutlayer.sgd(0.1)),
        "the method's model is a Linear; give a Split, such as Split(net, cut=1)",
    ),
    "engine": (7, "engine is 7; give a name such as 'loop', or an engine such as Loop()"),
    "sampler": ("often", "sampler is 'often'; give a function of a Draw, which returns the clients of the round"),
    "on_round": (3, "on_round is 3; give a function of the record of a round"),
    "devices": (
        [1e9],
        "devices is a list; give a Devices, such as Devices(clients=(phone, laptop), server=1e12)",
    ),
    "codecs": ("int8", 'codecs is a str; give a Mapping, such as {"activations": "int8"}'),
    "augment": (
        {"crop": 4},
        "augment is a dict; give an Augment, such as Augment(crop=4, flip=True), or a SampleTransform",
    ),
    "meters": (["memory"], "a meter is a str; give a Meter, an instance of a class with its methods"),
    "seed": (0.5, "seed is 0.5; it must be a whole number"),
    "per_round": ("2", "per_round is '2'; it must be a whole number"),
    "rounds": (1.5, "rounds is 1.5; it must be a whole number"),
    "validation": (X, f"the validation set is a Tensor; give an Arrays, {MADE}"),
    "test_partition": (
        [[0]],
        "test_partition is a list; give a Partition, as cutlayer.iid, dirichlet, shards or natural draw one",
    ),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_python_callers_are_told_what_to_give(name: str) -> None:
    value, message = WRONG_TYPES[name]
    with pytest.raises(ConfigError) as caught:
        cutlayer.train(**{**SOUND, name: value})
    assert str(caught.value) == message
    assert cutlayer.train(**SOUND).history[-1]["round"] == 1


SUCH = "such as cutlayer.sfl_v1(model=Split(net, cut=1), client_opt=sgd(0.1), server_opt=sgd(0.1))"
NO_METHODS: dict[str, tuple[Any, str]] = {
    "a function": (cutlayer.sfl_v1, f"method is sfl_v1 itself; call it with a model and optimisers, {SUCH}"),
    "a class": (FedAvg, f"method is FedAvg itself; call it with a model and optimisers, {SUCH}"),
    "a name": ("sfl_v1", f"method is a str; give a method, {SUCH}"),
    "a module": (nn.Linear(2, 4), f"method is a Linear; give a method, {SUCH}"),
    "a split": (Split(nn.Linear(2, 4), 1), f"method is a Split; give a method, {SUCH}"),
}


@pytest.mark.parametrize("what", NO_METHODS)
def test_what_is_no_method_is_told_what_one_is(what: str) -> None:
    value, message = NO_METHODS[what]
    with pytest.raises(ConfigError) as caught:
        cutlayer.train(**{**SOUND, "method": value})
    assert str(caught.value) == message


WEIGHTS = [torch.zeros(1, requires_grad=True)]
OF_TORCH: dict[str, tuple[Any, str]] = {
    "sgd": (torch.optim.SGD(WEIGHTS, lr=0.1), "SGD, cutlayer.sgd(0.1)"),
    "momentum": (
        torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        "SGD, cutlayer.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.0005)",
    ),
    "adam": (torch.optim.Adam(WEIGHTS, lr=0.01, betas=(0.8, 0.99)), "Adam, cutlayer.adam(0.01, betas=(0.8, 0.99))"),
    "adamw": (torch.optim.AdamW(WEIGHTS, lr=0.01), "AdamW, cutlayer.adamw(0.01)"),
    "another": (torch.optim.RMSprop(WEIGHTS), "RMSprop, cutlayer.sgd, adam or adamw"),
}


@pytest.mark.parametrize("side", ["client_opt", "server_opt"])
@pytest.mark.parametrize("name", [*METHODS, "of somebody's own"])
def test_an_optimiser_of_torch_is_told_what_to_give_instead(name: str, side: str) -> None:
    given = {"model": Split(flat(), 1), "client_opt": sgd(0.1), "server_opt": sgd(0.1)}
    for optimiser, told in OF_TORCH.values():
        kind, _, instead = told.partition(", ")
        with pytest.raises(ConfigError) as caught:
            METHODS.get(name, SplitSGD)(**{**given, side: optimiser})
        assert str(caught.value) == (
            f"{side} is torch's {kind}, which updates the parameters of one module; cutlayer's are functions of the "
            f"settings alone: give {instead}"
        )


@method
@dataclass(frozen=True, kw_only=True)
class SplitSGD:
    """A method of somebody's own, without any check."""

    model: Split
    client_opt: Any
    server_opt: Any


def test_a_word_or_a_number_is_no_optimiser() -> None:
    for wrong in ("sgd", 0.1, torch.optim.SGD):
        with pytest.raises(ConfigError) as caught:
            cutlayer.sfl_v1(model=Split(flat(), 1), client_opt=wrong, server_opt=sgd(0.1))  # type: ignore[arg-type]
        assert str(caught.value) == f"client_opt is {wrong!r}; give an optimiser, such as cutlayer.sgd(0.1)"


@pytest.mark.parametrize("side", ["client_opt", "server_opt"])
def test_what_cannot_begin_and_step_is_no_optimiser(side: str) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(WEIGHTS, lr=0.1), 5)
    given: dict[str, Any] = {"model": Split(flat(), 1), "client_opt": sgd(0.1), "server_opt": sgd(0.1), side: schedule}
    with pytest.raises(ConfigError) as caught:
        cutlayer.sfl_v1(**given)
    assert str(caught.value) == (
        f"{side} is a StepLR, which is no optimiser of cutlayer: give cutlayer.sgd, adam or adamw, with a learning "
        "rate or a schedule of it, such as cutlayer.sgd(cutlayer.schedules.cosine(0.1, rounds=100))"
    )


def test_a_value_of_a_client_cannot_be_unpacked() -> None:
    value: Any = shared("clients", (0, 1), (torch.ones(1), torch.ones(1)))
    with pytest.raises(LawError, match="cannot be unpacked or iterated over: return a NamedTuple"):
        _, _ = value
    with pytest.raises(LawError, match="cannot be unpacked or iterated over: return a NamedTuple"):
        value[0]


def test_a_module_is_no_split() -> None:
    with pytest.raises(ConfigError, match=r"^model is a Sequential; give a Split, such as Split\(net, cut=1\)$"):
        cutlayer.smofi(model=flat(), client_opt=sgd(0.1), server_opt=sgd(0.1))  # type: ignore[arg-type]


def test_labels_of_the_test_set_must_be_classes_of_the_training_data() -> None:
    with pytest.raises(DataError) as caught:
        cutlayer.train(**SOUND, test=cutlayer.from_arrays(X, Y + 4))
    assert str(caught.value) == (
        "the test set has labels up to 7, but the training data have 4 classes; give both the same num_classes"
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def test_a_single_class_is_refused_with_cross_entropy_and_not_with_binary_scores() -> None:
    x = torch.randn(24, 64, generator=torch.manual_seed(0))
    data, halves = from_arrays(x, torch.zeros(24, dtype=torch.int64)), cutlayer.iid(24, 2, key=0)

    def train(outputs: int, loss: Any, data: Arrays = data) -> float:
        net = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, outputs))
        method = method_of("sfl_v1", net, loss=loss)
        return float(cutlayer.train(method, data, halves, rounds=1, batching=Batching(size=6)).history[0]["loss"])

    for outputs, loss in ((1, F.cross_entropy), (10, functools.partial(F.cross_entropy, label_smoothing=0.1))):
        with pytest.raises(ConfigError) as caught:
            train(outputs, loss)
        assert str(caught.value) == (
            "the data have a single class, so there is nothing to tell apart: check the targets, or give num_classes "
            "if other classes are absent"
        )
    assert train(1, bce) > 0
    assert train(3, F.cross_entropy, from_arrays(x, data.y, num_classes=3)) > 0


def test_labels_to_be_ignored_need_a_loss_that_does() -> None:
    y = torch.tensor([0, 1, -100, 1] * 6)
    data, halves = from_arrays(torch.randn(24, 64), y), cutlayer.iid(24, 2, key=0)
    net = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 1))
    good = from_arrays(data.x, y.clamp(min=0))
    for train_on, test_on in ((data, None), (good, data)):
        with pytest.raises(ConfigError) as caught:
            Training(
                runner=Simulation(method_of("sfl_v1", net, loss=bce), train_on, halves, batching=Batching(size=6)),
                test=test_on,
            )
    assert str(caught.value) == (
        "the data have labels -100, which only cross entropy ignores; leave these samples out, or give a loss that does"
    )
