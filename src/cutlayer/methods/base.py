"""What every method is: hyper-parameters and pieces, a start, and a round."""

from typing import Any, Literal, Protocol, TypeVar

from cutlayer.errors import ConfigError, LawError, UsageError
from cutlayer.optim import Transform
from cutlayer.places import Clients
from cutlayer.servers import Fed, Server
from cutlayer.split import Split
from cutlayer.state import Model, State
from cutlayer.values import Held

Side = Literal["client", "server"]
C = TypeVar("C", bound=type[Any])


class Method(Protocol):
    """A frozen dataclass of hyper-parameters and pieces. It mentions no engine, meter, transport or file."""

    @property
    def model(self) -> Split: ...

    def start(self, server: Server, fed: Fed) -> State:
        """The state before the first round."""
        ...

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        """The state after one more round with these clients."""
        ...


def final(cls: C) -> C:
    """Methods are final: a new method is a new program of shared pieces, never an override of another's middle."""

    def refuse(sub: type[Any], /, **_: Any) -> None:
        raise LawError(
            f"{sub.__name__} cannot derive from {cls.__name__}: methods are final. "
            "Compose the pieces (Transform, Exchange, Fuse, Outer) or write a round of its own."
        )

    cls.__init_subclass__ = classmethod(refuse)  # type: ignore[assignment]
    return cls


def refuse_u_shape(method: str, model: Split) -> None:
    """For methods whose server needs the loss, which in a U-shape is at the clients."""
    if model.u_shaped:
        raise ConfigError(f"{method} needs the labels and the last layers at the server; leave the head out")


def refuse_live_norms(method: str, model: Split, sides: tuple[Side, ...] = ("client", "server")) -> None:
    """For methods that compare passes of moved parameters: running statistics would move with every pass."""
    for side in sides:
        if model.normalises_at(side):
            raise ConfigError(
                f"{method} needs BatchNorm frozen at the {side}: put those layers in eval mode and their parameters to "
                "requires_grad=False before the split, as freeze_norms = true (cutlayer.models.freeze_norms) does"
            )


class TooFew(UsageError):
    """Too few clients are left at the end of a round: it did not happen, and can be tried again."""


def check_left(method: str, mean: Held, fewest: int) -> None:
    """For methods whose layers change servers: a mean over a single client would tell of it."""
    if mean.stays and fewest > 1:
        raise too_few(method, fewest)


def too_few(method: str, fewest: int) -> TooFew:
    return TooFew(
        f"{method} needs at least {fewest} clients until the round has ended, but all others were lost; "
        "try the round again with more clients"
    )


def with_one_server(model: Split, server_opt: Transform, server: Server, fed: Fed) -> State:
    """The start of a method whose server trains one part for all clients, round after round."""
    lower, upper = model.initial()
    return State(0, fed.hold(lower), server.hold(server_opt.begin(upper, 0)), {})


def global_model(state: State) -> Model:
    """The whole model, for whoever may hold both halves: evaluation and export."""
    client: Model = state.client.tree.model
    return client.joined(state.server.tree.model)
