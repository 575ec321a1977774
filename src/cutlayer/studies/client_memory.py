"""The memory that a client needs for a step of inference, HO-SFL, ZO-SFL, SFL and full local training.

The client is measured alone: its functions run as in a round, and a stand-in for the server answers with tensors of the
right shape. All that the client holds counts: the values of its layers (trained, frozen and preloaded), the optimiser's
moments and the batch by their bytes, and what a step takes beyond them as measured. The step includes the new values
and moments of an update, which exist beside the old ones until the update is done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlayer.core import directions, tree
from cutlayer.core.calculus import gradient, vjp
from cutlayer.core.checks import check
from cutlayer.core.state import Part
from cutlayer.meters.memory import peak
from cutlayer.methods.fedavg import FedAvg
from cutlayer.methods.hosfl import HybridOrder
from cutlayer.methods.zo_sfl import ZerothOrder
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.hybrid import HybridClient
from cutlayer.pieces.zeroth import ZerothClient
from cutlayer.split import Split

KEY = 0  # for the model's random layers and for the directions


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The bytes that one client holds for one kind of work."""

    work: str
    overlap: int | None  # HO-SFL: perturbed passes before the gradient arrives, each of which holds a cut tensor
    weights: int  # all values of its layers, trained or not
    optimiser: int  # the moments
    batch: int
    step: int  # the most beyond those at any time

    @property
    def peak(self) -> int:
        return self.weights + self.optimiser + self.batch + self.step


@dataclass(frozen=True, kw_only=True)
class ClientMemory:
    """The memory that one batch takes at a client, by what the client does with it."""

    cut_tensor: int  # bytes of the batch's activations at the cut
    rows: tuple[Footprint, ...]  # inference first

    def relative(self, row: Footprint) -> float:
        """Return the peak as a multiple of that of inference."""
        return row.peak / self.rows[0].peak


class ClientWork(NamedTuple):
    """A kind of work that a client does with a batch."""

    name: str
    step: Callable[[Part, Any, Tensor], object]
    overlap: int | None = None
    trains: bool = True
    whole: bool = False  # with all layers at the client


def client_memory(
    split: Split, opt: Transform, x: Any, y: Tensor, *, perturbations: int = 5, overlaps: tuple[int, ...] = (0,)
) -> ClientMemory:
    """Measure a client's step on this batch, HO-SFL's for each overlap. The model must be on the batch's device."""
    check(split.cut > 0, "cut", split.cut, "1 or more: a client without units has nothing to train")
    lower, upper = split.initial()
    parts = opt.begin(lower, 0), opt.begin(lower.joined(upper), 0)
    weights = _weights(split, split.cut), _weights(split, split.num_units)
    device = tree.tensors(x)[0].device

    def footprint(work: ClientWork) -> Footprint:
        part = parts[work.whole]
        return Footprint(
            work=work.name,
            overlap=work.overlap,
            weights=weights[work.whole],
            optimiser=tree.num_bytes(part.moments) if work.trains else 0,
            batch=tree.num_bytes((x, y) if work.trains else x),
            step=peak(lambda: work.step(part, x, y), device),
        )

    cut_tensor = tree.num_bytes(split.lower(parts[0], x, KEY)[0])
    rows = tuple(footprint(work) for work in _works(split, opt, perturbations, overlaps))
    return ClientMemory(cut_tensor=cut_tensor, rows=rows)


def _weights(split: Split, stop: int) -> int:
    """Return the bytes of all values of the first units; tied values count once."""
    modules = [unit.module for unit in split.bare_units()[:stop]]
    found = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return tree.num_bytes(tuple(found.values()))


def _works(split: Split, opt: Transform, perturbations: int, overlaps: tuple[int, ...]) -> tuple[ClientWork, ...]:
    seeds = directions.seeds(KEY, perturbations)
    hybrids = [
        HybridOrder(model=split, client_opt=opt, server_opt=opt, perturbations=perturbations, overlap=k).client
        for k in overlaps
    ]
    zeroth = ZerothOrder(model=split, client_opt=opt, server_opt=opt).client
    first, full = SplitClient(model=split, opt=opt), FedAvg(model=split, opt=opt)
    return (
        ClientWork("inference", lambda part, x, y: split.lower(part, x, KEY)[0], trains=False),
        *(ClientWork("HO-SFL", partial(_hybrid, client, seeds), client.overlap) for client in hybrids),
        ClientWork("ZO-SFL", partial(_zeroth, zeroth, seeds[0])),
        ClientWork("SFL", partial(_first_order, first)),
        ClientWork(
            "full local training",
            lambda part, x, y: full.update(part, gradient(full.loss, [part, x, y, KEY], None)),
            whole=True,
        ),
    )


# A step of each client. Random tensors stand in for the server's answers, and what is no longer needed is freed.


def _hybrid(client: HybridClient, seeds: Tensor, part: Part, x: Any, y: Tensor) -> Part:
    z = client.forward(part, x, KEY)
    ahead = client.ahead(part, x, KEY, seeds)
    slopes = client.slopes(part, x, KEY, seeds, z, tree.map(torch.randn_like, z), ahead)
    del z, ahead
    return client.update(part, seeds, slopes)


def _zeroth(client: ZerothClient, seed: Tensor, part: Part, x: Any, y: Tensor) -> Part:
    sent = client.both_ways(part, x, KEY, seed)
    slope = torch.randn((), device=sent.plus.device)
    del sent
    return client.update(part, slope, seed)


def _first_order(client: SplitClient, part: Part, x: Any, y: Tensor) -> Part:
    z, pull = vjp(client.forward, [part, x, KEY], None)
    grads = pull(tree.map(torch.randn_like, z))
    del z, pull
    return client.update(part, grads)
