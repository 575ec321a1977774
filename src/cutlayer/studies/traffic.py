"""Traffic in the rows of Table 3 of the HO-SFL paper, from a run's ledger or from a formula.

Uplink (Act)            activations at the cut
Uplink (Model)          client-side models
Uplink (Scalar)         slopes, losses
Downlink (Grad)         gradients of the cut
Downlink (Model)        client-side models, auxiliary ones
Downlink (Scalar/Seed)  slopes, losses, seeds, and those that a client has missed
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from cutlayer.errors import ConfigError
from cutlayer.results.trials import Group, Trial

GIB = 2**30
# The activations and gradients at the head of a U-shaped split count with those at the cut.
PAPER_ROWS = {
    "Uplink (Act)": ("up_activations", "up_gradients"),
    "Uplink (Model)": ("up_model", "up_auxiliary"),
    "Uplink (Scalar)": ("up_scalars", "up_slopes"),
    "Downlink (Grad)": ("down_gradients", "down_activations"),
    "Downlink (Model)": ("down_model", "down_auxiliary"),
    "Downlink (Scalar/Seed)": ("down_scalars", "down_slopes"),
}
SETUP = "Downlink (Setup)"
OUR_ROWS = {
    "Uplink (Labels)": ("up_labels",),
    SETUP: ("down_setup",),  # a whole model for a client that was away too long
}
INTER_SERVER, OTHER = "Inter-server", "Other"
AUXILIARY = "down_auxiliary"
BEFORE = "bytes_before_codecs"  # in a record: of the kinds that have a codec


def breakdown(crossed: Mapping[str, float], *, paper_convention: bool = False) -> dict[str, float]:
    """Return bytes by row, from bytes by direction and kind such as up_activations.

    Every byte counts in one row. The paper's convention has only the paper's rows, without labels, settings and set-up;
    if an auxiliary model goes down (FSL-SAGE), the row of that model leaves out the client's own model.
    """
    rows = {row: sum(crossed.get(name, 0) for name in names) for row, names in PAPER_ROWS.items()}
    if paper_convention:
        return rows | ({"Downlink (Model)": crossed[AUXILIARY]} if crossed.get(AUXILIARY) else {})
    rows |= {row: sum(crossed.get(name, 0) for name in names) for row, names in OUR_ROWS.items()}
    rows[INTER_SERVER] = sum(size for name, size in crossed.items() if name.startswith("inter_server_"))
    return {**rows, OTHER: sum(crossed.values()) - sum(rows.values())}


@dataclass(frozen=True, kw_only=True)
class TrafficColumn:
    """The traffic of one run, or the mean of its seeds."""

    label: str
    name: str
    samples: float  # of a run with this traffic
    rows: dict[str, float]  # bytes
    before: dict[str, float]  # the same before codecs; empty for runs without

    def as_dict(self) -> dict[str, Any]:
        found = {"label": self.label, "name": self.name, "samples": self.samples, "bytes": self.rows}
        return found | ({BEFORE: self.before} if self.before else {})


def column(group: Group, samples: int | None = None, *, paper_convention: bool = False) -> TrafficColumn:
    """Return the traffic of a group's runs, or of runs of `samples` samples with as many bytes a sample.

    A client is set up once, however long a run is, so that row is not scaled. By the paper's convention a run ends with
    the first whole round after which more than `samples` are processed.
    """
    ends = [t.history[-1] for t in group.trials]
    factors = [_factor(t, samples, whole_rounds=paper_convention) for t in group.trials]

    def rows(crossed: Sequence[Mapping[str, float]]) -> dict[str, float]:
        found = [breakdown(own, paper_convention=paper_convention) for own in crossed]
        return {
            row: fmean((1 if row == SETUP else f) * b[row] for f, b in zip(factors, found, strict=True))
            for row in found[0]
        }

    encoded = any(BEFORE in end for end in ends)
    return TrafficColumn(
        label=group.label,
        name=group.run.name,
        samples=fmean(f * end["samples"] for f, end in zip(factors, ends, strict=True)),
        rows=rows([end["bytes"] for end in ends]),
        before=rows([{**end["bytes"], **end.get(BEFORE, {})} for end in ends]) if encoded else {},
    )


def _factor(trial: Trial, samples: int | None, *, whole_rounds: bool) -> float:
    """Return the length of a run of `samples` samples over the length of this run."""
    if samples is None:
        return 1.0
    done: int = trial.history[-1]["samples"]
    rounds = len(trial.history)
    if not done:
        raise ConfigError(f"{trial.path} has processed no sample, so its traffic has no scale; leave out --samples")
    return (samples * rounds // done + 1) / rounds if whole_rounds else samples / done
