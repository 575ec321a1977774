"""The command line: run, compare, cuts, profile, plan, overlap, bench, list; and on real devices keys, serve, join."""

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer
from rich.console import Console

from cutlayer import plugins
from cutlayer.cli import catalogue, launch, show, study, tables
from cutlayer.cli import plan as planning
from cutlayer.cli.bench import bench
from cutlayer.cli.choose import chosen
from cutlayer.cli.help import examples, unbreak
from cutlayer.cli.identity import keys
from cutlayer.cli.join import join
from cutlayer.cli.options import (
    Classes,
    Data,
    Device,
    Engine,
    InputShape,
    Json,
    Orders,
    Out,
    Overwrite,
    PaperConvention,
    Plugins,
    Precision,
    Quiet,
    Resume,
    Rounds,
    Scale,
    Seed,
    Seeds,
    Settings,
    Traffic,
    TrafficSamples,
    refuse_without_traffic,
)
from cutlayer.cli.overlap import overlap
from cutlayer.cli.profile import profile
from cutlayer.cli.serve import serve
from cutlayer.errors import CutlayerError
from cutlayer.results import figures, report
from cutlayer.version import __version__

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Split federated learning for PyTorch: run methods side by side and compare them.",
    epilog="Begin with [bold]cutlayer run digits[/bold]; each command tells more with --help.",
)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"cutlayer {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog=examples(
        "run digits",
        "run digits --rounds 5 --only fedavg --only sfl_v1 --seeds 3",
        "run mine.toml --set optimiser.lr=0.1 --set method.sync=epoch",
        "run smofi_table2 --only cifar10 --scale 0.1 --dry-run",
        "run digits --resume",
    )
)
def run(
    what: Annotated[str, typer.Argument(help="A recipe (see `cutlayer list recipes`) or a TOML file.")],
    rounds: Rounds = None,
    seed: Seed = None,
    seeds: Seeds = 1,
    engine: Engine = None,
    device: Device = None,
    precision: Precision = None,
    data: Data = None,
    out: Out = Path("runs"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD",
            help="Only runs with this word in their name, or of this method; may be repeated: words at the same place "
            "of the names are alternatives, words at different places must both fit.",
        ),
    ] = None,
    scale: Scale = None,
    settings: Settings = None,
    plugin: Plugins = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and their settings, train none.")] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train the runs of a recipe or a TOML file, then compare them.

    Each run leaves a folder OUT/<name>/seed-<seed> with its configuration, metrics, checkpoints and model.
    """
    orders = Orders(
        rounds=rounds, seed=seed, seeds=seeds, engine=engine, device=device, precision=precision, data=data,
        out=out, scale=scale, settings=settings, resume=resume, overwrite=overwrite, quiet=quiet,
    )  # fmt: skip
    plugins.load(plugin or [])
    originals = chosen(launch.named(what), only or [], what)
    runs = launch.prepared(originals, orders, what)
    if dry_run:
        show.runs(runs, as_json)
        return
    folders = launch.carried_out(runs, originals, orders)
    show.comparison(report.compare(folders), out / PurePosixPath(runs[0].name).parts[0] / "figure.png", as_json)


@app.command(
    epilog=examples(
        "compare runs/digits",
        "compare runs/digits runs/mine --together --target 0.9",
        "compare runs --figure a.pdf",
        "compare runs/mine --traffic --samples 160000 --paper-convention",
    )
)
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders, searched for runs.")],
    target: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Accuracy to reach; by default the paper's, or 0.9 × the best of FedAvg, or else of all."
        ),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="One table of all runs, whatever their names have in common.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw learning curves, or a paper's sweeps (.png, .pdf, .svg)."),
    ] = None,
    traffic: Traffic = False,
    samples: TrafficSamples = None,
    paper_convention: PaperConvention = False,
    as_json: Json = False,
) -> None:
    """Compare finished runs: accuracy, rounds and time to a target, speed-up, bytes, and a paper's numbers beside them.

    Runs that differ only in their seed are one row: mean ± standard deviation. Runs whose names agree up to the last
    word are one table. With --traffic the table is of what crossed, in GiB by direction and kind.
    """
    if figure is not None:
        figures.check_format(figure)
    if not traffic:
        refuse_without_traffic(samples, paper_convention)
    found = report.compare(report.find(paths), target, together=together)
    if traffic:
        show.traffic(found, samples, paper_convention, figure, as_json)
    else:
        show.comparison(found, figure, as_json)


@app.command(
    epilog=examples(
        "cuts",
        "cuts digits --method sfl_v2 --cut conv1 --cut fc1 --seeds 3",
        "cuts mine.toml --alpha 0.3 --rounds 20",
    )
)
def cuts(
    what: Annotated[
        str, typer.Argument(help="A recipe, of which the first run counts, or a TOML file.")
    ] = study.DEFAULT,
    method: Annotated[list[str] | None, typer.Option(help="sfl_v1 and sfl_v2 by default; may be repeated.")] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(help="Units at the client, or the name of the last one; may be repeated. All by default."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Of the Dirichlet partition, tried beside an even one.")] = 0.1,
    rounds: Rounds = None,
    seed: Seed = None,
    seeds: Seeds = 1,
    engine: Engine = None,
    device: Device = None,
    precision: Precision = None,
    data: Data = None,
    out: Out = Path("runs"),
    scale: Scale = None,
    settings: Settings = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try every cut of a model, on even and uneven data: accuracy, traffic, the clients' work, simulated time."""
    orders = Orders(
        rounds=rounds, seed=seed, seeds=seeds, engine=engine, device=device, precision=precision, data=data,
        out=out, scale=scale, settings=settings, resume=resume, overwrite=overwrite, quiet=quiet,
    )  # fmt: skip
    planned = study.planned(what, settings or [], methods=method, cuts=cut, alpha=alpha)
    runs = launch.prepared(planned, orders, what)
    found = study.carried_out(runs, planned, orders)
    show.cuts(found, out / PurePosixPath(runs[0].name).parts[0] / "cuts.png", as_json)


app.command(
    epilog=examples(
        "profile resnet18 --cut layer1.1",
        "profile cnn --input 1x28x28 --set width=32 --optimiser adam",
        "profile resnet18 --memory --cut layer2.1 --batch 32",
        "profile causal_lm --set path=llama-3.2-1b --memory --optimiser adamw --overlap 2 --device cuda",
    )
)(profile)


@app.command(
    epilog=examples(
        "plan --model vgg16 --devices sample",
        "plan --model vgg16 --devices devices.csv --out plan.toml --figure plan.png",
        "plan --model resnet18 --data cifar100 --devices table1 --clients 50 --set devices.server_tflops=40",
        "plan --run runs/mine/seed-0 --target 0.05 --json",
    )
)
def plan(
    model: Annotated[
        str | None, typer.Option(help="A model (see `cutlayer list models`); by default the run's.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A list of devices (.csv, .json), sample for the one that comes with cutlayer, table1 or pool for "
            "devices at random; by default the run's, or table1.",
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="How many of them; by default all of a file, or 20 at random.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan as a run: `cutlayer run FILE` trains it (.toml)."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a mini-batch of all devices before and after (.png, .pdf, .svg)."),
    ] = None,
    interval: Annotated[
        int | None, typer.Option(min=1, help="Mini-batches between aggregations; the run's own, or 15.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; by default the run's, or 0.0005.")] = None,
    mode: Annotated[
        str, typer.Option(help="joint chooses batches and deadlines together, paper in turns as HASFL does.")
    ] = "joint",
    target: Annotated[
        float | None,
        typer.Option(metavar="EPS", help="Mean squared gradient norm to reach; by default one within reach."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples at each device: no batch is larger; by default an even share of --data."),
    ] = None,
    least_batch: Annotated[
        int, typer.Option(min=1, help="No batch is smaller; give 4 or more to a model with BatchNorm.")
    ] = 1,
    shape: InputShape = None,
    classes: Classes = None,
    optimiser: Annotated[str, typer.Option(help="sgd, momentum or adam: its state takes memory.")] = "sgd",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Estimate the bound on this data set (see `cutlayer list data`), from $CUTLAYER_DATA; by default on "
            "random samples.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Plan for the model, data and devices of this run, with its estimates."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights, the devices and the random samples.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Choose each device's cut and batch size for the least time until a target, and say what that gains.

    Mini-batches come from a bound on convergence, whose constants one batch tells, and seconds from what the devices
    compute and send.
    """
    if out is not None:
        planning.check_toml(out)
    if figure is not None:
        figures.check_format(figure)
    asked = planning.PlanRequest(
        model=model, devices=devices, clients=clients, interval=interval, lr=lr, mode=mode, target=target,
        samples=samples, least_batch=least_batch, shape=shape, classes=classes, optimiser=optimiser, data=data, run=run,
        seed=seed, settings=settings or [],
    )  # fmt: skip
    show.plan(planning.answered(asked), out, figure, as_json)


app.command(
    epilog=examples(
        "overlap",
        "overlap --figure overlap.png",
        "overlap --uplink 100 --client-tflops 10 --batch 8 --json",
    )
)(overlap)


app.command(
    epilog=examples(
        "bench",
        "bench --clients 8 --engines loop,vmap --baselines hand",
        "bench --model resnet18 --precision tf32 --output tf32.json",
        "bench --end-to-end --engines graph",
    )
)(bench)


@app.command("list", epilog=examples("list", "list methods --plugin mine.py", "list recipes --json"))
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="recipes, methods, models, data, engines, partitions, optimisers, schedules, devices, meters, codecs "
            "or samplers; all by default."
        ),
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List what a configuration can name, with options and their defaults, also of plug-ins and installed packages."""
    plugins.load(plugin or [])
    found = catalogue.of_kind(kind)
    if as_json:
        show.as_json({kind: [asdict(entry) for entry in entries] for kind, entries in found.items()})
    else:
        show.console().print(*tables.catalogue_tables(found))


app.command(
    epilog=examples(
        "keys keys --clients ann,bob,carol --server train.example.org",
        "keys keys --clients dave",
        "keys keys --renew ann --revoke bob",
    )
)(keys)

app.command(
    epilog=examples(
        "serve hospital.toml --keys keys/train",
        "serve hospital.toml --keys keys/train --deadline 30 --least 3 --metrics-port 9100",
        "serve trial.toml --insecure",
    )
)(serve)

app.command(
    epilog=examples(
        "join train.example.org:8470 --data scans.npz --keys ann",
        "join train.example.org:8470 --data scans/ --keys ann --never labels --device cuda",
        "join 127.0.0.1:8470 --data digits --insecure --name 0",
    )
)(join)

unbreak(app)


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
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except launch.Interrupted as stopped:
        again = [word for word in words if word not in ("--overwrite", "--resume")]
        _complain(
            f"stopped; {stopped.folder.path} is saved up to round {stopped.saved} of {stopped.run.rounds}\n"
            f"go on with: {shlex.join(['cutlayer', *again, *stopped.again])}"
        )
        raise SystemExit(130) from None


def _complain(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
