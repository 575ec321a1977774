"""Specifies what can be seen of a server of real devices: its facts, its table, its metrics and its log."""

import io
import json
import logging
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cutlayer.core.text import printable
from cutlayer.errors import ConfigError
from cutlayer.remote.monitor.logs import event, structured
from cutlayer.remote.monitor.prometheus import serve_metrics
from cutlayer.remote.monitor.status import STATES, Board, ClientStatus
from cutlayer.remote.monitor.table import LiveTable

parser = pytest.importorskip("prometheus_client.parser")

LOG = logging.getLogger("cutlayer")
FORGED = "eve\x1b[2J\r\nround ended [red]\u202e"
SHOWN = "eve\\x1b[2J\\r\\nround ended [red]\\u202e"


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def board(clock: Hands | None = None, **options: Any) -> Board:
    made = Board(name="digits", method="splitfed", rounds=10, clock=clock or Hands(), **options)
    made.opened("127.0.0.1:7")
    return made


def three(clock: Hands) -> Board:
    """Ann trains, Bob has answered, Cem is lost; the first round is over, the second runs."""
    made = board(clock)
    for number, name in enumerate(("ann", "bob", "cem")):
        made.joined(number, name, 100 + number)
    made.round_began(1, range(3))
    clock.now += 2
    made.round_ended({"round": 1, "loss": 0.5123, "test_accuracy": 0.9312, "bytes": {}})
    made.round_began(2, range(3))
    for number in range(3):
        made.asked(number, 2048)
    made.answered(1, 1536, 0.25)
    made.lost(2, "connection reset")
    clock.now += 3
    return made


def screen(shown: Board, width: int = 80, height: int = 24) -> list[str]:
    """The table as lines of text."""
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(LiveTable(shown, console).render())
    return [line.rstrip() for line in console.export_text().splitlines()]


def words(line: str) -> str:
    """A line of the table without what fills its columns."""
    return " ".join(line.split())


@contextmanager
def lines(target: io.StringIO | Path) -> Iterator[None]:
    """The library's log as JSON."""
    handler, level = structured(target), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        handler.close()


def scraped(shown: Board) -> dict[tuple[str, ...], float]:
    """All samples by their name and the values of their labels."""
    with closing(serve_metrics(shown, 0)) as metrics:
        address = f"http://127.0.0.1:{metrics.port}/metrics"
        with urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
    found = [s for family in parser.text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *s.labels.values()): s.value for s in found}


class TestBoard:
    def test_a_client_from_joining_to_the_end(self) -> None:
        clock = Hands()
        made = board(clock, expected={0: "ann"})

        def ann() -> ClientStatus:
            return made.snapshot().clients[0]

        assert (ann().state, ann().name, ann().samples) == ("away", "ann", 0)
        made.joined(0, "ann", 60)
        assert (ann().state, ann().samples, ann().rejoined) == ("joined", 60, 0)
        made.round_began(1, [0])
        assert ann().state == "waiting"
        made.asked(0, 1000)
        clock.now += 1.5
        assert (ann().state, ann().lag, ann().bytes_down) == ("training", 1.5, 1000)
        made.slow(0)
        assert (ann().state, ann().lag) == ("slow", 1.5)
        made.answered(0, 300, 1.5)
        assert (ann().state, ann().lag, ann().bytes_up, ann().last_seconds) == ("waiting", None, 300, 1.5)
        assert (ann().step, ann().round_trips) == (1, 1)
        made.round_began(2, [0])
        assert (ann().step, ann().round_trips) == (0, 1)
        made.ended()
        assert ann().state == "done"

    def test_a_client_comes_back(self) -> None:
        made = board()
        made.joined(0, "ann", 60)
        made.asked(0, 1)
        made.lost(0, "connection reset")
        lost = made.snapshot().clients[0]
        assert (lost.state, lost.reason, lost.lag) == ("lost", "connection reset", None)
        made.joined(0, "ann", 60)
        back = made.snapshot().clients[0]
        assert (back.state, back.rejoined, back.reason) == ("joined", 1, "connection reset")
        made.left(0)
        assert made.snapshot().clients[0].state == "away"
        made.joined(0, "ann", 60)
        assert made.snapshot().clients[0].rejoined == 2

    def test_the_end_of_a_session_does_not_hide_its_reason(self) -> None:
        made = board()
        made.joined(0, "ann", 60)
        made.refused(0, "labels out of range")
        made.lost(0, "stream closed")
        made.left(0)
        made.asked(0, 5)
        ann = made.snapshot().clients[0]
        assert (ann.state, ann.reason, ann.refusals, ann.lag) == ("refused", "labels out of range", 1, None)
        assert ann.bytes_down == 5  # what went over the wire is counted all the same

    def test_the_run(self) -> None:
        run = three(Hands()).snapshot()
        assert (run.round, run.rounds, run.step, run.rounds_ended) == (2, 10, 1, 1)
        assert (run.elapsed, run.round_seconds, run.loss, run.accuracy) == (5.0, 2.0, 0.5123, 0.9312)
        assert (run.bytes_up, run.bytes_down) == (1536, 3 * 2048)

    def test_many_threads(self) -> None:
        """No count is lost, and no snapshot is taken in the middle of a change."""
        made, done = board(), threading.Event()
        torn: list[int] = []

        def serve(number: int) -> None:
            for _ in range(300):
                made.joined(number, "device", 1)
                made.asked(number, 3)
                made.answered(number, 2, 0.1)

        def look() -> None:
            while not done.is_set():
                made.round_began(1, range(8))
                run = made.snapshot()
                if run.step != max((client.step for client in run.clients.values()), default=0):
                    torn.append(run.step)

        switch = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # so that a lock that is missing shows
        try:
            with ThreadPoolExecutor(9) as pool:
                looking = pool.submit(look)
                list(pool.map(serve, range(8)))
                done.set()
                looking.result()
        finally:
            done.set()
            sys.setswitchinterval(switch)
        run = made.snapshot()
        assert torn == []
        assert (run.bytes_up, run.bytes_down) == (8 * 300 * 2, 8 * 300 * 3)
        assert {client.rejoined for client in run.clients.values()} == {299}


class TestTable:
    def test_three_clients_in_80_columns(self) -> None:
        assert screen(three(Hands())) == [
            "digits, splitfed: round 2 of 10, step 1, 0:05",
            "loss 0.512, accuracy 93.1 %, 1.5 KiB up, 6.0 KiB down",
            "   # name           state     step         up       down     lag reason",
            "─" * 80,
            "   2 cem            lost         0        0 B    2.0 KiB       – connection res…",
            "   0 ann            training     0        0 B    2.0 KiB   3.0 s",
            "   1 bob            waiting      1    1.5 KiB    2.0 KiB       –",
        ]

    def test_many_clients_do_not_scroll_and_those_in_trouble_come_first(self) -> None:
        made = board()
        for number in range(100):
            made.joined(number, f"device-{number}", 10)
        made.lost(97, "gone")
        made.refused(50, "NaN in activations")
        text = screen(made)
        assert len(text) == 23  # the cursor has the last line
        assert [words(line).split()[:3] for line in text[4:7]] == [
            ["50", "device-50", "refused"],
            ["97", "device-97", "lost"],
            ["0", "device-0", "joined"],
        ]
        assert text[-1] == "… and 82 more: 82 joined"

    def test_a_client_name_cannot_forge_a_line_of_the_table(self) -> None:
        made = board()
        made.joined(0, FORGED, 1)
        made.lost(0, FORGED)
        text = screen(made, width=200)
        assert len(text) == 5
        assert text[4].startswith("   0 eve\\x1b[2J\\r\\… lost ")
        assert text[4].endswith(SHOWN)

    def test_a_terminal_has_the_table_and_the_warnings(self) -> None:
        console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
        made, before = three(Hands()), (LOG.level, list(LOG.handlers))
        with LiveTable(made, console):
            made.joined(3, "dan", 7)
            made.refused(3, FORGED)
        text = console.file.getvalue()
        assert "client joined" not in text  # the table shows it
        assert f'warning: client refused client=dan number=3 reason="{SHOWN}"\n'.replace("\\", "\\\\") in text
        assert (LOG.level, LOG.handlers) == before

    def test_the_table_follows_the_board(self) -> None:
        console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
        made = three(Hands())
        with LiveTable(made, console):
            made.round_began(7, [])
            deadline = time.monotonic() + 60
            while "round 7 of 10" not in console.file.getvalue():
                assert time.monotonic() < deadline, "the table was not drawn again"
                time.sleep(0.01)

    def test_without_a_terminal_events_are_printed_as_lines(self) -> None:
        console, clock = Console(file=io.StringIO(), width=40), Hands()
        with LiveTable(board(clock), console) as table:
            made = table.board
            made.joined(0, "ann", 60)
            made.round_began(1, [0])
            made.asked(0, 10)
            made.answered(0, 20, 0.1)
            clock.now += 2.5
            made.round_ended({"round": 1, "loss": 0.51234, "test_accuracy": 0.9})
            made.refused_connection("no certificate")
            made.left(0)
            made.ended()
        assert console.file.getvalue().splitlines() == [
            "client joined client=ann number=0 samples=60",
            "round ended round=1 rounds=10 loss=0.5123 accuracy=0.9 bytes_up=20 bytes_down=10 seconds=2.5",
            'warning: connection refused reason="no certificate"',
            "client left client=ann number=0",
            "run ended rounds=1 seconds=2.5",
        ]


class TestMetrics:
    def test_the_metrics_that_prometheus_scrapes(self) -> None:
        made = three(Hands())
        made.joined(2, "cem", 102)
        made.refused(2, "too large")
        made.refused_connection("wrong CA")
        made.failed_handshakes(3, {"192.0.2.1": 3})
        found = scraped(made)
        states = {"training": 1, "waiting": 1, "refused": 1}
        assert found == {
            ("cutlayer_round",): 2,
            ("cutlayer_rounds_planned",): 10,
            ("cutlayer_rounds_total",): 1,
            ("cutlayer_round_seconds",): 2,
            ("cutlayer_loss",): 0.5123,
            ("cutlayer_accuracy",): 0.9312,
            ("cutlayer_guarded_total",): 0,
            ("cutlayer_connections_refused_total",): 1,
            ("cutlayer_handshakes_failed_total",): 3,
            **{("cutlayer_clients", state): states.get(state, 0) for state in STATES},
            **{("cutlayer_client_bytes_total", name, "down"): 2048 for name in ("ann", "bob", "cem")},
            ("cutlayer_client_bytes_total", "ann", "up"): 0,
            ("cutlayer_client_bytes_total", "bob", "up"): 1536,
            ("cutlayer_client_bytes_total", "cem", "up"): 0,
            **_each("steps_total", 0, 1, 0),
            **_each("lag_seconds", 3, 0, 0),
            **_each("refusals_total", 0, 0, 1),
            **_each("rejoined_total", 0, 0, 1),
        }

    def test_a_forged_name_is_one_label(self) -> None:
        made = board()
        made.joined(0, 'x"} 1\ncutlayer_loss 0', 1)
        found = scraped(made)
        assert found["cutlayer_client_steps_total", 'x"} 1\\ncutlayer_loss 0'] == 0
        assert ("cutlayer_loss",) not in found

    def test_a_port_in_use(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError) as found:
                serve_metrics(board(), port)
        assert str(found.value) == (
            f"the metrics cannot be served at port {port} of 127.0.0.1: it is in use; "
            "give another with --metrics-port, or 0 for a free one"
        )

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_a_number_that_is_no_port(self, port: int) -> None:
        with pytest.raises(ConfigError) as found:
            serve_metrics(board(), port)
        assert str(found.value) == f"--metrics-port {port} is no port; give one from 1 to 65535, or 0 for a free one"

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ConfigError) as found:
            serve_metrics(board(), 0)
        assert str(found.value) == (
            "--metrics-port needs prometheus-client, which is not installed; pip install 'cutlayer[deploy]'"
        )


def _each(what: str, *numbers: float) -> dict[tuple[str, ...], float]:
    return {(f"cutlayer_client_{what}", name): n for name, n in zip(("ann", "bob", "cem"), numbers, strict=True)}


class TestLog:
    def test_a_flood_of_refusals_fills_no_disk(self, caplog: pytest.LogCaptureFixture) -> None:
        clock = Hands()
        made = board(clock)
        for _ in range(500):
            made.refused_connection("revoked")
        assert caplog.text.count("connection refused") == 100
        clock.now += 60
        made.refused_connection("revoked")
        assert caplog.messages[-1] == "connection refused reason=revoked not_logged=400"
        made.refused_connection("revoked")
        assert caplog.messages[-1] == "connection refused reason=revoked"
        assert made.snapshot().refused_connections == 502

    def test_lines_parse_back(self) -> None:
        stream = io.StringIO()
        with lines(stream):
            LOG.info("client joined", extra={"fields": {"client": "ann", "number": 0}})
            event(LOG, logging.WARNING, "client lost", client="bob", reason="no answer", lag=1.5)
            LOG.info("plain %s", "words")
        found = [json.loads(line) for line in stream.getvalue().splitlines()]
        times = [line.pop("time") for line in found]
        assert found == [
            {"level": "info", "message": "client joined", "client": "ann", "number": 0},
            {"level": "warning", "message": "client lost", "client": "bob", "reason": "no answer", "lag": 1.5},
            {"level": "info", "message": "plain words"},
        ]
        assert all(t[10] == "T" and t.endswith("+00:00") for t in times)

    def test_a_client_name_cannot_forge_a_line_of_the_log(self) -> None:
        stream = io.StringIO()
        with lines(stream):
            event(LOG, logging.INFO, "client joined", client=FORGED)
            LOG.info("refused: %s", FORGED)
        first, second = stream.getvalue().splitlines()
        assert json.loads(first)["client"] == SHOWN
        assert json.loads(second)["message"] == f"refused: {SHOWN}"
        assert "\x1b" not in first + second

    def test_texts_from_devices_are_cut_and_lose_their_control_characters(self) -> None:
        assert printable("x" * 200) == "x" * 200
        assert printable("x" * 10**6) == "x" * 199 + "…"
        assert len(printable("\x00" * 10**6)) == 200
        assert printable("Zoë 你好 \ud800\x9b") == "Zoë 你好 \\ud800\\x9b"

    def test_an_error_keeps_its_traceback_in_its_line(self) -> None:
        stream = io.StringIO()
        with lines(stream):
            try:
                raise ValueError(FORGED)
            except ValueError as error:
                LOG.error("failed", exc_info=True, extra={"fields": {"error": error, "message": "forged"}})
        found = json.loads(stream.getvalue())
        assert (found["message"], found["error"]) == ("failed", SHOWN)
        assert found["traceback"][0] == "Traceback (most recent call last):"
        assert stream.getvalue().count("\n") == 1

    def test_no_tensor_is_logged(self) -> None:
        stream = io.StringIO()
        values = {
            "z": torch.ones(3),
            "in": [torch.ones(1), 2],
            "by": {"a": b"raw"},
            "loss": float("nan"),
            "ids": (0, 1),
        }
        with lines(stream):
            event(LOG, logging.INFO, "seen", **values, many=list(range(1000)))
        found = json.loads(stream.getvalue())
        assert (found["z"], found["in"], found["by"]) == ("<Tensor>", ["<Tensor>", 2], {"a": "<bytes>"})
        assert (found["loss"], found["ids"], len(found["many"])) == ("nan", [0, 1], 100)

    def test_the_log_is_appended_to_its_file(self, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        for message in ("first", "second"):
            with lines(path):
                LOG.info(message)
        assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == ["first", "second"]

    def test_a_file_that_cannot_be_written(self, tmp_path: Path) -> None:
        path = tmp_path / "none" / "log.jsonl"
        with pytest.raises(ConfigError) as found:
            structured(path)
        assert str(found.value) == (
            f"the log cannot be written to {path}: No such file or directory; "
            "name a file in a folder that exists and that you may write to"
        )


def test_the_accuracy_that_devices_find_is_shown_where_the_server_has_no_test_samples() -> None:
    made = board()
    made.round_ended({"round": 1, "loss": 0.5, "federated_accuracy": 0.75})
    assert made.snapshot().accuracy == 0.75
    made.round_ended({"round": 2, "loss": 0.5})
    assert made.snapshot().accuracy == 0.75
