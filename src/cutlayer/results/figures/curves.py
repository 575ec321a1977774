"""Learning curves: accuracy or another metric against rounds or samples, and against simulated time or traffic."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from cutlayer.results.figures.looks import MANY, looks
from cutlayer.results.figures.style import TALL, Width, grid, legend, target_line, titles, with_target
from cutlayer.results.names import method_of
from cutlayer.results.report import Panel
from cutlayer.results.trials import Group, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_POINTS = 8  # all of which have markers
MARKED = 0.2  # the distance of markers on longer lines, in diagonals of the axes
HOURS, MINUTES = 3600.0, 60.0
BAND, LIGHT_BAND = 0.15, 0.07  # opacity
START = 0.05  # the share of the rounds whose values may be cut off
WASTE = 0.2  # cut them off if they take more than this share of the axis
MANY_SAMPLES = 10_000
FAR_APART = 10  # ratio of costs from which on the axis is logarithmic
LONG = 50  # evaluations from which on curves are smoothed
WINDOW = 9  # evaluations in a mean of a smoothed curve
FAINT: dict[str, Any] = {"alpha": 0.3, "linewidth": 0.6}  # what a smoothed curve is made of


class Cost(NamedTuple):
    """A quantity that the metric is drawn against."""

    label: str
    until: Callable[[Trial, int], float]  # its value at the end of a round


ROUNDS = Cost("communication round", lambda _, number: number)


class Curve(NamedTuple):
    """The metric of a group, shares in per cent, in the rounds that all of its seeds measured."""

    group: Group
    rounds: list[int]
    mean: list[float]
    std: list[float]  # over seeds; 0 for one seed

    @classmethod
    def of(cls, group: Group) -> "Curve":
        rounds = sorted(set.intersection(*(set(t.measured) for t in group.trials)))
        scale = group.measure.scale
        found = [[scale * t.measured[r] for t in group.trials] for r in rounds]
        return cls(group, rounds, [fmean(f) for f in found], [stdev(f) if len(f) > 1 else 0.0 for f in found])

    @property
    def low(self) -> list[float]:
        return [mean - std for mean, std in zip(self.mean, self.std, strict=True)]

    @property
    def high(self) -> list[float]:
        return [mean + std for mean, std in zip(self.mean, self.std, strict=True)]

    @property
    def is_long(self) -> bool:
        return len(self.rounds) >= LONG

    def places(self, until: Callable[[Trial, int], float]) -> list[float]:
        return [fmean(until(t, r) for t in self.group.trials) for r in self.rounds]


def fill(figure: "Figure", panels: Sequence[Panel], width: Width) -> None:
    """Draw means over seeds as lines, and standard deviations as bands.

    Lines of long runs are smoothed, and lie over faint lines that are not.
    """
    alone = len(panels) == 1 and width is Width.TWO
    drawn = [[curve for group in panel.groups if (curve := Curve.of(group)).rounds] for panel in panels]
    smoothed = any(curve.is_long for curves in drawn for curve in curves)
    labels = [_label(panel, smoothed) for panel in panels]
    pairs = grid(figure, len(panels), ylabels=(labels[0], "" if alone else labels[0]), width=width)
    if len(set(labels)) > 1:
        for pair, label in zip(pairs, labels, strict=True):
            for axes in pair:
                axes.set_ylabel(label)
    style = looks({g.label: method_of(g.label, g.run.method.name) for panel in panels for g in panel.groups})
    if alone and len(style) >= MANY:
        figure.set_figheight(TALL)
    for panel, title, curves, (by_axis, by_cost) in zip(panels, titles(panels), drawn, pairs, strict=True):
        axis, cost = _costs(panel)
        for curve in curves:
            _draw(curve, by_axis, axis.until, style)
            _draw(curve, by_cost, cost.until, style)
        by_cost.sharey(by_axis)
        by_axis.set_xlim(left=0)
        by_axis.locator_params(axis="x", integer=axis is ROUNDS)
        target_line(by_axis, panel, named=False)
        target_line(by_cost, panel, named=alone)
        _limit_values(by_axis, curves, panel)
        _limit_costs(by_cost, curves, cost)
        by_axis.set(xlabel=axis.label, title=title if alone else with_target(title, panel))
        by_cost.set(xlabel=cost.label)
        by_cost.tick_params(labelleft=not alone)
    legend(figure, [axes for pair in pairs for axes in pair], room=1 if alone else 0)


def _label(panel: Panel, smoothed: bool) -> str:
    """Return what the vertical axis shows."""
    return panel.measure.with_unit(panel.measure.full) + (f",\nmean of {WINDOW} rounds" if smoothed else "")


def _draw(curve: Curve, axes: "Axes", until: Callable[[Trial, int], float], style: dict[str, dict[str, Any]]) -> None:
    label, x = curve.group.label, curve.places(until)
    look = {**style[label], "markersize": 4, "markeredgewidth": 0.8}
    if len(x) > FEW_POINTS:  # markers of different lines are apart where the lines coincide
        look["markevery"] = (MARKED * list(style).index(label) / len(style), MARKED)
    if curve.is_long:
        axes.plot(x, curve.mean, color=look["color"], **FAINT)
    axes.plot(x, smooth(curve.mean) if curve.is_long else curve.mean, **look)
    if len(curve.group.trials) > 1:
        opacity = LIGHT_BAND if len(style) >= MANY else BAND
        axes.fill_between(x, curve.low, curve.high, color=look["color"], alpha=opacity, linewidth=0)


def smooth(values: Sequence[float]) -> list[float]:
    """Return means over a window around each value, narrower near the start, where curves are steep."""
    half = [min(WINDOW // 2, i) for i in range(len(values))]
    return [fmean(values[i - h : i + h + 1]) for i, h in enumerate(half)]


def _limit_values(axes: "Axes", curves: Sequence[Curve], panel: Panel) -> None:
    """Cut off the values of the first rounds, low or, where less is better, high, if they take much of the axis."""
    start, rises = START * max((curve.rounds[-1] for curve in curves), default=0), panel.measure.goal == "max"
    ends = [(curve.rounds, curve.low if rises else curve.high) for curve in curves]
    later = [end for rounds, values in ends for r, end in zip(rounds, values, strict=True) if r > start]
    if not later:
        return
    target = [] if panel.target is None else [panel.measure.scale * panel.target]
    worst, best = axes.get_ylim() if rises else axes.get_ylim()[::-1]
    last = (min if rises else max)([*later, *target])
    if abs(last - worst) > WASTE * abs(best - worst):
        end = last + 0.05 * (last - best)
        axes.set_ylim(*((end, best) if rises else (best, end)))


def _limit_costs(axes: "Axes", curves: Sequence[Curve], cost: Cost) -> None:
    """Start the axis at 0, or make it logarithmic if the costs of whole runs are far apart."""
    ends = [curve.places(cost.until)[-1] for curve in curves]
    if not ends or min(ends) <= 0 or max(ends) <= FAR_APART * min(ends):
        axes.set_xlim(left=0)
        return
    bottom, top = axes.get_ylim()
    points = [point for c in curves for point in zip(c.places(cost.until), c.mean, strict=True)]
    shown = [x for x, mean in points if x > 0 and bottom <= mean <= top]
    axes.set_xscale("log")
    axes.set_xlim(min(shown) / 1.1, max(ends) * 1.1)
    axes.xaxis.set_major_formatter("{x:g}")


def _costs(panel: Panel) -> tuple[Cost, Cost]:
    """Return the horizontal axes of both pictures: the recipe's axis, then time, or else traffic."""
    time, traffic = _time(panel), _traffic(panel)
    if panel.axis == "time" and time is not None:
        return time, traffic
    return _samples(panel) if panel.axis == "samples" else ROUNDS, time or traffic


def _samples(panel: Panel) -> Cost:
    """Processed samples, in thousands if they are many so that the tick labels fit."""
    many = max(group.samples for group in panel.groups) >= MANY_SAMPLES
    size, unit = (1000, "processed samples (thousands)") if many else (1, "processed samples")
    return Cost(unit, lambda trial, number: trial.samples[number] / size)


def _time(panel: Panel) -> Cost | None:
    """Simulated time, if every run has it."""
    totals = [total for group in panel.groups if (total := group.simulated) is not None]
    if len(totals) < len(panel.groups):
        return None
    unit, size = time_unit(max(totals))
    return Cost(f"simulated {unit}", lambda trial, number: trial.clock[number] / size)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which such a time reads well, and its seconds."""
    if seconds >= HOURS:
        return "hours", HOURS
    return ("minutes", MINUTES) if seconds >= MINUTES else ("seconds", 1.0)


def _traffic(panel: Panel) -> Cost:
    most = max(max(t.traffic.values()) for g in panel.groups for t in g.trials)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    return Cost(f"traffic, up and down ({unit})", lambda trial, number: trial.traffic[number] / size)
