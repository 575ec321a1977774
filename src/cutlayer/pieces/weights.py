"""The weights of the clients' models in an average."""

from typing import Literal

from cutlayer.core.checks import check_choice
from cutlayer.core.places import Clients

Agg = Literal["samples", "uniform"]


def weights(clients: Clients, agg: Agg) -> dict[int, float]:
    """Return each client's weight: its number of samples, or 1 for every client."""
    return clients.weights if agg == "samples" else dict.fromkeys(clients.ids, 1.0)


def check_agg(agg: str) -> None:
    check_choice("agg", agg, Agg)
