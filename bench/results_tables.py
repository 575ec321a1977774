"""What the page of results says of one panel: its tables, its findings, and where it differs from the paper's.

No sentence and no number of this file compares runs by one seed or by a best round: `curves` has neither.
"""

import shlex
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import NamedTuple

from curves import SMOOTHED, Level, Window, arrival, last_gain, level, mean_curve, smoothed, windows
from headline import NONE, OPTIONS, brief, count, flat, pace, remarks, sessions

from cutlayer import recipes
from cutlayer.config import Run, literal
from cutlayer.folder import Folder
from cutlayer.recipes.recipe import TARGET_SHARE
from cutlayer.report import Panel
from cutlayer.trials import Group

HOUR = 3600.0
GIB = 2.0**30
SETUP = ("model", "clients", "per_round", "partition", "cut", "augment", "batching", "optimiser", "server_optimiser")
PAPER_SEEDS = 3
SMOFI = "smofi"  # what times are divided by: hours of another device pool compare only as ratios
WHY = {  # by the key that departs from a paper's
    "rounds": "the time on the machine; schedules are those of the whole run, so that ours is the beginning of the "
    "paper's",
    "precision": "speed; the paper names none, and fp32 is the recipe's",
    "model.init": "recorded before the recipe had these initial weights; to be replaced, and compared with no run of "
    "the others",
}


class Column(NamedTuple):
    head: str
    cell: Callable[[Group], str]


def tables(panel: Panel) -> str:
    """Accuracies and, where the paper races its methods, rounds and simulated time to its target, as Markdown."""
    found = [_accuracies(panel), _costs(panel), *([_race(panel)] if races(panel) else [])]
    return "\n\n".join(_table(panel, list(columns)) for columns in found)


def _table(panel: Panel, columns: list[Column]) -> str:
    """Columns in which no run has anything are left out."""
    shown = [Column("run", lambda g: f"`{g.label}`"), *columns]
    rows = [[column.cell(group) for column in shown] for group in panel.groups]
    told = [i for i, cells in enumerate(zip(*rows, strict=True)) if any(cell != NONE for cell in cells)]
    lines = [[shown[i].head for i in told], ["---"] * len(told), *([row[i] for i in told] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _accuracies(panel: Panel) -> Iterator[Column]:
    yield Column("seeds", lambda g: ", ".join(str(trial.run.seed) for trial in g.trials))
    yield Column("rounds", lambda g: f"{span(g.rounds)} of {original_rounds(panel, g)}")
    for window in _windows(panel):
        yield Column(f"rounds {window}", lambda g, window=window: _level(level(g, window), len(g.trials)))
    yield Column("points above FedAvg", lambda g: _gained(panel, g))
    yield Column("paper's best % (± over seeds)", lambda g: _printed(panel, g))
    yield Column("paper's points above FedAvg", lambda g: _signed(_paper_gain(panel, g)))


def _costs(panel: Panel) -> Iterator[Column]:
    yield Column("traffic, GiB a round", lambda g: f"{(g.bytes('up') + g.bytes('down')) / GIB / fmean(g.rounds):.2f}")
    yield Column("wall s a round (mean)", lambda g: f"{g.seconds / fmean(g.rounds):.2f}" if g.seconds else NONE)
    yield Column("samples a s (median)", lambda g: brief(_pace(g)))


def _race(panel: Panel) -> Iterator[Column]:
    target = paper_target(panel)
    goal = f"{target:.2f} %"
    yield Column(f"R to {goal}, mean curve", lambda g: _rounds(arrival(mean_curve(g), target), g))
    yield Column(f"mean of {SMOOTHED} rounds", lambda g: _rounds(arrival(smoothed(mean_curve(g)), target), g))
    yield Column("paper's R", lambda g: (p.rounds if (p := panel.published(g)) else "") or NONE)
    yield Column("speed-up", lambda g: _factor(_speed_up(panel, g, target)))
    yield Column("paper's speed-up", lambda g: _factor(p.speed_up if (p := panel.published(g)) else None))
    if panel.timed:
        yield Column(f"simulated h to {goal}, mean curve", lambda g: _hours(g, arrival(mean_curve(g), target)))
        yield Column("paper's h, on its devices", lambda g: (p.hours if (p := panel.published(g)) else "") or NONE)
        ours, paper = ({g.label: f(panel, g) for g in panel.groups} for f in (_hours_a_round, _paper_hours_a_round))
        yield Column("h a round ÷ smofi's", lambda g: _factor(_ratio(ours, g)))
        yield Column("paper's ÷", lambda g: _factor(_ratio(paper, g)))


def _windows(panel: Panel) -> list[Window]:
    return windows(max(number for group in panel.groups for number in group.rounds))


def surroundings(panel: Panel) -> str:
    """What was run, how and on what."""
    told = f"{'; '.join(_machines(panel))}.{_borrowed(panel)}"
    return "\n".join(["```console", *commands(panel), "```", "", told, "", _setup(panel)])


def _setup(panel: Panel) -> str:
    """The settings that all runs have in common, of those that say what is trained on what."""
    first, *others = (flat(group.run) for group in panel.groups)
    common = {k: v for k, v in first.items() if k.partition(".")[0] in SETUP and all(o.get(k) == v for o in others)}
    return f"All of them: {', '.join(f'`{key} = {literal(value)}`' for key, value in common.items())}."


def commands(panel: Panel) -> list[str]:
    """What trains the runs of a panel again: one command for all that agree in what a command says of all its runs."""
    names: dict[str, list[str]] = {}
    for group in panel.groups:
        for trial in group.trials:
            kept = Folder(trial.path).run()
            names.setdefault(_flags(kept), []).append(f"{kept.name}:{kept.rounds}")
    return [" \\\n    ".join([f"$ python bench/headline.py {flags}", *words]) for flags, words in names.items()]


def _flags(run: Run) -> str:
    own = f"--runs runs --device {run.device} --engine {run.engine} --precision {run.precision} --seed {run.seed}"
    original = next(one for one in recipes.runs(run.name.partition("/")[0]) if one.name == run.name)
    return " ".join([own, *(f"--set {shlex.quote(setting)}" for setting in _settings(run, original))])


def _settings(run: Run, original: Run) -> Iterator[str]:
    """Where a run departs from its recipe's; a thing of another name begins without the options of the old one."""
    now, then = flat(run), flat(original)
    for key, value in now.items():
        table = key.partition(".")[0]
        if key not in OPTIONS and (value != then.get(key) or now.get(table) != then.get(table)):
            yield f"{key}={literal(value)}"


def _machines(panel: Panel) -> list[str]:
    """The machines, versions, engines and precisions of the runs, each once."""
    found = []
    for group in panel.groups:
        for trial in group.trials:
            known = Folder(trial.path).surroundings()
            machine, engine = known.get("gpu") or known.get("machine", ""), known.get("engine", trial.run.engine)
            found.append(f"{machine}, torch {known.get('torch', '')}, engine {engine}, {trial.run.precision}")
    return list(dict.fromkeys(found))


def _borrowed(panel: Panel) -> str:
    """Which runs were trained under another name."""
    others = {g.label: name for g in panel.groups if (name := Folder(g.trials[0].path).run().name) != g.run.name}
    return "".join(f" `{label}` is the run {name}, whose content is the same." for label, name in others.items())


def findings(panel: Panel) -> Iterator[str]:
    """What the tables show, in words: only what two seeds or more say, by means over a window of rounds."""
    found = [*_gains(panel), *_between_cuts(panel)]
    yield from found
    if not found:
        yield "No two runs have two seeds in common yet: the numbers show how each run went, and nothing is concluded."


def _gains(panel: Panel) -> Iterator[str]:
    """How far runs are from the panel's FedAvg."""
    for group in panel.groups:
        found = _gain(panel, group)
        if found is not None:
            window, points = found
            theirs = _paper_gain(panel, group)
            paper = "" if theirs is None else f"; in the paper, by best rounds, {_signed(theirs)}"
            base = panel.reference.label
            yield f"{group.label} above {base} in rounds {window}: {_points(points)}{paper}."


def _between_cuts(panel: Panel) -> Iterator[str]:
    """How far the last cut of a method is from its first."""
    cuts: dict[str, list[Group]] = {}
    for group in panel.groups:
        method, dash, _ = group.label.partition("-cut")
        if dash:
            cuts.setdefault(method, []).append(group)
    for method, (first, *others) in cuts.items():
        alike = bool(others) and comparable(panel, first, others[-1])
        found = last_gain(others[-1], first, _windows(panel)) if alike else None
        if found is not None:
            window, points = found
            start, end = (group.label.rpartition("-")[2] for group in (first, others[-1]))
            ours, theirs = (_published(panel, group) for group in (others[-1], first))
            paper = (
                "" if ours is None or theirs is None else f"; in the paper, by best rounds, {_signed(ours - theirs)}"
            )
            yield f"{method} from {start} to {end} in rounds {window}: {_points(points)}{paper}."


def differences(panel: Panel) -> Iterator[str]:
    """Seeds, lengths, settings, and what the recipe notes."""
    yield from _departures(panel)
    for group in panel.groups:
        for trial in group.trials:
            yield from (f"{_titled(group, trial.run.seed)} {line}" for line in _history(Folder(trial.path)))
        if group.stopped:
            times = count(group.stopped, "time")
            yield f"`{group.label}`: clients stood still {times}, as their gradients were not finite."
    recipe = panel.recipe
    if recipe is not None:
        yield from recipe.notes
        names = [run.name for run in recipe.runs if run.name.rpartition("/")[0] == panel.name]
        missing = [name.rpartition("/")[2] for name in names if name not in {g.run.name for g in panel.groups}]
        if missing:
            yield f"Not run: {', '.join(missing)}."


def _titled(group: Group, seed: int) -> str:
    return f"`{group.label}`" if len(group.trials) == 1 else f"`{group.label}`, seed {seed},"


def _history(folder: Folder) -> Iterator[str]:
    """What became of a run: an early end, remarks, and where it was split."""
    done, asked = len(folder.history()), folder.run().rounds
    if done < asked:
        yield f"had {done} of {asked} rounds when it was stopped."
    yield from (f"has a remark: {remark}" for remark in remarks(folder))
    resumed = sorted(number for number in sessions(folder) if 1 < number <= done)
    if resumed:
        yield f"was stopped and resumed before round {', '.join(map(str, resumed))}."


def _departures(panel: Panel) -> Iterator[str]:
    if not of_paper(panel):
        yield from (f"{departure}." for departure in panel.departures)
        return
    fewest = min(len(group.trials) for group in panel.groups)
    if fewest < PAPER_SEEDS:
        yield f"{span(tuple(len(group.trials) for group in panel.groups))} of {PAPER_SEEDS} seeds."
    for departure in panel.departures:
        owners = [group.label for group in panel.groups if departure in panel.departures_of(group)]
        who = "" if len(owners) == len(panel.groups) else f" ({', '.join(f'`{label}`' for label in owners)})"
        why = WHY.get(departure.partition(" ")[0])
        yield f"{departure}{who}: {why}." if why else f"{departure}{who}."


def of_paper(panel: Panel) -> bool:
    """Whether a paper has printed something of these runs."""
    return panel.recipe is not None and panel.recipe.of_paper


def races(panel: Panel) -> bool:
    """Whether the paper prints rounds to a target."""
    return any(p.rounds for g in panel.groups if (p := panel.published(g)) is not None)


def comparable(panel: Panel, one: Group, other: Group) -> bool:
    """Whether two runs depart from their recipe in the same way, but for their length."""
    ours, theirs = (
        {line for line in panel.departures_of(group) if not line.startswith("rounds ")} for group in (one, other)
    )
    return ours == theirs


def paper_target(panel: Panel) -> float:
    """The paper's own: a share of the accuracy that it prints for FedAvg on this data, which its first table holds."""
    published = recipes.recipe("smofi_table1").published[f"smofi_table1/{panel.name.rpartition('/')[2]}/fedavg"]
    assert published.accuracy is not None
    return TARGET_SHARE * published.accuracy


def original_rounds(panel: Panel, group: Group) -> int:
    """How many rounds the recipe has for these runs."""
    runs = () if panel.recipe is None else panel.recipe.runs
    return next((run.rounds for run in runs if run.name == group.run.name), group.run.rounds)


def _gain(panel: Panel, group: Group) -> tuple[Window, Level] | None:
    """Points above the panel's FedAvg in the last window in which two seeds have both."""
    base = panel.reference
    if base.run.name.rpartition("/")[2] != "fedavg" or group is base or not comparable(panel, group, base):
        return None
    return last_gain(group, base, _windows(panel))


def _gained(panel: Panel, group: Group) -> str:
    found = _gain(panel, group)
    return (
        NONE if found is None else f"{_signed(found[1].over_seeds.mean)} ± {found[1].over_seeds.std:.2f} ({found[0]})"
    )


def _points(points: Level) -> str:
    return f"{_signed(points.over_seeds.mean)} ± {points.over_seeds.std:.2f} points over {points.seeds} seeds"


def _speed_up(panel: Panel, group: Group, target: float) -> float | None:
    """By mean curves of two seeds at least."""
    base = panel.reference_of(group)
    if base is None or not comparable(panel, group, base) or min(len(base.trials), len(group.trials)) < 2:
        return None
    ours, theirs = (arrival(mean_curve(g), target) for g in (group, base))
    return None if ours is None or theirs is None else theirs / ours


def _published(panel: Panel, group: Group) -> float | None:
    published = panel.published(group)
    return None if published is None else published.accuracy


def _paper_gain(panel: Panel, group: Group) -> float | None:
    if panel.reference.run.name.rpartition("/")[2] != "fedavg" or group is panel.reference:
        return None
    one, other = _published(panel, group), _published(panel, panel.reference)
    return None if one is None or other is None else one - other


def _pace(group: Group) -> float | None:
    known = [found for trial in group.trials if (found := pace(Folder(trial.path))) is not None]
    return fmean(known) if known else None


def _hours_a_round(panel: Panel, group: Group) -> float | None:
    """The mean over seeds, whatever their lengths."""
    if group.simulated is None:
        return None
    return fmean(max(trial.clock.values()) / len(trial.history) for trial in group.trials) / HOUR


def _paper_hours_a_round(panel: Panel, group: Group) -> float | None:
    """What the paper prints for both, bounds too: they are of the same whole run."""
    published = panel.published(group)
    if published is None or not (published.hours and published.rounds):
        return None
    return float(published.hours.lstrip(">")) / float(published.rounds.lstrip(">"))


def _ratio(hours: dict[str, float | None], group: Group) -> float | None:
    one, base = hours[group.label], hours.get(SMOFI)
    return None if one is None or base is None else one / base


def _printed(panel: Panel, group: Group) -> str:
    published = panel.published(group)
    if published is None or published.accuracy is None:
        return NONE
    return f"{published.accuracy:.2f}" + ("" if published.std is None else f" ± {published.std:.2f}")


def _level(found: Level | None, seeds: int) -> str:
    if found is None:
        return NONE
    spread = "" if found.over_seeds.std is None else f" ± {found.over_seeds.std:.2f}"
    scatter = "" if found.rounds_scatter is None else f" ({found.rounds_scatter:.2f})"
    return f"{found.over_seeds.mean:.2f}{spread}{scatter}" + (
        "" if found.seeds == seeds else f", {count(found.seeds, 'seed')}"
    )


def _rounds(number: int | None, group: Group) -> str:
    return f">{min(group.rounds)}" if number is None else str(number)


def _hours(group: Group, number: int | None) -> str:
    """Simulated hours until a round, the mean over seeds."""
    if group.simulated is None:
        return NONE
    until = min(group.rounds) if number is None else number
    return f"{'>' if number is None else ''}{fmean(trial.clock[until] for trial in group.trials) / HOUR:.2f}"


def _signed(points: float | None) -> str:
    return NONE if points is None else f"{points:+.2f}"


def _factor(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}×"


def span(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}–{max(values)}"
