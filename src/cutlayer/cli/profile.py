"""The command profile: what a model costs, unit by unit, or what a client needs of its memory."""

from typing import Annotated, Any

import typer

from cutlayer.cli import costs, launch, memory_table, show, tables
from cutlayer.cli.options import Classes, InputShape, Json


def profile(
    model: Annotated[str, typer.Argument(help="A model (see `cutlayer list models`).")],
    shape: InputShape = None,
    classes: Classes = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="A model option; may be repeated.")
    ] = None,
    optimiser: Annotated[
        str, typer.Option(help="sgd, momentum, adam or adamw: sizes the optimiser state.")
    ] = "momentum",
    cut: Annotated[
        str | None,
        typer.Option(help="Units at the client, or the name of the last one; with --memory half of them by default."),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Measure the peak memory of a client instead: inference, HO-SFL, ZO-SFL, SFL, full local training.",
        ),
    ] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="With --memory: samples of a step, by default 32.")] = None,
    perturbations: Annotated[
        int | None, typer.Option(min=1, help="With --memory: perturbed passes of HO-SFL, by default 5.")
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(min=0, help="With --memory: so many of them before the gradient is there, a row of its own."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --memory: cpu (by default) or cuda, whose memory is measured.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what each unit of a model costs, and what a cut leaves on each side.

    With --memory: the most that one client holds at any time of a step, its weights, optimiser state and batch
    included. The client runs alone; a stand-in for the server answers with tensors of the right shape.
    """
    given = {"batch": batch, "perturbations": perturbations, "overlap": overlap, "device": device}
    how = memory_table.asked(memory, given)
    options = launch.parsed(settings or [])
    about: dict[str, Any] = {
        "shape": None if shape is None else costs.parse_shape(shape),
        "classes": classes,
        "optimiser": optimiser,
        "cut": cut,
    }
    if how is None:
        found = costs.model_costs(model, options, **about)
    else:
        found = memory_table.document(model, options, how, **about)
    if as_json:
        show.as_json(found)
    else:
        show.console().print(*(tables.cost_tables(found) if how is None else [memory_table.table(found)]))
