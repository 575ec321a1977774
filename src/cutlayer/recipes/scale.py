"""Smaller runs that end sooner: fewer clients with as much data each, and fewer rounds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cutlayer.errors import ConfigError
from cutlayer.runs.config import Choice, Run

MARK = "@"  # between the first word of a run's name and its scale
FEWEST = 2  # clients, clients of a round, and rounds: with one there is nothing to average or to compare
OF_ALL_CLIENTS = ("ingress",)  # options of methods that add up over the clients of a round


def scaled(run: Run, factor: float) -> Run:
    """Return the run at a scale of 0 < factor <= 1.

    Clients, clients of a round, samples and rounds shrink together, so each client holds as much data as before and
    does as much work in a round. A Dirichlet partition becomes relatively more even with fewer clients, so a smallest
    client that could be drawn before can still be drawn.
    """
    if not 0 < factor <= 1:
        raise ConfigError(f"the scale is {factor:g}; it must be above 0 and at most 1")
    if factor == 1:
        return run
    clients, rounds = _fewer(run.clients, factor, FEWEST), _fewer(run.rounds, factor, FEWEST)
    share = clients / run.clients  # not the factor: with the fewest clients it would leave them less data
    per_round = None if run.per_round is None else _fewer(run.per_round, share, FEWEST)
    work = (per_round or clients) / (run.per_round or run.clients) * rounds / run.rounds
    return replace(
        run,
        name=_marked(run.name, factor),
        clients=clients,
        per_round=per_round,
        # Natural clients bring their own samples, so fewer clients have fewer samples.
        subset=run.subset if run.partition.name == "natural" else run.subset * share,
        rounds=rounds,
        until_samples=None if run.until_samples is None else _fewer(run.until_samples, work),
        eval_every=_fewer(run.eval_every, factor),
        checkpoint_every=_fewer(run.checkpoint_every, factor),
        method=_with_fewer_clients(run.method, share),
        optimiser=_in_fewer_rounds(run.optimiser, rounds / run.rounds),
        server_optimiser=run.server_optimiser and _in_fewer_rounds(run.server_optimiser, rounds / run.rounds),
    )


def unscaled(name: str) -> str:
    """Return the name of a run without its scale."""
    first, slash, rest = name.partition("/")
    return first.partition(MARK)[0] + slash + rest


def size_of(run: Run, smaller: Run) -> str:
    """Describe what is left of a run; keys that were set after scaling may have enlarged parts of it again."""
    share = smaller.subset / run.subset
    samples = "all samples" if share == 1 else f"{100 * share:.3g} % of the samples"
    if smaller.partition.name == "natural" and share == 1:
        samples = "all samples of these clients"
    clients, rounds = (_of(getattr(smaller, key), getattr(run, key), key) for key in ("clients", "rounds"))
    return f"{clients}, {rounds}, {samples}"


def _of(now: int, before: int, what: str) -> str:
    return f"{now} of {before} {what}" if now <= before else f"{now} {what} instead of {before}"


def _fewer(count: int, share: float, least: int = 1) -> int:
    return max(min(least, count), round(share * count))


def _marked(name: str, factor: float) -> str:
    first, slash, rest = name.partition("/")
    return f"{first}{MARK}{factor:g}{slash}{rest}"


def _with_fewer_clients(method: Choice, share: float) -> Choice:
    changes = {key: _fewer(method.options[key], share) for key in OF_ALL_CLIENTS if key in method.options}
    return Choice(method.name, {**method.options, **changes})


def _in_fewer_rounds(optimiser: Choice, share: float) -> Choice:
    options = {k: _shortened(v, share) if isinstance(v, Mapping) else v for k, v in optimiser.options.items()}
    return Choice(optimiser.name, options)


def _shortened(schedule: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return the schedule with its numbers of rounds scaled; a decay after each round stays the same."""
    changes: dict[str, Any] = {key: _fewer(schedule[key], share) for key in ("rounds", "warmup") if key in schedule}
    if "milestones" in schedule:
        changes["milestones"] = tuple(_fewer(round_, share) for round_ in schedule["milestones"])
    return {**schedule, **changes}
