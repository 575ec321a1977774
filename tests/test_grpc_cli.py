"""Specifies the commands as a user runs them: keys, serve and join, each in a process of its own."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bad_network import bad_network
from conftest import using
from device_pool import free_port, wait_for
from safetensors.torch import load_file
from test_grpc_faults import RUN, check_checkpoints, outcome, simulated
from torch import Tensor

from cutlayer.cli.launch import folder_of
from cutlayer.runs import config
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute

CUTLAYER = [sys.executable, "-m", "cutlayer"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SECONDS = 90.0  # for a command to end
TWO = replace(RUN, clients=2)

pytestmark = pytest.mark.slow


def _heed_sigint() -> None:
    """A shell's background job ignores SIGINT, and so do its children; a command that a person starts does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Command:
    """A command under way."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            preexec_fn=_heed_sigint,
        )

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """The exit code, and all that it has said; no user is ever shown a traceback."""
        out, err = self._process.communicate(timeout=SECONDS)
        assert "Traceback" not in out + err, out + err
        return self._process.returncode, out + err

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class Party:
    """A run, its keys, and the commands of its server and its devices."""

    def __init__(self, run: Run, path: Path, stack: ExitStack, host: str = "127.0.0.1") -> None:
        path.mkdir(exist_ok=True)
        self.path, self._stack = path, stack
        self.file = path / f"{run.name}.toml"
        self.file.write_text(config.dumps(run), encoding="utf-8")
        self.address = f"{host}:{free_port()}"
        self.folder = folder_of(run, path / "runs")
        keys = [*CUTLAYER, "keys", "trial", str(path / "ca"), "--clients", "ann,bob"]
        done = subprocess.run(keys, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr

    def command(self, arguments: Sequence[str]) -> Command:
        command = Command(arguments)
        self._stack.callback(command.kill)
        return command

    def serve(self, *more: str) -> list[str]:
        ours = ["--keys", str(self.path / "ca" / "train"), "--listen", self.address, "--out", str(self.path / "runs")]
        return [*CUTLAYER, "serve", str(self.file), "--quiet", *ours, *more]

    def join(self, name: str, *more: str) -> list[str]:
        ours = ["--keys", str(self.path / "ca" / "clients" / name), "--data", "digits", "--quiet"]
        terms = [] if "--any-run" in more else ["--config", str(self.file)]
        return [*CUTLAYER, "join", self.address, *ours, *terms, *more]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_keys_serve_and_two_joins(stack: ExitStack, tmp_path: Path) -> None:
    party = Party(TWO, tmp_path, stack)
    server = party.command(party.serve())
    clients = [party.command(party.join(name)) for name in ("ann", "bob")]
    assert server.end() == (0, f"3 rounds done; the model is in {party.folder.model}\n")
    assert [client.end() for client in clients] == [(0, "ann: the run is over\n"), (0, "bob: the run is over\n")]
    assert outcome(party.folder.path) == simulated(TWO, tmp_path / "simulated")


def test_keys_that_each_party_made_for_itself(stack: ExitStack, tmp_path: Path) -> None:
    """A CA with a passphrase, requests, signatures, a renewal: and the run is the same as a simulation."""
    party = Party(TWO, tmp_path / "one", stack)
    ca, secret = str(tmp_path / "ca"), ["--passphrase-file", str(tmp_path / "secret")]
    (tmp_path / "secret").write_text("correct horse battery\n")

    def keys(*words: str) -> None:
        done = subprocess.run([*CUTLAYER, "keys", *words], capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr

    def sign(name: str, role: str, place: str, *more: str) -> None:
        keys("sign", ca, str(tmp_path / name / f"{name}.csr"), "--role", role, "--name", name, *more, *secret)
        shutil.copytree(tmp_path / "ca" / place, tmp_path / name, dirs_exist_ok=True)

    keys("init", ca, *secret)
    for name in ("ann", "bob"):
        keys("request", name, "--out", str(tmp_path / name))
        sign(name, "client", f"clients/{name}")
    keys("request", "--role", "train", "--out", str(tmp_path / "train"))
    sign("train", "train", "train")
    keys("request", "--renew", "--out", str(tmp_path / "bob"))
    sign("bob", "client", "clients/bob", "--renew")
    server = party.command([*party.serve(), "--keys", str(tmp_path / "train")])
    clients = [party.command([*party.join(name), "--keys", str(tmp_path / name)]) for name in ("ann", "bob")]
    assert server.end() == (0, f"3 rounds done; the model is in {party.folder.model}\n")
    assert [client.end() for client in clients] == [(0, "ann: the run is over\n"), (0, "bob: the run is over\n")]
    assert outcome(party.folder.path) == simulated(TWO, tmp_path / "simulated")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_says_what_is_saved_and_goes_on_by_the_same_command(
    number: int, stack: ExitStack, tmp_path: Path
) -> None:
    party = Party(replace(TWO, rounds=2000), tmp_path, stack)
    server = party.command(party.serve("--patience", "2"))
    ann, bob = (party.command(party.join(name, "--any-run")) for name in ("ann", "bob"))
    wait_for(lambda: party.folder.metrics.exists() and len(party.folder.history()) >= 2)
    bob.send(number)
    code, words = bob.end()
    assert code == 130
    assert "bob left the run; what it keeps is in " in words and "; join again with the same command\n" in words
    server.send(number)
    code, words = server.end()
    done = max(party.folder.store.rounds())
    assert code == 130
    assert f"stopped; {party.folder.path} is saved up to round {done} of 2000\ngo on with: cutlayer serve " in words
    check_checkpoints(party.folder.path)
    server = party.command(party.serve("--set", f"rounds={done + 2}"))
    bob = party.command(party.join("bob", "--any-run"))
    assert server.end() == (0, f"{done + 2} rounds done; the model is in {party.folder.model}\n")
    ends = [ann.end(), bob.end()]
    assert [code for code, _ in ends] == [0, 0]
    assert all(f"{name}: the run is over\n" in words for name, (_, words) in zip(("ann", "bob"), ends, strict=True))


def test_a_device_that_finds_no_server_gives_up_when_told_to(stack: ExitStack, tmp_path: Path) -> None:
    party = Party(TWO, tmp_path, stack)
    code, words = party.command(party.join("ann", "--give-up", "1")).end()
    assert code == 2
    assert (
        f"no server at {party.address} for 1 seconds: no connection to {party.address}: connection refused: " in words
    )


def test_a_revoked_device_is_told_so_and_does_not_try_again(stack: ExitStack, tmp_path: Path) -> None:
    party = Party(TWO, tmp_path, stack)
    done = subprocess.run([*CUTLAYER, "keys", "revoke", str(tmp_path / "ca"), "bob"], env=ENVIRONMENT)
    assert done.returncode == 0
    party.command(party.serve())
    code, words = party.command(party.join("bob")).end()
    assert code == 2
    assert "refused by the server: client 'bob' was revoked; to take part again" in words


def test_what_a_server_and_its_devices_write_is_theirs_alone(stack: ExitStack, tmp_path: Path) -> None:
    """Whatever the umask is: FSL-SAGE's checkpoints hold activations of clients, and HO-SFL's state their updates."""
    stack.callback(os.umask, os.umask(0))
    party = Party(replace(using(TWO, "hosfl"), rounds=2), tmp_path, stack)
    server = party.command(party.serve("--log-file", str(tmp_path / "runs.log")))
    clients = [party.command(party.join(name)) for name in ("ann", "bob")]
    assert [command.end()[0] for command in (server, *clients)] == [0, 0, 0]
    states = [tmp_path / "ca" / "clients" / name / "state" for name in ("ann", "bob")]
    made = [tmp_path / "runs", tmp_path / "runs.log", *states]
    made += [path for place in (tmp_path / "runs", *states) for path in place.rglob("*")]
    assert {path.name for path in made} >= {"metrics.jsonl", "round-000002.safetensors", "model.safetensors"}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in made}


def test_a_second_server_or_device_is_refused_at_once(stack: ExitStack, tmp_path: Path) -> None:
    party = Party(replace(TWO, rounds=2000), tmp_path, stack)
    party.command(party.serve())
    for name in ("ann", "bob"):
        party.command(party.join(name))
    wait_for(lambda: party.folder.metrics.exists() and len(party.folder.history()) >= 1)
    code, words = party.command([*party.serve(), "--listen", f"127.0.0.1:{free_port()}"]).end()
    assert (code, "is in use: another process trains this run" in words) == (2, True)
    assert "listening" not in words
    code, words = party.command(party.join("ann")).end()
    state = tmp_path / "ca" / "clients" / "ann" / "state"
    assert code == 2
    assert words == (
        f"error: {state} is in use: another process has joined as this device; stop it, or give each a --state\n"
    )


# -- a bad network ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sfl_v1", "smofi", "hosfl"])
def test_a_bad_network_changes_no_number(method: str, stack: ExitStack, tmp_path: Path) -> None:
    """2 % loss, 100 ms and 10 Mbit/s, and nothing at all for three seconds in the middle."""
    run = replace(using(TWO, method), rounds=6)
    with bad_network(loss=0.02, delay_ms=100, rate_mbit=10) as network:
        party = Party(run, tmp_path, stack, network.server_ip)
        server = party.command(network.server_command(party.serve()))
        clients = [party.command(network.client_command(party.join(name))) for name in ("ann", "bob")]
        wait_for(lambda: party.folder.metrics.exists() and len(party.folder.history()) >= 2, SECONDS)
        network.set(cut=True)
        time.sleep(3.0)
        network.set(cut=False)
        assert server.end()[0] == 0
        assert [client.end()[0] for client in clients] == [0, 0]
    assert outcome(party.folder.path) == simulated(run, tmp_path / "simulated")


# -- two servers with two owners -----------------------------------------------------------------------------------


def _answers(folder: Folder) -> dict[str, int]:
    """The bytes of what clients sent; fewer if one of them was lost in a round."""
    return {kind: size for kind, size in folder.history()[-1]["bytes"].items() if kind.startswith("up_")}


def _two_killed_servers(run: Run, path: Path, stack: ExitStack) -> tuple[list[dict[str, Tensor]], Folder]:
    """Kill each server once; return the halves of the model, and the training server's folder."""
    path.mkdir()
    party = Party(run, path, stack)
    fed_address = f"127.0.0.1:{free_port()}"
    train = party.serve("--role", "train")
    fed = [
        *[*CUTLAYER, "serve", str(party.file), "--role", "fed", "--train", party.address],
        *["--keys", str(path / "ca" / "fed"), "--listen", fed_address, "--out", str(path / "fed")],
    ]
    servers = {"train": party.command(train), "fed": party.command(fed)}
    joins = [[word for word in party.join(name) if word != party.address] for name in ("ann", "bob")]
    clients = [party.command([*join, "--train", party.address, "--fed", fed_address]) for join in joins]
    for name, words, after in (("fed", fed, 5), ("train", train, 12)):
        wait_for(lambda after=after: party.folder.metrics.exists() and len(party.folder.history()) >= after, SECONDS)
        servers[name].kill()
        servers[name] = party.command(words)
    assert [server.end()[0] for server in servers.values()] == [0, 0]
    ends = [client.end() for client in clients]  # they are told, too, of rounds that are played again
    assert [code for code, _ in ends] == [0, 0]
    assert all(f"{name}: the run is over\n" in words for name, (_, words) in zip(("ann", "bob"), ends, strict=True))
    halves = [load_file(folder.model) for folder in (party.folder, folder_of(run, path / "fed"))]
    assert halves[0] and halves[1] and not halves[0].keys() & halves[1].keys()
    return halves, party.folder


def test_two_servers_of_two_owners_are_killed_in_turn_and_leave_the_same_model(
    stack: ExitStack, tmp_path: Path
) -> None:
    run = replace(using(TWO, "hosfl"), rounds=30)
    simulated(run, tmp_path / "simulated")
    expected = _answers(Folder(next((tmp_path / "simulated").rglob("metrics.jsonl")).parent))
    for number in range(3):  # on a busy machine a client may be lost in a round, which is then another round
        halves, folder = _two_killed_servers(run, tmp_path / str(number), stack)
        if _answers(folder) == expected:
            break
    whole = load_file(next((tmp_path / "simulated").rglob("model.safetensors")))
    assert {k: v.tolist() for k, v in {**halves[0], **halves[1]}.items()} == {k: v.tolist() for k, v in whole.items()}


def test_devices_hold_samples_out_and_report_how_good_the_model_is_on_them(stack: ExitStack, tmp_path: Path) -> None:
    run = replace(TWO, hold_out=0.25)
    party = Party(run, tmp_path, stack)
    server = party.command(party.serve())
    clients = [party.command(party.join(name)) for name in ("ann", "bob")]
    assert [command.end()[0] for command in (server, *clients)] == [0, 0, 0]
    execute(run, Folder(tmp_path / "simulated"))
    expected = Folder(tmp_path / "simulated").history()
    for ours, theirs in zip(party.folder.history(), expected, strict=True):
        tests, same = ours.pop("client_tests"), theirs.pop("client_tests")
        assert list(tests) == ["ann", "bob"] and list(same) == ["0", "1"]
        assert [t["samples"] for t in tests.values()] == [t["samples"] for t in same.values()]
        assert ours["bytes"] == theirs["bytes"]
        for key in [key for key in theirs if key.startswith("federated_")]:
            assert ours[key] == pytest.approx(theirs[key], abs=1e-6)


def test_a_device_brings_test_samples_of_its_own(stack: ExitStack, tmp_path: Path) -> None:
    run = replace(TWO, rounds=1)
    tests = tmp_path / "tests.npz"
    np.savez(tests, x=np.zeros((3, 1, 8, 8), "float32"), y=np.array([0, 1, 2]))
    party = Party(run, tmp_path, stack)
    server = party.command(party.serve())
    clients = [party.command(party.join("ann", "--test", str(tests))), party.command(party.join("bob"))]
    assert [command.end()[0] for command in (server, *clients)] == [0, 0, 0]
    (record,) = party.folder.history()
    assert {name: found["samples"] for name, found in record["client_tests"].items()} == {"ann": 3}
    assert record["federated_loss"] == record["client_tests"]["ann"]["loss"]
