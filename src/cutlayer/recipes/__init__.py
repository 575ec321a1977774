"""Recipes: experiments by name."""

from collections.abc import Callable

from cutlayer import registry
from cutlayer.config import Run
from cutlayer.recipes import (
    cut_layer,
    evidence,
    first,
    hasfl_evidence,
    hasfl_figures,
    hosfl_evidence,
    hosfl_figures,
    hosfl_tables,
    smofi_figures,
    smofi_tables,
)
from cutlayer.recipes.recipe import Apart, Published, Recipe, Sweep
from cutlayer.recipes.scale import unscaled

__all__ = ["RECIPES", "Apart", "Published", "Recipe", "Sweep", "of", "recipe", "runs"]

RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits": first.digits,
    "fashion_mnist": first.fashion_mnist,
    "cifar10": first.cifar10,
    "smofi_fashion_mnist": evidence.smofi_fashion_mnist,
    "smofi_table1": smofi_tables.smofi_table1,
    "smofi_table2": smofi_tables.smofi_table2,
    "smofi_table3": smofi_tables.smofi_table3,
    "smofi_table4": smofi_tables.smofi_table4,
    "smofi_table5": smofi_tables.smofi_table5,
    "smofi_figure1": smofi_figures.smofi_figure1,
    "smofi_figure3": smofi_figures.smofi_figure3,
    "smofi_figure4": smofi_figures.smofi_figure4,
    "smofi_figure5": smofi_figures.smofi_figure5,
    "smofi_figure9": smofi_figures.smofi_figure9,
    "smofi_figure10": smofi_figures.smofi_figure10,
    "smofi_figure11": smofi_figures.smofi_figure11,
    "cut_table3_as_paper": cut_layer.cut_table3_as_paper,
    "cut_table3_as_run": cut_layer.cut_table3_as_run,
    "cut_table4_as_paper": cut_layer.cut_table4_as_paper,
    "cut_table4_as_run": cut_layer.cut_table4_as_run,
    "hasfl_fashion_mnist": hasfl_evidence.hasfl_fashion_mnist,
    "hasfl_table1": hasfl_figures.hasfl_table1,
    "hasfl_fig2": hasfl_figures.hasfl_fig2,
    "hasfl_fig3": hasfl_figures.hasfl_fig3,
    "hasfl_fig5": hasfl_figures.hasfl_fig5,
    "hasfl_fig6": hasfl_figures.hasfl_fig6,
    "hasfl_fig7": hasfl_figures.hasfl_fig7,
    "hasfl_fig8": hasfl_figures.hasfl_fig8,
    "hasfl_fig9": hasfl_figures.hasfl_fig9,
    "hasfl_fig10": hasfl_figures.hasfl_fig10,
    "hasfl_fig11": hasfl_figures.hasfl_fig11,
    "hosfl_cifar10": hosfl_evidence.hosfl_cifar10,
    "hosfl_sst2": hosfl_evidence.hosfl_sst2,
    "hosfl_table1": hosfl_tables.hosfl_table1,
    "hosfl_table2": hosfl_tables.hosfl_table2,
    "hosfl_table3": hosfl_tables.hosfl_table3,
    "hosfl_fig3": hosfl_figures.hosfl_fig3,
    "hosfl_fig4": hosfl_tables.hosfl_fig4,
    "hosfl_fig6": hosfl_figures.hosfl_fig6,
    "hosfl_fig7": hosfl_figures.hosfl_fig7,
    "hosfl_fig8": hosfl_figures.hosfl_fig8,
}


def recipe(name: str, where: str = "") -> Recipe:
    """The recipe of this name; `where` tells a user which file the name is in."""
    return registry.find("recipe", RECIPES, name, where)()


def runs(name: str) -> tuple[Run, ...]:
    """The runs of a recipe."""
    return recipe(name).runs


def of(run_name: str) -> Recipe | None:
    """The recipe that a run belongs to, at whatever scale: its name's first word says so."""
    word = unscaled(run_name).partition("/")[0]
    return RECIPES[word]() if word in RECIPES else None
