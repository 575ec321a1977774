"""SplitLoRA (Lin et al. 2024): split training of adapters on a frozen base. docs/methods/splitlora.md"""

from typing import Literal

from cutlayer.core.checks import check_choice
from cutlayer.errors import ConfigError
from cutlayer.methods.splitfed import SplitFed
from cutlayer.methods.splitfed_v2 import SplitFedV2
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.factory import factory
from cutlayer.pieces.weights import Agg
from cutlayer.split import Split

Mode = Literal["per_client", "shared_server"]
INTERVAL = 100  # as in public code of the paper


@factory
def splitlora(
    *,
    model: Split,
    client_opt: Transform,
    server_opt: Transform,
    mode: Mode = "per_client",
    interval: int | None = None,
    agg: Agg = "samples",
) -> SplitFed | SplitFedV2:
    """SplitLoRA: `per_client` server adapters as in SFL-V1, or one `shared_server` adapter that every batch updates.

    Only adapters are trained and sent; the matrices A and B are averaged separately. With a shared server the clients'
    adapters are averaged every `interval` mini-batches, by default 100.
    """
    _check_adapters(model)
    check_choice("mode", mode, Mode, where="splitlora")
    if mode == "per_client":
        if interval is not None:
            raise ConfigError(
                "splitlora: interval belongs to mode shared_server; the batching says how long a round is"
            )
        return SplitFed(model=model, client_opt=client_opt, server_opt=server_opt, agg=agg)
    steps = INTERVAL if interval is None else interval
    return SplitFedV2(model=model, client_opt=client_opt, server_opt=server_opt, interval=steps, agg=agg)


def _check_adapters(model: Split) -> None:
    if all(value.requires_grad for value in model.model.parameters()):
        raise ConfigError(
            "splitlora trains adapters on a frozen base, but every parameter of this model trains; give the model "
            "adapters (causal_lm with a rank), or use sfl_v1"
        )
