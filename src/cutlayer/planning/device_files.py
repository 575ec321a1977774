"""Lists of devices in CSV and JSON files; errors name the line and the column."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from cutlayer.core.checks import reason
from cutlayer.errors import DataError

SAMPLE = Path(__file__).parent / "samples" / "devices.csv"  # 20 devices of different kinds: `read("sample")`

TERAFLOPS = 1e12
MEGABIT = 1e6
GIGABYTE = 8e9  # bits
KBITS, MBITS = (
    {f"{to}{unit}{way}": scale for to in ("", "fed_") for way in ("", "_up", "_down")}
    for unit, scale in (("kbit_per_s", 1e3), ("mbit_per_s", MEGABIT))
)
OTHERS = {"seconds": "seconds_per_sample", "flops": "tflops", "memory": "memory_gb"}
KNOWN = ("name", *OTHERS.values(), *KBITS, *MBITS)
FEDSCALE = {"seconds": "computation", "up": "communication", "down": "communication"}
SCALES = {"tflops": TERAFLOPS, "memory_gb": GIGABYTE, **KBITS, **MBITS, "computation": 1e-3, "communication": 1e3}
SEPARATORS = {";": "semicolons", "\t": "tabs"}


class Measured(NamedTuple):
    """One device of a file, in bits and seconds, with either its speed or its seconds for the model of the run."""

    up: float
    down: float
    seconds: float = 0.0  # of a forward pass of one sample
    flops: float = 0.0  # FLOP/s
    fed_up: float | None = None
    fed_down: float | None = None
    memory: float = math.inf
    name: str = ""


def read(path: str | Path) -> list[Measured]:
    """Return the devices of a CSV or JSON file, in order; "sample" is the list that comes with cutlayer."""
    path = SAMPLE if str(path) == "sample" else Path(path)
    form = FORMS.get(path.suffix.lower())
    if form is None:
        raise DataError(
            f"the device file {str(path)!r} is of no known form; give a path that ends in .csv or .json, or 'sample'"
        )
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


class DeviceEntry(NamedTuple):
    """The values of one device in a file, and where they are."""

    where: str
    labels: Mapping[str, str]  # the place of each name, for messages
    values: Mapping[str, Any]

    def place(self, name: str) -> str:
        return f"{self.where}, {self.labels[name]}"

    def missing(self, what: str, remedy: str) -> DataError:
        return DataError(f"{self.where}: there is no {what} among {', '.join(self.labels.values())}; add {remedy}")

    def number(self, name: str) -> float:
        """Return a value above 0, in bits and seconds."""
        value = self.values[name]
        if value == "" or value is None:
            raise DataError(f"{self.place(name)} is empty; give a number above 0")
        try:
            number = math.nan if isinstance(value, bool) else SCALES.get(name, 1.0) * float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not 0 < number < math.inf:
            raise DataError(f"{self.place(name)} is {value!r:.40}; it must be a number above 0")
        return number


# -- CSV ----------------------------------------------------------------------------------------------------------


def _read_csv(path: Path, text: str) -> list[Measured]:
    lines = _lines(path, text)
    where, header = next(lines, ("", []))
    if not header:
        return []
    _check_header(where, header)
    labels = {name: f"column {header.index(name) + 1} ({name})" for name in header}
    columns = _columns(DeviceEntry(where, labels, {}))
    return [_measured(DeviceEntry(where, labels, _cells(where, header, row)), columns) for where, row in lines]


def _lines(path: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the cells of each line that is not blank."""
    reader = csv.reader(io.StringIO(text), skipinitialspace=True)
    try:
        for row in reader:
            if row:
                yield f"{path}, line {reader.line_num}", [cell.strip() for cell in row]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; write it as plain CSV") from None


def _check_header(where: str, header: Sequence[str]) -> None:
    for mark, called in SEPARATORS.items():
        if len(header) == 1 and mark in header[0]:
            raise DataError(f"{where}, column 1 ({header[0]}): {called} separate its cells; separate them by commas")
    for number, name in enumerate(header, start=1):
        first = header.index(name) + 1
        if name in KNOWN and first < number:
            raise DataError(f"{where}, column {number} ({name}) is there already as column {first}; keep one")


def _cells(where: str, header: Sequence[str], row: Sequence[str]) -> dict[str, str]:
    """Return the cells of a line by column; missing ones are empty."""
    if len(row) > len(header):
        raise DataError(
            f"{where}, column {len(header) + 1}: there are {len(row)} cells below {len(header)} columns; "
            "write numbers as 0.034"
        )
    return dict(zip(header, [*row, *[""] * (len(header) - len(row))], strict=True))


# -- JSON ---------------------------------------------------------------------------------------------------------


def _read_json(path: Path, text: str) -> list[Measured]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {reason(error)}") from None
    if isinstance(content, list):
        entries = [_object(f"{path}, entry {k}", value) for k, value in enumerate(content, start=1)]
        return [_measured(entry, _columns(entry)) for entry in entries]
    if isinstance(content, dict):
        return [_from_fedscale(_object(f"{path}, client {name}", value), name) for name, value in content.items()]
    raise DataError(f"{path} is neither a list of devices nor a mapping from clients to devices; write one of these")


def _object(where: str, content: Any) -> DeviceEntry:
    if not isinstance(content, dict) or not content:
        raise DataError(f"{where} is {content!r:.40}; it must be a mapping from names to numbers")
    return DeviceEntry(where, {name: name for name in content}, content)


def _from_fedscale(entry: DeviceEntry, client: str) -> Measured:
    for name in FEDSCALE.values():
        if name not in entry.labels:
            raise entry.missing(name, "it")
    return _measured(entry, FEDSCALE)._replace(name=client)


FORMS = {".csv": _read_csv, ".json": _read_json}

# -- what the names mean ------------------------------------------------------------------------------------------


def _columns(entry: DeviceEntry) -> dict[str, str]:
    """Return the name in the file of each number of a device; optional ones may be missing."""
    _check_spelling(entry)
    columns = {field: name for field, name in OTHERS.items() if name in entry.labels}
    if "seconds" in columns and "flops" in columns:
        raise DataError(f"{entry.place('tflops')} and seconds_per_sample both give its speed; keep one")
    if not {"seconds", "flops"} & columns.keys():
        raise entry.missing("seconds_per_sample or tflops", "one")
    unit = _unit(entry)
    for field in ("up", "down", "fed_up", "fed_down"):
        to, way = ("fed_", field[4:]) if field.startswith("fed_") else ("", field)
        name = next((n for n in (f"{to}{unit}_{way}", f"{to}{unit}") if n in entry.labels), None)
        if name is not None:
            columns[field] = name
        elif not to:
            raise entry.missing(f"rate {way}", f"{unit}, or {unit}_{way}")
    return columns


def _check_spelling(entry: DeviceEntry) -> None:
    """Refuse names that look like misspelt ones, which would be ignored silently; other unknown names are ignored."""
    for name in entry.labels:
        near = get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.8)
        if near and name not in KNOWN:
            raise DataError(f"{entry.place(name)} is no known name; did you mean {near[0]!r}?")


def _unit(entry: DeviceEntry) -> str:
    kbits, mbits = ([name for name in entry.labels if name in unit] for unit in (KBITS, MBITS))
    if kbits and mbits:
        raise DataError(f"{entry.place(mbits[0])} and {kbits[0]} are in different units; keep one unit")
    return "mbit_per_s" if mbits else "kbit_per_s"


def _measured(entry: DeviceEntry, columns: Mapping[str, str]) -> Measured:
    numbers: dict[str, Any] = {field: entry.number(name) for field, name in columns.items()}
    return Measured(**numbers, name=str(entry.values.get("name", "")))
