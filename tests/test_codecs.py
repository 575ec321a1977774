"""Specifies the codecs: their numbers, bounds, bytes and bits, what they refuse, and what error feedback adds up to."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import resnet
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap

from cutlayer import codecs
from cutlayer.core import directions, tree
from cutlayer.core.codec import FLOATS, NOTHING, Codec, Coder, codec
from cutlayer.core.coders import ErrorFeedback, coder
from cutlayer.core.kinds import ACTIVATIONS, MODEL
from cutlayer.core.state import Model
from cutlayer.errors import ConfigError, UnknownNameError, UsageError, WireError
from cutlayer.runs.codecs import coders
from cutlayer.split import Split

KEY = torch.tensor(12345)
MASK = (1 << 64) - 1
CLIP, TOPK = {"name": "clip", "norm": 1.0}, {"name": "topk", "share": 0.1}
SHIPPED: list[Any] = [
    "bf16",
    "int8",
    {"name": "int8", "per": "channel"},
    {"name": "int8", "per": "feature"},
    {"name": "int8", "per": "tensor"},
    "int4",
    {"name": "int4", "per": "channel"},
    {"name": "int4", "per": "feature"},
    {"name": "int4", "per": "tensor"},
    TOPK,
    {"name": "randtopk", "share": 0.1, "alpha": 0.4},
    {"name": "lowrank", "rank": 2},
    CLIP,
    {"name": "gaussian", "std": 0.1, "clip": 1.0},
    {"name": "laplace", "scale": 0.1, "clip": 1.0},
    [TOPK, "bf16"],
    [TOPK, "int8"],
    [TOPK, "int4"],
    [CLIP, TOPK, "int4"],
    [{"name": "gaussian", "std": 0.1}, {"name": "randtopk", "share": 0.1}, "int8"],
]
IDS = [str(codecs.build(spec)) for spec in SHIPPED]
USUAL = (torch.float32, torch.bfloat16)
EACH_TYPE = [pytest.param(own, marks=() if own in USUAL else pytest.mark.slow, id=str(own)) for own in FLOATS]
SHAPES = [(4, 3, 8, 9), (2, 700), (4, 6), (3,), (1, 1), (2, 512)]


def made(spec: Any) -> Codec:
    built = codecs.build(spec)
    assert not isinstance(built, ErrorFeedback)
    return built


def there(spec: Any, a: Tensor, key: Tensor = KEY) -> Any:
    """The code of a tensor with rows."""
    return made(spec).encode(a, key)


def back(spec: Any, a: Tensor, key: Tensor = KEY) -> Tensor:
    """What arrives of a tensor with rows."""
    own = made(spec)
    return own.decode(own.encode(a, key), tuple(a.shape), a.dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbers(code: Tensor) -> list[Any]:
    found: list[Any] = code.tolist()
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two codes have the same types and bits; NaN is NaN."""
    pairs = list(zip(tree.tensors(a), tree.tensors(b), strict=True))
    return tree.signature(a) == tree.signature(b) and all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(0.0), y.nan_to_num(0.0))
        if x.is_floating_point()
        else torch.equal(x, y)
        for x, y in pairs
    )


# -- golden numbers ----------------------------------------------------------------------------------------------------


def test_bf16_rounds_to_eight_bits_and_ties_to_even() -> None:
    step = 2**-7  # between numbers of bfloat16 from 1 to 2
    a = torch.tensor([[1 + step / 2, 1 + 3 * step / 2, 1 + 0.6 * step, -3.0, 3.39e38]])
    assert numbers(back("bf16", a)) == [[1.0, 1 + 2 * step, 1 + step, -3.0, 3.3895313892515355e38]]
    assert there("bf16", a).dtype == torch.bfloat16
    assert torch.equal(there("bf16", a.half()), a.half())  # 16 bits stay 16 bits
    assert numbers(back("bf16", torch.tensor([[3.4e38]]))) == [[math.inf]]  # beyond the range of bfloat16


def test_int8_divides_by_the_largest_over_127() -> None:
    # 63.5 / 127 = 0.5, so the multiples are 127, -2, 0.6, 0.5 and 1.5; halves go to the even number.
    a = torch.tensor([[63.5, -1.0, 0.3, 0.25, 0.75], [0.0, 0.0, -127.0, 126.4, 1.0]])
    code = there("int8", a)
    assert numbers(code["scales"]) == [[0.5], [1.0]]
    assert numbers(code["integers"]) == [[127, -2, 1, 0, 2], [0, 0, -127, 126, 1]]
    assert numbers(back("int8", a)) == [[63.5, -1.0, 0.5, 0.0, 1.0], [0.0, 0.0, -127.0, 126.0, 1.0]]


def test_int4_puts_two_numbers_into_a_byte() -> None:
    a = torch.tensor([[7.0, -7.0, 3.2, -1.0, 2.0]])
    code = there("int4", a)
    assert numbers(code["scales"]) == [[1.0]]
    # 7 and -7 (9 of 16), 3 and -1 (15 of 16), 2 and the padding
    assert numbers(code["integers"]) == [[7 + 16 * 9, 3 + 16 * 15, 2]]
    assert numbers(back("int4", a)) == [[7.0, -7.0, 3.0, -1.0, 2.0]]


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
def test_scales_are_shared_per_sample_channel_feature_or_tensor(name: str, most: int) -> None:
    a = torch.tensor([[[1.0, 2.0], [4.0, -8.0]], [[16.0, 32.0], [-64.0, 128.0]]]) * most  # sample, channel, feature
    expected = {
        "sample": [[[8.0]], [[128.0]]],
        "channel": [[[2.0], [8.0]], [[32.0], [128.0]]],
        "feature": [[[4.0, 8.0]], [[64.0, 128.0]]],
        "tensor": [[[128.0]]],
    }
    for per, scales in expected.items():
        code = there({"name": name, "per": per}, a)
        assert numbers(code["scales"]) == scales
        whole = (a / torch.tensor(scales)).round()
        assert torch.equal(back({"name": name, "per": per}, a), whole * torch.tensor(scales))
    flat = a.flatten(1)  # of two axes: a sample is one vector
    for per in ("sample", "channel", "feature"):
        assert numbers(there({"name": name, "per": per}, flat)["scales"]) == [[8.0], [128.0]]


def test_float64_goes_as_far_as_its_scale() -> None:
    for largest in (1e39, 127 * 3.4e38):
        a = double([[largest, -largest / 127, 0.0]])
        torch.testing.assert_close(back("int8", a), a, rtol=1e-7, atol=0)
    assert numbers(back("int8", double([[127 * 3.5e38, 0.0]])).isfinite()) == [[False, False]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_and_the_smallest_numbers_are_rounded_too(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for name, most in (("int8", 127), ("int4", 7)):
        if dtype != torch.float64:
            got = back(name, torch.tensor([[info.max, -info.max, info.max / 2]], dtype=dtype)).double()
            torch.testing.assert_close(got / info.max, double([[1, -1, math.ceil(most / 2) / most]]), rtol=0.01, atol=0)
        tiny = back(name, torch.tensor([[info.smallest_normal / 4, 0.0]], dtype=dtype))  # a scale is not subnormal
        assert bool(tiny.isfinite().all()) and float(tiny.abs().max()) <= info.smallest_normal


def test_topk_keeps_the_lowest_of_equal_ones() -> None:
    a = torch.tensor([[1.0, -3.0, 2.0, -2.0, 0.0, 2.0], [0.0] * 6, [5.0] * 6])
    code = there({"name": "topk", "share": 0.5}, a)
    assert numbers(code["values"]) == [[-3.0, 2.0, -2.0], [0.0] * 3, [5.0] * 3]
    assert numbers(code["places"]["bits"]) == [[0b001110], [0b000111], [0b000111]]  # less than three bytes
    assert code["places"]["bits"].dtype == torch.uint8
    assert numbers(back({"name": "topk", "share": 0.5}, a))[0] == [0.0, -3.0, 2.0, -2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("share", "d", "k"), [(0.1, 10, 1), (0.1, 11, 2), (0.3, 10, 3), (0.07, 100, 7), (1e-9, 5, 1), (0.999, 5, 5)]
)
def test_the_share_is_rounded_up_but_not_for_rounding(share: float, d: int, k: int) -> None:
    assert there({"name": "topk", "share": share}, normal(2, d))["values"].shape == (2, k)  # 0.07 * 100 > 7 in floats


def test_places_of_long_rows_are_bytes_within_blocks() -> None:
    a = torch.zeros(2, 600)
    a[0, [5, 255, 256, 599]] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    a[1, [512, 513, 514, 515]] = 1.0
    code = there({"name": "topk", "share": 4 / 600}, a)
    assert numbers(code["values"]) == [[1.0, -2.0, 3.0, -4.0], [1.0] * 4]
    assert numbers(code["places"]["within"]) == [[5, 255, 0, 87], [0, 1, 2, 3]]  # 599 - 512 = 87
    assert numbers(code["places"]["counts"]) == [[2, 1, 1], [0, 0, 4]]
    assert torch.equal(back({"name": "topk", "share": 4 / 600}, a), a)
    assert tree.num_bytes(code) == 2 * (4 * 4 + 4 + 3 * 2)


@pytest.mark.parametrize(
    ("d", "k", "as_bits"),
    [(16, 2, False), (16, 3, True), (24, 3, False), (300, 33, False), (300, 34, False), (300, 35, True)],
)
def test_places_take_a_bit_for_each_element_where_that_is_less(d: int, k: int, as_bits: bool) -> None:
    a = torch.randperm(2 * d, generator=torch.Generator().manual_seed(0)).float().view(2, d) + 1
    share = {"name": "topk", "share": k / d}
    places = there(share, a)["places"]
    assert (isinstance(places, dict) and "bits" in places) == as_bits
    in_bytes = k + (4 if d > 256 else 0)  # 34 + 4 is no more than 300 / 8, rounded up
    assert tree.num_bytes(places) == 2 * min(in_bytes, math.ceil(d / 8))
    kept = a.topk(k, dim=1).values.amin(1, keepdim=True) <= a
    assert torch.equal(back(share, a), torch.where(kept, a, 0.0))


@pytest.mark.parametrize("d", [256, 257, 511, 512, 513])
def test_blocks_end_where_rows_end(d: int) -> None:
    a = torch.arange(1.0, d + 1)[None]  # the last are the largest
    code = there({"name": "topk", "share": 2 / d}, a)
    places = code["places"]
    if d > 256:
        counts = [0] * -(-d // 256)
        for place in (d - 2, d - 1):
            counts[place // 256] += 1
        assert numbers(places["counts"]) == [counts]
        places = places["within"]
    assert numbers(places) == [[(d - 2) % 256, (d - 1) % 256]]
    assert numbers(back({"name": "topk", "share": 2 / d}, a)[0, -3:]) == [0.0, d - 1, d]


def mixed(z: int) -> int:
    """SplitMix64's finaliser, with Python's numbers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


GOLDEN = 0x9E3779B97F4A7C15


def uniform(key: int, stream: int, number: int) -> list[int]:
    """The first numbers below 2^32 of a stream of a key."""
    seed = mixed((mixed(key) + GOLDEN * (stream + 1)) & MASK)
    return [mixed(((i ^ seed) * GOLDEN) & MASK) >> 32 for i in range(number)]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_randtopk_draws_as_by_hand(alpha: float) -> None:
    n, d, k, key = 3, 20, 6, 77
    a = normal(n, d)
    code = there({"name": "randtopk", "share": k / d, "alpha": alpha}, a, torch.tensor(key))
    choices, order = uniform(key, 0, n * k), uniform(key, 1, n * d)
    for row in range(n):
        by_size = sorted(range(d), key=lambda i: -abs(float(a[row, i])))
        number = sum(u < round(alpha * 2**32) for u in choices[row * k : (row + 1) * k])
        drawn = order[row * d : (row + 1) * d]
        first = [sorted(group, key=lambda i: (drawn[i] >> 1, i)) for group in (by_size[:k], by_size[k:])]
        expected = sorted(first[0][: k - number] + first[1][:number])
        found = numbers(code["places"]["bits"][row])
        assert [i for i in range(d) if found[i // 8] >> i % 8 & 1] == expected
        assert torch.equal(code["values"][row], a[row, expected])


def test_lowrank_of_an_outer_product() -> None:
    # [3, 4] has length 5: the left is [0.6, 0.8], and the right 5 [1, 2, 2], but for a common sign.
    a = torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0, 2.0]))[None].double()
    code = there({"name": "lowrank", "rank": 1}, a)
    sign = code["left"][0, 0, 0].sign()
    torch.testing.assert_close(code["left"] * sign, double([[[0.6], [0.8]]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(code["right"] * sign, double([[[5.0], [10.0], [10.0]]]), rtol=2e-6, atol=0)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_lowrank_is_power_iteration(iterations: int) -> None:
    m, n, rank = 12, 20, 3
    a = normal(2, m, 4, 5)
    got = back({"name": "lowrank", "rank": rank, "iterations": iterations}, a).reshape(2, m, n)
    drawn = [mixed((i * GOLDEN) & MASK) & 2047 for i in range(n * rank)]
    start = np.array(drawn, dtype=float).reshape(n, rank) - 1024
    for matrix, found in zip(a.reshape(2, m, n).numpy(), got.numpy(), strict=True):
        q = start
        for _ in range(iterations):
            p, _ = np.linalg.qr(matrix @ q)
            q = matrix.T @ p
        assert np.linalg.norm(found - p @ q.T) <= 1e-5 * np.linalg.norm(matrix)


def test_lowrank_sends_what_it_would_not_shrink_as_it_is() -> None:
    for shape in [(1, 3, 5), (1, 4, 4), (2, 100), (1, 1)]:  # 2 (3 + 5) >= 15 and 2 (4 + 4) >= 16
        a = normal(*shape)
        code = there({"name": "lowrank", "rank": 2}, a)
        assert list(code) == ["as_it_is"] and torch.equal(back({"name": "lowrank", "rank": 2}, a), a)
    assert list(there({"name": "lowrank", "rank": 2}, normal(1, 4, 5))) == ["left", "right"]  # 2 (4 + 5) < 20


def test_clip_scales_long_rows_only() -> None:
    a = double([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.0, -1.0]])
    expected = double([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.0, -1.0]])
    torch.testing.assert_close(back(CLIP, a), expected, rtol=1e-15, atol=0)
    assert torch.equal(back(CLIP, a)[1:], a[1:])
    by_sum = back({"name": "laplace", "scale": 0, "clip": 1.0}, double([[3.0, -4.0], [0.5, 0.5]]))
    torch.testing.assert_close(by_sum, double([[3 / 7, -4 / 7], [0.5, 0.5]]), rtol=1e-15, atol=0)


def test_gaussian_adds_the_normal_numbers_of_its_key() -> None:
    a = double([[3.0, 4.0, 0.0], [0.1, 0.0, 0.0]])
    noise = directions.normals(KEY, 0, 6).view(2, 3)
    assert torch.equal(back({"name": "gaussian", "std": 0.25}, a), a + noise * 0.25)
    clipped = double([[0.6, 0.8, 0.0], [0.1, 0.0, 0.0]])
    torch.testing.assert_close(
        back({"name": "gaussian", "std": 0.25, "clip": 1.0}, a), clipped + noise * 0.25, rtol=0, atol=1e-15
    )


def test_laplace_adds_signed_logarithms() -> None:
    got = back({"name": "laplace", "scale": 0.5}, torch.zeros(2, 3).double())
    hashes = [mixed((mixed(12345) + GOLDEN * i) & MASK) for i in range(6)]
    sizes = [-math.log(((h >> 32) + 1) / 2**32) * 0.5 for h in hashes]
    expected = [size if h % 2 == 0 else -size for h, size in zip(hashes, sizes, strict=True)]
    torch.testing.assert_close(got.flatten(), double(expected), rtol=1e-14, atol=0)


def test_chains_encode_values() -> None:
    a = torch.tensor([[1.0, -3.0, 2.0, -2.0, 0.0, 2.0]])  # of which -3, 2 and -2 are kept
    half = {"name": "topk", "share": 0.5}
    code = there([half, "int8"], a)
    scale = np.float32(3 / 127)
    assert numbers(code["values"]["integers"]) == [[-127, 85, -85]]  # 2 * 127 / 3 = 84.7
    assert numbers(code["values"]["scales"]) == [[float(scale)]]
    assert numbers(code["places"]["bits"]) == [[0b001110]]
    assert numbers(back([half, "int8"], a)) == [[0.0, -127 * scale, 85 * scale, -85 * scale, 0.0, 0.0]]
    code = there([half, "int4"], a)
    assert numbers(code["values"]["integers"]) == [[9 + 16 * 5, 11]]  # -7 and 5 (of 4.7), -5
    assert numbers(code["values"]["scales"]) == [[float(np.float32(3 / 7))]]
    assert there([half, "bf16"], a)["values"].dtype == torch.bfloat16


def test_a_chain_of_three() -> None:
    a = double([[3.0, 0.0, -4.0, 0.0]])  # 0.6 and -0.8 after the clip
    code = there([CLIP, {"name": "topk", "share": 0.5}, "int4"], a)
    scale = float(np.float32(0.8 / 7))
    assert numbers(code["values"]["scales"]) == [[scale]]
    assert numbers(code["values"]["integers"]) == [[5 + 16 * 9]]  # 0.6 * 7 / 0.8 = 5.25, and -7
    assert numbers(code["places"]["bits"]) == [[0b0101]]
    assert numbers(back([CLIP, {"name": "topk", "share": 0.5}, "int4"], a)) == [[5 * scale, 0.0, -7 * scale, 0.0]]


def test_each_codec_of_a_chain_draws_with_a_key_of_its_own() -> None:
    one = {"name": "gaussian", "std": 1.0}
    hashed = directions.mixed(KEY)
    noise = [directions.normals(directions.sibling(hashed, i), 0, 8).view(2, 4) for i in range(2)]
    assert torch.equal(back([one, one], torch.zeros(2, 4).double()), noise[0] + noise[1])


# -- what is nothing, and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "none",
        {"name": "topk", "share": 1.0},
        {"name": "topk", "share": 1},
        {"name": "randtopk", "share": 1.0, "alpha": 0.5},
        {"name": "gaussian", "std": 0},
        {"name": "laplace", "scale": 0.0},
        ["none", "none"],
        {"name": "none", "error_feedback": False},
        {"chain": ["none", {"name": "topk", "share": 1}]},
    ],
)
def test_a_codec_that_does_nothing_is_none(spec: Any) -> None:
    assert codecs.build(spec) == NOTHING
    given = {"activations": spec, "gradients": "int8", "model": spec}
    assert [kind.name for kind in coders(given, Split(resnet(), 1), torch.zeros(1, 1, 8, 8).double())] == ["gradients"]


def test_error_feedback_of_nothing_is_nothing() -> None:
    assert codecs.build({"name": "topk", "share": 1, "error_feedback": True}) == NOTHING
    assert coder("model", codecs.error_feedback(NOTHING)) is None


def test_none_in_a_chain_leaves_the_others() -> None:
    assert codecs.build(["none", "int8", "none"]) == codecs.build("int8") == codecs.int8()


def test_without_noise_there_is_the_clip_alone() -> None:
    assert codecs.build({"name": "gaussian", "std": 0, "clip": 2.0}) == codecs.clip(norm=2.0)
    a = normal(3, 5)
    assert torch.equal(back({"name": "gaussian", "std": 0, "clip": 0.5}, a), back({"name": "clip", "norm": 0.5}, a))
    by_sum = codecs.build({"name": "laplace", "scale": 0, "clip": 2.0})
    assert by_sum != codecs.clip(norm=2.0) and str(by_sum) == "clip(2, order 1)"
    assert float(back({"name": "laplace", "scale": 0, "clip": 0.5}, a).abs().sum(1).max()) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["activations", "gradients"])
def test_samples_take_no_error_feedback(kind: str) -> None:
    with pytest.raises(ConfigError) as raised:
        coder(kind, codecs.error_feedback(codecs.int8()))
    assert str(raised.value) == (
        f"{kind} take no error feedback: they belong to samples, and what was lost of one batch says nothing "
        "of the next; models persist, and take it"
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("labels", "any change of a label is another class"),
        ("scalars", "they are a few numbers for each batch"),
        ("slopes", "all clients must replay the same bits"),
        ("statistics", "they are a few numbers for each client"),
        ("settings", "they must arrive as they are"),
        ("setup", "it must arrive as it is"),
        ("sync", "it goes between the servers, and codecs are for what goes up or down"),
    ],
)
def test_some_kinds_have_no_codec(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        coder(kind, codecs.int8())
    known = "activations, gradients, model, auxiliary"
    assert str(raised.value) == f"{kind} cannot be encoded: {reason}; kinds that can: {known}"


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"^unknown kind 'modle'; did you mean 'model'"):
        coder("modle", codecs.int8())


@pytest.mark.parametrize("given", [codecs.topk(share=0.1), codecs.lowrank(rank=1), codecs.clip(norm=1), [TOPK, "int8"]])
def test_auxiliary_models_take_codecs_that_round(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"auxiliary models only go down, as a whole, .* such as int8$"):
        coder("auxiliary", codecs.build(given))
    with pytest.raises(ConfigError, match="auxiliary models only go down"):
        coder("auxiliary", codecs.error_feedback(codecs.int8()))
    assert coder("auxiliary", codecs.int8()) is not None


def test_every_way_to_name_a_codec() -> None:
    topk = codecs.topk(share=0.1)
    whole = codecs.build([TOPK, "int8"])
    assert codecs.build("int8") == codecs.build({"name": "int8"}) == codecs.build(codecs.int8()) == codecs.int8()
    assert codecs.build(TOPK) == codecs.build(topk) == codecs.build([TOPK]) == topk
    assert whole == codecs.build((topk, codecs.int8())) == codecs.chain(topk, codecs.int8())
    assert whole == codecs.build({"chain": [TOPK, "int8"]}) == codecs.build([[TOPK], ["int8"]])
    assert codecs.build({"chain": [TOPK, "int8"], "error_feedback": True}) == ErrorFeedback(whole)
    assert codecs.build({**TOPK, "error_feedback": True}) == ErrorFeedback(topk)
    assert codecs.build(codecs.error_feedback(topk)) == ErrorFeedback(topk)
    assert str(whole) == "topk(0.1), int8"
    assert str(Coder(MODEL, whole, True)) == "topk(0.1), int8 with error feedback"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "lowrank", "rank": 2}, {"name": "lowrank", "rank": 2, "iterations": 3}),
        ({"name": "clip", "norm": 2}, {"name": "laplace", "scale": 0, "clip": 2}),
        ({"name": "gaussian", "std": 0.123457}, {"name": "gaussian", "std": 0.1234567}),
        ({"name": "gaussian", "std": 1}, {"name": "gaussian", "std": 1, "clip": 5}),
        ({"name": "laplace", "scale": 1, "clip": 5.0}, {"name": "laplace", "scale": 1, "clip": 5.0000001}),
        ({"name": "topk", "share": 0.1}, {"name": "topk", "share": 0.10000001}),
        ({"name": "randtopk", "share": 0.1}, {"name": "randtopk", "share": 0.1, "alpha": 0.2}),
        ({"name": "int8"}, {"name": "int8", "per": "channel"}),
    ],
)
def test_codecs_that_differ_are_told_apart(one: Any, other: Any) -> None:
    assert made(one) != made(other) and str(made(one)) != str(made(other))


def test_a_codec_tells_its_options() -> None:
    specs: list[Any] = [
        {"name": "lowrank", "rank": 2, "iterations": 3},
        {"name": "gaussian", "std": 0.1234567, "clip": 1.0},
        {"name": "randtopk", "share": 1 / 3},
    ]
    assert [str(made(spec)) for spec in specs] == [
        "lowrank(2, iterations 3)",
        "gaussian(0.1234567, clip 1)",
        "randtopk(0.3333333333333333, alpha 0.1)",
    ]


@pytest.mark.parametrize("given", ["int9", {"name": "int9"}, {"name": "tpok", "share": 0.1}, [TOPK, "bf61"]])
def test_unknown_names_suggest_near_ones(given: Any) -> None:
    near = {"int9": "int8", "tpok": "topk", "bf61": "bf16"}
    with pytest.raises(UnknownNameError) as raised:
        codecs.build(given)
    word = next(word for word in near if word in str(given))
    assert word in str(raised.value) and near[word] in str(raised.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([{**TOPK, "error_feedback": True}, "int8"], "error feedback is of a whole chain: write { chain = "),
        ([ErrorFeedback(codecs.int8())], "error feedback is of a whole chain"),
        ({"chain": ["int8"], "name": "topk"}, "a table with a chain has no other options but error_feedback"),
        ({"chain": ["int8"], "share": 0.1}, "a table with a chain has no other options but error_feedback"),
        ({}, "a table needs a name"),
        ({"share": 0.1}, "a table needs a name"),
        ({"name": 3}, "a table needs a name"),
        ({"chain": 3}, "chain is 3; it must be a list of codecs"),
        ({"chain": "int8"}, "chain is 'int8'; it must be a list of codecs"),
        ([], 'a chain has no codec; name one, or write "none"'),
        ({"chain": []}, "a chain has no codec"),
        ({"name": "topk", "share": True}, "share is True, but it must be a fraction above 0 and up to 1"),
        ({"name": "gaussian", "std": True}, "std is True, but it must be a number from 0 up"),
        ({"name": "int8", "error_feedback": "yes"}, "error_feedback is 'yes'; it must be true or false"),
        (type(codecs.bf16()), "is no codec; give a name, a table, a list, or an instance of a class with @codec"),
        (3, "3 is no codec"),
        (None, "None is no codec"),
        (["int8", TOPK], "topk(0.1) cannot follow int8, which leaves no tensor of values"),
        (
            [CLIP, {"name": "lowrank", "rank": 1}],
            "lowrank(1) cannot follow clip(1), which leaves no matrices but a row",
        ),
        ([CLIP, "bf16", {"name": "lowrank", "rank": 1}], "cannot follow clip(1), which leaves no matrices"),
        ([TOPK, {"name": "lowrank", "rank": 1}], "lowrank(1) cannot follow topk(0.1), which leaves no matrices"),
        ([{"name": "lowrank", "rank": 1}, "int8"], "int8 cannot follow lowrank(1), which leaves no tensor of values"),
        ({"name": "topk"}, "share"),
        ({"name": "topk", "share": 0}, "share is 0, but it must be a fraction above 0 and up to 1"),
        ({"name": "topk", "share": 1.5}, "share is 1.5, but it must be a fraction above 0 and up to 1"),
        ({"name": "topk", "share": "x"}, "share is 'x', but it must be a fraction above 0 and up to 1"),
        ({"name": "randtopk", "share": 0.1, "alpha": 2}, "alpha is 2, but it must be a probability from 0 to 1"),
        ({"name": "lowrank", "rank": 0}, "rank is 0, but it must be a whole number above 0"),
        ({"name": "clip", "norm": 0}, "norm is 0, but it must be a number above 0"),
        ({"name": "gaussian", "std": -1}, "std is -1, but it must be a number from 0 up"),
        ({"name": "laplace", "scale": math.nan}, "scale is nan, but it must be a number from 0 up"),
        ({"name": "gaussian", "std": 0, "clip": 0}, "clip is 0, but it must be a number above 0"),
        ({"name": "int8", "per": "row"}, "row"),
        ({"name": "int8", "bits": 4}, "bits"),
    ],
)
def test_mistakes_are_named(given: Any, reason: str) -> None:
    with pytest.raises(UsageError) as raised:
        codecs.build(given)
    assert reason in str(raised.value)


def test_a_codec_of_ones_own_needs_no_check() -> None:
    @codec(drops=True)
    @dataclass(frozen=True)
    class Halved:
        def encode(self, a: Tensor, key: Tensor) -> Tensor:
            return a / 2

        def decode(self, code: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return code * 2

    own = Coder(ACTIVATIONS, codecs.build([Halved(), "int8"]))  # type: ignore[arg-type]
    a = torch.tensor([[254.0, 2.0]])
    coded = own.encode(a)
    own.check(coded)
    assert numbers(own.decode(coded)) == [[254.0, 2.0]]
    assert (own.traits.draws, own.traits.drops, own.traits.as_one_row) == (False, True, False)


def test_a_class_without_its_decorator_is_no_codec_yet() -> None:
    @dataclass(frozen=True)
    class Bare:
        def encode(self, a: Tensor, key: Tensor) -> Tensor:
            return a

        def decode(self, code: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return code

    for own in (Bare(), ErrorFeedback(Bare()), [Bare(), "int8"]):
        with pytest.raises(ConfigError, match=r"^Bare is not a codec; decorate its class with @codec$"):
            codecs.build(own)
    plain = codec(Bare)  # as @codec, without parentheses
    assert codecs.build(plain()) == plain() and coder("model", plain()) is not None


def test_a_codec_that_derives_from_another_has_traits_of_its_own() -> None:
    @codec(drops=True)
    @dataclass(frozen=True)
    class Half(type(codecs.int8())):  # type: ignore[misc]
        pass

    own = coder("model", Half(bits=8))
    assert own is not None and own.traits.drops and not own.encodes_down()
    with pytest.raises(WireError, match="a scale of int8 is too small"):  # it checks as the other does
        own.check(own.encode(torch.ones(2, 2))._replace(code={"integers": torch.ones(1, 2, 2).to(torch.int8),
                                                              "scales": torch.zeros(1, 1, 1)}))  # fmt: skip


def test_one_row_of_a_model_goes_as_a_change_only() -> None:
    @codec(as_one_row=True)
    @dataclass(frozen=True)
    class Row(type(codecs.bf16())):  # type: ignore[misc]
        pass

    own = coder("model", Row())
    assert own is not None and own.only_changes and not own.encodes_down()


def wrong(what: str) -> Any:
    """A codec with a mistake."""

    @codec
    @dataclass(frozen=True)
    class Wrong:
        def encode(self, a: Tensor, key: Tensor) -> Any:
            if what == "looks":
                return a * float(a.sum())
            return {"list": [a], "rows": a.flatten(), "first": a[:3], "nothing": {}, "number": 3.0}.get(what, a)

        def decode(self, code: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
            if what == "type":
                return code.float()
            return {"transposed": code.transpose(1, -1), "flat": code.flatten(1), "none": None}.get(what, code)

        def __str__(self) -> str:
            return "wrong"

    return Wrong()


ENCODE = (
    "wrong: encode must return a tensor or a dict of tensors, with a row for each of 2 samples (or one for all), but"
)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("list", f"{ENCODE} it returns a list"),
        ("number", f"{ENCODE} it returns a float"),
        ("nothing", f"{ENCODE} it returns a dict of nothing"),
        ("rows", f"{ENCODE} it returns a tensor of the type float32 and the shape (30,)"),
        ("first", f"{ENCODE.replace('2', '7')} it returns a tensor of the type float32 and the shape (3, 3, 5)"),
        ("looks", "wrong fails on a tensor without content, from which sizes are predicted: RuntimeError: "),
        ("type", "wrong: decode must return a tensor of the type float64 and the shape (2, 3, 5), but it returns a "
                 "tensor of the type float32 and the shape (2, 3, 5)"),
        ("transposed", "but it returns a tensor of the type float32 and the shape (2, 5, 3)"),
        ("flat", "but it returns a tensor of the type float32 and the shape (2, 15)"),
        ("none", "but it returns a NoneType"),
    ],
)  # fmt: skip
def test_a_codec_is_tried_before_a_run_begins(what: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        coders({"gradients": wrong(what)}, Split(resnet(), 1), torch.zeros(1, 1, 8, 8).double())
    assert str(raised.value).startswith("codecs.gradients: wrong") and told in str(raised.value)


def test_samples_are_no_matrices() -> None:
    for kind in ("activations", "gradients"):
        with pytest.raises(
            ConfigError, match=rf"^lowrank\(1\) encodes the matrices of models, and {kind} are of samples"
        ):
            coder(kind, codecs.lowrank(rank=1))


# -- equal bits, and sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EACH_TYPE)
@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_a_stack_has_the_bits_of_one_by_one_and_the_size_is_known(spec: Any, dtype: torch.dtype) -> None:
    own, keys = Coder(ACTIVATIONS, made(spec)), torch.arange(3) * 77
    for shape in SHAPES:
        a = normal(3, *shape, dtype=dtype)
        a[1].view(-1)[0] = math.nan
        many = vmap(own.encode)(a, keys)
        decoded = vmap(own.decode)(many)
        for i in range(3):
            one = own.encode(a[i], keys[i])
            assert same(tree.map(lambda b: b[i], many), one)  # noqa: B023
            own.check(one)
            torch.testing.assert_close(decoded[i], own.decode(one), rtol=1e-6, atol=1e-6, equal_nan=True)
            assert tree.num_bytes(one) == own.size(shape, dtype)


@pytest.mark.parametrize("dtype", EACH_TYPE)
@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_models_are_one_row(spec: Any, dtype: torch.dtype) -> None:
    own = Coder(MODEL, made(spec))
    shapes = {"w": (4, 3, 2, 2), "b": (4,), "one": (), "long": (300,)}
    model = Model({name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}, {}, {})
    coded = own.encode(model, KEY)
    own.check(coded)
    decoded = own.decode_change(coded, tree.map(torch.zeros_like, model))
    assert tree.signature(decoded) == tree.signature(model)
    flat = sum(math.prod(shape) for shape in shapes.values())
    sizes = (
        [own.size((flat,), dtype)] if own.traits.as_one_row else [own.size(shape, dtype) for shape in shapes.values()]
    )
    assert tree.num_bytes(coded) == sum(sizes)


CLOSED: list[tuple[Any, Callable[[int, int], int]]] = [  # bytes of n samples with d numbers of float32
    ("bf16", lambda n, d: 2 * n * d),
    ("int8", lambda n, d: n * d + 4 * n),
    ("int4", lambda n, d: n * -(-d // 2) + 4 * n),
    (TOPK, lambda n, d: n * (5 * -(-d // 10) + (2 * -(-d // 256) if d > 256 else 0))),
    ([TOPK, "int8"], lambda n, d: n * (2 * -(-d // 10) + (2 * -(-d // 256) if d > 256 else 0) + 4)),
    (CLIP, lambda n, d: 4 * n * d),
    ({"name": "gaussian", "std": 1.0}, lambda n, d: 4 * n * d),
]


@pytest.mark.parametrize(("spec", "closed"), CLOSED, ids=[str(codecs.build(spec)) for spec, _ in CLOSED])
def test_sizes_in_closed_form(spec: Any, closed: Callable[[int, int], int]) -> None:
    own = Coder(ACTIVATIONS, made(spec))
    for n in (1, 3):
        for d in (1, 2, 9, 10, 11, 255, 256, 257, 512, 1000, 100_000_000):
            assert own.size((n, d), torch.float32) == closed(n, d)


# -- any numbers -------------------------------------------------------------------------------------------------------

EXTREME = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1 / 3,
    5e-324,
    -1e-310,
    1e-45,
    -1e-40,
    1e-38,
    6e-8,
    6e4,
    -6e4,
    1e30,
    -3e38,
    1e39,
    3e40,
    1e300,
]
BROKEN = [math.nan, math.inf, -math.inf]
forms = st.tuples(
    st.sampled_from(SHIPPED),
    st.sampled_from(FLOATS),
    st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
    | st.sampled_from([(), (0,), (0, 3), (2, 0), (2, 0, 3), (1, 257), (2, 300), (1, 9, 31)]),
    st.lists(st.sampled_from(EXTREME) | st.floats(-1e3, 1e3), min_size=1, max_size=12),
    st.integers(0, 2**63 - 1),
)


def filled(shape: tuple[int, ...], values: Sequence[float], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of these values in any order, those beyond the range of the type brought to its ends."""
    order = torch.randint(0, len(values), shape, generator=torch.Generator().manual_seed(seed % 2**32))
    ends = torch.finfo(dtype).max
    return double(values)[order].clamp(-ends, ends).to(dtype)


def rows_of(a: Tensor) -> Tensor:
    """As a codec gets it: a row for each sample, and two or more axes."""
    a = a if a.dim() else a[None]
    return a if a.dim() > 1 else a[:, None]


def within(spec: Any, a: Tensor, got: Tensor) -> None:
    """Check that what arrived is within the documented bound."""
    info, x, y = torch.finfo(a.dtype), a.double(), got.double()
    least = float(info.smallest_normal) * float(info.eps)  # the step of subnormal numbers
    name = spec if isinstance(spec, str) else spec.get("name")
    rows = rows_of(a)
    if name == "bf16":
        fits = x.abs() <= 3.3895e38
        assert bool(((y - x).abs()[fits] <= x.abs()[fits] * 2**-8 + 1e-40).all())
        assert bool((y[~fits].isinf() | (y[~fits].abs() >= 3.38e38)).all())
    elif name in ("int8", "int4"):
        scales = there(spec, rows)["scales"].double().expand(rows.shape).reshape(x.shape)
        fits = scales.isfinite()
        assert bool((~y.isfinite())[~fits].all()) and (bool(fits.all()) or a.dtype == torch.float64)
        off = (y - x).abs() - scales * (0.5 + 2e-5) - x.abs() * info.eps - least
        assert bool((off <= 0)[fits].all())
    elif name == "topk":
        flat, there_ = rows.flatten(1).double(), rows_of(got).flatten(1).double()
        kept = there_ != 0
        assert torch.equal(there_[kept], flat[kept])
        k = max(1, math.ceil(flat.size(1) * 0.1 - 1e-9))
        assert int(kept.sum(1).max()) <= k
        left_out = torch.where(kept, 0.0, flat.abs()).amax(1)
        smallest = torch.where(kept, flat.abs(), math.inf).amin(1)
        assert bool((left_out <= smallest).all())
        assert bool(((kept.sum(1) == k) | (left_out == 0)).all())
    elif name == "clip":
        unit = y / max(1.0, float(y.abs().max()))
        slack = 1 + float(info.eps)
        assert bool((unit.reshape(len(rows), -1).norm(dim=1) <= slack * math.sqrt(1 + rows[0].numel() * least)).all())
        short = rows.flatten(1).double().abs().sum(1) <= 0.5
        assert torch.equal(rows_of(got)[short], rows[short])
    if name in ("topk", "randtopk", "clip", "gaussian", "laplace") or (name == "int8" and a.dtype != torch.float64):
        assert bool(y.isfinite().all())
    if name == "lowrank":
        limit = info.max / 2 / math.sqrt(rows.size(1))
        small = rows.flatten(1).double().abs().amax(1) <= limit
        if rows.dim() > 2 and 2 * (rows.size(1) + rows[0, 0].numel()) < rows[0].numel():
            largest = rows.flatten(1).double().abs().amax(1)[small, None] + 1e-290
            off = (rows_of(got).flatten(1).double() - rows.flatten(1).double())[small] / largest
            whole = rows.flatten(1).double()[small] / largest
            assert bool((off.norm(dim=1) <= whole.norm(dim=1) * (1 + 8 * info.eps) + 1e-4 + least * 1e6).all())
            assert bool(rows_of(got).flatten(1)[~small].isnan().all())
        else:
            assert torch.equal(got, a)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(forms)
def test_finite_numbers_arrive_within_the_bounds(form: tuple[Any, ...]) -> None:
    spec, dtype, shape, values, key = form
    a = filled(shape, values, dtype, key)
    own = Coder(ACTIVATIONS, made(spec))
    coded = own.encode(a, torch.tensor(key))
    own.check(coded)
    got = own.decode(coded)
    assert got.shape == a.shape and got.dtype == dtype
    if not a.numel():
        assert coded is a and got is a
    elif not isinstance(spec, list):
        within(spec, a, got)
    assert tree.num_bytes(coded) == own.size(shape, dtype)


def carried_exactly(spec: Any) -> bool:
    """Whether each number arrives by itself."""
    return spec in ("bf16", CLIP)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(forms, st.sampled_from(BROKEN), st.integers(0, 10**6))
def test_a_broken_row_never_arrives_as_a_finite_one(form: tuple[Any, ...], broken: float, place: int) -> None:
    spec, dtype, shape, values, key = form
    assume(math.prod(shape))
    a = filled(shape, [v if abs(v) < 1e3 else 1.0 for v in values], dtype, key)
    good = a.clone()
    a.view(-1)[place % a.numel()] = broken
    own = Coder(ACTIVATIONS, made(spec))
    coded = own.encode(a, torch.tensor(key))
    own.check(coded)  # the server looks at what arrives
    got, intact = rows_of(own.decode(coded)), rows_of(own.decode(own.encode(good, torch.tensor(key))))
    bad = ~rows_of(a).isfinite().flatten(1).all(1)
    assert not bool(got[bad].isfinite().all())
    if "tensor" not in str(spec):
        assert torch.equal(got[~bad], intact[~bad])  # the other samples arrive as without it
    if carried_exactly(spec):
        assert torch.equal(got.isfinite(), rows_of(a).isfinite())


@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_whole_numbers_and_empty_tensors_cross_as_they_are(spec: Any) -> None:
    own = Coder(ACTIVATIONS, made(spec))
    value = {
        "whole": torch.arange(4),
        "bytes": torch.arange(4, dtype=torch.uint8),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "thin": torch.zeros(3, 0, dtype=torch.float16),
    }
    coded = own.encode(value, KEY)
    assert all(coded[name] is a for name, a in value.items())
    own.check(coded)
    assert all(own.decode(coded)[name] is a for name, a in value.items())


# -- error feedback ----------------------------------------------------------------------------------------------------


def topk_by_hand(a: np.ndarray) -> np.ndarray:
    flat = a.reshape(-1)
    k = max(1, math.ceil(0.1 * flat.size - 1e-9))
    kept = np.argsort(-np.abs(flat), kind="stable")[:k]
    out = np.zeros_like(flat)
    out[kept] = flat[kept]
    return out.reshape(a.shape)


def int8_by_hand(a: np.ndarray) -> np.ndarray:
    scale = np.float64(np.float32(np.abs(a).max() / 127))
    return np.round(a / scale) * scale


@pytest.mark.parametrize(("spec", "by_hand"), [(TOPK, topk_by_hand), ("int8", int8_by_hand)])
def test_error_feedback_over_twenty_rounds(spec: Any, by_hand: Callable[[np.ndarray], np.ndarray]) -> None:
    own = coder("model", codecs.error_feedback(made(spec)))
    assert own is not None and own.error_feedback
    shapes = {"w": (6, 5), "b": (7,), "one": ()}
    base = Model({name: normal(*shape) for name, shape in shapes.items()}, {}, {})
    rest = own.no_rest(base)
    assert all(not a.any() for a in rest.values())
    left = {name: np.zeros(shape) for name, shape in shapes.items()}
    changes = {name: np.zeros(shape) for name, shape in shapes.items()}
    arrived = {name: np.zeros(shape) for name, shape in shapes.items()}
    for number in range(20):
        changed = Model({name: a + normal(*a.shape, seed=number + 1) for name, a in base.params.items()}, {}, {})
        coded, rest = own.encode_with_rest(changed, base, rest)
        own.check(coded)
        got = own.decode_change(coded, base)
        for name, a in base.params.items():
            change = (changed.params[name] - a).numpy()
            wanted = change + left[name]
            sent = by_hand(wanted)
            left[name] = wanted - sent
            np.testing.assert_allclose(got.params[name].numpy(), a.numpy() + sent, rtol=0, atol=1e-12)
            np.testing.assert_allclose(rest[name].numpy(), left[name], rtol=0, atol=1e-12)
            changes[name] += change
            arrived[name] += (got.params[name] - a).numpy()
        base = got
    for name in shapes:
        np.testing.assert_allclose(arrived[name] + rest[name].numpy(), changes[name], rtol=0, atol=1e-11)
    assert any(np.abs(a).max() > 1e-3 for a in left.values())


def test_error_feedback_of_a_whole_change() -> None:
    own = Coder(MODEL, made([{"name": "clip", "norm": 1.0}, TOPK]), error_feedback=True)
    base = Model({"w": torch.zeros(3, 4).double(), "b": torch.zeros(8).double()}, {}, {})
    changed = Model({"w": normal(3, 4), "b": normal(8, seed=1)}, {}, {})
    flat = torch.cat([a.reshape(-1) for a in changed.params.values()])
    sent = torch.from_numpy(topk_by_hand((flat / flat.norm()).numpy()))
    coded, rest = own.encode_with_rest(changed, base, own.no_rest(base))
    got = own.decode_change(coded, base)
    torch.testing.assert_close(torch.cat([a.reshape(-1) for a in got.params.values()]), sent, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([a.reshape(-1) for a in rest.values()]), flat - sent, rtol=0, atol=1e-12)
    assert [a.shape for a in rest.values()] == [(3, 4), (8,)]


# -- statistics --------------------------------------------------------------------------------------------------------

NUM = 40_000
FAR = 1.95 / math.sqrt(NUM)  # the distance of Kolmogorov and Smirnov that one sample in a thousand exceeds


def farthest(drawn: Tensor, distribution: Callable[[Tensor], Tensor]) -> float:
    """The distance of Kolmogorov and Smirnov."""
    expected = distribution(drawn.sort().values)
    steps = torch.arange(NUM + 1, dtype=torch.float64) / NUM
    return float(torch.maximum((expected - steps[:-1]).abs(), (expected - steps[1:]).abs()).max())


@pytest.mark.parametrize("key", [0, 1, -5, 2**62])
def test_gaussian_noise_is_normal(key: int) -> None:
    drawn = back({"name": "gaussian", "std": 3.0}, torch.zeros(4, NUM // 4).double(), torch.tensor(key)).flatten() / 3
    assert abs(float(drawn.mean())) < 4 / math.sqrt(NUM)
    assert abs(float(drawn.square().mean()) - 1) < 4 * math.sqrt(2 / NUM)
    assert abs(float(drawn.pow(4).mean()) - 3) < 4 * math.sqrt(96 / NUM)
    assert farthest(drawn, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))) < FAR
    assert farthest(drawn * 1.05, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))) > FAR  # it would be noticed


@pytest.mark.parametrize("key", [0, 1, -5, 2**62])
def test_laplace_noise_has_the_distribution_of_laplace(key: int) -> None:
    drawn = back({"name": "laplace", "scale": 3.0}, torch.zeros(4, NUM // 4).double(), torch.tensor(key)).flatten() / 3
    assert abs(float(drawn.mean())) < 4 * math.sqrt(2 / NUM)
    assert abs(float(drawn.abs().mean()) - 1) < 4 / math.sqrt(NUM)
    assert abs(float(drawn.square().mean()) - 2) < 4 * math.sqrt(20 / NUM)

    def distribution(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.5 * (-x.abs()).exp(), 1 - 0.5 * (-x.abs()).exp())

    assert farthest(drawn, distribution) < FAR
    assert farthest(drawn * 1.05, distribution) > FAR


def test_noise_of_other_keys_and_tensors_is_another() -> None:
    own = Coder(ACTIVATIONS, made({"name": "gaussian", "std": 1.0}))
    value = {"a": torch.zeros(2, 5000).double(), "b": torch.zeros(2, 5000).double()}
    one, two = (own.decode(own.encode(value, torch.tensor(key))) for key in (1, 2))
    drawn = torch.stack([one["a"].flatten(), one["b"].flatten(), two["a"].flatten(), two["b"].flatten()])
    correlated = torch.corrcoef(drawn) - torch.eye(4)
    assert float(correlated.abs().max()) < 4 / math.sqrt(10_000)


def test_randtopk_chooses_k_places_and_alpha_of_the_others() -> None:
    n, d, k, alpha = 50, 100, 10, 0.3
    a = normal(1, d).expand(n, d)
    top = set(a[0].abs().topk(k).indices.tolist())
    others, chosen = [], torch.zeros(d)
    for key in range(40):
        places = there({"name": "randtopk", "share": k / d, "alpha": alpha}, a, torch.tensor(key))["places"].long()
        assert bool((places.diff(dim=1) > 0).all()) and places.shape == (n, k)
        others += [sum(p not in top for p in row) for row in places.tolist()]
        chosen += torch.bincount(places.flatten(), minlength=d)
    rows = 40 * n
    assert np.mean(others) == pytest.approx(k * alpha, abs=4 * math.sqrt(k * alpha * (1 - alpha) / rows))
    assert np.var(others) == pytest.approx(k * alpha * (1 - alpha), rel=0.15)  # binomial
    within_top = torch.tensor([bool(i in top) for i in range(d)])
    for group, share in ((within_top, 1 - alpha), (~within_top, alpha * k / (d - k))):  # evenly within both
        off = (chosen[group] / rows - share).abs().max()
        assert float(off) < 5 * math.sqrt(share * (1 - share) / rows)


@pytest.mark.parametrize("shape", [(3, 40), (2, 700), (2, 3, 10, 10)])
def test_alpha_0_is_topk_and_alpha_1_its_complement(shape: tuple[int, ...]) -> None:
    a = normal(*shape).mul(2).round() / 2  # with many equal ones
    top = there(TOPK, a)
    assert same(there({"name": "randtopk", "share": 0.1, "alpha": 0.0}, a), top)
    chosen = back({"name": "randtopk", "share": 0.1, "alpha": 1.0}, a + 100) != 0
    assert not bool((chosen & (back(TOPK, a + 100) != 0)).any())
    assert bool((chosen.flatten(1).sum(1) == (a[0].numel() + 9) // 10).all())


@pytest.mark.parametrize(
    ("rank", "own", "m", "n"), [(1, 1, 2, 3), (3, 3, 20, 30), (3, 1, 4, 100), (6, 3, 8, 60), (4, 2, 5, 200)]
)
def test_lowrank_recovers_a_matrix_of_its_rank_or_less(rank: int, own: int, m: int, n: int) -> None:
    a = normal(5, m, own) @ normal(5, own, n, seed=1)
    got = back({"name": "lowrank", "rank": rank}, a)
    assert float(((got - a).norm(dim=(1, 2)) / a.norm(dim=(1, 2))).max()) < 1e-5


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lowrank_of_very_large_and_very_small_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    a = torch.ones(3, 16, 20, dtype=dtype)
    a[0] *= info.max / 8.01  # the largest that is sure to arrive: 2 sqrt(16) = 8
    a[1] *= info.max / 7.9
    a[2] *= info.smallest_normal
    got = back({"name": "lowrank", "rank": 2}, a).double()
    torch.testing.assert_close(got[0] / info.max, a[0].double() / info.max, rtol=4 * info.eps + 1e-5, atol=0)
    assert bool(got[1].isnan().all())
    least = max(info.smallest_normal * info.eps, 2.0**-1019)  # numbers below 2^-1000 are too small for 20 bits
    torch.testing.assert_close(got[2], a[2].double(), rtol=0.1, atol=least)
    far = normal(40, 50).sign()[None] * (info.max / 13)  # without its limit, projections of it overflow
    assert bool(back({"name": "lowrank", "rank": 3}, far.to(dtype)).isfinite().all())


def test_lowrank_is_nearly_the_best() -> None:
    left, right = torch.linalg.qr(normal(40, 40)).Q, torch.linalg.qr(normal(60, 60, seed=1)).Q
    for decay, iterations in ((0.1, 2), (0.5, 5), (0.8, 15)):
        values = decay ** torch.arange(40.0).double()
        a = (left * values @ right[:40])[None]
        for rank in (1, 2, 5):
            best = float(values[rank:].norm())
            lost = float((back({"name": "lowrank", "rank": rank, "iterations": iterations}, a) - a).norm())
            assert best * (1 - 1e-9) <= lost <= 1.1 * best


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_clipped_norms(dtype: torch.dtype, size: float) -> None:
    a = normal(8, 3, 50, dtype=dtype) * size
    eps = float(torch.finfo(dtype).eps)
    for norm in (0.01, 1.0, 30.0):
        before = a.double().flatten(1).norm(dim=1)
        after = back({"name": "clip", "norm": norm}, a).double().flatten(1).norm(dim=1)
        assert bool((after <= norm * (1 + 1e-15)).all())  # also after the values were rounded to their type
        expected = before.clamp(max=norm)
        torch.testing.assert_close(after, expected, rtol=2 * eps, atol=1e-6 * norm)


def test_a_long_change_is_clipped_as_one() -> None:
    own = Coder(MODEL, made(CLIP))
    base = Model({"a": torch.zeros(2).double(), "b": torch.zeros(1, 1).double()}, {}, {})
    changed = Model({"a": double([2.0, 3.0]), "b": double([[6.0]])}, {}, {})
    got = own.decode_change(own.encode_change(changed, base, KEY), base)  # 4 + 9 + 36 = 7^2
    torch.testing.assert_close(got.params["a"], double([2 / 7, 3 / 7]), rtol=1e-14, atol=0)
    torch.testing.assert_close(got.params["b"], double([[6 / 7]]), rtol=1e-14, atol=0)


def test_extreme_rows_are_clipped_too() -> None:
    a = torch.tensor(
        [[1e308, 1e308, 1e308, 1e308], [3e-200, 4e-200, 0.0, 0.0], [5e-324, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    for norm in (1e-12, 1.0, 1e-320):
        got = back({"name": "clip", "norm": norm}, a)
        torch.testing.assert_close(got[0], torch.full((4,), norm / 2, dtype=torch.float64), rtol=1e-13, atol=5e-324)
        if norm > 1e-100:
            assert torch.equal(got[1:], a[1:])


def test_the_network_of_a_run_has_coders_with_its_masks() -> None:
    split = Split(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), 1)
    found = coders({"activations": "int8", "model": {**TOPK, "error_feedback": True}}, split, torch.zeros(1, 4))
    assert {kind.name: str(own) for kind, own in found.items()} == {
        "activations": "int8",
        "model": "topk(0.1) with error feedback",
    }
    assert all(own.skipped == frozenset() for own in found.values())


class Masked(nn.Module):
    """A float mask that is made of the inputs, and is needed to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.where(x > 0, 0.0, -torch.inf)
        h = self.b(torch.relu(self.a(x)) + x)
        return self.c(torch.softmax(h + mask, 1).nan_to_num(0.0))  # type: ignore[no-any-return]


class Masking(nn.Module):
    """The mask is the newest value at a cut behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mask, self.b = nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * self.mask(x))  # type: ignore[no-any-return]


class Named(nn.Module):
    """A unit that hands over a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Any) -> dict[str, Tensor]:
        given = x if isinstance(x, dict) else {"hidden": x, "mask": x.abs()}
        return {"hidden": self.a(given["hidden"]) * given["mask"], "mask": given["mask"]}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.a(x["hidden"])  # type: ignore[no-any-return]


def freeze(net: nn.Module, name: str) -> nn.Module:
    net.get_submodule(name).requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("net", "cut", "masks"),
    [
        (Masked(), "a", {"where", "x"}),
        (freeze(Masked(), "a"), "a", {"where", "x"}),
        (Masking(), "mask", {"mask"}),
        (nn.Sequential(Named(), Named(), Last()), 1, {"mask"}),
        (freeze(nn.Sequential(Named(), Named(), Last()), "0"), 1, {"mask"}),
    ],
)
def test_masks_beside_a_hidden_state_cross_as_they_are(net: nn.Module, cut: Any, masks: set[str]) -> None:
    """At every cut that a method may move to, and whether or not something trains below it."""
    split, x = Split(net, cut), normal(3, 6, dtype=torch.float32)
    own = {kind.name: own for kind, own in coders({"activations": "int8"}, split, x).items()}["activations"]
    beside = set()
    for number in range(1, split.num_units):
        z = split.at(number).lower(split.at(number).initial()[0], x, 0)[0]
        coded = own.encode(z)
        own.check(coded)
        beside |= {name for name in z if coded[name] is z[name]} if isinstance(z, dict) else set()
    assert beside == masks and masks <= own.skipped and "hidden" not in own.skipped
