"""Python objects as the tables of a run: what `cutlayer.train` writes to config.toml, and digests of the rest.

Methods and optimisers that cutlayer's own functions made have the names and options of a run file. Everything else has
the name of its class or function and its settings. Digests tell whether data, partition, model and initial weights are
the same. All of it is the same in another process that makes the same objects.
"""

import functools
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

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
from cutlayer.runs.metrics import Accumulating, Metric, by_name
from cutlayer.split import Split

PLAIN = (bool, int, float, str)
NAMED_ONLY = (type, ModuleType, logging.Logger, Split)  # what they hold is no setting, or has digests of its own
DEEPEST = 8  # attributes of attributes of an object; what is below has names only
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
PASSING = re.compile("^_|_version$")  # what a library notes in its configurations besides settings
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


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
            "loss": plain(method.model.loss),
            **({"augment": plain(augment.fn)} if isinstance(augment, SampleTransform) else {}),
            **({"metrics": tuple(_metric(metric) for metric in metrics.values())} if metrics else {}),
        },
    }
    return Run(**{**{key: _number(given[key]) for key in same}, **own})


def _number(value: Any) -> Any:
    """Return a number of numpy as one of Python, which JSON can store."""
    return value.item() if isinstance(value, np.generic) else value


def _metric(metric: Metric) -> Any:
    """Return a metric as its settings; what it saw in an earlier evaluation is none."""
    if isinstance(metric, Accumulating):
        metric.reset()
    return plain(metric)


def _sampler(sampler: Sampler) -> Choice:
    name = next((n for n, entry in SAMPLERS.items() if entry is type(sampler)), qualified(sampler))
    return Choice(name, {k: plain(v) for k, v in _settings(sampler).items()})


def inputs_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of what has no name, and must be the same when the run is resumed."""
    split = given["method"].model
    named = {key: given[key] for key in ("data", "partition", "test", "validation", "test_partition", "devices")}
    named |= {"the model": plain(split.model), "the initial weights": split.initial()}
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
    """Return what an object was made with: fields, arguments of a partial, what an inner function holds, or attributes.

    Values that are computed when they are first used are none of these.
    """
    if isinstance(thing, NAMED_ONLY):
        return {}
    if isinstance(thing, functools.partial):
        return {"func": thing.func, **({"args": thing.args} if thing.args else {}), **thing.keywords}
    if inspect.isroutine(thing):
        return _held(thing) if inspect.isfunction(thing) and "<" in thing.__qualname__ else {}
    if is_dataclass(thing):
        return {f.name: getattr(thing, f.name) for f in fields(thing) if f.init}
    cached = functools.cached_property
    own = getattr(thing, "__dict__", {})
    return {k: v for k, v in own.items() if not isinstance(inspect.getattr_static(type(thing), k, None), cached)}


def _held(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the plain values and tensors that a lambda or inner function has from the code around it.

    Others are left out: it may hold a whole program, whose state is no setting.
    """
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    held = {**inspect.getclosurevars(function).nonlocals, **defaults}
    return {name: value for name, value in held.items() if isinstance(value, (*PLAIN, Tensor, np.ndarray, tuple))}


def _size(split: Split) -> int:
    return sum(parameter.numel() for parameter in split.model.parameters())


def plain(value: Any, seen: dict[int, Any] | None = None, depth: int = 0, *, in_module: bool = False) -> Any:
    """Return a value as it can be written to TOML: objects by their name and settings, modules and arrays by a digest.

    An object that was `seen` before, or is too deep inside of another, has its name only.
    """
    seen = {} if seen is None else seen
    inner = functools.partial(plain, seen=seen, depth=depth + 1, in_module=in_module)
    if value is None or isinstance(value, PLAIN):
        return value if value == value else "nan"  # NaN differs from itself
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Tensor | np.ndarray):
        return _array(value)
    if depth > DEEPEST or id(value) in seen:
        return qualified(value)
    if isinstance(value, Mapping):
        return {ADDRESS.sub("", str(k)): inner(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return ["None" if v is None else inner(v) for v in value]  # TOML has no None
    if isinstance(value, set | frozenset):
        return sorted(map(inner, value), key=repr)
    if isinstance(value, Optimiser):
        choice = _choice(value)
        return {"name": choice.name, **choice.options}
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        return f"{qualified(value)} {digest(repr(_structure(value, seen, depth)))}"
    settings = {k: inner(v) for k, v in _settings(value).items() if not (in_module and PASSING.search(k))}
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": type(value).__name__, **settings}
    return {"name": qualified(value), **settings} if settings else _word(value)


def _structure(module: nn.Module, seen: dict[int, Any], depth: int) -> list[Any]:
    """Return what the forward of a module may read besides parameters: modes, buffers and attributes, by path."""
    inner = functools.partial(plain, seen=seen, depth=depth + 1, in_module=True)
    return [
        (path, qualified(m), m.training, inner(dict(m.named_buffers(recurse=False))), inner(_attributes(m)))
        for path, m in module.named_modules(remove_duplicate=False)
    ]


def _attributes(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, fx.GraphModule):
        return {"code": module.code}
    return {k: v for k, v in vars(module).items() if k not in OF_EVERY_MODULE}


def _array(value: Tensor | np.ndarray[Any, Any]) -> Any:
    """Return an array by its shape and content; parameters have a digest with the weights."""
    if isinstance(value, np.ndarray):
        return _array(torch.as_tensor(value)) if value.dtype.kind in "biufc" else plain(value.tolist())
    shape = f"{value.dtype} {tuple(value.shape)}"
    return f"{shape} {digest(value)}" if type(value) is Tensor and not value.is_meta else shape


def _word(value: Any) -> str:
    """Return an object without settings by what it prints, or by its name if it prints its address."""
    printed = repr(value)
    known = not isinstance(value, NAMED_ONLY) and not inspect.isroutine(value) and not ADDRESS.search(printed)
    return printed if known else qualified(value)


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
    if _is_own(lr) or build(name, lr=lr, **options) != opt:  # rules or a schedule of somebody's own
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
    """Return a learning rate, or the table of a schedule; one of somebody's own by its name and settings."""
    if isinstance(lr, constant):
        return lr.lr
    if isinstance(lr, warmup):
        inner = _rate(lr.schedule)
        table = inner if isinstance(inner, dict) else {"schedule": "constant", "lr": inner}
        return plain(lr) if _is_own(inner) else {**table, "warmup": lr.rounds}
    name = next((n for n, made in SCHEDULES.items() if made is type(lr)), None)
    return plain(lr) if name is None else {"schedule": name, **{k: plain(v) for k, v in _settings(lr).items()}}


def _is_own(rate: Any) -> bool:
    """Return whether a rate is what `plain` says of a schedule of somebody's own."""
    return isinstance(rate, str) or (isinstance(rate, dict) and "name" in rate)


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
