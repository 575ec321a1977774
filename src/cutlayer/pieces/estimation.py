"""How HASFL's places look at the loss together: at both ends of a round, on the same batch in two halves."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from cutlayer.core.kinds import STATISTICS, SYNC
from cutlayer.core.places import Clients, Step
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Grads, Part
from cutlayer.core.values import Held, PerClient
from cutlayer.pieces.finite_mean import all_finite, mean_of, or_zero
from cutlayer.pieces.observe import Estimates, Look, Observer, both, estimated, with_beta

Gradients = Callable[[Step], tuple[PerClient[Grads], PerClient[Grads], PerClient[Grads]]]


class Parts(NamedTuple):
    """The model as it is held during a round, and each device's cut where it is needed."""

    device: PerClient[Part]  # W_c,i: the layers up to the device's own cut
    between: PerClient[Part]  # h_m,i: from there to the deepest cut of all, at the server
    common: Held[Part]  # h_s: above the deepest cut
    cut: PerClient[int]  # told to the devices
    cut_there: PerClient[int]  # the same at the server
    deepest: int


class Looks(NamedTuple):
    """What each part saw at one end of a round."""

    device: PerClient[Look]
    between: PerClient[Look]
    common: PerClient[Look]
    loss: PerClient[Tensor]


class Watch(NamedTuple):
    """The clients that look, and where what they see goes."""

    observer: Observer
    clients: Clients
    sizes: Mapping[int, int]  # of their batches
    server: Server
    fed: Fed

    def look(self, gradients: Gradients, parts: Parts) -> Looks | None:
        """Gradients of the round's first batch, half by half, at the weights as they are now, if anyone is left."""
        watch, clients, server = self.observer, self.clients, self.server
        step = next(clients.steps(sizes=self.sizes, count=1), None)
        if step is None:
            return None
        halves = (watch.first_half, watch.first_labels), (watch.second_half, watch.second_labels)
        (c1, m1, s1), (c2, m2, s2) = (
            gradients(replace(step, x=clients.do(inputs, step.x), y=clients.do(labels, step.y)))
            for inputs, labels in halves
        )
        return Looks(
            device=clients.do(watch.look, parts.device, c1, c2),
            between=server.each(watch.look, parts.between, m1, m2),
            common=server.each(watch.look, parts.common, s1, s2),
            loss=server.each(_middle, s1.loss, s2.loss),
        )

    def estimate(self, begin: Looks, end: Looks) -> Held[Estimates] | None:
        """The clients' and the server's shares meet at the fed server; only means over the clients go back, if any do.

        A mean over a single client, where the others were lost, would tell of it.
        """
        compare, clients, server, fed = self.observer.compare, self.clients, self.server, self.fed
        below = clients.up(STATISTICS(clients.do(compare, begin.device, end.device)))
        if len(below.ids) < 2:
            return None
        between = server.each(compare, begin.between, end.between)
        above = server.each(both, between, server.each(compare, begin.common, end.common))
        above, loss = server.send(STATISTICS, above, fed), server.send(STATISTICS, begin.loss, fed)
        size = fed.rows({j: fed.hold(self.sizes[j] // 2 * 2) for j in clients.ids})
        rows = fed.each(estimated, below, above, size, loss)
        ok, weights = fed.each(all_finite, rows), {j: clients.weights[j] for j in rows.ids}
        rows = fed.each(or_zero, rows, ok)  # a client that saw what is not finite is left out
        mean = mean_of(fed, rows, ok)
        beta = mean_of(fed, rows.beta, ok, weights)
        mean = fed.do(with_beta, mean, beta)
        return fed.send(SYNC, mean, server)


def _middle(a: Tensor, b: Tensor) -> Tensor:
    return (a + b) / 2
