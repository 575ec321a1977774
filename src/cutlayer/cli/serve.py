"""`cutlayer serve`: run the servers for clients on real devices."""

import logging
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from cutlayer import plugins
from cutlayer.cli import launch, options
from cutlayer.cli.launch import Interrupted
from cutlayer.cli.progress import logging_to
from cutlayer.errors import ConfigError, DivergedError
from cutlayer.runs import config
from cutlayer.runs.config import Run

log = logging.getLogger("cutlayer")

LINGER = 20.0  # seconds; longer than the longest pause between a device's attempts


def serve(
    what: Annotated[str, Argument(metavar="CONFIG", help="A TOML file, or a recipe of one run.")],
    keys: options.Keys = None,
    listen: Annotated[
        str | None, Option(metavar="HOST:PORT", help="By default 0.0.0.0:8470; with --insecure 127.0.0.1:8470.")
    ] = None,
    insecure: options.Insecure = False,
    role: Annotated[
        str,
        Option(
            help="train or fed, to run each server as a process with its own owner and keys; by default both in one."
        ),
    ] = "both",
    train: Annotated[
        str | None, Option(metavar="HOST:PORT", help="With --role fed: the address of the training server.")
    ] = None,
    deadline: Annotated[float, Option(help="Timeout for a client's answer, in seconds.")] = 60.0,
    patience: Annotated[float, Option(help="Seconds that a round waits for missing clients.")] = 60.0,
    least: Annotated[
        int | None, Option(min=1, help="Clients that a round needs; by default all for the first round, then any.")
    ] = None,
    packing: Annotated[
        str, Option(help="Encoding of activations sent up: raw, bf16 (half the bytes) or int8 (a quarter).")
    ] = "raw",
    engine: Annotated[
        str | None, Option(help="The server's engine: loop, vmap (stacks devices of equal shapes) or graph (on a GPU).")
    ] = None,
    test: Annotated[Path | None, Option(metavar="PATH", help="Samples at the server to evaluate the model on.")] = None,
    plugin: options.Plugins = None,
    data: options.Data = None,
    out: options.Out = Path("runs"),
    settings: options.Settings = None,
    overwrite: options.Overwrite = False,
    metrics_port: Annotated[
        int | None, Option(min=0, max=65535, help="Expose Prometheus metrics on this port of 127.0.0.1.")
    ] = None,
    log_file: Annotated[
        Path | None, Option(metavar="FILE", help="Append structured logs, one JSON object per line.")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Serve a run to real devices, which connect with `cutlayer join`. A run that was stopped continues.

    Examples:
        cutlayer serve hospital.toml --keys keys/train
        cutlayer serve hospital.toml --keys keys/train --deadline 30 --least 3 --metrics-port 9100
        cutlayer serve trial.toml --insecure
    """
    from cutlayer.remote.identity.register import Register
    from cutlayer.remote.monitor.logs import structured
    from cutlayer.remote.monitor.prometheus import serve_metrics
    from cutlayer.remote.monitor.status import Board
    from cutlayer.remote.monitor.table import LiveTable
    from cutlayer.remote.server.serve import Serving
    from cutlayer.remote.server.serve import serve as carry_out

    hashes = plugins.load(plugin or [])
    run = _one(what, settings or [])
    if engine is not None:
        run = config.changed(run, {"server_engine": engine}, "the command line")
    options.check_keys("server", keys, insecure)
    if test is not None and role != "both":
        raise ConfigError(
            "neither of two servers has the whole model, so there is nothing to measure: leave out --test"
        )
    if insecure:
        log.warning("no certificates and no encryption: anybody who can reach this port can join, read and forge")
    serving = Serving(
        listen=listen or ("127.0.0.1:8470" if insecure else "0.0.0.0:8470"),
        keys=keys,
        deadline=deadline,
        patience=patience,
        least=least,
        linger=LINGER,
        packing=packing,  # type: ignore[arg-type]
        role=role,  # type: ignore[arg-type]
        train=train,
        plugins=hashes,
    )
    expected = {} if keys is None else {n: name for name, n in Register.read(keys / "clients.toml").clients.items()}
    board = Board(name=run.name, method=run.method.name, rounds=run.rounds, expected=expected)
    folder = launch.folder_of(run, out)
    options.stop_on_sigterm()
    with ExitStack() as stack:
        if log_file is not None:
            handler = stack.enter_context(closing(structured(log_file)))
            stack.enter_context(logging_to(handler, logging.INFO))
        if not quiet:
            stack.enter_context(LiveTable(board, Console(stderr=True)))
        if metrics_port is not None:
            metrics = stack.enter_context(closing(serve_metrics(board, metrics_port)))
            log.info("metrics at http://127.0.0.1:%d/metrics", metrics.port)
        try:
            training = carry_out(
                run, folder, serving, board, root=data, test=test, overwrite=overwrite, on_open=board.opened
            )
        except KeyboardInterrupt:
            raise Interrupted(run, folder, again=()) from None
    Console().print(f"{training.state.round} rounds done; the model is in {folder.model}", soft_wrap=True)
    if training.diverged:
        raise DivergedError(training.diverged)


def _one(what: str, settings: list[str]) -> Run:
    runs = launch.prepared(launch.named(what), options.Orders(settings=settings), what)
    if len(runs) != 1:
        raise ConfigError(
            f"{what} has {len(runs)} runs, and a server serves one; write the one you mean in a TOML file"
        )
    return runs[0]
