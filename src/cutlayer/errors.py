"""Everything cutlayer raises on purpose.

CutlayerError
├── UsageError              a mistake that a user can mend; the command line prints it without a traceback
│   ├── UnknownNameError    no such recipe, method, model, data set or key; answers with the nearest names
│   ├── ConfigError         a value that is known by name but makes no sense
│   ├── DataError           files that are missing, malformed or out of range
│   ├── PartitionError      a partition that cannot be drawn
│   ├── CutError            a model that cannot be cut there
│   ├── InfeasibleError     devices for which there is no plan
│   ├── CheckpointError     a checkpoint that is damaged, missing or of another run
│   └── LinkError           a server that cannot be reached, or that refuses this client
├── WireError               a message that is not what it should be
└── LawError                a method that would move a value where it must not go

Each message says what happened, where, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal


class CutlayerError(Exception):
    """The root of the tree."""


class UsageError(CutlayerError):
    """A mistake that a user can mend."""


class UnknownNameError(UsageError):
    """A name that nothing is registered under."""

    def __init__(self, what: str, name: str, known: Iterable[str], where: str = "") -> None:
        options = sorted(known)
        near = get_close_matches(str(name), options, n=3, cutoff=0.5)  # from Python it may be anything
        hint = f"known: {', '.join(options)}." if options else "it has none."
        if near:
            hint = f"did you mean {' or '.join(repr(n) for n in near)}?"
        super().__init__(f"unknown {what} {name!r}{f' in {where}' if where else ''}; {hint}")


class ConfigError(UsageError):
    """A value that makes no sense where it stands."""


class DataError(UsageError):
    """Data that cannot be read or used."""


class PartitionError(UsageError):
    """A partition that cannot be drawn."""


class CutError(UsageError):
    """A model that cannot be cut as asked."""


class InfeasibleError(UsageError):
    """No plan meets the target (`infeasible_eps`), or none fits the memory of any device (`infeasible_memory`)."""

    def __init__(self, why: Literal["infeasible_eps", "infeasible_memory"], message: str) -> None:
        super().__init__(message)
        self.why = why


class CheckpointError(UsageError):
    """A checkpoint that cannot be resumed from or written."""


class LinkError(UsageError):
    """A server that cannot be reached, or that refuses this client."""


class WireError(CutlayerError):
    """A message that is not what it should be; nothing of it was used."""


class LawError(CutlayerError):
    """A method that would break a law of places."""
