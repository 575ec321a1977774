"""Specifies where engines must agree beyond today's methods: forward passes alone, vanished clients, odd trees."""

from typing import NamedTuple

import pytest
import torch
from conftest import agree, images, resnet
from torch import nn

from cutlayer import Arrays, Batching, Split, iid, optim, train
from cutlayer.core.engine import Engine
from cutlayer.core.kinds import MODEL
from cutlayer.core.servers import Server
from cutlayer.core.state import Part, Tensors
from cutlayer.core.values import PerClient, shared
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.meters.ledger import Ledger
from cutlayer.methods import sfl_v1

ENGINES = [Loop(), Vmap(), Vmap(chunk=2)]
IDS = (0, 1, 2, 3)
SPLIT = Split(resnet(), 2)
PART = optim.adam(0.01).begin(SPLIT.initial()[0], 0)


class Selection(NamedTuple):
    ids: tuple[int, ...]


def inputs(engine: Engine) -> PerClient:
    """Four clients with batches of 4, 4, 3 and 4 images."""
    rows = torch.arange(15).split([4, 4, 3, 4])
    return engine.load(images(), {j: rows[j].numpy() for j in IDS})[0]


def forward(part: Part, x: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    return SPLIT.lower(part, x)


@pytest.mark.parametrize("engine", ENGINES[1:], ids=("vmap", "chunks"))
def test_a_forward_pass_alone_updates_each_clients_own_statistics(engine: Engine) -> None:
    found, expected = (
        PerClient("clients", e.call(forward, [shared("clients", IDS, PART), inputs(e)], IDS), IDS)
        for e in (engine, Loop())
    )
    for j in IDS:
        agree(found.at(j), expected.at(j))


@pytest.mark.parametrize("stay", [(0, 1, 3), (1, 2), (3,)])
@pytest.mark.parametrize("engine", ENGINES[1:], ids=("vmap", "chunks"))
def test_a_client_that_vanishes_before_its_gradient_comes_leaves_the_others_alone(
    engine: Engine, stay: tuple[int, ...]
) -> None:
    def pulled(e: Engine) -> PerClient:
        blocks = e.vjp(forward, [shared("clients", IDS, PART), inputs(e)], IDS, cut=None)
        out = PerClient("clients", [b._replace(tree=b.tree[0]) for b in blocks], IDS)[Selection(stay)]
        pull = PerClient("clients", [b._replace(tree=b.tree[1]) for b in blocks], IDS)[Selection(stay)]
        return PerClient("clients", e.pull(pull, out), stay)

    found, expected = pulled(engine), pulled(Loop())
    for j in stay:
        agree(found.at(j), expected.at(j))


def test_plain_numbers_in_a_tree_cost_every_client_8_bytes_on_every_engine() -> None:
    """A part has two: its learning rate and its count."""
    sizes = set()
    for engine in ENGINES:
        ledger = Ledger(count_buffers=True)
        stepped = engine.call(
            lambda part, x: part._replace(params={"w": x.sum((0, 1, 2, 3))}),
            [shared("server", IDS, PART), inputs(engine)],
            IDS,
        )
        ledger.crossed(MODEL, "up", PerClient("server", stepped, IDS))
        sizes.add(tuple(sum(ledger.per_client[j].values()) for j in IDS))
    (per_client,) = sizes
    parts = [PART.frozen, PART.buffers, PART.moments, PART.progress]
    assert per_client == (Ledger().size(tuple(parts)) + 8 + 2 * 8,) * 4


@pytest.mark.parametrize("engine", ENGINES, ids=("loop", "vmap", "chunks"))
def test_a_sum_of_truth_values_counts_them(engine: Engine) -> None:
    truths = engine.call(lambda x: x.new_tensor(len(x)) > 3, [inputs(engine)], IDS)
    assert float(Server(engine).sum(PerClient("server", truths, IDS)).tree) == 3


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.a(left) + self.b(right)


@pytest.mark.parametrize("engine", ("loop", "vmap"))
def test_a_dict_of_inputs_crosses_where_the_client_has_no_layer(engine: str) -> None:
    data = Arrays(x={"left": torch.ones(8, 2), "right": torch.ones(8, 2)}, y=torch.arange(8) % 3, num_classes=3)
    found = []
    torch.manual_seed(0)
    net = TwoInputs()
    for cut in (0, 1):
        method = sfl_v1(model=Split(net, cut), client_opt=optim.sgd(0.1), server_opt=optim.sgd(0.1))
        result = train(method, data, iid(8, 2, key=0), rounds=1, batching=Batching(size=2), engine=engine)
        found.append(result.state_dict)
    assert found[0].keys() == found[1].keys() and len(found[0]) == 4
    torch.testing.assert_close(*found)
