"""Options that several commands share."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cutlayer.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of each run.")]
Seed = Annotated[int | None, typer.Option(help="The seed, or the first of several.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, one after another.")]
Engine = Annotated[str | None, typer.Option(help="auto, loop, vmap, graph or ray.")]
Device = Annotated[str | None, typer.Option(help="cpu, or cuda where torch has it.")]
Precision = Annotated[
    str | None,
    typer.Option(help="Of the layers: fp32, or tf32 or bf16, which are faster on a GPU; by default the run's."),
]
Data = Annotated[Path | None, typer.Option(help="Folder of data sets; by default $CUTLAYER_DATA.")]
Out = Annotated[Path, typer.Option(help="Where the folders of runs go.")]
Scale = Annotated[
    float | None,
    typer.Option(metavar="F", help="Shrink clients, samples and rounds to this part, from above 0 to 1."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be repeated.")
]
InputShape = Annotated[
    str | None, typer.Option("--input", metavar="SHAPE", help="One sample, such as 3x32x32; fits the model by default.")
]
Classes = Annotated[int | None, typer.Option(min=1, help="Classes of the output; fits the model by default.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoints.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete earlier runs of these names.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only warnings.")]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file with METHODS, MODELS, DATA or more of your own; may be repeated.",
    ),
]

Traffic = Annotated[bool, typer.Option("--traffic", help="Show what crossed instead, by direction and kind, in GiB.")]
TrafficSamples = Annotated[
    int | None,
    typer.Option("--samples", metavar="N", min=1, help="With --traffic: of runs so long, from the bytes a sample."),
]
PaperConvention = Annotated[
    bool,
    typer.Option(
        "--paper-convention",
        help="With --traffic: count as HO-SFL's Table 3, without labels and set-up, of FSL-SAGE's models down only the "
        "auxiliary one, and with --samples up to the end of the first round beyond N.",
    ),
]


def refuse_without_traffic(samples: int | None, paper_convention: bool) -> None:
    """Options of a table that is not shown would be ignored in silence."""
    for option, given in (("--samples", samples is not None), ("--paper-convention", paper_convention)):
        if given:
            raise ConfigError(f"{option} is about the table of traffic; add --traffic")


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the command line says about runs, whichever they are."""

    rounds: int | None = None
    seed: int | None = None
    seeds: int = 1
    engine: str | None = None
    device: str | None = None
    precision: str | None = None
    data: Path | None = None
    out: Path = Path("runs")
    scale: float | None = None
    settings: list[str] | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other; give one of them")


def check_keys(who: str, keys: Path | None, insecure: bool) -> None:
    """Certificates are the rule; without them a user must say so."""
    if keys is not None and insecure:
        raise ConfigError("give --keys or --insecure, not both: with keys nothing travels in the clear")
    if (keys is None) != insecure:
        raise ConfigError(
            f"a {who} needs its keys: give --keys FOLDER, the one that `cutlayer keys` made for it, or --insecure "
            "for a trial on one machine"
        )


def stop_on_sigterm() -> None:
    """A service that is stopped ends as cleanly as one that is interrupted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
