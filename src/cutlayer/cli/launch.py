"""Turn the command line into runs, and train them one after another."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from cutlayer import recipes
from cutlayer.cli.options import Orders
from cutlayer.cli.papers import setting_of
from cutlayer.cli.preflight import told
from cutlayer.cli.progress import RunWatcher, watching
from cutlayer.cli.run_files import runs_of
from cutlayer.cli.words import codec, value
from cutlayer.errors import ConfigError, CutlayerError, DataError, DivergedError, UsageError
from cutlayer.methods import METHODS
from cutlayer.recipes.scale import scaled, size_of
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute
from cutlayer.runs.training import Training

log = logging.getLogger("cutlayer")


class Interrupted(Exception):
    """The user stopped a run; its committed rounds are saved."""

    def __init__(self, run: Run, folder: Folder, again: tuple[str, ...] = ("--resume",)) -> None:
        self.run, self.folder, self.again = run, folder, again  # `again`: options that make the same command resume
        self.saved = max(folder.store.rounds(), default=0)
        super().__init__(f"{folder.path}: stopped")


def named(what: str) -> tuple[Run, ...]:
    """Return the runs of a recipe or of a TOML file."""
    path = Path(what)
    if what in recipes.RECIPES or not (path.suffix == ".toml" or path.is_file()):
        return recipes.runs(what)
    return runs_of(config.read(path), path.stem, what)


def prepared(runs: Sequence[Run], orders: Orders, what: str) -> list[Run]:
    """Apply the command line to the runs of a recipe or file: first the scale, then single keys."""
    given = {key: getattr(orders, key) for key in ("rounds", "seed", "engine", "device", "precision")}
    flags = {key: value for key, value in given.items() if value is not None}
    settings = parsed(orders.settings or [])

    def changed(run: Run) -> Run:
        return config.changed(config.changed(run, settings, "--set"), flags, "the command line")

    _refuse_twins([changed(run) for run in runs])  # before the scale, which may make runs alike
    runs = [changed(run if orders.scale is None else scaled(run, orders.scale)) for run in runs]
    if "method" in settings or (what not in recipes.RECIPES and "method" in config.read(Path(what))):
        runs = [_named_by_method(run) for run in runs]
    _refuse_shared_folders(runs, orders.seeds, "--set name" if "name" in settings else "name")
    return runs


class Trained(NamedTuple):
    """The folders of the runs that have ended, and what happened to the others."""

    folders: list[Folder]
    failures: list[str]
    diverged: list[str]  # runs in which nobody could train any more; they have ended, too

    def complain(self) -> None:
        """Raise an error if a run has failed or diverged."""
        if self.failures:
            num = len(self.folders) + len(self.failures)
            words = [f"{len(self.failures)} of {num} runs failed:", *self.failures]
            raise UsageError("\n".join([*words, *(["diverged:", *self.diverged] if self.diverged else [])]))
        if self.diverged:
            raise DivergedError("\n".join(self.diverged))


def carried_out(runs: Sequence[Run], originals: Sequence[Run], orders: Orders) -> Trained:
    """Train the runs one after another, with every seed, and show their progress; one that fails does not stop others.

    All folders and data sets are checked before the first run starts. `originals` are the runs before the command line
    changed them.
    """
    every = [replace(run, seed=run.seed + i) for run in runs for i in range(orders.seeds)]
    folders = [folder_of(run, orders.out) for run in every]
    several_seeds = len({run.seed for run in every}) > 1
    titles = [f"{run.name} seed {run.seed}" if several_seeds else run.name for run in every]
    shown = _without_common_folder(titles)
    with watching(orders.quiet, shown) as watcher:
        if orders.scale is not None:
            for line in scale_lines(originals, runs, orders.scale):
                log.info(line)
        if not (orders.resume or orders.overwrite):
            for folder in folders:
                folder.refuse_if_taken()
        _check_data(every, orders.data)
        trained = Trained([], [], [])
        for run, folder, title, short in zip(every, folders, titles, shown, strict=True):
            try:
                training = _train(run, folder, orders, watcher, short)
                trained.folders.append(folder)
                if training.diverged:
                    trained.diverged.append(f"{title}: {training.diverged}")
            except Interrupted:
                raise
            except Exception as error:
                if len(every) == 1 or (run is every[0] and isinstance(error, DataError)):
                    raise  # the other runs have the same data, or their data were checked
                trained.failures.append(f"{title}: {told(error)}")
                log.warning("%s failed: %s", title, told(error), exc_info=not isinstance(error, CutlayerError))
    return trained


def _train(run: Run, folder: Folder, orders: Orders, watcher: RunWatcher, title: str) -> Training:
    try:
        return execute(
            run,
            folder,
            root=orders.data,
            resume=orders.resume,
            overwrite=orders.overwrite,
            on_start=lambda training: watcher.begin(title, run, training.history),
            on_round=lambda _, record: watcher.round(record),
        )
    except KeyboardInterrupt:
        raise Interrupted(run, folder) from None


def _without_common_folder(titles: Sequence[str]) -> list[str]:
    """Return titles without the folder that all of them begin with; a single one is left whole."""
    common = os.path.commonpath([PurePosixPath(title).parent for title in titles]) if len(titles) > 1 else ""
    return [title.removeprefix(f"{common}/") for title in titles]


def parsed(settings: Iterable[str]) -> dict[str, Any]:
    """Return settings such as optimiser.lr=0.1 as the tables that they would be in TOML."""
    tables: dict[str, Any] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        words = [word.strip() for word in key.split(".")]
        if not sign or not all(words):
            raise ConfigError(f"--set {setting!r} is not key=value; write for example --set optimiser.lr=0.1")
        table = tables
        for word in words[:-1]:
            inner = table.get(word, {})
            first = "path" if key.startswith("data.") else "name"
            table[word] = inner if isinstance(inner, dict) else {first: inner}  # optimiser=adam, then optimiser.lr=0.1
            table = table[word]
        last = words[-1]
        if isinstance(table.get(last), dict):
            raise ConfigError(f"--set {setting!r} would replace what another --set says about {key}; give it first")
        table[last] = _value(words, text)
    return tables


def _value(words: Sequence[str], text: str) -> Any:
    """Return the value of the key of these words; codecs may have options and form chains as in `cuts --codecs`."""
    found = value(text)
    is_codec = len(words) == 2 and words[0] == "codecs" and isinstance(found, str) and (":" in found or "+" in found)
    return codec(found, f"--set {'.'.join(words)}") if is_codec else found


def folder_of(run: Run, out: Path) -> Folder:
    return Folder(out / run.name / f"seed-{run.seed}")


def _check_data(runs: Sequence[Run], root: Path | None) -> None:
    """Load each data set once if there are several, so that a missing one is found before the first run starts."""
    by_name = {str(run.data): run for run in runs}
    for _, run in sorted(by_name.items()) if len(by_name) > 1 else ():
        build.dataset(run, root)


def _named_by_method(run: Run) -> Run:
    """Rename a run that is named after its method, in case the method was replaced."""
    path = PurePosixPath(run.name)
    return replace(run, name=str(path.with_name(run.method.name))) if path.name in METHODS else run


def _refuse_twins(runs: Sequence[Run]) -> None:
    """Refuse runs that are the same but for their name."""
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if replace(run, name=other.name) == other:
                raise ConfigError(
                    f"with these changes {other.name} and {run.name} are the same run; keep one of them with --only"
                )


def _refuse_shared_folders(runs: Sequence[Run], seeds: int, name: str) -> None:
    """Refuse runs of the same name and seed."""
    places = [(run.name, run.seed + i) for run in runs for i in range(seeds)]
    twice = next((place for place, num in Counter(places).items() if num > 1), None)
    if twice is None:
        return
    with_one_seed = {(run.name, run.seed) for run in runs}
    how = f"keep one of them with --only, or leave out {name}"
    if len(with_one_seed) == len(runs):
        how = "leave out --seeds, or the seeds in the file"
    raise ConfigError(f"two runs are called {twice[0]} and have seed {twice[1]}, so they would share a folder; {how}")


def scale_lines(originals: Sequence[Run], runs: Sequence[Run], scale: float) -> list[str]:
    """Describe what the scale and later settings leave of the runs, one line for runs that are alike."""
    recipe = recipes.of(originals[0].name)
    end = f"; not {setting_of(recipe)}" if recipe is not None and recipe.source else ""
    panels: dict[str, list[str]] = {}
    for original, run in zip(originals, runs, strict=True):
        names = panels.setdefault(size_of(original, run), [])
        names.append(original.name.rpartition("/")[0])
    return [
        f"scale {scale:g}: {text}{end}" + (f" ({', '.join(dict.fromkeys(names))})" if len(panels) > 1 else "")
        for text, names in panels.items()
    ]
