"""Read the files in papers/: the numbers that papers print, their claims, and what they leave open."""

from collections.abc import Iterable, Iterator
from importlib import resources

import msgspec

from cutlayer import registry
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.recipes.recipe import TARGET_SHARE, Axis, Measure, Published, Race, Recipe, Statement

FILES = ("first", "smofi", "cut_layer", "hasfl", "hosfl")  # in the order in which recipes are listed


class PaperData(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a paper's file; unknown keys are errors."""


class PaperTable(PaperData):
    """A table as its paper prints it: a row for each method, with a cell for each panel."""

    panels: tuple[str, ...]
    cells: tuple[str, ...]  # what the values in a cell are: fields of `Published`, or rows of a table of traffic
    rows: dict[str, tuple[tuple[float | str, ...], ...]]

    def __post_init__(self) -> None:
        for label, row in self.rows.items():
            if [len(cell) for cell in row] != len(self.panels) * [len(self.cells)]:
                raise ValueError(f"row {label} must have {len(self.panels)} cells of {len(self.cells)} values")

    def by_run(self, recipe: str) -> dict[str, dict[str, float | str]]:
        """Return the cells by the names of the recipe's runs."""
        return {
            f"{recipe}/{panel}/{label}": dict(zip(self.cells, cell, strict=True))
            for label, row in self.rows.items()
            for panel, cell in zip(self.panels, row, strict=True)
        }


class StatedNumbers(PaperData):
    """A statement that one run is faster or more accurate than others, in each of these panels."""

    panels: tuple[str, ...]
    run: str
    than: tuple[str, ...]
    ids: dict[Measure, str]
    says: dict[Measure, str]

    def by_panel(self, recipe: str) -> Iterator[Statement]:
        """Yield a statement for each panel and measure."""
        for panel in (f"{recipe}/{panel}" for panel in self.panels):
            than = tuple(f"{panel}/{label}" for label in self.than)
            for measure, says in self.says.items():
                yield Statement(id=self.ids[measure], says=says, run=f"{panel}/{self.run}", than=than, measure=measure)


class RecipeFacts(PaperData):
    """What is known about one recipe; `Recipe` explains the fields."""

    title: str
    source: str = ""
    published: tuple[str, ...] = ()  # names of tables
    traffic: tuple[str, ...] = ()  # names of tables
    statements: tuple[StatedNumbers, ...] = ()
    claims: tuple[str, ...] = ()  # sentences, or names of shared texts
    notes: tuple[str, ...] = ()  # the same
    share: float = TARGET_SHARE
    targets: dict[str, float] = {}  # by panel
    race: Race = "rounds"
    axis: Axis = "rounds"


class Paper(PaperData):
    """A paper's file: its recipes, and the texts and tables that they name."""

    recipes: dict[str, RecipeFacts]
    shared: dict[str, tuple[str, ...]] = {}
    tables: dict[str, PaperTable] = {}

    def texts(self, some: Iterable[str]) -> Iterator[str]:
        """Yield the sentences; a word without spaces is the name of shared ones."""
        for text in some:
            if " " in text:
                yield text
            else:
                yield from self.texts(registry.find("shared text", self.shared, text))

    def cells(self, tables: Iterable[str], recipe: str) -> dict[str, dict[str, float | str]]:
        """Return the cells of these tables by run."""
        found = [registry.find("table", self.tables, table).by_run(recipe) for table in tables]
        return {run: cell for table in found for run, cell in table.items()}

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of this name without its runs."""
        entry = self.recipes[name]
        published, traffic = self.cells(entry.published, name), self.cells(entry.traffic, name)
        return Recipe(
            title=entry.title,
            runs=(),
            source=entry.source,
            published={run: msgspec.convert(cell, Published) for run, cell in published.items()},
            traffic={run: tuple(map(str, cell.values())) for run, cell in traffic.items()},
            statements=tuple(one for stated in entry.statements for one in stated.by_panel(name)),
            claims=tuple(self.texts(entry.claims)),
            notes=tuple(self.texts(entry.notes)),
            share=entry.share,
            targets={f"{name}/{panel}": target for panel, target in entry.targets.items()},
            race=entry.race,
            axis=entry.axis,
        )


def read(file: str, text: str) -> dict[str, Recipe]:
    """Return the recipes of a file by name, without their runs."""
    try:
        paper = msgspec.toml.decode(text, type=Paper)
        return {name: paper.recipe(name) for name in paper.recipes}
    except (msgspec.MsgspecError, UnknownNameError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _load() -> dict[str, Recipe]:
    folder = resources.files("cutlayer.recipes") / "papers"
    files = [folder / f"{name}.toml" for name in FILES]
    return {name: recipe for file in files for name, recipe in read(file.name, file.read_text("utf-8")).items()}


PUBLISHED = _load()
