"""Keeps from other users what a server and its devices write."""

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("cutlayer")


@contextmanager
def private_files() -> Iterator[None]:
    """Keep what is written inside the block from other users, whatever the umask is."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def warn_if_shared(folder: Path) -> None:
    """Warn of a folder that was made for all users to read, and that will hold what came from devices."""
    if os.name == "posix" and folder.exists() and stat.S_IMODE(folder.stat().st_mode) & 0o077:
        log.warning("%s can be read by other users of this machine; run: chmod -R go= %s", folder, folder)
