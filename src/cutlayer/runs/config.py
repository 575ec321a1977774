"""A run as data: what a recipe returns and what a TOML file spells.

    data = "digits"
    rounds = 40
    method = "sfl_v2"                # short for a table with nothing but a name

    [optimiser]
    name = "sgd"
    lr = { schedule = "cosine", lr = 0.1, rounds = 40 }
    momentum = 0.9

Everything that a file names is checked when it is read, before any data is loaded.
"""

import dataclasses
import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args, get_origin

import msgspec

from cutlayer import optim, registry
from cutlayer.core.batches import Batching
from cutlayer.core.checks import check_device_name
from cutlayer.core.precision import Precision
from cutlayer.data.augment import Augment
from cutlayer.data.partition import PARTITIONS
from cutlayer.data.sample import Sample
from cutlayer.data.sources import DATA
from cutlayer.engines.auto import ENGINES
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.methods import METHODS
from cutlayer.models import MODELS, check_init, default_init
from cutlayer.optim import OPTIMISERS
from cutlayer.optim.schedules import SCHEDULES, Schedule
from cutlayer.pieces.sampler import SAMPLERS
from cutlayer.planning.devices import DEVICES

MOST_THREADS = 4096
COUNTS = ("clients", "per_round", "rounds", "until_samples", "chunk", "cpu_threads", "eval_every", "checkpoint_every")


@dataclass(frozen=True)
class Choice:
    """A name from a registry, with its options; an option that is None is one that is left out."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {k: _with_tuples(v) for k, v in self.options.items() if v is not None}
        object.__setattr__(self, "options", given)


def _with_tuples(value: Any) -> Any:
    """TOML has only lists: without them, a run that is written and read again is equal to itself."""
    if isinstance(value, Mapping):
        return {k: _with_tuples(v) for k, v in value.items() if v is not None}
    return tuple(_with_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, whole: the same run on the same machine and engine gives the same metrics file."""

    name: str = "run"  # and the folder it is kept in
    data: str = "digits"
    subset: float = 1.0  # fraction of all samples that is used at all, chosen by the seed
    augment: Augment | None = None  # random changes of the training images; none by default
    validation: float = 0.0  # fraction of the training samples held out before they are dealt to clients
    clients: int = 20
    per_round: int | None = None  # clients that take part in a round; all of them by default
    sampler: str = "uniform"  # draws them
    partition: Choice = Choice("dirichlet", {"alpha": 0.3})
    sample: Sample | None = None  # what a sample looks like at every device, where a server holds no data of its own
    model: Choice = Choice("cnn")
    cut: int | str = 1  # units at the client, or the name of the last of them
    head: int | str | None = None  # first unit that is back at the client (U-shape)
    weights: str | None = None  # file of initial weights, .safetensors or .pth; drawn from the seed by default
    fresh: tuple[str, ...] = ()  # sub-modules that keep their drawn weights all the same, such as classifier
    freeze_norms: bool = False  # BatchNorm layers keep the statistics and the parameters that they begin with
    method: Choice = Choice("sfl_v1")
    optimiser: Choice = Choice("sgd", {"lr": 0.05})
    server_optimiser: Choice | None = None  # the same as the clients' by default
    batching: Batching = Batching()
    devices: Choice | None = None  # simulated devices; with them a run has a clock
    rounds: int = 20
    until_converged: bool = False  # end before them, once five evaluations gain next to nothing
    until_accuracy: float | None = None  # end before them, once the test accuracy is this high
    until_samples: int | None = None  # end before them, once clients have processed so many samples in all
    seed: int = 0
    engine: str = "auto"
    server_engine: str = "auto"  # of servers whose clients are elsewhere: on Ray, or devices
    chunk: int | None = None  # most clients that vmap stacks at a time, or that have memory of their own on graph
    device: str = "cpu"
    precision: Precision = "fp32"  # that the layers of the model compute in
    cpu_threads: int | None = None  # that torch computes with; as many as it likes by default
    eval_every: int = 1  # the last round is always evaluated
    per_client: bool = False  # also measure the model on each client's own samples
    meters: tuple[str, ...] = ()  # that watch the run beside the ledger and the clock
    checkpoint_every: int = 1  # the last round always leaves one

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.cpu_threads is not None and self.cpu_threads > MOST_THREADS:
            raise ConfigError(f"cpu_threads is {self.cpu_threads}; it must be at most {MOST_THREADS}")
        if not 0 < self.subset <= 1:
            raise ConfigError(f"subset is {self.subset}; it must be a fraction above 0 and up to 1")
        if self.until_accuracy is not None and not 0 < self.until_accuracy <= 1:
            raise ConfigError(f"until_accuracy is {self.until_accuracy}; it must be a fraction above 0 and up to 1")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation is {self.validation}; it must be a fraction from 0 up to below 1")
        check_device_name(self.device)
        path = PurePosixPath(self.name)
        if not path.parts or path.is_absolute() or ".." in path.parts or any(c in self.name for c in "\\\0"):
            raise ConfigError(f"the name {self.name!r} cannot be a folder below --out; use words, with / between them")
        self._tell_init()

    def _tell_init(self) -> None:
        """A run says where its initial weights come from: a file, or the model, whose choice is always spelled out."""
        default = default_init(self.model.name)
        if default is None:
            return
        if self.weights is None:
            object.__setattr__(self, "model", Choice(self.model.name, {"init": default, **self.model.options}))
        elif "init" in self.model.options:
            raise ConfigError(f"the weights come from {self.weights}, so model.init chooses nothing; leave it out")


TABLES: dict[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {  # what the name in a table of the file may be
    "partition": ("partition", PARTITIONS),
    "model": ("model", MODELS),
    "method": ("method", METHODS),
    "optimiser": ("optimiser", OPTIMISERS),
    "server_optimiser": ("optimiser", OPTIMISERS),
    "devices": ("devices", DEVICES),
}
GIVEN = ("model", "client_opt", "server_opt", "devices", "costs")  # arguments of a method that are not the user's
SETTINGS: dict[str, type[Any]] = {"batching": Batching, "augment": Augment, "sample": Sample}  # tables without a name
NAMES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "data": ("data set", DATA),
    "engine": ("engine", ENGINES),
    "server_engine": ("engine", ENGINES),
    "sampler": ("sampler", SAMPLERS),
}

WARMUP = inspect.Parameter("warmup", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int)


def read(path: Path) -> dict[str, Any]:
    """The content of a TOML file, with its syntax errors in a user's words."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}; check the path") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def changed(run: Run, changes: Mapping[str, Any], where: str) -> Run:
    """The run with these keys replaced; a table changes only the options that it names, unless it names another thing.

    Names, types and values are checked; `where` tells a user which file the mistake is in.
    """
    known = registry.options_of(Run)
    values: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in known:
            raise UnknownNameError("key", key, known, where)
        if key in TABLES:
            values[key] = _choice(getattr(run, key), value, key, f"{where}, [{key}]")
        elif key in SETTINGS:
            values[key] = _settings(SETTINGS[key], getattr(run, key), value, f"{where}, [{key}]")
        elif isinstance(value, Mapping):
            raise UnknownNameError("table", key, (*TABLES, *SETTINGS), where)
        else:
            values[key] = _typed(key, value, known[key].annotation, where)
            if key in NAMES:
                registry.find(*NAMES[key], value, where)
    table = changes.get("model")
    if values.get("weights") is not None and not (isinstance(table, Mapping) and "init" in table):
        values["model"] = _without_init(values.get("model", run.model))  # a file of weights takes its place
    return _made(where, dataclasses.replace, run, **values)  # type: ignore[no-any-return]


def recorded(changes: Mapping[str, Any], where: str) -> Run:
    """A run that was trained before, as `dumps` wrote it; what it names need not be known any more."""
    run = Run()
    for key, value in changes.items():
        try:
            run = changed(run, {key: value}, where)
        except UnknownNameError:
            if key not in TABLES and key not in NAMES:
                raise
            if isinstance(value, Mapping):
                value = Choice(value["name"], {k: v for k, v in value.items() if k != "name"})
            run = dataclasses.replace(run, **{key: value})
    return run


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
    choice = Choice(name, _checked(f"{what} {name!r}", known, options, where))
    if entries is OPTIMISERS:  # both cost nothing to make, and know their own limits
        _made(where, optim.build, name, **choice.options)
    if key in ("devices", "partition"):
        _made(where, entries[name], **choice.options)
    return choice


def _settings(kind: type[Any], old: Any, value: Any, where: str) -> Any:
    known = registry.options_of(kind)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table with {', '.join(known)}")
    kept = {} if old is None else {name: getattr(old, name) for name in known}
    needed = known if old is None else {k: p.replace(default=None) for k, p in known.items()}  # the rest is there
    changes = _checked(kind.__name__.lower(), needed, value, where)
    return _made(where, kind, **{**kept, **changes})


def _checked(what: str, known: registry.Parameters, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of a thing: each known, of its type, and none missing."""
    registry.check_options(what, known, options, where)
    return {key: _typed(key, value, known[key].annotation, where) for key, value in options.items()}


def _typed(key: str, value: Any, kind: Any, where: str) -> Any:
    """The value as this type, which a function's signature states."""
    if kind == float | Schedule:
        return _schedule(value, f"{where}, {key}") if isinstance(value, Mapping) else _typed(key, value, float, where)
    if get_origin(kind) is Literal and isinstance(value, str) and value not in get_args(kind):
        raise UnknownNameError(key, value, get_args(kind), where)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")
        raise ConfigError(f"{key} = {literal(value)} in {where} does not fit: {reason}") from None


def _schedule(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = str(value.get("schedule", "constant"))
    known = {**registry.options_of(registry.find("schedule", SCHEDULES, name, where)), "warmup": WARMUP}
    options = {k: v for k, v in value.items() if k != "schedule"}
    return {"schedule": name, **_checked(f"schedule {name!r}", known, options, where)}


def _made(where: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """fn(...), whose complaints about values say where those stand."""
    try:
        return fn(*args, **options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def as_dict(run: Run) -> dict[str, Any]:
    """The run as it would be spelled in TOML: keys without a value are left out."""
    plain: dict[str, Any] = {}
    for f in fields(Run):
        value = getattr(run, f.name)
        if isinstance(value, Choice):
            value = {"name": value.name, **value.options}
        elif f.name in SETTINGS and value is not None:
            value = {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
        if value is not None and value != ():
            plain[f.name] = value
    return plain


def flat(table: Mapping[str, Any], depth: int | None = None) -> dict[str, Any]:
    """Tables as keys with dots, so many levels deep or all; the name of a table's thing goes by the table's name."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and depth != 0:
            own = flat(value, None if depth is None else depth - 1)
            found |= {key if option == "name" else f"{key}.{option}": content for option, content in own.items()}
        else:
            found[key] = value
    return found


def dumps(run: Run) -> str:
    """The run as TOML; `cutlayer run` on it repeats the run."""
    plain = as_dict(run)
    tables = {k: v for k, v in plain.items() if isinstance(v, dict)}
    lines = [f"{k} = {literal(v)}" for k, v in plain.items() if k not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{k} = {literal(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """A value as TOML spells it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {literal(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML escapes as JSON does, and DEL
    if isinstance(value, bool):
        return str(value).lower()
    return repr(float(value)) if isinstance(value, float) else str(value)
