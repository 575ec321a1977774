"""The configuration of a run: what a recipe returns and a TOML file contains.

    data = "digits"
    rounds = 40
    method = "sfl_v2"                # short for a table with only a name

    [optimiser]
    name = "sgd"
    lr = { schedule = "cosine", lr = 0.1, rounds = 40 }
    momentum = 0.9

Everything in a file is checked when it is read, before any data is loaded.
"""

import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec

from cutlayer import codecs, optim, registry
from cutlayer.core.batches import Batching
from cutlayer.core.checks import check_device_name, check_most_weight
from cutlayer.core.coders import coder
from cutlayer.core.method import PYTHON_ONLY
from cutlayer.core.precision import Precision
from cutlayer.data.augment import Augment
from cutlayer.data.own import OwnData, is_path
from cutlayer.data.partition import PARTITIONS
from cutlayer.data.sample import Sample
from cutlayer.data.sources import DATA
from cutlayer.engines.auto import ENGINES
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.methods import METHODS
from cutlayer.models import MODELS, check_init, default_init
from cutlayer.optim import OPTIMISERS
from cutlayer.optim.schedules import SCHEDULES, Schedule
from cutlayer.pieces.losses import LOSSES
from cutlayer.pieces.sampler import SAMPLERS
from cutlayer.planning.devices import DEVICES
from cutlayer.runs.metrics import METRICS, Goal
from cutlayer.runs.stopping import Limits

MOST_THREADS = 4096
COUNTS = ("clients", "per_round", "rounds", "until_samples", "chunk", "cpu_threads", "eval_every", "checkpoint_every")


@dataclass(frozen=True)
class Choice:
    """A name from a registry, with its options; an option that is None counts as left out."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {k: _with_tuples(v) for k, v in self.options.items() if v is not None}
        object.__setattr__(self, "options", given)


def _with_tuples(value: Any) -> Any:
    """Replace lists by tuples: TOML has only lists, and a run that is written and read again must equal itself."""
    if isinstance(value, Mapping):
        return {k: _with_tuples(v) for k, v in value.items() if v is not None}
    return tuple(_with_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class Run:
    """All settings of one training run; the same run on the same machine and engine gives the same metrics file."""

    name: str = "run"  # also the folder below --out
    data: str | OwnData = "digits"  # a name, or a file or folder
    subset: float = 1.0  # fraction of all samples that is used, chosen by the seed
    augment: Augment | None = None  # random changes of the training images; none by default
    validation: float = 0.0  # fraction of the training samples held out before clients get theirs
    clients: int = 20
    per_round: int | None = None  # clients that take part in a round; all of them by default
    sampler: Choice = Choice("uniform")  # how these clients are drawn
    partition: Choice = Choice("dirichlet", {"alpha": 0.3})
    sample: Sample | None = None  # shape and type of a sample, if only devices hold data
    model: Choice = Choice("cnn")
    loss: str | None = None  # by default cross_entropy for classes and mse for numbers
    cut: int | str = 1  # units at the client, or the name of the last of them
    head: int | str | None = None  # first unit that is back at the client (U-shape)
    weights: str | None = None  # file of initial weights, .safetensors or .pth; drawn from the seed by default
    fresh: tuple[str, ...] = ()  # sub-modules, such as classifier, that keep their drawn weights nevertheless
    freeze_norms: bool = False  # BatchNorm layers keep their initial statistics and parameters
    method: Choice = Choice("sfl_v1")
    optimiser: Choice = Choice("sgd", {"lr": 0.05})
    server_optimiser: Choice | None = None  # the same as the clients' by default
    batching: Batching = Batching()
    devices: Choice | None = None  # simulated devices; with them a run has a clock
    rounds: int = 20
    until_converged: bool = False  # stop early, once five evaluations gain next to nothing
    until_accuracy: float | None = None  # stop early, once the test accuracy is this high
    until_samples: int | None = None  # stop early, once clients have processed so many samples in total
    patience: int | None = None  # stop early, after so many evaluations without a gain of the monitored metric
    monitor: str | None = None  # such as "validation_accuracy": its best model is kept; with patience it has a default
    mode: Goal | None = None  # whether it should rise ("max") or fall; known for cutlayer's own metrics
    min_delta: float = 0.0  # a gain is more than this
    metrics: tuple[str, ...] = ()  # besides the loss; for classes the accuracy by default
    hold_out: float = 0.0  # fraction of each client's samples that it keeps for its own test of the model
    seed: int = 0
    engine: str = "auto"
    server_engine: str = "auto"  # of servers whose clients are on Ray or on devices
    chunk: int | None = None  # most clients that vmap stacks at a time, or that have their own memory on graph
    codecs: dict[str, Any] = field(default_factory=dict)  # by kind: how its values are encoded before they cross
    device: str = "cpu"
    precision: Precision = "fp32"  # of the computation in the layers
    cpu_threads: int | None = None  # of torch; its own choice by default
    eval_every: int = 1  # the last round is always evaluated
    per_client: bool = False  # also measure the model on each client's own samples
    guard: bool = True  # drop updates that are not finite, or out of all proportion to those of the other clients
    most_weight: float | None = None  # of a client in averages, in medians of the round's samples; no limit by default
    meters: tuple[str, ...] = ()  # that watch the run besides the ledger and the clock
    checkpoint_every: int = 1  # the last round always writes one
    # Of a run that `cutlayer.train` made: what only Python can name.
    python: dict[str, Any] | None = field(default=None, metadata=PYTHON_ONLY)

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.cpu_threads is not None and self.cpu_threads > MOST_THREADS:
            raise ConfigError(f"cpu_threads is {self.cpu_threads}; it must be at most {MOST_THREADS}")
        for name in ("subset", "until_accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}; it must be a fraction above 0 and up to 1")
        for name in ("validation", "hold_out"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a fraction from 0 up to below 1")
        check_most_weight(self.most_weight)
        Limits.of(self)
        check_device_name(self.device)
        path = PurePosixPath(self.name)
        if not path.parts or path.is_absolute() or ".." in path.parts or any(c in self.name for c in "\\\0"):
            raise ConfigError(f"the name {self.name!r} cannot be a folder below --out; use words, with / between them")
        self._tell_init()

    def _tell_init(self) -> None:
        """Make the source of the initial weights explicit: a file, or the `init` of the model."""
        default = default_init(self.model.name)
        if default is None or self.python is not None:
            return
        if self.weights is None:
            object.__setattr__(self, "model", Choice(self.model.name, {"init": default, **self.model.options}))
        elif "init" in self.model.options:
            raise ConfigError(f"the weights come from {self.weights}, so model.init chooses nothing; leave it out")


TABLES: dict[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {  # what the `name` in a table may be
    "sampler": ("sampler", SAMPLERS),
    "partition": ("partition", PARTITIONS),
    "model": ("model", MODELS),
    "method": ("method", METHODS),
    "optimiser": ("optimiser", OPTIMISERS),
    "server_optimiser": ("optimiser", OPTIMISERS),
    "devices": ("devices", DEVICES),
}
GIVEN = ("model", "client_opt", "server_opt", "devices", "costs")  # arguments of a method that a user cannot set
FROM_DATA = ("num_classes", "in_features", "in_channels", "image_size", "context")  # of a model; may be left out
SETTINGS: dict[str, type[Any]] = {"batching": Batching, "augment": Augment, "sample": Sample}  # tables without a name
NAMES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "loss": ("loss", LOSSES),
    "engine": ("engine", ENGINES),
    "server_engine": ("engine", ENGINES),
    "metrics": ("metric", METRICS),
}

REPEAT = "repeat it with that program: `cutlayer.train(..., out=..., resume=True)` goes on with it"

WORDS = {  # for the types in the messages of msgspec
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "left out",
}
WARMUP = inspect.Parameter("warmup", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int)


def read(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; refuse one that is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}; check the path") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def changed(run: Run, changes: Mapping[str, Any], where: str) -> Run:
    """Return the run with these keys replaced; a table with the same name changes only the options that it lists.

    Names, types and values are checked; `where` is the file or command line that messages refer to.
    """
    if "python" in changes:
        raise ConfigError(f"{where} is the run of a Python program, whose objects a file cannot name; {REPEAT}")
    known = registry.options_of(Run)
    values: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in known:
            _refuse_key(run, key, value, known, where)
        if key == "data":
            values[key] = _data(run.data, value, where)
        elif key in TABLES:
            values[key] = _choice(getattr(run, key), value, key, f"{where}, [{key}]")
        elif key in SETTINGS:
            values[key] = _settings(key, SETTINGS[key], getattr(run, key), value, f"{where}, [{key}]")
        elif key == "codecs":
            values[key] = _codecs(run.codecs, value, where)
        elif isinstance(value, Mapping):
            raise UnknownNameError("table", key, (*TABLES, *SETTINGS, "codecs"), where)
        else:
            values[key] = _typed(key, value, known[key].annotation, where)
            for name in () if key not in NAMES or value is None else [value] if isinstance(value, str) else value:
                registry.find(*NAMES[key], name, where)
    table = changes.get("model")
    if values.get("weights") is not None and not (isinstance(table, Mapping) and "init" in table):
        values["model"] = _without_init(values.get("model", run.model))  # a file of weights replaces it
    return _made(where, dataclasses.replace, run, **values)  # type: ignore[no-any-return]


def _refuse_key(run: Run, key: str, value: Any, known: registry.Parameters, where: str) -> NoReturn:
    """Refuse an unknown key; if it is an option of a table, say how to write it."""
    for table, kind in (SETTINGS | {"data": OwnData}).items():
        if key in registry.options_of(kind):
            _refuse_option(key, table, ({"path": "mine.csv"} if table == "data" else {}) | {key: value}, where)
    for table, (_, entries) in TABLES.items():
        own = getattr(run, table)
        names = [*([own.name] if own is not None and own.name in entries else []), *entries]
        name = next((name for name in names if key in registry.options_of(entries[name], GIVEN)), None)
        if name is not None:
            _refuse_option(key, table, {"name": name, key: value}, where)
    raise UnknownNameError("key", key, known, where)


def _refuse_option(key: str, table: str, written: Mapping[str, Any], where: str) -> NoReturn:
    raise ConfigError(
        f"unknown key {key!r} in {where}; {key} is an option of the {table}: {table} = {literal(written)}"
    )


def recorded(changes: Mapping[str, Any], where: str) -> Run:
    """Return a run from what `dumps` wrote; the things that it names need not be registered any more."""
    if "python" in changes:
        return _of_python(changes, where)
    run = Run()
    for key, value in changes.items():
        try:
            run = changed(run, {key: value}, where)
        except UnknownNameError:
            if key not in TABLES and key not in NAMES and key not in ("data", "codecs"):
                raise
            if key == "codecs":
                value = _with_tuples(value)
            elif isinstance(value, Mapping):
                value = Choice(value["name"], {k: v for k, v in value.items() if k != "name"})
            elif key in TABLES:
                value = Choice(value)
            run = dataclasses.replace(run, **{key: value})
    return run


def _of_python(changes: Mapping[str, Any], where: str) -> Run:
    """Return the run of a Python program: what it names are its own objects."""
    named = ("data", "python", "codecs")
    own = {k: _with_tuples(v) for k, v in changes.items() if k in TABLES or k in NAMES or k in named}
    for key, value in own.items():
        if key in TABLES:
            own[key] = Choice(value["name"], {k: v for k, v in value.items() if k != "name"})
    known = changed(Run(), {k: v for k, v in changes.items() if k not in own}, where)
    return dataclasses.replace(known, **own)


def _without_init(model: Choice) -> Choice:
    if default_init(model.name) is None:
        return model
    return Choice(model.name, {k: v for k, v in model.options.items() if k != "init"})


def _choice(old: Choice | None, value: Any, key: str, where: str) -> Choice:
    what, entries = TABLES[key]
    if not isinstance(value, Mapping):
        value = {"name": value}
    name = value.get("name", old.name if old else None)
    if not isinstance(name, str):
        raise ConfigError(f"{where} needs a name, such as name = {literal(min(entries))}")
    kept = old.options if old is not None and old.name == name else {}
    options = {**kept, **{k: v for k, v in value.items() if k != "name"}}
    known = registry.options_of(registry.find(what, entries, name, where), GIVEN if key == "method" else ())
    if key == "model":
        _made(where, check_init, name, options)
        known = {k: p.replace(default=None) if k in FROM_DATA else p for k, p in known.items()}
    choice = Choice(name, _checked(f"{what} {name!r}", known, options, where))
    if entries is OPTIMISERS:  # like devices and partitions: cheap to build, and checks its own values
        _made(where, optim.build, name, **choice.options)
    if key in ("devices", "partition", "sampler"):
        _made(where, entries[name], **choice.options)
    return choice


def _data(old: str | OwnData, value: Any, where: str) -> str | OwnData:
    """Return the name of a data set, or one's own data: a path alone, or a table with a path."""
    if isinstance(value, Mapping):
        own: OwnData = _settings("data", OwnData, old if isinstance(old, OwnData) else None, value, f"{where}, [data]")
        return own
    name: str = _typed("data", value, str, where)
    if name not in DATA and is_path(name):
        return OwnData(path=name)
    registry.find("data set", DATA, name, where)
    return name


def _codecs(old: Mapping[str, Any], value: Any, where: str) -> dict[str, Any]:
    """Return the codec of each kind; a table without a name changes options of the one before."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'{where}, [codecs] must be a table of kinds, such as codecs = {{ activations = "int8" }}')
    found = {}
    for name, spec in value.items():
        before = {"name": old[name]} if isinstance(old.get(name), str) else old.get(name)
        if isinstance(spec, Mapping) and "name" not in spec and isinstance(before, Mapping):
            spec = {**before, **spec}
        found[name] = _with_tuples(spec)
        own = f"{where}, [codecs.{name}]"
        _made(own, coder, name, _made(own, codecs.build, found[name]))
    return {**old, **found}


def _settings(key: str, kind: type[Any], old: Any, value: Any, where: str) -> Any:
    known = registry.options_of(kind)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table with {', '.join(known)}")
    kept = {} if old is None else {name: getattr(old, name) for name in known}
    # With old values, nothing is missing.
    needed = known if old is None else {k: p.replace(default=None) for k, p in known.items()}
    changes = _checked(key, needed, value, where)
    return _made(where, kind, **{**kept, **changes})


def _checked(what: str, known: registry.Parameters, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of an entry, converted to their types; refuse unknown and missing ones."""
    registry.check_options(what, known, options, where)
    return {key: _typed(key, value, known[key].annotation, where) for key, value in options.items()}


def _typed(key: str, value: Any, kind: Any, where: str) -> Any:
    """Convert a value to the type that a function's signature states, or refuse it; keep it if none is stated."""
    if kind is inspect.Parameter.empty or isinstance(kind, str):  # none, or not evaluated (annotations of __future__)
        return value
    if kind == float | Schedule:
        return _schedule(value, f"{where}, {key}") if isinstance(value, Mapping) else _typed(key, value, float, where)
    if get_origin(kind) is Literal and isinstance(value, str) and value not in get_args(kind):
        raise UnknownNameError(key, value, get_args(kind), where)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} = {literal(value)} in {where} does not fit: {_wanted(key, str(error))}") from None


def _wanted(key: str, reason: str) -> str:
    """Say what a value must be, from what msgspec says of it."""
    told = re.fullmatch(r"Expected `([^`]*)`, got `[^`]*`(?: - at `\$(.*)`)?", reason)
    if told is None or not WORDS.keys() >= set(told[1].split(" | ")):
        return reason.replace("`", "")
    kinds = [WORDS[kind] for kind in told[1].split(" | ") if kind != "null"]  # one that is left out is no mistake
    return f"{key}{told[2] or ''} must be {' or '.join(kinds)}"


def _schedule(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = str(value.get("schedule", "constant"))
    known = {**registry.options_of(registry.find("schedule", SCHEDULES, name, where)), "warmup": WARMUP}
    options = {k: v for k, v in value.items() if k != "schedule"}
    return {"schedule": name, **_checked(f"schedule {name!r}", known, options, where)}


def _made(where: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return fn(...), with `where` in front of its error messages."""
    try:
        return fn(*args, **options)
    except (ConfigError, UnknownNameError) as error:
        error.args = (f"{where}: {error}",)
        raise


def as_dict(run: Run) -> dict[str, Any]:
    """Return the run as the tables of its TOML file, without keys that have no value."""
    plain: dict[str, Any] = {}
    for f in fields(Run):
        value = getattr(run, f.name)
        if isinstance(value, Choice):
            value = {"name": value.name, **value.options}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {k: v for k, v in dataclasses.asdict(value).items() if v is not None and v != ()}
        if value is not None and value != () and value != {}:
            plain[f.name] = value
    return plain


def flat(table: Mapping[str, Any], depth: int | None = None) -> dict[str, Any]:
    """Flatten tables into keys with dots, up to a depth; the `name` in a table gets the key of the table."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and depth != 0:
            own = flat(value, None if depth is None else depth - 1)
            found |= {key if option == "name" else f"{key}.{option}": content for option, content in own.items()}
        else:
            found[key] = value
    return found


def dumps(run: Run) -> str:
    """Return the run as TOML, which `cutlayer run` can repeat."""
    plain = as_dict(run)
    tables = {k: v for k, v in plain.items() if isinstance(v, dict)}
    lines = [f"{k} = {literal(v)}" for k, v in plain.items() if k not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(k)} = {literal(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {literal(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML escapes as JSON does, and DEL
    if isinstance(value, bool):
        return str(value).lower()
    return repr(float(value)) if isinstance(value, float) else str(value)


def _key(name: str) -> str:
    """Return a key of an inline table, in quotes if it is no plain word."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)
