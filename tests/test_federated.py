"""Specifies federated evaluation: clients test the model on samples that they hold themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from stopping import SMALL, outcome, stopped, unbroken
from torch import nn

import cutlayer
from cutlayer import Arrays, Batching, Partition, Split, from_arrays, iid, natural, sgd, train
from cutlayer.data.hold_out import hold_out
from cutlayer.errors import ConfigError, PartitionError, UnknownNameError
from cutlayer.runs.federated import Figures, summary
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute


def blobs(num: int, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    y = np.arange(num) % 3
    return from_arrays(random.normal(size=(num, 5)) + np.eye(5)[y], y)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(**options: Any) -> cutlayer.Result:
    data = blobs(60)
    method = cutlayer.sfl_v1(model=Split(net(), 2), client_opt=sgd(0.1), server_opt=sgd(0.1))
    options = {"partition": iid(60, 3, key=0), "rounds": 2, "batching": Batching(size=4), **options}
    return train(method, data, **options)


# -- test sets of one's own --------------------------------------------------------------------------------------


def test_clients_test_on_their_own_samples_of_the_test_set() -> None:
    test, parts = blobs(20, seed=1), Partition((np.arange(12), np.arange(12, 16), np.arange(16, 20)))
    last = trained(test=test, test_partition=parts).history[-1]
    model = net()
    model.load_state_dict(trained(test=test).state_dict)
    out = model(test.x).detach()
    right = (out.argmax(1) == test.y).double()
    accuracies = [float(right[index].mean()) for index in parts.clients]
    losses = [float(F.cross_entropy(out[index], test.y[index])) for index in parts.clients]
    assert last["client_tests"] == {
        str(j): {"samples": n, "loss": pytest.approx(loss, rel=1e-6), "accuracy": accuracy}
        for j, (n, loss, accuracy) in enumerate(zip((12, 4, 4), losses, accuracies, strict=True))
    }
    assert last["federated_accuracy"] == pytest.approx(float(right.mean())) == last["test_accuracy"]
    assert last["federated_loss"] == pytest.approx(last["test_loss"], rel=1e-6)
    assert last["federated_accuracy_worst"] == min(accuracies)
    assert last["federated_loss_worst"] == pytest.approx(max(losses), rel=1e-6)
    assert last["federated_accuracy_std"] == pytest.approx(np.std(accuracies))


def test_training_does_not_change_by_being_tested() -> None:
    test = blobs(20, seed=1)
    one, other = trained(test=test), trained(test=test, test_partition=iid(20, 3, key=0))
    assert all(torch.equal(one.state_dict[name], other.state_dict[name]) for name in one.state_dict)
    new = {"client_tests", *(key for key in other.history[0] if key.startswith("federated_"))}
    assert [{k: v for k, v in record.items() if k not in new} for record in other.history] == one.history


def test_clients_are_matched_by_name_and_need_no_test_set() -> None:
    speakers = np.array(["ann", "bob", "cat"])
    parts = natural(speakers[np.arange(60) % 3])
    test = blobs(4, seed=1)
    result = trained(partition=parts, test=test, test_partition=natural(["cat", "cat", "ann", "cat"]))
    assert {name: told["samples"] for name, told in result.history[0]["client_tests"].items()} == {"ann": 1, "cat": 3}


# -- samples that are held out -----------------------------------------------------------------------------------


def test_each_client_holds_out_a_fraction_of_its_own_samples() -> None:
    parts = Partition(tuple(np.split(np.arange(33), [10, 11, 13, 16])), names=("a", "b", "c", "d", "e"))
    kept, held = hold_out(parts, 0.3, key=0)
    assert held.sizes.tolist() == [3, 0, 0, 1, 5] and kept.sizes.tolist() == [7, 1, 2, 2, 12]
    assert kept.names == held.names == parts.names
    for whole, a, b in zip(parts.clients, kept.clients, held.clients, strict=True):
        assert sorted([*a, *b]) == whole.tolist()
    again, other = hold_out(parts, 0.3, key=0)[1], hold_out(parts, 0.3, key=1)[1]
    assert [c.tolist() for c in again.clients] == [c.tolist() for c in held.clients]
    assert [c.tolist() for c in other.clients] != [c.tolist() for c in held.clients]


def test_held_out_samples_are_not_trained_on() -> None:
    result = trained(hold_out=0.25, rounds=1)
    assert {name: told["samples"] for name, told in result.history[0]["client_tests"].items()} == {
        "0": 5, "1": 5, "2": 5
    }  # fmt: skip
    # 15 of 20 samples are left to each client: three batches of four.
    assert result.history[0]["samples"] == 3 * 3 * 4
    assert "test_loss" not in result.history[0]


def test_a_run_file_holds_out_and_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    run = replace(SMALL, hold_out=0.2, monitor="federated_accuracy", patience=4)
    training = execute(run, stopped(run, Folder(tmp_path / "stopped"), 2), resume=True)
    assert outcome(Folder(tmp_path / "stopped")) == outcome(unbroken(run, tmp_path))
    assert training.monitor is not None and training.monitor.key == "federated_accuracy"
    record = training.history[-1]
    assert record["federated_accuracy"] == pytest.approx(
        sum(told["samples"] * told["accuracy"] for told in record["client_tests"].values())
        / sum(told["samples"] for told in record["client_tests"].values())
    )


# -- sums --------------------------------------------------------------------------------------------------------


def test_a_metric_that_a_client_cannot_have_is_left_out_and_a_loss_is_not() -> None:
    found = {
        "a": Figures(1, {"loss": 1.0, "auc": None, "mine": 1.0}),
        "b": Figures(3, {"loss": None, "auc": 0.5, "mine": 2.0}),
        "c": Figures(1, {"loss": 3.0, "auc": 1.0, "mine": 3.0}),
    }
    assert summary(found) == {
        "loss": None, "loss_std": None, "loss_worst": None,
        "auc": 0.625, "auc_std": 0.25, "auc_worst": 0.5,
        "mine": 2.0, "mine_std": pytest.approx((2 / 3) ** 0.5),  # nobody knows which of them is the worst
    }  # fmt: skip


# -- mistakes ----------------------------------------------------------------------------------------------------


def test_other_sets_are_refused() -> None:
    test = blobs(20, seed=1)
    with pytest.raises(ConfigError) as caught:
        trained(test_partition=iid(20, 3, key=0))
    assert str(caught.value) == (
        "test_partition says which client holds which samples of test: give test, and no hold_out"
    )
    with pytest.raises(UnknownNameError, match=r"^unknown client '3' in test_partition; known: 0, 1, 2\.$"):
        trained(test=test, test_partition=iid(20, 4, key=0))
    with pytest.raises(PartitionError, match=r"^client 0 holds the index 20, but the data have the samples 0 to 19;"):
        trained(test=test, test_partition=Partition((np.arange(21),)))
    with pytest.raises(PartitionError) as nobody:
        trained(test=test, test_partition=Partition(([],)))  # type: ignore[arg-type]
    assert str(nobody.value) == "no client holds a sample to test on; give some client one, or leave the tests out"
    with pytest.raises(ConfigError, match=r"^hold_out is 1.5; give a fraction between 0 and 1$"):
        trained(hold_out=1.5)
