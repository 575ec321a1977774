"""From the words of a command line to runs, and through them one after another."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from cutlayer import config, recipes, registry
from cutlayer.cli.progress import Watcher
from cutlayer.config import Run
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.folder import Folder
from cutlayer.methods import METHODS
from cutlayer.run import execute
from cutlayer.training import Record, Training


class Interrupted(Exception):
    """The user stopped a run; what it had committed is kept."""

    def __init__(self, run: Run, folder: Folder) -> None:
        self.run, self.folder = run, folder
        self.saved = max(folder.store.rounds(), default=0)
        super().__init__(f"{folder.path}: stopped")


def named(what: str) -> tuple[Run, ...]:
    """The runs of a recipe or of a TOML file."""
    path = Path(what)
    if what in recipes.RECIPES or not (path.suffix == ".toml" or path.is_file()):
        return recipes.runs(what)
    changes = config.read(path)
    name = changes.setdefault("name", path.stem)
    if "recipe" not in changes:
        return (config.changed(Run(), changes, what),)
    recipe = changes.pop("recipe")
    if not isinstance(recipe, str):
        raise ConfigError(f'{what}: recipe = {recipe!r} is no name; write for example recipe = "digits"')
    runs = registry.find("recipe", recipes.RECIPES, recipe, what)()
    return tuple(config.changed(run, {**changes, "name": _moved(run.name, name)}, what) for run in runs)


def chosen(runs: Sequence[Run], only: Sequence[str], what: str) -> tuple[Run, ...]:
    """The runs of these names: the last word of a run's name, or its method."""
    for name in only:
        if not any(name in _words(run) for run in runs):
            known = {PurePosixPath(run.name).name for run in runs}
            raise UnknownNameError("run", name, known, f"{what} (--only)")
    return tuple(run for run in runs if not only or any(name in _words(run) for name in only))


def parsed(settings: Iterable[str]) -> dict[str, Any]:
    """Settings such as optimiser.lr=0.1 as the tables that they would be in TOML."""
    tables: dict[str, Any] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        words = [word.strip() for word in key.split(".")]
        if not sign or not all(words):
            raise ConfigError(f"--set {setting!r} is not key=value; write for example --set optimiser.lr=0.1")
        table = tables
        for word in words[:-1]:
            inner = table.get(word, {})
            table[word] = inner if isinstance(inner, dict) else {"name": inner}  # optimiser=adam, then optimiser.lr=0.1
            table = table[word]
        last = words[-1]
        if isinstance(table.get(last), dict):
            raise ConfigError(f"--set {setting!r} would replace what another --set says about {key}; give it first")
        table[last] = _value(text)
    return tables


def named_by_method(run: Run) -> Run:
    """A run that is named after its method stays so when the method is changed."""
    path = PurePosixPath(run.name)
    return replace(run, name=str(path.with_name(run.method.name))) if path.name in METHODS else run


def refuse_twins(runs: Sequence[Run]) -> None:
    """Runs that are the same but for their name would only burn time."""
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if replace(run, name=other.name) == other:
                raise ConfigError(
                    f"with these changes {other.name} and {run.name} are the same run; keep one of them with --only"
                )


def folder_of(run: Run, out: Path) -> Folder:
    return Folder(out / run.name / f"seed-{run.seed}")


def execute_all(
    runs: Sequence[Run],
    out: Path,
    watcher: Watcher,
    *,
    root: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> list[Folder]:
    """Train the runs one after another; all folders are looked at before the first run starts."""
    folders = [folder_of(run, out) for run in runs]
    if not (resume or overwrite):
        for folder in folders:
            folder.refuse_if_taken()
    several_seeds = len({run.seed for run in runs}) > 1
    for run, folder in zip(runs, folders, strict=True):
        title = f"{run.name} seed {run.seed}" if several_seeds else run.name

        def begin(training: Training, title: str = title, total: int = run.rounds) -> None:
            watcher.begin(title, training.state.round, total)

        def tell(_: Training, record: Record) -> None:
            watcher.round(record)

        try:
            execute(run, folder, root=root, resume=resume, overwrite=overwrite, on_start=begin, on_round=tell)
        except KeyboardInterrupt:
            raise Interrupted(run, folder) from None
    return folders


def _moved(run_name: str, name: Any) -> Any:
    """A run of a recipe under the name of the file that changes it: digits/fedavg becomes mine/fedavg."""
    return f"{name}/{PurePosixPath(run_name).name}" if isinstance(name, str) else name


def _words(run: Run) -> tuple[str, str]:
    return PurePosixPath(run.name).name, run.method.name


def _value(text: str) -> Any:
    """A TOML literal; anything else is a string that needs no quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
