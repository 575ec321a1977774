"""The folder of a run: its configuration, metrics, checkpoints and results.

    config.toml          the run with its engines resolved; `cutlayer run` on it repeats it, unless it has a table
                         [python]: then `cutlayer.train` made it of objects that have no names
    environment.json     versions, the machine, its GPU, and the engine that was used
    metrics.jsonl        one line a round; the same for the same seed, engine and machine
    timing.jsonl         wall seconds of each round, separate because they differ between runs, and the digest of the
                         round's line in metrics.jsonl
    checkpoints/         the newest checkpoints
    ledger.json          bytes by kind, direction and client, and round trips, of the whole run
    model.safetensors    the trained model, as a state dict of the unsplit module; or, of a language model,
    pretrained/          its adapters as peft reads them, or all of it as transformers does
    best.safetensors     the model of the best evaluation, if the run monitors a metric, with its round as metadata;
    best_pretrained/     of a language model

Files are replaced by a rename, so they are always complete; only the last line of a .jsonl file may be cut off by a
crash.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cutlayer.errors import CheckpointError
from cutlayer.runs import config
from cutlayer.runs.checkpoint import Store, write_to_disk
from cutlayer.runs.config import Run
from cutlayer.runs.lock import lock, unlock
from cutlayer.runs.stopping import Record


class Folder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.timing = path / "timing.jsonl"
        self.ledger = path / "ledger.json"
        self.model = path / "model.safetensors"
        self.pretrained = path / "pretrained"
        self.best = path / "best.safetensors"
        self.best_pretrained = path / "best_pretrained"
        self.store = Store(path / "checkpoints")

    def holds_run(self) -> bool:
        """Return whether a run was started here."""
        return self.config.exists() or bool(self.store.rounds())

    def refuse_if_taken(self) -> None:
        """Refuse a folder that holds a run, so that none is lost by mistake."""
        if self.holds_run():
            raise CheckpointError(
                f"{self.path} already holds a run ({len(self.history())} rounds done); "
                "go on with --resume, start over with --overwrite, or choose another --out"
            )

    @contextmanager
    def guarded(self) -> Iterator[Callable[[], None]]:
        """Yield a function that locks the folder, which must exist by then, until the end of the block or the process.

        Two processes that train the same run would mix their rounds.
        """
        handle: int | None = None

        def hold() -> None:
            nonlocal handle
            if handle is None:
                who = "another process trains this run; wait until it ends, or choose another --out"
                handle = lock(self.path, who)

        try:
            yield hold
        finally:
            if handle is not None:
                unlock(handle)

    def refuse_if_in_use(self) -> None:
        """Refuse a folder in which another process trains."""
        with self.guarded() as hold:
            if self.path.exists():
                hold()

    def run(self) -> Run:
        """Return the run of this folder, which a configuration must be able to name."""
        return config.changed(Run(), config.read(self.config), str(self.config))

    def recorded(self) -> Run:
        """Return the run for display: it may name things of a plug-in that is not loaded."""
        return config.recorded(config.read(self.config), str(self.config))

    def surroundings(self) -> dict[str, Any]:
        """Return what the run was started with: versions, the machine and the engine; empty if unknown."""
        known: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):  # a run can be resumed without this file
            known = json.loads(self.environment.read_text(encoding="utf-8"))
        return known

    def history(self) -> list[Record]:
        """Return the records of its rounds; refuse a line that does not match its digest, if there is one."""
        records = read_lines(self.metrics)
        digests = {line.get("round"): line["digest"] for line in self.times() if "digest" in line}
        for number, record in enumerate(records, start=1):
            if number in digests and digests[number] != digest(record):
                raise CheckpointError(
                    f"line {number} of {self.metrics} is not what its round wrote, by the digest in "
                    f"{self.timing.name}; put the file back, or start over with --overwrite"
                )
        return records

    def times(self) -> list[Record]:
        """Return the wall seconds of its rounds."""
        return read_lines(self.timing)

    def clear(self) -> None:
        """Remove the files of the run, and nothing else."""
        for folder in (self.store.folder, self.pretrained, self.best_pretrained):
            if folder.exists():
                shutil.rmtree(folder)
        # Remove the configuration last: as long as it exists, the folder holds a run.
        for file in (self.metrics, self.timing, self.ledger, self.model, self.best, self.environment, self.config):
            file.unlink(missing_ok=True)

    def cut_back(self, done: int) -> list[Record]:
        """Remove the records of rounds after `done`, which will be repeated, and return the others."""
        history = [r for r in self.history() if r["round"] <= done]
        if [r["round"] for r in history] != list(range(1, done + 1)):
            raise CheckpointError(
                f"{self.metrics} holds {len(history)} of the {done} rounds that the checkpoint has behind it; "
                "put the file back, or start over with --overwrite"
            )
        for file, records in ((self.metrics, history), (self.timing, self.times())):
            write(file, "".join(_line(r) for r in records if r["round"] <= done))
        return history


GO_ON = "earlier rounds and checkpoints are still good. Make room there, then start the same command again."
START_AGAIN = "nothing has been trained yet. Make room there or choose another --out, then start again."


@contextmanager
def writing(what: str, path: Path, advice: str = GO_ON) -> Iterator[None]:
    """Turn OS errors, such as a full disk, into one that says what this means for the run."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} could not be written to {path}: {error.strerror or error}; {advice}") from error


def write(path: Path, content: bytes | str, advice: str = GO_ON) -> None:
    """Replace a file atomically; one that already has this content is not touched."""
    data = content.encode() if isinstance(content, str) else content
    if path.is_file() and path.read_bytes() == data:
        return
    partial = path.with_name(path.name + ".partial")
    with writing(path.name, path.parent, advice):
        try:
            write_to_disk(partial, data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def append_line(path: Path, record: Record) -> None:
    """Append a record as one line of JSON."""
    with writing(f"round {record['round']}", path), path.open("a", encoding="utf-8") as file:
        file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[Record]:
    """Return the records of a file, without a last line that a crash cut off."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    records = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            raise CheckpointError(
                f"line {number} of {path} is damaged; put the file back, or start over with --overwrite"
            ) from None
    return records


def digest(record: Record) -> str:
    """Return the digest of a record, by which a change of its line is noticed."""
    return hashlib.blake2b(json.dumps(record).encode(), digest_size=8).hexdigest()


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
