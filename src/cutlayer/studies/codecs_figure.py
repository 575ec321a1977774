"""Accuracy against traffic, for every cut and codec: one picture for each method and partition."""

from math import log10
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from cutlayer.results.figures.looks import looks
from cutlayer.results.figures.style import COLUMN, PAGE, legend
from cutlayer.results.names import printed
from cutlayer.studies.cuts import CutLine, CutStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 2.4  # inches of one picture
LINE = 0.17  # inches of a line of text
CHARACTERS = 17  # in an inch of it
DECADES = 2  # of sizes, from which on only powers of 10 are named
POINTS = {"markersize": 9, "markerfacecolor": "white", "markeredgewidth": 1.2, "linewidth": 0.7, "elinewidth": 0.8}
CLOSE = (0.02, 1.0)  # decades of traffic and points of accuracy, up to which markers hide each other
Point = tuple[float, float]
LOWER = {"^": -1.4, "v": 0.9}  # points: where a number has room in a triangle


def fill(figure: "Figure", study: CutStudy) -> None:
    """Draw a row of pictures for each method; all share their axes, and each marker has the number of its cut."""
    partitions = {line.partition: line.panel for line in study.lines}
    columns, rows = len(partitions), len(study.methods)
    width = PAGE if columns > 1 else COLUMN
    names = "numbers are cuts: " + ", ".join(dict.fromkeys(f"{row.cut} {row.unit}" for row in study.rows))
    named = wrap(names, int(CHARACTERS * width))
    figure.set_size_inches(width, rows * HEIGHT + (len(named) + 2) * LINE)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    style = looks(dict.fromkeys(study.codecs, ""))
    for method, row in zip(study.methods, axes, strict=True):
        for partition, one in zip(partitions, row, strict=True):
            _points(one, study, CutLine(partition, method), style)
            one.set_title(f"{printed(method)}, {partitions[partition]}")
            one.set_xscale("log")
            one.margins(x=0.08, y=0.14)
        row[0].set_ylabel("best accuracy (%)")
    for one in axes[-1]:
        one.set_xlabel("traffic of a client, up and down (MiB a round)")
    _plain_ticks(axes[-1, 0], [count / 2**20 for row in study.rows for count in row.bytes.values()])
    figure.suptitle("\n".join(named), fontsize=7, color="0.35")
    legend(figure, list(axes.flat))


def _points(axes: "Axes", study: CutStudy, line: CutLine, style: dict[str, dict[str, Any]]) -> None:
    """Draw the cuts of each codec, joined in their order by a thin line."""
    for codec in study.codecs:
        known = [row for row in study.rows if row.codec == codec and line in row.accuracy]
        x = [row.bytes[line.method] / 2**20 for row in known]
        y = [100 * row.accuracy[line].mean for row in known]
        deviations = [100 * (row.accuracy[line].std or 0.0) for row in known]
        look = {**style[codec], **POINTS, "linestyle": "-"}
        axes.errorbar(x, y, deviations, **look)
        for point, cuts in _together(list(zip(x, y, strict=True)), [row.cut for row in known]):
            _number(axes, point, ",".join(map(str, cuts)), LOWER.get(look["marker"], 0))


def _together(points: list[Point], cuts: list[int]) -> list[tuple[Point, list[int]]]:
    """Return the cuts at each point; points that lie on each other are one."""
    found: list[tuple[Point, list[int]]] = []
    for (x, y), cut in zip(points, cuts, strict=True):
        near = (own for (a, b), own in found if abs(log10(x / a)) < CLOSE[0] and abs(y - b) < CLOSE[1])
        own = next(near, None)
        if own is None:
            found.append(((x, y), [cut]))
        else:
            own.append(cut)
    return found


def _number(axes: "Axes", point: Point, text: str, up: float) -> None:
    """Write the number of a cut into its marker."""
    look: Any = {"ha": "center", "va": "center_baseline", "fontsize": 6 if len(text) == 1 else 4.5, "zorder": 4}
    axes.annotate(text, point, (0, up), textcoords="offset points", **look)


def _plain_ticks(axes: "Axes", sizes: list[float]) -> None:
    """Write sizes as 0.1 and not as a power; over less than a decade or two, name some between as well."""
    from matplotlib.ticker import LogLocator, NullFormatter

    decades = log10(max(sizes) / min(sizes)) if min(sizes) > 0 else DECADES
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < DECADES else (1,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
