"""Train runs of our recipes one after another on one device, within a time limit, and on from there next time.

    python bench/headline.py --runs runs digits/fedavg digits/sfl_v1:10
    python bench/headline.py --runs runs --device cuda --engine graph --precision bf16 --seconds 560 \\
        smofi_table1/cifar10:120 cut_table3_as_run/cifar10/sfl_v2-cut1:30

A name is that of a run, of a panel or of a whole recipe, and may carry rounds of its own. A run is the first rounds of
its recipe's: all that its recipe says of schedules stays, a cosine's length too. It is kept as `cutlayer run` keeps it.
The same command again skips what is finished and goes on with what is not. `--collect FOLDER` packs the small files of
all runs into FOLDER/headline.tar.gz; unpacked, they are what bench/results_page.py and `cutlayer compare` read.
"""

import argparse
import io
import json
import sys
import tarfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from cutlayer import config, recipes
from cutlayer.checks import check_device
from cutlayer.config import Run
from cutlayer.errors import ConfigError, CutlayerError, DataError, UnknownNameError
from cutlayer.folder import Folder, read_lines, write
from cutlayer.run import difference, execute
from cutlayer.scarcity import release
from cutlayer.training import Record, Training
from cutlayer.trials import find, load

KEPT = ("round", "loss", "stopped", "samples", "bytes", "simulated_seconds", "test_loss", "test_accuracy")
SESSIONS = "sessions.jsonl"  # beside a run's own files: the first round of each session
REMARKS = "remarks.txt"  # and what is to be known of its results
ARCHIVE = "headline.tar.gz"
NONE = "–"
TOLD_EVERY = 10  # rounds
TO_FINISH = 8.0  # seconds kept for the last checkpoint and the model
TO_START = 30.0  # seconds below which no run is begun: data, model and the first round
MARGIN = 1.3  # a round may take so many times the longest of the last ones
FAILED, MISTAKEN, STOPPED = 1, 2, 130  # exit codes, as of `cutlayer`
OPTIONS = ("rounds", "seed", "device", "engine", "precision", "checkpoint_every")  # keys that are not for --set
WORDS = {  # advice for users of `cutlayer run`, in the words of this script
    "start over with --overwrite": "remove its folder and start over",
    "go on with --resume": "give the same command again",
    "--out": "--runs",
}


class Parser(argparse.ArgumentParser):
    """Words that make no sense are a mistake like any other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


@dataclass
class Watch:
    """Tells of the rounds of one run, and ends it a round before the time is up."""

    title: str
    rounds: int
    deadline: float
    begun: int = 0
    last: float = 0.0
    recent: tuple[float, ...] = ()

    def start(self, training: Training) -> None:
        self.begun, self.last = training.state.round, time.monotonic()
        say(f"{self.title}: from round {self.begun + 1} to {self.rounds}")

    def round(self, training: Training, record: Record) -> None:
        now, number = time.monotonic(), record["round"]
        self.recent, self.last = (*self.recent[-4:], now - self.last), now
        if number % TOLD_EVERY == 0 or number == self.begun + 1:
            shown = f"accuracy {percent(record['test_accuracy'])}, " if "test_accuracy" in record else ""
            say(f"{self.title}: round {number}/{self.rounds}, {shown}{self.recent[-1]:.2f} s")
        # Two rounds: the one that would still begin as usual, and the last one, which leaves a checkpoint.
        if now + 2 * MARGIN * max(self.recent) + TO_FINISH > self.deadline and number < training.rounds:
            training.rounds = number + 1


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return carried_out(parsed(arguments))
    except CutlayerError as error:
        return complain(error)
    except KeyboardInterrupt:
        return STOPPED


def carried_out(args: argparse.Namespace) -> int:
    """Train what is asked for, as far as the time goes; the exit code."""
    began = time.monotonic()
    runs = chosen(args)
    check(runs, args)
    failed: dict[str, int] = {}
    for run in runs:
        try:
            trained(run, args, began + args.seconds)
        except KeyboardInterrupt:
            done = max(folder_of(run, args.runs).store.rounds(), default=0)
            print(f"stopped; {run.name} is saved up to round {done}; the same command goes on", file=sys.stderr)
            return STOPPED
        except CutlayerError as error:  # one run that cannot be trained leaves the time to the others
            failed[run.name] = complain(error, f"{run.name}: ")
        except Exception:
            traceback.print_exc()
            failed[run.name] = FAILED
        release()
    if args.collect is not None:
        collected(args.runs, args.collect)
    say(f"{time.monotonic() - began:.0f} s in all" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return max(failed.values(), default=0)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="RECIPE[/PANEL][/RUN][:ROUNDS]", help="what to train, at most to the recipe's end"
    )
    parser.add_argument("--data", type=Path, help="the folder of the data sets; by default that of CUTLAYER_DATA")
    parser.add_argument("--runs", type=Path, required=True, help="the folder that the runs are kept in")
    parser.add_argument("--device", default="cpu", help="cpu by default, or cuda")
    parser.add_argument("--engine", default="auto", help="as `cutlayer list engines` names it; auto by default")
    parser.add_argument("--precision", help="fp32, tf32 or bf16; by default the recipe's")
    parser.add_argument("--rounds", type=int, help="of names without their own; by default, and at most, the recipe's")
    parser.add_argument("--seed", type=int, default=0, help="0 by default")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help=f"end cleanly before these are over; no run is begun in the last {TO_START:.0f}",
    )
    parser.add_argument("--checkpoint-every", type=int, default=5, metavar="ROUNDS", help="5 by default")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="as of `cutlayer run`; may be repeated")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help=f"write {ARCHIVE} of all runs there at the end")
    args = parser.parse_intermixed_args(arguments)
    if not args.names and args.collect is None:
        parser.error("name at least one run, or pack those that are there with --collect")
    if not args.seconds > 0:
        parser.error(f"--seconds is to be above 0, and not {args.seconds:g}")
    return args


def chosen(args: argparse.Namespace) -> list[Run]:
    """The runs in the order of their names, changed as the command line says."""
    changes: dict[str, Any] = {key: getattr(args, key) for key in OPTIONS if key != "rounds"}
    changes = {key: value for key, value in changes.items() if value is not None}
    settings = settings_of(args.set or [])
    runs = []
    for word in args.names:
        name, colon, own = word.partition(":")
        if colon and not own.isdecimal():
            raise ConfigError(f"the rounds of {word!r} are no number above 0; write for example {name}:20")
        most = int(own) if colon else args.rounds
        for run in named(name):
            short = {**changes, "rounds": run.rounds if most is None else min(most, run.rounds)}
            runs.append(config.changed(config.changed(run, settings, "--set"), short, word))
    return runs


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """What --set says, as tables."""
    if not words:
        return {}
    try:
        from cutlayer.cli import launch  # here: all else does without the packages of the command line
    except ImportError as error:
        raise ConfigError(f"--set needs the packages of the command line: {error}") from None
    settings = launch.parsed(words)
    for key in OPTIONS:
        if key in settings:
            raise ConfigError(f"--set cannot change {key}; use --{key.replace('_', '-')}")
    return settings


def named(name: str) -> tuple[Run, ...]:
    """The run of this name, or the runs of the panel or recipe."""
    known = recipes.runs(name.partition("/")[0])
    found = tuple(run for run in known if f"{run.name}/".startswith(f"{name}/"))
    if not found:
        raise UnknownNameError("run", name, [run.name for run in known])
    return found


def check(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Find mistakes before any time is spent."""
    check_device(args.device)
    if args.data is not None and not args.data.is_dir():
        raise DataError(f"there is no folder {args.data}; --data is the one that holds the data sets")
    for run in runs:
        folder = folder_of(run, args.runs)
        if folder.config.exists():
            check_same(folder, run)


def check_same(folder: Folder, run: Run) -> None:
    """A folder answers only for the run that it holds, of whatever length."""
    found = difference(config.as_dict(folder.run()), run)
    if found:
        raise ConfigError(f"{folder.path} holds another run: {found}; ask for it as it is, or choose another --runs")


def flat(run: Run) -> dict[str, Any]:
    """The settings of a run by the keys that --set knows them by."""
    return config.flat(config.as_dict(run), depth=1)


def folder_of(run: Run, runs: Path) -> Folder:
    return Folder(runs / run.name / f"seed-{run.seed}")


def trained(run: Run, args: argparse.Namespace, deadline: float) -> None:
    """Train a run as far as the time goes, and tell what it came to."""
    folder = folder_of(run, args.runs)
    if max(folder.store.rounds(), default=0) >= run.rounds:
        say(f"{told(folder, run)}; finished before")
        return
    if time.monotonic() + TO_START > deadline:
        say(f"{run.name}: no time left, as it takes {TO_START:.0f} s at least")
        return
    watch = Watch(run.name, run.rounds, deadline)

    def start(training: Training) -> None:
        note_session(folder, training.state.round + 1)
        watch.start(training)

    began = time.monotonic()
    execute(run, folder, root=args.data, resume=True, on_start=start, on_round=watch.round)
    say(f"{told(folder, run)}; {time.monotonic() - began:.0f} s now")


def told(folder: Folder, run: Run) -> str:
    """What a run came to."""
    trial = load(folder)
    done = len(trial.history)
    rounds = f"{done} of {run.rounds} rounds" if done <= run.rounds else f"{done} rounds, {run.rounds} asked for"
    return (
        f"{run.name}: {rounds}, best {percent(trial.best)}, final {percent(trial.final)}, "
        f"{trial.seconds:.0f} s of rounds, {brief(pace(folder))} samples a second, engine "
        f"{folder.surroundings().get('engine')}"
    )


def note_session(folder: Folder, first: int) -> None:
    """Sessions of rounds that are lost and run again are forgotten."""
    begun = sorted({number for number in sessions(folder) if number < first} | {first})
    write(folder.path / SESSIONS, "".join(json.dumps({"round": number}) + "\n" for number in begun))


def sessions(folder: Folder) -> set[int]:
    """The first rounds of all sessions."""
    return {1, *(line["round"] for line in read_lines(folder.path / SESSIONS))}


def pace(folder: Folder) -> float | None:
    """Samples a second in the median round, of those that begin no session: others set up or compile the engine."""
    first = sessions(folder)
    samples = {record["round"]: record["samples"] for record in folder.history()}
    times = [(line["round"], line["seconds"]) for line in folder.times() if line["round"] not in first]
    found = [(samples[number] - samples[number - 1]) / seconds for number, seconds in times if seconds]
    return median(found) if found else None


def remarks(folder: Folder) -> list[str]:
    """What somebody wrote beside a run for the readers of its results, line by line."""
    path = folder.path / REMARKS
    return path.read_text().splitlines() if path.exists() else []


def collected(runs: Path, out: Path) -> None:
    """The small files of all runs in one archive, with what is needed of each round."""
    folders = find([runs])
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / ARCHIVE, "w:gz") as archive:
        for folder in folders:
            for name, content in small_files(folder):
                entry = tarfile.TarInfo(str(folder.path.relative_to(runs) / name))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    say(f"{out / ARCHIVE}: {count(len(folders), 'run')}, {(out / ARCHIVE).stat().st_size / 2**10:.1f} KiB")


def small_files(folder: Folder) -> Iterator[tuple[str, bytes]]:
    rounds = ({key: record[key] for key in KEPT if key in record} for record in folder.history())
    yield folder.metrics.name, "".join(json.dumps(record) + "\n" for record in rounds).encode()
    for path in (folder.config, folder.environment, folder.timing, folder.path / SESSIONS, folder.path / REMARKS):
        if path.exists():
            yield path.name, path.read_bytes()


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.2f} %"


def brief(number: float | None) -> str:
    """Two digits at least, and thousands apart."""
    if number is None:
        return NONE
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def complain(error: CutlayerError, where: str = "") -> int:
    """A mistake in one line."""
    text = str(error)
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    print(f"error: {where}{text}", file=sys.stderr)
    return MISTAKEN


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
