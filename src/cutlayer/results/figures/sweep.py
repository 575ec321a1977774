"""Accuracy or another metric, and rounds or simulated time until a goal, against one setting or several."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from cutlayer.recipes.recipe import Apart, Sweep
from cutlayer.results.figures.curves import time_unit
from cutlayer.results.figures.looks import looks
from cutlayer.results.figures.style import Width, grid, legend, target_line, titles, with_target
from cutlayer.results.names import method_of
from cutlayer.results.report import Panel
from cutlayer.results.trials import Group, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = float | str
Look = dict[str, Any]
MOST_TICKS = 12
MOST_CHARACTERS = 30  # of all tick labels of an axis


class Goal(NamedTuple):
    """What the two pictures of a column show."""

    above: str
    below: str
    late: str  # a group of which not every seed arrives
    size: float  # of the unit of time in seconds; 0 if rounds are counted

    @classmethod
    def of(cls, panels: Sequence[Panel]) -> "Goal":
        if panels[0].race != "converged":
            return cls(
                panels[0].measure.with_unit(f"best {panels[0].measure.words}"),
                "rounds to target",
                "not reached by every seed",
                0,
            )
        unit, size = time_unit(max(g.simulated or 0.0 for panel in panels for g in panel.groups))
        return cls("converged accuracy (%)", f"converged after ({unit})", "not converged with every seed", size)

    def value(self, group: Group) -> Spread | None:
        """Return what the upper picture shows, in the unit of its axis."""
        found = group.convergence.of_all if self.size else group.best
        return None if found is None else found.scaled(group.measure.scale)

    def cost(self, group: Group, panel: Panel) -> Spread | None:
        """Return rounds or time; None unless every seed arrives."""
        if not panel.arrival(group).by_all:
            return None
        if not self.size:
            return Spread.of(trial.rounds_to(panel.target) for trial in group.trials)
        found = group.convergence.reach.spread
        return None if found is None else found.scaled(1 / self.size)

    def whole(self, group: Group) -> float:
        """Return the cost of the whole run."""
        return (group.simulated or 0.0) / self.size if self.size else min(group.rounds)


def fill(figure: "Figure", panels: Sequence[Panel], sweeps: Sequence[Sweep], width: Width) -> None:
    """Draw a column for each sweep of each panel, values above costs; the columns of a panel share their y axes."""
    columns = list(product(zip(panels, titles(panels), strict=True), sweeps))
    goal = Goal.of(panels)
    pairs = grid(figure, len(columns), (goal.above, goal.below), width)
    series = {s.series(g.run): g.run.method.name for panel in panels for s in sweeps for g in panel.groups}
    style = looks({name: method_of(name, method) for name, method in series.items()})
    for number, (((panel, title), sweep), pair) in enumerate(zip(columns, pairs, strict=True)):
        first, last = number % len(sweeps) == 0, number % len(sweeps) == len(sweeps) - 1
        if not first:
            for axes, left in zip(pair, pairs[number - 1], strict=True):
                axes.sharey(left)
                axes.tick_params(labelleft=False)
        _draw(panel, sweep, goal, pair, style)
        target_line(pair[0], panel, named=len(panels) == 1 and last)
        if len(panels) > 1:
            pair[0].set_title(with_target(title, panel))
        if len(columns) == 1:
            pair[0].set_xlabel(sweep.label)
        else:
            pair[0].tick_params(labelbottom=False)
    legend(figure, [axes for pair in pairs for axes in pair])


def _draw(panel: Panel, sweep: Sweep, goal: Goal, pair: "tuple[Axes, Axes]", style: Mapping[str, Look]) -> None:
    """Draw solid lines or bars for runs that have the setting, dashed levels for runs without it."""
    scale = Scale(panel, sweep)
    for name, look in style.items():
        groups = [group for group in panel.groups if sweep.series(group.run) == name]
        placed = scale.placed(groups)
        values = [(x, found) for x, g in placed if (found := goal.value(g)) is not None]
        costs = [(x, found) for x, g in placed if (found := goal.cost(g, panel)) is not None]
        for axes, points, digits in zip(pair, (values, costs), (1, 2), strict=True):
            if sweep.bars:
                _bars(axes, points, look["color"], digits)
            elif points:
                _line(axes, points, look)
        late = [(x, goal.whole(g)) for x, g in placed if not panel.arrival(g).by_all]
        if late and (goal.size or panel.target is not None):
            hollow: Look = {"color": look["color"], "fillstyle": "none", "markersize": 5, "clip_on": False}
            pair[1].plot([x for x, _ in late], [cost for _, cost in late], "^", label=goal.late, **hollow)
        for group in groups:
            if sweep.x(group.run) is Apart.LEVEL:
                _level(group, panel, goal, pair, {**look, "marker": "", "linestyle": "--", "linewidth": 1.2})
    pair[1].set_xlabel(sweep.label)
    pair[1].set_ylim(bottom=0)
    for axes in pair:
        scale.put_on(axes)


class Scale:
    """The horizontal axis: numbers lie by their size, anything else at equal distances."""

    def __init__(self, panel: Panel, sweep: Sweep) -> None:
        found = dict.fromkeys(x for g in panel.groups if not isinstance(x := sweep.x(g.run), Apart))
        numbers = [x for x in found if not isinstance(x, str)]
        self.sweep = sweep
        self.values: list[Value] = [*sorted(numbers), *(x for x in found if isinstance(x, str))]
        # Values of 0 and below have no place on a logarithmic axis, so they lie at equal distances.
        self.by_size = len(numbers) == len(found) and not (sweep.log and any(x <= 0 for x in numbers))

    def placed(self, groups: Sequence[Group]) -> list[tuple[float, Group]]:
        """Return the groups that have the setting, from left to right."""
        pairs = [(self._place(x), g) for g in groups if not isinstance(x := self.sweep.x(g.run), Apart)]
        return sorted(pairs, key=lambda pair: pair[0])

    def put_on(self, axes: "Axes") -> None:
        """Set the scale, the ticks and the limits of the axes."""
        if self.by_size and self.sweep.log:
            axes.set_xscale("log")
        if not self.by_size or len(self.values) <= MOST_TICKS:
            labels = [x if isinstance(x, str) else f"{x:g}" for x in self.values]
            crowded = sum(map(len, labels)) > MOST_CHARACTERS
            turned: Look = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
            axes.set_xticks([self._place(x) for x in self.values], labels, **turned)
            axes.xaxis.minorticks_off()
            axes.margins(x=0.08)
        if self.sweep.bars:
            axes.set_xlim(-0.6, len(self.values) - 0.4)  # with room for bars that are missing

    def _place(self, x: Value) -> float:
        return float(x) if self.by_size else float(self.values.index(x))


def _line(axes: "Axes", points: Sequence[tuple[float, Spread]], look: Look) -> None:
    style = {**look, "linestyle": "-", "linewidth": 1.5, "markersize": 3.5, "capsize": 2, "elinewidth": 0.8}
    axes.errorbar([x for x, _ in points], [s.mean for _, s in points], [s.std or 0.0 for _, s in points], **style)


def _bars(axes: "Axes", points: Sequence[tuple[float, Spread]], colour: str, digits: int) -> None:
    for x, spread in points:
        deviation: Look = {"yerr": spread.std, "capsize": 2} if spread.std else {}
        drawn = axes.bar(x, spread.mean, color=colour, width=0.7, error_kw={"elinewidth": 0.8}, **deviation)
        axes.bar_label(drawn, fmt=f"%.{digits}f", fontsize=6, padding=1)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)


def _level(group: Group, panel: Panel, goal: Goal, pair: "tuple[Axes, Axes]", look: Look) -> None:
    value, cost = goal.value(group), goal.cost(group, panel)
    if value is not None:
        pair[0].axhline(value.mean, **look)
    if cost is not None:
        pair[1].axhline(cost.mean, **look)
