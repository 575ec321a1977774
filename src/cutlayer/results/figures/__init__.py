"""Figures as a paper prints them: learning curves, or accuracy against a setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutlayer.results.figures import curves, plan, sweep
from cutlayer.results.figures.style import check_format, written
from cutlayer.results.report import Comparison

if TYPE_CHECKING:
    from cutlayer.planning.planner import Planned

__all__ = ["check_format", "draw", "draw_plan"]


def draw(comparison: Comparison, path: Path) -> None:
    """One figure of all panels: the sweeps that their recipe asks for, or learning curves."""
    recipe = comparison.panels[0].recipe
    of_one_recipe = len({panel.name.partition("/")[0] for panel in comparison.panels}) == 1
    asked = recipe.figure if recipe is not None and of_one_recipe else ()
    with written(path) as figure:
        if asked:
            sweep.fill(figure, comparison.panels, asked)
        else:
            curves.fill(figure, comparison.panels)


def draw_plan(planned: "Planned", path: Path, names: Sequence[str]) -> None:
    """One figure of a training round of every device, before and after planning; `names` are those of all devices."""
    with written(path, "make room there or choose another --figure, then plan again") as figure:
        plan.fill(figure, planned, names)
