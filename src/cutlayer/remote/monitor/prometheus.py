"""The status of a server of real devices, as metrics for Prometheus."""

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from cutlayer.errors import ConfigError
from cutlayer.remote.monitor.status import STATES, Board, ClientStatus, RunStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LAST_PORT = 65535
Kind = Literal["gauge", "counter"]
Numbers = Iterable[tuple[tuple[str, ...], float | None]]  # values of the labels, and the number if it is known yet
OF_THE_RUN: tuple[tuple[Kind, str, str, Callable[[RunStatus], float | None]], ...] = (
    ("gauge", "round", "The round under way, from 1 on.", lambda r: r.round),
    ("gauge", "rounds_planned", "Rounds that the run will have.", lambda r: r.rounds),
    ("counter", "rounds", "Rounds that ended since the server started.", lambda r: r.rounds_ended),
    ("gauge", "round_seconds", "How long the last round took.", lambda r: r.round_seconds),
    ("gauge", "loss", "The mean of the last round's batch losses.", lambda r: r.loss),
    ("gauge", "accuracy", "The test accuracy when it was last measured.", lambda r: r.accuracy),
    ("counter", "guarded", "Updates that the guard dropped since the server started.", lambda r: r.guarded),
    (
        "counter",
        "connections_refused",
        "Connections of others than clients that were refused.",
        lambda r: r.refused_connections,
    ),
    (
        "counter",
        "handshakes_failed",
        "Connections that showed no certificate that is accepted.",
        lambda r: r.failed_handshakes,
    ),
)
OF_EACH_CLIENT: tuple[tuple[Kind, str, str, Callable[[ClientStatus], float]], ...] = (
    ("counter", "client_steps", "Answers that a client has given.", lambda c: c.round_trips),
    ("gauge", "client_lag_seconds", "How long it has owed an answer; 0 if none.", lambda c: c.lag or 0.0),
    ("counter", "client_refusals", "Messages of a client that were refused.", lambda c: c.refusals),
    ("counter", "client_rejoined", "Times that a client came back.", lambda c: c.rejoined),
)


class Metrics:
    """Serves a board's metrics over HTTP until it is closed."""

    def __init__(self, board: Board, port: int, host: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._board = board
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = self._server.server_port

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics as they are now; called at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        makers = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}  # a counter's name gets its _total

        def family(kind: Kind, name: str, about: str, numbers: Numbers, *labels: str) -> "Metric":
            made = makers[kind](f"cutlayer_{name}", about, labels=labels)
            for values, number in numbers:
                if number is not None:
                    made.add_metric(values, number)
            return made  # type: ignore[no-any-return]

        run = self._board.snapshot()
        clients = run.clients.values()
        for kind, name, about, of_run in OF_THE_RUN:
            yield family(kind, name, about, [((), of_run(run))])
        states = Counter(client.state for client in clients)
        yield family("gauge", "clients", "Clients by their state.", [((s,), states[s]) for s in STATES], "state")
        for kind, name, about, of_client in OF_EACH_CLIENT:
            yield family(kind, name, about, [((c.name,), of_client(c)) for c in clients], "client")
        up, down = [((c.name, "up"), c.bytes_up) for c in clients], [((c.name, "down"), c.bytes_down) for c in clients]
        yield family("counter", "client_bytes", "Bytes on the wire.", up + down, "client", "direction")

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(board: Board, port: int, host: str = "127.0.0.1") -> Metrics:
    """Serve the metrics over HTTP at this port; port 0 takes a free one."""
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"--metrics-port {port} is no port; give one from 1 to {LAST_PORT}, or 0 for a free one")
    try:
        return Metrics(board, port, host)
    except ImportError:
        raise ConfigError(
            "--metrics-port needs prometheus-client, which is not installed; pip install 'cutlayer[deploy]'"
        ) from None
    except OSError as error:
        why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"the metrics cannot be served at port {port} of {host}: {why}; "
            "give another with --metrics-port, or 0 for a free one"
        ) from None
