"""The memory meter: what torch's allocator hands out, and what a client needs for a step of each method."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cutlayer import Split, cli, optim
from cutlayer.errors import ConfigError
from cutlayer.meters.memory import highest, peak
from cutlayer.studies.client_memory import ClientMemory, Footprint, client_memory

CPU = torch.device("cpu")
N = 100_000
TENSOR = 4 * N
BENCH = Path(__file__).parents[1] / "bench"


# -- the meter -------------------------------------------------------------------------------------------------------


def test_a_tensor_is_its_bytes() -> None:
    assert peak(lambda: torch.empty(N), CPU) == TENSOR
    assert peak(lambda: [torch.empty(N), torch.empty(N, dtype=torch.float64)], CPU) == 3 * TENSOR
    assert peak(lambda: None, CPU) == 0


def test_memory_freed_or_allocated_before_does_not_count() -> None:
    x = torch.ones(N)

    def chain() -> Tensor:
        y = x
        for _ in range(5):
            y = y.exp()
        return y

    assert peak(chain, CPU) == 2 * TENSOR  # of each operation what comes in and what goes out
    assert peak(lambda: x.exp_(), CPU) == 0


def test_autograd_keeps_what_it_needs() -> None:
    x = torch.ones(N, requires_grad=True)

    def chain() -> Tensor:
        y = x
        for _ in range(5):
            y = y.exp()  # kept: it is its own slope
        return y

    assert peak(chain, CPU) == 5 * TENSOR
    with torch.no_grad():
        assert peak(chain, CPU) == 2 * TENSOR


def test_matrices_multiplied_in_a_chain() -> None:
    a, b = torch.ones(1000, 20), torch.ones(20, 50)
    # 1000 x 50, then 1000 x 20 beside it, then 1000 x 50 again beside that alone
    assert peak(lambda: a @ b @ b.T @ b, CPU) == 4 * (1000 * 50 + 1000 * 20)


def test_temporaries_inside_an_operation_count() -> None:
    x = torch.ones(N)
    assert peak(lambda: torch.logsumexp(x, 0), CPU) >= TENSOR  # the result is one number


def test_leftovers_do_not_disturb_the_next_measurement() -> None:
    kept = []
    assert peak(lambda: kept.append(torch.empty(N)), CPU) == TENSOR
    kept.clear()
    other = [torch.empty(N)]  # very likely at the same address
    assert peak(lambda: (torch.empty(N), other.clear(), torch.empty(2 * N))[-1], CPU) == 3 * TENSOR


def test_freeing_an_unknown_block_does_not_lower_the_peak() -> None:
    assert highest([]) == 0
    assert highest([(1, 10), (2, 5), (1, -10), (3, 7), (2, -5)]) == 15
    assert highest([(9, -100), (1, 10), (9, -100), (2, 5)]) == 15
    assert highest([(1, 10), (1, -10), (1, 12)]) == 12  # the address again


def test_the_measured_function_runs_once_and_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    done = []
    peak(lambda: done.append(torch.empty(N).sum()), CPU)
    assert len(done) == 1
    assert capfd.readouterr() == ("", "")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        peak(lambda: None, torch.device("meta"))
    assert str(refused.value) == ("device is 'meta', but it must be cpu or cuda: of others the memory is not known.")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_counts_alike() -> None:
    device = torch.device("cuda")
    x = torch.ones(N, device=device, requires_grad=True)
    rounded = -(-TENSOR // 512) * 512
    assert peak(lambda: torch.empty(N, device=device), device) == rounded
    assert peak(lambda: x.exp().exp().exp(), device) == 3 * rounded
    with torch.no_grad():
        assert peak(lambda: x.exp().exp().exp(), device) == 2 * rounded


# -- a client --------------------------------------------------------------------------------------------------------

WIDTH, WIDE, BATCH = 8, 32, 1 << 15
CUT = 4 * WIDTH * BATCH  # bytes of a tensor of the narrow width
SLACK = CUT // 16  # parameters, directions and numbers


@pytest.fixture(scope="module")
def narrow() -> ClientMemory:
    """Below the cut the batch widens by four and narrows again; the layer that narrows it is frozen."""
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDE, bias=False), nn.Tanh(), nn.Linear(WIDE, WIDTH, bias=False), nn.Linear(WIDTH, 2)
    )
    net[2].requires_grad_(False)
    x, y = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.int64)
    return client_memory(Split(net, 3), optim.adam(1e-3), x, y, overlaps=(0, 2, 5))


def rows_of(found: ClientMemory, work: str) -> list[Footprint]:
    return [row for row in found.rows if row.work == work]


def test_memory_that_a_client_holds_besides_its_step(narrow: ClientMemory) -> None:
    assert narrow.cut_tensor == CUT
    named = [(row.work, row.overlap) for row in narrow.rows]
    hybrids = [("HO-SFL", 0), ("HO-SFL", 2), ("HO-SFL", 5)]
    assert named == [("inference", None), *hybrids, ("ZO-SFL", None), ("SFL", None), ("full local training", None)]
    lower, upper = 4 * 2 * WIDTH * WIDE, 4 * (2 * WIDTH + 2)  # bytes of the layers; half of the lower ones train
    inference, *others, full = narrow.rows
    assert (inference.weights, inference.optimiser, inference.batch) == (lower, 0, CUT)
    for row in others:
        assert (row.weights, row.optimiser, row.batch) == (lower, 2 * lower // 2, CUT + 8 * BATCH)
    assert (full.weights, full.optimiser) == (lower + upper, 2 * (lower // 2 + upper))
    for row in narrow.rows:
        assert row.peak == row.weights + row.optimiser + row.batch + row.step
        assert narrow.relative(row) == row.peak / inference.peak


def test_a_forward_pass_holds_two_wide_tensors(narrow: ClientMemory) -> None:
    assert narrow.rows[0].step == 8 * CUT


# With five of five ahead, the last pass runs beside the activations and four others: the gradient comes after it.
@pytest.mark.parametrize(("number", "held"), [(0, 2), (1, 2 + 2), (2, 1 + 4)])
def test_ho_sfl_is_inference_with_two_cut_tensors_and_one_for_each_pass_ahead(
    narrow: ClientMemory, number: int, held: int
) -> None:
    row = rows_of(narrow, "HO-SFL")[number]
    assert 0 <= row.step - (8 + held) * CUT < SLACK


def test_zo_sfl_is_inference_with_the_activations_of_the_other_way(narrow: ClientMemory) -> None:
    (row,) = rows_of(narrow, "ZO-SFL")
    assert 0 <= row.step - 9 * CUT < SLACK


def test_sfl_holds_the_graph(narrow: ClientMemory) -> None:
    (row,) = rows_of(narrow, "SFL")
    # behind the Tanh: what it gave, the gradient at that, the gradient before it; the activations and their gradient
    assert 0 <= row.step - (3 * 4 + 2) * CUT < SLACK


def test_local_training_holds_the_graph_but_sends_nothing(narrow: ClientMemory) -> None:
    (row,) = rows_of(narrow, "full local training")
    assert 0 <= row.step - 3 * 4 * CUT < SLACK


@pytest.mark.slow
def test_a_language_model_trains_within_the_memory_of_inference() -> None:
    split, x = decoder(hidden=128, layers=2, places=32)
    found = client_memory(split, optim.adamw(1e-5), x, x, overlaps=(0, 2))
    inference, hybrid, ahead, _, first_order, full = found.rows
    assert found.cut_tensor == 4 * x.numel() * 128
    assert hybrid.peak <= 1.05 * inference.peak + 2 * found.cut_tensor
    assert ahead.peak - hybrid.peak == 2 * found.cut_tensor
    assert 1.5 * hybrid.peak < first_order.peak < full.peak
    lower, _ = split.initial()
    trained = sum(p.numel() * 4 for p in lower.params.values())
    assert inference.weights > 20 * trained  # the base model counts, though it is no state
    assert hybrid.optimiser == 2 * trained


def decoder(*, hidden: int, layers: int, places: int) -> tuple[Split, Tensor]:
    """A LLaMA of random weights with LoRA, half of its layers at the client, and 32 texts."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from cutlayer.models.adapters import adapted
    from cutlayer.models.decoders import CausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": 200}
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    )
    net = CausalLM(adapted(base, rank=2, alpha=4.0))
    return Split(net, 1 + layers // 2), torch.ones(32, places, dtype=torch.int64)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code, stdout and stderr of a command."""

    def call(words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(words.split())
        return (int(left.value.code or 0), *capsys.readouterr())

    return call


def test_profile_tells_a_clients_memory(say: Any) -> None:
    words = "profile mlp --memory --batch 4 --overlap 2 --perturbations 3 --optimiser adamw --cut fc1"
    code, out, err = say(f"{words} --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    told = {key: found[key] for key in ("model", "input", "batch", "perturbations", "overlap", "device", "optimiser")}
    assert told == {
        "model": "mlp", "input": [1, 8, 8], "batch": 4, "perturbations": 3, "overlap": 2, "device": "cpu",
        "optimiser": "adamw",
    }  # fmt: skip
    assert (found["cut"], found["units"][found["cut"] - 1]) == (1, "fc1")
    assert [(row["work"], row["overlap"]) for row in found["rows"]] == [
        ("inference", None),
        ("HO-SFL", 0),
        ("HO-SFL", 2),
        ("ZO-SFL", None),
        ("SFL", None),
        ("full local training", None),
    ]
    inference, hybrid = found["rows"][:2]
    assert inference["batch"] == 4 * 4 * 64 and hybrid["batch"] == inference["batch"] + 4 * 8
    assert hybrid["optimiser"] == 2 * hybrid["weights"]
    assert hybrid["relative"] == hybrid["peak"] / inference["peak"]

    code, out, _ = say(words)
    begin = "mlp, cut after fc1 (1 of 3 units), 4 samples of 1x8x8 on cpu, adamw, 3 perturbations: a cut tensor"
    assert " ".join(out.split()).startswith(begin)  # however wide the terminal is
    assert [line.split("  ")[0] for line in out.splitlines() if " KiB " in line and "cut" not in line] == [
        " inference",
        " HO-SFL",
        " HO-SFL, 2 ahead",
        " ZO-SFL",
        " SFL",
        " full local training",
    ]


def test_half_of_the_units_are_at_the_client_and_norms_are_frozen(say: Any) -> None:
    found = json.loads(say("profile resnet_tiny --memory --batch 2 --input 1x8x8 --json")[1])
    assert (found["cut"], len(found["units"])) == (2, 5)
    assert found["rows"][1]["peak"] > found["rows"][0]["peak"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--batch 4", "--batch is about the memory of a client; add --memory"),
        ("--overlap 0", "--overlap is about the memory of a client; add --memory"),
        (
            "--memory --overlap 9",
            "overlap is 9, but it must be a whole number from 0 to 5, the perturbations.",
        ),
        ("--memory --device meta", "unknown device 'meta'; known: cpu, cuda"),
        ("--memory --cut 0", "cut is 0, but it must be 1 or more: a client without units has nothing to train."),
        ("--memory --optimiser adamv", "unknown optimiser 'adamv'; did you mean 'adam' or 'adamw'?"),
    ],
)
def test_mistakes(say: Any, words: str, complaint: str) -> None:
    assert say(f"profile mlp {words}") == (2, "", f"error: {complaint}\n")


# -- the benchmark ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "met"),
    [
        (("--seq", "16"), True),
        (("--quick",), False),  # beside four texts and layers this narrow, the adapters weigh too much
    ],
)
def test_the_benchmark_measures_every_client_and_checks_the_bar(how: tuple[str, ...], met: bool) -> None:
    pytest.importorskip("peft")
    command = [sys.executable, BENCH / "client_memory.py", *how, "--json"]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    names = ["inference", "HO-SFL", "HO-SFL, overlap 2", "ZO-SFL", "SFL", "full local training"]
    assert [row["client"] for row in rows] == names
    inference, hybrid = rows[:2]
    for row in rows:
        assert row["of inference"] == pytest.approx(row["peak, MiB"] / inference["peak, MiB"])
        assert row["peak, MiB"] > row["weights, MiB"] + row["optimiser, MiB"] + row["step, MiB"]  # and the batch
    beyond = hybrid["peak, MiB"] - 2 * hybrid["cut tensor, MiB"]
    assert hybrid["ratio"] == pytest.approx(beyond / inference["peak, MiB"])
    assert (hybrid["bar"], hybrid["met"]) == (1.05, met)
    assert [row["bar"] for row in rows[2:]] == [None] * 4
