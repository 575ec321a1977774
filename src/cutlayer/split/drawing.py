"""Random numbers of the units of a segment, from a key."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from cutlayer.core import keys
from cutlayer.core.masks import Masks
from cutlayer.split.generators import States, kept
from cutlayer.split.generators import seed as seed_others

Begin = Callable[[int], None]  # to call before each unit, with its number
_GENERATORS = Lock()  # the generators are global: one seeded call at a time


@contextmanager
def drawing(key: Tensor | None, generators: bool) -> Iterator[Begin]:
    """Inside, draw random numbers from the key, also those of shared generators if asked; without a key, do nothing.

    Numbers from the generators of torch, Python or numpy need the key itself, so neither vmap nor a recording can draw
    them.
    """
    if key is None:
        yield _nothing
        return
    seeding: AbstractContextManager[Begin] = _seeding(int(key), key.device) if generators else nullcontext(_nothing)
    with seeding as seed, Masks(key) as masks:

        def begin(unit: int) -> None:
            masks.begin(unit)
            seed(unit)

        yield begin


def _nothing(unit: int) -> None:
    """Do nothing, where there is nothing to seed."""


@contextmanager
def _seeding(key: int, device: torch.device) -> Iterator[Begin]:
    """Yield a function that seeds the shared generators for a unit; restore the generators afterwards."""

    def seed(unit: int) -> None:
        own = keys.fold(key, unit)
        torch.default_generator.manual_seed(own)
        seed_others(own)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(own)

    with _GENERATORS, kept([device.index or 0] if device.type == "cuda" else []):
        yield seed


def first_draw(run: Callable[[], Any], states: Callable[[], States]) -> str | None:
    """Return the first function that changes the states of generators while this runs; None if they stay."""
    before = states()
    with _Watching(states) as watching:
        run()
    return watching.found or (None if before == states() else "code that torch cannot look into")


class _Watching(TorchFunctionMode):
    """Notes the first function of torch that changes the states of generators."""

    def __init__(self, states: Callable[[], States]) -> None:
        super().__init__()
        self._states = states
        self.found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._states()
        made = func(*args, **(kwargs or {}))
        if self.found is None and before != self._states():
            self.found = str(resolve_name(func) or func)
        return made
