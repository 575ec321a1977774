"""Measure the peak memory of a piece of work, as reported by the device's allocator.

On CUDA, torch's caching allocator counts. On a CPU, torch's profiler records every allocation and release of torch's
allocator with its size and address: results, temporaries inside an operation, and what autograd saves. Neither counts
memory that libraries allocate outside torch (MKL, oneDNN, the CUDA context), nor memory that an allocator caches.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile

from cutlayer.core.checks import check
from cutlayer.core.torch_private import ALLOCATION

Change = tuple[int, int]  # an address, and the bytes allocated (above 0) or freed (below 0) there


def peak(work: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that the work held on this device at any time, beyond those held before.

    The result of the work is dropped. The work must not free memory that was allocated before it.
    """
    check(device.type in ("cpu", "cuda"), "device", str(device), "cpu or cuda: of others the memory is not known")
    gc.collect()
    return _cuda_peak(work, device) if device.type == "cuda" else highest(_cpu_changes(work))


def highest(changes: Iterable[Change]) -> int:
    """Return the most bytes held at a time; freeing memory that was not allocated here does not count."""
    held: dict[int, int] = {}
    now = most = 0
    for address, size in changes:
        if size > 0:
            held[address] = size
            now += size
            most = max(most, now)
        else:
            now -= held.pop(address, 0)
    return most


def _cuda_peak(work: Callable[[], Any], device: torch.device) -> int:
    work()  # a warm-up: what libraries allocate once, such as cuBLAS workspaces, must not count
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _cpu_changes(work: Callable[[], Any]) -> list[Change]:
    """Return the allocations and releases of torch's CPU allocator during the work, in order."""
    was_set = "KINETO_LOG_LEVEL" in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr that it starts and stops
    try:
        with profile(use_kineto=True, use_cpu=True, profile_memory=True) as recorded:
            work()
    finally:
        if not was_set:
            del os.environ["KINETO_LOG_LEVEL"]
    events = [e for e in _all(recorded.kineto_results.experimental_event_tree()) if e.tag == ALLOCATION]
    events.sort(key=lambda e: e.start_time_ns)
    fields = [e.extra_fields for e in events]
    return [(f.ptr, f.alloc_size) for f in fields if f.device.type == "cpu"]


def _all(events: list[Any]) -> Iterator[Any]:
    """Yield the events and, at any depth, those inside them."""
    for event in events:
        yield event
        yield from _all(event.children)
