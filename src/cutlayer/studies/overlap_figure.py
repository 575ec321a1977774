"""A figure of how many perturbed passes fit into the wait for the gradient, by the layers at the client."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutlayer.results.figures.looks import looks
from cutlayer.results.figures.style import written
from cutlayer.studies.overlap import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (4.4, 2.9)  # inches
OPACITY = 0.15
ALL, ONE_LESS = "window ÷ pass", "the first pass charged to the window"


def draw_overlap(fits: Sequence[Fit], path: Path) -> None:
    """Draw how many perturbed passes fit into the wait for the gradient."""
    with written(path, "make room there or choose another --figure") as figure:
        fill(figure, fits)


def fill(figure: "Figure", fits: Sequence[Fit]) -> None:
    """Draw lines without noise, and bands that hold nine in ten draws."""
    figure.set_size_inches(*SIZE)
    axes = figure.subplots()
    style = looks({ALL: "", ONE_LESS: ""})
    layers = [fit.layers for fit in fits]
    for label, bands in ((ALL, [f.passes for f in fits]), (ONE_LESS, [f.passes_after_first for f in fits])):
        axes.plot(layers, [band.value for band in bands], markersize=3, **style[label])
        low, high = [band.low for band in bands], [band.high for band in bands]
        axes.fill_between(layers, low, high, color=style[label]["color"], alpha=OPACITY, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="layers at the client", ylabel="perturbed passes that hide")
    axes.legend()
