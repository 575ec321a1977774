"""Specifies how a service ends: by a signal at any moment, and with the exit code by which it is restarted or not."""

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutlayer.cli import main
from cutlayer.errors import CheckpointError, ConfigError
from cutlayer.remote.server import serve
from cutlayer.runs.folder import append_line

join = importlib.import_module("cutlayer.cli.join")  # the module: the package has the command under this name
# SIGTERM comes while a finalizer or the callback of a weak reference runs; neither can raise.
SCRIPT = """
import signal, time, weakref
from cutlayer.cli.options import stop_on_sigterm

class Terminated:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

class Slow:
    def __del__(self):
        time.sleep(30)

class Wrong:
    def __del__(self):
        1 / 0

class Plain:
    pass

def finalizer():
    Terminated()

def finalizers():  # in the second one the signal is raised again, and lost again
    Terminated()
    Slow()

def weak_reference():
    plain = Plain()
    finalizer.reference = weakref.ref(plain, lambda _: signal.raise_signal(signal.SIGTERM))

stop_on_sigterm()
for lose in (finalizer, finalizers, weak_reference):
    try:
        lose()
        time.sleep(60)
    except KeyboardInterrupt:
        print(lose.__name__)
Wrong()
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of the system")
def test_a_signal_is_not_lost_in_code_that_cannot_raise() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.split() == ["finalizer", "finalizers", "weak_reference"]
    assert done.stderr.count("Traceback") == 1 and "ZeroDivisionError" in done.stderr  # other errors are shown


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 2), (errno.EMFILE, 1), (errno.ENFILE, 1)])
def test_a_server_that_cannot_write_says_how_to_go_on_and_is_restarted_if_that_may_help(
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fsync(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    def fail(*_: Any, **__: Any) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fsync)
            append_line(tmp_path / "metrics.jsonl", {"round": 3})

    monkeypatch.setattr(serve, "serve", fail)
    config = tmp_path / "run.toml"
    config.write_text('data = "digits"\nclients = 2\n')
    previous = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGALRM)]
    try:
        with pytest.raises(SystemExit) as ended:
            main(["serve", str(config), "--insecure", "--quiet", "--out", str(tmp_path)])
    finally:
        sys.unraisablehook = sys.__unraisablehook__
        for which, handler in previous:
            signal.signal(which, handler)
    assert ended.value.code == code
    words = capsys.readouterr().err + caplog.text
    assert "Make room there, then start the same command again." in " ".join(words.split())
    assert "--resume" not in words


def test_the_cause_of_an_unwritten_round_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as failed:
        append_line(tmp_path / "none" / "metrics.jsonl", {"round": 3})
    assert isinstance(failed.value.__cause__, OSError)


WITHOUT_RESOURCE = """
import sys
sys.modules["resource"] = None  # as on Windows
from cutlayer.cli import main
main(sys.argv[1:])
"""


def test_the_command_line_starts_where_the_system_limits_no_processes() -> None:
    words = ("join", "127.0.0.1:1", "--data", "digits", "--insecure", "--any-run", "--memory", "2")
    done = subprocess.run([sys.executable, "-c", WITHOUT_RESOURCE, *words], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "this system cannot limit the memory of a process; leave out --memory" in " ".join(done.stderr.split())


@pytest.mark.skipif(not join.PAGES.exists(), reason="the system does not tell how much memory a process has")
def test_a_device_with_too_little_memory_says_how_much_it_needs() -> None:
    """Before the limit holds: gRPC ends the process, or hangs, if it gets no thread."""
    with pytest.raises(ConfigError) as told, join.limited_memory(0.05):
        pytest.fail("it begins")
    used, least = map(float, re.findall(r"\d+\.\d\d", str(told.value).partition("run: ")[2]))
    assert str(told.value) == (
        f"--memory 0.05 is too small for this run: this process has {used:.2f} GiB before it joins; give more than "
        f"{least:.2f}, or leave it out"
    )
    assert used > 0.05 and least - used == pytest.approx(0.125, abs=0.011)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator"),
        (ImportError("x.so: failed to map segment from shared object"), "failed to map segment"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_memory_that_the_limit_refuses_later_on_is_told(
    error: Exception, words: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Limits:
        RLIMIT_DATA = getpagesize = staticmethod(lambda: 1)
        setrlimit = staticmethod(lambda which, limits: asked.append(limits))

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(join, "resource", Limits)

    def fail() -> None:
        if not wrapped:
            raise error
        raise ConfigError("this device cannot play the rounds of the run in advance") from error

    with pytest.raises(ConfigError) as told, join.limited_memory(8.0):
        fail()
    assert str(told.value).startswith("--memory 8 is too small for this run (")
    assert words in str(told.value) and str(told.value).endswith("); give more, or leave it out")
    assert asked == [(2**33, 2**33)]
    with pytest.raises(type(error)), join.limited_memory(None):
        raise error


def test_other_errors_are_not_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join.resource, "setrlimit", lambda *_: None)
    with pytest.raises(RuntimeError, match="no thread"), join.limited_memory(1e6):
        raise RuntimeError("no thread")
    for gib in (0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"--memory is .*, but it must be a number above 0"):
            join.limited_memory(gib).__enter__()
