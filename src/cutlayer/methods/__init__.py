"""The methods, each a short file that reads like its paper.

Imports: core, errors, optim, pieces, planning, registry, split.
"""

from collections.abc import Callable
from typing import Any

from cutlayer import registry
from cutlayer.core.method import Method as Method
from cutlayer.core.method import global_model as global_model
from cutlayer.methods.fedavg import fedavg
from cutlayer.methods.fsl_sage import fsl_sage
from cutlayer.methods.hasfl import hasfl
from cutlayer.methods.hosfl import hosfl
from cutlayer.methods.mergesfl import mergesfl
from cutlayer.methods.momentum import fedavgm, fednag, fednar, fedprox, slowmo
from cutlayer.methods.mu_splitfed import mu_splitfed
from cutlayer.methods.relay import sl
from cutlayer.methods.smofi import smofi
from cutlayer.methods.splitfed import sfl_v1
from cutlayer.methods.splitfed_v2 import sfl_v2
from cutlayer.methods.splitlora import splitlora
from cutlayer.methods.zo_sfl import zo_sfl
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split

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
    """Build the method of this name with these options."""
    given = {"model": model, "client_opt": client_opt, "server_opt": server_opt}
    return registry.make("method", METHODS, name, options, given=given)
