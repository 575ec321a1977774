"""Does something again and again while a block runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Call the action every so many seconds, in a thread of its own, until the block ends."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            action()

    threading.Thread(target=repeat, name="repeating", daemon=True).start()
    try:
        yield
    finally:
        over.set()
