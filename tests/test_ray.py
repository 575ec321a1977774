"""Specifies the engine ray: the loop engine's numbers from clients in actors, in bounded memory, on loopback only."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import CODECS, SEED, agree, clients_of, fit_for, images, resnet, run, simulation
from in_process import deployment
from test_codecs_agree import outcome as with_codecs
from test_engines_agree import CASES, HETEROGENEOUS, ONE_OF_EACH, OPTIMISERS, Outcome, must_agree, on_loop, outcome
from test_rounds import Count, Stumbling, played
from torch import nn

from cutlayer import methods, optim, plugins
from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.data.arrays import from_arrays
from cutlayer.errors import ConfigError, CutlayerError
from cutlayer.remote.device.worker import WorkError
from cutlayer.remote.protocol.messages import Refusal
from cutlayer.remote.ray import cluster as ray_cluster
from cutlayer.remote.ray.backend import RayBackend
from cutlayer.remote.ray.dispatch import Dispatch
from cutlayer.remote.server.exchange import AllClientsLost
from cutlayer.remote.server.sessions import Answered
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

ray = pytest.importorskip("ray")


pytestmark = pytest.mark.xdist_group("ray")  # two clusters at once would starve each other


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for all of these tests, which the library finds and leaves running."""
    ray_cluster.start_local(ray, num_cpus=2, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


def method_of(case: str) -> Method:
    name, options, _ = CASES[case]
    opt = OPTIMISERS["momentum"]
    return methods.build(name, Split(fit_for(name, resnet()), 1), opt, opt, **options)


def actors(sim: Simulation) -> list[Any]:
    assert isinstance(sim.backend, RayBackend)
    return [worker.actor for worker in sim.backend._workers]


def process_of(actor: Any) -> psutil.Process:
    return psutil.Process(ray.get(actor.__ray_call__.remote(lambda host: os.getpid())))


# -- the cluster -----------------------------------------------------------------------------------------------------


def test_without_ray_a_run_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as found:
        simulation(method_of("fedavg"), engine="ray")
    assert str(found.value) == "engine 'ray' needs ray, which is not installed; pip install 'cutlayer[ray]'"


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
ALONE = """
    import json
    import psutil, torch
    from torch import nn
    from cutlayer import Batching, Split, from_arrays, iid, train
    from cutlayer.methods import fedavg
    from cutlayer.optim import sgd

    torch.manual_seed(0)
    data = from_arrays(torch.randn(24, 4), torch.randint(0, 2, (24,)))
    opened = []

    def look(record):
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            opened.extend(c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN")

    def run(engine):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
        method = fedavg(model=Split(net, 1), client_opt=sgd(0.1), server_opt=sgd(0.1))
        return train(method, data.cast(torch.float64), iid(24, 3, key=0), rounds=2, engine=engine, on_round=look,
            batching=Batching(size=4))

    if __name__ == "__main__":
        there, here = run("ray"), run("loop")
        same = all(torch.equal(a, here.state_dict[k]) for k, a in there.state_dict.items())
        import ray
        left = [p.name() for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]
        print(json.dumps({"same": same, "opened": sorted(set(opened)), "up": ray.is_initialized(), "left": left}))
"""


def alone(folder: Path, **environment: str) -> dict[str, Any]:
    """The output of a separate script that runs on ray and on loop."""
    script = folder / "alone.py"
    script.write_text(textwrap.dedent(ALONE), encoding="utf-8")
    there = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment
    done = subprocess.run([sys.executable, script], env=there, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_cluster_that_a_run_started_listens_on_loopback_only_and_ends_with_it(tmp_path: Path) -> None:
    found = alone(tmp_path)
    assert found["opened"] and set(found["opened"]) <= LOOPBACK
    assert found["same"] and not found["up"] and found["left"] == []


@pytest.mark.slow
def test_a_cluster_that_was_there_is_used_and_stays(cluster: None, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    before = [node["NodeID"] for node in ray.nodes()]
    # A cluster on loopback is found only by a process that Ray does not tell to look beyond it.
    found = alone(tmp_path, RAY_ADDRESS=address, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    assert found["opened"] and set(found["opened"]) <= LOOPBACK
    assert found["same"] and not found["up"] and found["left"] == []
    assert [node["NodeID"] for node in ray.nodes() if node["Alive"]] == before


def test_an_address_at_which_there_is_no_cluster_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConnectionError("nobody answers")

    silent = SimpleNamespace(is_initialized=lambda: False, init=refuse)
    monkeypatch.setattr(ray_cluster, "_imported", lambda: silent)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere:6379")
    with pytest.raises(ConfigError) as found:
        ray_cluster.Cluster().take()
    assert str(found.value) == "there is no Ray cluster at RAY_ADDRESS=nowhere:6379: nobody answers"


# -- the numbers -----------------------------------------------------------------------------------------------------


STACKED = ("smofi", "mergesfl", "hosfl", "sfl_v2", "sfl_v1 random layers")


def on_ray(case: str, shape: str = "two-part", **options: Any) -> Outcome:
    return outcome(case, "momentum", shape, torch.float64, engine="ray", **options)


def test_a_round_on_ray_gives_the_loop_engines_numbers(cluster: None) -> None:
    must_agree(on_ray("sfl_v1", "u-shaped"), on_loop("sfl_v1", "momentum", "u-shaped", torch.float64), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("codecs", CODECS)
def test_codecs_on_ray_give_the_loop_engines_numbers(codecs: str, cluster: None) -> None:
    must_agree(with_codecs("sfl_v1", codecs, "ray"), with_codecs("sfl_v1", codecs, "loop"), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ONE_OF_EACH.values(), "hasfl planned", "smofi random cut", "sfl_v1 random layers"])
def test_every_method_on_ray_gives_the_loop_engines_numbers(case: str, cluster: None) -> None:
    must_agree(on_ray(case), on_loop(case, "momentum", "two-part", torch.float64), 0.0)


@pytest.mark.parametrize("case", ["sfl_v1", *(pytest.param(case, marks=pytest.mark.slow) for case in STACKED)])
def test_servers_that_stack_on_ray_give_the_loop_engines_numbers(case: str, cluster: None) -> None:
    there = on_ray(case, server_engine="vmap")
    must_agree(there, on_loop(case, "momentum", "two-part", torch.float64), 1e-11)


@pytest.mark.slow
def test_a_value_for_all_clients_is_stored_once(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulation(method_of("fedavg"), engine="ray")
    assert len(actors(sim)) == 2
    put, stored = ray.put, []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(len(value)) or put(value))
    state = sim.round(sim.start())
    num_tensors = len(resnet().state_dict())
    assert len(stored) == 1 and 0 < stored[0] <= num_tensors  # one `up` a round, one model for five clients
    sim.round(state)
    assert len(stored) == 2


class Failing(nn.Module):
    """A layer that works in the process of the test and in no other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("CUTLAYER_TEST_ROLE") != "driver":
            raise RuntimeError("this layer works in one process only")
        return x


def small(*layers: nn.Module) -> Method:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers, nn.Linear(8, 10)).double()
    opt = optim.sgd(0.1, momentum=0.9)
    return methods.build("sfl_v1", Split(net, 3), opt, opt)


@pytest.mark.slow
def test_a_client_whose_numbers_are_not_finite_stops_on_ray_as_it_does_on_loop(cluster: None) -> None:
    x = images().x.clone()
    x[0] = torch.inf  # of client 0
    data = replace(images(), x=x)
    sims = [simulation(small(nn.ReLU()), data, engine=engine) for engine in ("ray", "loop")]
    there, here = (run(sim) for sim in sims)
    agree(tuple(there.client.tree), tuple(here.client.tree), 0)
    assert sims[0].ledger.content() == sims[1].ledger.content()


@pytest.mark.slow
def test_an_error_at_a_client_is_an_error_of_the_run(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLAYER_TEST_ROLE", "driver")
    sim = simulation(small(Failing()), engine="ray")
    with pytest.raises(WorkError, match=r"^client \d, command \d+ \(vjp .*\): this layer works in one process only$"):
        run(sim)


@pytest.mark.slow
def test_ray_keeps_no_simulated_clock_and_says_so(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    sim = simulation(method_of("fedavg"), engine="ray", devices=HETEROGENEOUS)
    assert sim.clock is None and sim.engine_name == "ray"
    assert [r.getMessage() for r in caplog.records] == ["engine ray keeps no simulated clock"]


# -- rounds that fail -------------------------------------------------------------------------------------------------


class StumblingServer(Stumbling):
    """Fails once when a server computes its second gradients, and can be retried."""

    def grad(self, *args: Any, **options: Any) -> Any:
        self.batches += 1
        if self.batches == 2:
            raise RuntimeError("stumbled")
        return super().grad(*args, **options)


@pytest.mark.parametrize("case", ["sfl_v1", pytest.param("hosfl", marks=pytest.mark.slow)])
def test_a_failed_round_leaves_no_trace_on_ray(case: str, cluster: None) -> None:
    batching, server = CASES[case].batching, StumblingServer()
    clean = simulation(method_of(case), batching=batching, engine="loop", meters=(Count(),))
    there = simulation(method_of(case), batching=batching, engine="ray", server_engine=server, meters=(Count(),))
    expected, found = played(clean), played(there)
    assert server.failures == 1
    must_agree(Outcome(found[0], there.ledger), Outcome(expected[0], clean.ledger), 0.0)
    assert found[1]["meter 1"] == expected[1]["meter 1"] and found[1]["meter 1"]["crossings"] > 0


def test_only_attempts_in_which_every_client_was_lost_count_as_lost(cluster: None) -> None:
    """Two losses in the round before, and retries of the engine, are none of this round's three."""
    there = simulation(method_of("sfl_v1"), engine="ray", server_engine=StumblingServer())
    lost, stumbled = AllClientsLost("round 1: every client is lost"), RuntimeError("stumbled")
    for attempt in (1, 2):
        there.backend.recover(lost, attempt)
    for attempt, error in enumerate((stumbled, lost, stumbled, stumbled, lost), start=1):
        there.backend.recover(error, attempt)
    with pytest.raises(CutlayerError, match=r"^round 1: every client is lost, 3 times; Ray's own logs may tell why$"):
        there.backend.recover(lost, 6)


# -- actors that die -------------------------------------------------------------------------------------------------


class Killing:
    """A meter that kills processes when a step of this number begins."""

    def __init__(self, step: int) -> None:
        self.victims: list[psutil.Process] = []
        self._left = step

    def stepped(self, sizes: Mapping[int, int]) -> None:
        self._left -= 1
        if self._left == 0:
            for process in self.victims:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(self.victims, timeout=30)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def without_the_odd_ones() -> Outcome:
    """Two rounds over the wire in which clients 1 and 3 refuse the third request of the second."""
    there = deployment(method_of("sfl_v1"), images(), clients_of(), batching=CASES["sfl_v1"].batching, seed=SEED)
    for j in (1, 3):
        session = there.backend.sessions.get(j)
        assert session is not None
        requests = iter((True, True))

        def send(
            work: Any,
            tensors: Any,
            j: int = j,
            session: Any = session,
            requests: Any = requests,
            old: Any = session.transmit,
        ) -> int:
            if work.round == 0 or next(requests, False):
                return int(old(work, tensors))
            refusal = Refusal(session=work.session, number=work.number, where="", reason="")
            there.backend.sessions.take(Answered(j, session.number, refusal, []))
            return 0

        session.transmit = send
    return Outcome(run(there), there.ledger)  # type: ignore[arg-type]


@pytest.mark.slow
def test_clients_of_an_actor_that_dies_are_out_of_the_round_and_back_in_the_next(
    cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    sim = simulation(method_of("sfl_v1"), engine="ray")
    state = sim.round(sim.start())
    meter = Killing(step=3)
    meter.victims = [process_of(actors(sim)[1])]
    sim.meters = (sim.ledger, meter)
    state = sim.round(state)
    agree(Outcome(state, sim.ledger).values, without_the_odd_ones().values, 0)
    gone = [r.getMessage() for r in caplog.records if "is out of round 2: its actor is gone" in r.getMessage()]
    assert [text.split()[1] for text in gone] == ["1", "3"]
    caplog.clear()
    sim.meters = (sim.ledger,)
    state = sim.round(state)
    assert state.round == 3 and not caplog.records


@pytest.mark.slow
def test_a_round_in_which_every_actor_dies_is_tried_again_and_gives_the_same(
    cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    sim = simulation(method_of("hosfl"), engine="ray")
    state = sim.round(sim.start())
    meter = Killing(step=1)
    meter.victims = [process_of(actor) for actor in actors(sim)]
    sim.meters = (sim.ledger, meter)
    state = sim.round(state)
    assert "round 2: every client is lost; it is tried again" in [r.getMessage() for r in caplog.records]
    expected = on_loop("hosfl", "momentum", "two-part", torch.float64)
    agree(Outcome(state, sim.ledger).values, expected.values, 0)


def test_a_round_whose_first_dispatch_finds_an_actor_gone_is_tried_again_and_gives_the_same(
    cluster: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, errors, closed = ray.get, [ray.exceptions.RayActorError(error_msg="nobody is there")], []
    close = Dispatch.close

    def gone_once(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return get(*args, **options)

    monkeypatch.setattr(ray, "get", gone_once)
    monkeypatch.setattr(Dispatch, "close", lambda dispatch: closed.append(len(errors)) or close(dispatch))
    there = on_ray("fedavg")
    assert not errors and closed == [0, 0, 0]  # a failed attempt and two rounds
    assert [r.getMessage() for r in caplog.records] == [
        "a round cannot begin: an actor is gone: nobody is there; it is tried again"
    ]
    must_agree(there, on_loop("fedavg", "momentum", "two-part", torch.float64), 0.0)


def test_an_actor_that_dies_before_a_round_begins_changes_nothing(
    cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    sim = simulation(method_of("fedavg"), engine="ray")
    process = process_of(actors(sim)[0])
    process.kill()
    process.wait(30)
    state = run(sim)
    agree(Outcome(state, sim.ledger).values, on_loop("fedavg", "momentum", "two-part", torch.float64).values, 0)
    assert not caplog.records


def test_an_actor_that_cannot_start_is_told_of(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "LOADED", [Path("/nowhere.py")])
    with pytest.raises(ConfigError, match=r"^an actor of engine 'ray' cannot start: .*nowhere.py"):
        run(simulation(method_of("fedavg"), engine="ray"))


# -- runs that go on -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ("hosfl", "fsl_sage"))
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(name: str, cluster: None, tmp_path: Path) -> None:
    settings = Run(
        name=name,
        subset=0.1,
        clients=6,
        per_round=4,
        partition=Choice("iid"),
        model=Choice("mlp", {"hidden": (8,)}),
        method=Choice(name, {"align_epochs": 1} if name == "fsl_sage" else {}),
        batching=Batching(size=8),
        rounds=4,
        engine="ray",
    )
    unbroken = execute(settings, Folder(tmp_path / "unbroken")).state
    stopped = Folder(tmp_path / "stopped")
    execute(replace(settings, rounds=2), stopped)
    resumed = execute(settings, stopped, resume=True).state
    agree(Outcome(resumed, None).values, Outcome(unbroken, None).values, 0)  # type: ignore[arg-type]
    on_one = execute(replace(settings, engine="loop"), Folder(tmp_path / "loop")).state
    agree(Outcome(unbroken, None).values, Outcome(on_one, None).values, 1e-6)  # type: ignore[arg-type]


# -- thousands -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ("sfl_v1", "hosfl"))
def test_thousands_of_clients_need_no_more_memory_from_round_to_round(name: str, cluster: None) -> None:
    random = torch.Generator().manual_seed(0)
    data = from_arrays(torch.randn(8000, 16, generator=random), torch.randint(0, 4, (8000,), generator=random))
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    opt = optim.sgd(0.1)
    sim = Simulation(
        methods.build(name, Split(net, 2), opt, opt),
        data,
        clients_of([4] * 2000),
        batching=Batching(size=4),
        per_round=50,
        engine="ray",
        seed=SEED,
    )
    state = sim.round(sim.round(sim.start()))
    processes = [psutil.Process(), *map(process_of, actors(sim))]
    before = [process.memory_info().rss for process in processes]
    for _ in range(4):
        state = sim.round(state)
    growth = [(process.memory_info().rss - old) / 2**20 for process, old in zip(processes, before, strict=True)]
    assert max(growth) < 50, growth
