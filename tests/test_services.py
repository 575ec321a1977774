"""Specifies how a service ends: by a signal at any moment, and with the exit code by which it is restarted or not."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutlayer.cli import main
from cutlayer.errors import CheckpointError
from cutlayer.remote.server import serve
from cutlayer.runs.folder import append_line

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
