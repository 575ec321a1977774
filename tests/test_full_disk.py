"""Specifies that a full disk ends a run with a word of advice and loses nothing that was saved."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from stopping import SMALL, outcome, unbroken

from cutlayer.errors import CheckpointError
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.stopping import Record
from cutlayer.runs.training import Training


def fill_disk_at(monkeypatch: pytest.MonkeyPatch, name: str, occasion: int) -> None:
    """Let the disk be full when a file of this name is put on it for the n-th time."""
    seen: list[str] = []

    def fsync(handle: int) -> None:
        if name in str(Path(f"/proc/self/fd/{handle}").readlink().name):
            seen.append(name)
            if len(seen) == occasion:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


FULL = {
    "metrics.jsonl": (
        "round 3 could not be written to {path}/metrics.jsonl: No space left on device; "
        "earlier rounds and checkpoints are still good. Make room there, then start the same command again.",
        3,
    ),
    "round-": (
        "the checkpoint of round 3 could not be written to {path}/checkpoints: No space left on device; "
        "round-000002.safetensors is still good. Make room there or choose another folder, then resume the run.",
        3,
    ),
    "model.safetensors": (
        "model.safetensors could not be written to {path}: No space left on device; "
        "earlier rounds and checkpoints are still good. Make room there, then start the same command again.",
        1,
    ),
    "config.toml": (
        "config.toml could not be written to {path}: No space left on device; "
        "nothing has been trained yet. Make room there or choose another --out, then start again.",
        1,
    ),
}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell the files apart")
@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_loses_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "full")
    message, occasion = FULL[name]
    with monkeypatch.context() as full:
        fill_disk_at(full, name, occasion)
        with pytest.raises(CheckpointError) as error:
            execute(SMALL, folder)
    assert str(error.value) == message.format(path=folder.path)
    assert not list(folder.path.rglob("*.partial"))
    execute(SMALL, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(SMALL, tmp_path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small disk here: {error}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_really_full_loses_nothing(small_disk: Path, tmp_path: Path) -> None:
    folder, ballast = Folder(small_disk / "run"), small_disk / "ballast"

    def fill(_: Training, record: Record) -> None:
        if record["round"] == 2:
            with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))

    with pytest.raises(CheckpointError, match=r"could not be written to .*: No space left on device; "):
        execute(SMALL, folder, on_round=fill)
    assert folder.store.rounds()[-1] == 2
    ballast.unlink()
    execute(SMALL, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(SMALL, tmp_path))
