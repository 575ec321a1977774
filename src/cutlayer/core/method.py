"""The protocol of methods: hyper-parameters and pieces, what the method needs of a run, a start, and a round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch

from cutlayer.core.checks import check_optimiser, check_type
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Model, State
from cutlayer.core.values import Held
from cutlayer.errors import ConfigError, LawError, UsageError

C = TypeVar("C", bound=type[Any])
OPTIMISERS = ("client_opt", "server_opt", "opt")  # the usual names of a method's optimisers
PYTHON_ONLY = {"python_only": True}  # metadata of a field that Python code may set and a configuration file may not


# (clients, the run's batch size) -> batch size by client; a client that is left out uses the run's.
Sizes = Callable[[Sequence[int], int], Mapping[int, int]]


def equal_batches(ids: Sequence[int], batch: int) -> Mapping[int, int]:
    """Let every client use the run's batch size."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method needs of a run; `runs.checks` checks every run against it."""

    fewest_clients: int = 1  # that must stay from the beginning of a round to its end
    num_clients: int | None = None  # of the run, if the method has a list with an entry for each
    counts_steps: bool = False  # the method sets the number of mini-batches in a round, so the batching must not
    batch_sizes: Sizes = equal_batches
    smallest_batch: int | None = None  # of any client in any round, if known; the run's by default
    chooses_batches: bool = False  # the method chooses batch sizes during the run
    largest_batch: int | None = None  # of any client in any round; the run's by default
    busiest: "Method | None" = None  # the same method, but it chooses so that clients do all that they may do
    moves_cut: bool = False  # the layers that a client holds may change from round to round
    draws_cut: bool = False  # they follow from the key of the round alone
    lowest_cut: int | None = None  # the fewest units that a client may hold; the model's cut by default
    merges_batches: bool = False  # so each tensor that crosses a cut must have a row for each sample
    full_precision: bool = False  # it compares passes whose small differences bfloat16 may round away


class Method(Protocol):
    """A frozen dataclass of hyper-parameters and pieces, decorated with `@method`.

    It mentions no engine, meter, transport or file.
    """

    @property
    def model(self) -> Any:
        """The model as a `Split`."""

    def start(self, server: Server, fed: Fed) -> State:
        """Return the state before the first round."""

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        """Return the state after one more round with these clients."""


def method(cls: C) -> C:
    """Make a class a method: add the defaults of what it does not declare, and forbid subclasses.

    It may declare `needs`, a `Needs`; `metrics(state)`, which returns its own figures of the last round for the metrics
    file; and `labels_leave`, whether clients may send their labels. A new method composes shared pieces; it never
    overrides a part of another method.
    """

    def refuse(sub: type[Any], /, **_: Any) -> None:
        raise LawError(
            f"{sub.__name__} cannot derive from {cls.__name__}: methods are final. "
            "Compose the pieces (Transform, Exchange, Fuse, Outer) or write a round of its own."
        )

    cls.__init_subclass__ = classmethod(refuse)  # type: ignore[assignment]
    cls.__init__ = _checking_optimisers(cls.__init__)
    cls._is_method = True
    declared = dir(cls)  # with what it inherits
    for name, default in DEFAULTS.items():
        if name not in declared:
            setattr(cls, name, default)
    return cls


def _checking_optimisers(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def checked(self: object, *args: Any, **options: Any) -> None:
        for name, value in options.items():
            if name in OPTIMISERS or isinstance(value, torch.optim.Optimizer):
                check_optimiser(name, value)
        init(self, *args, **options)

    return checked


def _no_metrics(self: Method, state: State) -> dict[str, Any]:
    return {}


# What a method may declare: a class attribute, a property, a field, or inherited from a plain class.
DEFAULTS: dict[str, Any] = {"needs": Needs(), "metrics": _no_metrics, "labels_leave": False}


def needs_of(method: Method) -> Needs:
    """Return what a method needs of a run."""
    name = type(method).__name__
    if "_is_method" not in vars(type(method)):
        raise ConfigError(f"{name} is no method yet; put @method above its @dataclass")
    needs: Needs = method.needs  # type: ignore[attr-defined]  # the decorator supplies it
    check_type(f"{name}.needs", needs, Needs, "such as Needs(fewest_clients=2)")
    return needs


def shallowest(method: Method) -> Any:
    """Return the model at the lowest cut that the method may take."""
    lowest = needs_of(method).lowest_cut
    return method.model if lowest is None else method.model.at(lowest)


def metrics_of(method: Method, state: State) -> dict[str, Any]:
    """Return the method's own figures of the last round for the metrics file."""
    metrics: dict[str, Any] = method.metrics(state)  # type: ignore[attr-defined]  # the decorator supplies it
    return metrics


class TooFew(UsageError):
    """Too few clients are left at the end of a round; it is rolled back and can be retried."""


def check_left(method: str, mean: Held, fewest: int) -> None:
    """Refuse a mean over a single client where layers change servers: it would reveal that client's layers."""
    if mean.stays and fewest > 1:
        raise too_few(method, fewest)


def too_few(method: str, fewest: int) -> TooFew:
    return TooFew(
        f"{method} needs at least {fewest} clients until the round has ended, but all others were lost; "
        "try the round again with more clients"
    )


def global_model(state: State) -> Model:
    """Return the whole model, for those who may hold both halves: evaluation and export."""
    client: Model = state.client.tree.model
    return client.joined(state.server.tree.model)
