"""`cutlayer profile`: the costs of a model, unit by unit, or the memory that a client needs."""

from typing import Annotated

from typer import Argument, Option

from cutlayer import plugins, registry
from cutlayer.cli import costs, launch, memory_table, show
from cutlayer.cli.options import Classes, InputShape, Json, Plugins


def profile(
    model: Annotated[str, Argument(help="A model (see `cutlayer list models`).")],
    shape: InputShape = None,
    classes: Classes = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="OPTION=VALUE", help="A model option; may be repeated.")
    ] = None,
    optimiser: Annotated[
        str, Option(help="sgd, momentum, adam or adamw; decides the size of the optimiser state.")
    ] = "momentum",
    cut: Annotated[
        str | None,
        Option(help="Units at the client, or the name of the last one; with --memory by default half of them."),
    ] = None,
    memory: Annotated[
        bool,
        Option(
            "--memory",
            help="Measure the peak memory of a client instead: inference, HO-SFL, ZO-SFL, SFL, full local training.",
        ),
    ] = False,
    batch: Annotated[int | None, Option(min=1, help="With --memory: samples in a step; by default 32.")] = None,
    perturbations: Annotated[
        int | None, Option(min=1, help="With --memory: perturbed passes of HO-SFL; by default 5.")
    ] = None,
    overlap: Annotated[
        int | None, Option(min=0, help="With --memory: add a row with this many passes before the gradient arrives.")
    ] = None,
    device: Annotated[str | None, Option(help="With --memory: measure on cpu (the default) or cuda.")] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show the costs of each unit of a model, and of both sides of a cut.

    With --memory, show the peak memory of one client during a step, including its weights, optimiser state and batch.
    The client runs alone; a stand-in for the server answers with tensors of the right shape.

    Examples:
        cutlayer profile resnet18 --cut layer1.1
        cutlayer profile cnn --input 1x28x28 --set width=32 --optimiser adam
        cutlayer profile my_model --plugin mine.py --input 1x28x28
        cutlayer profile resnet18 --memory --cut layer2.1 --batch 32
        cutlayer profile causal_lm --set path=llama-3.2-1b --memory --optimiser adamw --overlap 2 --device cuda
    """
    plugins.load(plugin or [])
    measured = {"batch": batch, "perturbations": perturbations, "overlap": overlap, "device": device}
    how = memory_table.asked(memory, measured)
    opt = registry.find("optimiser", costs.OPTIMISERS, optimiser)
    given = launch.parsed(settings or [])
    sample, num_classes = costs.fitting(model, given, shape, classes)
    options = costs.fitted(model, given, sample, num_classes)
    about = {"model": model, "options": options, "input": list(sample), "optimiser": optimiser}
    if how is None:
        found = about | costs.unit_costs(model, options, sample, opt, cut)
        show.result(found, *costs.cost_tables(found), machine=as_json)
    else:
        found = about | memory_table.client_bytes(model, options, sample, opt, cut, how)
        show.result(found, memory_table.table(found), machine=as_json)
