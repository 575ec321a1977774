"""The commands that a server may send to a client: a list over numbered slots, which ends with the values to send up.

A client keeps values in slots during a round. Tensors and plain numbers travel separately, in the order in which the
commands take them. The list itself is the same at every step, so it is sent once and then referred to by number.
"""

from typing import Any

from msgspec import Struct


class Command(Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True):
    """One command of a list."""


class Put(Command, frozen=True, tag="put"):
    """Store a value that came down; takes its numbers and tensors."""

    out: int
    tree: Any  # a skeleton of core/skeleton.py, without texts and lists


class Key(Command, frozen=True, tag="key"):
    """Store the client's key of a step, which all places know; takes the number of the step in the round."""

    out: int


class Batch(Command, frozen=True, tag="batch"):
    """Load one of the client's own mini-batches; takes its size, its number, and that of the step in the round."""

    x: int
    y: int


class Own(Command, frozen=True, tag="own"):
    """Make a seed that only the client knows; takes the number of the step in the round, or of a crossing."""

    out: int


class Do(Command, frozen=True, tag="do"):
    """Call a function that the client's method declares."""

    out: int
    function: str
    arguments: tuple[int, ...]


class Vjp(Command, frozen=True, tag="vjp"):
    """Compute the output of a function, and its pullback."""

    out: int
    pullback: int
    function: str
    arguments: tuple[int, ...]


class Grad(Command, frozen=True, tag="grad"):
    """Compute the gradients of a loss."""

    out: int
    function: str
    arguments: tuple[int, ...]
    cut: int | None


class Pull(Command, frozen=True, tag="pull"):
    """Apply a pullback to the gradient of its output."""

    out: int
    pullback: int
    gradient: int


class Field(Command, frozen=True, tag="field"):
    """Take a field of a value."""

    out: int
    of: int
    name: str


class KeepValue(Command, frozen=True, tag="keep"):
    """Keep a value beyond the round, and return a copy in memory of its own; takes the version."""

    out: int
    name: str
    value: int


class RecallValue(Command, frozen=True, tag="recall"):
    """Recall a value that was kept."""

    out: int
    name: str


class Get(Command, frozen=True, tag="get"):
    """Wait for a value that a separate fed server sends directly; takes its number."""

    out: int


class Free(Command, frozen=True, tag="free"):
    """Free a slot that is not needed any more."""

    slot: int


class Up(Command, frozen=True, tag="up"):
    """Send these slots up, each as its kind; the last command of a list."""

    kinds: tuple[str, ...]
    slots: tuple[int, ...]


class Deliver(Command, frozen=True, tag="deliver"):
    """Send these slots to a separate fed server, each as its kind; the last command. Takes the delivery's number."""

    kinds: tuple[str, ...]
    slots: tuple[int, ...]


AnyCommand = (
    Put | Key | Batch | Own | Do | Vjp | Grad | Pull | Field | KeepValue | RecallValue | Get | Free | Up | Deliver
)
