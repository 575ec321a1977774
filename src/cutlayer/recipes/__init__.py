"""Recipes: experiments by name, and what their papers print, claim and leave open (`papers/`).

Imports: core, data, errors, planning, registry, runs, split.
"""

import re

from cutlayer import registry
from cutlayer.errors import ConfigError
from cutlayer.recipes import cut_layer, first, hasfl, hosfl, smofi  # noqa: F401 (registers their recipes)
from cutlayer.recipes.compose import EXPERIMENTS
from cutlayer.recipes.published import PUBLISHED
from cutlayer.recipes.recipe import Apart, Published, Recipe, Sweep
from cutlayer.recipes.scale import unscaled
from cutlayer.runs.config import Run

__all__ = ["RECIPES", "Apart", "Published", "Recipe", "Sweep", "of", "present", "recipe", "runs"]

RECIPES = {name: EXPERIMENTS[name] for name in PUBLISHED}
RENAMED = {f"smofi_figure{number}": f"smofi_fig{number}" for number in (1, 3, 4, 5, 9, 10, 11)}


def recipe(name: str, where: str = "") -> Recipe:
    """Return the recipe of this name; `where` is the file that names it, for the error message."""
    if name in RENAMED:
        raise ConfigError(f"recipe {name} is now called {RENAMED[name]}{f' (in {where})' if where else ''}")
    return registry.find("recipe", RECIPES, name, where)()


def runs(name: str) -> tuple[Run, ...]:
    """Return the runs of a recipe."""
    return recipe(name).runs


def of(run_name: str) -> Recipe | None:
    """Return the recipe that a run belongs to at any scale, by the first word of its name."""
    word = unscaled(present(run_name)).partition("/")[0]
    return RECIPES[word]() if word in RECIPES else None


def present(run_name: str) -> str:
    """Return a run's name today; its recipe may have had another name when the run was trained."""
    return re.sub(r"^[^@/]+", lambda word: RENAMED.get(word[0], word[0]), run_name)
