"""Prepares a device, with its own data and its own copy of the method, for the run that a server names."""

import hashlib
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from cutlayer.core import keys
from cutlayer.core.checks import check_device
from cutlayer.core.codec import Coder
from cutlayer.core.kinds import ACTIVATIONS, KINDS, LABELS, Kind
from cutlayer.core.method import Method, shallowest
from cutlayer.core.program import Program
from cutlayer.data import sources
from cutlayer.data.arrays import Arrays
from cutlayer.data.columns import Columns
from cutlayer.data.hold_out import divide
from cutlayer.data.local import check_readable, local
from cutlayer.data.own import OwnData
from cutlayer.errors import ConfigError, DataError, LinkError
from cutlayer.registry import find
from cutlayer.remote.device.audit import Audit
from cutlayer.remote.device.session import ClientDevice, OwnTests
from cutlayer.remote.device.store import ClientStore
from cutlayer.remote.device.terms import Allowance, Attempts, Day, Terms
from cutlayer.remote.device.worker import KIND_BY_NAME
from cutlayer.remote.joining.compiling import Learned, Taking, about_tests
from cutlayer.remote.protocol.messages import Welcome
from cutlayer.runs import build, config
from cutlayer.runs.codecs import built, coders
from cutlayer.runs.config import Run
from cutlayer.runs.examination import Examination

log = logging.getLogger("cutlayer")


@dataclass(kw_only=True)
class DeviceSettings:
    """Where a device has its data and keeps its values, and what it never sends."""

    data: str  # a file or folder, or the name of a data set, of which the device takes its share
    test: Path | None = None  # samples of its own to test the global model on
    state: Path | None = None
    device: str = "cpu"
    never: frozenset[str] = frozenset()
    raw: bool = False  # whether raw inputs may go up, if no layer is at the client
    secret: str | None = None
    root: Path | None = None
    config: Path | None = None  # the only run that this device agrees to; None: any
    two_servers: bool = False  # whether the fed server is another one
    allowance: Allowance = field(default_factory=Allowance)
    audit: Path | None = None  # a record of what leaves
    _ready: tuple[Run, ClientDevice] | None = field(default=None, init=False)
    _attempts: dict[str, Attempts] = field(default_factory=dict, init=False)  # by run
    _day: Day = field(init=False)

    def __post_init__(self) -> None:
        for name in self.never:
            find("kind", KIND_BY_NAME, name)
        check_device(self.device)
        limited = self.allowance.day_seconds < inf
        self._day = Day(self.state / "day" if self.state is not None and limited else None)
        if not Path(self.data).exists() and self.data not in sources.names():
            raise DataError(f"there is no file or folder {self.data}, and no data set of that name; check --data")

    def ready(self, welcome: Welcome) -> ClientDevice:
        """Return the device for this run; it is prepared once and then reused."""
        told = _run_of(welcome.run)
        if self._ready is None or self._ready[0] != told or self._ready[1].client != welcome.client:
            self._ready = None  # what is not needed any more takes no memory
            self._ready = (told, self._made(told, welcome.client))
        return self._ready[1]

    def check(self) -> None:
        """Read the run and the samples as far as they are known before a server is."""
        if self.config is not None:
            self.rehearsed()
            return
        for path in (Path(self.data), *([] if self.test is None else [self.test])):
            if path.exists():  # and is not the name of a data set
                check_readable(path)

    def rehearsed(self) -> ClientDevice:
        """Return the device for its own run, without a server."""
        assert self.config is not None
        return self.ready(Welcome(session=0, client=0, run=config.dumps(_own_run(self.config))))

    def _made(self, told: Run, client: int) -> ClientDevice:
        if self.config is not None:
            _check_agreed(self.config, told)
        run = replace(told, device=self.device, weights=None)  # the values of weights come from the server
        data, held = self._divided(run, self._data(run, client), client)
        if isinstance(data.x, Tensor):  # devices whose inputs have different scales would train a model that fits none
            log.info("%d samples, inputs from %.4g to %.4g", len(data), float(data.x.min()), float(data.x.max()))
        split = build.model_of(run, data, self.root)
        method, _ = build.planned_method(run, split, data, run.clients)
        program, tests = Program(method, coders(run.codecs, split, data.take(range(2)).x)), None
        if held is not None:
            tests = OwnTests(held.to(self.device), Examination.of(method, build.metrics(run, data)))
        self._check_leaving(leaving(program, *([] if tests is None else [tests.program])), method)
        folder = None if self.state is None else self.state / run.name
        store = ClientStore(client, folder)
        store.load(self.device)
        taking = Taking(
            method=method,
            coders=program.coders,
            like=data.take(range(2)),
            batching=run.batching,
            client=client,
            samples=len(data),
            clients=run.clients,
            rounds=run.rounds,
            seed=run.seed,
            precision=run.precision,
            two_servers=self.two_servers,
        )
        terms = self._terms(run, taking, tests, folder)
        log.info("what leaves this device: %s", ", ".join(_named(terms, program.coders)) or "nothing")
        return ClientDevice(
            client=client,
            program=program,
            data=data.to(self.device),
            tests=tests,
            batching=run.batching,
            store=store,
            augment=run.augment,
            precision=run.precision,
            never=self.never,
            secret=self.secret,
            clients=run.clients,
            terms=terms,
            audit=None if self.audit is None else Audit(self.audit),
        )

    def _terms(self, run: Run, taking: Taking, tests: OwnTests | None, folder: Path | None) -> Terms:
        """Play the run's rounds in advance, and return what servers may ask in them."""
        try:
            learned = Learned(taking)
        except Exception as error:  # whatever a method of one's own does on tensors without content
            raise ConfigError(
                f"this device cannot play the rounds of the run in advance, to know what servers may ask: {error}"
            ) from error
        return Terms(
            seed=run.seed,
            conversation=learned,
            tests=None if tests is None else about_tests(tests.examination, taking, len(tests)),
            attempts=self._attempts_at(run, folder),
            allowance=self.allowance,
            day=self._day,
        )

    def _attempts_at(self, run: Run, folder: Path | None) -> Attempts:
        """Return the count of a run's attempts, which no welcome of a server sets back."""
        name = f"attempts-{_digest(run)}"
        counted = Attempts(run.rounds, self.allowance.attempts, None if folder is None else folder / name)
        return self._attempts.setdefault(f"{name} of {run.rounds}", counted)

    def _data(self, run: Run, client: int) -> Arrays:
        path = Path(self.data)
        if path.exists():
            return local(path, sample=run.sample, columns=_columns(run))
        if run.sample is not None:
            raise DataError(
                f"this run's samples are the devices' own: give a file or a folder, not the name {self.data}"
            )
        whole = build.dealt(replace(run, data=self.data), self.root)
        if client >= len(whole.partition):
            raise DataError(f"{self.data} is dealt to {len(whole.partition)} clients, and this one is number {client}")
        return whole.data.take(whole.partition.clients[client])

    def _divided(self, run: Run, data: Arrays, client: int) -> tuple[Arrays, Arrays | None]:
        """Return the samples to train on, and those to test the global model on, if there are any."""
        if self.test is not None:
            if run.hold_out:
                raise ConfigError("this run holds out a part of --data for testing; leave --test out")
            return data, local(self.test, sample=run.sample, columns=_columns(run))
        if not run.hold_out:
            return data, None
        kept, held = divide(len(data), run.hold_out, keys.fold(run.seed, "hold_out"), client)
        return data.take(kept), data.take(held)

    def _check_leaving(self, kinds: Sequence[Kind], method: Method) -> None:
        for kind in kinds:
            if kind.name in self.never:
                raise LinkError(
                    f"this run's method sends {kind.name}, which this device never sends (--never {kind.name})"
                )
        model = shallowest(method)
        if model.passes_raw and ACTIVATIONS in kinds and not self.raw:
            raise LinkError(
                f"at cut {model.cut} this run leaves no weights at the clients, so their raw inputs would leave as "
                "activations; join with --allow-raw if that is meant"
            )


def _named(terms: Terms, coders: Mapping[Kind, Coder]) -> Iterator[str]:
    """Yield the kinds that leave a device on these terms, with their codecs."""
    told = [*terms.conversation.any_round.kinds, *([] if terms.tests is None else terms.tests.kinds)]
    for name in dict.fromkeys(told):
        coder = coders.get(KIND_BY_NAME[name])
        yield name if coder is None else f"{name} ({coder})"


def _columns(run: Run) -> Columns:
    """Return which columns the run's own data have: a device names its own alike."""
    if not isinstance(run.data, OwnData):
        return Columns()
    if run.data.standardise and run.sample is None:
        raise DataError(
            "this run standardises its inputs with the whole training set, which no device has; give the run a "
            "[sample] with mean and std"
        )
    return run.data.columns


def leaving(*programs: Program) -> list[Kind]:
    """Return the kinds that the clients of these programs send."""
    gives = [getattr(fn, "gives", None) for program in programs for fn in program.functions.values()]
    labels_leave = any(program.labels is not None for program in programs)
    given = {k for g in gives if g is not None for k in (g.values() if isinstance(g, Mapping) else (g,))}
    return [kind for kind in KINDS if kind in given or (kind is LABELS and labels_leave)]


SERVERS_OWN = {
    "server_engine",
    "sampler",
    "meters",
    "guard",
    "most_weight",
    "checkpoint_every",
}  # keys that concern only the server


def _digest(run: Run) -> str:
    """Return a name for a run, which a server cannot change where this device's own file decides."""
    own = {key: value for key, value in _compared(run).items() if key not in {*SERVERS_OWN, "rounds"}}
    return hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()[:12]


def _run_of(text: str) -> Run:
    try:
        told = tomllib.loads(text)
        ours = {key: value for key, value in told.items() if key not in SERVERS_OWN}
        return config.changed(Run(), ours, "the server's configuration")
    except tomllib.TOMLDecodeError as error:
        raise LinkError(f"the server's configuration cannot be read: {error}") from None


def _own_run(path: Path) -> Run:
    return config.changed(Run(), {"name": path.stem, **config.read(path)}, str(path))


def _check_agreed(path: Path, run: Run) -> None:
    ours, theirs = _compared(_own_run(path)), _compared(run)
    for key in sorted((ours.keys() | theirs.keys()) - SERVERS_OWN):
        if ours.get(key) != theirs.get(key):
            there, here = (
                str(own.get(key, "none")) if key.startswith("codecs.") else repr(own.get(key)) for own in (theirs, ours)
            )
            raise ConfigError(
                f"the server's run is not the one in {path}: {key} is {there} there and {here} here; "
                "ask who runs the server"
            )


def _compared(run: Run) -> dict[str, Any]:
    """Return what must be the same: of codecs what they do, and not how they are written."""
    plain = {key: value for key, value in config.as_dict(run).items() if key != "codecs"}
    return plain | {f"codecs.{name}": own for name, own in built(run.codecs).items()}
