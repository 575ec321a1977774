"""Write docs/results.md and its curves: our runs beside the published numbers, all from the recorded metrics.

    python bench/results_page.py

reads the runs under bench/results/headline, which bench/headline.py collects. No number of ours stands in this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from results_tables import differences, findings, surroundings, tables

from cutlayer import figures, recipes, report
from cutlayer.config import Run
from cutlayer.folder import Folder
from cutlayer.report import Comparison, Panel
from cutlayer.training import Record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "headline"
PAGE = ROOT / "docs" / "results.md"
INTRODUCTION = """\
# Results

Runs of our recipes on real data beside what the papers print. `python bench/results_page.py` writes this page from the
metrics files under `bench/results/headline/`; `cutlayer compare bench/results/headline` reads them too. Accuracies are
of the test set, after a round, in per cent; "best" is the best round, as in the papers. R is the first round that
reaches a target. What each recipe chooses where its paper is silent is in [recipes.md](recipes.md).
"""


@dataclass(frozen=True)
class AlsoOf(Folder):
    """The folder of a run that is a run of another table as well, but for its devices, which only tell the time."""

    name: str

    def run(self) -> Run:
        return replace(super().run(), name=self.name, devices=None)

    def history(self) -> list[Record]:
        return [{k: v for k, v in record.items() if k != "simulated_seconds"} for record in super().history()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="the file to write; curves go to images/ beside it")
    args = parser.parse_args()
    found = panels(args.results)
    args.page.write_text(page(found), encoding="utf-8")
    for panel in found:
        figures.draw(Comparison((panel,)), args.page.parent / picture(panel))
    print(f"{args.page}: {len(found)} tables")


def panels(results: Path) -> tuple[Panel, ...]:
    """The panels of all runs, in the order of the recipes."""
    folders = report.find([results])
    found = report.compare([*folders, *borrowed(folders)]).panels
    order = list(recipes.RECIPES)
    return tuple(sorted(found, key=lambda panel: order.index(panel.name.partition("/")[0])))


def borrowed(folders: Sequence[Folder]) -> list[AlsoOf]:
    """Folders that serve a second table: of each run that was not trained itself but for the devices of another."""
    kept = {folder.run().name: folder for folder in folders}
    experiments = dict.fromkeys(name.partition("/")[0] for name in kept)
    originals = {run.name: run for experiment in experiments for run in recipes.runs(experiment)}
    return [
        AlsoOf(kept[name].path, run.name)
        for run in originals.values()
        for name in kept
        if run.name not in kept and run.devices is None and alike(originals[name], run)
    ]


def alike(timed: Run, run: Run) -> bool:
    return timed.devices is not None and replace(timed, name=run.name, devices=None) == run


def picture(panel: Panel) -> str:
    return f"images/results-{panel.name.replace('/', '-')}.png"


def page(found: Sequence[Panel]) -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(section(panel) for panel in found)])


def section(panel: Panel) -> str:
    """A table, how it was made, what it shows and where it differs from the paper's."""
    recipe = recipes.recipe(panel.name.partition("/")[0])
    says = [f"- The paper says: {claim}" for claim in recipe.claims]
    parts = (
        f"## {recipe.source}: {panel.name}",
        surroundings(panel),
        tables(panel),
        f"![Learning curves of {panel.name}]({picture(panel)})",
        "\n".join([*(f"- {line}" for line in findings(panel)), *says]),
        "Where ours differs from the paper's, and why:",
        "\n".join(f"- {line}" for line in differences(panel)),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    main()
