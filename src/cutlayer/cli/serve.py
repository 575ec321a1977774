"""`cutlayer serve`: run the servers for clients on real devices."""

import errno
import logging
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from cutlayer import plugins
from cutlayer.cli import launch, options
from cutlayer.cli.launch import Interrupted
from cutlayer.cli.private import private_files, warn_if_shared
from cutlayer.cli.progress import logging_to
from cutlayer.errors import CheckpointError, ConfigError, DivergedError
from cutlayer.runs import config
from cutlayer.runs.config import Run

log = logging.getLogger("cutlayer")

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of the machine: services are restarted after exit code 1
LINGER = 20.0  # seconds; longer than the longest pause between a device's attempts


@private_files()
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
    quorum: Annotated[
        float,
        Option(
            help="Share of the asked clients after whose answers the others get only as much time again: "
            "with 0.8, the slowest fifth cannot hold up a round."
        ),
    ] = 1.0,
    round_seconds: Annotated[
        float | None,
        Option(help="Seconds after which a round goes on only with clients that keep up; by default it never does."),
    ] = None,
    patience: Annotated[float, Option(help="Seconds that a round waits for missing clients.")] = 60.0,
    least: Annotated[
        int | None, Option(min=1, help="Clients that a round needs; by default all for the first round, then any.")
    ] = None,
    most_steps: Annotated[
        int,
        Option(min=1, help="Refuse a device that claims so many samples that a round has more steps than this."),
    ] = 100_000,
    connections: Annotated[
        int | None,
        Option(min=1, help="Connections at once, before and after TLS; by default 1000, or 4 for each client if more."),
    ] = None,
    per_address: Annotated[
        int | None,
        Option(min=1, help="Connections of one address at once that have shown no certificate; by default any number."),
    ] = None,
    handshake: Annotated[float, Option(help="Seconds that a connection has to show its certificate.")] = 10.0,
    packing: Annotated[str | None, Option(hidden=True, help="Gone: a run names its codecs.")] = None,
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
        cutlayer serve hospital.toml --keys train
        cutlayer serve hospital.toml --keys train --deadline 30 --least 3 --metrics-port 9100
        cutlayer serve hospital.toml --keys train --quorum 0.8 --round-seconds 600
        cutlayer serve trial.toml --insecure
    """
    from cutlayer.remote.identity.register import Register
    from cutlayer.remote.monitor.logs import structured
    from cutlayer.remote.monitor.prometheus import serve_metrics
    from cutlayer.remote.monitor.status import Board
    from cutlayer.remote.monitor.table import LiveTable
    from cutlayer.remote.server.ceilings import Ceilings
    from cutlayer.remote.server.serve import Serving
    from cutlayer.remote.server.serve import serve as carry_out
    from cutlayer.remote.server.waits import Waits

    options.refuse_packing(
        packing, "give --set codecs.activations={name}, or name it in the run file, which devices read"
    )
    hashes = plugins.load(plugin or [])
    run = _one(what, settings or [])
    if engine is not None:
        run = config.changed(run, {"server_engine": engine}, "the command line")
    options.check_keys("server", keys, insecure)
    if test is not None and role != "both":
        raise ConfigError(
            "neither of two servers has the whole model, so there is nothing to measure: leave out --test"
        )
    serving = Serving(
        listen=listen or ("127.0.0.1:8470" if insecure else "0.0.0.0:8470"),
        keys=keys,
        deadline=deadline,
        waits=Waits(quorum=quorum, round_seconds=round_seconds),
        patience=patience,
        least=least,
        linger=LINGER,
        role=role,  # type: ignore[arg-type]
        train=train,
        plugins=hashes,
        ceilings=Ceilings(connections=connections, of_an_address=per_address, handshake=handshake, steps=most_steps),
    )
    expected = {} if keys is None else {n: name for name, n in Register.read(keys / "clients.toml").clients.items()}
    board = Board(name=run.name, method=run.method.name, rounds=run.rounds, expected=expected)
    folder = launch.folder_of(run, out)
    warn_if_shared(folder.path)
    options.stop_on_sigterm()
    with ExitStack() as stack:
        if log_file is not None:
            handler = stack.enter_context(closing(structured(log_file)))
            stack.enter_context(logging_to(handler, logging.INFO))
        if not quiet:
            stack.enter_context(LiveTable(board, Console(stderr=True)))
        if insecure:
            log.warning("no certificates, no encryption: anyone who reaches this port can join, read and alter all")
        if metrics_port is not None:
            metrics = stack.enter_context(closing(serve_metrics(board, metrics_port)))
            log.info("metrics at http://127.0.0.1:%d/metrics", metrics.port)
        try:
            training = carry_out(
                run, folder, serving, board, root=data, test=test, overwrite=overwrite, on_open=board.opened
            )
        except KeyboardInterrupt:
            raise Interrupted(run, folder, again=()) from None
        except CheckpointError as error:
            raise _told(error) from None
    Console().print(f"{training.state.round} rounds done; the model is in {folder.model}", soft_wrap=True)
    if training.diverged:
        raise DivergedError(training.diverged)


def _told(error: CheckpointError) -> BaseException:
    """Tell a shortage that passes, after which a service is to be restarted, from a mistake of the user."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORTAGES:
        log.error("%s", error)
        return SystemExit(1)
    return error


def _one(what: str, settings: list[str]) -> Run:
    runs = launch.prepared(launch.named(what), options.Orders(settings=settings), what)
    if len(runs) != 1:
        raise ConfigError(
            f"{what} has {len(runs)} runs, and a server serves one; write the one you mean in a TOML file"
        )
    return runs[0]
