"""The effects of the cut in four pictures: accuracy, traffic, the clients' work and simulated time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutlayer.results.figures.looks import looks
from cutlayer.results.figures.style import PAGE, legend, written
from cutlayer.studies import codecs_figure
from cutlayer.studies.cuts import CutStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 4.6
HEADROOM = 1.08  # above the highest marker
GREY = {"color": "0.35", "marker": "o", "markersize": 3.5, "linewidth": 1.5}


def draw_cuts(study: CutStudy, path: Path) -> None:
    """Draw the effects of the cut; of cuts with several codecs, accuracy against traffic."""
    with written(path) as figure:
        if study.codecs:
            codecs_figure.fill(figure, study)
        else:
            fill(figure, study)


def fill(figure: "Figure", study: CutStudy) -> None:
    """Draw accuracy by method and partition, traffic and time by method; work depends on the cut alone."""
    figure.set_size_inches(PAGE, HEIGHT)
    (accuracy, traffic), (work, time) = figure.subplots(2, 2)
    places = list(range(len(study.rows)))
    _accuracies(accuracy, study)
    sent = [{method: count / 2**20 for method, count in row.bytes.items()} for row in study.rows]
    if study.same_traffic:
        traffic.plot(places, [next(iter(by_method.values())) for by_method in sent], **GREY)
    else:
        _by_method(traffic, study.methods, sent)
    work.plot(places, [row.flops / 1e6 for row in study.rows], **GREY)
    _by_method(time, study.methods, [row.seconds for row in study.rows])
    accuracy.set_ylabel("best accuracy (%)")
    traffic.set_ylabel("client traffic (MiB a round)")
    work.set_ylabel("client work (MFLOPs a sample)")
    time.set_ylabel("simulated seconds a round")
    names = [f"{row.cut} {row.unit}" for row in study.rows]
    crowded = len(names) * max(map(len, names)) > 36
    for axes in (accuracy, traffic, work, time):
        axes.set_xticks(places, names, rotation=40 if crowded else 0, ha="right" if crowded else "center")
        axes.margins(x=0.08)
        axes.set_xlabel("last unit at the client")
    for axes in (traffic, work, time):
        axes.set_ylim(0, axes.dataLim.ymax * HEADROOM or 1)
    if not any(row.seconds for row in study.rows):
        time.set_visible(False)
    legend(figure, [accuracy])


def _by_method(axes: "Axes", methods: Sequence[str], rows: Sequence[Mapping[str, float]]) -> None:
    style = looks({method: method for method in methods})
    for method in methods:
        known = [(place, row[method]) for place, row in enumerate(rows) if method in row]
        if known:
            axes.plot([p for p, _ in known], [v for _, v in known], markersize=3.5, **style[method])
    if axes.lines:
        axes.legend()


def _accuracies(axes: "Axes", study: CutStudy) -> None:
    style = looks({f"{line.method}, {line.panel}": line.method for line in study.lines})
    for line in study.lines:
        known = [(p, row.accuracy[line]) for p, row in enumerate(study.rows) if line in row.accuracy]
        axes.errorbar(
            [p for p, _ in known],
            [100 * spread.mean for _, spread in known],
            [100 * (spread.std or 0.0) for _, spread in known],
            markersize=3.5,
            capsize=2,
            elinewidth=0.8,
            **style[f"{line.method}, {line.panel}"],
        )
