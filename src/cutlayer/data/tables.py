"""Tables of labelled texts as published, in parquet, tab-separated and JSON-lines files, read as rows by column."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cutlayer.data.files import FileForm, bad_file, incomplete, read_bytes, read_parquet, reading

Row = Mapping[str, Any]
HELD_OUT = ("test", "val", "validation", "dev")  # published names of test sets; the first that exists is used
SUFFIXES = ("parquet", "jsonl", "tsv")
# The names of columns in published files (nested ones with a dot), and the names used here.
ALIASES = {
    "sentence": "text",
    "sentence1": "premise",
    "sentence2": "hypothesis",
    "span1_text": "span1",
    "span2_text": "span2",
    "target.span1_text": "span1",
    "target.span2_text": "span2",
}


TableFile = tuple[Path, list[Row]]
Tables = tuple[list[TableFile], list[TableFile]]  # training and test rows, each from one or more files


def forms(name: str) -> tuple[FileForm[Tables], ...]:
    """Return the forms: <name>.parquet with a column `split`, or one or more files for each of the two sets."""

    def whole(folder: Path) -> Tables | None:
        path = folder / f"{name}.parquet"
        return _divided(path, read(path)) if path.is_file() else None

    return (
        FileForm(f"{name}.parquet", whole),
        FileForm("train.jsonl and val.jsonl (or .tsv, .parquet; dev, validation)", _pair),
    )


def _divided(path: Path, rows: list[Row]) -> Tables:
    present = {row.get("split") for row in rows}
    held_out = next((name for name in HELD_OUT if name in present), None)
    if held_out is None or "train" not in present:
        raise bad_file(path, f"its column 'split' needs train and one of {', '.join(HELD_OUT)}")
    train, test = ([row for row in rows if (row["split"] == held_out) is is_test] for is_test in (False, True))
    return [(path, train)], [(path, test)]


def _pair(folder: Path) -> Tables | None:
    found = {name: _files(folder, name) for name in ("train", "val", "validation", "dev")}
    held_out = next((name for name in ("val", "validation", "dev") if found[name]), None)
    if not found["train"] and held_out is None:
        return None
    if not found["train"] or held_out is None:
        raise incomplete(folder, "val.jsonl (or dev.tsv)" if found["train"] else "train.jsonl (or .tsv)")
    train, test = ([(path, read(path)) for path in found[name]] for name in ("train", held_out))
    return train, test


def _files(folder: Path, name: str) -> list[Path]:
    for suffix in SUFFIXES:
        if paths := sorted((*folder.glob(f"{name}.{suffix}"), *folder.glob(f"{name}-*.{suffix}"))):
            return paths
    return []


def read(path: Path) -> list[Row]:
    """Return the rows of a file, with the names of columns that are used here."""
    with reading(path, ValueError, csv.Error):
        rows = READERS[path.suffix](path)
    return [{ALIASES.get(column, column): value for column, value in row.items()} for row in rows]


def _tsv(path: Path) -> list[Row]:
    text = read_bytes(path).decode("utf-8")
    return list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))


def _jsonl(path: Path) -> list[Row]:
    lines = read_bytes(path).decode("utf-8").splitlines()
    return [_flat(json.loads(line)) for line in lines if line.strip()]


def _flat(entry: Mapping[str, Any]) -> Row:
    """Flatten nested entries into names such as target.span1_text."""
    flat: dict[str, Any] = {}
    for key, value in entry.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


READERS: Mapping[str, Callable[[Path], Iterable[Row]]] = {
    ".parquet": partial(read_parquet, extra="llm"),
    ".tsv": _tsv,
    ".jsonl": _jsonl,
}
