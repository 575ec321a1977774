"""Figures as a paper prints them: learning curves, or accuracy against a setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutlayer.cuts import CutStudy
from cutlayer.figures import curves, cuts, hiding, plan, sweep
from cutlayer.figures.style import check_format, written
from cutlayer.planning.hiding import Fit
from cutlayer.report import Comparison

if TYPE_CHECKING:
    from cutlayer.planning.planner import Planned

__all__ = ["check_format", "draw", "draw_cuts", "draw_overlap", "draw_plan"]


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


def draw_cuts(study: CutStudy, path: Path) -> None:
    """One figure of what a cut does: accuracy, traffic, the clients' work and simulated time."""
    with written(path) as figure:
        cuts.fill(figure, study)


def draw_overlap(fits: Sequence[Fit], path: Path) -> None:
    """One figure of how many perturbed passes hide in the wait for the gradient."""
    with written(path, "make room there or choose another --figure") as figure:
        hiding.fill(figure, fits)


def draw_plan(planned: "Planned", path: Path, names: Sequence[str]) -> None:
    """One figure of a training round of every device, before and after planning; `names` are those of all devices."""
    with written(path, "make room there or choose another --figure, then plan again") as figure:
        plan.fill(figure, planned, names)
