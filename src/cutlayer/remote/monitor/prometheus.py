"""What goes on at a server of real devices, for Prometheus."""

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Literal
from wsgiref.simple_server import WSGIServer

from cutlayer.errors import ConfigError
from cutlayer.remote.monitor.status import STATES, Board, ClientStatus, RunStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LAST_PORT = 65535
OF_A_CLIENT = ("client",)


@dataclass(frozen=True)
class Family:
    """A metric with a number for each value of its labels."""

    kind: Literal["gauge", "counter"]
    name: str
    about: str
    numbers: Mapping[tuple[str, ...], float]
    labels: tuple[str, ...] = ()


class Metrics:
    """The metrics as they are served; close it to stop."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread = server, thread
        self.port = server.server_port

    def close(self) -> None:
        """Answer nobody any more; the port is free then."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(board: Board, port: int, host: str = "127.0.0.1") -> Metrics:
    """Answer whoever asks this port over HTTP with the metrics of that moment; port 0 takes a free one."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError(
            "--metrics-port needs prometheus-client, which is not installed; pip install 'cutlayer[deploy]'"
        ) from None
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"--metrics-port {port} is no port; give one from 1 to {LAST_PORT}, or 0 for a free one")
    registry = CollectorRegistry()
    registry.register(_Collector(board))
    try:
        return Metrics(*start_http_server(port, host, registry))
    except OSError as error:
        why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"the metrics cannot be served at port {port} of {host}: {why}; "
            "give another with --metrics-port, or 0 for a free one"
        ) from None


class _Collector:
    """Reads the board anew each time it is asked."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        makers = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}  # a counter's name gets its _total
        run = self.board.snapshot()
        for family in (*_of_run(run), *_of_clients(list(run.clients.values()))):
            made = makers[family.kind](f"cutlayer_{family.name}", family.about, labels=family.labels)
            for labels, number in family.numbers.items():
                made.add_metric(labels, number)
            yield made


def _of_run(run: RunStatus) -> Iterator[Family]:
    states = Counter(client.state for client in run.clients.values())
    yield Family("gauge", "round", "The round under way, from 1 on.", {(): run.round})
    yield Family("gauge", "rounds_planned", "Rounds that the run will have.", {(): run.rounds})
    yield Family("counter", "rounds", "Rounds that ended since the server started.", {(): run.rounds_ended})
    yield Family("gauge", "round_seconds", "How long the last round took.", _known(run.round_seconds))
    yield Family("gauge", "loss", "The mean of the last round's batch losses.", _known(run.loss))
    yield Family("gauge", "accuracy", "The test accuracy when it was last measured.", _known(run.accuracy))
    yield Family("gauge", "clients", "Clients by their state.", {(s,): states[s] for s in STATES}, ("state",))
    about = "Connections of others than clients that were refused."
    yield Family("counter", "connections_refused", about, {(): run.refused_connections})


def _of_clients(clients: Sequence[ClientStatus]) -> Iterator[Family]:
    def each(number: Callable[[ClientStatus], float], *label: str) -> dict[tuple[str, ...], float]:
        return {(client.name, *label): number(client) for client in clients}

    sizes = each(lambda c: c.bytes_up, "up") | each(lambda c: c.bytes_down, "down")
    yield Family("counter", "client_bytes", "Bytes on the wire.", sizes, (*OF_A_CLIENT, "direction"))
    steps = each(lambda c: c.round_trips)
    yield Family("counter", "client_steps", "Answers that a client has given.", steps, OF_A_CLIENT)
    lags = each(lambda c: c.lag or 0.0)
    yield Family("gauge", "client_lag_seconds", "How long it has owed an answer; 0 if none.", lags, OF_A_CLIENT)
    refusals = each(lambda c: c.refusals)
    yield Family("counter", "client_refusals", "Messages of a client that were refused.", refusals, OF_A_CLIENT)
    rejoined = each(lambda c: c.rejoined)
    yield Family("counter", "client_rejoined", "Times that a client came back.", rejoined, OF_A_CLIENT)


def _known(number: float | None) -> dict[tuple[str, ...], float]:
    """No line for what is not known yet."""
    return {} if number is None else {(): number}
