"""The start of methods with one server part, and checks for models and optimisers that a method cannot use."""

from typing import Literal

from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State
from cutlayer.errors import ConfigError
from cutlayer.optim import Transform
from cutlayer.split import Split

Side = Literal["client", "server"]


def with_one_server(model: Split, server_opt: Transform, server: Server, fed: Fed) -> State:
    """Return the initial state of a method whose server trains one part for all clients, round after round."""
    lower, upper = model.initial()
    return State(0, fed.hold(lower), server.hold(server_opt.begin(upper, 0)), {})


def refuse_u_shape(method: str, model: Split) -> None:
    """Refuse a U-shape for methods whose server needs the loss: in a U-shape, clients compute it."""
    if model.u_shaped:
        raise ConfigError(f"{method} needs the labels and the last layers at the server; leave the head out")


def refuse_live_norms(method: str, model: Split, sides: tuple[Side, ...] = ("client", "server")) -> None:
    """Refuse batch statistics for methods that compare perturbed passes: every pass would update them."""
    for side in sides:
        if model.normalises_at(side):
            raise ConfigError(
                f"{method} needs BatchNorm frozen at the {side}: put those layers in eval mode and their parameters to "
                "requires_grad=False before the split, as freeze_norms = true (cutlayer.models.freeze_norms) does"
            )


def refuse_joint_norm(method: str, *optimisers: Transform) -> None:
    """Refuse joint clipping for methods whose server takes one step for several clients: there is no joint gradient."""
    if any(opt.joint_norm for opt in optimisers):
        raise ConfigError(
            f"{method} cannot clip with clip_scope='joint': its server-side gradient belongs to no single client; "
            "use clip_scope='part'."
        )
