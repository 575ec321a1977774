"""A plan for people and for machines."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from cutlayer.cli.tables import NONE, Sheet, dashed, plain_table
from cutlayer.core.text import human_seconds
from cutlayer.planning.problem import Latency

if TYPE_CHECKING:
    from cutlayer.cli.plan import PlanAnswer

MOST_ROWS = 40  # devices with a row of their own
LONG = 100 * 3600.0  # seconds from which on minutes do not matter
MARK = "◀"  # the straggler
LEGEND = f"compute, links: seconds of one mini-batch; limit: what keeps the batch from growing; {MARK}: straggler\n"
BOUND = "to the target: by an upper bound, good to compare plans by, no forecast of how long training takes"


def document(answer: "PlanAnswer") -> dict[str, Any]:
    """Return everything about a plan as plain numbers; None stands for an infinite time."""
    planned, run = answer.planned, answer.run
    bound = planned.problem.bound
    return {
        "model": run.model.name,
        "options": dict(run.model.options),
        "interval": planned.problem.interval,
        "mode": answer.mode,
        "samples": answer.samples,
        "bound": {
            "from": answer.estimated,
            "beta": bound.beta,
            "lr": bound.lr,
            "gap": bound.gap,
            "target": planned.problem.target,
            "noise": bound.noise.tolist(),
            "slope": bound.slope.tolist(),
        },
        "devices": [_device(answer, k) for k in range(len(planned.devices))],
        "excluded": [{"device": j, "name": answer.names[j]} for j in planned.excluded],
        "before": _worth(answer, planned.before, planned.latency_before, planned.straggler_before),
        "plan": _worth(answer, planned.plan, planned.latency, planned.straggler),
        "server_tflops": answer.devices.server / 1e12,
        # Below the target from the start, the bound cannot compare numbers of mini-batches.
        "reached": float(bound.slope.sum()) <= planned.problem.target,
        "notes": list(planned.notes),
    }


def tables(found: Mapping[str, Any]) -> Group:
    """Return a row for each device, what the plan gains, and what it is based on."""
    bound = found["bound"]
    lines = [
        _vain(bound) if found["reached"] else BOUND,
        f"server: {found['server_tflops']:.3g} TFLOPS, shared by all",
        f"target: mean squared gradient norm {bound['target']:.3g}, from a loss of {bound['gap']:.3g}, "
        f"with lr {bound['lr']:g} and beta {bound['beta']:.3g}",
        f"estimated from {bound['from']}",
        *(f"left out: {device['name']}" for device in found["excluded"]),
        *(f"note: {note}" for note in found["notes"]),
    ]
    above = [LEGEND, *_more(found["devices"])]
    return Group(_devices(found), *map(Text, above), _comparison(found), *map(Text, lines))


def _vain(bound: Mapping[str, Any]) -> str:
    return (
        f"the squared gradient norm is {sum(bound['slope']):.3g} already, below the target {bound['target']:.3g}, so a "
        "number of mini-batches would mean nothing, and batches are as small as they may be; give a smaller --target, "
        "--lr or --interval, or a --least-batch"
    )


def _device(answer: "PlanAnswer", place: int) -> dict[str, Any]:
    planned = answer.planned
    number = planned.devices[place]
    device = answer.devices.clients[number]
    cut = planned.plan.cuts[place]
    return {
        "device": number,
        "name": answer.names[number],
        "tflops": device.flops / 1e12,
        "mbit_per_s_up": device.up / 1e6,
        "mbit_per_s_down": device.down / 1e6,
        "memory_gb": None if math.isinf(device.memory) else device.memory / 8e9,
        "cut": cut,
        "unit": answer.units[cut - 1],
        "batch": planned.plan.batches[place],
        "seconds": _terms(planned.latency, place),
        "limit": planned.bindings[place],
        "before": {
            "cut": planned.before.cuts[place],
            "batch": planned.before.batches[place],
            "seconds": _terms(planned.latency_before, place),
        },
    }


def _terms(latency: Latency, place: int) -> dict[str, float]:
    return {name: float(getattr(latency, name)[place]) for name in ("forward", "up", "down", "backward")}


def _worth(answer: "PlanAnswer", plan: Any, latency: Latency, straggler: int) -> dict[str, Any]:
    problem = answer.planned.problem
    return {
        "seconds_per_mini_batch": problem.seconds_per_round(*plan),
        "split": latency.split,
        "server": latency.server_forward + latency.server_backward,
        "aggregation": latency.aggregation,
        "mini_batches": _finite(problem.rounds(*plan)),
        "seconds": _finite(problem.seconds(*plan)),
        "straggler": straggler,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _devices(found: Mapping[str, Any]) -> Sheet:
    devices = found["devices"]
    count = f"{len(devices)} device" + ("s" if len(devices) > 1 else "")
    width = len(str(len(devices) - 1))
    rows = []
    for device in devices[:MOST_ROWS]:
        number, seconds = device["device"], device["seconds"]
        name = "" if device["name"] == f"device {number}" else device["name"]
        rows.append(
            (
                f"{number:{width}} {name}".rstrip(),
                device["cut"],
                device["unit"],
                device["batch"],
                device["limit"],
                MARK if number == found["plan"]["straggler"] else "",
                f"{seconds['forward'] + seconds['backward']:.3g}",
                f"{seconds['up'] + seconds['down']:.3g}",
                f"{device['tflops']:.3g}",
                f"{device['mbit_per_s_up']:.3g}",
            )
        )
    heads = ["device", "cut", "last unit", "batch", "limit", "", "compute\ns", "links\ns", "TFLOPS", "up\nMbit/s"]
    title = f"{found['model']} on {count}, aggregated every {found['interval']} mini-batches"
    return plain_table(heads, rows, left=["device", "last unit", "limit", ""], fold=["device"], title=title)


def _more(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sum up the devices that have no row."""
    if len(devices) <= MOST_ROWS:
        return []
    cuts, batches, limits = ([device[key] for device in devices] for key in ("cut", "batch", "limit"))
    counted = ", ".join(f"{limit} ({limits.count(limit)})" for limit in sorted(set(limits)))
    return [
        f"and {len(devices) - MOST_ROWS} more devices, which --json tells of. "
        f"All of them: cut {_span(cuts)}, batch {_span(batches)}, limit {counted}\n"
    ]


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _comparison(found: Mapping[str, Any]) -> Sheet:
    names = {device["device"]: device["name"] for device in found["devices"]}
    rows = [
        (
            name,
            *([NONE, NONE] if found["reached"] else _until(worth)),
            f"{worth['seconds_per_mini_batch']:.4g}",
            names[worth["straggler"]],
            f"{worth['split']:.4g}",
            f"{worth['aggregation'] / found['interval']:.3g}",
        )
        for name, worth in ((f"before: {_usual(found['devices'])}", found["before"]), ("the plan", found["plan"]))
    ]
    share = "aggregation\ns" if found["interval"] == 1 else f"1/{found['interval']} aggregation\ns"
    heads = ["", "time\nto target", "mini-batches\nto target", "each\ns", "straggler", "split training\ns", share]
    return plain_table(heads, rows, left=["", "straggler"], fold=["straggler"], title=_gain(found))


def _until(worth: Mapping[str, Any]) -> list[str]:
    """Return the time and the mini-batches to the target."""
    count, seconds = worth["mini_batches"], worth["seconds"]
    shown = dashed("{:,}", None if count is None else math.ceil(count))
    if seconds is None:
        return ["never", shown]
    return [human_seconds(seconds) if seconds < LONG else f"{seconds / 3600:,.0f} h", shown]


def _gain(found: Mapping[str, Any]) -> str:
    """Say in one line what the plan gains."""
    before, after = found["before"], found["plan"]
    if found["reached"]:
        each = "seconds_per_mini_batch"
        return f"a mini-batch takes {before[each] / after[each]:.2f} times less than before"
    if before["seconds"] is None or after["seconds"] is None:
        return "before and after"
    return f"{before['seconds'] / after['seconds']:.2f} times as fast to the target as before"


def _usual(devices: Sequence[Mapping[str, Any]]) -> str:
    """Describe the plan before: the same for every device, unless memory forbids it."""
    cuts, batches = ({device["before"][key] for device in devices} for key in ("cut", "batch"))
    return f"cut {max(cuts)}, batch {max(batches)}" + ("" if len(cuts) == len(batches) == 1 else " at most")
