"""What a recipe is: the runs of an experiment, what its paper printed, and how to draw it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from cutlayer.runs.config import Run

Measure = Literal["time", "accuracy"]
Race = Literal["rounds", "time", "converged"]
Axis = Literal["rounds", "samples", "time"]
TARGET_SHARE = 0.9  # of the reference's best accuracy, as the SMoFi paper chooses its target


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a paper prints for one run."""

    accuracy: float | None = None  # percent
    std: float | None = None
    rounds: str = ""  # to the target, as printed, such as 258 or >1000
    speed_up: float | None = None
    hours: str = ""  # to the target, as printed
    points_below: str = ""  # the first run's converged accuracy, as printed
    times_first: str = ""  # converged time over the first run's, as printed


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A number that a paper states of converged runs in words."""

    id: str
    says: str
    than: tuple[str, ...]  # runs that are surpassed; of several, the best counts
    run: str  # the one that surpasses them
    measure: Measure  # how many times as fast, or by how many points


class Apart(Enum):
    """Why a run has no place on the axis of a sweep."""

    LEVEL = "it lacks the setting, as FedAvg a cut: drawn as a level line"
    ABSENT = "it belongs to another sweep: left out"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Best accuracy and rounds to the target, or converged accuracy and time, against a setting."""

    label: str  # of the axis
    x: Callable[[Run], float | str | Apart]  # numbers lie in order, names as the runs come
    series: Callable[[Run], str] = lambda run: run.method.name  # runs of one line
    log: bool = False
    bars: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment. Runs whose names agree up to the last word are one panel: a data set, a table, a picture."""

    runs: tuple[Run, ...]
    title: str = ""  # what it is, in a line
    source: str = ""  # paper and table
    published: Mapping[str, Published] = field(default_factory=dict)  # by the name of a run
    traffic: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by run: as printed, in rows of `traffic`
    statements: tuple[Statement, ...] = ()  # numbers that it states in words, to be set beside ours
    claims: tuple[str, ...] = ()  # what the paper says of it in words
    notes: tuple[str, ...] = ()  # what the paper leaves open, and what is chosen here
    share: float = TARGET_SHARE  # of FedAvg's best accuracy, the target of a panel
    targets: Mapping[str, float] = field(default_factory=dict)  # by panel: accuracies that are fixed instead, up to 1
    against: Mapping[str, str] = field(default_factory=dict)  # by run: what it is raced against, if not as `race` says
    # By rounds to the target against FedAvg's, by simulated time to it against the first run's, or until converged.
    race: Race = "rounds"
    axis: Axis = "rounds"  # of the learning curves: rounds, processed samples or simulated time
    figure: tuple[Sweep, ...] = ()  # side by side for each panel; learning curves by default

    @property
    def of_paper(self) -> bool:
        """Whether a paper has printed something of it."""
        return bool(self.published or self.traffic or self.statements or self.claims)
