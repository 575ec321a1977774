"""The look of figures, and writing them to files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutlayer.errors import ConfigError
from cutlayer.results.report import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
# Okabe and Ito's palette, which colour-blind readers can tell apart, without yellow, which is hard to see on white. The
# last three are from Paul Tol's muted palette and lie between these colours.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#882255", "#999933", "#888888",
)  # fmt: skip
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MANY = 6  # lines from which on all are solid until the colours repeat: many dashed lines are hard to read
MARKERS = "os^Dv<>"
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
WIDTHS = (2.2, 1.8, 1.5)  # the first lines are wider, so that they show under others with the same numbers
THIN = (1.6, 1.3, 1.0)  # for many lines
PAGE = 6.8  # inches: the text width of a page with two columns
WIDE = 8.6  # inches, for three panels and more
ALONE = 2.9  # inches: the height of one panel's two pictures side by side
TALL = 3.3  # inches: the same with many lines
HEIGHT = 1.9  # inches: one picture of several
PER_ROW = 4  # panels
RUNS_ARE_SAVED = (
    "the runs themselves are saved. Make room there or choose another file, then draw it with "
    "`cutlayer compare --figure`."
)
HANDLE, CHARACTER, LEGEND_LINE = 0.65, 0.055, 0.18  # inches, in a legend


def check_format(path: Path) -> None:
    """Reject a file name with an unknown format, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw a figure into {path}; use a name that ends in {', '.join(FORMATS)}")


@contextmanager
def written(path: Path, remedy: str = RUNS_ARE_SAVED) -> Iterator["Figure"]:
    """Yield an empty figure and write it to the file afterwards; `remedy` ends the message if that fails."""
    import matplotlib  # here because it is slow to load, and most commands draw nothing
    from matplotlib.figure import Figure

    check_format(path)
    with matplotlib.rc_context(LOOK):
        figure = Figure(layout="constrained")
        yield figure
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=200)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"the figure could not be written to {path}: {why}; {remedy}") from error


def looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and line style of each label; many labels get thinner and plainer lines."""
    names = list(dict.fromkeys(labels))
    many = len(names) >= MANY
    widths = THIN if many else WIDTHS
    return {
        label: {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": STYLES[(i // len(COLOURS) if many else i) % len(STYLES)],
            "linewidth": widths[min(i, len(widths) - 1)],
            "label": label,
        }
        for i, label in enumerate(names)
    }


def grid(figure: "Figure", count: int, ylabels: tuple[str, str]) -> "list[tuple[Axes, Axes]]":
    """Return two axes for each panel: side by side for one panel, else one above the other with up to four in a row."""
    if count == 1:
        figure.set_size_inches(PAGE, ALONE)
        left, right = figure.subplots(1, 2)
        pairs = [(left, right)]
        columns = 1
    else:
        blocks = -(-count // PER_ROW)
        columns = -(-count // blocks)
        figure.set_size_inches(WIDE if columns > 2 else PAGE, 2 * blocks * HEIGHT)
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


def target_line(axes: "Axes", target: float | None, named: bool = True) -> None:
    """Draw the target accuracy across the axes, with its name to the right of them."""
    if target is None:
        return
    axes.axhline(100 * target, color="0.55", linewidth=0.8, zorder=1)
    if named:
        axes.annotate(
            f"target\n{100 * target:.1f} %",
            xy=(1, 100 * target),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="0.35",
        )


def with_target(title: str, target: float | None) -> str:
    """Return the title with the target, for one of several panels, which have no room for it beside the axes."""
    return title if target is None else f"{title} (target {100 * target:.1f} %)"
