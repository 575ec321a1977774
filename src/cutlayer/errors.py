"""The exceptions that cutlayer raises.

CutlayerError
├── UsageError              a mistake that the user can fix; the command line prints it without a traceback
│   ├── UnknownNameError    no such recipe, method, model, data set or key; suggests the nearest names
│   ├── ConfigError         a setting with an invalid value
│   ├── DataError           files that are missing, malformed or out of range
│   ├── PartitionError      a partition that cannot be drawn
│   ├── CutError            a model that cannot be cut there
│   ├── InfeasibleError     devices for which there is no plan
│   ├── CheckpointError     a checkpoint that is damaged, missing or of another run
│   ├── DivergedError       a run in which nobody can train any more; it carries the result so far
│   └── LinkError           a server that cannot be reached, or that refuses this client
├── WireError               an invalid message
└── LawError                a method that would move a value where it must not go

Each message says what happened, where, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal


class CutlayerError(Exception):
    """Base class of all exceptions of cutlayer."""


class UsageError(CutlayerError):
    """A mistake that the user can fix."""


class UnknownNameError(UsageError):
    """A name that is not registered."""

    def __init__(self, what: str, name: str, known: Iterable[str], where: str = "") -> None:
        options = sorted(known)
        near = get_close_matches(str(name), options, n=3, cutoff=0.5)  # a Python caller may pass any type
        hint = f"known: {', '.join(options)}." if options else "it has none."
        if near:
            hint = f"did you mean {' or '.join(repr(n) for n in near)}?"
        super().__init__(f"unknown {what} {name!r}{f' in {where}' if where else ''}; {hint}")


class ConfigError(UsageError):
    """A setting with an invalid value."""


class DataError(UsageError):
    """Data files that are missing, malformed or out of range."""


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
    """A checkpoint that cannot be read or written."""


class DivergedError(UsageError):
    """Nobody can train any more: no loss or no gradient is finite. `result` is the result of `train` so far."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class LinkError(UsageError):
    """A server that cannot be reached, or that refuses this client."""


class WireError(CutlayerError):
    """An invalid message; none of its content was used."""


class LawError(CutlayerError):
    """A method that would move a value where it must not go."""
