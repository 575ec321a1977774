"""Best accuracy, and rounds to the target, against a setting."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cutlayer.figures.style import MARKERS, grid, legend, looks, target_line, titles, with_target
from cutlayer.recipes.recipe import Sweep
from cutlayer.report import Panel
from cutlayer.trials import Group, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = float | str
Look = dict[str, Any]
MOST_TICKS = 12
MOST_CHARACTERS = 30  # of all tick labels of an axis


def fill(figure: "Figure", panels: Sequence[Panel], sweep: Sweep) -> None:
    """Lines with their deviation over seeds for runs that have the setting, dashed levels for those without it."""
    alone = len(panels) == 1
    pairs = grid(figure, len(panels), ("best accuracy (%)", "rounds to target"))
    style = looks([sweep.series(group.run) for panel in panels for group in panel.groups])
    for panel, title, (above, below) in zip(panels, titles(panels), pairs, strict=True):
        scale = Scale(panel, sweep)
        for number, (name, look) in enumerate(style.items()):
            groups = [group for group in panel.groups if sweep.series(group.run) == name]
            marked = {**look, "marker": MARKERS[number % len(MARKERS)], "linewidth": 1.5, **scale.joined}
            _line(scale.placed(groups), panel, above, below, marked)
            for group in groups:
                if sweep.x(group.run) is None:
                    _level(group, panel, above, below, {**look, "linestyle": "--", "linewidth": 1.2})
        target_line(above, panel.target, named=alone)
        above.set(title=title if alone else with_target(title, panel.target))
        below.set(xlabel=sweep.label)
        below.set_ylim(bottom=0)
        for axes in (above, below):
            scale.put_on(axes)
        if alone:
            above.set_xlabel(sweep.label)
        else:
            above.tick_params(labelbottom=False)
    legend(figure, [axes for pair in pairs for axes in pair])


class Scale:
    """Where the values of the setting lie: numbers by their size, anything else evenly, side by side."""

    def __init__(self, panel: Panel, sweep: Sweep) -> None:
        found = dict.fromkeys(x for group in panel.groups if (x := sweep.x(group.run)) is not None)
        numbers = [x for x in found if not isinstance(x, str)]
        self.sweep = sweep
        self.values: list[Value] = [*sorted(numbers), *(x for x in found if isinstance(x, str))]
        # A logarithm of negative values or of none would need a gap in the axis; evenly they read as well.
        self.by_size = len(numbers) == len(found) and not (sweep.log and any(x <= 0 for x in numbers))

    @property
    def joined(self) -> Look:
        """Points that have names instead of numbers are not joined by lines."""
        return {"linestyle": "none"} if any(isinstance(x, str) for x in self.values) else {}

    def placed(self, groups: Sequence[Group]) -> list[tuple[float, Group]]:
        """The groups that have the setting, from left to right."""
        pairs = [(self._place(x), group) for group in groups if (x := self.sweep.x(group.run)) is not None]
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
