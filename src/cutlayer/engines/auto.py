"""Which engine is faster here: measured on the first steps, never guessed."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cutlayer.engines.base import Engine

log = logging.getLogger("cutlayer")

# A step of one client that takes this long is all arithmetic: stacking clients on a CPU has no overhead to save.
LONG_STEP_SECONDS = 0.1
TURNS = 2


class Choice(NamedTuple):
    """The engine kept, and why."""

    engine: Engine
    reason: str


def fastest(engines: Sequence[Engine], run: Callable[[Engine, int], None], num_clients: int, on_cpu: bool) -> Choice:
    """Time `run(engine, steps)` on each engine; the first one is the reference that always works."""
    reference = engines[0]
    run(reference, 1)
    first = _seconds(run, reference, 1) / num_clients
    if on_cpu and first > LONG_STEP_SECONDS:
        return Choice(reference, f"one client's step takes {first:.2f} s, so there is no overhead to save")
    able = [engine for engine in engines if engine is reference or _runs(run, engine)]
    times = dict.fromkeys(able, math.inf)
    for _ in range(TURNS):  # in turns, so that a slow moment of the machine falls on none of them alone
        for engine in able:
            times[engine] = min(times[engine], _seconds(run, engine, 2) / 2)
    best = min(times, key=lambda e: times[e])
    measured = ", ".join(f"{e.name} {1e3 * t:.1f} ms" for e, t in times.items())
    return Choice(best, f"a step of {num_clients} clients takes {measured}")


def _runs(run: Callable[[Engine, int], None], engine: Engine) -> bool:
    """Whether the engine can run this model at all; the attempt warms it up."""
    try:
        run(engine, 1)
    except (RuntimeError, NotImplementedError) as error:
        log.info("engine %s cannot run this model (%s)", engine.name, str(error).splitlines()[0])
        return False
    return True


def _seconds(run: Callable[[Engine, int], None], engine: Engine, steps: int) -> float:
    begin = time.perf_counter()
    run(engine, steps)
    return time.perf_counter() - begin
