"""Clients that send what they like in place of their models."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.guard import GUARDED
from cutlayer.core.kinds import Parcel
from cutlayer.core.servers import Ids
from cutlayer.core.transport import Brought
from cutlayer.core.values import Block, PerClient
from cutlayer.engines.local import Local
from cutlayer.remote.device.session import Reply, Session
from cutlayer.remote.protocol.commands import Deliver, Up
from cutlayer.remote.protocol.messages import Work

Change = Callable[[Tensor], Tensor]
KINDS = {kind.name for kind in GUARDED}


def filled(number: float) -> Change:
    """Replace every number of a model by this one."""
    return lambda a: torch.full_like(a, number) if a.is_floating_point() else a


def far(distance: float) -> Change:
    """Move every number of a model by this much."""
    return lambda a: a + distance if a.is_floating_point() else a


def in_simulation(monkeypatch: pytest.MonkeyPatch, client: int, change: Change | None, most: float = 1e9) -> None:
    """Let a client send changed models the first so many times; without a change, it sends none at all."""
    honest = Local.up
    lies = iter(range(int(most)))

    def up(self: Local, parcels: Sequence[Parcel], ids: tuple[int, ...]) -> Brought:
        brought = honest(self, parcels, ids)
        if client not in ids or not any(p.kind in GUARDED for p in parcels) or next(lies, None) is None:
            return brought
        others = Ids(tuple(j for j in ids if j != client))
        values = []
        for parcel, blocks in zip(parcels, brought.values, strict=True):
            value = PerClient("clients", blocks, ids)
            own = self.engine.real(value.at(client))
            kept = value[others].blocks
            if change is not None:
                changed = tree.map(change, own) if parcel.kind in GUARDED else own
                kept = [*kept, Block((client,), changed, stacked=False)]
            values.append(kept)
        return Brought(ids if change is not None else others.ids, values)

    monkeypatch.setattr(Local, "up", up)


def over_the_wire(monkeypatch: pytest.MonkeyPatch, client: int, change: Change) -> None:
    """Let a device in this process change its models after its session has made them."""
    honest = Session.work

    def work(self: Session, work: Work, tensors: Sequence[Tensor]) -> Reply | None:
        reply = honest(self, work, tensors)
        last = self._commands(work)[-1] if reply is not None else None
        if reply is None or self.device.client != client or not isinstance(last, Up | Deliver):
            return reply
        return reply._replace(tensors=[change(a) for a in reply.tensors]) if KINDS & {*last.kinds} else reply

    monkeypatch.setattr(Session, "work", work)
