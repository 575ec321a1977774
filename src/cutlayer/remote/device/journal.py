"""What the owner of a device reads while it takes part: that it has joined, and now and then how far the run is."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from cutlayer.core.text import human_bytes
from cutlayer.remote.device.session import ClientDevice

log = logging.getLogger("cutlayer")

LINE_SECONDS = 60.0  # between two lines


@dataclass
class Journal:
    """Logs the progress of one device, also over several connections."""

    name: str
    clock: Callable[[], float] = time.monotonic
    _sent: int = field(default=0, init=False)  # bytes
    _told: float = field(default=-inf, init=False)  # when the last line was logged

    def joined(self, device: ClientDevice) -> None:
        """The device is ready; its next round is told at once."""
        self._told = -inf
        terms = device.terms
        run = "" if terms is None else f" in a run of {device.clients} clients and {terms.attempts.rounds} rounds"
        log.info("joined as %s, number %d%s; waiting for a round", self.name, device.client, run)

    def worked(self, device: ClientDevice, round: int, sent: int) -> None:
        """Some work of this round, counted from 0, is done, and so many bytes have left."""
        self._sent += sent
        now = self.clock()
        if now - self._told >= LINE_SECONDS:
            self._told = now
            of = "" if device.terms is None else f" of {device.terms.attempts.rounds}"
            log.info("round %d%s; %s have left this device", round + 1, of, human_bytes(self._sent))
