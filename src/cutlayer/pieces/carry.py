"""What becomes of the local optimisers' moments between rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cutlayer.kinds import MODEL, SETTINGS, Parcel
from cutlayer.optim import Transform
from cutlayer.places import Clients
from cutlayer.program import at_client
from cutlayer.servers import Fed
from cutlayer.state import Model, Part, Tensors
from cutlayer.values import PerClient

Memory = dict[str, Any]


class Carry(Protocol):
    """Sends along with the model what the optimisers should remember, and brings it back."""

    def start(self, opt: Transform, model: Model, fed: Fed) -> Memory:
        """The memory before the first round."""
        ...

    def enter(self, clients: Clients, c: PerClient, memory: Memory) -> PerClient:
        """The clients' parts, which have just begun, with what they should remember."""
        ...

    def leave(self, clients: Clients, c: PerClient) -> tuple[Parcel, ...]:
        """What goes up beside the models."""
        ...

    def keep(self, fed: Fed, memory: Memory, brought: Sequence[PerClient], w: dict[int, float], steps: int) -> Memory:
        """The memory after a round of so many steps."""
        ...


@dataclass(frozen=True)
class Reset:
    """Every round begins with fresh moments."""

    def start(self, opt: Transform, model: Model, fed: Fed) -> Memory:
        return {}

    def enter(self, clients: Clients, c: PerClient, memory: Memory) -> PerClient:
        return c

    def leave(self, clients: Clients, c: PerClient) -> tuple[Parcel, ...]:
        return ()

    def keep(self, fed: Fed, memory: Memory, brought: Sequence[PerClient], w: dict[int, float], steps: int) -> Memory:
        return memory


@dataclass(frozen=True)
class AverageMoments:
    """FedNAG: moments are averaged like the model and enter the next round with it; the steps so far count on."""

    def start(self, opt: Transform, model: Model, fed: Fed) -> Memory:
        return {"moments": fed.hold(opt.begin(model, 0).moments), "steps": 0}

    def enter(self, clients: Clients, c: PerClient, memory: Memory) -> PerClient:
        moments, steps = clients.down(MODEL, memory["moments"]), clients.down(SETTINGS, memory["steps"])
        remembering: PerClient = clients.do(self.remember, c, moments, steps)
        return remembering

    def leave(self, clients: Clients, c: PerClient) -> tuple[Parcel, ...]:
        return (MODEL(clients.do(self.moments, c)),)

    def keep(self, fed: Fed, memory: Memory, brought: Sequence[PerClient], w: dict[int, float], steps: int) -> Memory:
        (moments,) = brought
        return {"moments": fed.mean(moments, w), "steps": memory["steps"] + steps}

    @at_client(gives={"model": MODEL})
    def remember(self, part: Part, moments: dict[str, Tensors], steps: int) -> Part:
        return part._replace(moments=moments, count=steps)

    @at_client(gives=MODEL)
    def moments(self, part: Part) -> dict[str, Tensors]:
        return part.moments
