"""Comparisons as papers print them, with the paper's own numbers beside them."""

from collections.abc import Callable, Iterator, Sequence
from math import isinf
from statistics import fmean
from typing import Any, NamedTuple

from cutlayer.cli.tables import NONE, Section, plain_table
from cutlayer.core.text import time_unit
from cutlayer.recipes.recipe import Published, Recipe, Statement
from cutlayer.recipes.scale import unscaled
from cutlayer.results.measures import ACCURACY, Measure
from cutlayer.results.names import codecs_of
from cutlayer.results.paired import Difference
from cutlayer.results.report import Comparison, Factor, Panel
from cutlayer.results.trials import Group, Reach, Span, Spread

TIMES = "{:.2f}×"
SHORT = 12  # characters of a name that fit above a column


class RunColumn(NamedTuple):
    """A head, and the cell of a group of runs."""

    head: str
    cell: Callable[[Panel, Group], str]
    printed: bool = True  # in a paper's table


def sections(found: Comparison, *, per_seed: bool = False, bold_best: bool = False) -> list[Section]:
    """Return a table for each panel, and with the last panel of a recipe what its paper says.

    In print, the best value is bold if it is better than each other with confidence, or with `bold_best` in any case.
    """
    made = []
    for i, panel in enumerate(found.panels):
        following = found.panels[i + 1].name if i + 1 < len(found.panels) else ""
        remarks = list(_remarks_on(panel))
        if _experiment(following) != _experiment(panel.name):
            remarks += [f"the paper says: {claim}" for claim in panel.recipe.claims]
            remarks += [f"note: {note}" for note in panel.recipe.notes]
        columns = list(_columns(panel))
        name = panel.name if len(found.panels) > 1 else ""
        heads = ["run", *(column.head for column in columns)]
        bold = panel.best if bold_best else panel.winner
        made.append(
            Section(
                name=name,
                sheet=plain_table(heads, _rows(panel, columns, per_seed), left=["run"], fold=["run"], title=name),
                remarks=remarks,
                printed=[0, *(i for i, column in enumerate(columns, start=1) if column.printed)],
                bold=None if bold is None else bold.label,
            )
        )
    return made


def document(found: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON, with the remarks that stand below its tables."""
    told = found.as_dict()
    panels = zip(told["panels"], found.panels, strict=True)
    return {**told, "panels": [{**plain, "remarks": list(_remarks_on(panel))} for plain, panel in panels]}


def _rows(panel: Panel, columns: Sequence[RunColumn], per_seed: bool) -> Iterator[list[str]]:
    """Yield a row for each group, and below it one for each of its seeds if asked for."""
    singles = {seed: panel.of_seed(seed) for seed in panel.ground.seeds} if per_seed else {}
    for place, group in enumerate(panel.groups):
        yield [group.label, *(column.cell(panel, group) for column in columns)]
        for seed, single in singles.items():
            yield [f"  seed {seed}", *(column.cell(single, single.groups[place]) for column in columns)]


def _columns(panel: Panel) -> Iterator[RunColumn]:
    """Yield the columns, the most important first; beside a paper's numbers only what papers print."""
    papers = [p for g in panel.groups if (p := panel.published(g)) is not None]
    paper_like = bool(papers) or panel.race == "converged"
    measure, scale = panel.measure, panel.measure.scale
    best = None if panel.best is None else panel.best.best
    digits = 2 if paper_like else measure.digits(None if best is None else best.mean)
    yield RunColumn(f"best\n{measure.head}", lambda _, g: _value(g.best, scale, digits))
    yield from _published(papers, "paper\naccuracy %", _published_accuracy)
    if len(panel.groups) > 1 and panel.race != "converged" and any(panel.difference(g) for g in panel.groups):
        yield RunColumn(f"{_versus(panel)}\n[95 %]", lambda p, g: _difference(p.difference(g), scale, digits))
    if panel.race == "converged":
        yield from _converged_columns(panel, papers)
    if panel.target is not None:
        yield from _race_columns(panel, papers)
    if any(g.stopped for g in panel.groups):
        yield RunColumn("stopped\nclients", lambda _, g: str(g.stopped))
    if panel.race != "converged" and (not papers or panel.axis == "samples"):
        yield RunColumn(f"final\n{measure.head}", lambda _, g: _value(g.final, scale, digits))
    yield RunColumn("seeds", lambda _, g: str(len(g.trials)), printed=False)
    yield RunColumn("rounds", lambda _, g: _range(g.rounds), printed=False)
    if panel.axis == "samples":
        yield RunColumn("samples", lambda _, g: f"{g.samples:,.0f}", printed=False)
    if not paper_like:
        yield RunColumn("up\nMiB", lambda _, g: f"{g.bytes('up') / 2**20:,.1f}", printed=False)
        yield RunColumn("down\nMiB", lambda _, g: f"{g.bytes('down') / 2**20:,.1f}", printed=False)
        yield RunColumn("wall\nseconds", lambda _, g: f"{g.seconds:,.1f}" if g.seconds else NONE, printed=False)


def _race_columns(panel: Panel, papers: Sequence[Published]) -> Iterator[RunColumn]:
    unit, size = _unit(panel, papers)
    if panel.axis == "samples":  # rounds of different methods are of different lengths
        yield RunColumn("samples to\ntarget", lambda p, g: _span(g.samples_to(p.target), "{:,.0f}"))
        if len(panel.groups) > 1:
            yield RunColumn("speed-\nup", lambda p, g: _factor(p.speed_up(g)))
        if panel.timed:
            yield RunColumn(f"T\n{unit}", lambda p, g: _time(p.reach(g), g, size))
        return
    yield RunColumn("R", lambda p, g: _rounds(p.reach(g), g))
    if panel.race == "time":
        yield RunColumn(f"T\n{unit}", lambda p, g: _time(p.reach(g), g, size))
        yield from _times_reference(panel)
        return
    yield from _published(papers, "paper\nR", lambda p: p.rounds)
    if len(panel.groups) > 1:
        yield RunColumn("speed-\nup", lambda p, g: _factor(p.speed_up(g)))
    yield from _published(papers, "paper\nspeed-up", lambda p: TIMES.format(p.speed_up) if p.speed_up else "")
    if panel.timed:
        yield RunColumn(f"T\n{unit}", lambda p, g: _time(p.reach(g), g, size))
    yield from _published(papers, "paper\nT h", lambda p: p.hours)


def _converged_columns(panel: Panel, papers: Sequence[Published]) -> Iterator[RunColumn]:
    unit, size = _unit(panel, papers)
    first = _base(panel)
    yield RunColumn("converged\naccuracy %", lambda _, g: accuracy(g.convergence.accuracy, 2))
    if any(paper.points_below for paper in papers):
        yield RunColumn(f"points\n< {first}", lambda p, g: NONE if (d := p.points_below(g)) is None else f"{d:.2f}")
    yield from _published(papers, f"paper\n< {first}", lambda p: p.points_below)
    if panel.timed:
        yield RunColumn(
            "round\ns", lambda _, g: NONE if g.simulated is None else f"{g.simulated / fmean(g.rounds):,.2f}"
        )
    yield RunColumn("converged\nin round", lambda _, g: _rounds(g.convergence.reach, g))
    if panel.timed:
        yield RunColumn(f"after\n{unit}", lambda _, g: _spread(g.convergence.reach.spread, size))
        yield from _times_reference(panel)
    yield from _published(papers, f"paper\n÷ {first}", lambda p: p.times_first)


def _times_reference(panel: Panel) -> Iterator[RunColumn]:
    if len(panel.groups) > 1 and panel.timed:
        yield RunColumn(f"time\n÷ {_base(panel)}", lambda p, g: _factor(p.times_reference(g)))


def _base(panel: Panel) -> str:
    """Return what a run is raced against: hasfl, for all runs or, as hasfl-n10, for those of its own setting."""
    return panel.reference.label.partition("-")[0]


def _versus(panel: Panel) -> str:
    """Name what differences are relative to, in as few letters as a head has room for."""
    labels = [group.label for group in panel.references]
    return f"vs {labels[0]}" if len(labels) == 1 and len(labels[0]) <= SHORT else "vs base"


def _published(papers: Sequence[Published], head: str, words: Callable[[Published], str]) -> Iterator[RunColumn]:
    """Yield a column with the paper's numbers, if it prints any."""
    if any(words(paper) for paper in papers):
        yield RunColumn(head, lambda panel, g: (words(p) if (p := panel.published(g)) is not None else "") or NONE)


def _remarks_on(panel: Panel) -> Iterator[str]:
    yield _race(panel)
    yield from _ground(panel)
    yield from _codecs(panel)
    if any(g.stopped for g in panel.groups):
        yield "stopped clients: those that diverged, summed over rounds and seeds"
    recipe = panel.recipe
    if not recipe.source:
        return
    yield f"source: {recipe.source}"
    for statement, ours in panel.statements:
        yield f"the paper states: {statement.says}; ours: {_stated(statement, ours)}"
    if panel.departures:
        yield f"these runs are not {setting_of(recipe)}: {', '.join(panel.departures)}"


def _ground(panel: Panel) -> Iterator[str]:
    """Say which seeds and evaluations are compared, and which are not."""
    ground, several = panel.ground, len(panel.groups) > 1
    if not ground.seeds:
        yield "these runs have no seed in common, so they are shown and not compared"
    elif ground.left_out:
        alike: dict[str, list[str]] = {}
        for label, seeds in ground.left_out.items():
            alike.setdefault(_listed(seeds), []).append(label)
        left = "; ".join(f"{seeds} of {', '.join(labels)}" for seeds, labels in alike.items())
        yield f"compared: seed {_listed(ground.seeds)}, which all runs have; left out: seed {left}"
    if not ground.meets:
        yield "these runs have no evaluation in common, so they are shown and not compared; give them one eval_every"
    counts = [len(t.values) for g in panel.groups for t in g.trials]
    if any(t.values != t.measured for g in panel.groups for t in g.trials):
        who = "all runs" if several else "all seeds"
        what = "accuracies" if panel.measure == ACCURACY else panel.measure.words
        goal = "samples to target" if panel.axis == "samples" else "R"
        yield f"{what}, {goal} and T: of the {_range(counts)} evaluations that {who} have"
    if any(t.rounds < len(t.history) for g in panel.groups for t in g.trials):
        yield "rounds, samples, MiB and seconds: up to the last evaluation that is compared, not of the whole runs"
    if any(panel.difference(g) for g in panel.groups):
        yield (
            f"{_versus(panel)}: {_above(panel.measure)}, seed by seed, with the 95 % interval of Student's t where "
            "there are two seeds"
        )
    if not all(span.exact for g in panel.groups if (span := panel.arrival(g).rounds) is not None):
        yield "a–b: reached between two evaluations, from a to b"


def _codecs(panel: Panel) -> Iterator[str]:
    """Say which runs have which codecs."""
    alike: dict[str, list[str]] = {}
    for group in panel.groups:
        alike.setdefault(codecs_of(group.run.codecs), []).append(group.label)
    for codecs, labels in alike.items():
        if codecs:
            yield f"codecs of {', '.join(labels) if len(alike) > 1 else 'all runs'}: {codecs}"


def _above(measure: Measure) -> str:
    """Say what the sign of a difference means."""
    best = f"points of best {measure.words}" if measure.is_share else f"best {measure.words}"
    return f"{best} above it" if measure.goal == "max" else f"{best} above it, so below 0 is better"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def setting_of(recipe: Recipe) -> str:
    """Say whose setting a recipe has: a paper's, if the paper prints results of it."""
    return "the paper's setting" if recipe.of_paper else "the recipe's setting"


def _race(panel: Panel) -> str:
    if panel.race == "converged":
        return f"{panel.rule}; its accuracy is the best until then{', its time simulated' if panel.timed else ''}"
    if panel.target is None:
        took = panel.groups[0].simulated if len(panel.groups) == 1 else None
        return panel.rule if took is None else f"{panel.rule}; simulated time of all rounds: {took:,.1f} s"
    or_less = " or less" if panel.measure.goal == "min" else ""
    time = "; T: simulated time until then" if panel.timed else ""
    goal = f"the target {panel.measure.told(panel.target)}{or_less} ({panel.rule})"
    if panel.axis == "samples":
        target = f"samples to target: until the first evaluation that reaches {goal}"
        return f"{target}; speed-up against {panel.reference.label}{time}"
    target = f"R: first round that reaches {goal}"
    if panel.race == "time":
        return f"{target}; T: simulated time until then, of the seeds that reach it; > is at least"
    labels = [group.label for group in panel.references]
    against = labels[0] if len(labels) == 1 else f"the base of each family: {', '.join(labels)}"
    speed = f"; speed-up against {against}" if labels and len(panel.groups) > 1 else ""
    return f"{target}{time}{speed}"


def _stated(statement: Statement, ours: float | None) -> str:
    if ours is None:
        return "not all of these runs have converged"
    return f"{ours:.2f} times" if statement.measure == "time" else f"{ours:.2f} points"


def accuracy(spread: Spread | None, digits: int = 1) -> str:
    """Format a mean in per cent, with its deviation if there is one."""
    return _value(spread, 100, digits)


def _value(spread: Spread | None, scale: float, digits: int) -> str:
    """Format a mean, with its deviation if there is one."""
    if spread is None:
        return NONE
    return f"{scale * spread.mean:.{digits}f}" + ("" if spread.std is None else f" ± {scale * spread.std:.{digits}f}")


def _published_accuracy(paper: Published) -> str:
    return "" if paper.accuracy is None else _spread(Spread(paper.accuracy, paper.std), 1)


def _difference(found: Difference | None, scale: float, digits: int) -> str:
    """Format a difference with its interval: +3.1 [1.0, 5.2]; one that rounds to 0 has no minus."""
    if found is None:
        return NONE
    mean = f"{scale * found.mean:+z.{digits}f}"
    if found.interval is None:
        return mean
    low, high = (f"{scale * end:z.{digits}f}" for end in found.interval)
    return f"{mean} [{low}, {high}]"


def _spread(spread: Spread | None, size: float, without: str = NONE) -> str:
    if spread is None:
        return without
    return f"{spread.mean / size:,.2f}" + ("" if spread.std is None else f" ± {spread.std / size:,.2f}")


def _span(span: Span | None, form: str, size: float = 1.0) -> str:
    """Format a mean that the evaluations determine, or else where it lies."""
    if span is None:
        return NONE
    low, high = (form.format(end / size).removesuffix(".0") for end in span)
    return high if span.exact else f"{low}–{high}"


def _time(reach: Reach, group: Group, size: float) -> str:
    """Format the mean time to a goal; one that no seed reaches takes longer than the whole run."""
    if reach.rounds is None and group.simulated is not None:
        return f">{group.simulated / size:,.2f}"
    if reach.seconds is not None and not reach.seconds.exact:
        return _span(reach.seconds, "{:,.2f}", size)
    return _spread(reach.spread, size)


def _factor(factor: Factor | None) -> str:
    """Format a ratio: 1.75×, or 1.20–1.75× if the evaluations tell no more, or >1.20×."""
    if factor is None:
        return NONE
    if factor.exact:
        return TIMES.format(factor.value)
    return f">{TIMES.format(factor.low)}" if isinf(factor.high) else f"{factor.low:.2f}–{TIMES.format(factor.high)}"


def _rounds(reach: Reach, group: Group) -> str:
    if reach.rounds is None:
        return f">{min(max(t.values, default=len(t.history)) for t in group.trials)}"
    return _span(reach.rounds, "{:,.1f}") + ("" if reach.by_all else f" ({reach.reached}/{reach.seeds})")


def _unit(panel: Panel, papers: Sequence[Published]) -> tuple[str, float]:
    if any(paper.hours for paper in papers):
        return "h", 3600.0  # as the paper
    return time_unit(max((group.simulated or 0.0 for group in panel.groups), default=0.0))


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}–{max(values)}"


def _experiment(name: str) -> str:
    return unscaled(name).partition("/")[0]
