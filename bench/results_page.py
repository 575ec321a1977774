"""Write docs/results.md and its curves: our runs beside the published numbers, all from the recorded metrics.

    python bench/results_page.py

reads the runs under bench/results/headline, where what bench/headline.py collects is unpacked. No number of ours
stands in this file.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headline import Parser, complain, count
from results_tables import differences, findings, of_paper, races, surroundings, tables

from cutlayer import figures, recipes, report
from cutlayer.config import Run
from cutlayer.errors import ConfigError, CutlayerError
from cutlayer.folder import Folder, write, writing
from cutlayer.report import Comparison, Panel
from cutlayer.training import Record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "headline"
PAGE = ROOT / "docs" / "results.md"
INTRODUCTION = """\
# Results

Runs of our recipes. `python bench/results_page.py` writes this page from metrics files, which `cutlayer compare` reads
too; a run that serves two tables is kept for one of them. Accuracies are of the test set, after a round, in per cent;
"best" is the best round of that set, and so too high. The mean and the standard deviation of the last ten rounds of
long runs show how far single rounds scatter. Wall seconds are means over all rounds, those that set up and compile the
engine included; samples a second are of the median round. The commands look for data sets in the folder of
CUTLAYER_DATA.
"""
PAPERS = """\
Beside our numbers are those that the papers print, whose best rounds are of the test set as well. R is the first round
that reaches a target. What each recipe chooses where its paper is silent is in [recipes.md](recipes.md).
"""
BESIDE_PAPER = "Where ours differs from the paper's, and why:"
ALONE = "About these runs:"


@dataclass(frozen=True)
class AlsoOf(Folder):
    """The folder of a run that is a run of another table as well, but for its devices, which only tell the time."""

    name: str

    def run(self) -> Run:
        return replace(super().run(), name=self.name, devices=None)

    def history(self) -> list[Record]:
        return [{k: v for k, v in record.items() if k != "simulated_seconds"} for record in super().history()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the runs; %(default)s by default")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="the file to write, by default %(default)s; curves go to images/ there"
    )
    try:
        args = parser.parse_args(arguments)
        written(args.results, args.page)
    except CutlayerError as error:
        return complain(error)
    return 0


def written(results: Path, path: Path) -> None:
    """Write the page and its curves, and say so."""
    found = panels(results)
    pictures = [path.parent / picture(panel) for panel in found]
    with writing("the page", path.parent, "choose another --page"):
        pictures[0].parent.mkdir(parents=True, exist_ok=True)
    write(path, page(found), "choose another --page")
    for panel, file in zip(found, pictures, strict=True):
        # Where nobody is raced, the page has no word of a target.
        figures.draw(Comparison((panel if races(panel) else replace(panel, target=None),)), file)
    print(f"wrote {path}: {count(len(found), 'table')}; curves in {pictures[0].parent}")


def panels(results: Path) -> tuple[Panel, ...]:
    """The panels of all runs, in the order of the recipes; runs that no recipe has are left out, and told of."""
    names = {folder: folder.run().name for folder in report.find([results])}
    experiments = [experiment for experiment in recipes.RECIPES if any(_first(n) == experiment for n in names.values())]
    originals = {run.name: run for experiment in experiments for run in recipes.runs(experiment)}
    kept = {folder: originals[name] for folder, name in names.items() if name in originals}
    strangers = sorted(set(names.values()) - set(originals))
    if strangers:
        print(f"skipped, as no recipe has them: {', '.join(strangers)}")
    if not kept:
        raise ConfigError(f"none of the runs under {results} is of a recipe; bench/headline.py trains such runs")
    found = report.compare([*kept, *borrowed(kept, originals.values())]).panels
    return tuple(sorted(found, key=lambda panel: experiments.index(_first(panel.name))))


def _first(name: str) -> str:
    return name.partition("/")[0]


def borrowed(kept: Mapping[Folder, Run], runs: Iterable[Run]) -> list[AlsoOf]:
    """Folders that serve a second table: of each run that was not trained itself but for the devices of another."""
    trained = {original.name for original in kept.values()}
    return [
        AlsoOf(folder.path, run.name)
        for run in runs
        for folder, original in kept.items()
        if run.name not in trained and run.devices is None and alike(original, run)
    ]


def alike(timed: Run, run: Run) -> bool:
    return timed.devices is not None and replace(timed, name=run.name, devices=None) == run


def picture(panel: Panel) -> str:
    return f"images/results-{panel.name.replace('/', '-')}.png"


def page(found: Sequence[Panel]) -> str:
    """The whole page."""
    papers = [PAPERS] if any(of_paper(panel) for panel in found) else []
    return "\n".join([INTRODUCTION, *papers, *(section(panel) for panel in found)])


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
