"""FedAvg with momentum between rounds, or with another local objective: each is FedAvg and one piece.

FedProx (Li et al. 2020), FedNAR (Li et al. 2023), FedAvgM (Hsu et al. 2019), SlowMo (Wang et al. 2020) and FedNAG
(Yang et al. 2022). The pieces compose with each other and with SMoFi: the first two are also options of the optimisers
(`proximal`; `clip` with `clip_decay`). docs/methods/fedprox.md, fednar.md, fedavgm.md, slowmo.md, fednag.md
"""

from typing import Literal

from cutlayer.core.checks import check, check_positive, is_number
from cutlayer.errors import ConfigError
from cutlayer.methods.fedavg import FedAvg
from cutlayer.optim.optimiser import Optimiser, Transform, co_clipped, proximal
from cutlayer.pieces.carry import AverageMoments, Carry, Reset
from cutlayer.pieces.factory import factory
from cutlayer.pieces.outer import HeavyBall, SlowMo
from cutlayer.pieces.weights import Agg
from cutlayer.registry import find
from cutlayer.split import Split

Buffers = Literal["reset", "average"]
CARRIES: dict[str, Carry] = {"reset": Reset(), "average": AverageMoments()}


@factory
def fedprox(
    *,
    model: Split,
    client_opt: Optimiser,
    server_opt: Transform | None = None,
    mu: float = 0.01,
    agg: Agg = "samples",
) -> FedAvg:
    """FedProx: FedAvg with a penalty of weight mu that pulls clients back to the model of the round."""
    check(is_number(mu) and mu >= 0, "mu", mu, "a number of at least 0")
    return FedAvg(model=model, opt=proximal(client_opt, mu), agg=agg)


@factory
def fednar(
    *,
    model: Split,
    client_opt: Optimiser,
    server_opt: Transform | None = None,
    max_norm: float = 10.0,
    agg: Agg = "samples",
) -> FedAvg:
    """FedNAR: FedAvg whose weight decay is clipped together with the gradient."""
    check_positive("max_norm", max_norm)
    return FedAvg(model=model, opt=co_clipped(client_opt, max_norm), agg=agg)


@factory
def fedavgm(
    *,
    model: Split,
    client_opt: Transform,
    server_opt: Transform | None = None,
    beta: float = 0.5,
    agg: Agg = "samples",
) -> FedAvg:
    """FedAvgM: FedAvg whose round is a step with momentum beta."""
    return FedAvg(model=model, opt=client_opt, outer=HeavyBall(beta), agg=agg)


@factory
def slowmo(
    *,
    model: Split,
    client_opt: Transform,
    server_opt: Transform | None = None,
    alpha: float = 1.0,
    beta: float = 0.6,
    buffers: Buffers = "reset",
    agg: Agg = "samples",
) -> FedAvg:
    """SlowMo: FedAvg whose round is a step of size alpha with momentum beta, in units of the learning rate."""
    carry = find("buffers", CARRIES, buffers, "slowmo")
    return FedAvg(model=model, opt=client_opt, outer=SlowMo(alpha, beta), carry=carry, agg=agg)


@factory
def fednag(*, model: Split, client_opt: Transform, server_opt: Transform | None = None, agg: Agg = "samples") -> FedAvg:
    """FedNAG: FedAvg that also averages the clients' momenta and carries them on; meant for Nesterov momentum."""
    if not client_opt.moments:
        raise ConfigError(
            "fednag averages the moments of the local optimisers, but this one keeps none; "
            "set its momentum, for example momentum = 0.9 with nesterov = true"
        )
    return FedAvg(model=model, opt=client_opt, carry=AverageMoments(), agg=agg)
