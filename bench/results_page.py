"""Write docs/results.md and its curves: our runs beside the published numbers, all from the recorded metrics.

    python bench/results_page.py

reads the runs under bench/results/headline, where what bench/headline.py collects is unpacked. No number of ours
stands in this file.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import evidence
from evidence import PARTIAL, QUEUE, RESULTS
from headline import Parser, complain, count
from results_tables import (
    differences,
    findings,
    lengths,
    of_paper,
    other_weights,
    paper_target,
    races,
    span,
    surroundings,
    tables,
    word,
)

from cutlayer import recipes
from cutlayer.errors import ConfigError, CutlayerError
from cutlayer.results import figures, report
from cutlayer.results.report import Comparison, Panel
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder, write, writing
from cutlayer.runs.stopping import Record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
INTRODUCTION = """\
# Results

Runs of our recipes, and what is known so far. `python bench/results_page.py` writes this page from metrics files, which
`cutlayer compare` reads too; bench/evidence.toml lists what is still to be trained.

Accuracies are of the test set, after a round, in per cent. A column of rounds, such as 51–100, has the mean over
these rounds and over the seeds, ± the standard deviation over seeds; in parentheses is the standard deviation of the
rounds of one seed, which in the first windows is mostly the trend. Rows may have different seeds, so do not subtract
them: differences are seed by seed, in a table of their own, where two seeds or more have both runs. Nothing is read off
a best round, and a difference over two or three seeds may be chance unless it is many times its ±. In the pictures,
lines are means over seeds, and for runs of 50 rounds or more over the nine rounds around each; thin lines are single
rounds and bands the standard deviation over seeds, and a line ends with its shortest seed. Wall seconds are means over
all rounds, including those that set up and compile the engine; samples a second are of the median round. The commands
look for data sets in the folder of CUTLAYER_DATA.
"""
PAPERS = """\
Beside our numbers are those that the papers print, which are best rounds of the test set. R is the first round in which
the mean curve over two seeds or more, or its mean over that round and the nine before, reaches the paper's target. A
speed-up is a ratio of such rounds over the seeds that both runs have. What each recipe chooses where its
paper is silent is in [recipes.md](recipes.md).
"""
BESIDE_PAPER = "Where ours differs from the paper's, and why:"
ALONE = "About these runs:"


class AlsoOf(Folder):
    """The folder of a run that has the content of another: it serves as that one's, to its length, with its clock."""

    def __init__(self, path: Path, asked: Run) -> None:
        super().__init__(path)
        self.asked = asked

    def recorded(self) -> Run:
        return replace(super().recorded(), name=self.asked.name, devices=self.asked.devices)

    def history(self) -> list[Record]:
        told = super().history()[: self.asked.rounds]
        if self.asked.devices is not None:
            return told
        return [{k: v for k, v in record.items() if k != "simulated_seconds"} for record in told]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the runs; %(default)s by default")
    parser.add_argument(
        "--queue", type=Path, default=QUEUE, help="the list of what is to be trained; %(default)s by default"
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="the file to write, by default %(default)s; curves go to images/ there"
    )
    try:
        args = parser.parse_args(arguments)
        written(args.results, args.page, args.queue)
    except CutlayerError as error:
        return complain(error)
    return 0


def written(results: Path, path: Path, queue: Path) -> None:
    """Write the page and its curves, and say so."""
    runs = listed(queue)
    found = panels(results, runs)
    pictures = [path.parent / picture(panel) for panel in found]
    with writing("the page", path.parent, "choose another --page"):
        pictures[0].parent.mkdir(parents=True, exist_ok=True)
    write(path, page(found, runs), "choose another --page")
    for panel, file in zip(found, pictures, strict=True):
        # A target of ours would be a share of a best round.
        target = paper_target(panel) / 100 if races(panel) else None
        figures.draw(Comparison((replace(panel, target=target),)), file)
    print(f"wrote {path}: {count(len(found), 'table')}; curves in {pictures[0].parent}")


def listed(queue: Path) -> tuple[Run, ...]:
    """The runs of the list of evidence."""
    return tuple(evidence.wanted(evidence.read(queue), {}, str(queue)))


def panels(results: Path, listed: Sequence[Run] = ()) -> tuple[Panel, ...]:
    """The panels of all runs and of the listed ones that they serve, in the order of the recipes.

    Runs that no recipe has are left out, which is told.
    """
    whole = [folder for folder in report.find([results]) if not folder.path.name.endswith(PARTIAL)]
    names = {folder: recipes.present(folder.recorded().name) for folder in whole}
    asked = {_first(name) for name in (*names.values(), *(run.name for run in listed))}
    experiments = [experiment for experiment in recipes.RECIPES if experiment in asked]
    originals = {run.name: run for experiment in experiments for run in recipes.runs(experiment)}
    kept = {folder: originals[name] for folder, name in names.items() if name in originals}
    strangers = sorted(set(names.values()) - set(originals))
    if strangers:
        print(f"skipped, as no recipe has them: {', '.join(strangers)}")
    if not kept:
        raise ConfigError(f"none of the runs under {results} is of a recipe; bench/headline.py trains such runs")
    found = [marked(panel) for panel in report.compare([*kept, *borrowed(kept, originals.values())]).panels]
    return tuple(sorted(found, key=lambda panel: experiments.index(_first(panel.name))))


def marked(panel: Panel) -> Panel:
    """The panel with all seeds, runs called by the last word of their names, and a mark at other initial weights."""
    labels = [
        word(g) + (f" (init {g.run.model.options['init']})" if other_weights(panel, g) else "") for g in panel.whole
    ]
    twice = {label for label in labels if labels.count(label) > 1}
    told = [
        f"{label}, {g.run.engine}, {g.run.precision}" if label in twice else label
        for label, g in zip(labels, panel.whole, strict=True)
    ]
    groups = tuple(replace(group, label=label) for group, label in zip(panel.whole, told, strict=True))
    return replace(panel, groups=groups, reference=groups[panel.groups.index(panel.reference)])


def _first(name: str) -> str:
    return name.partition("/")[0]


def borrowed(kept: Mapping[Folder, Run], runs: Iterable[Run]) -> list[AlsoOf]:
    """Folders that serve a second table: of each run that was not trained itself, but under another name."""
    trained = {original.name for original in kept.values()}
    return [
        AlsoOf(folder.path, run)
        for run in runs
        for folder, original in kept.items()
        if run.name not in trained and evidence.serves(original, run)
    ]


def picture(panel: Panel) -> str:
    return f"images/results-{panel.name.replace('/', '-')}.png"


def page(found: Sequence[Panel], listed: Sequence[Run] = ()) -> str:
    """The whole page; `listed` are the runs that are to be trained."""
    papers = [PAPERS] if any(of_paper(panel) for panel in found) else []
    return "\n".join([INTRODUCTION, *papers, state(found, listed), *(section(panel) for panel in found)])


def state(found: Sequence[Panel], listed: Sequence[Run]) -> str:
    """What there is of every table."""
    rows = ["| table | runs | seeds of each | rounds or samples |", "| --- | --- | --- | --- |"]
    for panel in found:
        of = [run for run in panel.recipe.runs if run.name.rpartition("/")[0] == panel.name]
        old = sum(other_weights(panel, group) for group in panel.groups)
        told = f"{len(panel.groups)} of {len(of)}" + (f", {old} with old initial weights" if old else "")
        seeds = span([len(group.trials) for group in panel.groups])
        rows.append(f"| {panel.name} | {told} | {seeds} | {lengths(panel, panel.groups)} |")
    begun = {panel.name for panel in found}
    later = dict.fromkeys(name for run in listed if (name := run.name.rpartition("/")[0]) not in begun)
    rows += [f"| {name} | none yet | – | – |" for name in later]
    return "\n".join(["## State", "", *rows, ""])


def section(panel: Panel) -> str:
    """A table, how it was made, what it shows and where it differs from the paper's."""
    recipe = recipes.recipe(_first(panel.name))
    says = [f"- The paper says: {claim}" for claim in recipe.claims]
    remarks = [f"- {line}" for line in differences(panel)]
    parts = (
        f"## {recipe.source}: {panel.name}" if recipe.source else f"## {panel.name}",
        surroundings(panel),
        tables(panel),
        f"![Learning curves of {panel.name}]({picture(panel)})",
        "\n".join([*(f"- {line}" for line in findings(panel)), *says]),
        (BESIDE_PAPER if of_paper(panel) else ALONE) if remarks else "",
        "\n".join(remarks),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
