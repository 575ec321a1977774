"""One back-propagated mini-batch across the cut: what goes up, where the loss is, what comes down.

`TwoPart` sends labels with the activations, and the server computes the loss: one round trip. `UShaped` keeps labels
and the last layers at the client: the server's output comes down and its gradient goes up, two round trips.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, LABELS, SCALARS
from cutlayer.core.places import Step
from cutlayer.core.servers import Server
from cutlayer.core.state import Grads, Part, Progress, Tensors
from cutlayer.core.values import Held, PerClient, united
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.split import Split

Turn = Callable[[Part, Progress, Grads], Part]


class Ascent(Protocol):
    """A mini-batch at the server, with its loss."""

    z: PerClient[Tensor]  # activations, at the server

    def loss(self, h: PerClient[Tensor]) -> tuple[PerClient[Tensor], PerClient[Tensor]]:
        """Return the loss of each client's batch, and its gradient at the server's outputs."""


class Crossing(Ascent, Protocol):
    """A mini-batch whose gradients go back to the clients."""

    def back(self, cut: PerClient[Tensor]) -> PerClient[Grads]:
        """Send the gradients at the cut down, and return the clients' gradients, at the clients."""


class Exchange(Protocol):
    """Starts a mini-batch: runs the clients' forward pass, to each client's cut if given, and brings activations up."""

    def __call__(
        self, client: SplitClient, step: Step, server: Server, c: PerClient[Part], *cut: PerClient
    ) -> Crossing: ...


class Arrived:
    """Activations and labels at the server, which computes the loss; nothing goes back."""

    def __init__(self, model: Split, server: Server, z: PerClient[Tensor], y: PerClient[Tensor]) -> None:
        self.model, self.server, self.z, self.y = model, server, z, y

    def loss(self, h: PerClient[Tensor]) -> tuple[PerClient[Tensor], PerClient[Tensor]]:
        grads = self.server.grad(partial(_loss, self.model), h, self.y)
        return grads.loss, grads.cut


def _loss(model: Split, h: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
    return model.loss(h, y), {}


class TwoPart:
    """Labels go up, and the server computes the loss."""

    def __init__(self, client: SplitClient, step: Step, server: Server, c: PerClient[Part], *cut: PerClient) -> None:
        self.active = step.active
        z, self.pull = self.active.vjp(client.forward, c, step.x, step.key, *cut)
        self.z, y = self.active.up(ACTIVATIONS(z), LABELS(step.y))
        self._arrived = Arrived(client.model, server, self.z, y)

    def loss(self, h: PerClient[Tensor]) -> tuple[PerClient[Tensor], PerClient[Tensor]]:
        return self._arrived.loss(h)

    def back(self, cut: PerClient[Tensor]) -> PerClient[Grads]:
        return self.active.do(self.pull, self.active.down(GRADIENTS, cut))


class UShaped:
    """Labels and the last layers stay at the client, which computes the loss."""

    def __init__(self, client: SplitClient, step: Step, server: Server, c: PerClient[Part], *cut: PerClient) -> None:
        self.client, self.step, self.c = client, step, c
        z, self.pull = step.active.vjp(client.forward, c, step.x, step.key, *cut)
        self.z = step.active.up(ACTIVATIONS(z))
        self.head: PerClient[Grads] = PerClient("clients", [])

    def loss(self, h: PerClient[Tensor]) -> tuple[PerClient[Tensor], PerClient[Tensor]]:
        who = self.step.active.only(h.ids)
        grads = who.grad(self.client.head_loss, self.c, who.down(ACTIVATIONS, h), self.step.y, self.step.key, cut=1)
        self.head = united(self.head, grads)
        cut, loss = who.up(GRADIENTS(grads.cut), SCALARS(grads.loss))
        return loss, cut

    def back(self, cut: PerClient[Tensor]) -> PerClient[Grads]:
        active = self.step.active
        body = active.do(self.pull, active.down(GRADIENTS, cut))
        return active.do(self.client.both_ends, body, self.head)


def by_shape(client: SplitClient, step: Step, server: Server, c: PerClient[Part], *cut: PerClient) -> Crossing:
    """Start the exchange that suits the shape of the split."""
    exchange = UShaped if client.model.u_shaped else TwoPart
    return exchange(client, step, server, c, *cut)


def through_server(crossing: Ascent, model: Split, step: Step, server: Server, s: PerClient[Part]) -> PerClient[Grads]:
    """Return the gradients of each client's server-side part, with the loss and the gradient at the cut."""
    h, pull = server.vjp(model.upper, s, crossing.z, step.key)
    loss, gradient = crossing.loss(h)
    return server.each(with_loss, server.each(pull, gradient), loss)


def with_loss(grads: Grads, loss: Tensor) -> Grads:
    return grads._replace(loss=loss)


def in_turns(
    turn: Turn,
    order: Iterable[int],
    crossing: Ascent,
    model: Split,
    step: Step,
    server: Server,
    s: Held[Part],
    progress: dict[int, Held[Progress]],
) -> tuple[Held[Part], PerClient[Tensor]]:
    """Let one server-side part take the clients' batches in turn; return it, and each client's gradient at the cut.

    Each turn uses and updates the client's own `progress`, so that a client that stops does not stop the others.
    """
    crossing.z = server.together(crossing.z)  # the order is drawn among all clients that answer
    cuts = {}
    for j in order:
        one = step.active.only((j,))
        gs = through_server(crossing, model, step, server, server.copies(s, one))
        if j not in gs.ids:  # it disconnected during its turn
            continue
        s = server.do(turn, s, progress[j], server.pick(gs, j))
        progress[j] = s.progress
        cuts[j] = server.pick(gs.cut, j)
    return s, server.rows(cuts)


class Side(NamedTuple):
    """The parts on one side of the cut, and their gradients."""

    parts: PerClient[Part]
    grads: PerClient[Grads]


def joint_norms(
    client: SplitClient, opt: Transform, step: Step, server: Server, below: Side, above: Side
) -> tuple[PerClient[Grads], PerClient[Grads]]:
    """Return both sides' gradients with the joint squared norm: a second round trip and 16 bytes a step.

    `opt` is the server's optimiser.
    """
    active = step.active
    at_clients = active.up(SCALARS(active.do(client.squared_norm, *below)))
    total = server.each(torch.add, server.each(opt.norm2, *above), at_clients)
    gs = server.each(client.with_norm, above.grads, total)
    return active.do(client.with_norm, below.grads, active.down(SCALARS, total)), gs
