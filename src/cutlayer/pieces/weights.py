"""What each client's model counts in an average."""

from typing import Literal, get_args

from cutlayer.core.places import Clients
from cutlayer.errors import UnknownNameError

Agg = Literal["samples", "uniform"]


def weights(clients: Clients, agg: Agg) -> dict[int, float]:
    """As much as it has samples, or as much as any other."""
    return clients.weights if agg == "samples" else dict.fromkeys(clients.ids, 1.0)


def check_agg(agg: str) -> None:
    if agg not in get_args(Agg):
        raise UnknownNameError("agg", str(agg), get_args(Agg))
