"""`cutlayer join`: take part in a run with the data of this device."""

import logging
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Option

from cutlayer import plugins
from cutlayer.cli.options import Insecure, Keys, Plugins, Quiet, check_keys, refuse_packing, stop_on_sigterm
from cutlayer.cli.private import private_files
from cutlayer.cli.progress import watching
from cutlayer.core.checks import check_positive
from cutlayer.errors import ConfigError, CutlayerError

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from cutlayer.remote.device.terms import Allowance

log = logging.getLogger("cutlayer")

GIB = 2**30
PAGES = Path("/proc/self/statm")  # of this process; the sixth number is those of private memory
ROOM = 2**27  # bytes for a connection and its threads, which end the process if they get none
NO_MEMORY = ("can't start new thread", "can't allocate memory", "failed to map segment")  # in other errors


@dataclass(frozen=True, kw_only=True)
class OwnerTerms:
    """What the owner of a device agrees to."""

    config: Annotated[
        Path | None, Option(metavar="FILE", help="The run that this device agrees to; it refuses any other.")
    ] = None
    any_run: Annotated[
        bool, Option("--any-run", help="Agree to whatever run the server has, in place of --config: for trials.")
    ] = False
    never: Annotated[
        list[str] | None,
        Option(metavar="KIND", help="A kind that the device never sends, such as labels; may be repeated."),
    ] = None
    allow_raw: Annotated[
        bool, Option("--allow-raw", help="Take part even without a layer, so that raw inputs leave the device.")
    ] = False
    private_seed: Annotated[
        bool,
        Option(
            "--private-seed",
            help="Draw the device's private random numbers from a secret; the run is then not repeatable.",
        ),
    ] = False
    attempts: Annotated[
        int, Option(min=1, max=255, help="Times that a round may be played with this device's data.")
    ] = 3
    round_seconds: Annotated[
        float | None, Option(metavar="SECONDS", min=0, help="Most work in a round; by default no limit.")
    ] = None
    day_seconds: Annotated[
        float | None, Option(metavar="SECONDS", min=0, help="Most work in a day; by default no limit.")
    ] = None
    memory: Annotated[
        float | None, Option(metavar="GIB", min=0, help="Most memory of this process, in GiB; by default no limit.")
    ] = None
    audit: Annotated[
        Path | None,
        Option(metavar="FILE", help="Append what leaves the device: time, kind, bytes and SHA-256, one JSON per line."),
    ] = None

    def __post_init__(self) -> None:
        if (self.config is None) != self.any_run:
            raise ConfigError(
                "give --config FILE, the run that this device agrees to, or --any-run to do whatever run the server has"
            )

    @property
    def allowance(self) -> "Allowance":
        from cutlayer.remote.device.terms import Allowance

        return Allowance(
            attempts=self.attempts,
            round_seconds=inf if self.round_seconds is None else self.round_seconds,
            day_seconds=inf if self.day_seconds is None else self.day_seconds,
        )


@private_files()
def join(
    address: Annotated[str | None, Argument(metavar="[HOST:PORT]", help="The server.")] = None,
    *,
    data: Annotated[
        str,
        Option(
            metavar="PATH|NAME",
            help="This device's samples: a file (.npz, .npy, .safetensors, .csv, .parquet) or a folder of images by "
            "class; or the name of a data set, of which the device takes its share, for trials.",
        ),
    ],
    test: Annotated[
        Path | None,
        Option(metavar="PATH", help="This device's own test samples: the server learns how good the model is on them."),
    ] = None,
    train: Annotated[
        str | None, Option(metavar="HOST:PORT", help="The training server, if the fed server is another one.")
    ] = None,
    fed: Annotated[str | None, Option(metavar="HOST:PORT", help="The fed server, with --train.")] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    name: Annotated[
        str | None, Option(help="With --insecure: this device's name; a number selects that client of the run.")
    ] = None,
    terms: OwnerTerms,
    state: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Where the device keeps its state between rounds; by default the folder state in its keys.",
        ),
    ] = None,
    device: Annotated[str, Option(help="cpu, or cuda if torch supports it.")] = "cpu",
    give_up: Annotated[
        float | None, Option(metavar="SECONDS", min=0, help="Leave after this time without a server; by default never.")
    ] = None,
    plugin: Plugins = None,
    root: Annotated[
        Path | None, Option("--data-root", metavar="FOLDER", help="Folder of named data sets and base models.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print what servers may ask in a round of --config, and what would leave; stop.")
    ] = False,
    packing: Annotated[str | None, Option(hidden=True, help="Gone: a run names its codecs.")] = None,
    quiet: Quiet = False,
) -> None:
    """Take part in a run with this device's own data, which never leave it.

    The device sends what the method's own functions return: activations at the cut, labels unless the split is
    U-shaped, and the layers below the cut. It refuses to send anything else.

    Examples:
        cutlayer join train.example.org:8470 --data scans.npz --keys ann --config ward.toml
        cutlayer join --data scans.npz --config ward.toml --dry-run
        cutlayer join train.example.org:8470 --data scans/ --keys ann --config ward.toml --never labels --device cuda
        cutlayer join 127.0.0.1:8470 --data digits --insecure --name 0 --any-run
    """
    from cutlayer.cli.terms import show_terms
    from cutlayer.remote.device.client import JoinOptions, stay
    from cutlayer.remote.device.store import reserved
    from cutlayer.remote.identity.certificates import Credentials, warning_of_expiry
    from cutlayer.remote.joining.join import DeviceSettings

    refuse_packing(packing, 'write codecs = {{ activations = "{name}" }} into the run file that --config names')
    hashes = plugins.load(plugin or [])
    kept = state or (None if keys is None else keys / "state")
    settings = DeviceSettings(
        data=data,
        test=test,
        state=kept,
        device=device,
        never=frozenset(terms.never or []),
        raw=terms.allow_raw,
        secret=secrets.token_hex(16) if terms.private_seed else None,
        root=root,
        config=terms.config,
        two_servers=fed is not None,
        allowance=terms.allowance,
        audit=None if dry_run else terms.audit,
    )
    if dry_run:
        show_terms(settings)
        return
    check_keys("device", keys, insecure)
    if name is not None and not insecure:
        raise ConfigError("the certificate says who this device is; leave out --name")
    stop_on_sigterm()
    with ExitStack() as stack:
        stack.enter_context(watching(quiet))  # first, so that warnings are shown as such
        credentials = None if keys is None else Credentials.load(keys)
        if credentials is None:
            log.warning("no certificates, no encryption: anyone on the network path can read and alter everything")
        elif credentials.role != "client":
            raise ConfigError(f"{keys} holds the keys of the {credentials.name} server; give this device's own")
        if terms.any_run:
            log.warning("--any-run: the server decides about the model, the batches and the number of rounds")
        for context in (limited_memory(terms.memory), reserved(kept), warning_of_expiry(credentials)):
            stack.enter_context(context)
        options = JoinOptions(
            address=_the_server(address, train, fed),
            fed=None if fed is None else _checked(fed),
            name=credentials.name if credentials else name or f"device-{secrets.token_hex(3)}",
            credentials=credentials,
            plugins=hashes,
            ready=settings.ready,
            gives_up_after=float("inf") if give_up is None else give_up,
        )
        try:
            settings.check()
            words = stay(options)
        except KeyboardInterrupt:
            where = f"; what it keeps is in {kept}" if kept is not None and [*kept.glob("*")] else ""
            Console().print(f"{options.name} left the run{where}; join again with the same command", soft_wrap=True)
            raise SystemExit(130) from None
    Console().print(f"{options.name}: {words}", soft_wrap=True, markup=False)


@contextmanager
def limited_memory(gib: float | None) -> Iterator[None]:
    """Let the system refuse this process more private memory than this, and say so if that is too little."""
    if gib is None:
        yield
        return
    check_positive("--memory", gib)
    if resource is None:
        raise ConfigError("this system cannot limit the memory of a process; leave out --memory")
    most, used, small = int(gib * GIB), _private_memory(), f"--memory {gib:g} is too small for this run"
    if most < used + ROOM:
        raise ConfigError(
            f"{small}: this process has {used / GIB:.2f} GiB before it joins; give more than "
            f"{(used + ROOM) / GIB:.2f}, or leave it out"
        )
    with suppress(ValueError, OverflowError):  # the system itself allows less
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        yield
    except (CutlayerError, RuntimeError, MemoryError, ImportError) as error:
        refused = _refused_memory(error)
        if refused is None:
            raise
        raise ConfigError(f"{small} ({refused or 'out of memory'}); give more, or leave it out") from error


def _private_memory() -> int:
    """Return the bytes of this process that the limit counts; 0 if the system does not tell."""
    return int(PAGES.read_text().split()[5]) * resource.getpagesize() if PAGES.exists() else 0


def _refused_memory(error: BaseException | None) -> str | None:
    """Return in which words memory was refused, also behind other errors; None if it was not."""
    if error is None:
        return None
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return str(error)
    return _refused_memory(error.__cause__)


def _the_server(address: str | None, train: str | None, fed: str | None) -> str:
    if (address is None) == (train is None) or (train is None) != (fed is None):
        raise ConfigError("give the server's HOST:PORT, or --train HOST:PORT and --fed HOST:PORT where there are two")
    return _checked(address or train or "")


def _checked(address: str) -> str:
    host, sign, port = address.rpartition(":")
    if not sign or not host or not port.isdigit():
        raise ConfigError(f"{address!r} is no address; write HOST:PORT, such as train.example.org:8470")
    return address
