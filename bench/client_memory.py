"""Peak memory of a client that fine-tunes half of a decoder: inference, HO-SFL, ZO-SFL, SFL, full local training.

A LLaMA-architecture model of random weights with LoRA, a batch of 32, half of the layers at the client, AdamW, and a
stand-in for the server. HO-SFL is to stay within 1.05 times inference, beyond the two cut tensors that it holds.
"""

import tempfile

import torch
from tables import Row, options, show

from cutlayer import Split
from cutlayer.models import causal_lm
from cutlayer.models.shapes import SHAPES
from cutlayer.optim import adamw
from cutlayer.planning.client_memory import ClientMemory, client_memory

BAR = 1.05
CUT_TENSORS = 2  # the activations and their gradient
RANK = 8
OVERLAPS = (0, 2)
MIB = 2**20
MIDDLE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8000}
SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 100}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
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
    found = client_memory(split, adamw(1e-5), x, y, overlaps=OVERLAPS)
    show(rows(found, PAPER if args.shapes == "llama-3.2-1b" else {}), args.json)


def drawn(sizes: dict[str, int], dtype: str, attention: str) -> torch.nn.Module:
    """A model of these sizes."""
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**sizes, **HEADS, tie_word_embeddings=True).save_pretrained(folder)
        return causal_lm(folder, RANK, dtype=dtype, attention=attention, random=True)


def rows(found: ClientMemory, paper: dict[str, float]) -> list[Row]:
    """A row for each thing that the client may do; the bar is HO-SFL's without overlap."""
    inference = found.rows[0].peak
    made = []
    for row in found.rows:
        ratio = None if row.overlap is None else (row.peak - CUT_TENSORS * found.cut_tensor) / inference
        bar = BAR if row.overlap == 0 else None
        made.append(
            {
                "client": f"{row.work}, overlap {row.overlap}" if row.overlap else row.work,
                "weights, MiB": row.weights / MIB,
                "optimiser, MiB": row.optimiser / MIB,
                "step, MiB": row.step / MIB,
                "peak, MiB": row.peak / MIB,
                "of inference": found.relative(row),
                "cut tensor, MiB": found.cut_tensor / MIB,
                "ratio": ratio,
                "bar": bar,
                "met": None if bar is None or ratio is None else ratio <= bar,
                **({"paper, GB": None if row.overlap else paper.get(row.work)} if paper else {}),
            }
        )
    return made


if __name__ == "__main__":
    main()
