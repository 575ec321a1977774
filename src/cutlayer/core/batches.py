"""Which samples a client trains on at each step: a function of the key, independent of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cutlayer.core import keys
from cutlayer.errors import ConfigError

Index = NDArray[np.int64]


class Samples(Protocol):
    """Inputs and labels, sample by sample."""

    @property
    def x(self) -> Any: ...

    @property
    def y(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How clients iterate over their data in a round."""

    size: int = 32  # samples in a mini-batch
    epochs: int = 1  # passes over the local data in a round
    steps: int | None = None  # a fixed number of steps for every client instead; data that runs out starts over
    drop_last: bool = True  # drop the last, smaller batch of a pass

    def __post_init__(self) -> None:
        for name in ("size", "epochs", "steps"):
            value = getattr(self, name)
            if value is None and name == "steps":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ConfigError(f"batching: {name} is {value!r}; it must be a whole number")
            if value < 1:
                raise ConfigError(f"batching: {name} is {value}; it must be at least 1")
            object.__setattr__(self, name, int(value))  # JSON cannot store numpy integers

    def per_epoch(self, num_samples: int, size: int) -> int:
        """Return the steps in one pass. A client with less than a batch uses all it has; one sample is no batch."""
        if num_samples < 2:
            return 0
        if num_samples < size:
            return 1
        whole, rest = divmod(num_samples, size)
        return whole if self.drop_last or rest < 2 else whole + 1

    def per_round(self, num_samples: int, size: int) -> int:
        steps = self.per_epoch(num_samples, size)
        if self.steps is not None:
            return self.steps if steps else 0
        return self.epochs * steps


class Walk:
    """The batches of all clients in one round; each pass is shuffled when it is first needed."""

    def __init__(
        self,
        batching: Batching,
        index: Sequence[Index] | Mapping[int, Index] | Mapping[int, range],  # by client: its samples
        key: int,
        sizes: Mapping[int, int],
    ) -> None:
        self.batching, self.index, self.key, self.sizes = batching, index, key, sizes
        self._pass: dict[int, tuple[int, Index]] = {}

    def size(self, client: int) -> int:
        return self.sizes.get(client, self.batching.size)

    def per_epoch(self, client: int) -> int:
        return self.batching.per_epoch(len(self.index[client]), self.size(client))

    def per_round(self, client: int, count: int | None = None) -> int:
        """Return the number of steps of a client: `count` if given, and 0 for a client without a batch."""
        batching = self.batching if count is None else replace(self.batching, steps=count)
        return batching.per_round(len(self.index[client]), self.size(client))

    def length(self, client: int, step: int) -> int:
        """Return the number of samples in a client's own step number `step`."""
        size = self.size(client)
        return min(size, len(self.index[client]) - step % self.per_epoch(client) * size)

    def samples(self, client: int, step: int) -> Index:
        """Return the samples of a client's own step number `step`, in order."""
        number, at = divmod(step, self.per_epoch(client))
        size = self.size(client)
        return self._shuffled(client, number)[at * size : (at + 1) * size]

    def _shuffled(self, client: int, number: int) -> Index:
        held = self._pass.get(client)
        if held is None or held[0] != number:
            index = np.asarray(self.index[client])
            # Shuffle positions, not sample numbers: a device that holds only its own samples gets the same order.
            order = index[keys.generator(self.key, "batches", client, number).permutation(len(index))]
            self._pass[client] = held = (number, order)
        return held[1]
