"""Options that several commands share, and how functions become commands."""

import inspect
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Option, Typer

from cutlayer.errors import ConfigError
from cutlayer.results import figures
from cutlayer.results.figures import Width

AGAIN_SECONDS = 0.05  # after which an interrupt that was lost is raised again

Json = Annotated[bool, Option("--json", help="Print one JSON document instead of tables.")]
Data = Annotated[Path | None, Option(help="Folder of data sets; by default $CUTLAYER_DATA.")]
Out = Annotated[Path, Option(help="Folder for the runs.")]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Set a key of the configuration; may be repeated.")
]
InputShape = Annotated[
    str | None,
    Option("--input", metavar="SHAPE", help="Shape of one sample, such as 3x32x32; by default it fits the model."),
]
Classes = Annotated[int | None, Option(min=1, help="Number of classes; by default it fits the model.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Delete earlier runs with these names.")]
Quiet = Annotated[bool, Option("--quiet", help="Show no progress, only warnings.")]
Keys = Annotated[Path | None, Option(metavar="FOLDER", help="This party's folder of keys, as made by `cutlayer keys`.")]
Insecure = Annotated[
    bool, Option("--insecure", help="Use no certificates and no encryption: only for a trial on one machine.")
]
FigureWidth = Annotated[Width, Option("--width", help="With --figure: as wide as one or two columns of a page.")]
Plugins = Annotated[
    list[Path] | None,
    Option(
        "--plugin",
        metavar="FILE",
        help="A Python file with your own METHODS, MODELS, DATA or other tables; may be repeated.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The options of every command that trains runs."""

    rounds: Annotated[int | None, Option(min=1, help="Rounds of each run.")] = None
    seed: Annotated[int | None, Option(help="The seed, or the first of several.")] = None
    seeds: Annotated[int, Option(min=1, help="Number of seeds, run one after another.")] = 1
    engine: Annotated[str | None, Option(help="auto, loop, vmap, graph or ray.")] = None
    device: Annotated[str | None, Option(help="cpu, or cuda if torch supports it.")] = None
    precision: Annotated[
        str | None, Option(help="fp32, or tf32 or bf16, which are faster on a GPU; by default the run's.")
    ] = None
    data: Data = None
    out: Out = Path("runs")
    scale: Annotated[
        float | None,
        Option(metavar="F", help="Scale clients, samples and rounds by this factor, above 0 and at most 1."),
    ] = None
    settings: Settings = None
    resume: Annotated[bool, Option("--resume", help="Continue from the newest checkpoints.")] = False
    overwrite: Overwrite = False
    quiet: Quiet = False

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other; give one of them")


def figure_option(what: str) -> Any:
    """Return an option for the file of a figure, whose format is checked before any work starts."""

    def checked(path: Path | None) -> Path | None:
        if path is not None:
            figures.check_format(path)
        return path

    return Option(metavar="FILE", help=f"{what} (.png, .pdf, .svg).", callback=checked)


def add(app: Typer, command: Callable[..., None]) -> None:
    """Add a function as a command; its docstring is the help, and the lines below "Examples:" are examples.

    The terminal breaks the lines of the help, wherever the source breaks them.
    """
    about, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
    paragraphs = [paragraph.replace("\n", " ") for paragraph in about.split("\n\n")]
    lines = [f"[bold]{line.strip()}[/bold]" for line in examples.splitlines()]
    epilog = "\n\n".join(["Examples:", *lines])
    app.command(command.__name__.rstrip("_"), help="\n\n".join(paragraphs), epilog=epilog)(spread(command))


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a parameter whose type is a dataclass by one option for each of its fields."""
    parameters = inspect.signature(command).parameters.values()
    group = next((parameter for parameter in parameters if is_dataclass(parameter.annotation)), None)
    if group is None:
        return command
    make, name = group.annotation, group.name
    fields = inspect.signature(make).parameters

    @wraps(command)
    def called(**values: Any) -> None:
        own = make(**{field: values.pop(field) for field in fields})
        command(**values, **{name: own})

    flat = [each for parameter in parameters for each in (fields.values() if parameter is group else [parameter])]
    options = [each.replace(kind=each.KEYWORD_ONLY) for each in flat]
    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return called


def check_keys(who: str, keys: Path | None, insecure: bool) -> None:
    """Require certificates, unless the user asks for a trial without them."""
    if keys is not None and insecure:
        raise ConfigError("give --keys or --insecure, not both: with keys nothing travels in the clear")
    if (keys is None) != insecure:
        raise ConfigError(
            f"a {who} needs its keys: give --keys FOLDER, the one that `cutlayer keys` made for it, or --insecure "
            "for a trial on one machine"
        )


def refuse_packing(packing: str | None, where: str) -> None:
    """Name the codec that stands for a packing of earlier versions."""
    if packing is None:
        return
    name = {"raw": "none", "fp16": "bf16"}.get(packing, packing)
    raise ConfigError(f"--packing is gone: {where.format(name=name)}")


def stop_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that a stopped service ends as cleanly as an interrupted one.

    A signal may come while Python runs a finalizer or another callback, which cannot raise: it is then raised again.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def lost(what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            sys.__unraisablehook__(what)

    signal.signal(signal.SIGTERM, interrupt)
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, interrupt)
        sys.unraisablehook = lost
