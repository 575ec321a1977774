"""Executes a run in its folder: from the beginning, or from its newest checkpoint as if it had never stopped."""

import json
import logging
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.state import Tensors
from cutlayer.errors import CheckpointError
from cutlayer.models.adapters import export_pretrained
from cutlayer.models.decoders import CausalLM
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.runs.folder import START_AGAIN, Folder, append_line, digest, write, writing
from cutlayer.runs.stopping import Best, Record
from cutlayer.runs.training import Training
from cutlayer.version import __version__

__all__ = ["Folder", "environment", "execute"]

log = logging.getLogger("cutlayer")
Make = Callable[[Run], Training]
# What may change when a run is resumed: its length, how often it writes checkpoints, how many clients have memory.
LENGTH = ("rounds", "until_converged", "until_accuracy", "until_samples", "patience", "min_delta")
MAY_CHANGE = (*LENGTH, "checkpoint_every", "chunk")
ENGINES = ("engine", "server_engine")


def execute(
    run: Run,
    folder: Folder,
    *,
    root: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    make: Make | None = None,
    on_start: Callable[[Training], object] | None = None,
    on_round: Callable[[Training, Record], object] | None = None,
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
            training.tell(partial(on_start, training))
        if training.ended:
            done = f"all {run.rounds} rounds are" if training.state.round == run.rounds else "it stopped early and is"
            log.info("%s: %s done already", folder.path, done)
        else:
            _to_the_end(training, run, folder, on_round)
        _finish(training, folder)
    return training


def _to_the_end(
    training: Training, run: Run, folder: Folder, on_round: Callable[[Training, Record], object] | None
) -> None:
    """Play the rounds that are left; the last one, whatever ends the run, leaves a checkpoint."""
    while not training.ended:
        record = _round(training, run, folder)
        if on_round is not None:
            training.tell(partial(on_round, training, record))
    if training.state.round not in folder.store.rounds():
        _commit(training, run, folder)
    if training.state.round < run.rounds:
        log.info("%s: ended at round %d: %s", folder.path, training.state.round, training.early_end)


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
    append_line(folder.timing, {"round": record["round"], "seconds": seconds, "digest": digest(record)})
    if training.best is not None and training.best.round == record["round"]:
        _write_best(training, folder)
    if record["round"] % run.checkpoint_every == 0 or training.ended:
        _commit(training, run, folder)
    return record


def _commit(training: Training, run: Run, folder: Folder) -> None:
    """Write the checkpoint of the current round."""
    rounds = {name: thing.content() for name, thing in training.runner.restorable().items()}
    best = {} if training.best is None else {"best": training.best}
    inputs = {"inputs": dict(training.inputs)} if training.inputs else {}
    content, manifest = {"state": training.state, "rounds": rounds, **best}, {"config": config.as_dict(run), **inputs}
    folder.store.save(training.state.round, content, manifest)


def _finish(training: Training, folder: Folder) -> None:
    """Write the ledger and the trained model, or this server's half of it."""
    write(folder.ledger, json.dumps(training.runner.ledger.content(), indent=2) + "\n")
    half = training.half()
    if half is None:
        _write_model(training, training.state_dict(), folder.model, folder.pretrained)
    else:
        write(folder.model, _encoded(half))


def _write_best(training: Training, folder: Folder) -> None:
    """Write the best model so far, with its round and the value of the monitored metric as metadata."""
    if training.best is None or training.monitor is None:
        return
    record, key = training.history[training.best.round - 1], training.monitor.key
    told = {"best": json.dumps({"round": record["round"], key: record[key]})}  # one: safetensors does not sort entries
    _write_model(training, training.state_dict(training.best.model), folder.best, folder.best_pretrained, told)


def _write_model(
    training: Training, values: Tensors, file: Path, pretrained: Path, told: dict[str, str] | None = None
) -> None:
    net = training.runner.method.model.model
    if not isinstance(net, CausalLM):
        write(file, _encoded(values, told))
        return
    unfinished = pretrained.with_name(pretrained.name + ".partial")
    with writing("the trained model", file.parent):  # what was trained, not the public base model
        shutil.rmtree(unfinished, ignore_errors=True)
        export_pretrained(net, values, unfinished)
        shutil.rmtree(pretrained, ignore_errors=True)
        unfinished.rename(pretrained)


def _encoded(values: Tensors, told: dict[str, str] | None = None) -> bytes:
    # Copies: safetensors refuses tied weights, which share memory.
    return save({k: v.cpu().clone(memory_format=torch.contiguous_format) for k, v in values.items()}, told)


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
    inputs = {"inputs": dict(training.inputs)} if training.inputs else {}
    surroundings = {**environment(run.device), "engine": training.runner.engine_name, **inputs}
    write(folder.environment, json.dumps(surroundings, indent=2) + "\n", START_AGAIN)
    write(folder.config, config.dumps(run), START_AGAIN)
    return training, run


def _resumed(run: Run, folder: Folder, make: Make, hold: Callable[[], None]) -> tuple[Training, Run]:
    """Return the training of a run as its newest checkpoint left it, and the run with its engines resolved."""
    if not folder.store.rounds():
        then = folder.recorded()
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
    _check_inputs(manifest.get("inputs", {}), training.inputs, folder)
    content = tree.map(lambda a: a if a.is_meta else a.to(run.device), content)
    training.history = folder.cut_back(done)
    training.state = content["state"]
    _restore_best(training, content.get("best"), folder)
    for name, thing in training.runner.restorable().items():
        if name in content["rounds"]:
            thing.restore(content["rounds"][name])
        else:  # a meter that was not Restorable then, or the memory of clients that were elsewhere
            log.warning("%s: the checkpoint has no state of %s, which starts over", folder.path, type(thing).__name__)
    write(folder.config, config.dumps(run))  # the number of rounds may have changed
    _compare_surroundings(run, folder, manifest["config"].get("chunk"))
    return training, run


def _restore_best(training: Training, best: Best | None, folder: Folder) -> None:
    """Go back to the best model up to the checkpoint; the file may be of a later round."""
    training.best = None if best is None else best._replace(model=tree.map(Tensor.cpu, best.model))
    if best is not None:
        _write_best(training, folder)
    elif training.monitor is not None and training.history:
        log.warning("%s: the checkpoint has no best model; only later rounds count for it", folder.path)


def _check_inputs(then: Mapping[str, str], now: Mapping[str, str], folder: Folder) -> None:
    """Refuse data, a partition or initial weights that are not those that the run began with."""
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if then and changed:  # an older run has no digests
        raise CheckpointError(
            f"{folder.path} began with other content: {', '.join(changed)} changed since; give what it began with, "
            "start over with --overwrite, or choose another --out"
        )


def check_resumable(run: Run, folder: Folder) -> None:
    """Refuse a folder that holds another run, or more rounds than this one has."""
    if folder.store.rounds():
        _checked(folder.store.load()[1]["config"], run, folder)
    elif folder.holds_run():
        _checked(config.as_dict(folder.recorded()), run, folder)


def _checked(then: Mapping[str, Any], run: Run, folder: Folder) -> Run:
    """Return the run with the engines that it began with; refuse a folder that it cannot continue."""
    run = with_engines_of(then, run)
    _check_same(then, run, folder)
    done = max(folder.store.rounds(), default=0)
    if done > run.rounds:
        raise CheckpointError(f"{folder.path} is at round {done} already; resume it with at least as many rounds")
    return run


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
    known = config.recorded(then, "the checkpoint")  # a key that is newer than the checkpoint has its default
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
