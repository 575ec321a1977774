"""What may make runs differ besides their settings: engines, precisions, devices, versions and lengths."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cutlayer.results.trials import Group, Trial
from cutlayer.runs.stopping import ended_early

AUTO = "auto"  # an older run does not tell which engine it was


def _engine(trial: Trial) -> Any:
    known = trial.surroundings.get("engine") or trial.run.engine
    return None if known == AUTO else known


# What is compared, by the words for it; None is unknown.
TRAITS: dict[str, Callable[[Trial], Any]] = {
    "engine": _engine,
    "precision": lambda t: t.run.precision,
    "device": lambda t: t.run.device,
    "machine": lambda t: t.surroundings.get("gpu") or t.surroundings.get("machine"),
    "version of torch": lambda t: t.surroundings.get("torch"),
    "version of cutlayer": lambda t: t.surroundings.get("cutlayer"),
}


def warnings(groups: Sequence[Group]) -> Iterator[str]:
    """Yield how the runs of groups differ where they should not."""
    for name, trait in TRAITS.items():
        found: dict[str, list[str]] = {}
        for group in groups:
            for trial in group.trials:
                if (value := trait(trial)) is not None:
                    found.setdefault(str(value), []).append(group.label)
        if len(found) > 1:
            words = "; ".join(f"{value} ({', '.join(dict.fromkeys(labels))})" for value, labels in found.items())
            yield f"the {name} differs, so the numbers may do so too: {words}"
    for group in groups:
        full = {len(t.history) for t in group.trials if not ended_early(t.run, t.history)}
        if len(full) > 1:
            told = ", ".join(f"seed {t.run.seed}: {len(t.history)}" for t in group.trials)
            yield f"the seeds of {group.label} have different numbers of rounds: {told}"


def numbers_of_rounds(groups: Sequence[Group]) -> Iterator[str]:
    """Yield how groups differ in their numbers of rounds, but for runs that a rule of their own has ended."""
    found = {g.label: len(t.history) for g in groups for t in g.trials if not ended_early(t.run, t.history)}
    if len(set(found.values())) > 1:
        told = "; ".join(f"{label} {rounds}" for label, rounds in found.items())
        yield f"the numbers of rounds differ, and only those that all runs have are compared: {told}"
