"""The seam between places: a value is encoded where it leaves, and decoded where it arrives.

Encoding and decoding are functions like those of a method, so each engine runs them as it runs others, and clients run
them on their own copy of the codec.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cutlayer.core import keys, tree
from cutlayer.core.codec import CODED, Coder
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.values import Mark, PerClient, shared, united
from cutlayer.errors import LawError

if TYPE_CHECKING:
    from cutlayer.core.places import Clients
    from cutlayer.core.servers import Keeper

KEPT = "codecs"  # the beginning of the names under which clients keep what a codec lost
OF_CROSSINGS = 1 << 32  # numbers of a client's own seeds from here on; those of steps are smaller


class Base(NamedTuple):
    """Values that came down in this round: as clients have them, and as they were sent."""

    there: PerClient
    sent: PerClient
    looks: Mapping[int, object]  # by client: structure, types and shapes
    numbers: Mapping[int, int]  # by client: how many of this kind it had got before


class Leaving(NamedTuple):
    """A value that goes up, as it crosses; its base, if it is a change."""

    kind: Kind
    value: PerClient
    base: Base | None = None


class Seam:
    """Applies the codecs in one attempt at a round. What has no codec passes as it is."""

    def __init__(self, coders: Mapping[Kind, Coder], key: int, keepers: Mapping[Place, "Keeper"]) -> None:
        self._coders, self._key, self._keepers = coders, key, keepers
        self._bases: dict[Kind, list[Base]] = {}
        self._number = 0  # of the crossing, so that no two draw the same numbers

    # -- up ---------------------------------------------------------------------------------------------------------

    def encoded_up(self, clients: "Clients", kind: Kind, value: PerClient) -> Leaving:
        """Encode a value at the clients; a model as its change since it came down, if it came down in this round."""
        coder = self._coders.get(kind)
        if coder is None or not value.ids:
            return Leaving(kind, value)
        key = self._own_seeds(clients, coder)
        base = None if coder.by_sample else self._base(clients, kind, value)
        if base is None:
            if coder.only_changes:
                raise LawError(
                    f"{coder} encodes how a {kind.name} changed since it came down, but not all of these "
                    "clients got one of this form in this round; take a codec that rounds, such as int8"
                )
            return Leaving(kind, clients.do(coder.encode, value, *key))
        if coder.error_feedback:
            return Leaving(kind, self._with_rest(clients, coder, value, base, *key), base)
        return Leaving(kind, clients.do(coder.encode_change, value, base.there[value], *key), base)

    def _with_rest(self, clients: "Clients", coder: Coder, value: PerClient, base: Base, *key: PerClient) -> PerClient:
        """Encode a change and what was lost before; the clients keep what is lost now."""
        coded = []
        for number in sorted({base.numbers[j] for j in value.ids}):
            names = [f"{KEPT}.{coder.kind.name}.{number}.{letter}" for letter in "ab"]
            some = tuple(j for j in value.ids if base.numbers[j] == number)
            for ids, old, new, version in _turns(clients.only(some), names):
                who = clients.only(ids)
                if old is None:
                    rest = who.do(coder.no_rest, value[who])
                else:
                    rest = marked(who.memory.recall(old), Mark(coder.kind, "rest"))
                made = who.do(coder.encode_with_rest, value[who], base.there[who], rest, *(k[who] for k in key))
                who.memory.keep(new, made.rest, version)
                coded.append(made.coded)
        return united(*coded)

    def decoded_up(self, sent: Leaving, arrived: PerClient) -> PerClient:
        """Decode what came up, at the server that it came to."""
        coder, base = self._coders.get(sent.kind), sent.base
        if coder is None:
            return arrived
        keeper = self._keepers[arrived.place]
        if base is None:
            made = keeper.each(coder.decode, arrived)
        else:
            made = keeper.each(coder.decode_change, arrived, keeper.each(coder.decode, base.sent[arrived]))
        return PerClient(made.place, made.blocks, made.ids, arrived.kind, made.ready)

    # -- down -------------------------------------------------------------------------------------------------------

    def encoded_down(self, kind: Kind, value: PerClient) -> PerClient:
        """Encode a value at the server that sends it; one that all clients get is encoded once."""
        coder = self._coders.get(kind)
        if coder is None or not coder.encodes_down() or not value.ids:
            return value
        keeper = self._keepers[value.place]
        return keeper.each(coder.encode, value, *self._server_keys(keeper, coder, value))

    def decoded_down(self, clients: "Clients", kind: Kind, arrived: PerClient, sent: PerClient) -> PerClient:
        """Decode what came down, at the clients, and note it as the base of changes."""
        coder = self._coders.get(kind)
        if coder is None:
            return arrived
        there = clients.do(coder.decode, arrived)
        if not coder.by_sample:
            bases = self._bases.setdefault(kind, [])
            numbers = {j: sum(j in b.numbers for b in bases) for j in there.ids}
            # The method may assign to its own value.
            bases.append(Base(there[there], sent, _looks(there), numbers))
        return there

    def _base(self, clients: "Clients", kind: Kind, value: PerClient) -> Base | None:
        """Return the newest base of the same form that each of these clients has; None if one of them has none."""
        wanted = _looks(value)
        newest = {j: b for b in self._bases.get(kind, []) for j, look in b.looks.items() if wanted.get(j) == look}
        if newest.keys() != wanted.keys():
            return None
        parts = [
            (b, clients.only(ids)) for b in self._bases[kind] if (ids := tuple(j for j in newest if newest[j] is b))
        ]
        if len(parts) == 1:
            return parts[0][0]
        there, sent = united(*(b.there[ids] for b, ids in parts)), united(*(b.sent[ids] for b, ids in parts))
        return Base(there, sent, wanted, {j: b.numbers[j] for j, b in newest.items()})

    # -- keys -------------------------------------------------------------------------------------------------------

    def _own_seeds(self, clients: "Clients", coder: Coder) -> tuple[PerClient, ...]:
        """Return a seed of each client that no server knows, for a codec that draws."""
        if not coder.traits.draws:
            return ()
        self._number += 1
        return (clients.own_seeds(OF_CROSSINGS + self._number),)

    def _server_keys(self, keeper: "Keeper", coder: Coder, value: PerClient) -> tuple[PerClient, ...]:
        if not coder.traits.draws:
            return ()
        self._number += 1
        if len(value.blocks) == 1 and not value.blocks[0].stacked:  # the same for all
            one = keeper.keys({value.ids[0]: keys.fold(self._key, "codec", self._number)})
            return (shared("anywhere", value.ids, one.at(value.ids[0])),)
        return (keeper.keys({j: keys.fold(self._key, "codec", self._number, j) for j in value.ids}),)


NO_CODECS = Seam({}, 0, {})


def _looks(value: PerClient) -> dict[int, object]:
    """Return the structure, types and shapes of each client's value."""
    return {j: tree.signature(tree.bare(b.tree), stacked=b.stacked) for b in value.blocks for j in b.ids}


class Turn(NamedTuple):
    """Clients that keep what was lost before under one name, and what is lost now, with a version, under another."""

    ids: tuple[int, ...]
    old: str | None
    new: str
    version: int


def _turns(clients: "Clients", names: Sequence[str]) -> list[Turn]:
    """Let clients keep what is lost under two names in turn: if a round fails, that of the round before is there."""
    held = [clients.memory.versions(name) for name in names]
    newest = {j: max((0, 1), key=lambda k: held[k].get(j, -1)) for j in clients.ids if any(j in own for own in held)}
    turns = []
    for k in (0, 1):
        ids = tuple(j for j in clients.ids if newest.get(j) == k)
        turns.append(Turn(ids, names[k], names[1 - k], max((held[k][j] + 1 for j in ids), default=0)))
    turns.append(Turn(tuple(j for j in clients.ids if j not in newest), None, names[0], 0))
    return [turn for turn in turns if turn.ids]


def mark_of(name: str) -> Mark | None:
    """Return the mark of what clients keep under a name: None if it is no codec's."""
    prefix, _, rest = name.partition(".")
    kind = next((kind for kind in CODED if prefix == KEPT and rest.startswith(f"{kind.name}.")), None)
    return None if kind is None else Mark(kind, "rest")


def marked(value: PerClient, mark: Mark) -> PerClient:
    """Return a value at the clients with this mark."""
    return PerClient(value.place, [b._replace(gives=mark) for b in value.blocks], value.ids, ready=value.ready)
