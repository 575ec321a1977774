"""Memory for values that are the same for all clients, lent to the handles of such values."""

import heapq
from collections import deque

import torch

from cutlayer.engines.graph.forms import Form
from cutlayer.engines.graph.queue import CommonBuffer


class Buffers:
    """Buffers by form. The one with the lowest number is lent first, so that recordings find the same ones again."""

    def __init__(self, device: torch.device, addresses: set[int]) -> None:
        self._device = device
        self._addresses = addresses  # of memory that will be written again
        self._free: dict[Form, list[tuple[int, CommonBuffer]]] = {}
        self._freed: deque[CommonBuffer] = deque()  # handles die at any time
        self._made = 0

    def take(self, form: Form) -> CommonBuffer:
        """Memory that nobody reads any more, or new memory."""
        free = self._free.get(form)
        if free:
            return heapq.heappop(free)[1]
        memory = form.layout.empty(self._device)
        self._addresses |= {row.untyped_storage().data_ptr() for row in memory.values()}
        self._made += 1
        return CommonBuffer(self._made, form, form.layout.of(memory), memory, self._freed)

    def collect(self) -> None:
        """What was given back is free: the caller knows that no lane reads it any more."""
        while self._freed:
            buffer = self._freed.popleft()
            heapq.heappush(self._free.setdefault(buffer.form, []), (buffer.number, buffer))
