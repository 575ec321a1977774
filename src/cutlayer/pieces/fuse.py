"""What happens to the clients' server-side parts after a step."""

from dataclasses import dataclass, field
from typing import Protocol

from cutlayer.core.checks import check, is_number
from cutlayer.core.places import Barrier, Step
from cutlayer.core.servers import Ids, Server
from cutlayer.core.state import Part, Tensors
from cutlayer.core.values import PerClient
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.weights import Agg, weights


class Fuse(Protocol):
    """Called after every step with the server-side parts."""

    @property
    def barrier(self) -> Barrier:
        """Where clients wait for each other: nowhere, or at the end of every local epoch or step."""

    def __call__(self, server: Server, opt: Transform, s: PerClient[Part], step: Step) -> None: ...


@dataclass(frozen=True)
class Keep:
    """Leaves the parts as they are until the round ends."""

    barrier: Barrier = field(default=None, init=False)

    def __call__(self, server: Server, opt: Transform, s: PerClient[Part], step: Step) -> None:
        pass


@dataclass(frozen=True)
class AverageEachStep:
    """SFL-V1 with period `step`: after every step, average the active clients' parts and reset their optimisers."""

    agg: Agg = "samples"
    barrier: Barrier = field(default="step", init=False)

    def __call__(self, server: Server, opt: Transform, s: PerClient[Part], step: Step) -> None:
        _average(server, opt, s, weights(step.active, self.agg), s[step.active])


@dataclass(frozen=True)
class AverageEachEpoch:
    """SFL-V1 with period `epoch`: after every local epoch, average all parts and reset their optimisers."""

    agg: Agg = "samples"
    barrier: Barrier = field(default="epoch", init=False)

    def __call__(self, server: Server, opt: Transform, s: PerClient[Part], step: Step) -> None:
        if step.ends_epoch:
            _average(server, opt, s, weights(step.everyone, self.agg), s[step.everyone])


def _average(server: Server, opt: Transform, s: PerClient[Part], w: dict[int, float], of: PerClient[Part]) -> None:
    if of.ids:  # else all clients disconnected during this step
        s[of] = server.each(opt.restart, of, server.mean(of.model, w))


@dataclass(frozen=True, kw_only=True)
class FuseMomenta:
    """SMoFi: after every step all clients continue from one fused momentum, in which finished clients fade with age.

    Equations 4 to 6: `m̄ ← (Σ_active m_j + Σ_finished (age_j + offset)^α m_j) / |Jⁿ|`. Every client counts once, so the
    denominator stays the number of the round's clients. With Adam both moments are fused, but not the count. A client
    that disconnects has finished early; one that disconnects before its first step is not one of the round's clients.
    """

    alpha: float  # at most 0; the nearer to 0, the slower finished clients fade
    offset: int = 1  # 1: a finished client fades from the first step after its last one on; 0: from the second on
    barrier: Barrier = field(default="step", init=False)

    def __post_init__(self) -> None:
        check(is_number(self.alpha) and self.alpha <= 0, "alpha", self.alpha, "a number of at most 0")
        check(self.offset in (0, 1), "staleness_offset", self.offset, "0 or 1")

    def __call__(self, server: Server, opt: Transform, s: PerClient[Part], step: Step) -> None:
        idle = step.idle
        fused = server.sum(s[Ids(tuple(idle))].moments, {j: self.staleness(idle[j]) / len(idle) for j in idle})
        # A client that takes its last step now keeps its own momentum, which later sums use.
        s[step.staying] = server.each(_with_moments, s[step.staying], fused)

    def staleness(self, age: int) -> float:
        """Return the weight of a client whose last step was this many steps ago."""
        return float((age + self.offset) ** self.alpha) if age else 1.0


def _with_moments(part: Part, moments: dict[str, Tensors]) -> Part:
    return part._replace(moments=moments)
