"""Best accuracy, and rounds to the target, against one setting or several."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from cutlayer.figures.style import MARKERS, grid, legend, looks, target_line, titles, with_target
from cutlayer.recipes.recipe import Apart, Sweep
from cutlayer.report import Panel
from cutlayer.trials import Group, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = float | str
Look = dict[str, Any]
MOST_TICKS = 12
MOST_CHARACTERS = 30  # of all tick labels of an axis


def fill(figure: "Figure", panels: Sequence[Panel], sweeps: Sequence[Sweep]) -> None:
    """A column for each sweep of each panel, accuracies above rounds; the columns of a panel share their heights."""
    columns = list(product(zip(panels, titles(panels), strict=True), sweeps))
    pairs = grid(figure, len(columns), ("best accuracy (%)", "rounds to target"))
    style = looks([sweep.series(group.run) for panel in panels for sweep in sweeps for group in panel.groups])
    for number, (((panel, title), sweep), pair) in enumerate(zip(columns, pairs, strict=True)):
        first, last = number % len(sweeps) == 0, number % len(sweeps) == len(sweeps) - 1
        if not first:
            for axes, left in zip(pair, pairs[number - 1], strict=True):
                axes.sharey(left)
                axes.tick_params(labelleft=False)
        _draw(panel, sweep, pair, style)
        target_line(pair[0], panel.target, named=len(panels) == 1 and last)
        if len(panels) > 1:
            pair[0].set_title(with_target(title, panel.target))
        if len(columns) == 1:
            pair[0].set_xlabel(sweep.label)
        else:
            pair[0].tick_params(labelbottom=False)
    legend(figure, [axes for pair in pairs for axes in pair])


def _draw(panel: Panel, sweep: Sweep, pair: "tuple[Axes, Axes]", style: Mapping[str, Look]) -> None:
    """Solid lines with their deviation over seeds for runs that have the setting, dashed levels for those without."""
    scale = Scale(panel, sweep)
    for number, (name, look) in enumerate(style.items()):
        groups = [group for group in panel.groups if sweep.series(group.run) == name]
        marked = {**look, "marker": MARKERS[number % len(MARKERS)], "linestyle": "-", "linewidth": 1.5}
        _line(scale.placed(groups), panel, *pair, marked)
        for group in groups:
            if sweep.x(group.run) is Apart.LEVEL:
                _level(group, panel, *pair, {**look, "linestyle": "--", "linewidth": 1.2})
    pair[1].set_xlabel(sweep.label)
    pair[1].set_ylim(bottom=0)
    for axes in pair:
        scale.put_on(axes)


class Scale:
    """Where the values of the setting lie: numbers by their size, anything else evenly, side by side."""

    def __init__(self, panel: Panel, sweep: Sweep) -> None:
        found = dict.fromkeys(x for g in panel.groups if not isinstance(x := sweep.x(g.run), Apart))
        numbers = [x for x in found if not isinstance(x, str)]
        self.sweep = sweep
        self.values: list[Value] = [*sorted(numbers), *(x for x in found if isinstance(x, str))]
        # A logarithm of negative values or of none would need a gap in the axis; evenly they read as well.
        self.by_size = len(numbers) == len(found) and not (sweep.log and any(x <= 0 for x in numbers))

    def placed(self, groups: Sequence[Group]) -> list[tuple[float, Group]]:
        """The groups that have the setting, from left to right."""
        pairs = [(self._place(x), g) for g in groups if not isinstance(x := self.sweep.x(g.run), Apart)]
        return sorted(pairs, key=lambda pair: pair[0])

    def put_on(self, axes: "Axes") -> None:
        """Dress the horizontal axis."""
        if self.by_size and self.sweep.log:
            axes.set_xscale("log")
        if not self.by_size or len(self.values) <= MOST_TICKS:
            labels = [x if isinstance(x, str) else f"{x:g}" for x in self.values]
            crowded = sum(map(len, labels)) > MOST_CHARACTERS
            turned: Look = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
            axes.set_xticks([self._place(x) for x in self.values], labels, **turned)
            axes.xaxis.minorticks_off()
            axes.margins(x=0.08)

    def _place(self, x: Value) -> float:
        return float(x) if self.by_size else float(self.values.index(x))


def _line(placed: Sequence[tuple[float, Group]], panel: Panel, above: "Axes", below: "Axes", look: Look) -> None:
    common = {**look, "markersize": 3.5, "capsize": 2, "elinewidth": 0.8}
    known = [(x, best) for x, group in placed if (best := group.best) is not None]
    if known:
        above.errorbar(
            [x for x, _ in known], [100 * b.mean for _, b in known], [100 * (b.std or 0.0) for _, b in known], **common
        )
    arrived = [(x, r) for x, group in placed if panel.reach(group).by_all and (r := _rounds(group, panel)) is not None]
    if arrived:
        below.errorbar(
            [x for x, _ in arrived], [r.mean for _, r in arrived], [r.std or 0.0 for _, r in arrived], **common
        )
    late = [(x, min(group.rounds)) for x, group in placed if not panel.reach(group).by_all]
    if late and panel.target is not None:
        below.plot(
            [x for x, _ in late], [n for _, n in late], "^", color=look["color"], fillstyle="none", markersize=5,
            clip_on=False, label="not reached by every seed",
        )  # fmt: skip


def _level(group: Group, panel: Panel, above: "Axes", below: "Axes", look: Look) -> None:
    if group.best is not None:
        above.axhline(100 * group.best.mean, **look)
    rounds = _rounds(group, panel)
    if rounds is not None and panel.reach(group).by_all:
        below.axhline(rounds.mean, **look)


def _rounds(group: Group, panel: Panel) -> Spread | None:
    return None if panel.target is None else Spread.of(trial.rounds_to(panel.target) for trial in group.trials)
