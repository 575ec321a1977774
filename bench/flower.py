"""8 MB there and back through Flower's deployment engine, against the same over gRPC with mutual TLS.

Flower's side is a SuperLink, a SuperNode and an app (`flower_app`) that sends an array to the node and gets it back, in
plain text and otherwise as they come. Ours is the exchange of `wire.py`, and a whole round of FedAvg with one client,
whose model is as large: it goes down, is trained for one step, comes back, and is averaged. Ours is measured before
Flower's and again after it. Flower is looked for in a virtual environment of its own:

    python -m venv FOLDER && FOLDER/bin/pip install flwr
    python bench/flower.py --flower FOLDER

Without that option only our side is measured.
"""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import wire
from fleet import HOST, fleet
from many_clients import Timed
from speed import SEED
from tables import Row, options, show

from cutlayer import Arrays, Batching
from cutlayer.data.sample import Sample
from cutlayer.remote.identity.trial import trial
from cutlayer.runs.config import Choice, Run

APP = Path(__file__).parent / "flower_app"
WIDTHS, QUICK = (2000, 980), (20, 10)  # of the hidden layers: 8 MiB of parameters, or few
PATIENCE = 600.0  # seconds that Flower has for all it does
CONNECTION = """
[superlink]
default = "here"

[superlink.here]
address = "{address}"
insecure = true
"""
# Nothing is to leave this machine.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def main() -> None:
    own = ("--flower", {"type": Path, "metavar": "FOLDER", "help": "a virtual environment with flwr in it"})
    args = options(__doc__.splitlines()[0], own)
    torch.set_num_threads(1)
    run, rounds = a_run(QUICK if args.quick else WIDTHS), 2 if args.quick else 20
    show([compare(run, rounds, args.flower, exchanges=1 if args.quick else 5)], args.json)


def a_run(widths: tuple[int, ...]) -> Run:
    return Run(
        clients=1,
        sample=Sample(shape=(64,), classes=10),
        model=Choice("mlp", {"hidden": widths}),
        method=Choice("fedavg"),
        batching=Batching(size=8, steps=1),
        seed=SEED,
    )


def compare(run: Run, rounds: int, flower: Path | None, exchanges: int) -> Row:
    """All with as many values; the median of each."""
    torch.manual_seed(SEED)
    share = Arrays(x=torch.randn(8, 64), y=torch.randint(0, 10, (8,)), num_classes=10)
    with fleet(run, [share], processes=1) as served, echo() as exchange:
        ours = Timed(served.server.training(run).runner)
        ours.rounds(1)
        num_values = sum(v.numel() for v in ours.values().values())

        def measure_ours() -> float:
            ours.rounds(rounds)
            return wire.measure({"ours": exchange}, 4 * num_values, rounds)["ours"]

        before = measure_ours()
        theirs = None if flower is None else 1e3 * statistics.median(through_flower(flower, num_values, exchanges))
        exchanged = 1e3 * statistics.mean([before, measure_ours()])
    round_ms = 1e3 * statistics.median(ours.seconds[1:])
    return {
        "there and back, MiB": 4 * num_values / 2**20,
        "gRPC, ms an exchange": exchanged,
        "a round of FedAvg, ms": round_ms,
        "Flower, ms an exchange": theirs,
        "Flower to gRPC": None if theirs is None else theirs / exchanged,
        "Flower to a round": None if theirs is None else theirs / round_ms,
    }


@contextmanager
def echo() -> Iterator[wire.Exchange]:
    """Another process that sends back what comes."""
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name)
        trial(keys, clients="ann")
        here, there = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(target=wire.serve, args=(there, keys), daemon=True)
        other.start()
        yield wire.connect(here.recv(), keys)["mutual TLS"]
        other.kill()
        other.join()


def through_flower(folder: Path, values: int, exchanges: int) -> list[float]:
    """Seconds of each exchange."""
    programs = folder.resolve() / "bin"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        place = Path(name)
        link, node = (f"{HOST}:{free_port()}" for _ in range(2))
        (place / "config.toml").write_text(CONNECTION.format(address=link))
        shutil.copytree(APP, place / "app")
        surroundings = {**os.environ, **QUIET, "FLWR_HOME": name, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        stack.enter_context(running([programs / "flower-superlink", "--insecure", *at(link)], surroundings))
        wait_for(lambda: answers(link))
        stack.enter_context(
            running([programs / "flower-supernode", "--insecure", "--superlink", link, *at(node)], surroundings)
        )
        out = place / "seconds.json"
        settings = f'values={values} exchanges={exchanges} out="{out}"'
        order = [programs / "flwr", "run", place / "app", "here", "--run-config", settings]
        subprocess.run(order, env=surroundings, check=True, stdout=subprocess.DEVNULL)
        wait_for(out.exists)
        seconds: list[float] = json.loads(out.read_text())
        return seconds


def at(address: str) -> list[str]:
    host, _, port = address.partition(":")
    return ["--host", host, "--port", port]


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as link:
        return link.connect_ex((host, int(port))) == 0


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            raise SystemExit(f"Flower was not done within {PATIENCE:g} seconds")
        time.sleep(0.1)


@contextmanager
def running(command: list[str | Path], surroundings: dict[str, str]) -> Iterator[None]:
    """A program and those that it starts, until the end."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=surroundings, start_new_session=True, **silent)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
