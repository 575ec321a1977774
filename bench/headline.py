"""Train chosen runs of our recipes one after another on one device, within a time limit, and on from there next time.

    python bench/headline.py --data DATA --runs RUNS --device cuda --engine graph --precision bf16 --rounds 120 \
        --seconds 560 smofi_table1/cifar10/fedavg smofi_table1/cifar10/smofi cut_table3_as_run/cifar10:30

A name is that of a run or of a whole panel, and may carry rounds of its own. A run is the first rounds of its recipe's:
all that its recipe says of schedules stays, a cosine's length too. It is kept as `cutlayer run` keeps it. The same
command again skips what is finished and goes on with what is not. `--collect FOLDER` packs the small files of all runs
into FOLDER/headline.tar.gz; unpacked, they are what bench/results_page.py and `cutlayer compare` read.
"""

import argparse
import gc
import io
import json
import tarfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cutlayer import config, recipes
from cutlayer.config import Run
from cutlayer.errors import UnknownNameError
from cutlayer.folder import Folder, write
from cutlayer.run import execute
from cutlayer.training import Record, Training
from cutlayer.trials import find, load

KEPT = ("round", "loss", "stopped", "samples", "bytes", "simulated_seconds", "test_loss", "test_accuracy")
MACHINE = "machine.txt"  # beside a run's own files: what it was trained on
ARCHIVE = "headline.tar.gz"
TOLD_EVERY = 10  # rounds
TO_FINISH = 8.0  # seconds kept for the last checkpoint and the model
TO_START = 30.0  # seconds below which no run is begun: data, model and the first round
MARGIN = 1.3  # a round may take so many times the longest of the last ones


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
            shown = 100 * (record.get("test_accuracy") or 0.0)
            say(f"{self.title}: round {number}/{self.rounds}, accuracy {shown:.2f} %, {self.recent[-1]:.2f} s")
        # Two rounds: the one that would still begin as usual, and the last one, which leaves a checkpoint.
        if now + 2 * MARGIN * max(self.recent) + TO_FINISH > self.deadline and number < training.rounds:
            training.rounds = number + 1


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    args = parsed(arguments)
    deadline = began + args.seconds
    failed = []
    for run in chosen(args):
        try:
            trained(run, args, deadline)
        except Exception:  # one run that cannot be trained leaves the time to the others
            traceback.print_exc()
            failed.append(run.name)
        release()
    if args.collect is not None:
        collected(args.runs, args.collect)
    say(f"{time.monotonic() - began:.0f} s in all" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="RECIPE/PANEL[/RUN][:ROUNDS]")
    parser.add_argument("--data", type=Path, help="the folder of the data sets; by default that of CUTLAYER_DATA")
    parser.add_argument("--runs", type=Path, required=True, help="the folder that the runs are kept in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", help="as the recipe says by default")
    parser.add_argument("--rounds", type=int, help="at most so many; by default as many as the recipe has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end cleanly before these are over")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="ROUNDS")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a line of TOML; for trials")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help=f"write {ARCHIVE} of all runs there at the end")
    return parser.parse_intermixed_args(arguments)


def chosen(args: argparse.Namespace) -> list[Run]:
    """The runs in the order of their names, changed as the command line says."""
    changes: dict[str, Any] = {"device": args.device, "engine": args.engine, "seed": args.seed}
    changes["checkpoint_every"] = args.checkpoint_every
    if args.precision is not None:
        changes["precision"] = args.precision
    settings = tomllib.loads("\n".join(args.set))
    runs = []
    for word in args.names:
        name, _, own = word.partition(":")
        most = int(own) if own else args.rounds
        for run in named(name):
            short = replace(run, rounds=run.rounds if most is None else min(most, run.rounds))
            runs.append(config.changed(config.changed(short, settings, "--set"), changes, "the command line"))
    return runs


def named(name: str) -> tuple[Run, ...]:
    """The run of this name, or the runs of the panel."""
    known = recipes.runs(name.partition("/")[0])
    found = tuple(run for run in known if f"{run.name}/".startswith(f"{name}/"))
    if not found:
        raise UnknownNameError("run", name, [run.name for run in known])
    return found


def trained(run: Run, args: argparse.Namespace, deadline: float) -> None:
    """Train a run as far as the time goes, and tell what it came to."""
    folder = Folder(args.runs / run.name / f"seed-{run.seed}")
    if max(folder.store.rounds(), default=0) >= run.rounds:
        say(f"{told(folder, run)}; finished before")
        return
    if time.monotonic() + TO_START > deadline:
        say(f"{run.name}: no time left")
        return
    watch = Watch(run.name, run.rounds, deadline)

    def start(training: Training) -> None:
        write(folder.path / MACHINE, machine(run.device) + "\n")
        watch.start(training)

    began = time.monotonic()
    execute(run, folder, root=args.data, resume=True, on_start=start, on_round=watch.round)
    say(f"{told(folder, run, watch.begun)}; {time.monotonic() - began:.0f} s now")


def told(folder: Folder, run: Run, begun: int = 0) -> str:
    """What a run came to; its speed is that of the rounds after `begun` but the first, which sets up the engine."""
    trial = load(folder)
    best, final = (f"{100 * (value or 0.0):.2f} %" for value in (trial.best, trial.final))
    later = [line for line in folder.times() if line["round"] > begun + 1]
    speed = "–"
    if later:
        samples = trial.samples[later[-1]["round"]] - trial.samples[begun + 1]
        speed = f"{samples / run.batching.size / sum(line['seconds'] for line in later):,.0f}"
    return (
        f"{run.name}: {len(trial.history)} of {run.rounds} rounds, best {best}, final {final}, "
        f"{trial.seconds:.0f} s of rounds, {speed} client steps a second (of {run.batching.size} samples), "
        f"engine {folder.surroundings().get('engine')}"
    )


def machine(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device.upper()


def release() -> None:
    """Give back what a run held on the device: recorded graphs keep their memory as long as they live."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def collected(runs: Path, out: Path) -> None:
    """The small files of all runs in one archive, with what is needed of each round."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / ARCHIVE, "w:gz") as archive:
        for folder in find([runs]):
            for name, content in small_files(folder):
                entry = tarfile.TarInfo(str(folder.path.relative_to(runs) / name))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    say(f"{out / ARCHIVE}: {(out / ARCHIVE).stat().st_size / 2**20:.2f} MiB")


def small_files(folder: Folder) -> Iterator[tuple[str, bytes]]:
    rounds = ({key: record[key] for key in KEPT if key in record} for record in folder.history())
    yield folder.metrics.name, "".join(json.dumps(record) + "\n" for record in rounds).encode()
    for path in (folder.config, folder.environment, folder.timing, folder.path / MACHINE):
        if path.exists():
            yield path.name, path.read_bytes()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
