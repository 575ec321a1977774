"""What a client's answer must look like: the same program run on shapes alone.

A server knows each client's program and what was sent down, so it knows the type and the shape of everything that may
come up, before it comes. Each command is run once for arguments of the same shapes, on tensors without content; where a
function looks at values, on zeros.
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
from cutlayer.core.values import Block, PerClient
from cutlayer.data.arrays import Arrays
from cutlayer.engines.local import Local
from cutlayer.engines.loop import Loop
from cutlayer.remote.device.worker import Round, WorkError
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.tensors.trees import Flat, flatten

CLIENT = 0  # the one that stands for all
SOME_KEY = 0
MOST_SAMPLES = 2**40


@dataclass(frozen=True, eq=False)
class Spec:
    """A value without content; two of the same shape are one and the same."""

    value: PerClient

    @property
    def bare(self) -> Tree:
        return self.value.blocks[0].tree

    @property
    def flat(self) -> Flat:
        return flatten(self.bare)


class ShapeRunner:
    """Runs commands on shapes, each once."""

    def __init__(self, program: Program, sample: Arrays) -> None:
        self._program = program
        self._data = Arrays(x=tree.map(_many, sample.x), y=_many(sample.y))
        self._known: dict[Any, tuple[Spec, ...]] = {}
        self._specs: dict[Any, Spec] = {}

    def put(self, value: Tree) -> Spec:
        """A value that goes down. Its numbers may be any, but a lone one keeps its value: it may be a cut."""
        return self._spec(_one(tree.shapes(value)))

    def batch(self, length: int) -> tuple[Spec, ...]:
        """Inputs and labels of so many samples."""
        known = ("batch", length)
        if known not in self._known:
            self._known[known] = self._made(c.Batch(0, 1), (), [length, 0, SOME_KEY])
        return self._known[known]

    def after(self, command: c.Do | c.Vjp | c.Grad | c.Pull | c.Field | c.Own, *arguments: Spec) -> tuple[Spec, ...]:
        """What a command makes of such values; its slots are their places, then those of the results."""
        known = (command, arguments)
        if known not in self._known:
            numbers = [0] if isinstance(command, c.Own) else []
            self._known[known] = self._made(command, arguments, numbers)
        return self._known[known]

    def _made(self, command: c.AnyCommand, arguments: tuple[Spec, ...], numbers: list[int]) -> tuple[Spec, ...]:
        before = [a.value for a in arguments]
        try:
            made = self._run(command, before, numbers)
        except WorkError:
            made = self._run(command, [_filled(v) for v in before], numbers)
        return tuple(self._spec(v) for v in made)

    def _run(self, command: c.AnyCommand, before: list[PerClient], numbers: list[int]) -> list[PerClient]:
        round_ = Round(
            client=CLIENT,
            program=self._program,
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
        if callable(getattr(block.tree, "pull", None)):  # a pullback is like no other
            return Spec(value)
        bare = PerClient(value.place, [block._replace(tree=tree.shapes(block.tree))])
        return self._specs.setdefault((signature(block.tree), repr(block.gives), block.raw), Spec(bare))


def _batches(sizes: Mapping[int, int]) -> Walk:
    """One batch of the length that is asked for."""
    length = sizes[CLIENT]
    return Walk(Batching(size=length), {CLIENT: np.arange(max(length, 2))}, SOME_KEY, sizes)


def _one(value: Tree) -> PerClient:
    return PerClient("clients", [Block((CLIENT,), value, stacked=False)])


def _many(a: Tensor) -> Tensor:
    """As many samples like these as anybody has; without content they take no room."""
    return torch.empty((MOST_SAMPLES, *a.shape[1:]), dtype=a.dtype, device="meta")


def _filled(value: PerClient) -> PerClient:
    """The same with zeros."""
    zeros = [b._replace(tree=tree.zeros(b.tree)) for b in value.blocks]
    return PerClient(value.place, zeros, value.ids)


def signature(value: Tree) -> Any:
    """The same for values of the same shapes; numbers inside may be any, but a lone one is itself."""
    return tree.signature(value), value if isinstance(value, int | float) else None
