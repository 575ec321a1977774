"""Trace files of when each client is on: a CSV file with the columns client, from_round and to_round.

    client,from_round,to_round
    0,1,10
    0,15,20
    3,1,20

Clients are numbered from 0 and rounds from 1; both ends belong to a stretch. A client that the file does not name is
never on.
"""

import csv
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from cutlayer.errors import DataError

COLUMNS = ("client", "from_round", "to_round")


def read_trace(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Return the first and the last round of each stretch, by client."""
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the trace {path} cannot be read: {error}") from None
    header = [cell.strip() for cell in lines[0]] if lines else []
    if header != list(COLUMNS):
        raise DataError(
            f"the trace {path} begins with {','.join(header)!r}; its first line must be {','.join(COLUMNS)}"
        )
    found: dict[int, list[tuple[int, int]]] = {}
    for number, cells in enumerate(lines[1:], start=2):
        if cells:
            client, first, last = _row(f"line {number} of {path}", cells)
            found.setdefault(client, []).append((first, last))
    return found


def digest(path: Path) -> str:
    """Return the SHA-256 of a trace file."""
    return sha256(path.read_bytes()).hexdigest()


def check_clients(path: Path, named: Iterable[int], num_clients: int) -> None:
    """Refuse a trace that names a client which is not there."""
    wrong = [client for client in named if client >= num_clients]
    if wrong:
        raise DataError(
            f"the trace {path} names client {wrong[0]}, but the {num_clients} clients are numbered 0 to "
            f"{num_clients - 1}: counting starts at 0"
        )


def _row(where: str, cells: Sequence[str]) -> tuple[int, int, int]:
    try:
        client, first, last = (int(cell) for cell in cells)
    except ValueError:
        raise DataError(f"{where} has {','.join(cells)!r}; give three whole numbers: {', '.join(COLUMNS)}") from None
    if client < 0 or not 1 <= first <= last:
        raise DataError(
            f"{where} has client {client} on from round {first} to {last}; count clients from 0, rounds from 1"
        )
    return client, first, last
