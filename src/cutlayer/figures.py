"""Learning curves as a paper prints them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutlayer.errors import ConfigError
from cutlayer.report import Comparison, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".pdf", ".svg")
# Okabe and Ito's palette, which stays apart for colour-blind readers; yellow is left out, it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
LOOK: dict[Any, Any] = {
    "font.size": 8,
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
FEW_POINTS = 3


def check_format(path: Path) -> None:
    """Refuse a file that cannot be drawn, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw a figure into {path}; use a name that ends in {', '.join(FORMATS)}")


def draw(comparison: Comparison, path: Path) -> None:
    """Test accuracy against rounds and against bytes; lines are means over seeds, bands go from least to most."""
    import matplotlib  # here and not above: it is slow to load, and most commands draw nothing
    from matplotlib.figure import Figure

    check_format(path)
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(6.8, 2.9), layout="constrained")
        by_round, by_bytes = figure.subplots(1, 2, sharey=True)
        unit, size = _unit(comparison)
        for i, group in enumerate(comparison.groups):
            _draw_group(group, by_round, by_bytes, size, _look(i, group.label))
        if comparison.target is not None:
            for axes in (by_round, by_bytes):
                axes.axhline(100 * comparison.target, color="0.55", linewidth=0.8, zorder=1)
            _name_target(by_bytes, 100 * comparison.target)
        by_round.set(xlabel="communication round", ylabel="test accuracy (%)")
        by_bytes.set(xlabel=f"traffic, up and down ({unit})")
        for axes in (by_round, by_bytes):
            axes.set_xlim(left=0)
        by_round.xaxis.get_major_locator().set_params(integer=True)
        handles, labels = by_round.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=200)
        except OSError as error:
            raise ConfigError(
                f"the figure could not be written to {path}: {error.strerror or error}; the runs themselves are saved. "
                "Make room there or choose another file, then draw it with `cutlayer compare --figure`."
            ) from error


def _look(number: int, label: str) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number % len(STYLES)],
        "linewidth": WIDTHS[min(number, len(WIDTHS) - 1)],
        "label": label,
    }


def _draw_group(group: Group, by_round: "Axes", by_bytes: "Axes", size: int, look: dict[str, Any]) -> None:
    rounds = sorted(set.intersection(*(set(t.accuracies) for t in group.trials)))
    found = [[100 * t.accuracies[r] for t in group.trials] for r in rounds]
    crossed = [sum(t.traffic[r] for t in group.trials) / len(group.trials) / size for r in rounds]
    mean, low, high = [sum(f) / len(f) for f in found], [min(f) for f in found], [max(f) for f in found]
    marker = "o" if len(rounds) <= FEW_POINTS else ""
    for axes, x in ((by_round, rounds), (by_bytes, crossed)):
        axes.plot(x, mean, marker=marker, markersize=3, **look)
        if len(group.trials) > 1:
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _name_target(axes: "Axes", target: float) -> None:
    axes.annotate(
        f"target {target:.1f} %",
        xy=(1, target),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -2),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=7,
        color="0.35",
        bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5},
    )


def _unit(comparison: Comparison) -> tuple[str, int]:
    most = max(max(t.traffic.values()) for g in comparison.groups for t in g.trials)
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
