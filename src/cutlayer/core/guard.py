"""The guard of averages: it drops the updates of clients that are out of all proportion to those of the others.

An update is how a client's value has changed since the round began. It is dropped if its norm is not finite in single
precision, or if it is above 100 times the median norm of the round and above 1 % of the norm of the value itself: where
most clients hardly move any more, one that still learns is not out of proportion. Smaller poison passes.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from cutlayer.core import tree
from cutlayer.core.kinds import MODEL, SLOPES, Kind
from cutlayer.core.state import Model
from cutlayer.core.tree import Tree
from cutlayer.core.values import PerClient, grouped
from cutlayer.errors import DivergedError

GUARDED: tuple[Kind, ...] = (MODEL, SLOPES)  # what comes up and is averaged
MOST = 100.0  # times the median norm
ALWAYS_FINE = 0.01  # of the norm of the value that is updated
FEWEST = 3  # updates that a median needs


class Update(NamedTuple):
    """The norm of an update, and that of the value that it changes; 0 if that is not known."""

    norm: float
    size: float = 0.0


class AllDropped(DivergedError):
    """The update of every client of a round was dropped."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.clients = frozenset(reasons)
        self.refusal = "; ".join(f"the update of client {j} {why}" for j, why in reasons.items())
        super().__init__(f"no update of this round can be averaged: {self.refusal}")


class Guard:
    """The guard of one attempt at a round."""

    def __init__(self) -> None:
        self.dropped: dict[int, str] = {}  # the reason by client
        self.closing = False  # models have come up, so the steps of the round are over
        self._starts: dict[Hashable, dict[int, Tree]] = {}
        self._norms: dict[Hashable, list[float]] = {}

    def began(self, rows: PerClient) -> None:
        """Note what clients begin the round with."""
        for block in rows.blocks:
            if not block.stacked:
                known = self._starts.setdefault((rows.place, tree.signature(block.tree)), {})
                known.update(dict.fromkeys(block.ids, block.tree))

    def start_of(self, rows: PerClient) -> PerClient | None:
        """Return what these rows were when the round began; None if that is not known of all of them."""
        found: dict[int, Tree] = {}
        for block in rows.blocks:
            form = tree.signature(tree.bare(block.tree), stacked=block.stacked)
            known = self._starts.get((rows.place, form), {})
            found |= {j: known[j] for j in block.ids if j in known}
        return PerClient(rows.place, grouped(found), rows.ids) if found.keys() >= set(rows.ids) else None

    def judged(self, what: Hashable, updates: Mapping[int, Update]) -> tuple[int, ...]:
        """Return 1 for each client whose update is in proportion to those of this round so far, and 0 for others."""
        known = self._norms.setdefault(what, [])
        known += [norm for norm, _ in updates.values() if 0 < norm < math.inf]  # clients that stopped say nothing
        if len(updates) > 1 and all(norm == math.inf for norm, _ in updates.values()):
            return (1,) * len(updates)  # it is no client's doing: the run diverges
        usual = median_low(known) if len(known) >= FEWEST else math.inf
        reasons = {j: _reason(update, usual) for j, update in updates.items()}
        self.dropped |= {j: why for j, why in reasons.items() if why}
        return tuple(int(not why) for why in reasons.values())

    def left(self, ids: Sequence[int], fit: Sequence[int]) -> tuple[int, ...]:
        """Return the clients that are left; the server that has decided gives the reason."""
        kept = tuple(j for j, ok in zip(ids, fit, strict=True) if ok)
        for j in set(ids) - set(kept):
            self.dropped.setdefault(j, "was dropped by the other server")
        return kept


def _reason(update: Update, usual: float) -> str:
    if not math.isfinite(update.norm):
        return "is not finite" if math.isnan(update.norm) else "is too large to be averaged"
    if update.norm > max(MOST * usual, ALWAYS_FINE * update.size):
        return f"has the norm {update.norm:.3g}, more than {MOST:g} times the median of the round, {usual:.3g}"
    return ""


def holds_models(rows: PerClient) -> bool:
    """Return whether the rows are models, or parts of them."""
    return bool(rows.blocks) and all(isinstance(tree.bare(b.tree), Model) for b in rows.blocks)
