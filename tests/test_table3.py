"""HO-SFL's Table 3 from the ledgers of real, shorter runs: bytes a sample, up to the paper's 160,000 samples."""

from pathlib import Path

import pytest
import torch
from test_traffic import PAPER, TABLE3
from torch import Tensor, nn

import cutlayer as cl
from cutlayer.cli.traffic_table import GIB, in_units
from cutlayer.core.batches import Batching
from cutlayer.methods import METHODS
from cutlayer.results.trials import Group, Trial
from cutlayer.runs.config import Run
from cutlayer.studies import traffic

FEATURES, CLASSES = 32, 10


class Lower(nn.Module):
    """As many values at the cut and parameters as the paper's client has, but next to no work."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(parameters))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights[:FEATURES]).repeat(1, PAPER.activation // FEATURES)


class Auxiliary(nn.Module):
    """As many parameters as FSL-SAGE's auxiliary model has."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(PAPER.auxiliary_params))

    def forward(self, z: Tensor) -> Tensor:
        return (z * self.weights[: PAPER.activation])[:, :CLASSES]


def run_of(method: str, client_params: int, clients: int, per_round: int, rounds: int) -> Group:
    """A run with the paper's batches and clients of the paper's size."""
    net = nn.Sequential(Lower(client_params), nn.Linear(PAPER.activation, CLASSES))
    options = {"auxiliary": Auxiliary(), "align_epochs": 1} if method == "fsl_sage" else {}
    made = METHODS[method](model=cl.Split(net, 1), client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1), **options)
    x = torch.randn(clients * PAPER.client_samples, FEATURES, generator=torch.Generator().manual_seed(0))
    result = cl.train(
        made,
        cl.from_arrays(x, torch.arange(len(x)) % CLASSES),
        cl.iid(len(x), clients, key=0),
        rounds=rounds,
        batching=Batching(size=32, drop_last=False),
        per_round=per_round,
        engine="loop",
    )
    return Group(label=method, trials=(Trial(path=Path(), run=Run(), history=result.history, times={}),))


def printed(group: Group) -> tuple[str, ...]:
    found = traffic.column(group, PAPER.samples, paper_convention=True)
    return tuple(in_units(size, GIB) for size in found.rows.values())


@pytest.mark.parametrize("method", ["sfl_v1", "fsl_sage", pytest.param("zo_sfl", marks=pytest.mark.slow)])
def test_a_round_of_ten_clients(method: str) -> None:
    assert printed(run_of(method, PAPER.client_params, clients=10, per_round=10, rounds=1)) == TABLE3[method]


def test_mu_splitfed_with_full_batches() -> None:
    """Its models are less than the table's: a round draws full batches, so there are fewer steps to the 160,000."""
    found = printed(run_of("mu_splitfed", PAPER.client_params, clients=10, per_round=10, rounds=1))
    assert found == ("3.67", "12.75", "0.00", "0.00", "12.75", "0.00002")  # of 5,010 steps, not of 5,110


@pytest.mark.slow
def test_ho_sfl_with_one_client_of_ten() -> None:
    """Who is away replays nine rounds on average, less what is never replayed before the first and after the last one;
    nothing in the table depends on the size of the model."""
    assert printed(run_of("hosfl", FEATURES, clients=10, per_round=1, rounds=500)) == TABLE3["hosfl"]
