"""Devices: how fast each client computes and transfers."""

import csv
import io
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from cutlayer import keys
from cutlayer.checks import check, check_positive, is_number, reason
from cutlayer.errors import ConfigError, DataError

# Forward FLOPs of ResNet-18 with a 3x3 stem on one 3x32x32 image, two to a multiply-add. A stage has twice the channels
# of the one before on a quarter of the pixels, so its blocks cost the same:
#   stem                               3*64*9 * 32*32                               =   1 769 472
#   5 blocks that keep the size        2 * 64*64*9 * 32*32                          =  75 497 472 each
#   3 blocks that halve it             (64*128*9 + 128*128*9 + 64*128) * 16*16      =  58 720 256 each
#   head                               512*10                                       =       5 120
REFERENCE_FLOPS = 2 * 555_422_720
PASSES = 3  # a training step costs as much as three forward passes: one forward, and two for both gradients
Lanes = Literal["parallel", "shared"]
LARGEST_SIGMA = 10.0  # one sigma is then a factor of 22 000


class Device(NamedTuple):
    """What one client has to offer."""

    flops: float  # FLOP/s
    up: float  # bit/s to the training server
    down: float  # bit/s from there
    fed_up: float | None = None  # bit/s to the fed server; as to the training server by default
    fed_down: float | None = None
    memory: float = math.inf  # bits for the layers, their activations and the optimiser

    def rate(self, direction: Literal["up", "down"], server: str = "server") -> float:
        """bit/s between this client and the training server, or the fed server."""
        to_fed = (self.fed_up if direction == "up" else self.fed_down) if server == "fed" else None
        return to_fed or (self.up if direction == "up" else self.down)


OPTIONAL = ("fed_up", "fed_down", "memory")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """All clients of a run, by client number, and the training server."""

    clients: tuple[Device, ...]
    server: float  # FLOP/s of the training server: of each client's lane, or of all of it where they share it
    lanes: Lanes = "parallel"  # whether each client has a lane of its own there, or the work of all adds up
    server_up: float = math.inf  # bit/s from the training server to the fed server
    server_down: float = math.inf  # bit/s back
    model_sync: bool = False  # whether sending models takes time

    def __post_init__(self) -> None:
        _check_speeds(self.clients)
        check_positive("the server's flops", self.server)
        check(self.lanes in get_args(Lanes), "lanes", self.lanes, " or ".join(map(repr, get_args(Lanes))))
        for name in ("server_up", "server_down"):
            rate = getattr(self, name)
            check(rate == math.inf or (is_number(rate) and rate > 0), name, rate, "a number above 0")

    def seconds_per_sample(self, *, flops_below: float, cut_bits: float) -> tuple[float, ...]:
        """Each client's seconds for one sample in training: its own computation, and what crosses up and down.

        `flops_below`: forward FLOPs of the client's layers. `cut_bits`: bits that go up, and as many come down.
        """
        return tuple(PASSES * flops_below / d.flops + cut_bits / d.up + cut_bits / d.down for d in self.clients)


def server_speed(clients: Sequence[Device], kappa: float) -> float:
    """FLOP/s of a server that needs 1/kappa of the time that the clients need on average for the same work."""
    _check_speeds(clients)
    return kappa * len(clients) / math.fsum(1 / d.flops for d in clients)


def _check_speeds(clients: Sequence[Device]) -> None:
    if not clients:
        raise ConfigError("devices for no clients; give at least one")
    for j, device in enumerate(clients):
        for name, value in device._asdict().items():
            unset = name in OPTIONAL and value == Device._field_defaults[name]
            check(
                unset or (is_number(value) and value > 0), f"{name} of client {j}'s device", value, "a number above 0"
            )


class Scheme(Protocol):
    """A way to get devices, with its settings."""

    def draw(self, num_clients: int, forward_flops: float, key: int) -> Devices: ...


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices at random: speeds and rates with log-normal spreads."""

    seconds_median: float = 0.034  # for one sample through ResNet-18 on 32x32 images, forward
    seconds_sigma: float = 0.6  # standard deviation of the logarithm
    kbits_median: float = 59_000.0  # kbit/s, up and down
    kbits_sigma: float = 0.8
    kappa: float = 100.0  # the server's lanes are so many times as fast as the average client
    model_sync: bool = False  # whether sending the client-side model takes time

    def __post_init__(self) -> None:
        for name in ("seconds_median", "kbits_median", "kappa"):
            check_positive(name, getattr(self, name))
        for name in ("seconds_sigma", "kbits_sigma"):
            sigma = getattr(self, name)
            holds = is_number(sigma) and 0 <= sigma <= LARGEST_SIGMA
            check(holds, name, sigma, f"a number from 0 to {LARGEST_SIGMA:g}")

    def draw(self, num_clients: int, forward_flops: float, key: int) -> Devices:
        """A device per client, the same ones whatever the model; with more clients the first ones stay."""
        normal = keys.generator(key, "devices").standard_normal((num_clients, 2)).tolist()
        clients = []
        for slowness, luck in normal:
            rate = 1000 * self.kbits_median * math.exp(self.kbits_sigma * luck)
            flops = REFERENCE_FLOPS / self.seconds_median * math.exp(-self.seconds_sigma * slowness)
            clients.append(Device(flops=flops, up=rate, down=rate))
        return Devices(clients=tuple(clients), server=server_speed(clients, self.kappa), model_sync=self.model_sync)


@dataclass(frozen=True, kw_only=True)
class File:
    """Devices that were measured with the run's own model: a CSV or JSON file, in the order of the clients."""

    path: str  # relative to the working directory
    kappa: float = 100.0  # the server's lanes are so many times as fast as the average client
    model_sync: bool = False  # whether sending the client-side model takes time

    def __post_init__(self) -> None:
        check_positive("kappa", self.kappa)

    def draw(self, num_clients: int, forward_flops: float, key: int) -> Devices:
        """The first devices of the file, one per client; the key changes nothing."""
        check_positive("forward_flops", forward_flops)
        found = read(Path(self.path))
        if len(found) < num_clients:
            raise DataError(
                f"the device file {self.path} holds {len(found)} devices, but the run has {num_clients} clients; "
                f"add devices, or use at most {len(found)} clients"
            )
        clients = tuple(
            Device(flops=forward_flops / m.seconds, up=1000 * m.kbits_up, down=1000 * m.kbits_down)
            for m in found[:num_clients]
        )
        return Devices(clients=clients, server=server_speed(clients, self.kappa), model_sync=self.model_sync)


DEVICES: dict[str, type[Scheme]] = {"pool": Pool, "file": File}


class Measured(NamedTuple):
    """One device of a file."""

    seconds: float  # a sample, forward
    kbits_up: float  # kbit/s
    kbits_down: float


def read(path: Path) -> list[Measured]:
    """The devices of a CSV or JSON file, in its order."""
    form = FORMS.get(path.suffix.lower())
    if form is None:
        raise DataError(f"the device file {str(path)!r} is of no known form; give a path that ends in .csv or .json")
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except FileNotFoundError:
        raise DataError(
            f"there is no device file {path}; check the path, which is relative to the working directory"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"the device file {path} cannot be read: {reason(error)}") from None
    found = form(path, text)
    if not found:
        raise DataError(f"the device file {path} holds no devices; give one for each client")
    return found


def _read_csv(path: Path, text: str) -> list[Measured]:
    reader = csv.reader(io.StringIO(text), skipinitialspace=True)
    try:
        lines = [(f"{path}, line {reader.line_num}", [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; write it as plain CSV") from None
    if not lines:
        return []
    (top, header), *rows = lines
    columns = _columns(top, header)
    found = []
    for where, row in rows:
        if len(row) > len(header):
            raise DataError(f"{where}: there are {len(row)} cells below {len(header)} columns; write numbers as 0.034")
        cells = dict(zip(header, row + [""] * (len(header) - len(row)), strict=True))
        found.append(Measured(*(_number(where, name, cells[name]) for name in columns)))
    return found


def _read_json(path: Path, text: str) -> list[Measured]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {reason(error)}") from None
    if isinstance(content, list):
        return [_from_object(f"{path}, entry {k}", entry) for k, entry in enumerate(content, start=1)]
    if isinstance(content, dict):
        return [_from_fedscale(f"{path}, client {name}", entry) for name, entry in content.items()]
    raise DataError(f"{path} is neither a list of devices nor a mapping from clients to devices; write one of these")


def _from_object(where: str, entry: Any) -> Measured:
    device = _mapping(where, entry)
    return Measured(*(_number(where, name, device[name]) for name in _columns(where, device)))


def _from_fedscale(where: str, entry: Any) -> Measured:
    device = _mapping(where, entry)
    _check_has(where, device, ("computation", "communication"))
    milliseconds, kbits = (_number(where, name, device[name]) for name in ("computation", "communication"))
    return Measured(milliseconds / 1000, kbits, kbits)


def _mapping(where: str, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise DataError(f"{where} is {entry!r:.40}; it must be a mapping from names to numbers")
    return entry


def _columns(where: str, names: Collection[str]) -> tuple[str, str, str]:
    """Where the seconds and both rates stand; a rate for one direction goes before the one for both."""
    up, down = (name if name in names else "kbit_per_s" for name in ("kbit_per_s_up", "kbit_per_s_down"))
    columns = ("seconds_per_sample", up, down)
    _check_has(where, names, columns)
    return columns


def _check_has(where: str, names: Collection[str], wanted: tuple[str, ...]) -> None:
    for name in wanted:
        count = list(names).count(name)
        if count != 1:
            wrong, remedy = ("missing", "add it") if count == 0 else ("there more than once", "keep one")
            raise DataError(f"{where}: {name} is {wrong} among {', '.join(map(repr, names))}; {remedy}")


def _number(where: str, name: str, value: Any) -> float:
    if value == "" or value is None:
        raise DataError(f"{where}: {name} is empty; give a number above 0")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise DataError(f"{where}: {name} is {value!r:.40}; it must be a number above 0")
    return number


FORMS = {".csv": _read_csv, ".json": _read_json}
