"""The command overlap: how many perturbed passes fit into the wait for the gradient."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group as Lines
from rich.text import Text

from cutlayer.cli import show
from cutlayer.cli.options import Json
from cutlayer.cli.tables import plain_table
from cutlayer.results import figures
from cutlayer.studies.overlap import BAND, Band, Fit, Pipeline, fits
from cutlayer.studies.overlap_figure import draw_overlap


def overlap(
    layers: Annotated[int, typer.Option(help="Of the decoder; the table has a row for each at the client.")] = 16,
    layer_params: Annotated[float, typer.Option(metavar="M", help="Parameters of a layer, in millions.")] = 60.8,
    head_params: Annotated[
        float, typer.Option(metavar="M", help="Parameters of the language head, at the server, in millions.")
    ] = 262.7,
    hidden: Annotated[int, typer.Option(help="Values of a token at the cut.")] = 2048,
    batch: Annotated[int, typer.Option(help="Samples of a mini-batch.")] = 32,
    tokens: Annotated[int, typer.Option(help="Of a sample.")] = 256,
    value_bytes: Annotated[int, typer.Option(help="Bytes of a value that crosses; 2 for fp16.")] = 2,
    uplink: Annotated[float, typer.Option(help="Mbit/s.")] = 30.0,
    downlink: Annotated[float, typer.Option(help="Mbit/s.")] = 200.0,
    rtt: Annotated[float, typer.Option(help="Round trip in milliseconds.")] = 30.0,
    client_tflops: Annotated[float, typer.Option(help="Speed of the client.")] = 2.0,
    server_tflops: Annotated[float, typer.Option(help="Speed of the server.")] = 312.0,
    noise: Annotated[float, typer.Option(help="Every speed varies by up to this share.")] = 0.1,
    draws: Annotated[int, typer.Option(help="Of the noise.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the passes with their bands (.png, .pdf, .svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how many perturbed passes of HO-SFL hide in the wait for the gradient, for each cut of a decoder.

    A client waits while its activations go up, the server computes forward and back, and the gradient comes down. By
    default LLaMA-3.2-1B at the edge, as in the paper's Figure 5.
    """
    if figure is not None:
        figures.check_format(figure)
    pipeline = Pipeline(
        layers=layers, layer_params=1e6 * layer_params, head_params=1e6 * head_params, hidden=hidden, batch=batch,
        tokens=tokens, value_bytes=value_bytes, uplink=uplink, downlink=downlink, rtt=rtt, client_tflops=client_tflops,
        server_tflops=server_tflops, noise=noise, draws=draws, seed=seed,
    )  # fmt: skip
    found = fits(pipeline)
    if as_json:
        show.as_json({**_document(pipeline, found), "figure": None if figure is None else str(figure)})
    else:
        show.console().print(_table(pipeline, found))
    if figure is not None:
        draw_overlap(found, figure)
        if not as_json:
            typer.echo(f"figure: {figure}")


def _document(pipeline: Pipeline, found: Sequence[Fit]) -> dict[str, Any]:
    rows = [
        {
            "layers": fit.layers,
            "pass_seconds": fit.client_pass,
            "window_seconds": fit.idle_window,
            "passes": fit.passes._asdict(),
            "passes_after_first": fit.passes_after_first._asdict(),
        }
        for fit in found
    ]
    return {"pipeline": asdict(pipeline), "band_percentiles": list(BAND), "fits": rows}


def _table(pipeline: Pipeline, found: Sequence[Fit]) -> Lines:
    table = plain_table("")
    for head in ("layers at\nthe client", "pass\ns", "window\ns", "P max", "band", "P max\n- 1", "band"):
        table.add_column(head, justify="right", no_wrap=True)
    for fit in found:
        bands = [text for band in (fit.passes, fit.passes_after_first) for text in (f"{band.value:.1f}", _range(band))]
        table.add_row(str(fit.layers), f"{fit.client_pass:.2f}", f"{fit.idle_window:.1f}", *bands)
    return Lines(
        table,
        Text(
            "window: activations up, the server's pass forward and back (6 FLOPs a parameter and token), gradient down"
        ),
        Text(
            "pass: 2 FLOPs a parameter and token; P max: window / pass, of which the first, unperturbed pass takes one"
        ),
        Text("if it is charged to the window (P max - 1)"),
        Text(f"band: nine in ten of {pipeline.draws} draws of every speed within ±{100 * pipeline.noise:g} %"),
    )


def _range(band: Band) -> str:
    return f"{band.low:.1f}–{band.high:.1f}"
