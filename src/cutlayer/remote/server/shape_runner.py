"""What a client's answer must look like: the client's program, run on shapes alone.

A server knows each client's program and what was sent down, so it knows type and shape of each answer before it comes.
Each command runs once for arguments of the same shapes, on tensors without content; if a function looks at values, it
runs on zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.memory import Memory
from cutlayer.core.program import Program
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, Mark, PerClient
from cutlayer.data.arrays import Arrays
from cutlayer.engines.local import Local
from cutlayer.engines.loop import Loop
from cutlayer.remote.device.worker import Round, WorkError
from cutlayer.remote.protocol import commands as c

CLIENT = 0  # stands for all clients
SOME_KEY = 0
MOST_SAMPLES = 2**40


@dataclass(frozen=True, eq=False)
class Spec:
    """A value without content; all values of the same shape share one."""

    value: PerClient

    @property
    def bare(self) -> Tree:
        return self.value.blocks[0].tree


class ShapeRunner:
    """Runs commands on shapes, each once."""

    def __init__(self, program: Program, sample: Arrays) -> None:
        self.program = program
        self._data = Arrays(x=tree.map(_many, sample.x), y=_many(sample.y))
        self._known: dict[Any, tuple[Spec, ...]] = {}
        self._specs: dict[Any, Spec] = {}

    def put(self, value: Tree, mark: Mark | None = None) -> Spec:
        """Return the spec of a value that goes down. A lone number keeps its value, because it may be a cut."""
        return self._spec(PerClient("clients", [Block((CLIENT,), tree.shapes(value), stacked=False, gives=mark)]))

    def after(self, command: c.AnyCommand, arguments: tuple[Spec, ...], numbers: tuple[int, ...]) -> tuple[Spec, ...]:
        """Return the results of a command whose slots are the places of its arguments, then of its results."""
        known = (command, arguments, numbers)
        if known not in self._known:
            values = [a.value for a in arguments]
            try:
                results = self._run(command, values, numbers)
            except WorkError:
                results = self._run(command, [_filled(v) for v in values], numbers)
            self._known[known] = tuple(self._spec(v) for v in results)
        return self._known[known]

    def _run(self, command: c.AnyCommand, before: list[PerClient], numbers: tuple[int, ...]) -> list[PerClient]:
        round_ = Round(
            client=CLIENT,
            program=self.program,
            transport=Local(engine=Loop(), data=self._data, kept=Memory(), key=SOME_KEY),
            walk=_batches,
            num_samples=1,
            key=SOME_KEY,
            slots=dict(enumerate(before)),
        )
        round_.run((command,), numbers, [])
        return [v for slot, v in round_.slots.items() if slot >= len(before)]

    def _spec(self, value: PerClient) -> Spec:
        block = value.blocks[0]
        if callable(getattr(block.tree, "pull", None)):  # each pullback is its own
            return Spec(value)
        bare = PerClient(value.place, [block._replace(tree=tree.shapes(block.tree))])
        return self._specs.setdefault((signature(block.tree), repr(block.gives), block.raw), Spec(bare))


def _batches(sizes: Mapping[int, int]) -> Walk:
    """One batch of the length that is asked for."""
    length = sizes[CLIENT]
    return Walk(Batching(size=length), {CLIENT: np.arange(max(length, 2))}, SOME_KEY, sizes)


def _many(a: Tensor) -> Tensor:
    """Return more samples like these than any client has; without content they take no memory."""
    return torch.empty((MOST_SAMPLES, *a.shape[1:]), dtype=a.dtype, device="meta")


def _filled(value: PerClient) -> PerClient:
    """Return the same value with zeros as content."""
    zeros = [b._replace(tree=tree.zeros(b.tree)) for b in value.blocks]
    return PerClient(value.place, zeros, value.ids)


def signature(value: Tree) -> Any:
    """Return a key that values of the same shapes share. Numbers inside may differ, but a lone number is in the key."""
    return tree.signature(value), value if isinstance(value, int | float) else None
