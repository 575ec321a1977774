"""Figures as a paper prints them: learning curves, or accuracy against a setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutlayer.results.figures import curves, plan, sweep
from cutlayer.results.figures.contents import keywords, refuse_to_lose
from cutlayer.results.figures.style import Width, check_format, written
from cutlayer.results.report import Comparison

if TYPE_CHECKING:
    from cutlayer.planning.planner import Planned

__all__ = ["Width", "check_format", "draw", "draw_plan", "refuse_to_lose"]


def draw(comparison: Comparison, path: Path, width: Width = Width.TWO) -> None:
    """Draw all panels into one figure: the sweeps that their recipe asks for, or learning curves.

    It is as wide as one or two columns of a page.
    """
    sweeps = comparison.panels[0].recipe.figure
    of_one_recipe = len({panel.name.partition("/")[0] for panel in comparison.panels}) == 1
    with written(path, keywords=keywords(comparison)) as figure:
        if sweeps and of_one_recipe:
            sweep.fill(figure, comparison.panels, sweeps, width)
        else:
            curves.fill(figure, comparison.panels, width)


def draw_plan(planned: "Planned", path: Path, names: Sequence[str]) -> None:
    """Draw a training round of every device before and after planning; `names` are the names of all devices."""
    with written(path, "make room there or choose another --figure, then plan again") as figure:
        plan.fill(figure, planned, names)
