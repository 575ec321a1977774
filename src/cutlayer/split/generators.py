"""The generators from which Python code draws random numbers: the shared ones of torch, Python and numpy, and its own.

Tracing runs Python code once. What that draws on the host would become a constant of every step.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from cutlayer.errors import CutError

T = TypeVar("T")
States = dict[str, bytes]  # by the name of the generator
OWN = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)  # what a module may hold


class DrawnError(CutError):
    """A forward draws random numbers on the host while it is traced."""


def states(cuda_devices: Iterable[int] = ()) -> States:
    """Return the states of the generators that all code shares."""
    on_cuda = {f"torch on cuda:{device}": _bytes(torch.cuda.get_rng_state(device)) for device in cuda_devices}
    return {
        "torch": _bytes(torch.get_rng_state()),
        **on_cuda,
        "Python's random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
    }


def seed(number: int) -> None:
    """Seed the generators of Python and numpy; those of torch are seeded by device."""
    random.seed(number)
    np.random.seed(number % 2**32)


@contextmanager
def kept(cuda_devices: Iterable[int]) -> Iterator[None]:
    """Restore the shared generators afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=list(cuda_devices)):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def without_draws(model: nn.Module, trace: Callable[[], T]) -> T:
    """Return the trace of a model; refuse one in which something is drawn on the host, whatever else it fails of."""
    for _ in range(2):  # another thread may draw in between, but hardly both times
        before, failure = _all_states(model), None
        try:
            found = trace()
        except Exception as error:
            failure = error
        after = _all_states(model)
        drawn = [name for name in before if before[name] != after.get(name)]
        if not drawn and failure is None:
            return found
        if not drawn and failure is not None:
            raise failure
    raise DrawnError(
        f"{type(model).__name__} cannot be cut because its forward draws random numbers while it is traced (from "
        f"{' and '.join(drawn)}): they would be the same in every step. Draw tensors of torch whose shapes follow the "
        "input, without .item() or an `if`, as nn.Dropout and the stochastic depth of torchvision do; or write the "
        "model as nn.Sequential or give it a units() method, whose units run as they are."
    ) from failure


def _all_states(model: nn.Module) -> States:
    """Return the states of the shared generators, and of those that the modules of a model hold."""
    shared = states(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())  # type: ignore[no-untyped-call]
    own = {
        f"{path}.{name}".removeprefix("."): _state(value)
        for path, module in model.named_modules()
        for name, attribute in vars(module).items()
        if isinstance(value := getattr(attribute, "__self__", attribute), OWN)  # it may hold the method that draws
    }
    return {**shared, **{name: state for name, state in own.items() if state not in shared.values()}}


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
