"""Comparisons as papers print them, with the paper's own numbers beside them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from cutlayer.cli.tables import plain_table
from cutlayer.core.text import time_unit
from cutlayer.recipes.recipe import Published, Recipe, Statement
from cutlayer.recipes.scale import unscaled
from cutlayer.results.report import Comparison, Factor, Panel
from cutlayer.results.trials import Group, Reach, Spread

Cell = Callable[[Group], str]


@dataclass(frozen=True)
class PaperColumn:
    """A head and what stands below it; one with nothing to say is left out."""

    head: str
    cell: Cell


def comparison(found: Comparison) -> Lines:
    """A table for each panel, and below the last of a recipe what its paper says."""
    printed: list[RenderableType] = []
    for i, panel in enumerate(found.panels):
        printed.append(_table(panel, title=panel.name if len(found.panels) > 1 else ""))
        printed += [Text(line) for line in _remarks_on(panel)]
        following = found.panels[i + 1].name if i + 1 < len(found.panels) else ""
        if panel.recipe is not None and _experiment(following) != _experiment(panel.name):
            printed += [Text(line) for line in _remarks(panel.recipe)]
        if following:
            printed.append(Text())
    return Lines(*printed)


def _table(panel: Panel, title: str) -> RenderableType:
    table = plain_table(title)
    table.add_column("run", overflow="fold", min_width=8)
    columns = list(_columns(panel))
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for group in panel.groups:
        table.add_row(group.label, *(column.cell(group) for column in columns))
    return table


def _columns(panel: Panel) -> Iterator[PaperColumn]:
    """Beside a paper's numbers only what papers print, so that it fits on a page; all else is in --json."""
    papers = [p for g in panel.groups if (p := panel.published(g)) is not None]
    paper_like = bool(papers) or panel.race == "converged"
    digits = 2 if paper_like else 1
    yield PaperColumn("seeds", lambda g: str(len(g.trials)))
    yield PaperColumn("rounds", lambda g: _range(g.rounds))
    if panel.axis == "samples":
        yield PaperColumn("samples", lambda g: f"{g.samples:,.0f}")
    yield PaperColumn("best\naccuracy %", lambda g: accuracy(g.best, digits))
    yield from _published(panel, papers, "paper\naccuracy %", _published_accuracy)
    if panel.race == "converged":
        yield from _converged_columns(panel, papers)
    elif not papers or panel.axis == "samples":
        yield PaperColumn("final\naccuracy %", lambda g: accuracy(g.final, digits))
    if panel.target is not None:
        yield from _race_columns(panel, papers)
    if not paper_like:
        yield PaperColumn("up\nMiB", lambda g: f"{g.bytes('up') / 2**20:,.1f}")
        yield PaperColumn("down\nMiB", lambda g: f"{g.bytes('down') / 2**20:,.1f}")
        yield PaperColumn("wall\nseconds", lambda g: f"{g.seconds:,.1f}" if g.seconds else "–")
    if any(g.stopped for g in panel.groups):
        yield PaperColumn("stopped", lambda g: str(g.stopped))


def _race_columns(panel: Panel, papers: Sequence[Published]) -> Iterator[PaperColumn]:
    if panel.axis == "samples":  # rounds of different methods are of different lengths
        yield PaperColumn("samples to\ntarget", lambda g: _whole(g.samples_to(panel.target)))
        if len(panel.groups) > 1:
            yield PaperColumn("speed-\nup", lambda g: _times(panel.speed_up(g)))
        return
    unit, size = _unit(panel, papers)
    yield PaperColumn("R", lambda g: _rounds(panel.reach(g), g))
    if panel.race == "time":
        yield PaperColumn(f"T\n{unit}", lambda g: _time_spread(panel.reach(g), g, size))
        yield from _times_reference(panel)
        return
    yield from _published(panel, papers, "paper\nR", lambda p: p.rounds)
    if len(panel.groups) > 1:
        yield PaperColumn("speed-\nup", lambda g: _times(panel.speed_up(g)))
    yield from _published(panel, papers, "paper\nspeed-up", lambda p: _times(p.speed_up) if p.speed_up else "")
    if panel.timed:
        yield PaperColumn(f"T\n{unit}", lambda g: _time(panel.reach(g), g, size))
    yield from _published(panel, papers, "paper\nT h", lambda p: p.hours)


def _converged_columns(panel: Panel, papers: Sequence[Published]) -> Iterator[PaperColumn]:
    unit, size = _unit(panel, papers)
    first = _base(panel)
    yield PaperColumn("converged\naccuracy %", lambda g: accuracy(g.convergence.accuracy, 2))
    if any(paper.points_below for paper in papers):
        yield PaperColumn(f"points\n< {first}", lambda g: _number(panel.points_below(g)))
    yield from _published(panel, papers, f"paper\n< {first}", lambda p: p.points_below)
    if panel.timed:
        yield PaperColumn("round\ns", lambda g: "–" if g.simulated is None else f"{g.simulated / fmean(g.rounds):,.2f}")
    yield PaperColumn("converged\nin round", lambda g: _rounds(g.convergence.reach, g))
    if panel.timed:
        yield PaperColumn(f"after\n{unit}", lambda g: _spread(g.convergence.reach.spread, size))
        yield from _times_reference(panel)
    yield from _published(panel, papers, f"paper\n÷ {first}", lambda p: p.times_first)


def _times_reference(panel: Panel) -> Iterator[PaperColumn]:
    if len(panel.groups) > 1 and panel.timed:
        yield PaperColumn(f"time\n÷ {_base(panel)}", lambda g: _factor(panel.times_reference(g)))


def _base(panel: Panel) -> str:
    """What a run is raced against: hasfl, whether with all runs or, as hasfl-n10, with those of its own setting."""
    return panel.reference.label.partition("-")[0]


def _published(
    panel: Panel, papers: Sequence[Published], head: str, words: Callable[[Published], str]
) -> Iterator[PaperColumn]:
    """A column of the paper, if it prints any such number."""
    if any(words(paper) for paper in papers):
        yield PaperColumn(head, lambda g: (words(p) if (p := panel.published(g)) is not None else "") or "–")


def _remarks_on(panel: Panel) -> Iterator[str]:
    yield _race(panel)
    recipe = panel.recipe
    if recipe is None or not recipe.source:
        return
    yield f"source: {recipe.source}"
    for statement, ours in panel.statements:
        yield f"the paper states: {statement.says}; ours: {_stated(statement, ours)}"
    if panel.departures:
        yield f"these runs are not {setting_of(recipe)}: {', '.join(panel.departures)}"


def setting_of(recipe: Recipe) -> str:
    """Whose setting a recipe's is: a paper's, where one has printed something of it."""
    return "the paper's setting" if recipe.of_paper else "the recipe's setting"


def _race(panel: Panel) -> str:
    if panel.race == "converged":
        return f"{panel.rule}; its accuracy is the best until then{', its time simulated' if panel.timed else ''}"
    if panel.target is None:
        took = panel.groups[0].simulated if len(panel.groups) == 1 else None
        return panel.rule if took is None else f"{panel.rule}; simulated time of all rounds: {took:,.1f} s"
    goal = f"the target {100 * panel.target:.1f} % ({panel.rule})"
    if panel.axis == "samples":
        return f"samples until the first evaluation that reaches {goal}; speed-up against {panel.reference.label}"
    target = f"R: first round that reaches {goal}"
    if panel.race == "time":
        return f"{target}; T: simulated time until then, of the seeds that reach it; > is at least"
    labels = [group.label for group in panel.references]
    against = labels[0] if len(labels) == 1 else f"the base of each family: {', '.join(labels)}"
    time = "; T: simulated time until then" if panel.timed else ""
    speed = f"; speed-up against {against}" if labels and len(panel.groups) > 1 else ""
    return f"{target}{time}{speed}"


def _remarks(recipe: Recipe) -> list[str]:
    return [f"the paper says: {claim}" for claim in recipe.claims] + [f"note: {note}" for note in recipe.notes]


def _whole(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def accuracy(spread: Spread | None, digits: int = 1) -> str:
    """A mean in per cent, with its deviation if there is one."""
    if spread is None:
        return "–"
    std = "" if spread.std is None else f" ± {100 * spread.std:.{digits}f}"
    return f"{100 * spread.mean:.{digits}f}{std}"


def _published_accuracy(paper: Published) -> str:
    if paper.accuracy is None:
        return ""
    return f"{paper.accuracy:.2f}" + ("" if paper.std is None else f" ± {paper.std:.2f}")


def _rounds(reach: Reach, group: Group) -> str:
    if reach.mean is None:
        return f">{min(group.rounds)}"
    mean = f"{reach.mean:.4g}"
    return mean if reach.by_all else f"{mean} ({reach.reached}/{reach.seeds})"


def _time(reach: Reach, group: Group, size: float) -> str:
    """Never reached: longer than the whole run."""
    if reach.mean is not None:
        return "–" if reach.time is None else f"{reach.time / size:,.2f}"
    return "–" if group.simulated is None else f">{group.simulated / size:,.2f}"


def _time_spread(reach: Reach, group: Group, size: float) -> str:
    return _time(reach, group, size) if reach.spread is None else _spread(reach.spread, size)


def _spread(spread: Spread | None, size: float) -> str:
    if spread is None:
        return "–"
    return f"{spread.mean / size:,.2f}" + ("" if spread.std is None else f" ± {spread.std / size:,.2f}")


def _factor(factor: Factor | None) -> str:
    return "–" if factor is None else f"{'' if factor.exact else '>'}{factor.value:.2f}×"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _stated(statement: Statement, ours: float | None) -> str:
    if ours is None:
        return "not all of these runs have converged"
    return f"{ours:.2f} times" if statement.measure == "time" else f"{ours:.2f} points"


def _unit(panel: Panel, papers: Sequence[Published]) -> tuple[str, float]:
    if any(paper.hours for paper in papers):
        return "h", 3600.0  # as the paper
    return time_unit(max((group.simulated or 0.0 for group in panel.groups), default=0.0))


def _times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:.2f}×"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}–{max(values)}"


def _experiment(name: str) -> str:
    return unscaled(name).partition("/")[0]
