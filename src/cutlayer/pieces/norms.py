"""A gradient norm over both sides of the cut: a second round trip and 16 bytes a step, for joint clipping."""

from torch import Tensor

from cutlayer.errors import ConfigError
from cutlayer.kinds import SCALARS
from cutlayer.optim import Transform, squared_norm
from cutlayer.pieces.client import SplitClient
from cutlayer.places import Step
from cutlayer.servers import Server
from cutlayer.state import Grads
from cutlayer.values import PerClient


def joint_norms(
    client: SplitClient, step: Step, server: Server, gc: PerClient, gs: PerClient
) -> tuple[PerClient, PerClient]:
    """Both sides' gradients, each with the squared norm of the two together."""
    active = step.active
    at_clients = active.up(SCALARS(active.do(client.squared_norm, gc)))
    gs = server.each(_with_total, gs, at_clients)
    return active.do(client.with_norm, gc, active.down(SCALARS, gs.norm2)), gs


def _with_total(grads: Grads, other: Tensor) -> Grads:
    return grads._replace(norm2=squared_norm(grads.params).double() + other)


def refuse_joint_norm(method: str, *optimisers: Transform) -> None:
    """For methods whose server takes one step for several clients: there is no one joint gradient."""
    if any(opt.joint_norm for opt in optimisers):
        raise ConfigError(
            f"{method} cannot clip with clip_scope='joint': its server-side gradient belongs to no single client; "
            "use clip_scope='part'."
        )
