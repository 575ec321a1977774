"""Buffers for values that are the same for all clients, lent to the handles of such values."""

import heapq
from collections import deque
from dataclasses import dataclass

import torch

from cutlayer.core.tree import Tree
from cutlayer.engines.graph.forms import Form, Memory

Buffer = tuple[int, Form, Tree, Memory]  # its number, its form, and the value that lies in its memory


@dataclass(slots=True, eq=False)
class Loan:
    """A buffer on loan to the handles of a value; it is given back when the last of them dies."""

    number: int
    form: Form
    tree: Tree
    memory: Memory
    freed: deque[Buffer]

    def __del__(self) -> None:
        self.freed.append((self.number, self.form, self.tree, self.memory))


class Buffers:
    """A pool of buffers by form. It lends the free one with the lowest number, so recordings find the same again."""

    def __init__(self, device: torch.device, addresses: set[int]) -> None:
        self._device = device
        self._addresses = addresses  # of memory that will be written again
        self._free: dict[Form, list[Buffer]] = {}
        self._freed: deque[Buffer] = deque()  # appended to at any time, whenever the last handle dies
        self._made = 0

    def take(self, form: Form) -> Loan:
        """Lend a free buffer, or a new one."""
        if self._free.get(form):
            return Loan(*heapq.heappop(self._free[form]), self._freed)
        memory = form.layout.empty(self._device)
        self._addresses |= {row.untyped_storage().data_ptr() for row in memory.values()}
        self._made += 1
        return Loan(self._made, form, form.layout.of(memory), memory, self._freed)

    def collect(self) -> None:
        """Free the buffers that were given back; call it when no lane reads them any more."""
        while self._freed:
            buffer = self._freed.popleft()
            heapq.heappush(self._free.setdefault(buffer[1], []), buffer)
