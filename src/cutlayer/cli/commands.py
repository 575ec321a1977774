"""The command line: run, compare, cuts, profile, plan, overlap, bench, list; and on real devices keys, serve, join."""

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text
from typer import Argument, Option

from cutlayer import plugins, recipes
from cutlayer.cli import catalogue, launch, papers, preflight, show, study, tables
from cutlayer.cli.bench import bench
from cutlayer.cli.choose import chosen
from cutlayer.cli.compare import compare
from cutlayer.cli.identity import keys
from cutlayer.cli.join import join
from cutlayer.cli.options import Json, Orders, Plugins, add, figure_option
from cutlayer.cli.overlap import overlap
from cutlayer.cli.plan import plan
from cutlayer.cli.profile import profile
from cutlayer.cli.serve import serve
from cutlayer.errors import CutlayerError, DivergedError
from cutlayer.recipes.scale import unscaled
from cutlayer.results import figures, report
from cutlayer.runs import config
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder
from cutlayer.studies.cuts_figure import draw_cuts
from cutlayer.version import __version__

Misused: Any = typer.BadParameter.__base__  # click's UsageError, which some versions of typer bring with them
app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Split federated learning for PyTorch: run methods side by side and compare them.",
    epilog="Start with [bold]cutlayer run digits[/bold]; each command explains its options with --help.",
)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"cutlayer {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(
    what: Annotated[str, Argument(help="A recipe (see `cutlayer list recipes`) or a TOML file.")],
    orders: Orders,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="WORD",
            help="Train only runs with this word in their name, or of this method; may be repeated. Words at the same "
            "position of the names are alternatives; words at different positions must all match.",
        ),
    ] = None,
    plugin: Plugins = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the runs, and check them without training.")] = False,
    as_json: Json = False,
) -> None:
    """Train the runs of a recipe or a TOML file, then compare them.

    Each run leaves a folder OUT/<name>/seed-<seed> with its configuration, metrics, checkpoints and model. The figure
    beside them shows all runs that are there, also those of earlier commands.

    Examples:
        cutlayer run digits
        cutlayer run digits --rounds 5 --only fedavg --only sfl_v1 --seeds 3
        cutlayer run mine.toml --set optimiser.lr=0.1 --set method.sync=epoch
        cutlayer run smofi_table2 --only cifar10 --scale 0.1 --dry-run
        cutlayer run digits --resume
    """
    plugins.load(plugin or [])
    every = launch.named(what)
    originals = chosen(every, only or [], what)
    runs = launch.prepared(originals, orders, what)
    if dry_run:
        recipe = recipes.of(runs[0].name)
        source = "" if recipe is None else recipe.source
        document = {"source": source or None, "runs": [config.as_dict(run) for run in runs]}
        show.result(document, tables.run_tables(runs), *([f"source: {source}"] if source else []), machine=as_json)
        preflight.check(runs, orders)
    else:
        trained = launch.carried_out(runs, originals, orders)
        if trained.folders:
            _show_trained(trained.folders, _home(runs, orders), [run.name for run in every], as_json)
        trained.complain()


def _show_trained(folders: list[Folder], home: Path, order: list[str], as_json: bool) -> None:
    """Compare these runs, and draw all that are in their home in this order, so that a subset changes no figure."""

    def place(folder: Folder) -> int:
        name = unscaled(folder.path.parent.relative_to(home.parent).as_posix())
        return order.index(name) if name in order else len(order)

    def draw(path: Path) -> None:
        everything = report.find([*(folder.path for folder in folders), home])
        figures.draw(report.compare(sorted(everything, key=place)), path)

    found = report.compare(folders)
    show.warn(found.warnings)
    show.with_figure(
        papers.document(found),
        tables.sections_for_people(papers.sections(found)),
        machine=as_json,
        figure=home / "figure.png",
        draw=draw,
    )


def cuts(
    what: Annotated[str, Argument(help="A recipe, whose first run is used, or a TOML file.")] = study.DEFAULT,
    method: Annotated[list[str] | None, Option(help="By default sfl_v1 and sfl_v2; may be repeated.")] = None,
    cut: Annotated[
        list[str] | None,
        Option(help="Units at the client, or the name of the last one; by default all cuts; may be repeated."),
    ] = None,
    alpha: Annotated[float, Option(help="Alpha of the Dirichlet partition, which is tried besides an even one.")] = 0.1,
    codecs: Annotated[
        str | None,
        Option(
            metavar="A,B,...",
            help="Try each cut with each of these codecs for activations and gradients, such as "
            "none,int8,topk:0.1+int8: options follow a colon, by name (randtopk:share=0.1:alpha=0.2) or in the order "
            "of `cutlayer list codecs`; + makes a chain; topk and randtopk alone keep a share of 0.1.",
        ),
    ] = None,
    figure: Annotated[Path | None, figure_option("Draw the study; by default into OUT/<name>_cuts/cuts.png")] = None,
    plugin: Plugins = None,
    *,
    orders: Orders,
    as_json: Json = False,
) -> None:
    """Train every cut of a model on even and uneven data, and compare accuracy, traffic, client work and time.

    With --codecs, the figure shows accuracy against traffic, and OUT/<name>_cuts_codecs/ has the runs.

    Examples:
        cutlayer cuts
        cutlayer cuts digits --method sfl_v2 --cut conv1 --cut fc1 --seeds 3
        cutlayer cuts mine.toml --alpha 0.3 --rounds 20
        cutlayer cuts --codecs none,int8,topk
    """
    plugins.load(plugin or [])
    planned = study.planned(what, orders.settings or [], methods=method, cuts=cut, alpha=alpha, codecs=codecs)
    runs = launch.prepared(planned, orders, what)
    home = _home(runs, orders)
    found, everything = study.carried_out(runs, planned, orders, home)
    printed = Group(study.cut_table(found), *found.conclusions())
    path, draw = figure or home / "cuts.png", partial(draw_cuts, everything)
    show.with_figure(found.as_dict(), printed, machine=as_json, figure=path, draw=draw)


def list_(
    kind: Annotated[
        str | None,
        Argument(
            help="recipes, methods, models, data, engines, partitions, optimisers, schedules, devices, meters, codecs, "
            "samplers, losses or metrics; all by default."
        ),
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List all names that a configuration may use, with options and defaults, including those of plug-ins.

    Examples:
        cutlayer list
        cutlayer list methods --plugin mine.py
        cutlayer list recipes --json
    """
    plugins.load(plugin or [])
    found = catalogue.of_kind(kind)
    document = {kind: [asdict(entry) for entry in entries] for kind, entries in found.items()}
    index = [Text(f"Kinds of names: {', '.join(found)}. `cutlayer list KIND` prints one.\n")] if kind is None else []
    show.result(document, *index, *(tables.catalogue_table(*each) for each in found.items()), machine=as_json)


def _home(runs: Sequence[Run], orders: Orders) -> Path:
    """Return the folder of all runs of this recipe or file."""
    return orders.out / PurePosixPath(runs[0].name).parts[0]


for command in (run, compare, cuts, profile, plan, overlap, bench, list_, serve, join):
    add(app, command)
app.add_typer(keys)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; report an error in one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        raise SystemExit(app(words, prog_name="cutlayer", standalone_mode=False))
    except Misused as error:
        _complain(f"error: {_told(error)}")
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(1) from None
    except CutlayerError as error:
        if os.environ.get("CUTLAYER_DEBUG"):
            traceback.print_exc()
        _complain(f"error: {error}")
        raise SystemExit(3 if isinstance(error, DivergedError) else 2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except launch.Interrupted as stopped:
        again = [word for word in words if word not in ("--overwrite", "--resume")]
        _complain(
            f"stopped; {stopped.folder.path} is saved up to round {stopped.saved} of {stopped.run.rounds}\n"
            f"go on with: {shlex.join(['cutlayer', *again, *stopped.again])}"
        )
        raise SystemExit(130) from None


def _told(error: Any) -> str:
    """Return what is wrong with the words of a command, as an error of our own would say it."""
    text = error.format_message().rstrip(".")
    path = "cutlayer" if error.ctx is None else error.ctx.command_path
    return f"{text[:1].lower()}{text[1:]}; see `{path} --help`"


def _complain(text: str) -> None:
    show.message(Console(stderr=True), text)


if __name__ == "__main__":
    main()
