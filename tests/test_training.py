"""Specifies training from Python: what goes in, what is measured and when, and what comes back."""

import itertools
import json
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GENERAL, OWN_LENGTH, TOLD, agree, images, resnet
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import cutlayer
from cutlayer import Arrays, Batching, Partition, Split, from_arrays, from_dataset, iid, natural, sgd, train
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError, DataError
from cutlayer.methods import METHODS, Method, global_model
from cutlayer.runs import evaluation
from cutlayer.runs.evaluation import evaluate
from cutlayer.runs.stopping import Limits
from cutlayer.runs.training import Training

CLIENTS = 4
BATCH = Batching(size=4, steps=2)


def batching(method: str) -> Batching:
    """A method that counts the mini-batches of a round itself is told no number of steps."""
    return Batching(size=4) if method in OWN_LENGTH else BATCH


def mlp(outputs: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same small model at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)


def blobs(num: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Three classes that a line can part."""
    random = np.random.default_rng(0)
    y = np.arange(num) % 3
    return random.normal(size=(num, 5)) + 6 * np.eye(5)[y], y


def method_of(name: str, model: nn.Module, cut: int | str = 2, lr: float = 0.1, **options: Any) -> Method:
    opt = sgd(lr, momentum=0.5)
    return METHODS[name](model=Split(model, cut, **options), client_opt=opt, server_opt=opt, **TOLD.get(name, {}))


def sfl(model: nn.Module, *args: Any, **options: Any) -> Method:
    return method_of("sfl_v1", model, *args, **options)


# -- what goes in ----------------------------------------------------------------------------------


ROUNDS = {"hosfl": 40, "mu_splitfed": 400, "zo_sfl": 100}  # of one step, or without gradients


@pytest.mark.parametrize("method", GENERAL)
def test_every_method_learns_from_arrays_in_memory(method: str) -> None:
    data = from_arrays(*blobs())
    result = train(
        method_of(method, mlp()),
        data,
        iid(len(data), CLIENTS, key=0),
        rounds=ROUNDS.get(method, 10),
        test=data,
        batching=batching(method),
        seed=1,
    )
    assert result.history[-1]["test_accuracy"] == 1.0
    model = mlp()
    model.load_state_dict(result.state_dict, strict=True)
    assert float((model(data.x).argmax(1) == data.y).double().mean()) == 1.0


def test_a_torch_data_set_gives_what_its_arrays_give() -> None:
    x, y = blobs()
    arrays = from_arrays(x, y)
    dataset = from_dataset(TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y)))
    partition = iid(len(y), CLIENTS, key=0)
    one, other = (train(sfl(mlp()), d, partition, rounds=2, batching=BATCH, engine="loop") for d in (arrays, dataset))
    agree(one.state_dict, other.state_dict, 0)
    assert one.history == other.history


class Patient(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scan = nn.Linear(5, 6)
        self.age = nn.Linear(1, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, scan: Tensor, age: Tensor) -> Tensor:
        return self.head(torch.relu(self.scan(scan) + self.age(age)))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_inputs_may_be_a_dict_for_a_module_of_several(engine: str) -> None:
    x, y = blobs()
    data = from_arrays({"scan": x, "age": np.ones((len(y), 1))}, y)
    torch.manual_seed(0)
    model = Patient()
    method = sfl(model, "relu")
    assert method.model.units == ("add", "relu", "head")
    result = train(method, data, iid(len(y), CLIENTS, key=0), rounds=10, test=data, batching=BATCH, engine=engine)
    model.load_state_dict(result.state_dict)
    assert result.history[-1]["test_accuracy"] == 1.0
    assert float((model(**data.x).argmax(1) == data.y).double().mean()) == 1.0
    assert result.engine == engine


def absolute_error(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).abs()


def test_a_regression_has_its_own_loss_and_metrics() -> None:
    x, _ = blobs()
    data = from_arrays(x, x[:, 3:4] - 2 * x[:, 4:5])
    result = train(
        sfl(mlp(outputs=1), lr=0.05, loss=F.mse_loss),
        data,
        iid(len(data), CLIENTS, key=0),
        rounds=60,
        test=data,
        batching=Batching(size=4),
        metrics={"error": absolute_error},
    )
    first, last = result.history[0], result.history[-1]
    assert {k for k in last if k.startswith("test")} == {"test_loss", "test_error"}
    assert last["test_loss"] < 0.5 < 3 < first["test_loss"]
    model = mlp(outputs=1)
    model.load_state_dict(result.state_dict)
    assert last["test_error"] == pytest.approx(absolute_error(model(data.x), data.y).mean().item(), rel=1e-6)


def test_a_regression_without_metrics_is_measured_by_its_loss() -> None:
    data = from_arrays(blobs()[0], blobs()[0][:, :1])
    result = train(
        sfl(mlp(outputs=1), loss=F.mse_loss), data, iid(len(data), 4, key=0), rounds=1, test=data, batching=BATCH
    )
    assert [k for k in result.history[0] if k.startswith("test")] == ["test_loss"]


def test_clients_may_be_those_that_the_data_has() -> None:
    x, y = blobs()
    writers = np.array(["ann", "bob", "cat"])[np.arange(len(y)) // 16]
    data = from_arrays(x, y)
    partition = natural(writers)
    result = train(sfl(mlp()), data, partition, rounds=2, batching=BATCH, per_client=True)
    model = mlp()
    model.load_state_dict(result.state_dict)
    rows = slice(16, 32)
    assert list(result.history[-1]["clients"]) == ["ann", "bob", "cat"]
    assert result.history[-1]["clients"]["bob"] == {
        "loss": pytest.approx(F.cross_entropy(model(data.x[rows]), data.y[rows]).item(), rel=1e-6),
        "accuracy": float((model(data.x[rows]).argmax(1) == data.y[rows]).double().mean()),
    }


@pytest.mark.parametrize("method", GENERAL)
def test_a_model_in_double_precision_trains_on_data_in_double_precision(method: str) -> None:
    data = from_arrays(*blobs()).cast(torch.float64)
    partition = iid(len(data), CLIENTS, key=0)
    options: dict[str, Any] = {"rounds": 2, "batching": batching(method)}
    result = train(method_of(method, mlp(dtype=torch.float64)), data, partition, test=data, **options)
    assert {v.dtype for v in result.state_dict.values()} == {torch.float64}
    single = from_arrays(*blobs())
    other = train(method_of(method, mlp()), single, partition, test=single, **options)
    assert result.history[-1]["test_loss"] != other.history[-1]["test_loss"]
    assert result.history[-1]["test_loss"] == pytest.approx(other.history[-1]["test_loss"], rel=1e-5)


def test_the_given_module_is_only_read() -> None:
    model, before = mlp(), mlp().state_dict()
    data = from_arrays(*blobs())
    train(sfl(model), data, iid(len(data), CLIENTS, key=0), rounds=1, batching=BATCH)
    agree(dict(model.state_dict()), dict(before), 0)
    assert model.training


# -- what comes back -------------------------------------------------------------------------------


def test_a_record_holds_this() -> None:
    """Two clients of 8 samples, one batch of 8 each: every number by hand."""
    data = from_arrays(*blobs(16))
    partition = Partition((np.arange(8), np.arange(8, 16)))
    told: list[dict[str, Any]] = []
    result = train(
        sfl(mlp(), lr=0.5),
        data,
        partition,
        rounds=2,
        test=data.take(range(6)),
        validation=data.take(range(6, 10)),
        batching=Batching(size=8),
        engine="loop",
        on_round=told.append,
    )
    assert told == result.history
    start = mlp()
    losses = [F.cross_entropy(start(data.x[rows]), data.y[rows]).item() for rows in (slice(8), slice(8, 16))]
    first, last = result.history
    assert list(last) == [
        "round", "loss", "stopped", "samples", "bytes",
        "test_loss", "test_accuracy", "validation_loss", "validation_accuracy",
    ]  # fmt: skip
    assert (first["round"], last["round"]) == (1, 2)
    assert first["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert (first["samples"], last["samples"], last["stopped"]) == (16, 32, 0)
    # Client side: 5 x 8 weights and 8 biases. Cut: 8 numbers a sample. Two clients, two rounds, 4 bytes a number.
    assert last["bytes"] == {
        "down_model": 48 * 4 * 4,
        "down_settings": 8 * 4,
        "up_activations": 8 * 8 * 4 * 4,
        "up_labels": 8 * 8 * 4,
        "down_gradients": 8 * 8 * 4 * 4,
        "up_model": 48 * 4 * 4,
    }
    assert last["bytes"] == {k: 2 * v for k, v in first["bytes"].items()}
    end = mlp()
    end.load_state_dict(result.state_dict)
    out = end(data.x[6:10])
    assert last["validation_loss"] == pytest.approx(F.cross_entropy(out, data.y[6:10]).item(), rel=1e-6)
    assert last["validation_accuracy"] == float((out.argmax(1) == data.y[6:10]).double().mean())
    agree(dict(method_export(result)), dict(result.state_dict), 0)


def method_export(result: cutlayer.Result) -> dict[str, Tensor]:
    return Split(mlp(), 2).export(global_model(result.state))


def test_measuring_happens_every_so_often_and_at_the_end() -> None:
    data = from_arrays(*blobs())
    result = train(
        sfl(mlp()), data, iid(len(data), 4, key=0), rounds=5, test=data, batching=BATCH, eval_every=2, per_round=2
    )
    assert [r["round"] for r in result.history if "test_accuracy" in r] == [2, 4, 5]
    # Two clients a round, two batches of 4 each.
    assert [r["samples"] for r in result.history] == [16, 32, 48, 64, 80]


def test_measuring_does_not_change_the_training() -> None:
    """BatchNorm: a forward pass in training mode would move its statistics."""
    data = images(60)
    partition = iid(60, 3, key=0)
    seen, unseen = (
        train(
            sfl(resnet(), 1),
            data,
            partition,
            rounds=2,
            batching=BATCH,
            engine="loop",
            test=test,
            per_client=per_client,
        )
        for test, per_client in ((data, True), (None, False))
    )
    agree(seen.state_dict, unseen.state_dict, 0)
    assert "test_loss" not in unseen.history[0]


def test_the_seed_decides() -> None:
    data = from_arrays(*blobs())
    partition = iid(len(data), CLIENTS, key=0)

    def trained(seed: int) -> cutlayer.Result:
        return train(sfl(mlp()), data, partition, rounds=2, batching=BATCH, seed=seed, engine="vmap", per_round=2)

    one, same, other = trained(0), trained(0), trained(1)
    agree(one.state_dict, same.state_dict, 0)
    assert one.history == same.history
    assert not torch.equal(one.state_dict["0.weight"], other.state_dict["0.weight"])


@pytest.mark.parametrize("method", GENERAL)
def test_numbers_that_are_not_finite_are_none_and_clients_that_stopped_are_counted(method: str) -> None:
    x, y = blobs(16)
    x[3] = np.inf
    data = from_arrays(x, y)
    partition = Partition((np.arange(8), np.arange(8, 16)))
    result = train(
        method_of(method, mlp()), data, partition, rounds=1, test=data, batching=Batching(size=8), per_client=True
    )
    (record,) = result.history
    assert record["stopped"] == 1
    assert all(torch.isfinite(v).all() for v in result.state_dict.values())
    assert (record["loss"] is None) == (record["samples"] == 0)
    json.dumps(record, allow_nan=False)


# -- measuring -------------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_all_samples_whatever_the_batch() -> None:
    data = from_arrays(*blobs(47))
    split = Split(mlp(), 1)
    model = split.initial()[0].joined(split.initial()[1])
    out = split.model(data.x).detach()
    expected = {
        "loss": float(F.cross_entropy(out.double(), data.y)),
        "top": float(out.max(1).values.double().mean()),
    }
    for batch in (1, 7, 47, 512):
        found = evaluate(split, model, data, {"top": lambda out, y: out.max(1).values}, batch)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("room", [1, 5, 30])
def test_evaluation_takes_half_as_many_samples_at_a_time_where_memory_is_short(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = from_arrays(*blobs(47))
    split = Split(mlp(), 1)
    model = split.initial()[0].joined(split.initial()[1])
    tried, outputs, released = [], [], []
    monkeypatch.setattr(evaluation, "release", lambda: released.append([output() for output in outputs]))

    def cramped(out: Tensor, y: Tensor) -> Tensor:
        tried.append(len(y))
        outputs.append(weakref.ref(out))
        if len(y) > room:
            raise torch.OutOfMemoryError
        return out.max(1).values

    found = evaluate(split, model, data, {"top": cramped})
    whole = evaluate(split, model, data, {"top": lambda out, y: out.max(1).values})
    assert found == pytest.approx(whole, rel=1e-6)
    sizes = list(itertools.takewhile(lambda size: size > room, tried))
    assert sizes == [size for size in (47, 23, 11, 5, 2) if size > room]
    assert sum(tried[len(sizes) :]) == 47
    assert released == [[None] * (k + 1) for k in range(len(sizes))]  # nothing of what was tried is held by then


def test_an_evaluation_that_has_no_room_for_one_sample_or_fails_otherwise_fails() -> None:
    data, split = from_arrays(*blobs(4)), Split(mlp(), 1)
    model = split.initial()[0].joined(split.initial()[1])
    errors = iter([*[torch.OutOfMemoryError] * 3, *[RuntimeError] * 2])  # tried on a batch, then on all samples

    def fails(out: Tensor, y: Tensor) -> Tensor:
        raise next(errors)(f"with {len(y)}")

    with pytest.raises(torch.OutOfMemoryError, match="with 1"):
        evaluate(split, model, data, {"top": fails})
    with pytest.raises(RuntimeError, match="with 4"):
        evaluate(split, model, data, {"top": fails})


def test_evaluation_runs_in_eval_mode_and_leaves_the_model_alone() -> None:
    split = Split(resnet(), 2)
    model = split.initial()[0].joined(split.initial()[1])
    before = {k: v.clone() for k, v in {**model.params, **model.buffers}.items()}
    data = images(20)
    found = evaluate(split, model, data, {})
    agree({**model.params, **model.buffers}, before, 0)
    whole = resnet().eval()
    assert found["loss"] == pytest.approx(F.cross_entropy(whole(data.x), data.y).item(), rel=1e-12)


def test_a_partition_may_hold_plain_lists() -> None:
    x, y = blobs(12)
    data = from_arrays(x, y)
    lists = Partition(([0, 1, 2, 3], [4, 5, 6, 7], range(8, 12), []))  # type: ignore[arg-type]
    arrays = Partition(tuple(np.array(c, dtype=np.int64) for c in lists.clients))
    assert all(c.dtype == np.int64 for c in lists.clients)
    found, expected = (
        train(sfl(mlp()), data, partition, rounds=2, batching=Batching(size=2)) for partition in (lists, arrays)
    )
    agree(found.state_dict, expected.state_dict, 0)


def test_impossible_settings_are_refused() -> None:
    data = from_arrays(*blobs())
    partition = iid(len(data), CLIENTS, key=0)
    with pytest.raises(ConfigError, match=r"^eval_every is 0; it must be at least 1$"):
        train(sfl(mlp()), data, partition, rounds=1, batching=BATCH, eval_every=0)
    with pytest.raises(ConfigError, match=r"^rounds is -1; it must be a whole number of at least 0$"):
        train(sfl(mlp()), data, partition, rounds=-1, batching=BATCH)
    nothing = data.take([])
    with pytest.raises(DataError) as error:
        train(sfl(mlp()), data, partition, rounds=1, batching=BATCH, test=nothing)
    assert str(error.value) == "the test set has no samples; give at least one, or leave it out"


@pytest.mark.parametrize("engine", [Loop, None, 7, object()])
def test_an_engine_is_a_name_or_an_engine(engine: Any) -> None:
    data = from_arrays(*blobs())
    with pytest.raises(ConfigError) as caught:
        train(sfl(mlp()), data, iid(48, CLIENTS, key=0), rounds=1, batching=BATCH, engine=engine)
    assert str(caught.value) == f"engine is {engine!r}; give a name such as 'loop', or an engine such as Loop()"


def test_a_training_can_be_driven_round_by_round() -> None:
    data = from_arrays(*blobs())
    sim = cutlayer.runs.simulation.Simulation(
        sfl(mlp()), data, iid(len(data), CLIENTS, key=0), batching=BATCH, engine="loop"
    )
    training = Training(runner=sim, test=data, limits=Limits(rounds=2))
    assert [training.round()["round"], training.round()["round"]] == [1, 2]
    whole = train(sfl(mlp()), data, sim.job.partition, rounds=2, test=data, batching=BATCH, engine="loop")
    assert training.history == whole.history
    agree(training.state_dict(), whole.state_dict, 0)


def test_no_rounds_give_the_initial_model() -> None:
    data: Arrays = from_arrays(*blobs())
    result = train(sfl(mlp()), data, iid(len(data), CLIENTS, key=0), rounds=0, batching=BATCH)
    agree(dict(result.state_dict), dict(mlp().state_dict()), 0)
    assert result.history == [] and result.engine == "vmap"
