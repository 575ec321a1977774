"""What happens to the local optimisers' moments between rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cutlayer.core.kinds import MODEL, SETTINGS, Parcel
from cutlayer.core.places import Clients
from cutlayer.core.program import at_client
from cutlayer.core.servers import Fed
from cutlayer.core.state import Model, Part, Tensors
from cutlayer.core.tree import storable
from cutlayer.core.values import Held, PerClient
from cutlayer.optim.optimiser import Transform


class Carry(Protocol):
    """Sends the optimisers' moments along with the model, and collects them again."""

    def start(self, opt: Transform, model: Model, fed: Fed) -> Any:
        """Return the memory before the first round."""

    def enter(self, clients: Clients, c: PerClient[Part], memory: Any) -> PerClient[Part]:
        """Return the clients' new parts with the moments that they start from."""

    def leave(self, clients: Clients, c: PerClient[Part]) -> tuple[Parcel, ...]:
        """Return what is sent up beside the models."""

    def keep(self, fed: Fed, memory: Any, brought: Sequence[PerClient], w: dict[int, float], steps: int) -> Any:
        """Return the memory after a round of this many steps."""


@dataclass(frozen=True)
class Reset:
    """Every round starts with fresh moments."""

    def start(self, opt: Transform, model: Model, fed: Fed) -> None:
        return None

    def enter(self, clients: Clients, c: PerClient[Part], memory: None) -> PerClient[Part]:
        return c

    def leave(self, clients: Clients, c: PerClient[Part]) -> tuple[Parcel, ...]:
        return ()

    def keep(self, fed: Fed, memory: None, brought: Sequence[PerClient], w: dict[int, float], steps: int) -> None:
        return None


@storable
class Carried(NamedTuple):
    """The moments and step count of the earlier rounds."""

    moments: Held[dict[str, Tensors]]
    steps: int


@dataclass(frozen=True)
class AverageMoments:
    """FedNAG: moments are averaged like the model and start the next round; the step count continues."""

    def start(self, opt: Transform, model: Model, fed: Fed) -> Carried:
        return Carried(fed.hold(opt.begin(model, 0).moments), 0)

    def enter(self, clients: Clients, c: PerClient[Part], memory: Carried) -> PerClient[Part]:
        moments, steps = clients.down(MODEL, memory.moments), clients.down(SETTINGS, memory.steps)
        return clients.do(self.remember, c, moments, steps)

    def leave(self, clients: Clients, c: PerClient[Part]) -> tuple[Parcel, ...]:
        return (MODEL(clients.do(self.moments, c)),)

    def keep(self, fed: Fed, memory: Carried, brought: Sequence[PerClient], w: dict[int, float], steps: int) -> Carried:
        (moments,) = brought
        return Carried(fed.mean(moments, w), memory.steps + steps)

    @at_client(gives={"model": MODEL})
    def remember(self, part: Part, moments: dict[str, Tensors], steps: int) -> Part:
        return part._replace(moments=moments, count=steps)

    @at_client(gives=MODEL)
    def moments(self, part: Part) -> dict[str, Tensors]:
        return part.moments
