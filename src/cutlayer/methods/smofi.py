"""SMoFi (arXiv 2511.09828): step-wise momentum fusion at the server of SFL-V1. docs/methods/smofi.md"""

import logging

from cutlayer.methods.random_cut import RandomCut
from cutlayer.methods.splitfed import SplitFed
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.factory import factory
from cutlayer.pieces.fuse import Fuse, FuseMomenta, Keep
from cutlayer.pieces.outer import HeavyBall
from cutlayer.pieces.weights import Agg
from cutlayer.split import Split

log = logging.getLogger("cutlayer")


@factory
def smofi(
    *,
    model: Split,
    client_opt: Transform,
    server_opt: Transform,
    alpha: float = -0.1,
    beta: float = 0.3,
    align: bool = True,
    staleness_offset: int = 1,
    random_cut: tuple[int, int] | None = None,
    agg: Agg = "samples",
) -> SplitFed | RandomCut:
    """SMoFi: the server-side momenta are fused after every step, and rounds have a global momentum beta."""
    if align and not server_opt.moments:
        log.warning("smofi: the server's optimiser keeps no momentum, so there is nothing to fuse; set momentum = 0.9")
    fuse: Fuse = FuseMomenta(alpha=alpha, offset=staleness_offset) if align else Keep()

    def at(split: Split) -> SplitFed:
        return SplitFed(
            model=split, client_opt=client_opt, server_opt=server_opt, fuse=fuse, outer=HeavyBall(beta), agg=agg
        )

    return at(model) if random_cut is None else RandomCut.over(random_cut, model, at)
