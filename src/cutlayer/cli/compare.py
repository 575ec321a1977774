"""`cutlayer compare`: finished runs side by side, as tables of several formats and as a figure."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from cutlayer.cli import formats, papers, show, traffic_table
from cutlayer.cli.formats import Format
from cutlayer.cli.options import FigureWidth, figure_option
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.results import figures, report
from cutlayer.results.figures import Width
from cutlayer.runs.metrics import Goal


def compare(
    paths: Annotated[list[Path], Argument(metavar="PATH...", help="Folders to search for runs.")],
    target: Annotated[
        float | None,
        Option(
            help="Target; an accuracy is a fraction. By default the paper's, else 0.9 × the best of FedAvg, or of all "
            "runs; where less is better, ÷ 0.9.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="What to compare: f1, rmse, loss of the test set, validation_accuracy, federated_accuracy, "
            "training_loss, ...; by default the accuracy, else the first metric that all runs have.",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        Option(metavar="max|min", help="With --metric: whether a metric of your own should rise or fall."),
    ] = None,
    together: Annotated[bool, Option("--together", help="Put all runs into one table, whatever their names.")] = False,
    figure: Annotated[Path | None, figure_option("Draw learning curves, or a paper's sweeps")] = None,
    width: FigureWidth = Width.TWO,
    form: Annotated[
        Format, Option("--format", help="What to print; csv and json have the values of every seed.")
    ] = Format.TABLE,
    per_seed: Annotated[bool, Option("--per-seed", help="Add a row for each seed to the tables.")] = False,
    bold_best: Annotated[
        bool,
        Option(
            "--bold-best",
            help="With --format latex: print the best value in bold; by default only one that is better than each "
            "other with 95 % confidence.",
        ),
    ] = False,
    traffic: Annotated[bool, Option("--traffic", help="Show the traffic instead: GiB by direction and kind.")] = False,
    samples: Annotated[
        int | None, Option(metavar="N", min=1, help="With --traffic: extrapolate to runs of N samples.")
    ] = None,
    paper_convention: Annotated[
        bool,
        Option(
            "--paper-convention",
            help="With --traffic: count as in HO-SFL's Table 3: without labels and set-up, without FSL-SAGE's client "
            "model on its way down, and with --samples up to the end of the first round beyond N.",
        ),
    ] = False,
) -> None:
    """Compare finished runs: a metric, rounds and time to a target, speed-up, bytes, and the paper's numbers.

    Runs that differ only in their seed share a row: mean ± standard deviation. Only seeds that all runs have are
    compared, in the rounds in which all were evaluated, or by samples or simulated time where rounds differ in length,
    and differences are seed by seed. Runs whose names agree up to
    the last word share a table. With --traffic, the table shows the bytes sent, in GiB by direction and kind.

    Examples:
        cutlayer compare runs/digits
        cutlayer compare runs/digits --format latex > table.tex
        cutlayer compare runs/digits --figure curves.pdf --width one
        cutlayer compare runs/mine --metric rmse --target 2.5
        cutlayer compare runs/digits runs/mine --together --target 0.9
        cutlayer compare runs --figure a.pdf
        cutlayer compare runs/mine --traffic --samples 160000 --paper-convention
    """
    for option, given in (("--samples", samples is not None), ("--paper-convention", paper_convention)):
        if given and not traffic:  # it would be ignored
            raise ConfigError(f"{option} is about the table of traffic; add --traffic")
    for option, given in (("--per-seed", per_seed), ("--bold-best", bold_best), ("--metric", metric is not None)):
        if given and traffic:
            raise ConfigError(f"{option} is about accuracies and other metrics; leave out --traffic")
    if mode is not None and metric is None:
        raise ConfigError("--mode is about one metric; add --metric")
    if bold_best and form is not Format.LATEX:
        raise ConfigError("--bold-best is about LaTeX; add --format latex")
    found = report.compare(report.find(paths), target, together=together, metric=metric, goal=_goal(mode))
    if figure is not None:
        figures.refuse_to_lose(figure, found)
    show.warn(found.warnings)
    if traffic:
        document = traffic_table.document(found, samples, paper_convention=paper_convention)
        sections, records = traffic_table.sections(document), traffic_table.records(document)
    else:
        document = papers.document(found)
        sections, records = papers.sections(found, per_seed=per_seed, bold_best=bold_best), seeds_of(document)
    formats.shown(form, {**document, "figure": None if figure is None else str(figure)}, sections, records)
    show.drawn(figure, partial(figures.draw, found, width=width), quiet=form is not Format.TABLE)


def _goal(mode: str | None) -> Goal | None:
    goals: dict[str, Goal] = {"max": "max", "min": "min"}
    if mode is not None and mode not in goals:
        raise UnknownNameError("mode", mode, goals)
    return None if mode is None else goals[mode]


def seeds_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a record for each run and seed, including seeds that are not compared."""
    return [
        {**{key: run[key] for key in ("panel", "label", "name", "method")}, **seed}
        for run in document["runs"]
        for seed in run["per_seed"]
    ]
