"""One back-propagated mini-batch across the cut: what goes up, where the loss is, what comes down.

`two_part` sends labels with the activations, and the server computes the loss: one round trip. `u_shaped` keeps labels
and the last layers at the client: the server's output comes down, its gradient goes up, two round trips.
"""

from functools import partial
from typing import Protocol

from torch import Tensor

from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, LABELS, SCALARS
from cutlayer.core.places import Step
from cutlayer.core.servers import Server
from cutlayer.core.state import Grads, Part, Tensors
from cutlayer.core.values import PerClient, united
from cutlayer.pieces.client import SplitClient
from cutlayer.split import Split


class Ascent(Protocol):
    """A mini-batch on its way up."""

    z: PerClient[Tensor]  # activations, at the server

    def loss(self, h: PerClient[Tensor]) -> tuple[PerClient[Tensor], PerClient[Tensor]]:
        """From the server's outputs: the loss of each client's batch, and its gradient at them."""


class Crossing(Ascent, Protocol):
    """A mini-batch that comes back."""

    def back(self, cut: PerClient[Tensor]) -> PerClient[Grads]:
        """Send the gradients at the cut down; the clients' gradients, at the clients."""


class Exchange(Protocol):
    """Starts a mini-batch: the clients' forward pass, to each one's own cut if told, and activations to the server."""

    def __call__(
        self, client: SplitClient, step: Step, server: Server, c: PerClient[Part], *cut: PerClient
    ) -> Crossing: ...


class Arrived:
    """Activations and labels at the server, which has the loss; nothing here goes back."""

    def __init__(self, model: Split, server: Server, z: PerClient[Tensor], y: PerClient[Tensor]) -> None:
        self.model, self.server, self.z, self.y = model, server, z, y

    def loss(self, h: PerClient[Tensor]) -> tuple[PerClient[Tensor], PerClient[Tensor]]:
        grads = self.server.grad(partial(_loss, self.model), h, self.y)
        return grads.loss, grads.cut


def _loss(model: Split, h: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
    return model.loss(h, y), {}


class TwoPart:
    """Labels travel; the loss is at the server."""

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
    """Labels and the last layers stay at the client, and so does the loss."""

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
    """The exchange that the split asks for."""
    exchange = UShaped if client.model.u_shaped else TwoPart
    return exchange(client, step, server, c, *cut)


def through_server(crossing: Ascent, model: Split, step: Step, server: Server, s: PerClient[Part]) -> PerClient[Grads]:
    """Gradients of each client's server-side part, with the loss, and with the gradient at the cut."""
    h, pull = server.vjp(model.upper, s, crossing.z, step.key)
    loss, gradient = crossing.loss(h)
    return server.each(with_loss, server.each(pull, gradient), loss)


def with_loss(grads: Grads, loss: Tensor) -> Grads:
    return grads._replace(loss=loss)
