"""A server and a client that speak the protocol, and say nearly what honest ones say."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from cutlayer.remote.protocol import commands as c

Random = random.Random
KINDS = ("activations", "labels", "gradients", "scalars", "model", "slopes", "statistics", "auxiliary", "raw", "")
NUMBERS = (0, 1, 2, 3, 4, 8, 48, -1, 10**9, 2**62, 2**63 - 1, 0.5, 1e300, float("nan"), float("inf"))
FIELDS = ("model", "params", "cut", "loss", "coded", "rest", "moments", "__class__", "x")


class Said(NamedTuple):
    """One message of a server: a list of commands with what they take."""

    begins: bool
    commands: tuple[c.AnyCommand, ...]
    numbers: tuple[float, ...]
    tensors: tuple[Tensor, ...]


Conversation = list[Said]
Change = Callable[[Random, Conversation, Sequence[Conversation]], Conversation]


def at(rng: Random, said: Conversation) -> int:
    return rng.randrange(len(said))


def commanded(said: Conversation, k: int, commands: Sequence[c.AnyCommand]) -> Conversation:
    return [*said[:k], said[k]._replace(commands=tuple(commands)), *said[k + 1 :]]


def drop(rng: Random, said: Conversation, _: Any) -> Conversation:
    k = at(rng, said)
    own = list(said[k].commands)
    del own[rng.randrange(len(own)) :][: rng.choice([1, 1, 3])]
    if own:
        del own[rng.randrange(len(own))]
    return commanded(said, k, own)


def repeat(rng: Random, said: Conversation, _: Any) -> Conversation:
    k = at(rng, said)
    own = list(said[k].commands)
    place = rng.randrange(len(own))
    return commanded(said, k, [*own[:place], own[place], *own[place:]])


def reorder(rng: Random, said: Conversation, _: Any) -> Conversation:
    k = at(rng, said)
    own = list(said[k].commands)
    i, j = rng.randrange(len(own)), rng.randrange(len(own))
    own[i], own[j] = own[j], own[i]
    return commanded(said, k, own)


def rename(rng: Random, said: Conversation, others: Sequence[Conversation]) -> Conversation:
    """Another function, field or kind of those that any method has."""
    names = [own.function for one in others for s in one for own in s.commands if hasattr(own, "function")]

    def renamed(one: c.AnyCommand) -> c.AnyCommand:
        match one:
            case c.Do() | c.Vjp() | c.Grad():
                return msgspec.structs.replace(one, function=rng.choice([*names, "__init__", "observer.first_half"]))
            case c.Up(kinds, slots) | c.Deliver(kinds, slots):
                return type(one)(tuple(rng.choice(KINDS) for _ in kinds), slots)
            case c.Field() | c.KeepValue() | c.RecallValue():
                return msgspec.structs.replace(one, name=rng.choice(FIELDS))
        return one

    return changed(rng, said, renamed)


def swap_slots(rng: Random, said: Conversation, _: Any) -> Conversation:
    def swapped(one: c.AnyCommand) -> c.AnyCommand:
        def other(value: Any) -> Any:
            if type(value) is int and rng.random() < 0.5:
                return rng.choice([rng.randrange(24), rng.randrange(24), -1, 10_000, 2**62])
            return tuple(map(other, value)) if isinstance(value, tuple) else value

        return type(one)(*(other(getattr(one, name)) for name in one.__struct_fields__))

    return changed(rng, said, swapped)


def changed(rng: Random, said: Conversation, change: Callable[[c.AnyCommand], c.AnyCommand]) -> Conversation:
    k = at(rng, said)
    some = rng.choice([0.1, 0.3, 1.0])
    return commanded(said, k, [change(one) if rng.random() < some else one for one in said[k].commands])


def insert(rng: Random, said: Conversation, others: Sequence[Conversation]) -> Conversation:
    """A command of any kind, or one of another conversation."""
    slot = lambda: rng.randrange(24)  # noqa: E731
    any_of: list[c.AnyCommand] = [
        c.Up((rng.choice(KINDS),), (slot(),)),
        c.Deliver((rng.choice(KINDS),), (slot(),)),
        c.Own(slot()),
        c.Key(slot()),
        c.Batch(slot(), slot()),
        c.Get(slot()),
        c.Free(slot()),
        c.Field(slot(), slot(), rng.choice(FIELDS)),
        c.KeepValue(slot(), "mine", slot()),
        c.RecallValue(slot(), "mine"),
        c.Pull(slot(), slot(), slot()),
        c.Put(slot(), rng.choice(["tensor", "number", None, ["tuple", ["tensor"] * 3], ["Part", [], []], 5])),
        rng.choice(rng.choice(rng.choice(others)).commands),
    ]
    k = at(rng, said)
    own = list(said[k].commands)
    own.insert(rng.randrange(len(own) + 1), rng.choice(any_of))
    return commanded(said, k, own)


def other_numbers(rng: Random, said: Conversation, _: Any) -> Conversation:
    k = at(rng, said)
    some = rng.choice([0.1, 0.5])
    own = [rng.choice(NUMBERS) if rng.random() < some else number for number in said[k].numbers]
    if rng.random() < 0.2:
        own = own[:-1] if rng.random() < 0.5 else [*own, 1]
    return [*said[:k], said[k]._replace(numbers=tuple(own)), *said[k + 1 :]]


def other_tensor(rng: Random, own: Tensor) -> Tensor:
    match rng.randrange(7):
        case 0:
            return torch.full_like(own, float("nan")) if own.is_floating_point() else own - 1
        case 1:
            return torch.full_like(own, 1e30) if own.is_floating_point() else own + 2**40
        case 2:
            return own.flatten()
        case 3:
            return own.to(torch.bfloat16)
        case 4:
            return torch.cat([own, own]) if own.dim() else own[None]
        case 5:
            return own[:0] if own.dim() else own
        case _:
            return torch.zeros_like(own)


def other_tensors(rng: Random, said: Conversation, _: Any) -> Conversation:
    k = at(rng, said)
    own = [other_tensor(rng, a) if rng.random() < 0.4 else a for a in said[k].tensors]
    if rng.random() < 0.2:
        own = own[1:] if rng.random() < 0.5 else [*own, torch.zeros(3)]
    return [*said[:k], said[k]._replace(tensors=tuple(own)), *said[k + 1 :]]


def regroup(rng: Random, said: Conversation, others: Sequence[Conversation]) -> Conversation:
    """Messages left out, repeated, joined, in another order, or of another conversation."""
    k, j = at(rng, said), at(rng, said)
    match rng.randrange(5):
        case 0:
            return [*said[:k], *said[k + 1 :]] or said
        case 1:
            return [*said[: k + 1], *said[j:]]
        case 2:
            return [*said[:k], *rng.choice(others)]
        case 3:
            return [one._replace(begins=rng.random() < 0.5) for one in said]
        case _:
            parts = [said[k], said[j]]
            commands, numbers, tensors = (tuple(x for p in parts for x in p[n]) for n in (1, 2, 3))
            return [*said[:k], Said(said[k].begins, commands, numbers, tensors)]


CHANGES: list[Change] = [
    drop,
    repeat,
    reorder,
    rename,
    swap_slots,
    insert,
    other_numbers,
    other_tensors,
    regroup,
]


def fuzzed(rng: Random, honest: Sequence[Conversation]) -> Conversation:
    """Return an honest conversation with a few changes; now and then with none, or with nothing but changes."""
    said = list(rng.choice(honest))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 10])):
        said = [one if one.commands else one._replace(commands=(c.Free(0),)) for one in said]
        said = rng.choice(CHANGES)(rng, said, honest)
    return said
