"""What happens to the clients' server-side parts after a step."""

from dataclasses import dataclass
from typing import Protocol

from cutlayer.optim import Transform
from cutlayer.places import Step
from cutlayer.servers import Server
from cutlayer.values import PerClient


class Fuse(Protocol):
    """Called after every step with the server-side parts."""

    @property
    def barrier(self) -> bool:
        """Whether clients must wait for each other at the end of every local epoch."""
        ...

    def __call__(self, server: Server, opt: Transform, s: PerClient, step: Step) -> None: ...


@dataclass(frozen=True)
class Keep:
    """Leave them as they are until the round ends."""

    barrier = False

    def __call__(self, server: Server, opt: Transform, s: PerClient, step: Step) -> None:
        pass


@dataclass(frozen=True)
class AverageEachStep:
    """SFL-V1 with period `step`: after every step the active clients' parts become their mean, optimisers reset."""

    barrier = False

    def __call__(self, server: Server, opt: Transform, s: PerClient, step: Step) -> None:
        _average(server, opt, s, step.active.weights, s[step.active])


@dataclass(frozen=True)
class AverageEachEpoch:
    """SFL-V1 with period `epoch`: when all have ended a local epoch, all parts become their mean, optimisers reset."""

    barrier = True

    def __call__(self, server: Server, opt: Transform, s: PerClient, step: Step) -> None:
        if step.ends_epoch:
            _average(server, opt, s, step.everyone.weights, s)


def _average(server: Server, opt: Transform, s: PerClient, weights: dict[int, float], of: PerClient) -> None:
    mean = server.mean(of.model, weights)
    s[of] = server.each(opt.restart, of, mean)
