"""A gradient norm over both sides of the cut: a second round trip and 16 bytes a step, for joint clipping."""

from typing import NamedTuple

import torch
from torch import Tensor

from cutlayer.core.kinds import SCALARS
from cutlayer.core.places import Step
from cutlayer.core.servers import Server
from cutlayer.core.state import Grads, Part
from cutlayer.core.values import PerClient
from cutlayer.errors import ConfigError
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient


class Side(NamedTuple):
    """The parts on one side of the cut with their gradients."""

    parts: PerClient[Part]
    grads: PerClient[Grads]


def joint_norms(
    client: SplitClient, opt: Transform, step: Step, server: Server, below: Side, above: Side
) -> tuple[PerClient[Grads], PerClient[Grads]]:
    """Both sides' gradients, each with the squared norm of the two together; `opt` is the server's."""
    active = step.active
    at_clients = active.up(SCALARS(active.do(client.squared_norm, *below)))
    total = server.each(torch.add, server.each(opt.norm2, *above), at_clients)
    gs = server.each(_with_norm, above.grads, total)
    return active.do(client.with_norm, below.grads, active.down(SCALARS, total)), gs


def _with_norm(grads: Grads, norm2: Tensor) -> Grads:
    return grads._replace(norm2=norm2)


def refuse_joint_norm(method: str, *optimisers: Transform) -> None:
    """For methods whose server takes one step for several clients: there is no one joint gradient."""
    if any(opt.joint_norm for opt in optimisers):
        raise ConfigError(
            f"{method} cannot clip with clip_scope='joint': its server-side gradient belongs to no single client; "
            "use clip_scope='part'."
        )
