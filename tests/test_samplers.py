"""Specifies samplers: uniform, by the number of samples, and of clients that are on, by chance or by a trace."""

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import mistake, say  # noqa: F401
from torch import nn

import cutlayer as cl
from cutlayer.errors import CheckpointError, ConfigError, DataError
from cutlayer.pieces.sampler import Draw
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run

TEN = dict.fromkeys(range(10), 5)
TRACE = "client,from_round,to_round\n0,1,2\n1,1,1\n2,2,4\n2,6,6\n"


def test_a_weighted_draw_goes_by_the_samples() -> None:
    samples = {2: 10, 3: 30, 7: 60}
    draws = [cl.weighted(Draw(samples, 1, key)) for key in range(2000)]
    counts = Counter(j for (j,) in draws)
    for client, share in ((2, 0.1), (3, 0.3), (7, 0.6)):
        assert abs(counts[client] / 2000 - share) < 0.045  # 4 standard deviations
    pairs = [cl.weighted(Draw(samples, 2, key)) for key in range(300)]
    assert all(a < b for a, b in pairs) and pairs == [cl.weighted(Draw(samples, 2, key)) for key in range(300)]
    assert cl.weighted(Draw(samples, 3, 0)) == (2, 3, 7)


def test_clients_are_on_with_a_probability_of_their_own() -> None:
    half = cl.available(0.5)
    draws = [half(Draw(TEN, 10, key)) for key in range(400)]
    assert draws == [half(Draw(TEN, 10, key)) for key in range(400)]
    assert abs(sum(map(len, draws)) / 4000 - 0.5) < 0.032  # 4 standard deviations
    fewer = dict.fromkeys(range(5), 5)
    alone = [half(Draw(fewer, 5, key)) for key in range(400)]
    for some, all_ in zip(alone, draws, strict=True):  # who is on does not depend on who else there is
        assert some == tuple(j for j in all_ if j < 5) or not any(j < 5 for j in all_)
    assert max(len(half(Draw(TEN, 3, key))) for key in range(50)) == 3
    assert cl.available(1.0)(Draw(TEN, 10, 0)) == tuple(range(10))


def test_a_round_waits_until_the_method_has_enough_clients() -> None:
    rare = cl.available(0.05)
    assert all(len(rare(Draw(TEN, 10, key, fewest=2))) >= 2 for key in range(50))
    with pytest.raises(ConfigError) as caught:
        cl.available(1e-9)(Draw({0: 5}, 1, key=0, round=6))
    assert str(caught.value) == (
        "in 10000 draws for round 7 on, fewer clients are on than the 1 that a round needs; let more be on, or train "
        "fewer rounds"
    )


def test_a_trace_says_when_each_client_is_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    traced = cl.available(trace=str(path))
    rounds = [traced(Draw(TEN, 10, 0, number)) for number in range(6)]
    assert rounds == [(0, 1), (0, 2), (2,), (2,), (2,), (2,)]  # in round 5 nobody is on: it waits for the next
    assert traced(Draw(TEN, 10, 0, 0, fewest=2)) == (0, 1)
    with pytest.raises(ConfigError) as caught:
        traced(Draw(TEN, 10, 0, 2, fewest=2))
    assert str(caught.value) == (
        f"in {path} from round 3 on, fewer clients are on than the 2 that a round needs; let more be on, or train "
        "fewer rounds"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the trace t.csv begins with ''; its first line must be client,from_round,to_round"),
        (
            "client,from_round,to_round\n0,1\n",
            "line 2 of t.csv has '0,1'; give three whole numbers: client, from_round, ",
        ),
        ("client,from_round,to_round\n0,3,2\n", "line 2 of t.csv has client 0 on from round 3 to 2; count clients fr"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        cl.available(trace="t.csv")(Draw(TEN, 1, 0))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("availability", "x.toml, [sampler]: availability needs a probability or a trace; give one of them"),
        (
            {"name": "availability", "probability": 1.5},
            "x.toml, [sampler]: probability is 1.5, but it must be a number above 0 and up to 1.",
        ),
        ({"name": "availability", "probability": 0.5, "trace": "t"}, "x.toml, [sampler]: availability needs a"),
        ({"name": "weighted", "among": "x"}, "unknown key 'among' in x.toml, [sampler]; it has none."),
        ("unifrom", "unknown sampler 'unifrom' in x.toml, [sampler]; did you mean 'uniform'?"),
    ],
)
def test_a_wrong_sampler_is_refused(table: Any, message: str) -> None:
    with pytest.raises(Exception) as caught:
        config.changed(Run(), {"sampler": table}, "x.toml")
    assert str(caught.value).startswith(message)


def test_a_name_alone_is_a_sampler() -> None:
    assert config.changed(Run(), {"sampler": "weighted"}, "x").sampler == Choice("weighted")
    assert config.recorded({"sampler": "of_a_plugin"}, "x").sampler == Choice("of_a_plugin")


def test_engines_draw_the_same_clients() -> None:
    def samples(engine: str) -> list[int]:
        torch.manual_seed(0)
        x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
        data = cl.from_arrays(x, (x[:, 0] > 0).astype(np.int64))
        split = cl.Split(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), cut=1)
        method = cl.sfl_v1(model=split, client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
        parts = cl.iid(60, 6, key=0)
        options: dict[str, Any] = {"rounds": 5, "engine": engine, "sampler": cl.available(0.4)}
        result = cl.train(method, data, parts, batching=cl.Batching(size=5), **options)
        return [record["samples"] for record in result.history]

    assert samples("loop") == samples("vmap")
    assert len(set(np.diff(samples("loop")))) > 1  # not always as many clients


def test_a_resumed_run_draws_the_clients_of_one_that_was_not_stopped(say: Any) -> None:  # noqa: F811
    Path("trace.csv").write_text("client,from_round,to_round\n0,1,9\n1,2,3\n2,1,9\n3,4,9\n")
    text = (
        'sampler = {{ name = "availability", trace = "{}" }}\nclients = 4\nrounds = 4\nengine = "loop"\n'
        'partition = "iid"\nmodel = {{ name = "mlp", hidden = [8] }}\nbatching = {{ steps = 1 }}\n'
    )
    for name in ("whole", "halves"):
        Path(f"{name}.toml").write_text(text.format("trace.csv"))
    assert say("run", "whole.toml", "--quiet").code == 0
    assert say("run", "halves.toml", "--quiet", "--rounds", "2").code == 0
    assert say("run", "halves.toml", "--quiet", "--resume").code == 0
    whole, halves = (Path(f"runs/{name}/seed-0/metrics.jsonl").read_text() for name in ("whole", "halves"))
    assert whole == halves
    counts = np.diff([0, *(json.loads(line)["samples"] for line in whole.splitlines())]) // 32
    assert counts.tolist() == [2, 3, 3, 3]
    Path("trace.csv").write_text("client,from_round,to_round\n0,1,9\n1,1,9\n2,1,9\n3,4,9\n")
    refused = mistake(say("run", "halves.toml", "--quiet", "--resume", "--rounds", "5"))
    assert refused.startswith("runs/halves/seed-0 began with other content: the trace trace.csv changed since; ")
    Path("none.toml").write_text(text.format("none.csv"))
    assert mistake(say("run", "none.toml", "--quiet")) == (
        "the trace none.csv cannot be read: [Errno 2] No such file or directory: 'none.csv'"
    )
    assert not Path("runs/none").exists()


@pytest.mark.parametrize("client", [4, 17])
def test_a_trace_names_clients_that_there_are(say: Any, client: int) -> None:  # noqa: F811
    Path("trace.csv").write_text(f"client,from_round,to_round\n1,1,9\n{client},1,9\n3,1,9\n")
    Path("mine.toml").write_text(
        'sampler = { name = "availability", trace = "trace.csv" }\nclients = 4\npartition = "iid"\n'
    )
    assert mistake(say("run", "mine.toml", "--quiet")) == (
        f"the trace trace.csv names client {client}, but the 4 clients are numbered 0 to 3: counting starts at 0"
    )
    assert not Path("runs").exists()


def test_a_resumed_python_run_notices_another_trace(tmp_path: Path) -> None:
    data = cl.from_arrays(torch.randn(40, 4), torch.arange(40) % 2)
    path = tmp_path / "trace.csv"

    def train(rounds: int, client: int) -> cl.Result:
        path.write_text(f"client,from_round,to_round\n0,1,9\n{client},1,9\n")
        torch.manual_seed(0)
        split = cl.Split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), cut=1)
        method = cl.sfl_v1(model=split, client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
        options: dict[str, Any] = {"sampler": cl.available(trace=str(path)), "out": tmp_path / "x", "resume": True}
        return cl.train(method, data, cl.iid(40, 3, key=0), rounds=rounds, batching=cl.Batching(size=5), **options)

    train(1, 1)
    assert len(train(2, 1).history) == 2
    with pytest.raises(CheckpointError, match=r"began with other content: the trace .*trace.csv changed since"):
        train(3, 2)
    with pytest.raises(
        DataError, match=r"names client 3, but the 3 clients are numbered 0 to 2: counting starts at 0$"
    ):
        train(3, 3)


def test_a_python_run_writes_and_resumes_its_sampler_and_transform(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    data = cl.from_arrays(x, (x[:, 0] > 0).astype(np.int64))

    def history(out: Path | None, rounds: int, resume: bool = False) -> list[Any]:
        torch.manual_seed(0)
        split = cl.Split(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), cut=1)
        method = cl.sfl_v1(model=split, client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
        options: dict[str, Any] = {"sampler": cl.available(0.4), "augment": cl.SampleTransform(noisy)}
        options |= {"rounds": rounds, "out": out, "resume": resume, "engine": "loop"}
        return cl.train(method, data, cl.iid(60, 6, key=0), batching=cl.Batching(size=5), **options).history

    history(tmp_path / "run", 2)
    told = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert told["sampler"] == {"name": "availability", "probability": 0.4, "among": "uniform"}
    assert told["python"]["augment"].endswith("noisy") and "augment" not in told
    assert history(tmp_path / "run", 4, resume=True) == history(None, 4)


def noisy(sample: torch.Tensor) -> torch.Tensor:
    return sample + 0.1 * torch.randn_like(sample)


# -- of one's own ------------------------------------------------------------------------------------------------


def train_with(sampler: Any) -> list[int]:
    torch.manual_seed(0)
    data = cl.from_arrays(torch.randn(40, 4), torch.arange(40) % 2)
    method = cl.fedavg(model=cl.Split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), cut=1), client_opt=cl.sgd(0.1))
    options: dict[str, Any] = {"rounds": 1, "batching": cl.Batching(size=5, steps=1), "sampler": sampler}
    result = cl.train(method, data, cl.iid(40, 4, key=0), **options)
    return [record["samples"] // 5 for record in result.history]


def test_a_sampler_may_return_any_iterable_of_clients() -> None:
    for some in ((1, 3), [1, 3], np.array([1, 3]), (1, 3, 1), iter((1, 3))):
        assert train_with(lambda draw, some=some: some) == [2]


class Unlucky:
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, draw: Draw) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [None, (0, 99), 3, (), "01", ([0],), (0, 1.5)])
def test_a_sampler_that_returns_no_clients_is_named(returned: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        train_with(Unlucky(returned))
    assert str(caught.value) == (
        f"the sampler Unlucky returned {returned!r} for round 1; return a tuple of at least 1 of the clients in "
        "draw.samples, which are 0, 1, 2, 3"
    )


def noone(draw: Draw) -> None:
    return None


def test_a_sampler_that_is_a_function_is_called_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^the sampler noone returned None for round 1; return a tuple of at least"):
        train_with(noone)
