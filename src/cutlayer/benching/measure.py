"""Time all rows of a case in one process, in alternating turns, so that a slow moment of the machine hits them all."""

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
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
ROWS: dict[str, tuple[str, Make]] = {
    "hand": ("eager loop by hand", ByHand),
    "jax": ("JAX jit(vmap)", JaxVmap),
    "limit": ("the limit", Limit),
}


@dataclass(kw_only=True)
class BenchRow:
    """One row while it is being measured; an obstacle ends its measurement."""

    name: str  # of the engine or the baseline
    what: str  # for people
    contender: Contender | None = None
    first_loss: float | None = None  # the mean of the first turn; rows that train the same thing agree
    memory: MemoryUse = field(default_factory=MemoryUse)
    turns: list[Document] = field(default_factory=list)  # seconds and client steps
    obstacle: str | None = None

    def fail(self, error: Exception) -> None:
        """Stop measuring this row, and free its memory for the others."""
        self.contender, self.obstacle = None, reason(error)


def measure(case: Case, tell: Tell = lambda text: None) -> Document:
    """Time a case; a row that cannot be measured gets the reason as its obstacle."""
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
    """Return what times depend on besides the case."""
    on_cpu = torch.device(device).type == "cpu"
    return {
        "device": f"{platform.machine()} CPU" if on_cpu else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jax": getattr(sys.modules.get("jax"), "__version__", None),  # if a row uses it
    }


def _rows(case: Case) -> list[tuple[str, str, Make]]:
    engines: list[tuple[str, str, Make]] = [
        (name, f"cutlayer, engine {name}", partial(OnEngine, engine=name)) for name in case.engines
    ]
    return engines + [(name, *ROWS[name]) for name in case.baselines]


def _prepared(name: str, what: str, make: Make, problem: BenchProblem, tell: Tell) -> BenchRow:
    """Make a row, warm it up, and measure its memory meanwhile."""
    tell(f"{what}: warming up")
    entry, device = BenchRow(name=name, what=what), problem.case.device
    before = _peaks(device, anew=True)
    begin = time.perf_counter()
    try:
        entry.contender = contender = make(problem)
        for number in range(WARM_UP):
            contender.turn()
            if number == 0:
                entry.first_loss = contender.loss()
        _wait(device)
        own = (most - shared for most, shared in zip(_peaks(device), before, strict=True))
        entry.memory = contender.memory() or MemoryUse(*own)
    except Exception as error:  # of any kind: one failing row must not stop the others
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
    entry.turns.append({"seconds": time.perf_counter() - begin, "client_steps": steps})


def _row(entry: BenchRow, case: Case) -> Document:
    """Return the median over the turns, and the best of them."""
    rates = [turn["client_steps"] / turn["seconds"] for turn in entry.turns]
    timed = entry.obstacle is None
    middle = statistics.median(rates) if timed else None
    return {
        "name": entry.name,
        "what": entry.what,
        "obstacle": entry.obstacle,
        "ms_per_step": None if middle is None else 1e3 * case.clients / middle,
        "client_steps_per_second": middle,
        "best_client_steps_per_second": max(rates) if timed else None,
        "seconds_per_turn": statistics.median(turn["seconds"] for turn in entry.turns) if timed else None,
        "first_loss": entry.first_loss,
        "peak_bytes": entry.memory.allocated,
        "peak_reserved_bytes": entry.memory.reserved,
        "turns": entry.turns,
    }


def _with_ratios(rows: list[Document]) -> list[Document]:
    """Add each row's time relative to the limit, and its speed relative to the loop by hand."""
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


def _peaks(device: str, anew: bool = False) -> tuple[int, ...]:
    """Return the most bytes that torch has allocated and reserved since it was asked anew; nothing on a CPU."""
    if torch.device(device).type != "cuda":
        return ()
    if anew:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
