"""Specifies `cutlayer bench`: its rows compute the same thing, its table tells what was timed, mistakes are told."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graph_engine import Short

from cutlayer import benching, cli
from cutlayer.benching import Case, cases
from cutlayer.benching.baselines import ByHand, Limit
from cutlayer.benching.cases import BenchProblem
from cutlayer.benching.contenders import OnEngine
from cutlayer.core.method import global_model
from cutlayer.engines.graph.engine import Graph
from cutlayer.errors import ConfigError
from cutlayer.models import resnet_tiny

BENCH = Path(__file__).parents[1] / "bench"
QUICK = ("--clients", "2", "--batch", "4", "--steps", "1", "--turns", "1")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case(**changes: Any) -> Case:
    settings: dict[str, Any] = {
        "model": "resnet_tiny", "clients": 3, "batch": 4, "precision": "fp32", "device": "cpu", "steps": 4, "turns": 1,
        "engines": ("loop",), "baselines": ("hand",),
    }  # fmt: skip
    return Case(**settings | changes)


def after_a_turn(problem: BenchProblem) -> tuple[OnEngine, ByHand]:
    """The loop engine and the loop by hand, from the same weights over the same batches."""
    ours, theirs = OnEngine(problem, "loop"), ByHand(problem)
    assert ours.turn() == theirs.turn() == 3 * 4
    return ours, theirs


# -- the rows compute the same thing ----------------------------------------------------------------------------------


def test_the_loop_by_hand_trains_what_the_engine_trains() -> None:
    problem = BenchProblem(case())
    ours, theirs = after_a_turn(problem)
    assert theirs.loss() == pytest.approx(ours.loss(), rel=1e-5)
    merged = problem.split.export(global_model(ours.state))
    for name, start in problem.net.named_parameters():
        by_hand = torch.stack([net.get_parameter(name).detach() for net in theirs.nets]).mean(0)
        assert not torch.equal(by_hand, start), name
        assert torch.allclose(by_hand, merged[name], rtol=1e-5, atol=1e-6), name


def test_bfloat16_is_near_single_precision_but_not_it() -> None:
    exact, near = (after_a_turn(BenchProblem(case(precision=precision)))[1].loss() for precision in ("fp32", "bf16"))
    assert near == pytest.approx(exact, rel=2e-2)
    assert near != exact


def test_jax_trains_what_the_loop_by_hand_trains() -> None:
    pytest.importorskip("jax")
    from cutlayer.benching.jax_baseline import JaxVmap, _in_jax

    problem = BenchProblem(case())
    by_hand, in_jax = ByHand(problem), JaxVmap(problem)
    by_hand.turn()
    assert in_jax.turn() == 3 * 4
    assert in_jax.loss() == pytest.approx(by_hand.loss(), rel=1e-5)
    assert sum(array[0].size for array in in_jax.state.params.values()) == problem.num_params
    for client, net in enumerate(by_hand.nets):
        for name, value in net.named_parameters():
            theirs = torch.tensor(in_jax.state.params[name][client].tolist())
            assert torch.allclose(theirs, _in_jax(value.detach()), rtol=1e-4, atol=1e-5), name
        for name, value in net.named_buffers():
            if "running" in name:
                theirs = torch.tensor(in_jax.state.stats[name][client].tolist())
                assert torch.allclose(theirs, value, rtol=1e-4, atol=1e-5), name


def test_the_limit_is_one_model_on_the_merged_batch() -> None:
    problem = BenchProblem(case(steps=1))
    limit = Limit(problem)
    assert limit.turn() == 3
    assert limit.batch.shape == (3 * 4,)
    merged = problem.batches(0).flatten()
    net = resnet_tiny(in_channels=3)
    net.load_state_dict(problem.net.state_dict())
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    torch.nn.functional.cross_entropy(net(problem.images[merged]), problem.data.y[merged]).backward()
    opt.step()
    for name, value in net.named_parameters():
        assert torch.allclose(value, limit.net.get_parameter(name), rtol=1e-4, atol=1e-6), name


# -- the document --------------------------------------------------------------------------------------------------


def test_rows_have_ratios_to_the_limit_and_to_the_loop_by_hand() -> None:
    found = benching.measure(case(steps=1, turns=3, baselines=("hand", "limit")))
    loop, hand, limit = found["rows"]
    assert [row["name"] for row in found["rows"]] == ["loop", "hand", "limit"]
    for row in (loop, hand, limit):
        assert row["obstacle"] is None
        middle = sorted(turn["seconds"] for turn in row["turns"])[1]
        assert row["ms_per_step"] == pytest.approx(1e3 * middle)
        assert row["client_steps_per_second"] == pytest.approx(3 / middle)
        assert row["times_the_limit"] == row["ms_per_step"] / limit["ms_per_step"]
        assert row["faster_than_by_hand"] == hand["ms_per_step"] / row["ms_per_step"]
    assert loop["first_loss"] == pytest.approx(hand["first_loss"], rel=1e-5)
    assert limit["first_loss"] is None


@pytest.mark.slow
def test_whole_rounds_are_counted_in_client_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SAMPLES_HELD", 40)
    found = benching.measure(case(clients=2, batch=8, baselines=(), end_to_end=True))
    (row,) = found["rows"]
    assert found["case"]["samples"] == 2 * 5 * 40
    ((steps,), (seconds,)) = zip(*((turn["client_steps"], turn["seconds"]) for turn in row["turns"]), strict=True)
    assert steps > 0 and steps % 5 == 0  # as many in each of the epochs
    assert row["client_steps_per_second"] == pytest.approx(steps / seconds)


def test_a_row_that_fails_tells_why_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ByHand, of_clients: torch.Tensor) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(ByHand, "step", broken)
    monkeypatch.setitem(sys.modules, "jax", None)
    found = benching.measure(case(steps=1, engines=("loop", "graph"), baselines=("hand", "jax")))
    loop, graph, hand, jax = found["rows"]
    assert loop["ms_per_step"] > 0 and loop["faster_than_by_hand"] is None
    assert graph["obstacle"] == "the engine graph needs a GPU, and this is on the cpu"
    assert (hand["obstacle"], hand["ms_per_step"]) == ("out of memory", None)
    assert jax["obstacle"] == "jax is not installed"


def test_an_engine_that_had_too_little_memory_is_not_timed() -> None:
    ours = OnEngine(BenchProblem(case()), "loop")
    ours.engine, ours.simulation.backend.engine = "graph", Graph(Short(torch.device("cpu")), 3)
    with pytest.raises(ConfigError, match="memory is too short for 3 clients at a time"):
        for _ in range(3):
            ours.turn()


def test_models_that_are_not_written_in_jax_are_told_of() -> None:
    from cutlayer.benching.jax_baseline import blocks_of
    from cutlayer.models import resnet50, vgg11

    with pytest.raises(ConfigError, match=r"^only residual networks are written in JAX; try resnet18$"):
        blocks_of(vgg11())
    with torch.device("meta"), pytest.raises(ConfigError, match=r"^only residual networks of basic blocks are written"):
        blocks_of(resnet50())


# -- the command ------------------------------------------------------------------------------------------------------


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "--device", "cpu", *words])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_json_goes_to_stdout_and_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    file.write_text("before")
    words = (*QUICK, "--engines", "loop", "--baselines", "none", "--output", str(file), "--json")
    code, out, err = say(capsys, *words)
    found = json.loads(out)
    assert code == 0 and json.loads(file.read_text()) == found
    assert found.keys() == {"command", "case", "machine", "rows"}
    assert found["command"] == (
        "cutlayer bench --clients 2 --batch 4 --device cpu --steps 1 --turns 1 --engines loop --baselines none "
        f"--output {file} --json"
    )
    assert found["case"]["seed"] == 0
    assert "cutlayer, engine loop: ready after " in err
    assert err.endswith(f"document: {file}\n")


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = say(capsys, *QUICK, "--engines", "loop", "--baselines", "hand")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 80 and not line.startswith("|")] == []
    assert " ".join(out.split()).startswith(
        "A step of SMoFi: 2 clients x batch 4, resnet_tiny (5,214 parameters) cut after layer2.0, fp32"
    )
    assert "| eager loop by hand" in out


def test_nothing_timed_is_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = (*QUICK, "--engines", "graph", "--baselines", "none", "--output", str(file))
    code, out, err = say(capsys, *words)
    assert (code, out, file.exists()) == (2, "", False)
    assert err.splitlines()[-1] == (
        "error: nothing could be timed: cutlayer, engine graph: the engine graph needs a GPU, and this is on the cpu"
    )
    assert "turn 1" not in err


def test_an_interrupted_benchmark_writes_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(self: OnEngine) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(OnEngine, "turn", interrupted)
    file = tmp_path / "found.json"
    code, out, err = say(capsys, *QUICK, "--engines", "loop", "--output", str(file))
    assert (code, out, file.exists()) == (130, "", False)
    assert err == "cutlayer, engine loop: warming up\nstopped; nothing was written\n"


MISTAKES = {
    "--engines looop": "unknown engine 'looop'; did you mean 'loop'?",
    "--engines ray": "bench times graph, loop and vmap, not ray",
    "--baselines hnd": "unknown baseline 'hnd'; did you mean 'hand'?",
    "--model char_transformer": "the benchmark trains on images of 32 x 32, which char_transformer does not read",
    "--cut layer9": "ResNet has no unit 'layer9' to cut after; did you mean 'layer3.0'? It has 1 'stem', 2 'layer1.0', "
    "3 'layer2.0', 4 'layer3.0', 5 'head'.",
    "--cut 0": "cut 0 leaves one side nothing to train; cut between layers with weights",
    "--clients 0": "clients is 0, but it must be a whole number above 0.",
    "--batch 1": "batch is 1, but it must be a whole number above 1.",
    "--engines none --baselines none": "there is nothing to time; name an engine or a baseline",
    "--end-to-end --baselines hand": "end to end there are no baselines, only engines; leave the baselines out",
    "--end-to-end --batch 501": "batch is 501, but it must be 500 at most.",
    "--end-to-end --steps 5": "end to end a round is whole epochs, not so many steps; leave the steps out",
    "--output .": ". is a folder; name a file for --output",
    "--output nowhere/found.json": "there is no folder nowhere to write found.json into; make it first",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_told_before_anything_is_timed(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert say(capsys, *words.split()) == (2, "", f"error: {MISTAKES[words]}\n")


def recorded() -> dict[str, dict[str, Any]]:
    """The documents that were kept, by name."""
    return {file.stem: json.loads(file.read_text()) for file in (BENCH / "results").glob("*.json")}


def test_the_tables_in_the_readme_are_those_of_the_documents() -> None:
    readme = (BENCH / "README.md").read_text()
    for name, document in recorded().items():
        title, *lines = benching.text(document).splitlines()
        table = "\n".join(line for line in lines if line.startswith("|"))
        assert f"`results/{name}.json`. {title}:\n\n{table}\n" in readme
        assert f"--output bench/results/{name}.json\n" in readme


def test_the_recorded_documents_keep_the_bars() -> None:
    rows = {name: {row["name"]: row for row in document["rows"]} for name, document in recorded().items()}
    step = rows["step-bf16"]
    assert step["graph"]["times_the_limit"] <= 1.5
    assert step["graph"]["faster_than_by_hand"] >= 8
    assert step["jax"]["ms_per_step"] / step["graph"]["ms_per_step"] >= 1.5
    assert rows["end-to-end"]["graph"]["client_steps_per_second"] >= 1000
    few, many = (rows[n]["graph"]["client_steps_per_second"] for n in ("step-bf16", "clients-100"))
    assert few / many <= 1.2  # the time of a client's step with 100 clients over that with 20
