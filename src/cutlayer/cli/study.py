"""The study of the cut: train each method at each cut, and sum up what the cuts cost and gain."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cutlayer import registry
from cutlayer.cli import launch, words
from cutlayer.cli.options import Orders
from cutlayer.cli.papers import accuracy
from cutlayer.cli.tables import NONE, Sheet, dashed, plain_table
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
CAPTION = "best accuracy %; costs of one client: traffic up and down in a round, work forward and backward for a sample"


def planned(
    what: str,
    settings: Sequence[str],
    *,
    methods: Sequence[str] | None,
    cuts: Sequence[str] | None,
    alpha: float,
    codecs: str | None = None,
) -> tuple[Run, ...]:
    """Return the runs of the study: the first run of a recipe or file, with each method at each cut, and each codec."""
    for method in methods or ():
        registry.find("method", METHODS, method, "--method")
    base = launch.named(what)[0]
    # The model decides which cuts there are; the other settings follow later.
    model = {key: value for key, value in launch.parsed(settings).items() if key == "model"}
    base = config.changed(replace(base, name=base.name.partition("/")[0]), model, "--set")
    numbers = [int(cut) if cut.isdecimal() else cut for cut in cuts] if cuts else None
    read = None if codecs is None else read_codecs(codecs)
    return cut_study.study(base, methods=methods or cut_study.METHODS, cuts=numbers, alpha=alpha, codecs=read).runs


def read_codecs(text: str) -> dict[str, Any]:
    """Return the codecs in a text such as none,int8,topk:0.1+int8 as in a run file, by the words for them in names."""
    found: dict[str, Any] = {}
    for word in text.split(","):
        codec = words.codec(word, "--codecs")
        if codec in found.values():
            raise ConfigError(f"--codecs names {word.strip()!r} twice; leave one out")
        found[word.strip().replace(":", "-")] = codec
    return found


def carried_out(runs: Sequence[Run], originals: Sequence[Run], orders: Orders, home: Path) -> tuple[CutStudy, CutStudy]:
    """Train all runs of a study and sum them up: these runs, and all that are in their home."""
    _refuse_uncut(runs)
    trained = launch.carried_out(runs, originals, orders)
    trained.complain()
    data = build.dataset(runs[0], orders.data).train
    costs = profile(build.model_of(runs[0], data, orders.data), data.x)
    everything = report.find([*(folder.path for folder in trained.folders), home])
    return summary(report.compare(trained.folders), costs), summary(report.compare(everything), costs)


def _refuse_uncut(runs: Sequence[Run]) -> None:
    """Refuse FedAvg and its variants, which train the whole model at the client and ignore the cut."""
    split = [name for name, method in METHODS.items() if inspect.signature(method).return_annotation is not FedAvg]
    for run in runs:
        if run.method.name not in split:
            raise ConfigError(
                f"{run.method.name} trains the whole model at the client, so it has no cut to study; "
                f"use some of {', '.join(split)}"
            )


def cut_table(study: CutStudy) -> Sheet:
    """Return a row for each cut: accuracies by method and partition, then costs."""
    timed = [method for method in study.methods if any(method in row.seconds for row in study.rows)]
    # Where all methods send the same, one column is enough.
    sending = study.methods[:1] if study.same_traffic else study.methods
    digits = 3 if study.codecs else 2
    keys = ["cut", "unit", *(["codec"] if study.codecs else [])]
    heads = [*keys, *(f"{line.partition}\n{line.method}" for line in study.lines)]
    heads += ["MiB\na round"] if study.same_traffic else [f"{method}\nMiB a round" for method in sending]
    heads += ["MFLOPs\na sample", "client\nparams", *(f"{method}\ns a round" for method in timed)]
    rows = [
        (
            row.cut,
            row.unit,
            *([row.codec] if study.codecs else []),
            *(accuracy(row.accuracy.get(line)) for line in study.lines),
            *(f"{row.bytes[method] / 2**20:,.{digits}f}" if method in row.bytes else NONE for method in sending),
            f"{row.flops / 1e6:,.3f}",
            f"{row.params:,}",
            *(dashed("{:.3g}", row.seconds.get(method)) for method in timed),
        )
        for row in study.rows
    ]
    caption = f"{CAPTION}; s: simulated seconds" if timed else CAPTION
    return plain_table(heads, rows, left=keys[1:], keys=len(keys), caption=caption)
