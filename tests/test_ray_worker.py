"""Specifies the virtual clients of a worker and what travels between them and a round."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import agree, images, resnet

from cutlayer import methods, optim
from cutlayer.core.batches import Batching
from cutlayer.core.program import Program
from cutlayer.remote.device.session import ClientDevice
from cutlayer.remote.device.store import StoredValue
from cutlayer.remote.ray.dispatch import PendingWork, bundled
from cutlayer.remote.ray.worker import NumpyTensor, VirtualClients, WorkerSamples
from cutlayer.split import Split


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool))
def test_a_tensor_comes_back_from_a_read_only_array(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.5, 0.0], [2.0, 1.0]]).to(dtype)
    array = NumpyTensor.of(tensor)
    array.array.flags.writeable = False
    view, copy = array.view(), array.copy()
    agree([view, copy], [tensor, tensor], 0)
    assert view.data_ptr() == tensor.data_ptr() != copy.data_ptr()


def test_tensors_are_bundled_by_the_crews_that_they_go_to() -> None:
    model, first, second = (torch.zeros(1) for _ in range(3))
    items = {
        0: [PendingWork(0, None, [model, first]), PendingWork(2, None, [model])],
        1: [PendingWork(1, None, [second, model])],
    }  # type: ignore[arg-type]
    found = {who: [id(a) for a in tensors] for who, tensors in bundled(items).items()}
    assert found == {frozenset({0, 1}): [id(model)], frozenset({0}): [id(first)], frozenset({1}): [id(second)]}


def clients_of(index: Mapping[int, Any]) -> VirtualClients:
    data = images()
    method = methods.build("fedavg", Split(resnet(), 1), optim.sgd(0.1), optim.sgd(0.1))
    new_device = partial(ClientDevice, program=Program(method), batching=Batching(size=4))
    return VirtualClients(new_device, WorkerSamples.of(data, index))


def test_a_client_of_a_crew_holds_its_own_samples_and_nothing_of_a_round_that_is_over() -> None:
    clients = clients_of({1: np.array([3, 5]), 4: np.array([0, 7, 9])})
    data = clients._device(4).data
    agree((data.x, data.y), (images().x[[0, 7, 9]], images().y[[0, 7, 9]]), 0)
    assert data.x.untyped_storage().data_ptr() == clients._samples[0].untyped_storage().data_ptr()  # a view, no copy
    assert clients.begin({1: 10, 4: 11}) == {1: (), 4: ()}
    assert list(clients._sessions) == [1, 4]
    assert clients.begin({}) == {} and clients._sessions == {}


def test_clients_of_a_crew_that_keep_the_same_share_it() -> None:
    clients = clients_of({j: np.array([j]) for j in range(3)})
    clients.begin({0: 1, 1: 2, 2: 3})
    for j, value in enumerate((1.0, 1.0, 2.0)):
        clients._stores[j].entries["part"] = StoredValue(5, 9, {"w": torch.full((2,), value)})
    clients.begin({})
    first, second, third = (clients._stores[j].entries["part"].value for j in range(3))
    assert first is second and first is not third and third["w"].tolist() == [2.0, 2.0]
