"""How figures look, and how they get into files."""

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
# Okabe and Ito's palette, which stays apart for colour-blind readers; yellow is left out, it vanishes on white. The
# last three are of Paul Tol's muted one, and lie between its colours.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#882255", "#999933", "#888888",
)  # fmt: skip
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MANY = 6  # lines, from which on dashes would be noise: solid lines, until the colours come again
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
WIDTHS = (2.2, 1.8, 1.5)  # the first lines are wider, so that they show below others with the same numbers
THIN = (1.6, 1.3, 1.0)  # where there are many
PAGE = 6.8  # inches: the text of a page with two columns
WIDE = 8.6  # inches, for three panels and more
ALONE = 2.9  # inches, the height of one panel's two pictures side by side
TALL = 3.3  # inches, the same with many lines
HEIGHT = 1.9  # inches, of one picture among several
PER_ROW = 4  # panels
RUNS_ARE_SAVED = (
    "the runs themselves are saved. Make room there or choose another file, then draw it with "
    "`cutlayer compare --figure`."
)
HANDLE, CHARACTER, LEGEND_LINE = 0.65, 0.055, 0.18  # inches, of a legend's entries


def check_format(path: Path) -> None:
    """Refuse a file that cannot be drawn, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw a figure into {path}; use a name that ends in {', '.join(FORMATS)}")


@contextmanager
def written(path: Path, remedy: str = RUNS_ARE_SAVED) -> Iterator["Figure"]:
    """An empty figure that is in the file afterwards; the remedy is for a user whose disk refuses it."""
    import matplotlib  # here and not above: it is slow to load, and most commands draw nothing
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
    """Colour and line of each label, the same wherever it is drawn; thinner and plainer where there are many."""
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
    """Two axes for each panel: side by side for one panel, else one above the other, and up to four pairs in a row."""
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
    """One legend for all axes, below them; the figure grows by its lines beyond those that there is room for."""
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
    """The last words of the panels' names if they tell them apart; none for one panel."""
    if len(panels) == 1:
        return [""]
    words = [panel.name.rpartition("/")[2] for panel in panels]
    return words if len(set(words)) == len(words) else [panel.name for panel in panels]


def target_line(axes: "Axes", target: float | None, named: bool = True) -> None:
    """The accuracy to reach, across the axes; its name stands beside them, where no line can run through it."""
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
    """The title of one panel among several, which have no room for the target's name beside them."""
    return title if target is None else f"{title} (target {100 * target:.1f} %)"
