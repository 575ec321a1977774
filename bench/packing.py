"""Runs packed to travel: the small files of all in one archive, and one run whole, in pieces, to go on elsewhere.

The pieces together are a plain archive: `cat run.tar.* | tar -x -C RUNS` unpacks it by hand.
"""

import gzip
import io
import json
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from evidence import PARTIAL, serves

from cutlayer.errors import CheckpointError, ConfigError, DataError
from cutlayer.results.trials import find
from cutlayer.runs import checkpoint
from cutlayer.runs.folder import Folder, write, writing

ARCHIVE = "headline.tar.gz"
PIECE = "run.tar."  # and its number
PIECE_SIZE = 16 * 2**20
MOST = 60 * 2**20  # bytes of all pieces together
KEPT = ("round", "loss", "stopped", "samples", "bytes", "simulated_seconds", "test_loss", "test_accuracy")
SESSIONS = "sessions.jsonl"  # beside a run's own files: the first round of each session, and where it ran
REMARKS = "remarks.txt"  # and what readers of its results should know
ADVICE = "choose another --collect"


def pack_small(folders: Sequence[Folder], runs: Path, out: Path) -> Path:
    """The small files of runs in one archive, with what readers need of each round."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for folder in folders:
            for name, content in _small_files(folder):
                entry = tarfile.TarInfo(str(folder.path.relative_to(runs) / name))
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return _written(out, ARCHIVE, archive.getvalue())


def _small_files(folder: Folder) -> Iterator[tuple[str, bytes]]:
    rounds = ({key: record[key] for key in KEPT if key in record} for record in folder.history())
    times = ({key: line[key] for key in line if key != "digest"} for line in folder.times())  # the lines are others
    for file, lines in ((folder.metrics, rounds), (folder.timing, times)):
        if file.exists():
            yield file.name, "".join(json.dumps(line) + "\n" for line in lines).encode()
    for path in (folder.config, folder.environment, folder.path / SESSIONS, folder.path / REMARKS):
        if path.exists():
            yield path.name, path.read_bytes()


def record(packed: Path, results: Path) -> tuple[list[Folder], list[Folder]]:
    """Put the small files of runs into the results, each in place of what was there; those that are, and the rest.

    A record of the same run that has more rounds stays.
    """
    archive = packed / ARCHIVE
    if not archive.is_file():
        raise DataError(f"there is no {ARCHIVE} in {packed}; --collect writes one")
    replaced, kept = [], []
    with TemporaryDirectory() as aside:
        for new in _small_folders(archive, Path(aside)):
            old = Folder(results / new.path.relative_to(aside))
            if old.config.exists() and _further(old, new):
                kept.append(old)
            else:
                with writing("the results", results, "choose another --results"):
                    _put(new.path, old.path)
                replaced.append(old)
    return replaced, kept


def _small_folders(archive: Path, aside: Path) -> list[Folder]:
    try:
        content = gzip.decompress(archive.read_bytes())  # all of it, so that its checksum is looked at
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            tar.extractall(aside, filter="data")
        return find([aside])
    except (OSError, EOFError, zlib.error, tarfile.TarError, ConfigError) as error:
        raise DataError(f"{archive} is damaged or holds no runs: {error}") from error


def _further(old: Folder, new: Folder) -> bool:
    return serves(old.run(), new.run()) and len(old.history()) > len(new.history())


def pack_whole(folder: Folder, runs: Path, out: Path) -> list[Path]:
    """A run with its newest checkpoint, in pieces; none where that is too large. Older pieces go."""
    newest = folder.store.path(folder.store.rounds()[-1])
    paths = [folder.config, folder.environment, folder.metrics, folder.timing, folder.path / SESSIONS, newest]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in (*paths, folder.path / REMARKS):
            if path.exists():
                tar.add(path, str(path.relative_to(runs)))
    data = archive.getvalue()
    starts = range(0, len(data) if len(data) <= MOST else 0, PIECE_SIZE)
    made = [_written(out, f"{PIECE}{i:02d}", data[at : at + PIECE_SIZE]) for i, at in enumerate(starts)]
    for old in pieces(out):
        if old not in made:
            old.unlink()
    return made


def pieces(packed: Path) -> list[Path]:
    """The pieces of a run, in order."""
    return sorted(packed.glob(f"{PIECE}[0-9][0-9]"))


def unpack_whole(packed: Path, runs: Path) -> tuple[Folder, bool]:
    """Put a run that was packed in pieces back to where it can go on, and whether it was: one that is further stays."""
    found = pieces(packed)
    if not found:
        raise DataError(f"there is no run packed in {packed}; its pieces are called {PIECE}00, {PIECE}01, ...")
    with TemporaryDirectory() as aside:
        there = _unpacked(found, Path(aside))
        home = Folder(runs / there.path.relative_to(aside))
        with home.guarded() as hold:
            if home.config.exists():
                hold()
                if not serves(home.run(), there.run()):
                    raise ConfigError(f"{home.path} holds another run than {packed}; choose another --runs")
            if max(home.store.rounds(), default=0) >= max(there.store.rounds()):
                return home, False
            with writing("the run", runs, "choose another --runs"):
                _put(there.path, home.path)
    return home, True


def _put(there: Path, home: Path) -> None:
    """Replace a folder by a copy of another, which is complete before the old one goes."""
    partial = home.with_name(home.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(there, partial)
    shutil.rmtree(home, ignore_errors=True)
    partial.rename(home)


def _unpacked(found: Sequence[Path], aside: Path) -> Folder:
    """The run, if its pieces are all there and its checkpoint is sound."""
    try:
        if [piece.name for piece in found] != [f"{PIECE}{i:02d}" for i in range(len(found))]:
            raise tarfile.ReadError("one of them is missing")
        with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in found))) as tar:
            tar.extractall(aside, filter="data")
        (folder,) = find([aside])
        checkpoint.read(folder.store.path(max(folder.store.rounds())))
    except (tarfile.TarError, CheckpointError, ConfigError, ValueError) as error:
        raise CheckpointError(f"the pieces of a run in {found[0].parent} are damaged or incomplete: {error}") from error
    return folder


def _written(out: Path, name: str, data: bytes) -> Path:
    with writing(name, out, ADVICE):
        out.mkdir(parents=True, exist_ok=True)
    write(out / name, data, ADVICE)
    return out / name
