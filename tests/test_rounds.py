"""Specifies the one runner: one transaction on every backend, one check everywhere, servers on any engine."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SEED, clients_of, images, run, simulation
from in_process import deployment, device, join
from test_engines_agree import CASES, ONE_OF_EACH, Outcome, must_agree, on_loop
from test_remote import method_of
from torch import nn

import cutlayer
from cutlayer import optim
from cutlayer.core.batches import Batching
from cutlayer.core.engine import Engine
from cutlayer.core.kinds import ACTIVATIONS, LABELS, MODEL
from cutlayer.core.method import Needs, method, metrics_of, needs_of
from cutlayer.core.places import Clients
from cutlayer.core.program import Program, at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Model, State, Tensors
from cutlayer.engines import auto
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.errors import CheckpointError, ConfigError, CutlayerError
from cutlayer.methods.splitfed import SplitFed
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol.messages import Refusal
from cutlayer.remote.server.exchange import AllClientsLost
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.serve import RunServer, Serving, samples_of, serve
from cutlayer.remote.server.sessions import Answered
from cutlayer.runs import build
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.run import execute
from cutlayer.split import Split

CPU = torch.device("cpu")


class Count:
    """A meter that can be restored, and that reports to the metrics."""

    def __init__(self) -> None:
        self.steps = self.crossings = 0

    def stepped(self, sizes: Any) -> None:
        self.steps += 1

    def crossed(self, *_: Any) -> None:
        self.crossings += 1

    def waited(self, ids: Any) -> None: ...

    def sent(self, *_: Any) -> None: ...

    def content(self) -> dict[str, int]:
        return {"steps": self.steps, "crossings": self.crossings}

    def restore(self, content: dict[str, int]) -> None:
        self.steps, self.crossings = content["steps"], content["crossings"]

    def metrics(self) -> dict[str, int]:
        return {"crossings": self.crossings}


# -- one transaction ---------------------------------------------------------------------------------------------------


class Stumbling(Loop):
    """Fails once when it loads its second batch, and can be retried."""

    def __init__(self) -> None:
        self.batches, self.failures = 0, 0

    def load(self, *args: Any) -> Any:
        self.batches += 1
        if self.batches == 2:
            raise RuntimeError("stumbled")
        return super().load(*args)

    def recover(self, error: BaseException, attempt: int) -> Engine:
        if "stumbled" not in str(error):
            raise error
        self.failures += 1
        return self


def played(runner: Rounds, rounds: int = 2) -> tuple[Any, Any]:
    return run(runner, rounds), {name: thing.content() for name, thing in runner.restorable().items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["sfl_v1", "hosfl", "fsl_sage"])
def test_a_failed_round_leaves_no_trace_in_a_simulation(case: str) -> None:
    clean = simulation(method_of(case), batching=CASES[case].batching, engine="loop", meters=(Count(),))
    engine = Stumbling()
    retried = simulation(method_of(case), batching=CASES[case].batching, engine=engine, meters=(Count(),))
    expected, found = played(clean), played(retried)
    assert engine.failures == 1 and found[1].keys() >= {"ledger", "Memory", "meter 1"}
    must_agree(Outcome(found[0], retried.ledger), Outcome(expected[0], clean.ledger), 0.0)
    assert found[1]["meter 1"] == expected[1]["meter 1"] and found[1]["meter 1"]["crossings"] > 0


def test_a_fatal_error_also_rolls_the_round_back() -> None:
    class Broken(Loop):
        def grad(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("broken")

    sim = simulation(method_of("sfl_v1"), engine=Broken(), meters=(Count(),))
    before = {name: thing.content() for name, thing in sim.restorable().items()}
    with pytest.raises(RuntimeError, match="broken"):
        sim.round(sim.start())
    assert {name: thing.content() for name, thing in sim.restorable().items()} == before


def test_a_failed_round_leaves_no_trace_with_devices() -> None:
    """Everybody refuses the second request of the first attempt at the second round."""
    batching = CASES["sfl_v1"].batching
    clean = deployment(method_of("sfl_v1"), images(), clients_of(), batching=batching, seed=SEED, meters=(Count(),))
    there = deployment(method_of("sfl_v1"), images(), clients_of(), batching=batching, seed=SEED, meters=(Count(),))
    sessions: Any = there.backend.sessions  # type: ignore[attr-defined]
    requests: dict[int, int] = {}
    for j, session in sessions.present().items():

        def send(work: Any, tensors: Any, j: int = j, session: Any = session, old: Any = session.transmit) -> int:
            requests[j] = requests.get(j, 0) + (work.round == 1)
            if requests[j] < 2:
                return int(old(work, tensors))
            refusal = Refusal(session=work.session, number=work.number, where="", reason="not today")
            sessions.take(Answered(j, session.number, refusal, []))
            return 0

        session.transmit = send

    def all_back(_: int) -> tuple[int, ...]:
        for j in {*range(len(clients_of()))} - sessions.present().keys():
            join(sessions, device(there.method, images(), clients_of(), batching, j))
        return tuple(sessions.present())

    there.backend.gather = all_back  # type: ignore[attr-defined]
    expected, found = played(clean), played(there)
    assert set(requests.values()) == {2}
    must_agree(Outcome(found[0], there.ledger), Outcome(expected[0], clean.ledger), 0.0)
    assert found[1]["meter 1"] == expected[1]["meter 1"]


def test_only_attempts_in_which_answers_were_refused_count_as_refusals() -> None:
    """Two refusals in the round before, and retries of the engine, are none of this round's three."""
    batching = CASES["sfl_v1"].batching
    there = deployment(method_of("sfl_v1"), images(), clients_of(), batching=batching, seed=SEED, engine=Stumbling())
    there.backend.sessions.met.clear()  # while the run has clients that have not failed, nothing is counted
    refused, stumbled = AllClientsLost("round 1: every client is lost", "not finite"), RuntimeError("stumbled")
    for attempt in (1, 2):
        there.backend.recover(refused, attempt)
    for attempt, error in enumerate((stumbled, refused, stumbled, stumbled, refused), start=1):
        there.backend.recover(error, attempt)
    with pytest.raises(ConfigError, match="every client is lost, 3 times; what they sent could not be used: not fin"):
        there.backend.recover(refused, 6)


# -- one check ---------------------------------------------------------------------------------------------------------

SMALL = Run(clients=4, rounds=1, method=Choice("sfl_v1"), batching=Batching(size=8), engine="loop")
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "steps of a method that counts them": (
        {"method": Choice("hosfl"), "batching": Batching(size=8, steps=5)},
        "this method counts the mini-batches of a round itself; leave steps out of the batching",
    ),
    "a batch that no client fills": (
        {"batching": Batching(size=5000)},
        "batch size 5000 is larger than every client's data (the largest client holds ",
    ),
    "more clients a round than there are": (
        {"per_round": 9},
        "per_round is 9; it must be from 1 to the 4 clients that hold data",
    ),
    "too few clients a round": (
        {"method": Choice("smofi", {"random_cut": (1, 2)}), "per_round": 1},
        "this method needs at least 2 clients a round, but per_round is 1",
    ),
    "a list for other clients": (
        {"method": Choice("hasfl", {"batches": (4, 4), "cuts": "fixed"})},
        "the method's lists are for 2 clients, but there are 4",
    ),
}


def in_simulation(given: Run) -> None:
    build.training(given)


def on_ray(given: Run) -> None:
    build.training(replace(given, engine="ray"))


def served(given: Run) -> None:
    server_of(given)


def from_python(given: Run) -> None:
    data, partition, _, _ = build.dealt(given)
    planned, _ = build.planned_method(given, build.model_of(given, data), data, given.clients)
    cutlayer.train(planned, data, partition, rounds=1, batching=given.batching, per_round=given.per_round)


@pytest.mark.parametrize("place", [in_simulation, on_ray, served, from_python])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_everywhere_with_the_same_words(mistake: str, place: Callable[[Run], None]) -> None:
    changes, text = MISTAKES[mistake]
    given = replace(SMALL, **changes)
    with pytest.raises(ConfigError) as caught:
        place(given)
    assert str(caught.value).startswith(text)


def test_a_batch_that_no_device_fills_is_refused_when_they_have_joined() -> None:
    there = deployment(method_of("sfl_v1"), images(), clients_of(), batching=Batching(size=500), seed=SEED)
    with pytest.raises(ConfigError, match=r"batch size 500 is larger than every client's data \(the largest client"):
        there.round(there.start())


# -- servers on any engine ---------------------------------------------------------------------------------------------

ENGINES: dict[str, Callable[[], Engine]] = {"vmap": Vmap, "graph": lambda: Graph(Again(CPU), 5)}
FAST = ("sfl_v1", "smofi", "mergesfl", "hosfl", "sfl_v2")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "case",
    [
        case if case in FAST else pytest.param(case, marks=pytest.mark.slow)
        for case in (*ONE_OF_EACH.values(), "smofi random cut", "hasfl own cuts")
    ],
)
def test_servers_of_devices_give_loops_numbers_on_every_engine(case: str, engine: str) -> None:
    there = deployment(
        method_of(case),
        images(),
        clients_of(),
        batching=CASES[case].batching,
        seed=SEED,
        engine=ENGINES[engine](),
    )
    sessions: Any = there.backend.sessions  # type: ignore[attr-defined]
    devices = {j: device(there.method, images(), clients_of(), CASES[case].batching, j) for j in sessions.present()}

    def all_back(_: int) -> tuple[int, ...]:
        """Let lost devices rejoin, as a server that retries expects."""
        for j in devices.keys() - sessions.present().keys():
            join(sessions, devices[j])
        return tuple(sessions.present())

    there.backend.gather = all_back  # type: ignore[attr-defined]
    found = Outcome(run(there), there.ledger)  # type: ignore[arg-type]
    must_agree(found, on_loop(case, "momentum", "two-part", torch.float64), 1e-11)


def server_of(given: Run) -> RunServer:
    board = Board(name=given.name, method=given.method.name, rounds=given.rounds)
    return RunServer(given, Serving(listen="127.0.0.1:0"), board, samples_of(given, None, None))


def test_a_resumed_server_computes_on_the_engine_that_the_run_began_with() -> None:
    began_with = replace(SMALL, server_engine="vmap")
    assert server_of(SMALL).training(SMALL).runner.backend.engine.name == "loop"  # what auto is without a GPU
    assert server_of(SMALL).training(began_with).runner.backend.engine.name == "vmap"


def test_a_server_refuses_the_folder_of_another_run_before_it_listens(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    execute(SMALL, folder)
    board = Board(name="", method="", rounds=1)

    def listens(address: str) -> None:
        raise AssertionError(f"it listens at {address}")

    other = replace(SMALL, clients=3)
    with pytest.raises(CheckpointError, match="holds a run of another configuration: clients is 4 there and 3 here"):
        serve(other, folder, Serving(listen="127.0.0.1:0"), board, on_open=listens)


def test_a_simulation_resumes_what_servers_of_devices_began(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients hold nothing of it here, so their memory starts over, with a warning."""
    given, folder = replace(SMALL, method=Choice("hosfl"), rounds=2), Folder(tmp_path)

    execute(replace(given, rounds=1), folder)
    content, manifest = folder.store.load()
    versions = {"KnownVersions": KnownVersions().content()}
    content["rounds"] = {k: v for k, v in content["rounds"].items() if k != "Memory"} | versions  # type: ignore[index]
    folder.store.save(1, content, manifest)
    assert execute(given, folder, resume=True).state.round == 2
    assert f"{tmp_path}: the checkpoint has no state of Memory, which starts over" in caplog.messages


def test_devices_of_equal_shapes_are_stacked_at_the_server() -> None:
    sizes: list[int] = []

    class Watched(Vmap):
        def grad(self, fn: Any, values: Any, ids: Any, *, cut: int | None) -> Any:
            made = super().grad(fn, values, ids, cut=cut)
            sizes.extend(len(block.ids) for block in made)
            return made

    batching = Batching(size=4, steps=2)
    there = deployment(method_of("sfl_v1"), images(), clients_of(), batching=batching, seed=SEED, engine=Watched())
    there.round(there.start())
    assert sizes == [4, 1, 4, 1]  # one client has fewer samples than a batch


# -- the rule of auto --------------------------------------------------------------------------------------------------


def test_all_methods_of_a_comparison_run_on_the_same_engine() -> None:
    names = {simulation(method_of(case), engine="auto").engine_name for case in ("sfl_v1", "fedavg", "sl", "mergesfl")}
    assert len(names) == 1


def test_auto_decides_by_the_flops_of_a_batch() -> None:
    def engine(width: int) -> str:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).double()
        mine = SplitFed(model=Split(net, 2), client_opt=optim.sgd(0.1), server_opt=optim.sgd(0.1))
        partition, batching = clients_of((100, 100)), Batching(size=100)
        return simulation(mine, images(200), partition, batching=batching, engine="auto").engine_name

    # A batch of 100 takes 100 * 2 * (64 + 10) * width FLOPs forwards: 29.6 million, and 59.2.
    assert auto.MOST_STACKED == 32e6
    assert (engine(2000), engine(4000)) == ("vmap", "loop")


# -- needs -------------------------------------------------------------------------------------------------------------


def test_a_method_may_have_a_method_called_sizes() -> None:
    base = method_of("sfl_v1")

    @method
    class Named:
        """Forwards to another method."""

        model = base.model

        def sizes(self) -> str:
            return "of no interest to a run"

        def start(self, server: Server, fed: Fed) -> State:
            return base.start(server, fed)

        def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
            return state._replace(round=state.round + 1)

    sim = simulation(Named(), engine="loop")
    assert sim.round(sim.start()).round == 1 and Named().needs == Needs()  # type: ignore[attr-defined]


# The calls that look up an attribute by name, by file. None of them asks whether a method declares something.
LOOKED_UP = {
    "benching/cases.py": {
        "getattr(self, name)",
    },
    "benching/measure.py": {
        "getattr(sys.modules.get('jax'), '__version__', None)",
    },
    "cli/launch.py": {
        "getattr(orders, key)",
    },
    "cli/plan.py": {
        "getattr(asked, key)",
        "getattr(self, option)",
    },
    "cli/plan_table.py": {
        "getattr(latency, name)",
    },
    "core/checks.py": {
        "getattr(value, 'begin', None)",
        "getattr(value, 'step', None)",
    },
    "cli/options.py": {
        "hasattr(signal, 'setitimer')",
    },
    "codecs/__init__.py": {
        "getattr(own, 'traits', None)",
    },
    "core/codec.py": {
        "hasattr(cls, 'check')",
    },
    "core/batches.py": {
        "getattr(self, name)",
    },
    "core/calculus.py": {
        "getattr(args[0], 'params', {})",
    },
    "core/program.py": {
        "getattr(fn, '__qualname__', repr(fn))",
        "getattr(fn, 'at_client', False)",
        "getattr(fn, 'passes', None)",
        "getattr(o, name)",
        "getattr(owner, field.name)",
    },
    "core/tree.py": {
        "getattr(self, name)",
        "getattr(tree, name)",
        "hasattr(cls, '_make')",
    },
    "core/values.py": {
        "getattr(value, '_fields', ())",
    },
    "data/datasets.py": {
        "hasattr(value, '__array__')",
        "hasattr(value, '__getitem__')",
        "hasattr(value, '__array_interface__')",
    },
    "data/augment.py": {
        "getattr(self, name)",
    },
    "engines/auto.py": {
        "getattr(importlib.import_module(self.module), self.name)",
    },
    "engines/graph/compiling.py": {
        "getattr(self._fn, '__qualname__', '')",
    },
    "engines/vmap.py": {
        "getattr(b.tree, 'buffers', None)",
    },
    "meters/clock.py": {
        "getattr(fn, '__func__', fn)",
        "getattr(fn, '__qualname__', fn)",
    },
    "methods/fsl_sage.py": {
        "getattr(self, name)",
    },
    "models/decoders.py": {
        "getattr(config, 'final_logit_softcapping', None)",
        "getattr(config, 'layer_types', None)",
        "getattr(config, 'sliding_window', None)",
        "hasattr(base, 'get_base_model')",
    },
    "models/language.py": {
        "getattr(torch, dtype)",
    },
    "planning/devices.py": {
        "getattr(device, name)",
        "getattr(self, name)",
    },
    "planning/planner.py": {
        "getattr(fleet, name)",
    },
    "planning/policy.py": {
        "getattr(self, name)",
    },
    "planning/problem.py": {
        "getattr(self, name)",
        "getattr(self.bound, name)",
    },
    "recipes/scale.py": {
        "getattr(run, key)",
        "getattr(smaller, key)",
    },
    "remote/device/session.py": {
        "getattr(self._begun, name)",
        "getattr(work, name)",
    },
    "remote/device/terms.py": {
        "getattr(self, name)",
    },
    "remote/joining/compiling.py": {
        "getattr(owner, option.name)",
    },
    "remote/server/ceilings.py": {
        "getattr(self, name)",
    },
    "remote/joining/join.py": {
        "getattr(fn, 'gives', None)",
    },
    "remote/device/worker.py": {
        "getattr(command, 'function', None)",
        "getattr(command, 'name', None)",
        "getattr(own, '_fields', ())",
    },
    "remote/monitor/logs.py": {
        "getattr(record, 'event', None)",
        "getattr(record, 'fields', {})",
    },
    "remote/server/shape_runner.py": {
        "getattr(block.tree, 'pull', None)",
    },
    "remote/tensors/forms.py": {
        "getattr(torch, name)",
    },
    "remote/tensors/wire.py": {
        "getattr(message, 'tensors', ())",
        "hasattr(message, 'tensors')",
    },
    "runs/checkpoint.py": {
        "getattr(torch, dtype)",
        "hasattr(os, 'O_DIRECTORY')",
    },
    "runs/config.py": {
        "getattr(old, name)",
        "getattr(run, f.name)",
        "getattr(run, key)",
        "getattr(run, table)",
        "getattr(self, name)",
    },
    "runs/described.py": {
        "getattr(thing, '__dict__', {})",
        "getattr(thing, f.name)",
    },
    "runs/rounds.py": {
        "getattr(sampler, '__name__', type(sampler).__name__)",
    },
    "runs/run.py": {
        "getattr(run, key)",
    },
    "runs/stopping.py": {
        "getattr(run, f.name)",
    },
    "split/calling.py": {
        "getattr(function, '__name__', '')",
    },
    "split/cuts.py": {
        "getattr(model, 'units', None)",
    },
    "split/generators.py": {
        "getattr(attribute, '__self__', attribute)",
    },
    "split/graphs.py": {
        "getattr(model.get_submodule(path), name)",
    },
    "split/split.py": {
        "getattr(model, 'preloaded', None)",
    },
    "split/tracing.py": {
        "getattr(model, name)",
    },
    "split/traits.py": {
        "getattr(inspect.unwrap(type(module).forward), '__code__', None)",
        "getattr(m, 'inplace', False)",
    },
    "split/units.py": {
        "getattr(model, 'preloaded', None)",
        "getattr(model, 'units', None)",
    },
    "studies/overlap.py": {
        "getattr(self, name)",
    },
    "studies/traffic_forms.py": {
        "getattr(self, name)",
    },
}


def test_no_code_asks_a_method_by_getattr() -> None:
    root = Path(cutlayer.__file__).parent
    found = {
        (file.relative_to(root).as_posix(), ast.unparse(node))
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
    }
    assert found - {(file, call) for file, calls in LOOKED_UP.items() for call in calls} == set()


class Forwarding:
    """A plain mix-in: forwards to another method, and says what a method may say."""

    model = method_of("sfl_v1").model
    needs = Needs(fewest_clients=2)
    labels_leave = True

    def metrics(self, state: State) -> dict[str, Any]:
        return {"rounds": state.round}

    def start(self, server: Server, fed: Fed) -> State:
        return method_of("sfl_v1").start(server, fed)

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        return state._replace(round=state.round + 1)


def test_needs_may_be_a_class_attribute_a_field_or_inherited() -> None:
    @method
    class Attribute(Forwarding):
        needs = Needs(fewest_clients=3)

    @method
    @dataclass(frozen=True)
    class Field(Forwarding):
        needs: Needs

    @method
    class Inherited(Forwarding):
        pass

    for given, fewest in ((Attribute(), 3), (Field(Needs(fewest_clients=4)), 4), (Inherited(), 2)):
        assert needs_of(given) == Needs(fewest_clients=fewest)
        with pytest.raises(ConfigError, match=f"needs at least {fewest} clients"):
            simulation(given, per_round=fewest - 1)
        assert run(simulation(given), 1).round == 1


def test_metrics_and_labels_leave_may_be_inherited() -> None:
    @method
    class Inherited(Forwarding):
        pass

    sim = simulation(Inherited())
    assert metrics_of(sim.method, run(sim, 1)) == {"rounds": 1}
    assert Program(sim.method).labels == LABELS


def test_needs_of_another_type_are_refused() -> None:
    @method
    class Wrong(Forwarding):
        needs = ("fewest_clients", 2)

    with pytest.raises(ConfigError, match=r"Wrong\.needs is a tuple; give a Needs, such as"):
        simulation(Wrong())


def test_a_class_without_the_decorator_is_refused() -> None:
    class Bare:
        model = method_of("sfl_v1").model

    with pytest.raises(CutlayerError, match="Bare is no method yet; put @method above its @dataclass"):
        simulation(Bare(), engine="loop")  # type: ignore[arg-type]


@method
@dataclass(frozen=True, kw_only=True)
class Failing:
    """Runs a function on the clients' activations at the server."""

    model: Split
    fn: Callable[[torch.Tensor], torch.Tensor]

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), {})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        for step in clients.steps():
            z, _ = step.active.vjp(self.forward, step.active.down(MODEL, state.client), step.x, step.key)
            server.each(self.fn, step.active.up(ACTIVATIONS(z)))
        return state

    @at_client(gives=ACTIVATIONS)
    def forward(self, model: Model, x: torch.Tensor, key: int | None) -> tuple[torch.Tensor, Tensors]:
        return self.model.lower(model, x, key)


def failure(fn: Callable[[torch.Tensor], Any], meters: tuple[Any, ...] = ()) -> Exception:
    """The error of a round on vmap."""
    sim = simulation(Failing(model=method_of("sfl_v1").model, fn=fn), engine=Vmap(), meters=meters)
    with pytest.raises(Exception) as caught:
        sim.round(sim.start())
    return caught.value


@pytest.mark.parametrize(
    "fn",
    [
        lambda z: z * z.sum().item(),
        lambda z: z * torch.rand(1),
        lambda z: z[z > 0],
        lambda z: torch.equal(z, z),
        lambda z: z.sum().numpy(),
    ],
)
def test_what_vmap_cannot_stack_names_the_engine_to_use(fn: Callable[[torch.Tensor], Any]) -> None:
    error = failure(fn)
    assert isinstance(error, ConfigError)
    assert str(error).startswith("engine vmap cannot stack what this method computes (")
    assert str(error).endswith("; use engine = 'loop'")
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("invalid literal for int() with base 10: 'seven'"),
        RuntimeError("shape '[3, 7]' is invalid for input of size 12"),
        torch.OutOfMemoryError("CUDA out of memory in vmap"),
    ],
)
def test_any_other_error_of_a_stacked_function_comes_through(error: Exception) -> None:
    def fail(z: torch.Tensor) -> torch.Tensor:
        raise error

    assert failure(fail) is error


def test_an_error_outside_stacked_functions_comes_through_on_vmap() -> None:
    broken = RuntimeError("a meter that counts vmap: broken")

    class Broken(Count):
        """A meter with a mistake."""

        def crossed(self, *_: Any) -> None:
            raise broken

    assert failure(lambda z: z, (Broken(),)) is broken


def test_two_servers_in_two_processes_refuse_an_engine_that_stacks() -> None:
    given = replace(SMALL, server_engine="vmap")
    board = Board(name=given.name, method=given.method.name, rounds=given.rounds)
    with pytest.raises(ConfigError, match="two servers in two processes compute on loop"):
        RunServer(given, Serving(listen="127.0.0.1:0", role="train"), board, samples_of(given, None, None))
