"""Python objects as the tables of a run: what `cutlayer.train` writes to config.toml, and digests of the rest.

Methods and optimisers that cutlayer's own functions made have the names and options of a run file. Everything else has
the name of its class or function and those of its settings that are plain values. Digests tell whether data, partition
and initial weights are the same.
"""

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.method import OPTIMISERS, Method
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment, SampleTransform
from cutlayer.data.digest import digest as digest_of_samples
from cutlayer.data.partition import Partition
from cutlayer.methods import METHODS
from cutlayer.optim.optimiser import Optimiser, build
from cutlayer.optim.rules import Adam, AdamW, Clip, Momentum, Proximal, WeightDecay
from cutlayer.optim.schedules import SCHEDULES, Schedule, constant, warmup
from cutlayer.pieces.factory import call_of
from cutlayer.pieces.sampler import SAMPLERS, Sampler, digests
from cutlayer.runs.config import GIVEN, Choice, Run
from cutlayer.runs.metrics import by_name
from cutlayer.split import Split

PLAIN = (bool, int, float, str)


def described(given: Mapping[str, Any]) -> Run:
    """Return the run that the arguments of `train` describe, as far as they have names."""
    method, data, engine, augment = (given[key] for key in ("method", "data", "engine", "augment"))
    same = [f.name for f in fields(Run) if f.name in given]
    metrics = {} if given["metrics"] is None else by_name(given["metrics"], data.num_classes)
    own = {
        "name": given["name"] or name_of(Path(given["out"])),
        "data": "python",
        "validation": 0.0,  # a fraction of the data in a run file, and samples here
        "clients": len(given["partition"]),
        "partition": Choice("python"),
        "sampler": _sampler(given["sampler"]),
        "augment": augment if isinstance(augment, Augment) else None,
        "cut": method.model.cut,
        "head": method.model.head,
        **choices(method),
        "devices": None if given["devices"] is None else Choice("python"),
        "engine": engine if isinstance(engine, str) else engine.name,
        "device": str(data.y.device),
        "codecs": {name: plain(own) for name, own in given["codecs"].items()},
        "meters": tuple(qualified(meter) for meter in given["meters"]),
        "metrics": tuple(metrics),
        "python": {
            **{key: repr(given[key]) for key in ("data", "test", "validation") if given[key] is not None},
            "loss": qualified(method.model.loss),
            **({"augment": qualified(augment.fn)} if isinstance(augment, SampleTransform) else {}),
            **({"metrics": tuple(qualified(metric) for metric in metrics.values())} if metrics else {}),
        },
    }
    return Run(**{**{key: _number(given[key]) for key in same}, **own})


def _number(value: Any) -> Any:
    """Return a number of numpy as one of Python, which JSON can store."""
    return value.item() if isinstance(value, np.generic) else value


def _sampler(sampler: Sampler) -> Choice:
    name = next((n for n, entry in SAMPLERS.items() if entry is type(sampler)), qualified(sampler))
    return Choice(name, {k: plain(v) for k, v in _settings(sampler).items()})


def inputs_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of what has no name, and must be the same when the run is resumed."""
    split = given["method"].model
    named = {key: given[key] for key in ("data", "partition", "test", "validation", "test_partition", "devices")}
    named |= {"the model": re.sub(r" at 0x[0-9a-f]+", "", repr(split.model)), "the initial weights": split.initial()}
    return {key: digest(value) for key, value in named.items() if value is not None} | digests(given["sampler"])


def name_of(out: Path) -> str:
    """Return a run's name, by which runs are compared: the last two folders of its path, without that of its seed."""
    parts = [part for part in out.resolve().parts[1:] if not part.startswith("seed-")]
    return "/".join(parts[-2:]) or "run"


def choices(method: Method) -> dict[str, Choice | None]:
    """Return the tables [method], [model], [optimiser] and [server_optimiser] of a method."""
    split: Split = method.model
    call = call_of(method)
    made_of = _settings(method) if call is None else dict(call.arguments)
    name = next((n for n, entry in METHODS.items() if entry is type(method)), type(method).__name__)
    given = [made_of[key] for key in OPTIMISERS if key in made_of]
    server = made_of.get("server_opt")
    options = {k: plain(v) for k, v in made_of.items() if k not in GIVEN and k not in OPTIMISERS}
    return {
        "method": Choice(name if call is None else call.name, options),
        "model": Choice(type(split.model).__name__, {"parameters": _size(split), "units": split.units}),
        "optimiser": _choice(given[0]) if given else Choice("none"),
        "server_optimiser": None if server is None or server == given[0] else _choice(server),
    }


def _settings(thing: Any) -> dict[str, Any]:
    """Return the settings of a dataclass that its caller gave or could have given."""
    return {f.name: vars(thing)[f.name] for f in fields(thing) if f.init} if is_dataclass(thing) else {}


def _size(split: Split) -> int:
    return sum(parameter.numel() for parameter in split.model.parameters())


def plain(value: Any) -> Any:
    """Return a value as it can be written to TOML: objects by their name and plain settings."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Optimiser):
        choice = _choice(value)
        return {"name": choice.name, **choice.options}
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": type(value).__name__, **{k: plain(v) for k, v in _settings(value).items()}}
    return qualified(value)


def qualified(value: Any) -> str:
    """Return the name of a function or class, or of an object's class."""
    thing = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return f"{thing.__module__}.{thing.__qualname__}"


def _choice(opt: Any) -> Choice:
    """Return an optimiser as its table in a run file, if it can be one."""
    if not isinstance(opt, Optimiser):
        return Choice(type(opt).__name__, {k: plain(v) for k, v in _settings(opt).items()})
    lr = _rate(opt.lr)
    name, options = _rule(opt)
    for rule in opt.before:
        if isinstance(rule, Proximal):
            options["proximal"] = rule.mu
        elif isinstance(rule, Clip):
            options |= {"clip": rule.max_norm} | ({} if rule.scope == "part" else {"clip_scope": rule.scope})
        elif isinstance(rule, WeightDecay):
            options |= {"weight_decay": rule.rate} | ({} if "clip" in options else {"clip_decay": True})
    if "clip" not in options:
        options.pop("clip_decay", None)
    if isinstance(lr, str) or build(name, lr=lr, **options) != opt:  # rules or a schedule of somebody's own
        own = {"before": [plain(rule) for rule in opt.before], "rule": plain(opt.rule)}
        return Choice(type(opt).__name__, {"lr": lr, **own})
    return Choice(name, {"lr": lr, **options})


def _rule(opt: Optimiser) -> tuple[str, dict[str, Any]]:
    rule = opt.rule
    if isinstance(rule, Momentum):
        return "sgd", ({"momentum": rule.beta} if rule.beta else {}) | ({"nesterov": True} if rule.nesterov else {})
    if isinstance(rule, AdamW):
        return "adamw", {"betas": rule.adam.betas, "eps": rule.adam.eps, "weight_decay": rule.weight_decay}
    return ("adam", {"betas": rule.betas, "eps": rule.eps}) if isinstance(rule, Adam) else ("sgd", {})


def _rate(lr: Schedule) -> Any:
    """Return a learning rate, or the table of a schedule; one of somebody's own by its name."""
    if isinstance(lr, constant):
        return lr.lr
    if isinstance(lr, warmup):
        inner = _rate(lr.schedule)
        table = inner if isinstance(inner, dict) else {"schedule": "constant", "lr": inner}
        return qualified(lr) if isinstance(inner, str) else {**table, "warmup": lr.rounds}
    name = next((n for n, made in SCHEDULES.items() if made is type(lr)), None)
    return qualified(lr) if name is None else {"schedule": name, **{k: plain(v) for k, v in _settings(lr).items()}}


def digest(value: Any) -> str:
    """Return a hash of the content of arrays, a partition, a model, or plain settings."""
    if isinstance(value, Arrays):
        return digest_of_samples(value)
    found = hashlib.blake2b(digest_size=8)
    for part in _content(value):
        found.update(part)
    return found.hexdigest()


def _content(value: Any) -> list[Any]:
    if isinstance(value, Partition):
        named = zip(value.names, value.clients, strict=True)
        return [part for name, index in named for part in (name.encode(), np.asarray(index, dtype=np.int64).data)]
    tensors = tree.tensors(value)
    return [part for a in tensors for part in (f"{a.dtype} {tuple(a.shape)}".encode(), _bytes(a))] or [
        repr(value).encode()
    ]


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
