"""The look of figures, and writing them to files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutlayer.errors import ConfigError
from cutlayer.results.report import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 3,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
COLUMN, PAGE = 3.3, 6.8  # inches: one column of a page, and the text width of a page with two
ALONE = 2.9  # inches: the height of one panel's two pictures side by side
TALL = 3.3  # inches: the same with many lines
HEIGHT = 1.9  # inches: one picture of several
PER_ROW = {"one": 2, "two": 4}  # panels
RUNS_ARE_SAVED = (
    "the runs themselves are saved. Make room there or choose another file, then draw it with "
    "`cutlayer compare --figure`."
)
HANDLE, CHARACTER, LEGEND_LINE = 0.65, 0.055, 0.18  # inches, in a legend


class Width(StrEnum):
    """How wide a figure is in print."""

    ONE = "one"
    TWO = "two"

    @property
    def inches(self) -> float:
        return COLUMN if self is Width.ONE else PAGE


def check_format(path: Path) -> None:
    """Reject a file name with an unknown format, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        endings = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ConfigError(f"cannot draw a figure into {path}; use a name that ends in {endings}")


@contextmanager
def written(path: Path, remedy: str = RUNS_ARE_SAVED, *, keywords: str = "") -> Iterator["Figure"]:
    """Yield an empty figure and write it to the file afterwards; `remedy` ends the message if that fails."""
    import matplotlib  # here because it is slow to load, and most commands draw nothing
    from matplotlib.figure import Figure

    check_format(path)
    with matplotlib.rc_context(LOOK):
        figure = Figure(layout="constrained")
        yield figure
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=200, metadata={"Keywords": keywords} if keywords else None)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"the figure could not be written to {path}: {why}; {remedy}") from error


def grid(figure: "Figure", count: int, ylabels: tuple[str, str], width: Width) -> "list[tuple[Axes, Axes]]":
    """Return two axes for each panel: side by side for one panel and two columns of a page, else one above the other.

    Up to four panels are in a row, or two within one column of a page.
    """
    if count == 1 and width is Width.TWO:
        figure.set_size_inches(width.inches, ALONE)
        left, right = figure.subplots(1, 2)
        pairs = [(left, right)]
        columns = 1
    else:
        blocks = -(-count // PER_ROW[width])
        columns = -(-count // blocks)
        figure.set_size_inches(width.inches, 2 * blocks * HEIGHT)
        axes = figure.subplots(2 * blocks, columns, squeeze=False)
        pairs = [
            (axes[2 * (i // columns), i % columns], axes[2 * (i // columns) + 1, i % columns]) for i in range(count)
        ]
        for unused in axes[-2:, (count - 1) % columns + 1 :].flat:
            unused.remove()
    for pair in pairs[::columns]:
        for one, label in zip(pair, ylabels, strict=True):
            one.set_ylabel(label)
    return pairs


def legend(figure: "Figure", some: Sequence["Axes"], room: int = 0) -> None:
    """Draw one legend below all axes; the figure grows by the lines beyond those that there is `room` for."""
    found: dict[str, Any] = {}
    for axes in some:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if not found:
        return
    width = figure.get_figwidth()
    widest = HANDLE + CHARACTER * max(len(label) for label in found)
    columns = max(1, min(len(found), 6, int(width / widest)))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)
    lines = -(-len(found) // columns)
    figure.set_size_inches(width, figure.get_figheight() + LEGEND_LINE * max(0, lines - room))


def titles(panels: Sequence[Panel]) -> list[str]:
    """Return the last words of the panels' names, or whole names if those are not unique; nothing for one panel."""
    if len(panels) == 1:
        return [""]
    words = [panel.name.rpartition("/")[2] for panel in panels]
    return words if len(set(words)) == len(words) else [panel.name for panel in panels]


def target_line(axes: "Axes", panel: Panel, named: bool = True) -> None:
    """Draw the target across the axes, with its name to the right of them."""
    if panel.target is None:
        return
    height = panel.measure.scale * panel.target
    axes.axhline(height, color="0.55", linewidth=0.8, zorder=1)
    if named:
        axes.annotate(
            f"target\n{panel.measure.told(panel.target)}",
            xy=(1, height),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="0.35",
        )


def with_target(title: str, panel: Panel) -> str:
    """Return the title with the target, for one of several panels, which have no room for it beside the axes."""
    if panel.target is None:
        return title
    goal = f"target {panel.measure.told(panel.target)}"
    return f"{title} ({goal})" if title else goal
