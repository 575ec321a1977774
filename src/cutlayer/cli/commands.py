"""The command line: run, compare, profile, list."""

import json
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
from rich.console import Console

import cutlayer
from cutlayer import config, figures, report
from cutlayer.cli import catalogue, costs, launch, tables
from cutlayer.cli.progress import watching
from cutlayer.errors import ConfigError, CutlayerError
from cutlayer.report import Comparison

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Split federated learning for PyTorch: run methods side by side and compare them.",
    epilog="Begin with [bold]cutlayer run digits[/bold]; each command tells more with --help.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]


def examples(*lines: str) -> str:
    return "\n\n".join(["Examples:", *(f"[bold]cutlayer {line}[/bold]" for line in lines)])


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"cutlayer {cutlayer.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog=examples(
        "run digits",
        "run digits --rounds 5 --only fedavg --only sfl_v1 --seeds 3",
        "run mine.toml --set optimiser.lr=0.1 --set method.sync=epoch",
        "run digits --resume",
    )
)
def run(
    what: Annotated[str, typer.Argument(help="A recipe (see `cutlayer list recipes`) or a TOML file.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each run.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed, or the first of several.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, one after another.")] = 1,
    engine: Annotated[str | None, typer.Option(help="auto, loop or vmap.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets; by default $CUTLAYER_DATA.")] = None,
    out: Annotated[Path, typer.Option(help="Where the folders of runs go.")] = Path("runs"),
    only: Annotated[list[str] | None, typer.Option(metavar="METHOD", help="Only this run; may be repeated.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoints.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete earlier runs of these names.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only warnings.")] = False,
    as_json: Json = False,
) -> None:
    """Train the runs of a recipe or a TOML file, then compare them.

    Each run leaves a folder OUT/<name>/seed-<seed> with its configuration, metrics, checkpoints and model.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite contradict each other; give one of them")
    given = {"rounds": rounds, "seed": seed, "engine": engine}
    flags = {key: value for key, value in given.items() if value is not None}
    changes = launch.parsed(settings or [])
    runs = [config.changed(r, changes, "--set") for r in launch.chosen(launch.named(what), only or [], what)]
    runs = [config.changed(r, flags, "the command line") for r in runs]
    launch.refuse_twins(runs)
    runs = [launch.named_by_method(r) for r in runs]
    every = [replace(r, seed=r.seed + i) for r in runs for i in range(seeds)]
    with watching(quiet) as watcher:
        folders = launch.execute_all(every, out, watcher, root=data, resume=resume, overwrite=overwrite)
    comparison = report.compare(folders)
    picture = out / PurePosixPath(runs[0].name).parts[0] / "curves.png"
    _show(comparison, picture, as_json)


@app.command(
    epilog=examples("compare runs/digits", "compare runs/digits runs/mine --target 0.9", "compare runs --figure a.pdf")
)
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders, searched for runs.")],
    target: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Accuracy to reach; by default 0.9 × the best of FedAvg, or else of all."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw learning curves (.png, .pdf, .svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare finished runs: accuracy, rounds to a target, speed-up, bytes.

    Runs that differ only in their seed are one row: mean ± standard deviation.
    """
    if figure is not None:
        figures.check_format(figure)
    _show(report.compare(report.find(paths), target), figure, as_json)


@app.command(
    epilog=examples("profile resnet18 --cut layer1.1", "profile cnn --input 1x28x28 --set width=32 --optimiser adam")
)
def profile(
    model: Annotated[str, typer.Argument(help="A model (see `cutlayer list models`).")],
    shape: Annotated[
        str | None,
        typer.Option("--input", metavar="SHAPE", help="One sample, such as 3x32x32; fits the model by default."),
    ] = None,
    classes: Annotated[int, typer.Option(min=1, help="Classes of the output.")] = 10,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="A model option; may be repeated.")
    ] = None,
    optimiser: Annotated[str, typer.Option(help="sgd, momentum or adam: sizes the optimiser state.")] = "momentum",
    cut: Annotated[str | None, typer.Option(help="Units at the client, or the name of the last one.")] = None,
    as_json: Json = False,
) -> None:
    """Show what each unit of a model costs, and what a cut leaves on each side."""
    found = costs.model_costs(
        model,
        launch.parsed(settings or []),
        shape=None if shape is None else costs.parse_shape(shape),
        classes=classes,
        optimiser=optimiser,
        cut=cut,
    )
    if as_json:
        _print_json(found)
    else:
        tables.console().print(*tables.cost_tables(found))


@app.command("list", epilog=examples("list", "list methods", "list recipes --json"))
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(help="recipes, methods, models, data, engines, partitions or optimisers; all by default."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List what a configuration can name, with options and their defaults."""
    found = catalogue.of_kind(kind)
    if as_json:
        _print_json({kind: [asdict(entry) for entry in entries] for kind, entries in found.items()})
    else:
        tables.console().print(*tables.catalogue_tables(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; mistakes become one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(words, prog_name="cutlayer")
    except CutlayerError as error:
        if os.environ.get("CUTLAYER_DEBUG"):
            traceback.print_exc()
        _complain(f"error: {error}")
        raise SystemExit(2) from None
    except launch.Interrupted as stopped:
        again = [word for word in words if word not in ("--overwrite", "--resume")]
        _complain(
            f"stopped; {stopped.folder.path} is saved up to round {stopped.saved} of {stopped.run.rounds}\n"
            f"go on with: {shlex.join(['cutlayer', *again, '--resume'])}"
        )
        raise SystemExit(130) from None


def _show(comparison: Comparison, figure: Path | None, as_json: bool) -> None:
    """The numbers first: they must not be lost if the figure cannot be written."""
    if as_json:
        _print_json({**comparison.as_dict(), "figure": None if figure is None else str(figure)})
    else:
        tables.console().print(tables.comparison_table(comparison))
    if figure is not None:
        figures.draw(comparison, figure)
        if not as_json:
            typer.echo(f"learning curves: {figure}")


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def _complain(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
