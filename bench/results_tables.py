"""What the page of results says of one panel: its table, its findings, and where it differs from the paper's."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from statistics import fmean, median, stdev
from typing import NamedTuple

from headline import NONE, OPTIONS, brief, count, flat, pace, remarks, sessions

from cutlayer import recipes
from cutlayer.config import Run, literal
from cutlayer.folder import Folder
from cutlayer.recipes.recipe import TARGET_SHARE
from cutlayer.report import Panel
from cutlayer.trials import Group, Reach, Spread

HOUR = 3600.0
GIB = 2.0**30
LAST = 10  # rounds at the end whose accuracies tell how much one says
LONG = 3 * LAST  # in shorter runs the last rounds tell of learning, too
MUCH = 0.5  # of the paper's rounds, or points: less is much less
SETUP = ("model", "clients", "per_round", "partition", "cut", "augment", "batching", "optimiser", "server_optimiser")
PAPER_SEEDS = "three"
SMOFI = "smofi"  # what times are divided by: hours of another device pool compare only as ratios
WHY = {  # by the key that departs from a paper's
    "rounds": "the time on the machine; schedules are those of the whole run, so that ours is the beginning of the "
    "paper's, and its best accuracy is of fewer rounds",
    "precision": "speed; the paper names none, and fp32 is the recipe's",
}


class Column(NamedTuple):
    head: str
    cell: Callable[[Group], str]


def tables(panel: Panel) -> str:
    """Accuracies and, where the paper races its methods, rounds and simulated time to a target, as Markdown."""
    second = _race(panel) if races(panel) else []
    return "\n\n".join(_table(panel, columns) for columns in (list(_accuracies(panel)), list(second)) if columns)


def _table(panel: Panel, columns: list[Column]) -> str:
    """Columns in which no run has anything are left out."""
    shown = [Column("run", lambda g: f"`{g.label}`"), *columns]
    rows = [[column.cell(group) for column in shown] for group in panel.groups]
    told = [i for i, cells in enumerate(zip(*rows, strict=True)) if any(cell != NONE for cell in cells)]
    lines = [[shown[i].head for i in told], ["---"] * len(told), *([row[i] for i in told] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _accuracies(panel: Panel) -> Iterator[Column]:
    yield Column("rounds", lambda g: _range(g.rounds))
    yield Column("best %", lambda g: _percent(g.best))
    yield Column("in round", _best_round)
    yield Column(f"last {LAST} rounds % (± over rounds)", _last)
    yield Column("paper's best % (± over seeds)", lambda g: _printed(panel, g))
    yield Column("points above FedAvg", lambda g: _signed(_gain(panel, g, _ours)))
    yield Column("paper's", lambda g: _signed(_gain(panel, g, _theirs)))
    yield Column("traffic, GiB a round", lambda g: f"{(g.bytes('up') + g.bytes('down')) / GIB / fmean(g.rounds):.2f}")
    yield Column("wall s a round (mean)", lambda g: f"{g.seconds / fmean(g.rounds):.2f}" if g.seconds else NONE)
    yield Column("samples a s (median)", lambda g: brief(_pace(g)))


def _race(panel: Panel) -> Iterator[Column]:
    own, theirs = panel.target, _paper_target(panel)
    yield Column(f"R to {_goal(own)} (ours)", lambda g: _rounds(g.reach(own), g))
    yield Column(f"R to {_goal(theirs)} (paper's)", lambda g: _rounds(g.reach(theirs), g))
    yield Column("paper's R", lambda g: (p.rounds if (p := panel.published(g)) else "") or NONE)
    for target in (own, theirs):
        raced = replace(panel, target=target)
        yield Column(f"speed-up to {_goal(target)}", lambda g, raced=raced: _factor(raced.speed_up(g)))
    yield Column("paper's speed-up", lambda g: _factor(p.speed_up if (p := panel.published(g)) else None))
    if panel.timed:
        yield from _times(panel)


def _times(panel: Panel) -> Iterator[Column]:
    theirs = _paper_target(panel)
    yield Column(f"simulated h to {_goal(panel.target)}", lambda g: _hours(g.reach(panel.target), g))
    yield Column(f"simulated h to {_goal(theirs)}", lambda g: _hours(g.reach(theirs), g))
    yield Column("paper's h, on its devices", lambda g: (p.hours if (p := panel.published(g)) else "") or NONE)
    ours, paper = ({g.label: f(panel, g) for g in panel.groups} for f in (_hours_a_round, _paper_hours_a_round))
    yield Column("h a round ÷ smofi's", lambda g: _factor(_ratio(ours, g)))
    yield Column("paper's ÷", lambda g: _factor(_ratio(paper, g)))


def surroundings(panel: Panel) -> str:
    """What was run, how, on what, with which seeds."""
    seeds = sorted({trial.run.seed for group in panel.groups for trial in group.trials})
    told = f"{'Seed' if len(seeds) == 1 else 'Seeds'} {', '.join(map(str, seeds))}. {'; '.join(_machines(panel))}."
    return "\n".join(["```console", *commands(panel), "```", "", f"{told}{_borrowed(panel)}", "", _setup(panel)])


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
    labels = [f"`{group.label}`" for group in panel.groups if _kept_name(group) != group.run.name]
    if not labels:
        return ""
    return f" {' and '.join(labels)}: trained with simulated devices, which change nothing but the clock."


def _kept_name(group: Group) -> str:
    """The name of the run that was trained: its folder's, which may serve a second table."""
    return Folder(group.trials[0].path).run().name


def findings(panel: Panel) -> Iterator[str]:
    """What the table shows, in words."""
    known = {
        g.label: (ours, theirs) for g in panel.groups if (ours := _ours(panel, g)) and (theirs := _theirs(panel, g))
    }
    if len(known) > 1:
        pairs = list(combinations(known.values(), 2))
        agree = sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs)
        for who, place in (("ours", 0), ("the paper's", 1)):
            yield f"By best accuracy, {who}: {' > '.join(sorted(known, key=lambda k: -known[k][place]))}."
        yield f"Of {count(len(pairs), 'pair')} of runs, {agree} {'is' if agree == 1 else 'are'} in the paper's order."
    yield from _scatter(panel)
    yield from _lead(panel)
    yield from _between_cuts(panel)
    yield from _raced(panel)


def _scatter(panel: Panel) -> Iterator[str]:
    """Whether runs differ by more than the rounds of one."""
    best = [found for group in panel.groups if (found := _ours(panel, group)) is not None]
    rounds = [stdev(found) for group in panel.groups if len(found := _last_accuracies(group)) > 1]
    if len(best) > 1 and rounds and max(best) - min(best) < median(rounds):
        yield (
            f"All best rounds lie within {max(best) - min(best):.2f} points, and the last {LAST} rounds of a run "
            f"scatter by {min(rounds):.1f} to {max(rounds):.1f}: with so few seeds the order says little."
        )


def _lead(panel: Panel) -> Iterator[str]:
    """How far SMoFi is above its base, by the best round and by the last ones."""
    smofi = next((group for group in panel.groups if group.label == SMOFI), None)
    if smofi is None:
        return
    ours, theirs = (_gain(panel, smofi, f) for f in (_ours, _theirs))
    if ours is None or theirs is None:
        return
    ends = [fmean(found) for g in (smofi, panel.reference) if (found := _last_accuracies(g))]
    late = f", by the mean of the last {LAST} rounds {_signed(ends[0] - ends[1])}" if len(ends) == 2 else ""
    base = panel.reference.label
    yield f"{SMOFI} above {base}: by the best round {_signed(ours)} points{late}; in the paper {_signed(theirs)}."
    if ours < MUCH * theirs:
        yield "So the paper's advantage is not seen here, in these rounds and with these seeds."


def _raced(panel: Panel) -> Iterator[str]:
    """The targets, and who reaches the paper's within the rounds that ours have."""
    target, most = _paper_target(panel), min(number for group in panel.groups for number in group.rounds)
    if not races(panel) or panel.target is None or target is None:
        return
    yield f"Our target is {panel.rule}, here {_goal(panel.target)}; the paper's is {_goal(target)}."
    own_bases = [group.label for group in panel.references if group is not panel.reference]
    if own_bases:
        yield f"Speed-ups of {' and '.join(own_bases)} are over themselves: the paper adds other methods to them."
    printed = {g.label: p.rounds for g in panel.groups if (p := panel.published(g)) and p.rounds.isdecimal()}
    theirs = [f"{label} ({number})" for label, number in printed.items() if int(number) <= most]
    reached = [(group.label, group.reach(target)) for group in panel.groups]
    ours = [f"{label} ({reach.mean:.4g})" for label, reach in reached if reach.mean is not None and reach.mean <= most]
    named = [", ".join(some) or "none" for some in (ours, theirs)]
    yield f"Runs that reach {_goal(target)} within {count(most, 'round')}: ours {named[0]}; the paper's {named[1]}."
    paces = {label: reach.mean / int(printed[label]) for label, reach in reached if reach.mean and label in printed}
    base = paces.get(panel.reference.label)
    if base is not None and base < MUCH and any(pace > base for pace in paces.values()):
        told = ", ".join(f"{label} {pace:.2f}" for label, pace in paces.items())
        yield (
            f"Rounds to {_goal(target)}, ours as a share of the paper's: {told}. Over a base that is so much faster "
            "than the paper's, less may be left to gain. Which of the choices that the paper leaves open makes it so "
            "is not known."
        )


def _between_cuts(panel: Panel) -> Iterator[str]:
    cuts: dict[str, list[Group]] = {}
    for group in panel.groups:
        method, _, cut = group.label.partition("-cut")
        if cut and _theirs(panel, group) is not None:
            cuts.setdefault(method, []).append(group)
    for method, groups in cuts.items():
        if len(groups) > 1:
            ours, theirs = (_first_to_last(panel, groups, f) for f in (_ours, _theirs))
            first, last = (group.label.rpartition("-")[2] for group in (groups[0], groups[-1]))
            rounds = _range(tuple(number for group in groups for number in group.rounds))
            yield (
                f"{method} from {first} to {last}: {_signed(ours)} points after {rounds} rounds, in the paper "
                f"{_signed(theirs)} at its end."
            )


def _first_to_last(panel: Panel, groups: list[Group], f: Callable[[Panel, Group], float | None]) -> float | None:
    first, last = f(panel, groups[0]), f(panel, groups[-1])
    return None if first is None or last is None else last - first


def differences(panel: Panel) -> Iterator[str]:
    """Seeds, lengths, settings, and what the recipe notes."""
    yield from _departures(panel)
    for group in panel.groups:
        if min(group.rounds) < group.run.rounds:
            yield f"`{group.label}` had {min(group.rounds)} of {group.run.rounds} rounds when it was stopped."
        for folder in (Folder(trial.path) for trial in group.trials):
            yield from (f"`{group.label}`: {remark}" for remark in remarks(folder))
            resumed = sorted(number for number in sessions(folder) if 1 < number <= max(group.rounds))
            if resumed:
                yield f"`{group.label}` was stopped and resumed before round {', '.join(map(str, resumed))}."
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


def _departures(panel: Panel) -> Iterator[str]:
    if not of_paper(panel):
        yield from (f"{departure}." for departure in panel.departures)
        return
    yield f"{count(max(len(group.trials) for group in panel.groups), 'seed')}; the paper averages {PAPER_SEEDS}."
    for departure in panel.departures:
        why = WHY.get(departure.partition(" ")[0])
        yield f"{departure}: {why}." if why else f"{departure}."


def of_paper(panel: Panel) -> bool:
    """Whether a paper has printed something of these runs."""
    return panel.recipe is not None and panel.recipe.of_paper


def races(panel: Panel) -> bool:
    """Whether the paper prints rounds to a target."""
    return any(p.rounds for g in panel.groups if (p := panel.published(g)) is not None)


def _paper_target(panel: Panel) -> float | None:
    """The paper's own: a share of the accuracy that it prints for FedAvg on this data, which its first table holds."""
    published = recipes.recipe("smofi_table1").published.get(f"smofi_table1/{panel.name.rpartition('/')[2]}/fedavg")
    return None if published is None or published.accuracy is None else TARGET_SHARE * published.accuracy / 100


def _ours(panel: Panel, group: Group) -> float | None:
    return None if group.best is None else 100 * group.best.mean


def _theirs(panel: Panel, group: Group) -> float | None:
    published = panel.published(group)
    return None if published is None else published.accuracy


def _gain(panel: Panel, group: Group, f: Callable[[Panel, Group], float | None]) -> float | None:
    """Points above the panel's FedAvg."""
    if panel.reference.label != "fedavg" or group is panel.reference:
        return None
    one, other = f(panel, group), f(panel, panel.reference)
    return None if one is None or other is None else one - other


def _best_round(group: Group) -> str:
    """The first round of the best accuracy, on average."""
    found = [t.rounds_to(t.best) or 0 for t in group.trials if t.best is not None]
    return f"{fmean(found):.4g}" if found else NONE


def _last(group: Group) -> str:
    """Mean and standard deviation over the last rounds of long runs, of all seeds together."""
    shown = _last_accuracies(group)
    return f"{fmean(shown):.2f} ± {stdev(shown):.2f}" if len(shown) > 1 else NONE


def _last_accuracies(group: Group) -> list[float]:
    long = [t.history for t in group.trials if len(t.history) >= LONG]
    return [100 * r["test_accuracy"] for history in long for r in history[-LAST:] if "test_accuracy" in r]


def _pace(group: Group) -> float | None:
    known = [found for trial in group.trials if (found := pace(Folder(trial.path))) is not None]
    return fmean(known) if known else None


def _hours_a_round(panel: Panel, group: Group) -> float | None:
    return None if group.simulated is None else group.simulated / HOUR / fmean(group.rounds)


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


def _percent(spread: Spread | None) -> str:
    if spread is None:
        return NONE
    return f"{100 * spread.mean:.2f}" + ("" if spread.std is None else f" ± {100 * spread.std:.2f}")


def _rounds(reach: Reach, group: Group) -> str:
    if reach.mean is None:
        return f">{min(group.rounds)}"
    return f"{reach.mean:.4g}" + ("" if reach.by_all else f" ({reach.reached}/{reach.seeds})")


def _hours(reach: Reach, group: Group) -> str:
    if reach.time is not None:
        return f"{reach.time / HOUR:.2f}"
    return NONE if group.simulated is None else f">{group.simulated / HOUR:.2f}"


def _goal(target: float | None) -> str:
    return "no target" if target is None else f"{100 * target:.2f} %"


def _signed(points: float | None) -> str:
    return NONE if points is None else f"{points:+.2f}"


def _factor(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}×"


def _range(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}–{max(values)}"
