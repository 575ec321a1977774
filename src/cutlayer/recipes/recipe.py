"""What a recipe is: the runs of an experiment, what its paper printed, and how to draw it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from cutlayer.config import Run

TARGET_SHARE = 0.9  # of the reference's best accuracy, as the SMoFi paper chooses its target


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a paper prints for one run."""

    accuracy: float | None = None  # percent
    std: float | None = None
    rounds: str = ""  # to the target, as printed, such as 258 or >1000
    speed_up: float | None = None
    hours: str = ""  # to the target, as printed


class Apart(Enum):
    """Why a run has no place on the axis of a sweep."""

    LEVEL = "it lacks the setting, as FedAvg a cut: drawn as a level line"
    ABSENT = "it belongs to another sweep: left out"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Best accuracy, and rounds to the target, against a setting."""

    label: str  # of the axis
    x: Callable[[Run], float | str | Apart]  # numbers lie in order, names as the runs come
    series: Callable[[Run], str]  # runs of one line
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment. Runs whose names agree up to the last word are one panel: a data set, a table, a picture."""

    runs: tuple[Run, ...]
    source: str = ""  # paper and table
    published: Mapping[str, Published] = field(default_factory=dict)  # by the name of a run
    claims: tuple[str, ...] = ()  # what the paper says of it in words
    notes: tuple[str, ...] = ()  # what the paper leaves open, and what is chosen here
    share: float = TARGET_SHARE  # of FedAvg's best accuracy, the target of a panel
    targets: Mapping[str, float] = field(default_factory=dict)  # by panel: accuracies that are fixed instead, up to 1
    against: Mapping[str, str] = field(default_factory=dict)  # by run: whose rounds its speed-up divides; else FedAvg's
    figure: tuple[Sweep, ...] = ()  # side by side for each panel; learning curves by default
