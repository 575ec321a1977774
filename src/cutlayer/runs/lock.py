"""Locks a folder, so that one process at a time writes there. Over NFS the lock only works on one machine."""

import logging
import os
from pathlib import Path

from cutlayer.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("cutlayer")


def lock(path: Path, who: str) -> int | None:
    """Lock a folder, if its file system has locks; return the handle to unlock it. `who` is said to hold it now."""
    if not fcntl:
        return None
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; change its permissions") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(f"{path} is in use: {who}") from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): let no other process write there", path, error.strerror)
    return handle


def unlock(handle: int) -> None:
    fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked in between may have the handle, too
    os.close(handle)
