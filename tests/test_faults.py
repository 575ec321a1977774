"""Specifies that a client whose loss is not finite stops with its last finite weights, without a host sync."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    NUM_UNITS,
    SIZES,
    agree,
    clients_of,
    distance,
    images,
    resnet,
    run,
    sgd_by_hand,
    simulation,
    walk,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.state import State
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.split import Split

OPT = optim.sgd(0.05, momentum=0.9)
ENGINES = ("loop", "vmap")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "sl": ("sl", {}),
    "sfl_v1": ("sfl_v1", {}),
    "sfl_v1 epoch": ("sfl_v1", {"sync": "epoch"}),
    "sfl_v1 step": ("sfl_v1", {"sync": "step"}),
    "sfl_v2": ("sfl_v2", {}),
    "sfl_v2 client": ("sfl_v2", {"interleave": "client"}),
    "mergesfl": ("mergesfl", {}),
}
PLACEMENTS = [(1, None), (1, 4), (0, None), (NUM_UNITS, None), (1, 1)]  # also without a client, and without a server
BAD_CLIENT, BAD_STEP = 1, 2  # of five steps


def spoilt(value: float, samples: np.ndarray, data: Arrays) -> Arrays:
    """The data with this number in some of the samples."""
    x = data.x.clone()
    x[torch.from_numpy(samples)] = value
    return Arrays(x=x, y=data.y, num_classes=data.num_classes)


def bad_data(value: float = torch.nan) -> Arrays:
    return spoilt(value, walk(clients_of()).samples(BAD_CLIENT, BAD_STEP), images())


def one_round(
    case: str,
    engine: str,
    data: Arrays,
    cut: int = 1,
    head: int | None = None,
    partition: Partition | None = None,
    opt: optim.Transform = OPT,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> State:
    name, options = CASES[case]
    method = methods.build(name, Split(resnet(), cut, head=head, loss=loss), opt, opt, **options)
    return run(simulation(method, data, partition, engine=engine), rounds=1)


def values(state: State) -> dict[str, Tensor]:
    model = methods.global_model(state)
    return {**model.params, **model.buffers}


def report(state: State) -> dict[str, float]:
    return {name: float(value) for name, value in state.report.tree._asdict().items()}


# -- Stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "head", "bad"), [*((*at, torch.nan) for at in PLACEMENTS), (1, None, torch.inf)])
@pytest.mark.parametrize("case", CASES)
def test_one_client_stops_and_the_others_go_on(case: str, cut: int, head: int | None, bad: float) -> None:
    states = [one_round(case, engine, bad_data(bad), cut, head) for engine in ENGINES]
    for state in states:
        told = report(state)
        assert told["stopped"] == 1
        assert told["batches"] == 16 - 3  # its third, fourth and fifth step do not count
        assert 0 < told["loss"] < 13 * 10
        assert all(value.isfinite().all() for value in tree.tensors((state.client.tree, state.server.tree)))
    agree(values(states[1]), values(states[0]))
    agree(states[1].report.tree, states[0].report.tree)


@pytest.mark.parametrize("head", (None, 4))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_stops_keeps_what_it_had_before(engine: str, case: str, head: int | None) -> None:
    """Alone, with a bad third batch: the round is the first two steps, running statistics and all.

    With plain SGD, because averaging at every step starts the server's momentum over.
    """
    alone, data = clients_of((20,)), images(20)
    batches = [walk(alone).samples(0, step) for step in range(5)]
    bad = spoilt(torch.nan, batches[2], data)
    found = one_round(case, engine, bad, head=head, partition=alone, opt=optim.sgd(0.05))
    expected = sgd_by_hand(resnet(), data, batches[:2], lr=0.05)
    agree(values(found), {name: expected[name] for name in values(found)})


def only_client(kept: int) -> Partition:
    """The clients as they are, but all the others without data."""
    return Partition(tuple(index if j == kept else index[:0] for j, index in enumerate(clients_of().clients)))


@pytest.mark.parametrize("case", ("fedavg", "sfl_v1"))
@pytest.mark.parametrize("engine", ENGINES)
def test_the_mean_of_a_round_holds_the_stopped_clients_last_finite_model(engine: str, case: str) -> None:
    together = values(one_round(case, engine, bad_data()))
    own = [values(one_round(case, engine, bad_data(), partition=only_client(j))) for j in (0, 1, 2, 3)]
    batches = [walk(clients_of()).samples(4, 0)]  # less than a batch, so it cannot be run alone
    own.append(sgd_by_hand(resnet(), images(), batches, lr=0.05, momentum=0.9))
    for name, value in together.items():
        if value.is_floating_point():
            agree(value, sum(model[name] * size / sum(SIZES) for model, size in zip(own, SIZES, strict=True)))
        else:
            assert value == max(model[name] for model in own)


def endless_nines(out: Tensor, y: Tensor) -> Tensor:
    """A loss that is infinite for class 9 although its gradient is not."""
    return F.cross_entropy(out, y) + torch.where(y == 9, torch.inf, 0.0).sum()


@pytest.mark.parametrize(("cut", "head"), [(1, None), (1, 4), (NUM_UNITS, None)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_infinite_loss_with_a_finite_gradient_stops_its_client_on_both_sides(
    engine: str, case: str, cut: int, head: int | None
) -> None:
    alone, data = clients_of((20,)), images(20)
    batches = [walk(alone).samples(0, step) for step in range(5)]
    y = data.y.clamp(max=8)
    y[torch.from_numpy(batches[2])] = 9
    data = Arrays(x=data.x, y=y, num_classes=10)
    state = one_round(case, engine, data, cut, head, partition=alone, opt=optim.sgd(0.05), loss=endless_nines)
    expected = sgd_by_hand(resnet(), data, batches[:2], lr=0.05)
    agree(values(state), {name: expected[name] for name in values(state)})
    assert (report(state)["stopped"], report(state)["batches"]) == (1, 2)
    assert np.isfinite(report(state)["loss"])


@pytest.mark.parametrize("case", CASES)
def test_a_client_that_stopped_starts_again_in_the_next_round(case: str) -> None:
    name, options = CASES[case]
    sim = simulation(methods.build(name, Split(resnet(), 1), OPT, OPT, **options), bad_data())
    first = sim.round(sim.start())
    sim.job.data = images()
    second = sim.round(first)
    assert (report(second)["stopped"], report(second)["batches"]) == (0, 16)
    assert distance(values(second), values(first)) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_when_all_stop_at_once_nothing_moves(case: str) -> None:
    data = spoilt(torch.nan, np.arange(sum(SIZES)), images())
    for engine in ENGINES:
        state = one_round(case, engine, data)
        assert report(state) == {"loss": 0, "batches": 0, "stopped": 5}
        agree(values(state), values(simulation(methods.build("sl", Split(resnet(), 1), OPT, OPT)).start()))


# -- Nobody waits ------------------------------------------------------------------------------------------------------


class Unread(TorchDispatchMode):
    """Raises where a tensor's value would be read by the host, which makes it wait for the device."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.READS:
            raise AssertionError(f"the host read a tensor ({func})")
        return func(*args, **(kwargs or {}))


READERS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")


@contextmanager
def unread() -> Iterator[None]:
    def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host read a tensor")

    with pytest.MonkeyPatch.context() as patch, Unread():
        for name in READERS:
            patch.setattr(Tensor, name, refuse)
        yield


@pytest.mark.parametrize("head", (None, 4))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_reads_no_tensor_on_the_host(engine: str, case: str, head: int | None) -> None:
    opt = optim.adam(1e-3, clip=0.5)
    name, options = CASES[case]
    method = methods.build(name, Split(resnet(), 1, head=head), opt, opt, **options)
    sim = simulation(method, bad_data(), engine=engine, guard=False)  # the guard reads once, when the models are there
    state = sim.start()
    with unread():
        state = sim.round(state)
    assert report(state)["stopped"] == 1


@pytest.mark.parametrize("read", (bool, float, int, Tensor.nonzero, lambda a: a.tolist(), lambda a: a.numpy()))
def test_the_guard_itself_notices_a_read(read: Any) -> None:
    with unread(), pytest.raises(AssertionError, match="the host read a tensor"):
        read(torch.ones(()))
