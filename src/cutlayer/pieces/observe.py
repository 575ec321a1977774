"""HASFL's running estimates of beta, sigma_j^2 and G_j^2.

The same mini-batch, in two halves, is differentiated at the weights of the beginning and of the end of a round. The
halves show the noise of a gradient, and the two ends show how fast it changes. Each place compares its own layers. The
clients' and the training server's shares meet at the fed server, and only means over the clients go back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.kinds import LABELS, STATISTICS, SYNC
from cutlayer.core.places import Clients, Step
from cutlayer.core.program import at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Grads, Part, Tensors
from cutlayer.core.tree import Tree
from cutlayer.core.values import Held, PerClient
from cutlayer.pieces.finite_mean import all_finite, mean_of, or_zero
from cutlayer.planning.estimate import smoothed, smoothness, unit_norms
from cutlayer.split import Split

Gradients = Callable[[Step], tuple[PerClient[Grads], PerClient[Grads], PerClient[Grads]]]

KEPT_BETA, KEPT = 0.5, 0.9  # weight of the old estimate in the new one


class Look(NamedTuple):
    """A part at one end of a round, with statistics of a mini-batch in two halves."""

    params: Tensors
    gradient: Tensors  # mean over the two halves
    apart: Tensor  # by unit: squared distance between the gradients of the two halves
    slope: Tensor  # by unit: squared norm of the gradient


@tree.storable
class Seen(NamedTuple):
    """One part's share of a client's statistics; the shares of all parts add up."""

    apart: Tensor
    slope: Tensor
    change2: Tensor  # squared change of the gradient from the beginning of the round to its end
    distance2: Tensor  # squared change of the weights in the same time


@tree.storable
class Estimates(NamedTuple):
    """The estimates of one client, or means over clients."""

    beta: Tensor
    noise: Tensor  # by unit: sigma_j^2
    slope: Tensor  # by unit: G_j^2
    gap: Tensor  # the loss when the round began


@dataclass(frozen=True, kw_only=True)
class Observer:
    """The statistics that a client computes; a server computes the same for its parts."""

    model: Split

    @at_client(passes="x")
    def first_half(self, x: Tree) -> Tree:
        return tree.map(_first, x)

    @at_client(passes="x")
    def second_half(self, x: Tree) -> Tree:
        return tree.map(_second, x)

    @at_client(gives=LABELS, passes="y")
    def first_labels(self, y: Tensor) -> Tensor:
        return _first(y)

    @at_client(gives=LABELS, passes="y")
    def second_labels(self, y: Tensor) -> Tensor:
        return _second(y)

    @at_client()
    def look(self, part: Part, first: Grads, second: Grads) -> Look:
        g1, g2 = first.params, second.params
        mean = {name: (value + g2[name]) / 2 for name, value in g1.items()}
        like = part.progress.loss if first.loss is None else first.loss
        apart, slope = self._norms(_minus(g1, g2), like), self._norms(mean, like)
        return Look(part.params, mean, apart=apart, slope=slope)

    @at_client(gives=STATISTICS)
    def compare(self, begin: Look, end: Look) -> Seen:
        """Compare both ends of a round; `apart` and `slope` are means over the two."""
        return Seen(
            apart=(begin.apart + end.apart) / 2,
            slope=(begin.slope + end.slope) / 2,
            change2=self._norms(_minus(end.gradient, begin.gradient), begin.slope).sum(),
            distance2=self._norms(_minus(end.params, begin.params), begin.slope).sum(),
        )

    def _norms(self, tensors: Tensors, like: Tensor) -> Tensor:
        """Return the squared norm of each unit; for a part without parameters, zeros of the type of `like`."""
        units = self.model.unit_params
        return unit_norms(units, tensors) if tensors else like.new_zeros(len(units))


def both(a: Seen, b: Seen) -> Seen:
    return Seen(*(x + y for x, y in zip(a, b, strict=True)))


def estimated(below: Seen, above: Seen, size: int, loss: Tensor) -> Estimates:
    """Return one client's estimates from a batch of this size: E||g' - g''||^2 = 4 sigma^2 / b."""
    seen = both(below, above)
    return Estimates(smoothness(seen.change2, seen.distance2), size / 4 * seen.apart, seen.slope, loss)


def with_beta(estimates: Estimates, beta: Tensor) -> Estimates:
    return estimates._replace(beta=beta)


def renewed(old: Estimates, new: Estimates) -> Estimates:
    return Estimates(
        beta=smoothed(old.beta, new.beta, KEPT_BETA),
        noise=smoothed(old.noise, new.noise, KEPT),
        slope=smoothed(old.slope, new.slope, KEPT),
        gap=smoothed(old.gap, new.gap, 0.0),
    )


def _first(a: Tensor) -> Tensor:
    return a[: len(a) // 2]


def _second(a: Tensor) -> Tensor:
    return a[len(a) // 2 : len(a) // 2 * 2]


def _minus(a: Tensors, b: Tensors) -> Tensors:
    return {name: value - b[name] for name, value in a.items()}


class Parts(NamedTuple):
    """The parts of the model during a round, and each device's cut."""

    device: PerClient[Part]  # W_c,i: the layers up to the device's own cut
    between: PerClient[Part]  # h_m,i: from there to the deepest cut of all, at the server
    common: Held[Part]  # h_s: above the deepest cut
    cut: PerClient[int]  # at the devices
    cut_there: PerClient[int]  # the same at the server
    deepest: int


class Looks(NamedTuple):
    """The statistics of all parts at one end of a round."""

    device: PerClient[Look]
    between: PerClient[Look]
    common: PerClient[Look]
    loss: PerClient[Tensor]


class Watch(NamedTuple):
    """The clients that compute statistics, and the servers that combine them."""

    observer: Observer
    clients: Clients
    sizes: Mapping[int, int]  # of their batches
    server: Server
    fed: Fed

    def look(self, gradients: Gradients, parts: Parts) -> Looks | None:
        """Return statistics of the round's first batch at the current weights; None if no client is left."""
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
        """Combine the clients' and the server's shares at the fed server; only means over the clients go back.

        Return None if only one client is left: the mean would reveal its values.
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
        rows = fed.each(or_zero, rows, ok)  # leave out a client whose estimates are not finite
        mean = mean_of(fed, rows, ok)
        beta = mean_of(fed, rows.beta, ok, weights)
        mean = fed.do(with_beta, mean, beta)
        return fed.send(SYNC, mean, server)


def _middle(a: Tensor, b: Tensor) -> Tensor:
    return (a + b) / 2
