"""What finished runs say, side by side: best and final accuracy, rounds to a target, bytes, seconds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cutlayer import config
from cutlayer.config import Run
from cutlayer.errors import ConfigError
from cutlayer.folder import Folder
from cutlayer.training import Record

TARGET_SHARE = 0.9  # of the reference's best accuracy, as the papers choose it
DIRECTIONS = ("up", "down", "inter_server")


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its sample standard deviation, which one seed does not have."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        known = [v for v in values if v is not None]
        return cls(fmean(known), stdev(known) if len(known) > 1 else None) if known else None


@dataclass(frozen=True)
class Reach:
    """Rounds to the target: the mean over the seeds that reached it."""

    mean: float | None
    reached: int
    seeds: int

    @property
    def by_all(self) -> bool:
        return self.reached == self.seeds


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run with one seed, as its folder tells it."""

    path: Path
    run: Run
    history: list[Record]
    seconds: float

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Test accuracy by round, where it was measured."""
        return {r["round"]: r["test_accuracy"] for r in self.history if r.get("test_accuracy") is not None}

    @property
    def best(self) -> float | None:
        return max(self.accuracies.values(), default=None)

    @property
    def final(self) -> float | None:
        return self.accuracies[max(self.accuracies)] if self.accuracies else None

    @property
    def stopped(self) -> int:
        """Clients that had to stop, added up over the rounds."""
        return sum(r.get("stopped", 0) for r in self.history)

    def rounds_to(self, target: float) -> int | None:
        """The first round that reaches the target."""
        return next((number for number, accuracy in self.accuracies.items() if accuracy >= target), None)

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
        return Spread.of([t.best for t in self.trials])

    @property
    def final(self) -> Spread | None:
        return Spread.of([t.final for t in self.trials])

    @property
    def stopped(self) -> int:
        return sum(t.stopped for t in self.trials)

    @property
    def seconds(self) -> float:
        return fmean(t.seconds for t in self.trials)

    def reach(self, target: float) -> Reach:
        found = [r for t in self.trials if (r := t.rounds_to(target)) is not None]
        return Reach(fmean(found) if found else None, len(found), len(self.trials))

    def bytes(self, direction: str) -> float:
        """Bytes of a whole run in one direction."""
        return fmean(crossed(t.history[-1], direction) for t in self.trials)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Groups, the accuracy they are raced to, and the group they are measured against."""

    groups: tuple[Group, ...]
    reference: Group
    target: float | None  # none where no accuracy was measured
    rule: str  # where the target comes from

    def reach(self, group: Group) -> Reach:
        return Reach(None, 0, len(group.trials)) if self.target is None else group.reach(self.target)

    def speed_up(self, group: Group) -> float | None:
        """How many times fewer rounds than the reference; only where every seed of both arrives."""
        ours, theirs = self.reach(group), self.reach(self.reference)
        if ours.mean is None or theirs.mean is None or not (ours.by_all and theirs.by_all):
            return None
        return theirs.mean / ours.mean

    def as_dict(self) -> dict[str, Any]:
        """For machines: plain numbers, accuracies as shares of 1."""
        return {
            "target": self.target,
            "target_rule": self.rule,
            "reference": self.reference.label,
            "runs": [self._row(group) for group in self.groups],
        }

    def _row(self, group: Group) -> dict[str, Any]:
        reach = self.reach(group)
        return {
            "label": group.label,
            "name": group.run.name,
            "method": group.run.method.name,
            "seeds": [t.run.seed for t in group.trials],
            "folders": [str(t.path) for t in group.trials],
            "rounds": list(group.rounds),
            "best_accuracy": _spread(group.best),
            "final_accuracy": _spread(group.final),
            "rounds_to_target": {"mean": reach.mean, "reached": reach.reached, "seeds": reach.seeds},
            "speed_up": self.speed_up(group),
            "bytes": {direction: group.bytes(direction) for direction in DIRECTIONS},
            "stopped": group.stopped,
            "seconds": group.seconds,
        }


def find(paths: Iterable[Path]) -> list[Folder]:
    """Every folder of a run at or below these paths, each once."""
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


def compare(folders: Iterable[Folder], target: float | None = None) -> Comparison:
    """Group the runs and race them to the target; by default to a share of FedAvg's best accuracy."""
    trials = [trial for folder in folders if (trial := load(folder)).history]
    if not trials:
        raise ConfigError("none of these runs has finished a round yet; try again later")
    groups = _grouped(trials)
    reference, about = _reference(groups)
    if target is not None:
        return Comparison(groups=groups, reference=reference, target=target, rule="as given")
    best = reference.best
    if best is None:
        return Comparison(groups=groups, reference=reference, target=None, rule="no accuracy was measured")
    return Comparison(
        groups=groups,
        reference=reference,
        target=TARGET_SHARE * best.mean,
        rule=f"{TARGET_SHARE:g} × the best accuracy of {about}",
    )


def load(folder: Folder) -> Trial:
    """Read a run's folder."""
    seconds = sum(line["seconds"] for line in folder.times())
    return Trial(path=folder.path, run=folder.run(), history=folder.history(), seconds=seconds)


def crossed(record: Record, direction: str) -> int:
    """Bytes that have crossed in a direction, of all kinds, from the start to the end of this round."""
    return sum(size for kind, size in record["bytes"].items() if kind.startswith(f"{direction}_"))


def _grouped(trials: Sequence[Trial]) -> tuple[Group, ...]:
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
    """The length of a run is left out: a run may be continued."""
    return config.as_dict(replace(a, seed=0, rounds=1)) == config.as_dict(replace(b, seed=0, rounds=1))


def _labels(firsts: Sequence[Trial]) -> list[str]:
    """The shortest names that tell the groups apart."""
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


def _reference(groups: Sequence[Group]) -> tuple[Group, str]:
    """FedAvg where it is among the runs, else the best run; and how to call it."""

    def best(some: Sequence[Group]) -> Group:
        return max(some, key=lambda g: g.best.mean if g.best is not None else -1.0)

    plain = [g for g in groups if g.run.method.name == "fedavg" and not g.run.method.options]
    if plain:
        chosen = best(plain)
        return chosen, chosen.label if chosen.label == "fedavg" else f"FedAvg, {chosen.label}"
    chosen = best(groups)
    return chosen, f"all runs, that of {chosen.label}"


def _spread(spread: Spread | None) -> dict[str, float | None] | None:
    return None if spread is None else {"mean": spread.mean, "std": spread.std}
