"""Timing: all rows of a case in one process, in alternating turns, so that what slows the machine slows them all."""

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cutlayer.benching.baselines import ByHand, Limit
from cutlayer.benching.cases import WARM_UP, BenchProblem, Case
from cutlayer.benching.contenders import Contender, MemoryUse, OnEngine
from cutlayer.benching.jax_baseline import JaxVmap
from cutlayer.core.checks import reason

Document = dict[str, Any]
Tell = Callable[[str], None]
Make = Callable[[BenchProblem], Contender]
NAMES = {"hand": "eager loop by hand", "jax": "JAX jit(vmap)", "limit": "the limit"}
MAKERS: dict[str, Make] = {"hand": ByHand, "jax": JaxVmap, "limit": Limit}


@dataclass(kw_only=True)
class BenchRow:
    """One row while it is being measured; an obstacle ends that."""

    name: str  # of the engine or the baseline
    what: str  # for people
    contender: Contender | None = None
    first_loss: float | None = None  # the mean of the first turn: rows that train the same thing agree in it
    memory: MemoryUse = field(default_factory=MemoryUse)
    seconds: list[float] = field(default_factory=list)  # of each turn
    client_steps: list[int] = field(default_factory=list)
    obstacle: str | None = None

    def fail(self, error: Exception) -> None:
        """Others go on; what it held is free for them."""
        self.contender, self.obstacle = None, reason(error)


def measure(case: Case, tell: Tell = lambda text: None) -> Document:
    """Time a case; a row that cannot be measured has the reason instead."""
    problem = BenchProblem(case)
    entries = [_prepared(name, what, make, problem, tell) for name, what, make in _rows(case)]
    for number in range(case.turns if any(entry.contender for entry in entries) else 0):
        tell(f"turn {number + 1} of {case.turns}")
        for entry in entries if number % 2 == 0 else reversed(entries):
            _turn(entry, case)
    unit = problem.split.units[problem.split.cut - 1]
    about = {"parameters": problem.num_params, "cut_after": unit, "samples": len(problem.data)}
    rows = [_row(entry, case) for entry in entries]
    return {"case": asdict(case) | about, "machine": machine(case.device), "rows": _with_ratios(rows)}


def machine(device: str) -> dict[str, Any]:
    """What times depend on beside the case."""
    on_cpu = torch.device(device).type == "cpu"
    return {
        "device": f"{platform.machine()} CPU" if on_cpu else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jax": getattr(sys.modules.get("jax"), "__version__", None),  # if a row has used it
    }


def _rows(case: Case) -> list[tuple[str, str, Make]]:
    def of_engine(name: str) -> Make:
        return lambda problem: OnEngine(problem, name)

    engines = [(name, f"cutlayer, engine {name}", of_engine(name)) for name in case.engines]
    return engines + [(name, NAMES[name], MAKERS[name]) for name in case.baselines]


def _prepared(name: str, what: str, make: Make, problem: BenchProblem, tell: Tell) -> BenchRow:
    """A row after its warm-up, with the memory that it took in it."""
    tell(f"{what}: warming up")
    entry, device = BenchRow(name=name, what=what), problem.case.device
    before = _memory(device, anew=True)
    begin = time.perf_counter()
    try:
        entry.contender = contender = make(problem)
        for number in range(WARM_UP):
            contender.turn()
            if number == 0:
                entry.first_loss = contender.loss()
        _wait(device)
        entry.memory = contender.memory() or _beyond(before, _memory(device))
    except Exception as error:  # of whatever kind: a row that fails must not take the others with it
        entry.fail(error)
    took = time.perf_counter() - begin
    tell(f"{what}: {f'ready after {took:.1f} s' if entry.obstacle is None else entry.obstacle}")
    return entry


def _turn(entry: BenchRow, case: Case) -> None:
    if entry.contender is None:
        return
    _wait(case.device)
    begin = time.perf_counter()
    try:
        steps = entry.contender.turn()
        _wait(case.device)
    except Exception as error:  # as above
        entry.fail(error)
        return
    entry.seconds.append(time.perf_counter() - begin)
    entry.client_steps.append(steps)


def _row(entry: BenchRow, case: Case) -> Document:
    """The median over the turns, and the best of them."""
    row: Document = {"name": entry.name, "what": entry.what, "obstacle": entry.obstacle}
    rates = [steps / seconds for steps, seconds in zip(entry.client_steps, entry.seconds, strict=True)]
    timed = entry.obstacle is None
    middle = statistics.median(rates) if timed else None
    return row | {
        "ms_per_step": None if middle is None else 1e3 * case.clients / middle,
        "client_steps_per_second": middle,
        "best_client_steps_per_second": max(rates) if timed else None,
        "seconds_per_turn": statistics.median(entry.seconds) if timed else None,
        "first_loss": entry.first_loss,
        "peak_bytes": entry.memory.allocated,
        "peak_reserved_bytes": entry.memory.reserved,
        "turns": [{"seconds": s, "client_steps": n} for s, n in zip(entry.seconds, entry.client_steps, strict=True)],
    }


def _with_ratios(rows: list[Document]) -> list[Document]:
    """Times over the limit's, and how often a row fits into the time of the loop by hand."""
    ms = {row["name"]: row["ms_per_step"] for row in rows}
    limit, hand = ms.get("limit"), ms.get("hand")
    for row in rows:
        own = row["ms_per_step"]
        row["times_the_limit"] = own / limit if own and limit else None
        row["faster_than_by_hand"] = hand / own if own and hand else None
    return rows


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: str, anew: bool = False) -> MemoryUse:
    """The most that torch has held: since the last time that it was asked anew, or now."""
    if torch.device(device).type != "cuda":
        return MemoryUse()
    if anew:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return MemoryUse(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def _beyond(before: MemoryUse, after: MemoryUse) -> MemoryUse:
    if before.allocated is None or after.allocated is None or before.reserved is None or after.reserved is None:
        return MemoryUse()
    return MemoryUse(after.allocated - before.allocated, after.reserved - before.reserved)
