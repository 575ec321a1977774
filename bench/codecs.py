"""What a codec costs, and what it saves on a link of 1 Gbit/s: 8 MB of float32, encoded and decoded.

The medians of turns, in this process. Below them: rounds of SFL-V1 without codecs and with `none`, side by side; a
codec that does nothing must cost nothing.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tables import Row, options, show
from torch import Tensor

from cutlayer import Batching, Split, codecs, iid, methods, models, optim
from cutlayer.core import tree
from cutlayer.core.codec import Codec, Coder
from cutlayer.core.coders import ErrorFeedback
from cutlayer.core.kinds import ACTIVATIONS
from cutlayer.data import sources
from cutlayer.runs.simulation import Simulation

SAMPLES, FEATURES = 64, (32, 32, 32)  # 8 MB of float32
TURNS, WARM_UP = 15, 3
ROUNDS = 30
RATE = 1e9 / 8  # bytes a second
BARS = {"int8": 0.5}  # of the time that it saves
NOTHING_COSTS = 1.05
SHIPPED: list[Any] = [
    "none",
    "bf16",
    "int8",
    {"name": "int8", "per": "channel"},
    {"name": "int8", "per": "feature"},
    "int4",
    {"name": "topk", "share": 0.05},
    {"name": "randtopk", "share": 0.05},
    {"name": "lowrank", "rank": 2},
    {"name": "clip", "norm": 1.0},
    {"name": "gaussian", "std": 0.1, "clip": 1.0},
    {"name": "laplace", "scale": 0.1, "clip": 1.0},
    [{"name": "topk", "share": 0.05}, "int8"],
]


def main() -> None:
    args = options(__doc__.splitlines()[0])
    samples, turns, rounds = (2, 2, 2) if args.quick else (SAMPLES, TURNS, ROUNDS)
    a = torch.randn(samples, *FEATURES, generator=torch.Generator().manual_seed(0))
    rows = [row(codecs.build(spec), a, turns) for spec in SHIPPED]
    show([*rows, nothing(rounds)] if args.json else rows, args.json)
    if not args.json:
        print()
        show([nothing(rounds)], args.json)


def row(codec: Codec | ErrorFeedback, a: Tensor, turns: int) -> Row:
    assert isinstance(codec, Codec)
    coder, key = Coder(ACTIVATIONS, codec), torch.tensor(1)
    coded = coder.encode(a, key)
    encode, decode = timed([lambda: coder.encode(a, key), lambda: coder.decode(coded)], turns)
    before, after = tree.num_bytes(a), coder.size(tuple(a.shape), a.dtype)
    saved = (before - after) / RATE
    name, ratio = "none" if codec == codecs.none() else str(codec), (encode + decode) / saved if saved else None
    bar = BARS.get(name)
    return {
        "codec": name,
        "encode, ms": 1e3 * encode,
        "decode, ms": 1e3 * decode,
        "before, KB": before / 1e3,
        "after, KB": after / 1e3,
        "saved at 1 Gbit/s, ms": 1e3 * saved,
        "ratio": ratio,
        "bar": bar,
        "met": None if bar is None or ratio is None else ratio <= bar,
    }


def nothing(rounds: int) -> Row:
    """Rounds of SFL-V1 on the digits, on the engine that stacks clients, where a round is shortest."""
    without, none = (after_rounds(own) for own in ({}, {"activations": "none", "gradients": "none", "model": "none"}))
    plain, coded = timed([without, none], rounds)
    return {
        "rounds": "sfl_v1 on digits",
        "without, ms": 1e3 * plain,
        "with none, ms": 1e3 * coded,
        "ratio": coded / plain,
        "bar": NOTHING_COSTS,
        "met": coded <= NOTHING_COSTS * plain,
    }


def after_rounds(given: dict[str, Any]) -> Callable[[], None]:
    """A function that plays the next round."""
    train = sources.load("digits").train
    torch.manual_seed(0)
    opt = optim.sgd(0.05)
    method = methods.build("sfl_v1", Split(models.build("cnn"), 1), opt, opt)
    sim = Simulation(
        method, train, iid(len(train.y), 5, key=0), batching=Batching(size=32), engine="vmap", codecs=given
    )
    state = sim.start()

    def play() -> None:
        nonlocal state
        state = sim.round(state)

    return play


def timed(sides: list[Callable[[], Any]], turns: int) -> list[float]:
    """The medians of all sides, which take turns."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(WARM_UP + turns):
        for side, taken in zip(sides, seconds, strict=True):
            began = perf_counter()
            side()
            if turn >= WARM_UP:
                taken.append(perf_counter() - began)
    return [median(taken) for taken in seconds]


if __name__ == "__main__":
    main()
