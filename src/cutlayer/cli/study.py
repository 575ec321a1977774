"""The study of the cut: from the words of a command line to what each cut costs and brings."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

from cutlayer import registry
from cutlayer.cli import launch
from cutlayer.cli.options import Orders
from cutlayer.errors import ConfigError
from cutlayer.methods import METHODS
from cutlayer.methods.fedavg import FedAvg
from cutlayer.planning.profile import profile
from cutlayer.recipes import cut_study
from cutlayer.results import report
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.studies.cuts import CutStudy, summary

DEFAULT = "digits"


def planned(
    what: str, settings: Sequence[str], *, methods: Sequence[str] | None, cuts: Sequence[str] | None, alpha: float
) -> tuple[Run, ...]:
    """The runs of the study: the first of a recipe or file, with each method, at each cut of its model."""
    for method in methods or ():
        registry.find("method", METHODS, method, "--method")
    base = launch.named(what)[0]
    model = {key: value for key, value in launch.parsed(settings).items() if key == "model"}  # it decides on the cuts
    base = config.changed(replace(base, name=base.name.partition("/")[0]), model, "--set")
    numbers = [int(cut) if cut.isdecimal() else cut for cut in cuts] if cuts else None
    return cut_study.study(base, methods=methods or cut_study.METHODS, cuts=numbers, alpha=alpha).runs


def carried_out(runs: Sequence[Run], originals: Sequence[Run], orders: Orders) -> CutStudy:
    """Train all runs of a study and sum them up."""
    _refuse_uncut(runs)
    folders = launch.carried_out(runs, originals, orders)
    data = build.dataset(runs[0], orders.data).train
    costs = profile(build.model_of(runs[0], data, orders.data), data.x)
    return summary(report.compare(folders), costs)


def _refuse_uncut(runs: Sequence[Run]) -> None:
    """FedAvg and its family train the whole model at the client, so a cut changes nothing."""
    split = [name for name, method in METHODS.items() if inspect.signature(method).return_annotation is not FedAvg]
    for run in runs:
        if run.method.name not in split:
            raise ConfigError(
                f"{run.method.name} trains the whole model at the client, so it has no cut to study; "
                f"use some of {', '.join(split)}"
            )
