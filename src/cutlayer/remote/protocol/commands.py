"""What a server may ask of a client: a list of commands over numbered slots, which ends with what should go up.

A client keeps values in slots for the length of a round. Tensors and plain numbers travel beside the list, in the order
in which its commands take them; the list itself is the same at every step, so it is sent once and then named.
"""

from typing import Any

from msgspec import Struct

# None, "tensor", "number", or a list: ["dict", names, skeletons], ["tuple", skeletons], [class name, skeletons].
Skeleton = Any


class Command(Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True):
    """One entry of a list."""


class Put(Command, frozen=True, tag="put"):
    """A value that came down; takes its numbers and tensors."""

    out: int
    tree: Skeleton


class Key(Command, frozen=True, tag="key"):
    """A key of this round, which is known everywhere; takes it."""

    out: int


class Batch(Command, frozen=True, tag="batch"):
    """Inputs and labels of one of the client's own mini-batches; takes the batch size, its step and its key."""

    x: int
    y: int


class Own(Command, frozen=True, tag="own"):
    """A seed that the client has to itself; takes the step of the round."""

    out: int


class Do(Command, frozen=True, tag="do"):
    """The result of a function that the client's method declares."""

    out: int
    function: str
    arguments: tuple[int, ...]


class Vjp(Command, frozen=True, tag="vjp"):
    """The output of a function and its pullback."""

    out: int
    pullback: int
    function: str
    arguments: tuple[int, ...]


class Grad(Command, frozen=True, tag="grad"):
    """The gradients of a loss."""

    out: int
    function: str
    arguments: tuple[int, ...]
    cut: int | None


class Pull(Command, frozen=True, tag="pull"):
    """The gradients that a pullback makes of the gradient of its output."""

    out: int
    pullback: int
    gradient: int


class Field(Command, frozen=True, tag="field"):
    """A field of a value."""

    out: int
    of: int
    name: str


class KeepValue(Command, frozen=True, tag="keep"):
    """Keep a value beyond the round, and give it back in memory of its own; takes the version."""

    out: int
    name: str
    value: int


class RecallValue(Command, frozen=True, tag="recall"):
    """A value that was kept."""

    out: int
    name: str


class Get(Command, frozen=True, tag="get"):
    """A value that the fed server sends itself, where it is a process of its own; takes its number."""

    out: int


class Free(Command, frozen=True, tag="free"):
    """Nobody needs this slot any more."""

    slot: int


class Up(Command, frozen=True, tag="up"):
    """Send these slots up, each as its kind; the last of a list."""

    kinds: tuple[str, ...]
    slots: tuple[int, ...]


class Deliver(Command, frozen=True, tag="deliver"):
    """Send these slots to the fed server, each as its kind; the last of a list. Takes the number of the delivery."""

    kinds: tuple[str, ...]
    slots: tuple[int, ...]


AnyCommand = (
    Put | Key | Batch | Own | Do | Vjp | Grad | Pull | Field | KeepValue | RecallValue | Get | Free | Up | Deliver
)
