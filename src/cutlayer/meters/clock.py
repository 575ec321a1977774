"""The clock: simulated seconds that values carry. Each client's row has its own time.

Work delays only the rows that it is done on, by its FLOPs over the speed of their device; a transfer delays them by its
bits over the rate of their link. A value that combines rows (a mean, a sum, a merged batch, a shared part) is ready
when the last of them is, and a round ends when its last value is ready. A device does one thing at a time, in program
order, and so does each direction of its link. The training server has a lane for each client, or one that all share:
then it starts on a step's rows when the last of them arrives, and the work of all adds up. The time of a round thus
follows from what the method does; the clock does not know which method it is.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.flop_counter import FlopCounterMode

from cutlayer.core import tree
from cutlayer.core.codec import Coder
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import LABELS, MODEL, SETTINGS, SETUP, STATISTICS, SYNC, Kind, Place
from cutlayer.core.meter import Direction, How, Ready, Timer
from cutlayer.core.values import Block, PerClient, aligned
from cutlayer.meters.ledger import Ledger
from cutlayer.planning.devices import PASSES, Devices

log = logging.getLogger("cutlayer")

BACKWARD = PASSES - 1  # a backward pass counts as two forward passes, as in the papers
FREE = (LABELS, SETTINGS, SETUP, STATISTICS)  # so small that the papers do not count them


class Spent(NamedTuple):
    """The time that a round took."""

    training: float = 0.0  # seconds from the arrival of the models until the last ones leave
    aggregation: float = 0.0  # seconds of sending models: down before training, and up after it
    straggler: int | None = None  # the client whose own work and transfers took the longest


class Clock(Timer):
    """Simulated time on these devices."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.now = 0.0  # seconds at the end of the last round
        self.client_flops = 0.0  # of all clients so far
        self.spent = Spent()  # in the last round
        self._free = FREE if devices.model_sync else (*FREE, MODEL, SYNC)
        self.begin()
        self._known: dict[Any, float] = {}  # FLOPs by function and shapes of its arguments
        self._owed: WeakKeyDictionary[Fn, float] = WeakKeyDictionary()  # FLOPs of a row's pullback
        self._sizes = Ledger()

    def begin(self) -> None:
        """Start a round for all clients."""
        self._latest = self._started = self.now
        self._ended: float | None = None  # when the last model left, if any did
        self._busy: dict[int, float] = {}  # until when each device computes
        self._served = self.now  # until when a shared server computes
        self._links: dict[tuple[int | Place, Direction], float] = {}  # until when each link is busy
        self._own: dict[int, float] = {}  # seconds of each client's own work and transfers, without models

    def end(self) -> None:
        """End the round when its last value is ready."""
        trained = self._latest if self._ended is None else self._ended
        straggler = max(self._own, key=lambda j: self._own[j], default=None)
        aggregation = (self._started - self.now) + (self._latest - trained)
        self.spent = Spent(self._latest - self.now - aggregation, aggregation, straggler)
        self.now = self._latest

    def content(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"now": self.now, "client_flops": self.client_flops}

    def restore(self, content: Mapping[str, float]) -> None:
        """Continue from this state."""
        self.now, self.client_flops = content["now"], content["client_flops"]

    # -- work ---------------------------------------------------------------------------------------------------

    def worked(self, how: How, fn: Fn, values: Sequence[PerClient], ids: Ids, made: Sequence[Block]) -> Ready:
        return self._at_clients(values, self._flops_of(how, fn, values, ids, made))

    def pulled(self, pullbacks: PerClient, gradient: PerClient, ids: Ids) -> Ready:
        return self._at_clients((pullbacks, gradient), self._owed_by(pullbacks, ids))

    def _at_clients(self, values: Sequence[PerClient], flops: Mapping[int, float]) -> Ready:
        ready = {}
        for j, work in flops.items():
            start = max(self._busy.get(j, self.now), self._all_there(values, j))
            seconds = work / self.devices.clients[j].flops
            self._busy[j] = ready[j] = start + seconds
            self._own[j] = self._own.get(j, 0.0) + seconds
            self.client_flops += work
        return self._noted(ready)

    def served(self, how: How, fn: Fn, values: Sequence[PerClient], ids: Ids, made: Sequence[Block]) -> Ready:
        return self._at_server(values, self._flops_of(how, fn, values, ids, made))

    def served_pull(self, pullbacks: PerClient, gradient: PerClient, ids: Ids) -> Ready:
        return self._at_server((pullbacks, gradient), self._owed_by(pullbacks, ids))

    def _at_server(self, values: Sequence[PerClient], flops: Mapping[int, float]) -> Ready:
        there = {j: self._all_there(values, j) for j in flops}
        if self.devices.lanes == "parallel" or not any(flops.values()):
            return self._noted({j: there[j] + w / self.devices.server for j, w in flops.items()})
        return self._noted(dict.fromkeys(flops, self._served_until(max(there.values()), math.fsum(flops.values()))))

    def _served_until(self, there: float, flops: float) -> float:
        if self.devices.lanes == "parallel" or not flops:
            return there + flops / self.devices.server
        self._served = max(there, self._served) + flops / self.devices.server
        return self._served

    def done(self, how: How, fn: Fn, values: Sequence[Any], ready: Sequence[float], pull: Any = None) -> float:
        if isinstance(fn, FunctionType) and fn in self._owed:
            flops = self._owed[fn]
        else:
            forward = self._forward(fn, [Block((), v, stacked=False) for v in values])
            flops = (PASSES if how == "grad" else 1) * forward
            if pull is not None:
                self._owed[pull] = BACKWARD * forward
        end = self._served_until(max((self.now, *ready)), flops)
        self._latest = max(self._latest, end)
        return end

    # -- transfers and waiting ------------------------------------------------------------------------------------

    def moved(self, kind: Kind, direction: Direction, value: PerClient) -> Ready:
        there = {j: self._all_there((value,), j) for j in value.ids}
        if kind in self._free:
            return self._noted(there)
        ready = {}
        for j, size in self._sizes.sizes(value).items():
            seconds = 8 * size / self.devices.clients[j].rate(direction, kind.home or "server")
            ready[j] = self._transferred((j, direction), there[j], seconds)
            if kind is not MODEL:
                self._own[j] = self._own.get(j, 0.0) + seconds
        if kind is MODEL:
            self._note_models(direction, there, ready)
        return self._noted(ready)

    def sent(self, kind: Kind, origin: Place, value: PerClient) -> Ready:
        there = {j: self._all_there((value,), j) for j in value.ids}
        if kind in self._free:
            return self._noted(there)
        rate = self.devices.server_up if origin == "server" else self.devices.server_down
        sizes = self._sizes.sizes(value)
        ready = {j: self._transferred((origin, "up"), there[j], 8 * sizes[j] / rate) for j in value.ids}
        self._note_models("up" if kind is MODEL else "down", there, ready)
        return self._noted(ready)

    def _transferred(self, link: tuple[int | Place, Direction], there: float, seconds: float) -> float:
        """Return when a transfer ends; each link carries one at a time."""
        self._links[link] = max(there, self._links.get(link, self.now)) + seconds
        return self._links[link]

    def _note_models(self, direction: Direction, there: Ready, ready: Ready) -> None:
        """Note when training starts, after models that arrive before any work, and ends, when the last ones leave."""
        if direction == "up":
            self._ended = max((self._ended or 0.0, *there.values()))
        elif not any(self._own.values()):
            self._started = max((self._started, *ready.values()))

    def last(self, rows: PerClient) -> float:
        return max((self._all_there((rows,), j) for j in rows.ids), default=self.now)

    def wait(self, ids: Ids) -> None:
        together = max((self._busy.get(j, self.now) for j in ids), default=self.now)
        self._busy.update(dict.fromkeys(ids, together))

    def _all_there(self, values: Sequence[PerClient], j: int) -> float:
        return max((self.now, *(v.ready.get(j, 0.0) for v in values)))

    def _noted(self, ready: dict[int, float]) -> Ready:
        self._latest = max(self._latest, *ready.values()) if ready else self._latest
        return ready

    # -- FLOPs ----------------------------------------------------------------------------------------------------

    def _flops_of(
        self, how: How, fn: Fn, values: Sequence[PerClient], ids: Ids, made: Sequence[Block]
    ) -> dict[int, float]:
        """Return the FLOPs of each client, and note those of their pullbacks."""
        forward: dict[int, float] = {}
        for group, blocks in aligned(values, ids):
            forward |= dict.fromkeys(group, self._forward(fn, blocks))
        if how == "vjp":
            for block in made:
                self._owed[block.tree[1].pull] = BACKWARD * forward[block.ids[0]]
        return {j: (PASSES if how == "grad" else 1) * forward[j] for j in ids}

    def _owed_by(self, pullbacks: PerClient, ids: Ids) -> dict[int, float]:
        owed = {j: self._owed[b.tree.pull] for b in pullbacks.blocks for j in b.ids}
        return {j: owed[j] for j in ids}

    def _forward(self, fn: Fn, blocks: Sequence[Block]) -> float:
        """Return the FLOPs of fn on one row of these blocks, counted once for each combination of shapes."""
        known = (identity(fn), tuple(tree.signature(b.tree, stacked=b.stacked) for b in blocks))
        if known not in self._known:
            self._known[known] = _counted(fn, blocks)
        return self._known[known]


def identity(fn: Fn) -> Any:
    """Return what identifies a function from step to step: not the object it is bound to, which may be a new one."""
    if isinstance(fn, partial):
        return identity(fn.func), repr(fn.args), repr(fn.keywords)
    if isinstance(fn, MethodType) and isinstance(fn.__self__, Coder):  # two codecs make different things of one shape
        return fn.__func__, fn.__self__
    plain = getattr(fn, "__func__", fn)
    return plain if isinstance(plain, FunctionType | BuiltinFunctionType) else type(plain)


def _counted(fn: Fn, blocks: Sequence[Block]) -> float:
    """Count the FLOPs of fn on shapes alone, or on the first client's values if fn depends on values."""
    values = [b.row(b.ids[0]) if b.stacked else b.tree for b in blocks]
    for arguments in (tree.map(_bare, tuple(values)), values):
        try:
            with FlopCounterMode(display=False) as counter:
                fn(*arguments)
            return float(counter.get_total_flops())
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            continue
    log.warning("the clock cannot count the FLOPs of %s, so it takes no time", getattr(fn, "__qualname__", fn))
    return 0.0


def _bare(a: torch.Tensor) -> torch.Tensor:
    return torch.empty(a.shape, dtype=a.dtype, device="meta")
