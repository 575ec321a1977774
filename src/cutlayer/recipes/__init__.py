"""Recipes: experiments by name."""

import re

from cutlayer import registry
from cutlayer.errors import ConfigError
from cutlayer.recipes import cut_layer, first, hasfl, hosfl, smofi  # noqa: F401, for they register their recipes
from cutlayer.recipes.compose import EXPERIMENTS
from cutlayer.recipes.published import PUBLISHED
from cutlayer.recipes.recipe import Apart, Published, Recipe, Sweep
from cutlayer.recipes.scale import unscaled
from cutlayer.runs.config import Run

__all__ = ["RECIPES", "Apart", "Published", "Recipe", "Sweep", "of", "present", "recipe", "runs"]

RECIPES = {name: EXPERIMENTS[name] for name in PUBLISHED}
RENAMED = {f"smofi_figure{number}": f"smofi_fig{number}" for number in (1, 3, 4, 5, 9, 10, 11)}


def recipe(name: str, where: str = "") -> Recipe:
    """The recipe of this name; `where` tells a user which file the name is in."""
    if name in RENAMED:
        raise ConfigError(f"recipe {name} is now called {RENAMED[name]}{f' (in {where})' if where else ''}")
    return registry.find("recipe", RECIPES, name, where)()


def runs(name: str) -> tuple[Run, ...]:
    """The runs of a recipe."""
    return recipe(name).runs


def of(run_name: str) -> Recipe | None:
    """The recipe that a run belongs to, at whatever scale: its name's first word says so."""
    word = unscaled(present(run_name)).partition("/")[0]
    return RECIPES[word]() if word in RECIPES else None


def present(run_name: str) -> str:
    """The name that a run has today, which may have been trained when its recipe was called otherwise."""
    return re.sub(r"^[^@/]+", lambda word: RENAMED.get(word[0], word[0]), run_name)
