"""Executes a run in its folder: from the beginning, or from its newest checkpoint as if it had never stopped."""

import json
import logging
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from cutlayer.core import tree
from cutlayer.errors import CheckpointError
from cutlayer.models.adapters import export_pretrained
from cutlayer.models.decoders import CausalLM
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.runs.convergence import accuracies, converged
from cutlayer.runs.folder import START_AGAIN, Folder, append_line, write, writing
from cutlayer.runs.training import Record, Training
from cutlayer.version import __version__

__all__ = ["Folder", "environment", "execute"]

log = logging.getLogger("cutlayer")
Make = Callable[[Run], Training]
# What may change when a run is resumed: its length, how often it writes checkpoints, how many clients have memory.
MAY_CHANGE = ("rounds", "until_converged", "until_accuracy", "until_samples", "checkpoint_every", "chunk")
ENGINES = ("engine", "server_engine")


def execute(
    run: Run,
    folder: Folder,
    *,
    root: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    make: Make | None = None,
    on_start: Callable[[Training], None] | None = None,
    on_round: Callable[[Training, Record], None] | None = None,
) -> Training:
    """Train a run in its folder to its last round, or until one of its conditions for an early stop holds.

    A folder that already holds a run is refused, unless `resume` continues that run or `overwrite` replaces it. Data
    files are searched under `root`. `on_start` is called before the first round of this call, `on_round` after each.
    `make` builds the training of the run, by default a simulation.
    """
    if not (resume or overwrite):
        folder.refuse_if_taken()
    make = make or partial(build.training, root=root)
    with _threads(run.cpu_threads), folder.guarded() as hold:
        if resume and not overwrite and folder.holds_run():
            hold()
            training, run = _resumed(run, folder, make, hold)
        else:
            training, run = _started(run, folder, make, hold, overwrite)
        if on_start is not None:
            on_start(training)
        if _ended(training, run):
            done = f"all {run.rounds} rounds are" if training.state.round == run.rounds else "it stopped early and is"
            log.info("%s: %s done already", folder.path, done)
        else:
            while not _ended(training, run):
                record = _round(training, run, folder)
                if on_round is not None:
                    on_round(training, record)
            if training.state.round < training.rounds:
                why = next(ends(run, training.history))
                log.info("%s: ended at round %d: %s", folder.path, training.state.round, why)
        _finish(training, folder)
    return training


def _ended(training: Training, run: Run) -> bool:
    """Return whether no round is left."""
    return training.state.round >= training.rounds or any(ends(run, training.history))


def ends(run: Run, history: Sequence[Record]) -> Iterator[str]:
    """Yield the reasons to stop before the last round; they follow from the metrics, so a resumed run has the same."""
    if run.until_samples is not None and history and history[-1]["samples"] >= run.until_samples:
        yield f"until_samples {run.until_samples:,} reached"
    found = accuracies(history)
    if run.until_accuracy is not None and max(found.values(), default=0.0) >= run.until_accuracy:
        yield f"until_accuracy {run.until_accuracy:g} reached"
    if run.until_converged and converged(found) is not None:
        yield "until_converged: the last evaluations gained next to nothing"


@contextmanager
def _threads(num: int | None) -> Iterator[None]:
    """Set the number of torch's threads inside of the block: with small tensors, more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(num or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _round(training: Training, run: Run, folder: Folder) -> Record:
    """Play one more round and write its files; the metrics come before the checkpoint, which commits the round."""
    begin = time.perf_counter()
    record = training.round()
    seconds = round(time.perf_counter() - begin, 4)
    append_line(folder.metrics, record)
    append_line(folder.timing, {"round": record["round"], "seconds": seconds})
    if record["round"] % run.checkpoint_every == 0 or _ended(training, run):
        rounds = {name: thing.content() for name, thing in training.runner.restorable().items()}
        content = {"state": training.state, "rounds": rounds}
        folder.store.save(training.state.round, content, {"config": config.as_dict(run)})
    return record


def _finish(training: Training, folder: Folder) -> None:
    """Write the ledger and the trained model, or this server's half of it."""
    write(folder.ledger, json.dumps(training.runner.ledger.content(), indent=2) + "\n")
    half, net = training.half(), training.runner.method.model.model
    if half is None and isinstance(net, CausalLM):  # write what was trained, not the public base model
        unfinished = folder.pretrained.with_name(folder.pretrained.name + ".partial")
        with writing("the trained model", folder.path):
            shutil.rmtree(unfinished, ignore_errors=True)
            export_pretrained(net, training.state_dict(), unfinished)
            shutil.rmtree(folder.pretrained, ignore_errors=True)
            unfinished.rename(folder.pretrained)
        return
    values = training.state_dict() if half is None else half
    # Copies: safetensors refuses tied weights, which share memory.
    write(folder.model, save({k: v.cpu().clone(memory_format=torch.contiguous_format) for k, v in values.items()}))


def _started(run: Run, folder: Folder, make: Make, hold: Callable[[], None], overwrite: bool) -> tuple[Training, Run]:
    """Return a training before its first round, and the run with its engines resolved; write the first files."""
    training = make(run)  # before any file is touched, so a mistake in the run changes nothing
    run = with_engines_of(training.runner.backend.resolved, run)
    with writing("the run", folder.path, START_AGAIN):
        folder.path.mkdir(parents=True, exist_ok=True)
        hold()
        if not overwrite:
            folder.refuse_if_taken()  # by a run that began in the meantime
        folder.clear()
    surroundings = {**environment(run.device), "engine": training.runner.engine_name}
    if training.digest is not None:
        surroundings["data"] = training.digest
    write(folder.environment, json.dumps(surroundings, indent=2) + "\n", START_AGAIN)
    write(folder.config, config.dumps(run), START_AGAIN)
    return training, run


def _resumed(run: Run, folder: Folder, make: Make, hold: Callable[[], None]) -> tuple[Training, Run]:
    """Return the training of a run as its newest checkpoint left it, and the run with its engines resolved."""
    if not folder.store.rounds():
        then = folder.run()
        run = _checked(config.as_dict(then), run, folder)
        done = len(folder.history())
        if done > then.checkpoint_every:
            raise CheckpointError(
                f"{folder.path} holds {done} rounds but no checkpoint; put {folder.store.folder} back, "
                "or start over with --overwrite"
            )
        return _started(run, folder, make, hold, overwrite=True)
    content, manifest = folder.store.load()
    run = _checked(manifest["config"], run, folder)
    done = content["state"].round
    training = make(run)
    _check_data(run, training, folder)
    content = tree.map(lambda a: a if a.is_meta else a.to(run.device), content)
    training.history = folder.cut_back(done)
    training.state = content["state"]
    for name, thing in training.runner.restorable().items():
        if name in content["rounds"]:
            thing.restore(content["rounds"][name])
        else:  # a meter that was not Restorable then, or the memory of clients that were elsewhere
            log.warning("%s: the checkpoint has no state of %s, which starts over", folder.path, type(thing).__name__)
    write(folder.config, config.dumps(run))  # the number of rounds may have changed
    _compare_surroundings(run, folder, manifest["config"].get("chunk"))
    return training, run


def check_resumable(run: Run, folder: Folder) -> None:
    """Refuse a folder that holds another run, or more rounds than this one has."""
    if folder.store.rounds():
        _checked(folder.store.load()[1]["config"], run, folder)
    elif folder.holds_run():
        _checked(config.as_dict(folder.run()), run, folder)


def _checked(then: Mapping[str, Any], run: Run, folder: Folder) -> Run:
    """Return the run with the engines that it began with; refuse a folder that it cannot continue."""
    run = with_engines_of(then, run)
    _check_same(then, run, folder)
    done = max(folder.store.rounds(), default=0)
    if done > run.rounds:
        raise CheckpointError(f"{folder.path} is at round {done} already; resume it with at least as many rounds")
    return run


def _check_data(run: Run, training: Training, folder: Folder) -> None:
    """Refuse to resume on other samples than the run began with."""
    then, now = folder.surroundings().get("data"), training.digest
    if then is not None and now is not None and then != now:
        raise CheckpointError(
            f"the data {run.data} have changed since {folder.path} began: their digest is {now[:12]} and was "
            f"{then[:12]}; put the old data back, or start over with --overwrite"
        )


def with_engines_of(known: Mapping[str, Any], run: Run) -> Run:
    """Return the run with `auto` replaced by the engines that it was resolved to before."""
    return replace(run, **{key: known[key] for key in ENGINES if key in known and getattr(run, key) == "auto"})


def _check_same(then: Mapping[str, Any], run: Run, folder: Folder) -> None:
    found = difference(then, run)
    if found:
        raise CheckpointError(
            f"{folder.path} holds a run of another configuration: {found}; "
            "resume it with its own, start over with --overwrite, or choose another --out"
        )


def difference(then: Mapping[str, Any], run: Run) -> str:
    """Describe how a run differs from a saved configuration; empty if the run can continue it."""
    known = config.changed(Run(), then, "the checkpoint")  # a key that is newer than the checkpoint has its default
    there, here = (config.flat(json.loads(json.dumps(config.as_dict(r)))) for r in (known, run))
    keys = [k for k in sorted(there.keys() | here.keys()) if k not in MAY_CHANGE and there.get(k) != here.get(k)]
    return ", ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in keys)


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what the numbers of a run on this device may depend on besides its configuration."""
    return {
        "cutlayer": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        **({"gpu": torch.cuda.get_device_name(device)} if torch.device(device).type == "cuda" else {}),
    }


def _compare_surroundings(run: Run, folder: Folder, chunk: int | None) -> None:
    then, now = {**folder.surroundings(), "chunk": chunk}, {**environment(run.device), "chunk": run.chunk}
    for key in now:
        if key in then and then[key] != now[key]:
            change = f"was started with {key} {then[key]} and goes on with {now[key]}"
            log.warning("%s %s: its numbers may differ in their last digits", folder.path, change)
