"""The planner's problem: each device's cut and batch size, and what they cost (HASFL, sections IV to VI).

A cut is the number of layers at the device, from 1 to L; entry j - 1 of an array is for cut j. Workloads are in FLOPs,
data in bits. Between aggregations, a device has its own layers up to its cut and, at the server, from there to the
deepest cut of all devices; the layers above are common.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cutlayer.core.checks import check, check_positive
from cutlayer.errors import ConfigError
from cutlayer.planning.devices import PASSES, Devices
from cutlayer.planning.profile import Profile, Shapes, elements

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

VALUE_BITS = 32
REFERENCE_BATCH = 16  # the default target is reachable, with a margin, by this batch for everyone ...
MARGIN = 1.0  # ... and half of the layers at the devices
LEAST_GAP = 1e-12  # so that a loss of zero has a plan, too
LARGEST_BATCH = 2**31  # if memory is unlimited; exact as a float
GAP = 1e-9  # relative: a smaller gain counts as none
STRICTLY = 1 - 1e-9  # memory in use must be strictly less than the limit


Bits = Callable[[Shapes], float]  # tensors of a sample -> bits as they cross


def uncoded(shapes: Shapes) -> float:
    """Return the bits of tensors that cross as they are."""
    return float(VALUE_BITS * elements(shapes))


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """The costs of one sample through the layers up to each cut."""

    forward: Floats  # rho: FLOPs, cumulative
    backward: Floats  # varpi: FLOPs, cumulative
    up: Floats  # psi: bits of the activations at the cut
    down: Floats  # chi: bits of their gradients
    model: Floats  # delta: bits of the layers, cumulative
    state: Floats  # bits of their optimiser's state, cumulative
    values: Floats | None = None  # bits of activations and gradients in memory, if codecs make what crosses smaller

    @classmethod
    def of(cls, profile: Profile, up: Bits = uncoded, down: Bits = uncoded) -> "Costs":
        """Make them from a model's profile; a backward pass counts as two forward passes, as on the clock.

        `up` and `down` say how many bits the tensors of a sample take as they cross.
        """
        forward = np.array(profile.cumulative_forward_flops[1:], dtype=float)
        return cls(
            forward=forward,
            backward=(PASSES - 1) * forward,
            up=np.array([up(shapes) for shapes in profile.shapes[1:]], dtype=float),
            down=np.array([down(shapes) for shapes in profile.shapes[1:]], dtype=float),
            values=2 * VALUE_BITS * np.array(profile.activations[1:], dtype=float),
            model=VALUE_BITS * np.array(profile.cumulative_params[1:], dtype=float),
            state=VALUE_BITS * np.array(profile.cumulative_optimiser_state[1:], dtype=float),
        )

    @cached_property
    def held(self) -> Floats:
        """Bits of activations and gradients of one sample in all layers up to the cut."""
        held: Floats = np.cumsum(self.up + self.down if self.values is None else self.values)
        return held

    @property
    def above(self) -> Floats:
        """FLOPs of one sample, forward and backward, that are left to the server."""
        both = self.forward + self.backward
        above: Floats = both[-1] - both
        return above


@dataclass(frozen=True, kw_only=True, eq=False)
class Fleet:
    """The devices as arrays, and the servers."""

    flops: Floats
    up: Floats
    down: Floats
    fed_up: Floats
    fed_down: Floats
    memory: Floats
    server: float
    server_up: float
    server_down: float

    @classmethod
    def of(cls, devices: Devices, ids: tuple[int, ...] | None = None) -> "Fleet":
        """Make it from the devices of these clients, by default of all."""
        chosen = devices.clients if ids is None else tuple(devices.clients[j] for j in ids)
        return cls(
            flops=np.array([d.flops for d in chosen]),
            up=np.array([d.rate("up") for d in chosen]),
            down=np.array([d.rate("down") for d in chosen]),
            fed_up=np.array([d.rate("up", "fed") for d in chosen]),
            fed_down=np.array([d.rate("down", "fed") for d in chosen]),
            memory=np.array([d.memory for d in chosen]),
            server=devices.server,
            server_up=devices.server_up,
            server_down=devices.server_down,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """The constants of the convergence bound (16): what is known about the loss and its gradients."""

    beta: float  # smoothness: how fast gradients change
    lr: float  # gamma
    noise: Floats  # sigma_j^2: variance of one sample's gradient in each layer
    slope: Floats  # G_j^2: squared norm of each layer's gradient
    gap: float  # vartheta: the loss less the best loss
    target: float | None = None  # epsilon: mean squared gradient norm to reach; see Problem.target for the default

    def __post_init__(self) -> None:
        for name in ("beta", "lr", "gap"):
            check_positive(f"{name} of a bound", getattr(self, name))
        if self.target is not None:
            check_positive("the target of a bound", self.target)
        for name in ("noise", "slope"):
            values = np.asarray(getattr(self, name), dtype=float)
            holds = values.ndim == 1 and bool((np.isfinite(values) & (values >= 0)).all())
            check(holds, f"{name} of a bound", getattr(self, name), "a number from 0 up for each layer")
            object.__setattr__(self, name, values)

    @property
    def valid(self) -> bool:
        """Whether the theorem holds at this learning rate."""
        return self.lr * self.beta <= 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Latency:
    """The terms of one training round and one aggregation, in seconds, with the numbers of their equations."""

    forward: Floats  # (28) at each device
    up: Floats  # (29)
    server_forward: float  # (30)
    server_backward: float  # (31)
    down: Floats  # (32)
    backward: Floats  # (33)
    model_up: Floats  # (34)
    servers_up: float  # (35)
    model_down: Floats  # (36)
    servers_down: float  # (37)

    @property
    def split(self) -> float:
        """(38) The seconds of one mini-batch of everyone."""
        there, back = (self.forward + self.up).max(), (self.down + self.backward).max()
        return float(there + self.server_forward + self.server_backward + back)

    @property
    def aggregation(self) -> float:
        """(39) The seconds to send the devices' own layers to the fed server and back."""
        up, down = max(self.model_up.max(), self.servers_up), max(self.model_down.max(), self.servers_down)
        return float(up + down)

    @property
    def own(self) -> Floats:
        """The seconds of a mini-batch at each device by itself."""
        return self.forward + self.up + self.down + self.backward

    @property
    def straggler(self) -> int:
        """The device that takes the longest."""
        return int(self.own.argmax())


class CostTable(NamedTuple):
    """What one sample costs each device at each cut: a row a device, a column a cut."""

    there: Floats  # seconds of forward and uplink: what R3 bounds
    back: Floats  # seconds of downlink and backward: R4
    server: Floats  # C of (47): seconds at the server, the same for all devices; one row
    capacity: Floats  # the largest batch by memory and samples, not rounded

    def at(self, cuts: Ints) -> "CostTable":
        """Return the entries for one cut a device, as vectors."""
        i, j = np.arange(len(cuts)), cuts - 1
        return CostTable(self.there[i, j], self.back[i, j], self.server[j], self.capacity[i, j])


def of_others(values: Floats | Ints) -> Floats:
    """Return, for each entry, the largest of all others; 0 if there is only one."""
    others = np.full(len(values), values.max(), dtype=float)
    k = int(values.argmax())
    others[k] = np.delete(values, k).max(initial=0)
    return others


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Find the cuts and batch sizes that reach the target in the least time (P', equations 44 and 45)."""

    costs: Costs
    fleet: Fleet
    bound: Bound
    interval: int = 15  # I: mini-batches between aggregations
    samples: Ints | None = None  # of each device: no batch is larger
    least: int = 1  # no batch is smaller, unless a device has fewer samples

    def __post_init__(self) -> None:
        for name in ("noise", "slope"):
            if len(getattr(self.bound, name)) != self.num_layers:
                raise ConfigError(
                    f"the bound has {name} for {len(getattr(self.bound, name))} layers, but the model has "
                    f"{self.num_layers}; estimate it with this model"
                )
        for name in ("interval", "least"):
            value = getattr(self, name)
            check(isinstance(value, int) and value >= 1, name, value, "a whole number from 1 up")
        if self.samples is not None and self.samples.min(initial=0) < 0:
            raise ConfigError(f"a device has {self.samples.min()} samples; give a number from 0 up for each device")

    @property
    def num_devices(self) -> int:
        return len(self.fleet.flops)

    @property
    def num_layers(self) -> int:
        return len(self.costs.forward)

    @cached_property
    def smallest(self) -> Floats:
        """The smallest batch of each device."""
        everyone: Floats = np.full(self.num_devices, float(self.least))
        return everyone if self.samples is None else np.maximum(np.minimum(everyone, self.samples), 1.0)

    @cached_property
    def table(self) -> CostTable:
        """What one sample costs each device at each cut."""
        costs, fleet = self.costs, self.fleet
        room = [self.capacity(np.full(self.num_devices, cut)) for cut in range(1, self.num_layers + 1)]
        return CostTable(
            there=np.outer(1 / fleet.flops, costs.forward) + np.outer(1 / fleet.up, costs.up),
            back=np.outer(1 / fleet.down, costs.down) + np.outer(1 / fleet.flops, costs.backward),
            server=costs.above / fleet.server,
            capacity=np.stack(room, axis=1),
        )

    # -- convergence ----------------------------------------------------------------------------------------------

    @property
    def noise_rate(self) -> float:
        """B of (27): the noise term is the sum of B / batch."""
        bound = self.bound
        return bound.beta * bound.lr / self.num_devices**2 * float(bound.noise.sum())

    @property
    def drift_rate(self) -> float:
        """K of (27): the drift per squared gradient norm below the deepest cut; zero if every step aggregates."""
        return 4 * (self.bound.beta * self.bound.lr * self.interval) ** 2 if self.interval > 1 else 0.0

    @cached_property
    def slopes(self) -> Floats:
        """Squared gradient norm of all layers up to each cut."""
        slopes: Floats = np.cumsum(self.bound.slope)
        return slopes

    @property
    def target(self) -> float:
        """epsilon: that of the bound, or by default one that a middling plan reaches with a margin."""
        if self.bound.target is not None:
            return self.bound.target
        middle = self.slopes[max(self.num_layers // 2 - 1, 0)]
        return float((1 + MARGIN) * (self.noise_rate * self.num_devices / REFERENCE_BATCH + self.drift_rate * middle))

    def headroom(self, batches: ArrayLike, cuts: ArrayLike) -> float:
        """Return the denominator of (45): the target less the bound's constant part."""
        noise = self.noise_rate * float((1 / np.asarray(batches, dtype=float)).sum())
        deepest = int(np.asarray(cuts).max())
        return float(self.target - noise - self.drift_rate * self.slopes[deepest - 1])

    def rounds(self, batches: ArrayLike, cuts: ArrayLike) -> float:
        """Return the mini-batches until the target (27); infinite if the plan cannot reach it."""
        room = self.headroom(batches, cuts)
        return 2 * self.bound.gap / (self.bound.lr * room) if room > 0 else float("inf")

    # -- memory ---------------------------------------------------------------------------------------------------

    def capacity(self, cuts: ArrayLike) -> Floats:
        """Return the largest batch, not rounded, of each device that fits its memory (C4) and its samples."""
        j = np.asarray(cuts) - 1
        room = STRICTLY * self.fleet.memory - self.costs.state[j] - self.costs.model[j]
        largest: Floats = np.minimum(room / self.costs.held[j], LARGEST_BATCH)
        return largest if self.samples is None else np.minimum(largest, self.samples)

    def fits(self, batches: ArrayLike, cuts: ArrayLike) -> bool:
        """Return whether all batches fit the memory (C4) and the samples."""
        return bool((np.asarray(batches) <= self.capacity(cuts)).all())

    # -- time -----------------------------------------------------------------------------------------------------

    def latency(self, batches: ArrayLike, cuts: ArrayLike) -> Latency:
        """Return the terms of equations 28 to 37."""
        b, j = np.asarray(batches, dtype=float), np.asarray(cuts) - 1
        costs, fleet = self.costs, self.fleet
        own = costs.model[j]
        between = self.num_devices * own.max() - own.sum()  # Lambda_s
        return Latency(
            forward=b * costs.forward[j] / fleet.flops,
            up=b * costs.up[j] / fleet.up,
            server_forward=float((b * (costs.forward[-1] - costs.forward[j])).sum() / fleet.server),
            server_backward=float((b * (costs.backward[-1] - costs.backward[j])).sum() / fleet.server),
            down=b * costs.down[j] / fleet.down,
            backward=b * costs.backward[j] / fleet.flops,
            model_up=own / fleet.fed_up,
            servers_up=float(between / fleet.server_up),
            model_down=own / fleet.fed_down,
            servers_down=float(between / fleet.server_down),
        )

    def seconds_per_round(self, batches: ArrayLike, cuts: ArrayLike) -> float:
        """Return the seconds of a mini-batch with its share of the aggregation."""
        latency = self.latency(batches, cuts)
        return latency.split + latency.aggregation / self.interval

    def seconds(self, batches: ArrayLike, cuts: ArrayLike) -> float:
        """Return the seconds until the target (45); infinite if it does not fit the memory or misses the target."""
        if not self.fits(batches, cuts):
            return float("inf")
        return self.rounds(batches, cuts) * self.seconds_per_round(batches, cuts)
