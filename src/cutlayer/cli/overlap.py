"""`cutlayer overlap`: how many perturbed passes fit into the wait for the gradient."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from rich.text import Text
from typer import Option

from cutlayer.cli import show
from cutlayer.cli.options import Json, figure_option
from cutlayer.cli.tables import plain_table
from cutlayer.studies.overlap import BAND, Band, Fit, Pipeline, fits
from cutlayer.studies.overlap_figure import draw_overlap


def overlap(
    layers: Annotated[
        int, Option(help="Layers of the decoder; the table has a row for each number at the client.")
    ] = 16,
    layer_params: Annotated[float, Option(metavar="M", help="Parameters of a layer, in millions.")] = 60.8,
    head_params: Annotated[
        float, Option(metavar="M", help="Parameters of the language head, at the server, in millions.")
    ] = 262.7,
    hidden: Annotated[int, Option(help="Values per token at the cut.")] = 2048,
    batch: Annotated[int, Option(help="Samples in a mini-batch.")] = 32,
    tokens: Annotated[int, Option(help="Tokens in a sample.")] = 256,
    value_bytes: Annotated[int, Option(help="Bytes per value sent; 2 for fp16.")] = 2,
    uplink: Annotated[float, Option(help="Uplink of the client in Mbit/s.")] = 30.0,
    downlink: Annotated[float, Option(help="Downlink of the client in Mbit/s.")] = 200.0,
    rtt: Annotated[float, Option(help="Round-trip time in milliseconds.")] = 30.0,
    client_tflops: Annotated[float, Option(help="Speed of the client in TFLOPS.")] = 2.0,
    server_tflops: Annotated[float, Option(help="Speed of the server in TFLOPS.")] = 312.0,
    noise: Annotated[float, Option(help="Relative variation of every speed.")] = 0.1,
    draws: Annotated[int, Option(help="Draws of the noise.")] = 1000,
    seed: Annotated[int, Option(help="The seed of the noise.")] = 0,
    figure: Annotated[Path | None, figure_option("Draw the passes with their bands")] = None,
    as_json: Json = False,
) -> None:
    """Show how many perturbed passes of HO-SFL fit into the wait for the gradient, for each cut of a decoder.

    A client waits while its activations go up, the server runs forward and backward, and the gradient comes down. The
    defaults are LLaMA-3.2-1B at the edge, as in Figure 5 of the paper.

    Examples:
        cutlayer overlap
        cutlayer overlap --figure overlap.png
        cutlayer overlap --uplink 100 --client-tflops 10 --batch 8 --json
    """
    pipeline = Pipeline(
        layers=layers, layer_params=1e6 * layer_params, head_params=1e6 * head_params, hidden=hidden, batch=batch,
        tokens=tokens, value_bytes=value_bytes, uplink=uplink, downlink=downlink, rtt=rtt, client_tflops=client_tflops,
        server_tflops=server_tflops, noise=noise, draws=draws, seed=seed,
    )  # fmt: skip
    found = fits(pipeline)
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
    document = {"pipeline": asdict(pipeline), "band_percentiles": list(BAND), "fits": rows}
    draw = partial(draw_overlap, found)
    show.with_figure(document, *_table(pipeline, found), machine=as_json, figure=figure, draw=draw)


def _table(pipeline: Pipeline, found: Sequence[Fit]) -> list[RenderableType]:
    heads = ["layers at\nthe client", "pass\ns", "window\ns", "P max", "band", "P max\n- 1", "band"]
    rows = []
    for fit in found:
        bands = [text for band in (fit.passes, fit.passes_after_first) for text in _band(band)]
        rows.append([fit.layers, f"{fit.client_pass:.2f}", f"{fit.idle_window:.1f}", *bands])
    lines = [
        "window: activations up, the server's pass forward and back (6 FLOPs a parameter and token), gradient down",
        "pass: 2 FLOPs a parameter and token; P max: window / pass, of which the first, unperturbed pass takes one",
        "if it is charged to the window (P max - 1)",
        f"band: nine in ten of {pipeline.draws} draws of every speed within ±{100 * pipeline.noise:g} %",
    ]
    return [plain_table(heads, rows), *map(Text, lines)]


def _band(band: Band) -> list[str]:
    return [f"{band.value:.1f}", f"{band.low:.1f}–{band.high:.1f}"]
