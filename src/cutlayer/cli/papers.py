"""Comparisons as papers print them, with the paper's own numbers beside them."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from cutlayer.cli.tables import NONE, dashed, plain_table
from cutlayer.core.text import time_unit
from cutlayer.recipes.recipe import Published, Recipe, Statement
from cutlayer.recipes.scale import unscaled
from cutlayer.results.report import Comparison, Factor, Panel
from cutlayer.results.trials import Group, Reach, Spread

Column = tuple[str, Callable[[Group], str]]  # a head, and the cell of a group of runs
TIMES = "{:.2f}×"


def comparison(found: Comparison) -> Lines:
    """Return a table for each panel, and below the last panel of a recipe what its paper says."""
    printed: list[RenderableType] = []
    for i, panel in enumerate(found.panels):
        columns = list(_columns(panel))
        rows = [[group.label, *(cell(group) for _, cell in columns)] for group in panel.groups]
        title = panel.name if len(found.panels) > 1 else ""
        table = plain_table(["run", *(head for head, _ in columns)], rows, left=["run"], fold=["run"], title=title)
        table.columns[0].min_width = 8
        printed += [table, *map(Text, _remarks_on(panel))]
        following = found.panels[i + 1].name if i + 1 < len(found.panels) else ""
        if _experiment(following) != _experiment(panel.name):
            printed += [Text(f"the paper says: {claim}") for claim in panel.recipe.claims]
            printed += [Text(f"note: {note}") for note in panel.recipe.notes]
        if following:
            printed.append(Text())
    return Lines(*printed)


def _columns(panel: Panel) -> Iterator[Column]:
    """Yield the columns; beside a paper's numbers only what papers print, to fit on a page. --json has everything."""
    papers = [p for g in panel.groups if (p := panel.published(g)) is not None]
    paper_like = bool(papers) or panel.race == "converged"
    digits = 2 if paper_like else 1
    yield "seeds", lambda g: str(len(g.trials))
    yield "rounds", lambda g: _range(g.rounds)
    if panel.axis == "samples":
        yield "samples", lambda g: f"{g.samples:,.0f}"
    yield "best\naccuracy %", lambda g: accuracy(g.best, digits)
    yield from _published(panel, papers, "paper\naccuracy %", _published_accuracy)
    if panel.race == "converged":
        yield from _converged_columns(panel, papers)
    elif not papers or panel.axis == "samples":
        yield "final\naccuracy %", lambda g: accuracy(g.final, digits)
    if panel.target is not None:
        yield from _race_columns(panel, papers)
    if not paper_like:
        yield "up\nMiB", lambda g: f"{g.bytes('up') / 2**20:,.1f}"
        yield "down\nMiB", lambda g: f"{g.bytes('down') / 2**20:,.1f}"
        yield "wall\nseconds", lambda g: dashed("{:,.1f}", g.seconds or None)
    if any(g.stopped for g in panel.groups):
        yield "stopped", lambda g: str(g.stopped)


def _race_columns(panel: Panel, papers: Sequence[Published]) -> Iterator[Column]:
    if panel.axis == "samples":  # rounds of different methods are of different lengths
        yield "samples to\ntarget", lambda g: dashed("{:,.0f}", g.samples_to(panel.target))
        if len(panel.groups) > 1:
            yield "speed-\nup", lambda g: dashed(TIMES, panel.speed_up(g))
        return
    unit, size = _unit(panel, papers)
    yield "R", lambda g: _rounds(panel.reach(g), g)
    if panel.race == "time":
        yield f"T\n{unit}", lambda g: _spread(panel.reach(g).spread, size, _time(panel.reach(g), g, size))
        yield from _times_reference(panel)
        return
    yield from _published(panel, papers, "paper\nR", lambda p: p.rounds)
    if len(panel.groups) > 1:
        yield "speed-\nup", lambda g: dashed(TIMES, panel.speed_up(g))
    yield from _published(panel, papers, "paper\nspeed-up", lambda p: TIMES.format(p.speed_up) if p.speed_up else "")
    if panel.timed:
        yield f"T\n{unit}", lambda g: _time(panel.reach(g), g, size)
    yield from _published(panel, papers, "paper\nT h", lambda p: p.hours)


def _converged_columns(panel: Panel, papers: Sequence[Published]) -> Iterator[Column]:
    unit, size = _unit(panel, papers)
    first = _base(panel)
    yield "converged\naccuracy %", lambda g: accuracy(g.convergence.accuracy, 2)
    if any(paper.points_below for paper in papers):
        yield f"points\n< {first}", lambda g: dashed("{:.2f}", panel.points_below(g))
    yield from _published(panel, papers, f"paper\n< {first}", lambda p: p.points_below)
    if panel.timed:
        yield "round\ns", lambda g: NONE if g.simulated is None else f"{g.simulated / fmean(g.rounds):,.2f}"
    yield "converged\nin round", lambda g: _rounds(g.convergence.reach, g)
    if panel.timed:
        yield f"after\n{unit}", lambda g: _spread(g.convergence.reach.spread, size)
        yield from _times_reference(panel)
    yield from _published(panel, papers, f"paper\n÷ {first}", lambda p: p.times_first)


def _times_reference(panel: Panel) -> Iterator[Column]:
    if len(panel.groups) > 1 and panel.timed:
        yield f"time\n÷ {_base(panel)}", lambda g: _factor(panel.times_reference(g))


def _base(panel: Panel) -> str:
    """Return what a run is raced against: hasfl, for all runs or, as hasfl-n10, for those of its own setting."""
    return panel.reference.label.partition("-")[0]


def _published(
    panel: Panel, papers: Sequence[Published], head: str, words: Callable[[Published], str]
) -> Iterator[Column]:
    """Yield a column with the paper's numbers, if it prints any."""
    if any(words(paper) for paper in papers):
        yield head, lambda g: (words(p) if (p := panel.published(g)) is not None else "") or NONE


def _remarks_on(panel: Panel) -> Iterator[str]:
    yield _race(panel)
    recipe = panel.recipe
    if not recipe.source:
        return
    yield f"source: {recipe.source}"
    for statement, ours in panel.statements:
        yield f"the paper states: {statement.says}; ours: {_stated(statement, ours)}"
    if panel.departures:
        yield f"these runs are not {setting_of(recipe)}: {', '.join(panel.departures)}"


def setting_of(recipe: Recipe) -> str:
    """Say whose setting a recipe has: a paper's, if the paper prints results of it."""
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


def _stated(statement: Statement, ours: float | None) -> str:
    if ours is None:
        return "not all of these runs have converged"
    return f"{ours:.2f} times" if statement.measure == "time" else f"{ours:.2f} points"


def accuracy(spread: Spread | None, digits: int = 1) -> str:
    """Format a mean in per cent, with its deviation if there is one."""
    if spread is None:
        return NONE
    return f"{100 * spread.mean:.{digits}f}" + ("" if spread.std is None else f" ± {100 * spread.std:.{digits}f}")


def _published_accuracy(paper: Published) -> str:
    return "" if paper.accuracy is None else _spread(Spread(paper.accuracy, paper.std), 1)


def _spread(spread: Spread | None, size: float, without: str = NONE) -> str:
    if spread is None:
        return without
    return f"{spread.mean / size:,.2f}" + ("" if spread.std is None else f" ± {spread.std / size:,.2f}")


def _time(reach: Reach, group: Group, size: float) -> str:
    """Format the mean time to a goal; one that no seed reaches takes longer than the whole run."""
    if reach.mean is None and group.simulated is not None:
        return f">{group.simulated / size:,.2f}"
    return NONE if reach.time is None else f"{reach.time / size:,.2f}"


def _factor(factor: Factor | None) -> str:
    return NONE if factor is None else ("" if factor.exact else ">") + TIMES.format(factor.value)


def _rounds(reach: Reach, group: Group) -> str:
    if reach.mean is None:
        return f">{min(group.rounds)}"
    return f"{reach.mean:.4g}" + ("" if reach.by_all else f" ({reach.reached}/{reach.seeds})")


def _unit(panel: Panel, papers: Sequence[Published]) -> tuple[str, float]:
    if any(paper.hours for paper in papers):
        return "h", 3600.0  # as the paper
    return time_unit(max((group.simulated or 0.0 for group in panel.groups), default=0.0))


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}–{max(values)}"


def _experiment(name: str) -> str:
    return unscaled(name).partition("/")[0]
