"""Which engine is faster here: measured on the first steps, never guessed."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cutlayer.checks import reason
from cutlayer.engines.base import Engine

log = logging.getLogger("cutlayer")

# A step of one client that takes this long is all arithmetic: stacking clients on a CPU has no overhead to save.
LONG_STEP_SECONDS = 0.1
TURNS = 2


class Pick(NamedTuple):
    """The engine kept, and why."""

    engine: Engine
    reason: str


def fastest(engines: Sequence[Engine], run: Callable[[Engine, int], object], num_clients: int, on_cpu: bool) -> Pick:
    """Time `run(engine, steps)` on each engine; the first one is the reference that always works."""
    reference = engines[0]
    run(reference, 1)
    first = _seconds(run, reference, 1) / num_clients
    if on_cpu and first > LONG_STEP_SECONDS:
        return Pick(reference, f"one client's step takes {first:.2f} s, so there is no overhead to save")
    able = [engine for engine in engines if engine is reference or _able(run, engine)]
    times = dict.fromkeys(able, math.inf)
    for _ in range(TURNS):  # in turns, so that a slow moment of the machine falls on none of them alone
        for engine in able:
            times[engine] = min(times[engine], _seconds(run, engine, 2) / 2)
    best = min(times, key=lambda e: times[e])
    measured = ", ".join(f"{e.name} {1e3 * t:.1f} ms" for e, t in times.items())
    return Pick(best, f"a step of {num_clients} clients takes {measured}")


def obstacle(run: Callable[[Engine, int], object], engine: Engine) -> str | None:
    """Why the engine cannot run this model, or None if it can; the attempt warms it up."""
    try:
        run(engine, 1)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return reason(error)
    return None


def _able(run: Callable[[Engine, int], object], engine: Engine) -> bool:
    why_not = obstacle(run, engine)
    if why_not is not None:
        log.info("engine %s cannot run this model (%s)", engine.name, why_not)
    return why_not is None


def _seconds(run: Callable[[Engine, int], object], engine: Engine, steps: int) -> float:
    begin = time.perf_counter()
    run(engine, steps)
    return time.perf_counter() - begin
