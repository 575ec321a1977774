"""The methods, each a short file that reads like its paper.

Imports: core, errors, optim, pieces, planning, registry, split.
"""

from collections.abc import Callable
from typing import Any

from cutlayer import registry
from cutlayer.core.method import Method, global_model
from cutlayer.methods.fedavg import FedAvg, fedavg
from cutlayer.methods.fsl_sage import FslSage, fsl_sage
from cutlayer.methods.hasfl import Hasfl, hasfl
from cutlayer.methods.hosfl import HybridOrder, hosfl
from cutlayer.methods.mergesfl import MergeSFL, mergesfl
from cutlayer.methods.momentum import fedavgm, fednag, fednar, fedprox, slowmo
from cutlayer.methods.mu_splitfed import UnbalancedZeroth, mu_splitfed
from cutlayer.methods.random_cut import RandomCut
from cutlayer.methods.relay import Relay, sl
from cutlayer.methods.smofi import smofi
from cutlayer.methods.splitfed import SplitFed, sfl_v1
from cutlayer.methods.splitfed_v2 import SplitFedV2, sfl_v2
from cutlayer.methods.splitlora import splitlora
from cutlayer.methods.zo_sfl import ZerothOrder, zo_sfl
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split

__all__ = [
    "METHODS",
    "FedAvg",
    "FslSage",
    "Hasfl",
    "HybridOrder",
    "MergeSFL",
    "Method",
    "RandomCut",
    "Relay",
    "SplitFed",
    "SplitFedV2",
    "UnbalancedZeroth",
    "ZerothOrder",
    "build",
    "fedavg",
    "fedavgm",
    "fednag",
    "fednar",
    "fedprox",
    "fsl_sage",
    "global_model",
    "hasfl",
    "hosfl",
    "mergesfl",
    "mu_splitfed",
    "sfl_v1",
    "sfl_v2",
    "sl",
    "slowmo",
    "smofi",
    "splitlora",
    "zo_sfl",
]

METHODS: registry.Table[Callable[..., Method]] = registry.table(
    "METHODS",
    {
        "fedavg": fedavg,
        "fedprox": fedprox,
        "fednar": fednar,
        "fedavgm": fedavgm,
        "slowmo": slowmo,
        "fednag": fednag,
        "sl": sl,
        "sfl_v1": sfl_v1,
        "sfl_v2": sfl_v2,
        "mergesfl": mergesfl,
        "smofi": smofi,
        "hasfl": hasfl,
        "fsl_sage": fsl_sage,
        "zo_sfl": zo_sfl,
        "mu_splitfed": mu_splitfed,
        "hosfl": hosfl,
        "splitlora": splitlora,
    },
)


def build(name: str, model: Split, client_opt: Transform, server_opt: Transform, **options: Any) -> Method:
    """The method of this name with these options."""
    given = {"model": model, "client_opt": client_opt, "server_opt": server_opt}
    return registry.make("method", METHODS, name, options, given=given)
