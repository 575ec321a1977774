"""The folder of a run: what it was, how it went, where it stands, and what it left.

    config.toml          the run, resolved; `cutlayer run` on it repeats it
    environment.json     versions, the machine and its GPU, and the engine that was used
    metrics.jsonl        one line a round; the same for the same seed, engine and machine
    timing.jsonl         wall seconds of each round, apart because they never repeat
    checkpoints/         the newest states
    ledger.json          bytes by kind, direction and client, and round trips, of the whole run
    model.safetensors    the trained model, as a state dict of the unsplit module; or, of a language model,
    pretrained/          its adapters as peft reads them, or all of it as transformers does

A file is replaced by a rename, so it is always whole; only the last line of a .jsonl file may be cut short by a crash.
"""

import json
import logging
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
from cutlayer.runs.training import Record

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("cutlayer")


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
        self.store = Store(path / "checkpoints")

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or bool(self.store.rounds())

    def refuse_if_taken(self) -> None:
        """A run that is there already must not be lost by mistake."""
        if self.holds_run():
            raise CheckpointError(
                f"{self.path} already holds a run ({len(self.history())} rounds done); "
                "go on with --resume, start over with --overwrite, or choose another --out"
            )

    @contextmanager
    def guarded(self) -> Iterator[Callable[[], None]]:
        """Yield a function that locks the folder, once it is there; the lock ends with the block, or with the process.

        Two processes that train one run would mix their rounds. Over NFS only those of one machine are kept apart.
        """
        handles: list[int] = []

        def hold() -> None:
            if not handles and fcntl:
                handles.append(_locked(self.path))

        try:
            yield hold
        finally:
            for handle in handles:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile may have the handle too
                os.close(handle)

    def run(self) -> Run:
        """The run that this folder holds."""
        return config.changed(Run(), config.read(self.config), str(self.config))

    def recorded(self) -> Run:
        """The same to be looked at: it may name a method of a plug-in that is not here."""
        return config.recorded(config.read(self.config), str(self.config))

    def surroundings(self) -> dict[str, Any]:
        """What the run was started with: versions, the machine, and the engine, which is None until it is chosen."""
        known: dict[str, Any] = {}
        if self.environment.exists():
            with suppress(ValueError):  # a damaged file tells nothing, and a run can go on without it
                known = json.loads(self.environment.read_text(encoding="utf-8"))
        return known

    def history(self) -> list[Record]:
        """The records of its rounds."""
        return read_lines(self.metrics)

    def times(self) -> list[Record]:
        """The wall seconds of its rounds."""
        return read_lines(self.timing)

    def clear(self) -> None:
        """Remove the files of the run, and nothing else."""
        for folder in (self.store.folder, self.pretrained):
            if folder.exists():
                shutil.rmtree(folder)
        # The configuration goes last: as long as it is there, the folder holds a run.
        for file in (self.metrics, self.timing, self.ledger, self.model, self.environment, self.config):
            file.unlink(missing_ok=True)

    def cut_back(self, done: int) -> list[Record]:
        """Drop what was written about rounds after `done`, which are run again; the records of the others."""
        history = [r for r in self.history() if r["round"] <= done]
        if [r["round"] for r in history] != list(range(1, done + 1)):
            raise CheckpointError(
                f"{self.metrics} holds {len(history)} of the {done} rounds that the checkpoint has behind it; "
                "put the file back, or start over with --overwrite"
            )
        for file, records in ((self.metrics, history), (self.timing, self.times())):
            write(file, "".join(_line(r) for r in records if r["round"] <= done))
        return history


GO_ON = "earlier rounds and checkpoints are still good. Make room there, then go on with --resume."
START_AGAIN = "nothing has been trained yet. Make room there or choose another --out, then start again."


@contextmanager
def writing(what: str, path: Path, advice: str = GO_ON) -> Iterator[None]:
    """Tell a user what a full or read-only disk means for the run."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} could not be written to {path}: {error.strerror or error}; {advice}") from error


def write(path: Path, content: bytes | str, advice: str = GO_ON) -> None:
    """Put a whole file in place at once; one that has this content already is not touched."""
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
    """Add a record as one line of JSON."""
    with writing(f"round {record['round']}", path), path.open("a", encoding="utf-8") as file:
        file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[Record]:
    """The records of a file; a last line that a crash cut short is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    records = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            raise CheckpointError(
                f"line {number} of {path} is damaged; put the file back, or start over with --overwrite"
            ) from None
    return records


def _locked(path: Path) -> int:
    """A handle of the folder with a lock on it, where the file system has locks."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; change its permissions") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(
            f"{path} is in use: another process trains this run; wait until it ends, or choose another --out"
        ) from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): let no other process train there", path, error.strerror)
    return handle


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
