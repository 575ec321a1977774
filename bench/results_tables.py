"""What the page of results says of one panel: its tables, its findings, and where it differs from the paper's.

Runs are compared by means over windows of rounds and over two seeds or more that both have; `curves` has nothing else.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean
from typing import NamedTuple

from curves import (
    FEWEST_SEEDS,
    SMOOTHED,
    Axis,
    Curve,
    Level,
    Window,
    arrival,
    common_windows,
    gain,
    length,
    level,
    mean_curve,
    pairs,
    smoothed,
    speed_up,
)
from evidence import finished
from headline import NONE, OPTIONS, brief, count, flat, pace, remarks
from packing import SESSIONS

from cutlayer import recipes
from cutlayer.recipes.compose import label
from cutlayer.recipes.recipe import TARGET_SHARE
from cutlayer.results.report import Panel
from cutlayer.results.trials import Group
from cutlayer.runs.config import Run, literal
from cutlayer.runs.folder import Folder, read_lines
from cutlayer.runs.stopping import Record

HOUR = 3600.0
GIB = 2.0**30
SETUP = ("model", "clients", "per_round", "partition", "cut", "augment", "batching", "optimiser", "server_optimiser")
PAPER_SEEDS = 3
LENGTH = ("rounds ", "until_samples ")  # how departures begin that change no round
SMOFI = "smofi"  # what times are divided by: hours of another device pool compare only as ratios
SHORTER = (
    "Ours are the first rounds of the recipe's runs, for want of time on a machine; schedules are those of the whole "
    "run."
)
WHY = {  # by the key that departs from a paper's
    "precision": "speed; the paper names none, and fp32 is the recipe's",
    "model.init": "older records have He's initial weights; they are compared with no run of the others, and will be "
    "replaced",
}


class Column(NamedTuple):
    head: str
    cell: Callable[[Group], str]


def tables(panel: Panel) -> str:
    """Accuracies, differences, costs and, where the paper races its methods, rounds and time to its target."""
    compared = [group for group in panel.groups if _gains_of(panel, group, base(panel))]
    found = [
        _table(panel.groups, list(_accuracies(panel))),
        _table(compared, list(_differences(panel))) if compared else "",
        _table(panel.groups, list(_race(panel))) if races(panel) else "",
        _table(panel.groups, list(_costs(panel))),
    ]
    return "\n\n".join(table for table in found if table)


def _table(groups: Sequence[Group], columns: list[Column]) -> str:
    """As Markdown; columns in which no run has anything are left out."""
    shown = [Column("run", lambda g: f"`{g.label}`"), *columns]
    rows = [[column.cell(group) for column in shown] for group in groups]
    told = [i for i, cells in enumerate(zip(*rows, strict=True)) if any(cell != NONE for cell in cells)]
    lines = [[shown[i].head for i in told], ["---"] * len(told), *([row[i] for i in told] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _accuracies(panel: Panel) -> Iterator[Column]:
    yield Column("seeds", lambda g: ", ".join(str(trial.run.seed) for trial in g.trials))
    yield Column(axis(panel), lambda g: lengths(panel, [g]))
    for window in _windows(panel):
        yield Column(str(window), lambda g, window=window: _level(level(g, window), len(g.trials)))
    yield Column("paper's best % (± over seeds)", lambda g: _printed(panel, g))


def _differences(panel: Panel) -> Iterator[Column]:
    """Points above the base, window by window, of the seeds that both have."""
    first = base(panel)
    yield Column(f"points above {first.label}, seeds", lambda g: ", ".join(_shared_seeds(g, first)))
    for window in _windows(panel):
        yield Column(
            str(window), lambda g, window=window: _difference(gain(g, first, window), len(_shared_seeds(g, first)))
        )
    yield Column("paper's, by best rounds", lambda g: _signed(_paper_gain(panel, g, first)))


def _shared_seeds(group: Group, other: Group) -> list[str]:
    return [str(ours.run.seed) for ours, _ in pairs(group, other)]


def _difference(points: Level | None, seeds: int) -> str:
    if points is None:
        return NONE
    fewer = "" if points.seeds == seeds else f", {count(points.seeds, 'seed')}"
    return f"{_signed(points.over_seeds.mean)} ± {points.over_seeds.std:.2f}{fewer}"


def _costs(panel: Panel) -> Iterator[Column]:
    yield Column("traffic, GiB a round", lambda g: _size((g.bytes("up") + g.bytes("down")) / fmean(g.rounds)))
    yield Column("wall s a round (mean)", lambda g: f"{g.seconds / fmean(g.rounds):.2f}" if g.seconds else NONE)
    yield Column("samples a s (median)", lambda g: brief(_pace(g)))


def _race(panel: Panel) -> Iterator[Column]:
    target = paper_target(panel)
    goal = f"{target:.2f} %"
    by_ten = f"by the mean of {SMOOTHED} rounds"
    yield Column(f"R to {goal}, mean curve", lambda g: _rounds(g, _mean_curve(g), target))
    yield Column(f"R, {by_ten}", lambda g: _rounds(g, smoothed(_mean_curve(g)), target))
    yield Column("paper's R", lambda g: (p.rounds if (p := panel.published(g)) else "") or NONE)
    yield Column(f"speed-up, {by_ten}", lambda g: _factor(_speed_up(panel, g, target)))
    yield Column("paper's speed-up", lambda g: _factor(p.speed_up if (p := panel.published(g)) else None))
    if panel.timed:
        yield Column(f"simulated h to {goal}, {by_ten}", lambda g: _hours(g, target))
        yield Column("paper's h, on its devices", lambda g: (p.hours if (p := panel.published(g)) else "") or NONE)
        yield Column("h a round ÷ smofi's", lambda g: _factor(_hours_ratio(panel, g)))
        yield Column("paper's h a round ÷ smofi's", lambda g: _factor(_paper_hours_ratio(panel, g)))


def axis(panel: Panel) -> Axis:
    """What runs of the panel are measured by."""
    return "samples" if panel.axis == "samples" else "rounds"


def _windows(panel: Panel) -> list[Window]:
    return common_windows(panel.groups, axis(panel))


def lengths(panel: Panel, groups: Sequence[Group]) -> str:
    """How far runs have come, and of how many rounds."""
    done = span([length(trial, axis(panel)) for group in groups for trial in group.trials])
    return done if axis(panel) == "samples" else f"{done} of {span([_original(panel, g).rounds for g in groups])}"


def _original(panel: Panel, group: Group) -> Run:
    return panel.original(group) or group.run


def base(panel: Panel) -> Group:
    """What runs are compared with: FedAvg with the recipe's initial weights, or else the first run."""
    fedavg = [group for group in panel.groups if word(group) == "fedavg"]
    return next((g for g in fedavg if not other_weights(panel, g)), fedavg[0] if fedavg else panel.groups[0])


def word(group: Group) -> str:
    """What a paper calls these runs."""
    return label(group.run)


def other_weights(panel: Panel, group: Group) -> bool:
    """Whether runs began with other initial weights than the recipe's."""
    return any(departure.startswith("model.init ") for departure in panel.departures_of(group))


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
            name = recipes.present(kept.name)
            names.setdefault(_flags(kept, name), []).append(f"{name}:{kept.rounds}")
    return [" \\\n    ".join([f"$ python bench/headline.py {flags}", *words]) for flags, words in names.items()]


def _flags(run: Run, name: str) -> str:
    own = f"--runs runs --device {run.device} --engine {run.engine} --precision {run.precision} --seed {run.seed}"
    original = next(one for one in recipes.runs(name.partition("/")[0]) if one.name == name)
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
    names = [(g, recipes.present(Folder(g.trials[0].path).run().name)) for g in panel.groups]
    others = {g.label: name for g, name in names if name != g.run.name}
    return "".join(f" `{label}` is the run {name}, whose content is the same." for label, name in others.items())


def findings(panel: Panel) -> Iterator[str]:
    """What the tables show, in words: only what two seeds or more say, by means over a window of rounds."""
    yield from _gains(panel)
    yield from _between_cuts(panel)
    own = [group.label for group in panel.groups if group is not base(panel) and _against(panel, group) is group]
    if own:
        yield f"Speed-ups of {' and '.join(own)} are over themselves: the paper adds other methods to them."
    if all(len(pairs(*two)) < FEWEST_SEEDS for two in combinations(panel.groups, 2)):
        yield "No two runs have two seeds in common yet: the numbers show how each run went, and nothing is concluded."


def _gains(panel: Panel) -> Iterator[str]:
    """How far runs are from the one that they are compared with."""
    for group in panel.groups:
        found = _gains_of(panel, group, base(panel))
        if found and "-cut" not in word(base(panel)):  # cuts are compared among themselves
            yield _said(f"{group.label} above {base(panel).label}", found, _paper_gain(panel, group, base(panel)))


def _said(what: str, found: Mapping[Window, Level], theirs: float | None) -> str:
    """The last window that two seeds have, and in which ones the seeds tell a difference from 0."""
    window, points = list(found.items())[-1]
    ours = f"{_difference(points, points.seeds)} points over {points.seeds} seeds"
    told = [str(window) for window, points in found.items() if points.is_significant(len(found))]
    among = f"{count(len(found), 'window')} compared (95 % over all, Student's t)"
    sure = f"significant in {', '.join(told)}, of {among}" if told else f"significant in none of {among}"
    paper = "" if theirs is None else f"; in the paper, by best rounds, {_signed(theirs)}"
    return f"{what} in {window}: {ours}; {sure}{paper}."


def _between_cuts(panel: Panel) -> Iterator[str]:
    """How far the last cut of a method is from its first."""
    cuts: dict[str, list[Group]] = {}
    for group in panel.groups:
        method, dash, _ = group.label.partition("-cut")
        if dash:
            cuts.setdefault(method, []).append(group)
    for method, (first, *others) in cuts.items():
        last = others[-1] if others else first
        found = _gains_of(panel, last, first)
        if found:
            start, end = (group.label.rpartition("-")[2] for group in (first, last))
            yield _said(f"{method} from {start} to {end}", found, _paper_gain(panel, last, first))


def differences(panel: Panel) -> Iterator[str]:
    """Seeds, lengths, settings, and what the recipe notes."""
    yield from _departures(panel)
    for group in panel.groups:
        for trial in group.trials:
            yield from (f"{_titled(group, trial.run.seed)} {line}" for line in _history(Folder(trial.path)))
        if group.stopped:
            times = count(group.stopped, "time")
            yield f"`{group.label}`: clients stood still {times}, as their gradients were not finite."
    yield from panel.recipe.notes
    names = [run.name for run in panel.recipe.runs if run.name.rpartition("/")[0] == panel.name]
    missing = [name.rpartition("/")[2] for name in names if name not in {g.run.name for g in panel.groups}]
    if missing:
        yield f"Not run: {', '.join(missing)}."


def _titled(group: Group, seed: int) -> str:
    return f"`{group.label}`" if len(group.trials) == 1 else f"`{group.label}`, seed {seed},"


def _history(folder: Folder) -> Iterator[str]:
    """What became of a run: an early end, remarks, and where it was split."""
    run, done = folder.run(), len(folder.history())
    if not finished(folder, run):
        yield f"had {done} of {run.rounds} rounds when it was stopped."
    yield from (f"has a remark: {remark}" for remark in remarks(folder))
    lines = read_lines(folder.path / SESSIONS)
    resumed = [
        f"{now['round']}{_elsewhere(before, now)}" for before, now in pairwise(lines) if 1 < now["round"] <= done
    ]
    if resumed:
        yield f"was stopped and resumed before round {', '.join(resumed)}."


def _elsewhere(before: Record, now: Record) -> str:
    """The machine of a session, where it is another one than that of the session before."""
    then, here = ((line.get("gpu") or line.get("machine"), line.get("torch")) for line in (before, now))
    return "" if then == here else f" (on {here[0]}, torch {here[1]})"


def _departures(panel: Panel) -> Iterator[str]:
    if not of_paper(panel):
        yield from (f"{departure}." for departure in panel.departures)
        return
    fewest = min(len(group.trials) for group in panel.groups)
    if fewest < PAPER_SEEDS:
        yield f"{span([len(group.trials) for group in panel.groups])} of {PAPER_SEEDS} seeds."
    if any(length(trial) < _original(panel, g).rounds for g in panel.groups for trial in g.trials):
        yield SHORTER
    for departure in panel.departures:
        if departure.startswith("rounds "):
            continue  # each seed has its own, which the table shows
        owners = [group.label for group in panel.groups if departure in panel.departures_of(group)]
        who = "" if len(owners) == len(panel.groups) else f" ({', '.join(f'`{label}`' for label in owners)})"
        why = WHY.get(departure.partition(" ")[0])
        yield f"{departure}{who}: {why}." if why else f"{departure}{who}."


def of_paper(panel: Panel) -> bool:
    """Whether a paper has printed something of these runs."""
    return panel.recipe.of_paper


def races(panel: Panel) -> bool:
    """Whether the paper prints rounds to a target."""
    return any(p.rounds for g in panel.groups if (p := panel.published(g)) is not None)


def comparable(panel: Panel, one: Group, other: Group) -> bool:
    """Whether two runs depart from their recipe in the same way, but for their length."""
    ours, theirs = (
        {line for line in panel.departures_of(group) if not line.startswith(LENGTH)} for group in (one, other)
    )
    return ours == theirs


def paper_target(panel: Panel) -> float:
    """The paper's own: a share of the accuracy that it prints for FedAvg on this data, which its first table holds."""
    published = recipes.recipe("smofi_table1").published[f"smofi_table1/{panel.name.rpartition('/')[2]}/fedavg"]
    assert published.accuracy is not None
    return TARGET_SHARE * published.accuracy


def _gains_of(panel: Panel, group: Group, other: Group) -> dict[Window, Level]:
    """Points above another run by window, where two seeds have both."""
    if group is other or not comparable(panel, group, other):
        return {}
    return {window: found for window in _windows(panel) if (found := gain(group, other, window)) is not None}


def _against(panel: Panel, group: Group) -> Group | None:
    """The run that the paper measures this one's speed against."""
    name = panel.recipe.against.get(group.run.name)
    named = [g for g in panel.groups if g.run.name == name] if name else [base(panel)]
    return next((g for g in named if comparable(panel, group, g)), None)


def _speed_up(panel: Panel, group: Group, target: float) -> float | None:
    other = _against(panel, group)
    return None if other is None else speed_up(group, other, target)


def _published(panel: Panel, group: Group) -> float | None:
    published = panel.published(group)
    return None if published is None else published.accuracy


def _paper_gain(panel: Panel, group: Group, other: Group) -> float | None:
    ours, theirs = _published(panel, group), _published(panel, other)
    return None if group is other or ours is None or theirs is None else ours - theirs


def _pace(group: Group) -> float | None:
    known = [found for trial in group.trials if (found := pace(Folder(trial.path))) is not None]
    return fmean(known) if known else None


def _smofi(panel: Panel) -> Group | None:
    return next((group for group in panel.groups if word(group) == SMOFI), None)


def _hours_ratio(panel: Panel, group: Group) -> float | None:
    """Simulated time to SMoFi's, in the rounds that both have, over the seeds that both have, two at least."""
    smofi = _smofi(panel)
    both = [] if smofi is None else [(a.clock, b.clock) for a, b in pairs(group, smofi) if a.clock and b.clock]
    if len(both) < FEWEST_SEEDS:
        return None
    return fmean(ours[end] / theirs[end] for ours, theirs in both if (end := min(max(ours), max(theirs))))


def _paper_hours_ratio(panel: Panel, group: Group) -> float | None:
    smofi = _smofi(panel)
    ours, theirs = (None if g is None else _paper_hours_a_round(panel, g) for g in (group, smofi))
    return None if ours is None or theirs is None else ours / theirs


def _paper_hours_a_round(panel: Panel, group: Group) -> float | None:
    """What the paper prints for both, bounds too: they are of the same whole run."""
    published = panel.published(group)
    if published is None or not (published.hours and published.rounds):
        return None
    return float(published.hours.lstrip(">")) / float(published.rounds.lstrip(">"))


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


def _mean_curve(group: Group) -> Curve:
    return mean_curve(group.trials, FEWEST_SEEDS)


def _rounds(group: Group, points: Curve, target: float) -> str:
    """The first round that reaches the target, and how many seeds are so far if not all."""
    if not points:
        return NONE
    number = arrival(points, target)
    if number is None:
        return f">{max(points)}"
    seeds = sum(len(trial.history) >= number for trial in group.trials)
    return str(number) if seeds == len(group.trials) else f"{number} ({seeds} seeds)"


def _hours(group: Group, target: float) -> str:
    """Simulated hours until the smoothed curve reaches the target, the mean over the seeds that have come so far."""
    points = smoothed(_mean_curve(group))
    if group.simulated is None or not points:
        return NONE
    number = arrival(points, target)
    until = max(points) if number is None else number
    hours = fmean(trial.clock[until] for trial in group.trials if until in trial.clock) / HOUR
    return f"{'>' if number is None else ''}{hours:.2f}"


def _size(number: float) -> str:
    """Bytes in GiB, with two digits at least."""
    return f"{number / GIB:.2f}" if number >= GIB / 10 else f"{number / GIB:.2g}"


def _signed(points: float | None) -> str:
    return NONE if points is None else f"{points:+.2f}"


def _factor(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}×"


def span(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(set(values)) == 1 else f"{min(values):,}–{max(values):,}"
