"""Train runs of our recipes one after another on one device, within a time limit, and on from there next time.

    python bench/headline.py --runs runs digits/fedavg digits/sfl_v1:10
    python bench/headline.py --runs runs --device cuda --engine graph --precision bf16 --seconds 560 \\
        smofi_table1/cifar10:120 cut_table3_as_run/cifar10/sfl_v2-cut1:30
    python bench/headline.py --next --seconds 560 --data DATA --collect OUT
    python bench/headline.py --list

A name is that of a run, of a panel or of a whole recipe, and may carry rounds of its own. A run is the first rounds of
its recipe's: all that its recipe says of schedules stays, a cosine's length too. It is kept as `cutlayer run` keeps it.
The same command again skips what is finished and goes on with what is not. Runs that are equal but for their names are
trained once.

`--next` trains what bench/evidence.toml lists, most valuable first: it goes on with the first run that is finished
neither in --runs nor in bench/results/headline, and then with the next while there is time. `--list` shows how far each
of them is.

`--collect OUT` packs the small files of all runs into OUT/headline.tar.gz; `--record OUT` puts them where
bench/results_page.py finds them. The run that was trained last is packed whole, in pieces of at most 16 MiB, so that
`--from OUT` goes on with it on another machine; one of more than 60 MiB is not, and must end in one go, in the same
--runs.
"""

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import evidence
import packing
from evidence import QUEUE, RESULTS, named
from packing import MOST, REMARKS, SESSIONS

from cutlayer.core import tree
from cutlayer.core.checks import check_device
from cutlayer.engines.out_of_memory import release
from cutlayer.errors import CheckpointError, ConfigError, CutlayerError, DataError
from cutlayer.results.trials import load
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder, read_lines, write
from cutlayer.runs.run import difference, environment, execute, with_engines_of
from cutlayer.runs.stopping import Record
from cutlayer.runs.training import Training

NONE = "–"
MIB = 2.0**20
TOLD_EVERY = 10  # rounds
TO_FINISH = 8.0  # seconds kept for the last checkpoint and the model
TO_START = 30.0  # seconds below which no run is begun: data, model and the first round
MARGIN = 1.3  # a round may take so many times the longest of the last ones
# Copies of a model that a run leaves on the disk: itself, and three checkpoints with momenta, one of them half-written.
COPIES = 8
SMALL_FILES = 2**20  # bytes beside the checkpoint of a packed run, at most
FAILED, MISTAKEN, STOPPED = 1, 2, 130  # exit codes, as of `cutlayer`
OPTIONS = ("rounds", "seed", "device", "engine", "precision", "checkpoint_every")  # keys that are not for --set
USUAL = {"device": "cpu", "engine": "auto", "seed": 0, "checkpoint_every": 5}  # of runs that are named
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
    warned: bool = False

    def start(self, training: Training) -> None:
        self.begun, self.last = training.state.round, time.monotonic()
        say(f"{self.title}: from round {self.begun + 1} to {self.rounds}")
        self.look_at_size(training)

    def look_at_size(self, training: Training) -> None:
        """Warn once if checkpoints are too large to go on elsewhere; those of some methods grow."""
        size = tree.num_bytes((tuple(training.state), training.runner.backend.memory.content()))
        if size > MOST - SMALL_FILES and not self.warned:
            self.warned = True
            told = f"{size / MIB:.0f} MiB, too large to be packed ({MOST / MIB:.0f} at most)"
            say(f"{self.title}: a checkpoint has {told}: it must end in one go, in the same --runs")

    def round(self, training: Training, record: Record) -> None:
        now, number = time.monotonic(), record["round"]
        self.recent, self.last = (*self.recent[-4:], now - self.last), now
        if number % TOLD_EVERY == 0 or number == self.begun + 1:
            shown = f"accuracy {percent(record['test_accuracy'])}, " if "test_accuracy" in record else ""
            say(f"{self.title}: round {number}/{self.rounds}, {shown}{self.recent[-1]:.2f} s")
        self.look_at_size(training)
        # Two rounds: the one that would still begin as usual, and the last one, which leaves a checkpoint.
        if now + 2 * MARGIN * max(self.recent) + TO_FINISH > self.deadline and number < training.limits.rounds:
            training.limits = replace(training.limits, rounds=number + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return carried_out(parsed(arguments))
    except CutlayerError as error:
        return complain(error)
    except OSError as error:  # such as a folder that may not be read
        return complain(CheckpointError(f"{error.filename or 'a file'} cannot be used: {error.strerror or error}"))
    except KeyboardInterrupt:
        return STOPPED


def carried_out(args: argparse.Namespace) -> int:
    """Train what is asked for, as far as the time goes; the exit code."""
    began = time.monotonic()
    runs = queued(args) if args.next or args.list else evidence.distinct(chosen(args))
    if args.list:
        listed(runs, args)
        return 0
    if args.record is not None:
        recorded(args)
        return 0
    if args.source is not None:
        folder, put = packing.unpack_whole(args.source, args.runs)
        say(f"{folder.path}: {'unpacked from' if put else 'it is here already, and not behind'} {args.source}")
    left = unfinished(runs, args) if args.next else runs
    check(left, args)
    failed: dict[str, int] = {}
    stopped = False
    deadline = began + args.seconds
    for run in left:
        if args.next and no_time(run, deadline):
            break
        try:
            trained(run, args, deadline)
        except KeyboardInterrupt:
            done = max(home(run, args.runs)[0].store.rounds(), default=0)
            print(f"stopped; {title(run)} is saved up to round {done}; the same command goes on", file=sys.stderr)
            stopped = True
            break
        except CutlayerError as error:  # one run that cannot be trained leaves the time to the others
            failed[title(run)] = complain(error, f"{title(run)}: ")
        except Exception:
            traceback.print_exc()
            failed[title(run)] = FAILED
        release()
    if args.collect is not None and (evidence.begun(args.runs) or not args.next):
        collected(args.runs, args.collect)
    say(f"{time.monotonic() - began:.0f} s in all" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return STOPPED if stopped else max(failed.values(), default=0)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="RECIPE[/PANEL][/RUN][:ROUNDS]", help="what to train, at most to the recipe's end"
    )
    parser.add_argument("--next", action="store_true", help="train what bench/evidence.toml lists, in its order")
    parser.add_argument("--list", action="store_true", help="show what bench/evidence.toml lists, and how far it is")
    parser.add_argument("--queue", type=Path, default=QUEUE, metavar="FILE", help="another list for --next and --list")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where finished runs of the list are recorded")
    parser.add_argument("--data", type=Path, help="the folder of the data sets; by default that of CUTLAYER_DATA")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept; %(default)s by default")
    parser.add_argument("--device", help="cpu by default, or cuda; for --next the list's")
    parser.add_argument("--engine", help="as `cutlayer list engines` names it; auto by default, for --next the list's")
    parser.add_argument("--precision", help="fp32, tf32 or bf16; by default the recipe's, for --next the list's")
    parser.add_argument("--rounds", type=int, help="of names without their own; by default, and at most, the recipe's")
    parser.add_argument("--seed", type=int, help="0 by default; for --next the list's")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help=f"end cleanly before these are over; no run is begun in the last {TO_START:.0f}",
    )
    parser.add_argument("--checkpoint-every", type=int, metavar="ROUNDS", help="5 by default")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="as of `cutlayer run`; may be repeated")
    parser.add_argument("--collect", type=Path, metavar="OUT", help="pack the runs there at the end, see above")
    parser.add_argument("--record", type=Path, metavar="OUT", help="put what --collect packed there into --results")
    parser.add_argument("--from", dest="source", type=Path, metavar="OUT", help="begin with the run packed there")
    args = parser.parse_intermixed_args(arguments)
    listing = args.next or args.list
    if args.next and args.list:
        parser.error("--next trains and --list only shows: give one of them")
    if listing and (args.names or args.rounds is not None or args.seed is not None):
        parser.error(f"{args.queue.name} says what --next and --list take: give no names, --rounds or --seed")
    if not (args.names or listing or args.collect is not None or args.record is not None):
        parser.error("name at least one run, take those of the list with --next, or pack some with --collect")
    if args.record is not None and (args.names or listing or args.collect is not None or args.source is not None):
        parser.error("--record does nothing else: give it without names, --next, --list, --collect and --from")
    if not args.seconds > 0:
        parser.error(f"--seconds is to be above 0, and not {args.seconds:g}")
    return args


def queued(args: argparse.Namespace) -> list[Run]:
    """The runs of the list, changed as the command line says."""
    given = {key: value for key in OPTIONS if (value := getattr(args, key)) is not None}
    changes = {"checkpoint_every": USUAL["checkpoint_every"], **given, **settings_of(args.set or [])}
    return evidence.wanted(evidence.read(args.queue), changes, str(args.queue))


def unfinished(runs: Sequence[Run], args: argparse.Namespace) -> list[Run]:
    """The runs that no folder holds to their end."""
    known = evidence.begun(args.results, args.runs)
    left = [run for run in runs if not any(evidence.finished(f, run) for f in evidence.holding(run, known))]
    say(f"{args.queue.name}: {len(runs) - len(left)} of {len(runs)} runs finished")
    return left


def listed(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """How far each run of the list is, and where."""
    known = evidence.begun(args.results, args.runs)
    for run in runs:
        folder = evidence.furthest(evidence.holding(run, known))
        done, state, where = 0, "not begun", ""
        if folder is not None:
            done, where = min(len(evidence.done(folder)), run.rounds), f"  ({folder.path})"
            # Without a checkpoint it has to begin again.
            state = "finished" if evidence.finished(folder, run) else "begun" if folder.store.rounds() else "recorded"
        say(f"{state:9}  {f'{done}/{run.rounds}':>9}  {run.name}, seed {run.seed}{where}")
    coming = next(iter(unfinished(runs, args)), None)
    say("nothing is left" if coming is None else f"next: {title(coming)}")


def chosen(args: argparse.Namespace) -> list[Run]:
    """The runs in the order of their names, changed as the command line says."""
    given = {key: value for key in OPTIONS if (value := getattr(args, key)) is not None and key != "rounds"}
    changes: dict[str, Any] = {**USUAL, **given}
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


def check(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Find mistakes before the device is touched: names, folders, data and room on the disk, in this order."""
    if args.data is not None and not args.data.is_dir():
        raise DataError(f"there is no folder {args.data}; --data is the one that holds the data sets")
    looked_at = runs[:1] if args.next else runs  # later runs of the list may have to wait for another day
    for run in looked_at:
        check_same(*home(run, args.runs))
    kinds = {(run.data, run.model.name): run for run in reversed(looked_at)}.values()
    mistakes = [mistake for run in kinds if (mistake := obstacle(run, args)) is not None]
    if kinds and len(mistakes) == len(kinds):
        raise mistakes[-1]  # else the other runs can be trained, and these are told of in their turn
    for run in looked_at[:1]:
        check_device(run.device)


def obstacle(run: Run, args: argparse.Namespace) -> CutlayerError | None:
    """What keeps a run from being trained, of what can be known without the device."""
    try:
        check_room(run, args)
    except CutlayerError as error:
        return error
    return None


def check_room(run: Run, args: argparse.Namespace) -> None:
    """The disk must hold what the run will leave; its model says how much that is."""
    if evidence.finished(home(run, args.runs)[0], run):
        return
    net = build.model_of(replace(run, device="cpu"), build.dataset(run, args.data).train, args.data).model
    need = COPIES * sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
    for folder, flag, needed in ((args.runs, "--runs", need), (args.collect, "--collect", MOST)):
        if folder is not None:
            there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            if not there.is_dir():
                raise CheckpointError(f"{there} is no folder; choose another {flag}")
            if not os.access(there, os.W_OK | os.X_OK):
                raise CheckpointError(f"{there} cannot be written to; choose another {flag}")
            free = shutil.disk_usage(there).free
            if free < needed:
                wants = f"{run.name} needs {needed / MIB:.1f} MiB at {folder}, where {free / MIB:.1f} are free"
                raise CheckpointError(f"{wants}; make room there, or choose another {flag}")


def check_same(folder: Folder, run: Run) -> None:
    """A folder answers only for the run that it holds, of whatever length."""
    if not folder.config.exists():
        return
    there = config.as_dict(folder.run())
    found = difference(there, with_engines_of(there, run))
    if found:
        raise ConfigError(f"{folder.path} holds another run: {found}; ask for it as it is, or choose another --runs")


def flat(run: Run) -> dict[str, Any]:
    """The settings of a run by the keys that --set knows them by."""
    return config.flat(config.as_dict(run), depth=1)


def folder_of(run: Run, runs: Path) -> Folder:
    return Folder(runs / run.name / f"seed-{run.seed}")


def home(run: Run, runs: Path) -> tuple[Folder, Run]:
    """Where a run is trained, and as which: an equal one that is there already goes on under its own name."""
    folder = evidence.furthest(evidence.holding(run, evidence.begun(runs)))
    if folder is None:
        return folder_of(run, runs), run
    there = folder.run()
    return folder, replace(run, name=there.name, devices=there.devices)


def trained(asked: Run, args: argparse.Namespace, deadline: float) -> None:
    """Train a run as far as the time goes, and tell what it came to."""
    folder, run = home(asked, args.runs)
    check_same(folder, run)
    if evidence.finished(folder, run):
        also = "" if run.name == asked.name else f", and serves {asked.name}"
        say(f"{told(folder, run)}; finished before{also}")
        return
    if no_time(run, deadline):
        return
    record = evidence.furthest(evidence.holding(run, evidence.begun(args.results))) if args.next else None
    if record is not None and not folder.store.rounds():
        rounds = count(len(record.history()), "round")
        say(f"{title(run)}: begins again, as {rounds} are recorded but no checkpoint is in {args.runs}")
    watch = Watch(title(run), run.rounds, deadline)

    def start(training: Training) -> None:
        note_session(folder, training.state.round + 1, environment(run.device))
        watch.start(training)

    began = time.monotonic()
    execute(run, folder, root=args.data, resume=True, on_start=start, on_round=watch.round)
    say(f"{told(folder, run)}; {time.monotonic() - began:.0f} s now")


def no_time(run: Run, deadline: float) -> bool:
    """Whether it is too late to begin a run, which is told."""
    late = time.monotonic() + TO_START > deadline
    if late:
        say(f"{title(run)}: not begun, as less than {TO_START:.0f} s are left")
    return late


def title(run: Run) -> str:
    return f"{run.name}, seed {run.seed}" if run.seed else run.name


def told(folder: Folder, run: Run) -> str:
    """What a run came to."""
    trial = load(folder)
    done = len(trial.history)
    rounds = f"{done} of {run.rounds} rounds" if done <= run.rounds else f"{done} rounds, {run.rounds} asked for"
    return (
        f"{title(run)}: {rounds}, best {percent(trial.best)}, final {percent(trial.final)}, "
        f"{trial.seconds:.0f} s of rounds, {brief(pace(folder))} samples a second, engine "
        f"{folder.surroundings().get('engine')}"
    )


def note_session(folder: Folder, first: int, where: dict[str, Any]) -> None:
    """Record where a session begins, and on what; sessions of rounds that are lost and run again are forgotten."""
    earlier = [line for line in read_lines(folder.path / SESSIONS) if line["round"] < first]
    write(folder.path / SESSIONS, "".join(json.dumps(line) + "\n" for line in [*earlier, {"round": first, **where}]))


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
    """Pack all runs small, and the one with the newest checkpoint whole, where it is small enough."""
    folders = [folder for folder, _ in evidence.begun(runs)]
    if not folders:
        raise ConfigError(f"there is no run under {runs}; train some before --collect packs them")
    archive = packing.pack_small(folders, runs, out)
    say(f"{archive}: {count(len(folders), 'run')}, {archive.stat().st_size / 2**10:.1f} KiB")
    last = max((folder for folder in folders if folder.store.rounds()), key=newest, default=None)
    if last is None:
        return
    made = packing.pack_whole(last, runs, out)
    if made:
        size = sum(piece.stat().st_size for piece in made) / MIB
        say(f"{made[0].parent}: {last.path.relative_to(runs)} in {count(len(made), 'piece')}, {size:.1f} MiB")
    else:
        say(f"{last.path.relative_to(runs)} is not packed: it has more than {MOST / MIB:.0f} MiB")


def newest(folder: Folder) -> int:
    """When the last checkpoint was written."""
    return folder.store.path(folder.store.rounds()[-1]).stat().st_mtime_ns


def recorded(args: argparse.Namespace) -> None:
    """Put packed results where the page finds them."""
    replaced, kept = packing.record(args.record, args.results)
    for folder in replaced:
        say(f"{folder.path}: {count(len(folder.history()), 'round')}")
    for folder in kept:
        say(f"{folder.path} stays: it has {count(len(folder.history()), 'round')}, more than {args.record}")


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
