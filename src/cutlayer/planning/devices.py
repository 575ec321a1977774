"""Devices: the speed, the transfer rates and the memory of each client."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

from cutlayer import registry
from cutlayer.core import keys
from cutlayer.core.checks import check, check_positive, is_number
from cutlayer.errors import ConfigError, DataError
from cutlayer.planning.device_files import GIGABYTE, MEGABIT, TERAFLOPS, Measured, read

# Forward FLOPs of ResNet-18 with a 3x3 stem on one 3x32x32 image, two to a multiply-add. A stage has twice the channels
# of the one before on a quarter of the pixels, so its blocks cost the same:
#   stem                               3*64*9 * 32*32                               =   1 769 472
#   5 blocks that keep the size        2 * 64*64*9 * 32*32                          =  75 497 472 each
#   3 blocks that halve it             (64*128*9 + 128*128*9 + 64*128) * 16*16      =  58 720 256 each
#   head                               512*10                                       =       5 120
REFERENCE_FLOPS = 2 * 555_422_720
PASSES = 3  # a training step costs three forward passes: one forward, and two for the gradients
Lanes = Literal["parallel", "shared"]
LARGEST_SIGMA = 10.0  # one sigma is then a factor of 22,000


class Device(NamedTuple):
    """The resources of one client."""

    flops: float  # FLOP/s
    up: float  # bit/s to the training server
    down: float  # bit/s from the training server
    fed_up: float | None = None  # bit/s to the fed server; by default as to the training server
    fed_down: float | None = None
    memory: float = math.inf  # bits for the layers, their activations and the optimiser
    name: str = ""  # for people

    def rate(self, direction: Literal["up", "down"], server: str = "server") -> float:
        """Return the bit/s between this client and the training server or the fed server."""
        to_fed = (self.fed_up if direction == "up" else self.fed_down) if server == "fed" else None
        return to_fed or (self.up if direction == "up" else self.down)


REQUIRED = ("flops", "up", "down")
OPTIONAL = ("fed_up", "fed_down", "memory")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """All clients of a run, by client number, and the training server."""

    clients: tuple[Device, ...]
    server: float  # FLOP/s of the training server: of each client's lane, or in total if they share it
    lanes: Lanes = "parallel"  # whether each client has its own lane there, or the work of all adds up
    server_up: float = math.inf  # bit/s from the training server to the fed server
    server_down: float = math.inf  # bit/s from the fed server to the training server
    model_sync: bool = False  # whether sending models takes time

    def __post_init__(self) -> None:
        _check_speeds(self.clients)
        check_positive("the server's flops", self.server)
        _check_lanes(self.lanes)
        for name in ("server_up", "server_down"):
            rate = getattr(self, name)
            check(rate == math.inf or (is_number(rate) and rate > 0), name, rate, "a number above 0")

    def seconds_per_sample(self, *, flops_below: float, up_bits: float, down_bits: float) -> tuple[float, ...]:
        """Return each client's seconds for one sample in training: its own computation and the transfers up and down.

        `flops_below`: forward FLOPs of the client's layers. The bits are those of a sample at the cut.
        """
        return tuple(PASSES * flops_below / d.flops + up_bits / d.up + down_bits / d.down for d in self.clients)


def server_speed(clients: Sequence[Device], kappa: float) -> float:
    """Return the FLOP/s of a server that needs 1/kappa of the clients' average time for the same work."""
    _check_speeds(clients)
    return kappa * len(clients) / math.fsum(1 / d.flops for d in clients)


def _check_speeds(clients: Sequence[Device]) -> None:
    if not clients:
        raise ConfigError("devices for no clients; give at least one")
    for j, device in enumerate(clients):
        for name in (*REQUIRED, *OPTIONAL):
            value = getattr(device, name)
            unset = name in OPTIONAL and value == Device._field_defaults[name]
            check(
                unset or (is_number(value) and value > 0), f"{name} of client {j}'s device", value, "a number above 0"
            )


def _check_lanes(lanes: Any) -> None:
    check(lanes in get_args(Lanes), "lanes", lanes, " or ".join(map(repr, get_args(Lanes))))


class DeviceScheme(Protocol):
    """A way to draw devices, with its settings."""

    def draw(self, num_clients: int, forward_flops: float, key: int) -> Devices: ...


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices at random: speeds and rates with log-normal spreads."""

    seconds_median: float = 0.034  # of a forward pass of ResNet-18 on one 32x32 image
    seconds_sigma: float = 0.6  # standard deviation of the logarithm
    kbits_median: float = 59_000.0  # kbit/s, up and down
    kbits_sigma: float = 0.8
    kappa: float = 100.0  # how many times as fast as the average client the server's lanes are
    model_sync: bool = False  # whether sending the client-side model takes time

    def __post_init__(self) -> None:
        for name in ("seconds_median", "kbits_median", "kappa"):
            check_positive(name, getattr(self, name))
        for name in ("seconds_sigma", "kbits_sigma"):
            sigma = getattr(self, name)
            holds = is_number(sigma) and 0 <= sigma <= LARGEST_SIGMA
            check(holds, name, sigma, f"a number from 0 to {LARGEST_SIGMA:g}")

    def draw(self, num_clients: int, forward_flops: float, key: int) -> Devices:
        """Draw one device per client, whatever the model; more clients do not change the first ones."""
        normal = keys.generator(key, "devices").standard_normal((num_clients, 2)).tolist()
        clients = []
        for slowness, luck in normal:
            rate = 1000 * self.kbits_median * math.exp(self.kbits_sigma * luck)
            flops = REFERENCE_FLOPS / self.seconds_median * math.exp(-self.seconds_sigma * slowness)
            clients.append(Device(flops=flops, up=rate, down=rate))
        return Devices(clients=tuple(clients), server=server_speed(clients, self.kappa), model_sync=self.model_sync)


Range = tuple[float, float]  # from, to


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Devices at random: speeds and rates anywhere in their ranges; by default those of HASFL's Table I."""

    server_tflops: float = 20.0
    tflops: Range = (1.0, 2.0)
    mbits_up: Range = (75.0, 80.0)  # Mbit/s to the training server, and to the fed server
    mbits_down: Range = (360.0, 380.0)
    mbits_servers: Range = (360.0, 380.0)  # Mbit/s between the servers, each way
    memory_gb: Range | None = None  # 1e9 bytes; unlimited by default
    lanes: Lanes = "shared"
    model_sync: bool = True  # whether sending models takes time

    def __post_init__(self) -> None:
        check_positive("server_tflops", self.server_tflops)
        for name in ("tflops", "mbits_up", "mbits_down", "mbits_servers", "memory_gb"):
            if name != "memory_gb" or self.memory_gb is not None:
                _check_range(name, getattr(self, name))
        _check_lanes(self.lanes)

    def draw(self, num_clients: int, forward_flops: float, key: int) -> Devices:
        """Draw one device per client, whatever the model; more clients do not change the first ones."""
        between = [MEGABIT * _within(self.mbits_servers, u) for u in keys.generator(key, "servers").random(2).tolist()]
        return Devices(
            clients=tuple(map(self._device, keys.generator(key, "devices").random((num_clients, 6)).tolist())),
            server=TERAFLOPS * self.server_tflops,
            lanes=self.lanes,
            server_up=between[0],
            server_down=between[1],
            model_sync=self.model_sync,
        )

    def _device(self, chances: Sequence[float]) -> Device:
        speed, up, down, fed_up, fed_down, memory = chances
        return Device(
            flops=TERAFLOPS * _within(self.tflops, speed),
            up=MEGABIT * _within(self.mbits_up, up),
            down=MEGABIT * _within(self.mbits_down, down),
            fed_up=MEGABIT * _within(self.mbits_up, fed_up),
            fed_down=MEGABIT * _within(self.mbits_down, fed_down),
            memory=math.inf if self.memory_gb is None else GIGABYTE * _within(self.memory_gb, memory),
        )


def _check_range(name: str, limits: Any) -> None:
    holds = (
        isinstance(limits, tuple) and len(limits) == 2 and all(map(is_number, limits)) and 0 < limits[0] <= limits[1]
    )
    check(holds, name, limits, "two numbers above 0, the smaller one first")


def _within(limits: Range, chance: float) -> float:
    low, high = limits
    return low + chance * (high - low)


KAPPA = 100.0


@dataclass(frozen=True, kw_only=True)
class File:
    """Devices that were measured: a CSV or JSON file in the order of the clients, or `sample`, 20 that come along."""

    path: str  # relative to the working directory; or "sample", the list that comes with cutlayer
    kappa: float | None = None  # how many times as fast as the average client the server is; 100 by default
    server_tflops: float | None = None  # or its own speed
    lanes: Lanes = "parallel"
    mbits_servers: float | None = None  # Mbit/s between the servers, each way; unlimited by default
    model_sync: bool = False  # whether sending models takes time

    def __post_init__(self) -> None:
        for name in ("kappa", "server_tflops", "mbits_servers"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.kappa is not None and self.server_tflops is not None:
            raise ConfigError(
                f"kappa is {self.kappa} and server_tflops is {self.server_tflops}, but either gives the server's "
                "speed; keep one"
            )
        _check_lanes(self.lanes)

    def draw(self, num_clients: int, forward_flops: float, key: int) -> Devices:
        """Return the first devices of the file, one per client; the key has no effect."""
        check_positive("forward_flops", forward_flops)
        found = read(self.path)
        if len(found) < num_clients:
            raise DataError(
                f"the device file {self.path} holds {len(found)} devices, but the run has {num_clients} clients; "
                f"add devices, or use at most {len(found)} clients"
            )
        clients = tuple(_device(measured, forward_flops) for measured in found[:num_clients])
        between = math.inf if self.mbits_servers is None else MEGABIT * self.mbits_servers
        return Devices(
            clients=clients,
            server=self._server(clients),
            lanes=self.lanes,
            server_up=between,
            server_down=between,
            model_sync=self.model_sync,
        )

    def _server(self, clients: Sequence[Device]) -> float:
        if self.server_tflops is not None:
            return TERAFLOPS * self.server_tflops
        return server_speed(clients, KAPPA if self.kappa is None else self.kappa)


def _device(measured: Measured, forward_flops: float) -> Device:
    values = measured._asdict()
    seconds = values.pop("seconds")
    return Device(**{**values, "flops": measured.flops or forward_flops / seconds})


DEVICES: registry.Table[Callable[..., DeviceScheme]] = registry.table(
    "DEVICES", {"pool": Pool, "table1": Uniform, "file": File}
)
