"""The runs in folders: one trial each, and groups of trials that differ only in their seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from cutlayer import recipes
from cutlayer.errors import CheckpointError, ConfigError
from cutlayer.results.measures import ACCURACY, Measure
from cutlayer.runs import config, convergence
from cutlayer.runs.config import Run
from cutlayer.runs.convergence import Converged
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import with_engines_of
from cutlayer.runs.stopping import Record, nobody_trained

NEEDED = ("round", "samples", "bytes")  # in every record


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its sample standard deviation, which one seed does not have."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        known = [v for v in values if v is not None]
        return cls(fmean(known), stdev(known) if len(known) > 1 else None) if known else None

    def scaled(self, factor: float) -> "Spread":
        return Spread(factor * self.mean, None if self.std is None else factor * self.std)


class Span(NamedTuple):
    """Where a mean over seeds lies, as far as the evaluations tell: the goal was reached between two of them."""

    low: float
    high: float

    @classmethod
    def of(cls, lows: Sequence[float], highs: Sequence[float]) -> "Span | None":
        return cls(fmean(lows), fmean(highs)) if highs else None

    @property
    def exact(self) -> bool:
        return self.low == self.high


class Arrival(NamedTuple):
    """The rounds of one run in which it may have reached a goal: after one evaluation, and up to the next."""

    earliest: int
    round: int


@dataclass(frozen=True)
class Reach:
    """Rounds to a goal, and the simulated seconds until then: means over the seeds that reached it."""

    rounds: Span | None
    reached: int
    seeds: int
    seconds: Span | None
    spread: Spread | None  # of the seconds
    at_least: float | None  # seconds over all seeds, with the whole run of those that did not reach it

    @property
    def by_all(self) -> bool:
        return self.reached == self.seeds

    @property
    def mean(self) -> float | None:
        return None if self.rounds is None else self.rounds.high

    @property
    def time(self) -> float | None:
        return None if self.spread is None else self.spread.mean


class Convergence(NamedTuple):
    """How soon runs had converged, and their accuracies then."""

    reach: Reach
    accuracy: Spread | None

    @property
    def of_all(self) -> Spread | None:
        """The accuracies, or None if a seed has not converged."""
        return self.accuracy if self.reach.by_all else None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run with one seed, read from its folder."""

    path: Path
    run: Run
    history: list[Record]
    times: Mapping[int, float]  # wall seconds of each round
    surroundings: dict[str, Any] = field(default_factory=dict)  # versions, machine and engine, as far as known
    measure: Measure = ACCURACY  # what it is compared by
    compared: frozenset[int] | None = None  # rounds whose values count in a comparison; all of them by default

    @cached_property
    def evaluated(self) -> frozenset[int]:
        """The rounds in which the measure was taken, finite or not."""
        return frozenset(r["round"] for r in self.history if self.measure.key in r)

    @cached_property
    def measured(self) -> dict[int, float]:
        """The measure by round, where it was taken and is finite."""
        key = self.measure.key
        return {r["round"]: r[key] for r in self.history if r.get(key) is not None}

    @cached_property
    def values(self) -> dict[int, float]:
        """The measure by round, where it is compared."""
        return {r: v for r, v in self.measured.items() if self.compared is None or r in self.compared}

    @cached_property
    def evaluations(self) -> tuple[int, ...]:
        """The rounds of the evaluations that are compared."""
        return tuple(sorted(self.evaluated if self.compared is None else self.evaluated & self.compared))

    @cached_property
    def end(self) -> Record:
        """The record up to which it is compared: of the last evaluation that all runs have, or of its last round."""
        last = self.evaluations[-1] if self.compared else self.history[-1]["round"]
        return next(r for r in self.history if r["round"] == last)

    @property
    def rounds(self) -> int:
        """The rounds up to the end of the comparison."""
        return int(self.end["round"])

    @property
    def seconds(self) -> float:
        """Wall seconds up to the end of the comparison."""
        return sum(seconds for number, seconds in self.times.items() if number <= self.rounds)

    @property
    def best(self) -> float | None:
        return self.measure.best(self.values.values())

    @property
    def final(self) -> float | None:
        """The last value that is compared; None if it is not finite."""
        return self.measured.get(max(self.evaluations, default=0))

    @cached_property
    def converged(self) -> Converged | None:
        """The round in which it had converged, or None; the rule is about accuracies."""
        return convergence.converged(self.values) if self.measure == ACCURACY else None

    @property
    def stopped(self) -> int:
        """The number of clients that had to stop, summed over all rounds."""
        return sum(r.get("stopped", 0) for r in self.history)

    @property
    def lost(self) -> bool:
        """Whether nobody could train any more."""
        return nobody_trained({"loss": None, "stopped": 0, **self.history[-1]})

    def rounds_to(self, target: float | None) -> int | None:
        """Return the first round that reaches the target; no target is never reached."""
        if target is None:
            return None
        return next((number for number, value in self.values.items() if self.measure.reaches(value, target)), None)

    def arrival(self, number: int | None) -> Arrival | None:
        """Return since when a goal may have been reached that shows in the evaluation of a round."""
        if number is None:
            return None
        before = [r for r in self.values if r < number]
        return Arrival(max(before, default=0) + 1, number)

    @cached_property
    def clock(self) -> dict[int, float]:
        """Simulated seconds until the end of each round; empty if the run has no devices."""
        return {r["round"]: r["simulated_seconds"] for r in self.history if r.get("simulated_seconds") is not None}

    @cached_property
    def samples(self) -> dict[int, int]:
        """Samples that all clients have processed until the end of each round."""
        return {r["round"]: r["samples"] for r in self.history}

    @cached_property
    def traffic(self) -> dict[int, int]:
        """Bytes up and down until the end of each round."""
        return {r["round"]: crossed(r, "up") + crossed(r, "down") for r in self.history}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ only in their seed. Their costs are those up to the end of the comparison."""

    label: str
    trials: tuple[Trial, ...]

    @property
    def run(self) -> Run:
        return self.trials[0].run

    @property
    def measure(self) -> Measure:
        return self.trials[0].measure

    @property
    def rounds(self) -> tuple[int, ...]:
        return tuple(t.rounds for t in self.trials)

    @property
    def best(self) -> Spread | None:
        return Spread.of(t.best for t in self.trials)

    @property
    def final(self) -> Spread | None:
        return Spread.of(t.final for t in self.trials)

    @property
    def stopped(self) -> int:
        return sum(t.stopped for t in self.trials)

    @property
    def seconds(self) -> float:
        return fmean(t.seconds for t in self.trials)

    @property
    def samples(self) -> float:
        """Samples that all clients have processed."""
        return fmean(t.end["samples"] for t in self.trials)

    @property
    def simulated(self) -> float | None:
        """Simulated seconds; None unless every seed has them."""
        return mean_of_all([t.clock.get(t.rounds) for t in self.trials])

    def reach(self, target: float | None) -> Reach:
        """Return how soon the target is reached."""
        return self._reach([t.rounds_to(target) for t in self.trials])

    def samples_to(self, target: float | None) -> Span | None:
        """Return the samples processed until the target is reached; None unless every seed reaches it."""
        found = [(t, arrival) for t in self.trials if (arrival := t.arrival(t.rounds_to(target))) is not None]
        if len(found) < len(self.trials):
            return None
        return Span.of([t.samples[a.earliest] for t, a in found], [t.samples[a.round] for t, a in found])

    @cached_property
    def convergence(self) -> Convergence:
        found = [t.converged for t in self.trials]
        return Convergence(self._reach([c and c.round for c in found]), Spread.of(c and c.accuracy for c in found))

    def _reach(self, rounds: Sequence[int | None]) -> Reach:
        pairs = list(zip(self.trials, rounds, strict=True))
        found = [(t, arrival) for t, r in pairs if (arrival := t.arrival(r)) is not None]
        clocks = [(t.clock, a) for t, a in found if a.round in t.clock and a.earliest in t.clock]
        timed = len(clocks) == len(found)
        return Reach(
            rounds=Span.of([a.earliest for _, a in found], [a.round for _, a in found]),
            reached=len(found),
            seeds=len(rounds),
            seconds=Span.of([c[a.earliest] for c, a in clocks], [c[a.round] for c, a in clocks]) if timed else None,
            spread=Spread.of(clock[a.round] for clock, a in clocks) if timed else None,
            at_least=mean_of_all([t.clock.get(r or t.rounds) for t, r in pairs]),
        )

    def bytes(self, direction: str) -> float:
        """Return the bytes in one direction."""
        return fmean(crossed(t.end, direction) for t in self.trials)


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def find(paths: Iterable[Path]) -> list[Folder]:
    """Return every run folder at or below these paths, each once."""
    found: dict[Path, Folder] = {}
    for path in paths:
        here = [Folder(p.parent) for p in sorted(path.rglob("config.toml"))]
        here = [folder for folder in here if folder.metrics.exists()]
        if not here:
            raise ConfigError(
                f"there is no run under {path}; a run's folder holds config.toml and metrics.jsonl, "
                "and `cutlayer run` makes one"
            )
        for folder in here:
            found.setdefault(folder.path.resolve(), folder)
    return list(found.values())


def load(folder: Folder) -> Trial:
    """Read a run's folder."""
    run, history = folder.recorded(), folder.history()
    for number, record in enumerate(history, start=1):
        missing = [key for key in NEEDED if key not in record]
        if missing:
            raise CheckpointError(
                f"line {number} of {folder.metrics} has no {missing[0]!r}; put the file back, or start over with "
                "--overwrite"
            )
    return Trial(
        path=folder.path,
        run=replace(run, name=recipes.present(run.name)),
        history=history,
        times={line["round"]: line["seconds"] for line in folder.times()},
        surroundings=folder.surroundings(),
    )


def crossed(record: Record, direction: str) -> int:
    """Return the bytes of all kinds that crossed in a direction from the start of the run to the end of this round."""
    return sum(size for kind, size in record["bytes"].items() if kind.startswith(f"{direction}_"))


def grouped(trials: Sequence[Trial]) -> tuple[Group, ...]:
    """Group trials that differ only in their seed, and label the groups so that they can be told apart."""
    together: list[list[Trial]] = []
    for trial in trials:
        home = next((g for g in together if _same_but_seed(g[0].run, trial.run)), None)
        if home is None:
            together.append([trial])
            continue
        twin = next((t for t in home if t.run.seed == trial.run.seed), None)
        if twin is not None:
            raise ConfigError(
                f"{twin.path} and {trial.path} hold the same run with the same seed {trial.run.seed}, "
                "which is no second opinion; name only one of them"
            )
        home.append(trial)
    ordered = [tuple(sorted(group, key=lambda t: t.run.seed)) for group in together]
    labels = _labels([group[0] for group in ordered])
    return tuple(Group(label=label, trials=group) for label, group in zip(labels, ordered, strict=True))


def _same_but_seed(a: Run, b: Run) -> bool:
    """Whether two runs differ only in seed, length (a run may be continued) and checkpoints.

    `auto` in an older run is any engine: its folder does not record the one that was chosen.
    """
    alike: dict[str, Any] = {
        "seed": 0, "rounds": 1, "until_converged": False, "until_accuracy": None, "until_samples": None,
        "patience": None, "min_delta": 0.0, "checkpoint_every": 1,
    }  # fmt: skip
    a, b = with_engines_of(config.as_dict(b), a), with_engines_of(config.as_dict(a), b)
    return config.as_dict(replace(a, **alike)) == config.as_dict(replace(b, **alike))


def _labels(firsts: Sequence[Trial]) -> list[str]:
    """Return the shortest labels that are all different."""
    spellings: tuple[Callable[[Trial], str], ...] = (
        lambda t: t.run.name.rsplit("/", 1)[-1],
        lambda t: t.run.name,
        lambda t: str(t.path.parent),
    )
    for spelling in spellings:
        labels = [spelling(first) for first in firsts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(first.path) for first in firsts]
