"""What a recipe is: the runs of an experiment, what its paper prints, and how to compare and draw them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from cutlayer.runs.config import Run

Measure = Literal["time", "accuracy"]
Race = Literal["rounds", "time", "converged"]
Axis = Literal["rounds", "samples", "time"]
TARGET_SHARE = 0.9  # of the reference's best accuracy: the target in the SMoFi paper


@dataclass(frozen=True, kw_only=True)
class Published:
    """The numbers that a paper prints for one run."""

    accuracy: float | None = None  # percent
    std: float | None = None
    rounds: str = ""  # to the target, as printed, such as 258 or >1000
    speed_up: float | None = None
    hours: str = ""  # to the target, as printed
    points_below: str = ""  # of the converged accuracy, below the first run's, as printed
    times_first: str = ""  # the converged time over the first run's, as printed


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A number about converged runs that a paper states in its text."""

    id: str
    says: str
    than: tuple[str, ...]  # the runs that are worse; the best of them counts
    run: str  # the run that is better
    measure: Measure  # how many times as fast, or by how many points


class Apart(Enum):
    """Why a run has no place on the axis of a sweep."""

    LEVEL = "it does not have the setting, as FedAvg has no cut: drawn as a level line"
    ABSENT = "it belongs to another sweep: left out"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A figure of best accuracy and rounds to the target, or of converged accuracy and time, against a setting."""

    label: str  # of the axis
    x: Callable[[Run], float | str | Apart]  # numbers are sorted, names keep the order of the runs
    series: Callable[[Run], str] = lambda run: run.method.name  # the line that a run belongs to
    log: bool = False
    bars: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment. Runs whose names agree up to the last word form a panel: one table and one picture."""

    runs: tuple[Run, ...]
    title: str = ""  # what it is, in a line
    source: str = ""  # paper and table
    published: Mapping[str, Published] = field(default_factory=dict)  # by the name of the run
    traffic: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # by run: the rows of `studies.traffic`, as printed
    statements: tuple[Statement, ...] = ()  # numbers in the paper's text, shown beside ours
    claims: tuple[str, ...] = ()  # what the paper says in words
    notes: tuple[str, ...] = ()  # what the paper leaves open, and what we chose
    share: float = TARGET_SHARE  # the target of a panel as a share of FedAvg's best accuracy
    targets: Mapping[str, float] = field(default_factory=dict)  # by panel: fixed accuracies instead, up to 1
    against: Mapping[str, str] = field(
        default_factory=dict
    )  # by run: the run it is compared with, if not the one that `race` says
    # Compare rounds to the target with FedAvg's, simulated time to it with the first run's, or time until convergence.
    race: Race = "rounds"
    axis: Axis = "rounds"  # of learning curves: rounds, processed samples or simulated time
    figure: tuple[Sweep, ...] = ()  # sweeps side by side for each panel; learning curves by default

    @property
    def of_paper(self) -> bool:
        """Whether a paper has printed something about it."""
        return bool(self.published or self.traffic or self.statements or self.claims)
