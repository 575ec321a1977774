"""The runs in folders: one trial each, and groups of trials that differ only in their seed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from cutlayer import recipes
from cutlayer.errors import ConfigError
from cutlayer.runs import config, convergence
from cutlayer.runs.config import Run
from cutlayer.runs.convergence import Converged
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import with_engines_of
from cutlayer.runs.stopping import Record


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


@dataclass(frozen=True)
class Reach:
    """Rounds to a goal, and the simulated seconds until then: means over the seeds that reached it."""

    mean: float | None
    reached: int
    seeds: int
    spread: Spread | None  # of the seconds
    at_least: float | None  # seconds over all seeds, with the whole run of those that did not reach it

    @property
    def by_all(self) -> bool:
        return self.reached == self.seeds

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
    seconds: float

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Test accuracy by round, where it was measured."""
        return convergence.accuracies(self.history)

    @property
    def best(self) -> float | None:
        return max(self.accuracies.values(), default=None)

    @property
    def final(self) -> float | None:
        return self.accuracies[max(self.accuracies)] if self.accuracies else None

    @cached_property
    def converged(self) -> Converged | None:
        """The round in which it had converged, or None."""
        return convergence.converged(self.accuracies)

    @property
    def stopped(self) -> int:
        """The number of clients that had to stop, summed over the rounds."""
        return sum(r.get("stopped", 0) for r in self.history)

    def rounds_to(self, target: float | None) -> int | None:
        """Return the first round that reaches the target; no target is never reached."""
        if target is None:
            return None
        return next((number for number, accuracy in self.accuracies.items() if accuracy >= target), None)

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
    """Runs that differ only in their seed."""

    label: str
    trials: tuple[Trial, ...]

    @property
    def run(self) -> Run:
        return self.trials[0].run

    @property
    def rounds(self) -> tuple[int, ...]:
        return tuple(len(t.history) for t in self.trials)

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
        """Samples that all clients have processed in a whole run."""
        return fmean(t.history[-1]["samples"] for t in self.trials)

    @property
    def simulated(self) -> float | None:
        """Simulated seconds of a whole run; None unless every seed has them."""
        return mean_of_all([max(t.clock.values(), default=None) for t in self.trials])

    def reach(self, target: float | None) -> Reach:
        """Return how soon the target is reached."""
        return self._reach([t.rounds_to(target) for t in self.trials])

    def samples_to(self, target: float | None) -> float | None:
        """Return the samples processed until the target is reached; None unless every seed reaches it."""
        rounds = [t.rounds_to(target) for t in self.trials]
        return mean_of_all([r and t.samples[r] for t, r in zip(self.trials, rounds, strict=True)])

    @cached_property
    def convergence(self) -> Convergence:
        found = [t.converged for t in self.trials]
        return Convergence(self._reach([c and c.round for c in found]), Spread.of(c and c.accuracy for c in found))

    def _reach(self, rounds: Sequence[int | None]) -> Reach:
        pairs = list(zip(self.trials, rounds, strict=True))
        found = [r for r in rounds if r is not None]
        times = [t.clock[r] for t, r in pairs if r in t.clock]
        return Reach(
            mean=fmean(found) if found else None,
            reached=len(found),
            seeds=len(rounds),
            spread=Spread.of(times) if len(times) == len(found) else None,
            at_least=mean_of_all([t.clock[r or max(t.clock)] if t.clock else None for t, r in pairs]),
        )

    def bytes(self, direction: str) -> float:
        """Return the bytes of a whole run in one direction."""
        return fmean(crossed(t.history[-1], direction) for t in self.trials)


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
    run = folder.recorded()
    return Trial(
        path=folder.path,
        run=replace(run, name=recipes.present(run.name)),
        history=folder.history(),
        seconds=sum(line["seconds"] for line in folder.times()),
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
