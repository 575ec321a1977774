"""Recipes: functions that return the runs of an experiment, by name."""

from collections.abc import Callable

from cutlayer import registry
from cutlayer.config import Run
from cutlayer.recipes.first import cifar10, digits, fashion_mnist

Recipe = Callable[[], tuple[Run, ...]]

RECIPES: dict[str, Recipe] = {"digits": digits, "fashion_mnist": fashion_mnist, "cifar10": cifar10}


def runs(name: str) -> tuple[Run, ...]:
    """The runs of a recipe."""
    return registry.find("recipe", RECIPES, name)()
