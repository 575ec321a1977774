"""A training round of every device before and after planning: when it computes, sends and waits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutlayer.planning.problem import Latency
from cutlayer.results.figures.style import PAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cutlayer.planning.planner import Plan, Planned

MOST_BARS = 40  # devices with a bar each; more are drawn as groups
GROUPS = 20
COLOURS = {
    "forward": "#0072B2",
    "uplink": "#56B4E9",
    "server": "#888888",
    "downlink": "#F3C56B",
    "backward": "#D55E00",
    "aggregation": "#009E73",
}
WAITING = "#EFEFEF"
MARK = "#882255"
SECONDS = "seconds of a mini-batch"
CUT, BATCH, STRAGGLER = 1.07, 1.2, 1.29  # their horizontal positions, in widths of the axes
THICKNESS = 0.74  # of a bar, in rows
LEGEND_COLUMNS = 4
ROW, FRAME = 0.165, 1.4  # inches: one bar, and everything around the bars
SAME_SCALE = 6.0  # both rounds have one scale if the longer takes at most this many times as long


class Stack(NamedTuple):
    """The bar of a device, or of the mean of a group of devices."""

    label: str
    seconds: tuple[float, ...]  # forward, uplink, downlink, backward
    cut: str
    batch: str
    straggler: bool


class RoundSide(NamedTuple):
    """The picture of one round."""

    title: str
    bars: list[Stack]
    there: float  # seconds until the server has the last activations
    server: float
    aggregation: float  # the mini-batch's share
    end: float


def fill(figure: "Figure", planned: "Planned", names: Sequence[str]) -> None:
    """Draw both rounds side by side with a bar for each device; of many, for the stragglers and groups of others."""
    sides = _sides(planned, names)
    bars = sides[0].bars
    figure.set_size_inches(PAGE, FRAME + ROW * max(len(bars), 4))
    left, right = figure.subplots(1, 2, sharey=True)
    longest = max(side.end for side in sides)
    one_scale = longest <= SAME_SCALE * min(side.end for side in sides)
    for axes, side in ((left, sides[0]), (right, sides[1])):
        _draw(axes, side)
        axes.set_xlim(0, longest if one_scale else side.end)
    left.set_yticks(range(len(bars)), [bar.label for bar in bars])
    left.set_ylim(len(bars) - 0.4, -0.6)
    if not one_scale:
        right.set_xlabel(f"{SECONDS} (another scale)")
    if len(planned.devices) > MOST_BARS:
        left.set_ylabel("devices from slow to fast; means of groups")
    (mark,) = left.plot([], [], linestyle="", marker="<", color=MARK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        [*handles, mark], [*labels, "straggler"], loc="outside lower center", ncols=LEGEND_COLUMNS, handlelength=1.4
    )


def _sides(planned: "Planned", names: Sequence[str]) -> tuple[RoundSide, RoundSide]:
    order = _groups(planned)
    before = _side(planned, planned.before, planned.latency_before, planned.straggler_before, order, names)
    after = _side(planned, planned.plan, planned.latency, planned.straggler, order, names)
    uniform = len(set(planned.before.cuts)) == len(set(planned.before.batches)) == 1
    usual = f"cut {max(planned.before.cuts)}, batch {max(planned.before.batches)}" + (
        " for all" if uniform else " at most"
    )
    return before._replace(title=f"before: {usual}\n{before.title}"), after._replace(title=f"the plan\n{after.title}")


def _groups(planned: "Planned") -> list[NDArray[np.int64]]:
    """Return the devices' places in the plan one by one, or in groups of devices that took about as long before."""
    count = len(planned.devices)
    if count <= MOST_BARS:
        return [np.array([k]) for k in range(count)]
    slow_first = np.argsort(-planned.latency_before.own, kind="stable")
    apart = dict.fromkeys(planned.devices.index(j) for j in (planned.straggler_before, planned.straggler))
    others = slow_first[~np.isin(slow_first, list(apart))]
    return [*(np.array([k]) for k in apart), *np.array_split(others, GROUPS)]


def _side(
    planned: "Planned",
    plan: "Plan",
    latency: Latency,
    straggler: int,
    groups: Sequence[NDArray[np.int64]],
    names: Sequence[str],
) -> RoundSide:
    terms = (latency.forward, latency.up, latency.down, latency.backward)
    cuts, batches = np.array(plan.cuts), np.array(plan.batches)
    first, bars = 1, []
    for group in groups:
        seconds = tuple(float(term[group].mean()) for term in terms)
        label = names[planned.devices[group[0]]]
        if len(group) > 1:
            label, first = f"{first}–{first + len(group) - 1}", first + len(group)
        slowest = any(planned.devices[k] == straggler for k in group)
        bars.append(Stack(label, seconds, _range(cuts[group]), _range(batches[group]), slowest))
    server = latency.server_forward + latency.server_backward
    share = latency.aggregation / planned.problem.interval
    title = f"{latency.split + share:.3g} s a mini-batch ({share:.3g} s aggregation)"
    there = float((latency.forward + latency.up).max())
    return RoundSide(title, bars, there, server, share, latency.split + share)


def _range(values: NDArray[np.int64]) -> str:
    low, high = values.min(), values.max()
    return str(low) if low == high else f"{low}–{high}"


def _draw(axes: "Axes", side: RoundSide) -> None:
    """Draw each bar as a time line: up, at the server, down, and this mini-batch's share of the aggregation."""
    forward, up, down, backward = (np.array(term) for term in zip(*(bar.seconds for bar in side.bars), strict=True))
    back = side.there + side.server
    spans: dict[str, tuple[Any, Any]] = {  # start and width
        "forward": (0.0, forward),
        "uplink": (forward, up),
        "server": (side.there, side.server),
        "downlink": (back, down),
        "backward": (back + down, backward),
        "aggregation": (side.end - side.aggregation, side.aggregation),
    }
    places = range(len(side.bars))
    for term, (start, width) in spans.items():
        axes.barh(places, width, left=start, height=THICKNESS, color=COLOURS[term], label=term, zorder=2)
    axes.barh(places, side.end, height=THICKNESS, color=WAITING, label="waiting", zorder=1.5)
    for place, bar in enumerate(side.bars):
        _annotate(axes, place, bar)
    for column, head in ((CUT, "cut"), (BATCH, "batch")):
        axes.annotate(head, (column, -0.6), xycoords=("axes fraction", "data"), fontsize=6.5, ha="center")
    axes.set_title(side.title, loc="left", pad=10)  # above the column heads
    axes.set_xlabel(SECONDS)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _annotate(axes: "Axes", place: int, bar: Stack) -> None:
    style: dict[str, Any] = {"color": MARK, "weight": "bold"} if bar.straggler else {"color": "0.25"}
    for column, text in ((CUT, bar.cut), (BATCH, bar.batch), (STRAGGLER, "◀" if bar.straggler else "")):
        axes.annotate(
            text, (column, place), xycoords=("axes fraction", "data"), fontsize=6.5, ha="center", va="center", **style
        )
