"""Specifies runs that Python makes in a folder: the files, resuming them, and what is refused."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import agree
from stopping import Stopped, outcome
from torch import fx, nn

import cutlayer
from cutlayer import Partition, Split, adam, adamw, cli, dirichlet, from_arrays, iid, schedules, sgd, train
from cutlayer.core.batches import Batching
from cutlayer.core.method import method
from cutlayer.core.state import State
from cutlayer.engines.loop import Loop
from cutlayer.errors import CheckpointError, ConfigError
from cutlayer.methods import METHODS
from cutlayer.results import report
from cutlayer.runs.config import Choice
from cutlayer.runs.described import choices, digest, name_of, plain, qualified
from cutlayer.runs.folder import Folder

DIGITS = cutlayer.load("digits")


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return cutlayer.models.build("cnn", width=2)


def sfl(lr: float = 0.05, seed: int = 0, **options: Any) -> Any:
    opt = sgd(lr, momentum=0.9)
    return cutlayer.sfl_v1(model=Split(net(seed), "conv1"), client_opt=opt, server_opt=opt, **options)


def run(out: Path | None, *, rounds: int = 4, **options: Any) -> cutlayer.Result:
    seed = options.get("seed", 0)
    settings: dict[str, Any] = {
        "method": sfl(seed=seed),
        "data": DIGITS.train,
        "partition": dirichlet(DIGITS.train.y, 6, alpha=0.5, min_size=16, key=seed),
        "test": DIGITS.test,
        "batching": Batching(size=8, steps=2),
        "per_round": 4,
        "engine": "vmap",
        **options,
    }
    return train(rounds=rounds, out=out, **settings)


def stop_after(number: int) -> Callable[[dict[str, Any]], None]:
    def on_round(record: dict[str, Any]) -> None:
        if record["round"] == number:
            raise Stopped

    return on_round


# -- the folder --------------------------------------------------------------------------------------------------


def test_a_run_from_python_leaves_what_the_command_line_leaves(tmp_path: Path) -> None:
    result, silent = run(tmp_path / "mine" / "x"), run(None)
    assert {str(p.relative_to(tmp_path / "mine" / "x")) for p in tmp_path.rglob("*") if p.is_file()} == {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "timing.jsonl",
        "ledger.json",
        "model.safetensors",
        "checkpoints/round-000003.safetensors",
        "checkpoints/round-000004.safetensors",
    }
    folder = Folder(tmp_path / "mine" / "x")
    assert folder.history() == result.history == silent.history
    agree(result.state_dict, silent.state_dict, 0)
    assert folder.surroundings()["inputs"].keys() == {
        "data", "partition", "test", "the model", "the initial weights"
    }  # fmt: skip


def test_its_configuration_has_the_names_and_options_of_a_run_file(tmp_path: Path) -> None:
    client, server = sgd(schedules.cosine(0.1, rounds=9), momentum=0.9), adam(0.01, weight_decay=1e-4)
    size = sum(parameter.numel() for parameter in net().parameters())
    made = cutlayer.smofi(model=Split(net(), "conv2"), client_opt=client, server_opt=server, beta=0.2)
    run(tmp_path / "a" / "b" / "seed-3", method=made, seed=3, rounds=1, patience=5, metrics=["accuracy", "f1"])
    written = tomllib.loads((tmp_path / "a" / "b" / "seed-3" / "config.toml").read_text())
    wanted = {
        "name": "a/b",
        "seed": 3,
        "clients": 6,
        "per_round": 4,
        "cut": 2,
        "patience": 5,
        "metrics": ["accuracy", "f1"],
        "method": {"name": "smofi", "beta": 0.2},
        "optimiser": {"name": "sgd", "lr": {"schedule": "cosine", "lr": 0.1, "rounds": 9}, "momentum": 0.9},
        "server_optimiser": {
            "name": "adam", "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-4
        },
        "model": {"name": "Sequential", "parameters": size, "units": ["conv1", "conv2", "fc1", "head"]},
        "batching": {"size": 8, "epochs": 1, "steps": 2, "drop_last": True},
        "partition": {"name": "python"},
        "data": "python",
        "python": {
            "data": "Arrays(1437 samples: x 1x8x8 float32, 10 classes)",
            "test": "Arrays(360 samples: x 1x8x8 float32, 10 classes)",
            "loss": "cutlayer.split.losses.cross_entropy",
            "metrics": ["cutlayer.runs.metrics.accuracy", "cutlayer.runs.metrics.f1"],
        },
    }  # fmt: skip
    assert {key: written[key] for key in wanted} == wanted


def test_the_command_line_says_that_it_cannot_repeat_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, rounds=1)
    with pytest.raises(SystemExit) as left:
        cli.main(["run", str(tmp_path / "config.toml")])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/config.toml is the run of a Python program, whose objects a file cannot name; repeat it "
        "with that program: `cutlayer.train(..., out=..., resume=True)` goes on with it\n"
    )


def test_compare_reads_it_like_any_other_and_knows_its_seeds(tmp_path: Path) -> None:
    for name in ("sfl_v1", "fedavg"):
        for seed in (0, 1):
            made = METHODS[name](model=Split(net(seed), 1), client_opt=sgd(0.05), server_opt=sgd(0.05))
            run(tmp_path / "mine" / name / f"seed-{seed}", method=made, seed=seed, rounds=2)
    found = report.compare(report.find([tmp_path]))
    assert {(g.label, len(g.trials), g.run.method.name) for panel in found.panels for g in panel.groups} == {
        ("sfl_v1", 2, "sfl_v1"),
        ("fedavg", 2, "fedavg"),
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [("runs/mine/x", "mine/x"), ("runs/mine/x/seed-12", "mine/x"), ("/x", "x"), ("/seed-0", "run")],
)
def test_a_run_is_named_after_its_folder(path: str, name: str) -> None:
    assert name_of(Path(path)) == name


# -- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_a_run_that_was_stopped_ends_as_if_it_had_not(checkpoint_every: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"monitor": "test_loss", "checkpoint_every": checkpoint_every, "name": "x"}
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", on_round=stop_after(2), **options)
    again = run(tmp_path / "stopped", resume=True, **options)
    whole = run(tmp_path / "whole", **options)
    assert outcome(Folder(tmp_path / "stopped")) == outcome(Folder(tmp_path / "whole"))
    assert again.history == whole.history
    agree(again.state_dict, whole.state_dict, 0)


def test_a_run_that_is_done_comes_back_as_it_was(tmp_path: Path) -> None:
    first = run(tmp_path, monitor="test_loss")
    again = run(tmp_path, monitor="test_loss", resume=True)
    assert (again.history, again.best_round) == (first.history, first.best_round)
    agree(again.best, first.best, 0)


def test_a_run_may_go_on_for_longer_and_a_new_folder_starts_one(tmp_path: Path) -> None:
    run(tmp_path / "a", rounds=2, resume=True)
    longer = run(tmp_path / "a", rounds=4, resume=True)
    assert longer.history == run(None).history


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"seed": np.int64(0), "per_round": np.int64(4), "until_accuracy": np.float64(1.0)}
    run(tmp_path, rounds=np.int64(2), **settings)
    assert run(tmp_path, rounds=3, resume=True, seed=0, per_round=4).history == run(None, rounds=3).history


def test_auto_stays_the_engine_that_it_was(tmp_path: Path) -> None:
    run(tmp_path, engine="auto", rounds=1)
    assert run(tmp_path, engine="auto", resume=True).engine == Folder(tmp_path).recorded().engine == "vmap"


def test_an_engine_of_ones_own_is_known_by_its_name(tmp_path: Path) -> None:
    assert run(tmp_path, engine=Loop(), rounds=1).engine == "loop"
    assert run(tmp_path, engine=Loop(), rounds=2, resume=True).history[-1]["round"] == 2


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "lr": (
        {"method": sfl(lr=0.1)},
        "holds a run of another configuration: optimiser.lr is 0.05 there and 0.1 here; "
        "resume it with its own, start over with overwrite=True, or choose another out",
    ),
    "option": (
        {"method": sfl(sync="epoch")},
        "holds a run of another configuration: method.sync is None there and 'epoch' here; "
        "resume it with its own, start over with overwrite=True, or choose another out",
    ),
    "data": (
        {"data": from_arrays(DIGITS.train.x * 2, DIGITS.train.y)},
        "began with other content: data changed since; give what it began with, start over with overwrite=True, or "
        "choose another out",
    ),
    "partition and weights": (
        {"method": sfl(seed=1), "partition": dirichlet(DIGITS.train.y, 6, alpha=0.5, min_size=16, key=7)},
        "began with other content: partition, the initial weights changed since; give what it began with, start over "
        "with overwrite=True, or choose another out",
    ),
    "tests of clients": (
        {"test_partition": iid(len(DIGITS.test), 6, key=0)},
        "began with other content: test_partition changed since; give what it began with, start over with "
        "overwrite=True, or choose another out",
    ),
    "fewer rounds": ({"rounds": 1}, "is at round 2 already; resume it with at least as many rounds"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("done") / "run"
    run(out, rounds=2)
    return out


@pytest.mark.parametrize("what", OTHER)
def test_another_run_is_not_resumed(what: str, done: Path) -> None:
    options, message = OTHER[what]
    before = {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError) as caught:
        run(done, resume=True, **options)
    assert str(caught.value) == f"{done} {message}"
    assert {p: p.read_bytes() for p in done.rglob("*") if p.is_file()} == before


class Noise:
    """A transform, a piece or a loss of somebody's own: a plain class with numbers, and a number in an object in it."""

    def __init__(self, std: float, seen: tuple[Any, ...] = ()) -> None:
        self.std, self.parts, self.among = std, [HeldNumber(std)], {"b", "a"}
        self.itself = self
        self.seen = list(seen)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.parts[0].value)


class HeldNumber:
    def __init__(self, value: float) -> None:
        self.value = value


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class FuseByNumber:
    barrier = None

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, *_: Any) -> None:
        pass


class Halving:
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def __call__(self, round: int) -> float:
        return self.lr / 2**round


class MeanAbove:
    """Accumulates like a torchmetrics object; what it has seen is no setting."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.reset()

    def reset(self) -> None:
        self.num, self.total = 0, 0

    def update(self, out: torch.Tensor, y: torch.Tensor) -> None:
        self.num, self.total = self.num + len(y), self.total + int((out.amax(1) > self.bound).sum())

    def compute(self) -> float:
        return self.total / self.num


def smoothed(share: float) -> Any:
    return lambda out, y: nn.functional.cross_entropy(out, y, label_smoothing=share)


def with_loss(loss: Any) -> Any:
    opt = sgd(0.05)
    return cutlayer.sfl_v1(model=Split(net(), "conv1", loss=loss), client_opt=opt, server_opt=opt)


def scaled(scale: float) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Scaled(scale), nn.Linear(8, 10))
    return cutlayer.sfl_v1(model=Split(layers, 2), client_opt=sgd(0.05), server_opt=sgd(0.05))


def fused(share: float) -> Any:
    opt = sgd(0.05)
    return cutlayer.SplitFed(model=Split(net(), "conv1"), client_opt=opt, server_opt=opt, fuse=FuseByNumber(share))


CROSS_ENTROPY = nn.functional.cross_entropy
# What makes the option of `train` from a number, and what is said if it is 0.1 there and 0.5 here.
SETTINGS: dict[str, tuple[Callable[[float], dict[str, Any]], str]] = {
    "the arguments of a partial": (
        lambda v: {"method": with_loss(partial(CROSS_ENTROPY, label_smoothing=v))},
        "python.loss.label_smoothing is 0.1 there and 0.5 here",
    ),
    "the values that a function holds": (
        lambda v: {"method": with_loss(smoothed(v))},
        "python.loss.share is 0.1 there and 0.5 here",
    ),
    "a module as the loss": (
        lambda v: {"method": with_loss(nn.CrossEntropyLoss(label_smoothing=v))},
        "python.loss is 'torch.nn.modules.loss.CrossEntropyLoss ",
    ),
    "class weights": (
        lambda v: {"method": with_loss(nn.CrossEntropyLoss(weight=torch.full((10,), v)))},
        "python.loss is 'torch.nn.modules.loss.CrossEntropyLoss ",
    ),
    "a transform": (
        lambda v: {"augment": cutlayer.SampleTransform(Noise(v))},
        "python.augment.parts is [{'name': 'test_python_runs.HeldNumber', 'value': 0.1}] there and",
    ),
    "a metric": (
        lambda v: {"metrics": {"above": MeanAbove(v)}},
        "python.metrics is [{'name': 'test_python_runs.MeanAbove', 'bound': 0.1, 'num': 0, 'total': 0}] there and",
    ),
    "a piece of a method": (lambda v: {"method": fused(v)}, "method.fuse.share is 0.1 there and 0.5 here"),
    "a schedule": (
        lambda v: {"method": cutlayer.fedavg(model=Split(net(), 1), client_opt=sgd(Halving(v)))},
        "optimiser.lr.lr is 0.1 there and 0.5 here",
    ),
    "an attribute of a module": (
        lambda v: {"method": scaled(v)},
        "began with other content: the model changed since; ",
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_inside_of_an_object_is_one_of_the_run(what: str, tmp_path: Path) -> None:
    options, message = SETTINGS[what]
    settings = {"batching": Batching(size=8, steps=1), "resume": True, "test": DIGITS.test.take(range(20))}
    run(tmp_path, rounds=1, **options(0.1), **settings)
    Folder(tmp_path).recorded()  # TOML that can be read
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path, rounds=2, **options(0.5), **settings)
    assert message in str(caught.value)
    again = options(0.1)
    assert len(run(tmp_path, rounds=2, **again, **settings).history) == 2
    assert len(run(tmp_path, rounds=3, **again, **settings).history) == 3  # with the very same object, too


def described() -> list[Any]:
    held = (None, float("nan"), torch.float32, object(), {1: len}, torch.arange(3))
    net = nn.Sequential(Scaled(3.0), nn.LSTM(2, 2), fx.symbolic_trace(Scaled(2.0)))
    return [plain(thing) for thing in (Noise(0.1, held), smoothed(0.2), net)]


def test_objects_are_described_alike_in_every_process() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(cutlayer.__file__).parents[1])])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", "import test_python_runs as t; print(t.described())"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == f"{described()}\n"
    assert described()[0] == {
        "name": "test_python_runs.Noise",
        "std": 0.1,
        "parts": [{"name": "test_python_runs.HeldNumber", "value": 0.1}],
        "among": ["a", "b"],
        "itself": "test_python_runs.Noise",
        "seen": [
            "None", "nan", "torch.float32", "builtins.object", {"1": "builtins.len"},
            f"torch.int64 (3,) {digest(torch.arange(3))}",
        ],
    }  # fmt: skip


def test_a_folder_with_a_run_is_refused_and_may_be_replaced(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path, rounds=1)
    assert str(caught.value) == (
        f"{tmp_path} already holds a run (1 rounds done); "
        "go on with resume=True, start over with overwrite=True, or choose another out"
    )
    assert len(run(tmp_path, rounds=2, overwrite=True, method=sfl(lr=0.2)).history) == 2


@pytest.mark.parametrize("option", [{"resume": True}, {"overwrite": True}, {"name": "x"}, {"checkpoint_every": 5}])
def test_options_of_a_folder_need_one(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        run(None, **option)
    (name,) = option
    assert str(caught.value) == f"{name} is about the folder of a run; give the folder, such as out='runs/mine/x'"


def test_resume_and_overwrite_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^resume and overwrite contradict each other; give one of them$"):
        run(tmp_path, resume=True, overwrite=True)


# -- how objects are described -----------------------------------------------------------------------------------

OPTIMISERS = {
    "sgd": (sgd(0.1), {"lr": 0.1}),
    "nesterov": (sgd(0.1, 0.9, nesterov=True), {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "clipped": (
        sgd(0.1, weight_decay=0.01, clip=1.0, clip_scope="joint", proximal=0.2),
        {"lr": 0.1, "weight_decay": 0.01, "clip": 1.0, "clip_scope": "joint", "proximal": 0.2},
    ),
    "as FedNAR": (
        sgd(0.1, weight_decay=0.01, clip=1.0, clip_decay=True),
        {"lr": 0.1, "weight_decay": 0.01, "clip": 1.0, "clip_decay": True},
    ),
    "adamw": (
        adamw(schedules.warmup(schedules.constant(0.1), 3), clip=2.0),
        {
            "lr": {"schedule": "constant", "lr": 0.1, "warmup": 3},
            "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "clip": 2.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_optimiser_is_described_by_the_options_that_make_it(name: str) -> None:
    opt, options = OPTIMISERS[name]
    found = choices(cutlayer.fedavg(model=Split(net(), 1), client_opt=opt))["optimiser"]
    assert found is not None and found.options == options
    assert cutlayer.optim.build(found.name, **found.options) == opt


def halved(round: int) -> float:
    return 0.1 / 2**round


@method
@dataclass(frozen=True, kw_only=True)
class Mine:
    """A method of somebody's own, with an optimiser, a number, a function and a piece."""

    model: Split
    opt: Any
    strength: float = 0.5
    shape: Any = halved
    batching: Batching = Batching(size=3)

    def start(self, server: Any, fed: Any) -> State:
        raise NotImplementedError

    def round(self, state: State, clients: Any, server: Any, fed: Any) -> State:
        raise NotImplementedError


def test_a_method_of_ones_own_is_described_by_its_class_and_plain_settings() -> None:
    found = choices(Mine(model=Split(net(), 1), opt=sgd(halved)))
    assert found["method"] == Choice(
        "Mine",
        {
            "strength": 0.5,
            "shape": qualified(halved),
            "batching": {"name": "Batching", "size": 3, "epochs": 1, "drop_last": True},
        },
    )
    assert found["optimiser"] == Choice(
        "Optimiser",
        {"lr": qualified(halved), "before": (), "rule": {"name": "Momentum", "beta": 0.0, "nesterov": False}},
    )
    assert found["server_optimiser"] is None


def test_methods_that_are_classes_have_their_registered_names() -> None:
    found = choices(cutlayer.sl(model=Split(net(), 1), client_opt=sgd(0.1), server_opt=sgd(0.2), order="fixed"))
    assert found["method"] is not None and found["method"].name == "sl"
    assert found["method"].options["order"] == "fixed"
    assert found["server_optimiser"] == Choice("sgd", {"lr": 0.2})


def test_digests_tell_contents_apart() -> None:
    a = DIGITS.train
    assert digest(a) == digest(a.take(range(len(a)))) != digest(a.take(range(len(a) - 1)))
    assert digest(iid(8, 2, key=0)) == digest(iid(8, 2, key=0)) != digest(iid(8, 2, key=1))
    parts = iid(8, 2, key=0)
    assert digest(parts) != digest(Partition(parts.clients, names=("a", "b")))
    assert digest(Partition((np.array([0]), np.array([1, 2])))) != digest(Partition((np.array([0, 1]), np.array([2]))))


# -- words -------------------------------------------------------------------------------------------------------


def test_results_and_data_print_in_a_line(tmp_path: Path) -> None:
    result = run(tmp_path / "x", monitor="test_accuracy", rounds=2)
    text = repr(result)
    assert text.startswith("Result(rounds=2, loss=") and len(text) < 200
    assert text.endswith(f"engine='vmap', best_round={result.best_round}, folder='{tmp_path}/x')")
    assert repr(result.state) == "State(round=2, ...)"
    assert repr(DIGITS.test) == "Arrays(360 samples: x 1x8x8 float32, 10 classes)"
    two = from_arrays({"a": torch.zeros(3, 2), "b": torch.zeros(3)}, torch.zeros(3, 1))
    assert repr(two) == "Arrays(3 samples: x['a'] 2 float32 and x['b'] float32, y 1 float32)"
    assert repr(iid(9, 4, key=0)) == "Partition(4 clients, 9 samples)"
    assert repr(run(None, rounds=0)) == "Result(rounds=0, engine='vmap')"
