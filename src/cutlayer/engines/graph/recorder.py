"""Recorders of chains: a recording is a CUDA graph or, without a GPU, the chain itself."""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from cutlayer.engines.graph.compiling import compiling
from cutlayer.engines.out_of_memory import out_of_memory, release

Body = Callable[[], None]
Trial = Callable[[], object]
STREAMS = 10  # chains that run at the same time; more streams are no faster

# CUDA reads this when it starts. With its default of 8 hardware queues, some of the streams would share one and wait.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class Again:
    """Runs a chain again where a GPU would replay it: the same reads and writes of memory, on any device.

    Other recorders inherit from it and change what happens.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have it

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Put what is computed inside on the stream of this lane."""
        return nullcontext()

    def record(self, lane: int, what: Hashable, trial: Trial, body: Body, *, apart: bool, compiled: bool) -> Body:
        """Return the body as something that can be run again and again. It has not run yet; the trial has no effect.

        Bodies of different lanes that do the same have the same `what`. With `apart`, what the body leaves behind is
        kept in memory of its own; with `compiled`, the body is compiled.
        """
        trial()
        return body

    def fresh(self) -> "Again":
        """Return a recorder of the same kind that has recorded nothing."""
        return type(self)(self.device)

    def fork(self, lanes: set[int]) -> None:
        """Let these lanes wait for what the host has asked for so far."""

    def join(self, lanes: set[int]) -> None:
        """Let what the host asks for from now on wait for these lanes."""


class Cuda(Again):
    """CUDA graphs on a few streams; the lanes of a stream take turns and share their scratch memory."""

    def __init__(self, device: torch.device, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        super().__init__(device)
        self._streams = streams or [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
        self._pools = [torch.cuda.graph_pool_handle() for _ in self._streams]
        self._tried: set[tuple[int, Hashable]] = set()  # the trials that have run, by stream

    def fresh(self) -> "Cuda":
        return type(self)(self.device, self._streams)  # libraries have workspaces for these streams already

    def on(self, lane: int) -> Any:
        return torch.cuda.stream(self._streams[lane % len(self._streams)])

    def record(self, lane: int, what: Hashable, trial: Trial, body: Body, *, apart: bool, compiled: bool) -> Body:
        number = lane % len(self._streams)
        with torch.cuda.stream(self._streams[number]), compiling() if compiled else nullcontext():
            self._try(number, what, trial)
            try:
                return self._captured(number, body, apart)
            except Exception as error:
                if not out_of_memory(error):
                    raise
            release()  # memory that trials left in the cache, which a capture cannot use
            return self._captured(number, body, apart)

    def _captured(self, stream: int, body: Body, apart: bool) -> Body:
        pool = torch.cuda.graph_pool_handle() if apart else self._pools[stream]
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # it only repeats that there was an error
                graph.capture_end()
            if not apart:
                self._pools[stream] = torch.cuda.graph_pool_handle()  # the old one may be half open
            raise
        graph.capture_end()
        return graph.replay

    def _try(self, stream: int, what: Hashable, trial: Trial) -> None:
        """Run the trial once on each stream, as libraries allocate a workspace for each."""
        if (stream, what) in self._tried:
            return
        trial()  # compiles functions, if they are to be compiled
        with _no_waiting():
            trial()
        self._tried.add((stream, what))

    def fork(self, lanes: set[int]) -> None:
        now = torch.cuda.current_stream(self.device).record_event()
        for stream in self._of(lanes):
            stream.wait_event(now)

    def join(self, lanes: set[int]) -> None:
        here = torch.cuda.current_stream(self.device)
        for stream in self._of(lanes):
            here.wait_event(stream.record_event())

    def _of(self, lanes: set[int]) -> list[Any]:
        return [self._streams[i] for i in sorted({lane % len(self._streams) for lane in lanes})]


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Inside, raise an error if the host would wait for the GPU: a recording cannot contain that."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
