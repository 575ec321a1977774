"""Peak memory of a client that fine-tunes half of a decoder: inference, HO-SFL, ZO-SFL, SFL, full local training.

A LLaMA-architecture model of random weights with LoRA, a batch of 32, half of the layers at the client, AdamW, and a
stand-in for the server. HO-SFL is to stay within 1.05 times inference, beyond the two cut tensors that it holds. With
`--side-by-side` it also makes so many of its perturbed passes at once: what that takes, and the time that it saves.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from tables import Row, options, show
from torch import Tensor

from cutlayer import Split, hosfl
from cutlayer.core import directions
from cutlayer.core.state import Part
from cutlayer.meters.memory import peak
from cutlayer.models import causal_lm
from cutlayer.models.language import SHAPES
from cutlayer.optim.optimiser import adamw
from cutlayer.pieces.hybrid import HybridClient
from cutlayer.studies.client_memory import ClientMemory, Footprint, client_memory

BAR = 1.05
CUT_TENSORS = 2  # the activations and their gradient
RANK = 8
PASSES = 5  # perturbed ones
OVERLAPS = (0, 2)
TURNS = 9
KEY = 0  # of the directions
OPT = adamw(1e-5)
MIB = 2**20
MIDDLE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8000}
SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 100}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
SIDE_BY_SIDE = f"rows for N of HO-SFL's {PASSES} perturbed passes at once, and the time of a step"
# GB of nvidia-smi, so with the CUDA context and what the allocator keeps in reserve; HO-SFL, Figure 4(b).
PAPER = {"inference": 4.01, "HO-SFL": 4.14, "SFL": 8.78, "full local training": 20.81}


def main() -> None:
    args = options(
        __doc__.splitlines()[0],
        ("--shapes", {"choices": SHAPES, "help": "measure a published model's shapes instead of a middling one"}),
        ("--seq", {"type": int, "default": 64, "help": "tokens of a sample"}),
        ("--batch", {"type": int, "default": 32, "help": "samples"}),
        ("--dtype", {"default": "float32", "help": "of the frozen base: float32 or bfloat16"}),
        ("--attention", {"default": "eager", "help": "eager or sdpa"}),
        ("--device", {"default": "cpu", "help": "cpu or cuda"}),
        ("--side-by-side", {"type": int, "nargs": "+", "default": [], "metavar": "N", "help": SIDE_BY_SIDE}),
    )
    torch.manual_seed(0)
    batch, seq = (4, 16) if args.quick else (args.batch, args.seq)
    if args.shapes and not args.quick:
        net = causal_lm(args.shapes, RANK, dtype=args.dtype, attention=args.attention)
    else:
        net = drawn(SMALL if args.quick else MIDDLE, args.dtype, args.attention)
    net.to(args.device)
    x, y = torch.randint(1, 100, (2, batch, seq), device=args.device)
    split = Split(net, 1 + len(net.layers) // 2)  # the embedding is a unit as well
    found = client_memory(split, OPT, x, y, perturbations=PASSES, overlaps=OVERLAPS)
    steps = {num: step_of(split, num, x) for num in (1, *args.side_by_side)}
    found = replace(found, rows=(*found.rows, *(grouped(found, num, steps[num], x) for num in args.side_by_side)))
    times = milliseconds(steps, 2 if args.quick else TURNS) if args.side_by_side else {}
    show(rows(found, PAPER if args.shapes == "llama-3.2-1b" else {}, times), args.json)


def drawn(sizes: dict[str, int], dtype: str, attention: str) -> torch.nn.Module:
    """A model of these sizes."""
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**sizes, **HEADS, tie_word_embeddings=True).save_pretrained(folder)
        return causal_lm(folder, RANK, dtype=dtype, attention=attention, random=True)


def step_of(split: Split, side_by_side: int, x: Tensor) -> Callable[[], Part]:
    """A step of HO-SFL's client with so many passes at once."""
    method = hosfl(model=split, client_opt=OPT, server_opt=OPT, perturbations=PASSES, side_by_side=side_by_side)
    part, seeds = OPT.begin(split.initial()[0], 0), directions.seeds(KEY, PASSES)
    return partial(step, method.client, part, x, seeds)


def step(client: HybridClient, part: Part, x: Tensor, seeds: Tensor) -> Part:
    z = client.forward(part, x, None)
    slopes = client.slopes(part, x, None, seeds, z, torch.randn_like(z))
    del z
    return client.update(part, seeds, slopes)


def grouped(found: ClientMemory, side_by_side: int, run: Callable[[], Part], x: Tensor) -> Footprint:
    """HO-SFL's row, but with so many passes at once."""
    one_by_one = next(row for row in found.rows if row.overlap == 0)
    return replace(one_by_one, work=named(side_by_side), step=peak(run, x.device))


def named(side_by_side: int) -> str:
    return f"HO-SFL, {side_by_side} side by side" if side_by_side > 1 else "HO-SFL"


def milliseconds(steps: dict[int, Callable[[], Part]], turns: int) -> dict[str, float]:
    """Of a step, the median over turns, by the name of the row; what slows the machine for a while slows all."""
    seconds: dict[int, list[float]] = {num: [] for num in steps}
    for _ in range(turns + 1):
        for num, run in steps.items():
            seconds[num].append(timed(run))
    return {named(num): 1e3 * statistics.median(taken[1:]) for num, taken in seconds.items()}  # the first warms up


def timed(run: Callable[[], Part]) -> float:
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def rows(found: ClientMemory, paper: dict[str, float], times: dict[str, float]) -> list[Row]:
    """A row for each thing that the client may do; the bar is HO-SFL's, pass by pass without overlap."""
    inference = found.rows[0].peak
    made = []
    for row in found.rows:
        name = f"{row.work}, overlap {row.overlap}" if row.overlap else row.work
        ratio = None if row.overlap is None else (row.peak - CUT_TENSORS * found.cut_tensor) / inference
        bar = BAR if name == "HO-SFL" else None
        made.append(
            {
                "client": name,
                "weights, MiB": row.weights / MIB,
                "optimiser, MiB": row.optimiser / MIB,
                "step, MiB": row.step / MIB,
                "peak, MiB": row.peak / MIB,
                "of inference": found.relative(row),
                "cut tensor, MiB": found.cut_tensor / MIB,
                "ratio": ratio,
                "bar": bar,
                "met": None if bar is None or ratio is None else ratio <= bar,
                **({"step, ms": times.get(name)} if times else {}),
                **({"paper, GB": paper.get(name)} if paper else {}),
            }
        )
    return made


if __name__ == "__main__":
    main()
