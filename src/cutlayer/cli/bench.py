"""`cutlayer bench`: time a step of SMoFi on every engine, by hand, in JAX, and the limit of the device."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

from cutlayer import benching
from cutlayer.cli import costs, show
from cutlayer.cli.options import Json
from cutlayer.core.checks import check_device
from cutlayer.errors import ConfigError

NOTHING = "none"


def bench(
    context: typer.Context,
    clients: Annotated[int | None, Option(help="Clients in a step; by default 20, on a CPU 4.")] = None,
    batch: Annotated[int | None, Option(help="Samples in each client's mini-batch; by default 32.")] = None,
    model: Annotated[
        str | None,
        Option(help="An image model (see `cutlayer list models`); by default resnet18, on a CPU resnet_tiny."),
    ] = None,
    cut: Annotated[
        str | None, Option(help="Units at the client, or the name of the last one; by default 3: layer1.1 of resnet18.")
    ] = None,
    precision: Annotated[str | None, Option(help="fp32, tf32 or bf16; by default bf16, on a CPU fp32.")] = None,
    device: Annotated[str | None, Option(help="By default cuda if there is a GPU, else cpu.")] = None,
    steps: Annotated[int | None, Option(help="Steps in a turn; by default 20, on a CPU 10.")] = None,
    turns: Annotated[
        int | None, Option(help="Timed turns, whose median counts; by default 5. With --end-to-end: rounds.")
    ] = None,
    engines: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="A comma-separated list of graph, loop and vmap, or none; by default all that suit the device.",
        ),
    ] = None,
    baselines: Annotated[
        str | None,
        Option(metavar="NAMES", help="A comma-separated list of hand, jax and limit, or none; by default all."),
    ] = None,
    end_to_end: Annotated[
        bool,
        Option(
            "--end-to-end",
            help="Time whole rounds instead: 5 epochs at a fifth of all clients, with data and evaluation.",
        ),
    ] = False,
    seed: Annotated[int, Option(help="The seed of weights, samples and batches.")] = 0,
    output: Annotated[
        Path | None,
        Option(metavar="FILE", help="Also write the JSON document to this file; an existing file is replaced."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time a step of SMoFi: each engine, the loop by hand, JAX, and the limit of the device, side by side.

    The limit is one model on the batches of all clients merged. Samples are noise with the shapes of CIFAR-10. Takes
    about a minute; a row that cannot be timed tells why.

    Examples:
        cutlayer bench
        cutlayer bench --clients 8 --engines loop,vmap --baselines hand
        cutlayer bench --model resnet18 --precision tf32 --output tf32.json
        cutlayer bench --end-to-end --engines graph
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if output is not None:
        _check_output(output)
    if end_to_end and steps is not None:
        raise ConfigError("end to end a round is whole epochs, not so many steps; leave the steps out")
    options: dict[str, Any] = {
        "clients": clients, "batch": batch, "model": model, "cut": None if cut is None else costs.parse_cut(cut),
        "precision": precision, "steps": steps, "turns": turns, "engines": _names(engines),
        "baselines": _names(baselines),
    }  # fmt: skip
    given = {option: value for option, value in options.items() if value is not None}
    case = benching.Case(**{**benching.usual(device, end_to_end), **given}, end_to_end=end_to_end, seed=seed)
    document = {"command": _command(context), **_measured(case)}
    if as_json:
        show.result(document, machine=True)
    else:
        show.prose(*benching.text(document).splitlines())
    if output is not None:
        _write(document, output)
        typer.echo(f"document: {output}", err=as_json)


def _measured(case: benching.Case) -> dict[str, Any]:
    """Measure the case; if no row could be timed, raise an error with the reasons."""
    try:
        found = benching.measure(case, lambda text: typer.echo(text, err=True))
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was written", err=True)
        raise typer.Exit(130) from None
    if all(row["obstacle"] for row in found["rows"]):
        why = "; ".join(f"{row['what']}: {row['obstacle']}" for row in found["rows"])
        raise ConfigError(f"nothing could be timed: {why}")
    return found


def _command(context: typer.Context) -> str:
    """Return the command line that repeats this measurement."""
    words = ["cutlayer", "bench"]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if value != option.default:
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return shlex.join(words)


def _names(words: str | None) -> tuple[str, ...] | None:
    """Split comma-separated names; "none" is an empty list, and None the default."""
    if words is None:
        return None
    return () if words == NOTHING else tuple(word.strip() for word in words.split(","))


def _check_output(path: Path) -> None:
    """Refuse a path that cannot be written, before any time is spent on measuring."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file for --output")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} into; make it first")


def _write(document: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; choose another --output") from error
