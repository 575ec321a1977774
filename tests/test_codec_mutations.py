"""Specifies that a code which no codec makes is refused with a reason, or else decodes as any other, and to finite
numbers if its own are finite; and that nothing is allocated for a tensor that is only said to be there."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_codecs import IDS, KEY, SHIPPED, filled, made, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cutlayer.core import tree
from cutlayer.core.codec import FLOATS, Coded, Coder
from cutlayer.core.kinds import ACTIVATIONS, MODEL
from cutlayer.errors import WireError

Random = random.Random
Mutation = Callable[[Random, Coded, Coded], Coded]
MOST = 8 * 2**10  # bytes of a tensor: the largest example has 600 numbers
SHAPES = [(), (5,), (2, 7), (2, 300), (3, 4, 6), (1, 3, 20), (2, 2, 3, 5)]
DTYPES = [*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
HUGE = [(2**40,), (2**20, 2**20), (1, 2**62), (2**31, 3), (2, 2**29, 5), (1,) * 70, (3,) * 30]
NUMBERS = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 6e4, 1e-45, 1e-39, 0.0, -1.0, -128.0, 255.0, 1e308]


def examples() -> list[tuple[Coder, Coded]]:
    found = []
    for number, spec in enumerate(SHIPPED):
        for place, shape in enumerate(SHAPES):
            own = Coder((ACTIVATIONS, MODEL)[place % 2], made(spec))
            a = normal(*shape, dtype=FLOATS[(number + place) % len(FLOATS)])
            found.append((own, own.encode(a, KEY)))
    return found


def leaves_of(coded: Coded) -> list[Tensor]:
    return tree.tensors(coded.code)


def with_leaf(coded: Coded, old: Tensor, new: Any) -> Coded:
    return coded._replace(code=tree.map(lambda a: new if a is old else a, coded.code))


def flip(rng: Random, coded: Coded, _: Coded) -> Coded:
    """Flip some bits of one buffer."""
    old = rng.choice(leaves_of(coded))
    raw = bytearray(old.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for _i in range(rng.choice([1, 1, 2, 8])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return with_leaf(coded, old, torch.frombuffer(raw, dtype=old.dtype).reshape(old.shape))


def put(rng: Random, coded: Coded, _: Coded) -> Coded:
    """Put numbers into one buffer that are unlikely there."""
    old = rng.choice(leaves_of(coded))
    new = old.clone().reshape(-1)
    for _i in range(rng.choice([1, 2, old.numel()])):
        number = rng.choice(NUMBERS)
        if old.is_floating_point():
            number = number if abs(number) == float("inf") else min(number, torch.finfo(old.dtype).max)
        else:
            info = torch.iinfo(old.dtype)
            number = max(min(int(number), info.max), info.min) if abs(number) < 300 else 0
        new[rng.randrange(old.numel())] = number
    return with_leaf(coded, old, new.reshape(old.shape))


def reshape(rng: Random, coded: Coded, _: Coded) -> Coded:
    old = rng.choice(leaves_of(coded))
    new = rng.choice(
        [
            lambda: old.reshape(-1),
            lambda: old[None],
            lambda: old[:-1],
            lambda: old[:0],
            lambda: old.transpose(0, -1).contiguous(),
            lambda: torch.cat((old, old)),
            lambda: old[..., :-1],
            lambda: old.reshape(-1)[0],
        ]
    )()
    return with_leaf(coded, old, new)


def retype(rng: Random, coded: Coded, _: Coded) -> Coded:
    old = rng.choice(leaves_of(coded))
    return with_leaf(coded, old, old.to(rng.choice(DTYPES)))


def restructure(rng: Random, coded: Coded, other: Coded) -> Coded:
    """Change what is where in a code."""
    code, old = coded.code, rng.choice(leaves_of(coded))
    new = rng.choice([None, {}, [], (old,), {"values": old}, 3, 0.5, "values", True, coded, other.code])
    if isinstance(code, dict) and rng.random() < 0.6:
        name = rng.choice(list(code))
        rest = {key: value for key, value in code.items() if key != name}
        reversed_ = dict(reversed(code.items()))
        swapped = dict(zip(code, reversed(code.values()), strict=True))
        return coded._replace(code=rng.choice([rest, {**rest, "other": code[name]}, reversed_, swapped, list(code)]))
    return with_leaf(coded, old, new) if rng.random() < 0.5 else coded._replace(code=new)


def splice(rng: Random, coded: Coded, other: Coded) -> Coded:
    """Take a part from another code."""
    if rng.random() < 0.5:
        return coded._replace(**rng.choice([{"code": other.code}, {"like": other.like}]))
    return with_leaf(coded, rng.choice(leaves_of(coded)), rng.choice(leaves_of(other)))


def say(rng: Random, coded: Coded, _: Coded) -> Coded:
    """Say another type and shape of the tensor."""
    shape = list(coded.like.shape[1:])
    rng.shuffle(shape)
    dtype = rng.choice([coded.like.dtype, rng.choice(DTYPES)])
    forms = [
        (0, *shape),
        (0, *coded.like.shape[1:]),
        (0, *shape, 1),
        (0, *shape[1:]),
        (0, *(size + 1 for size in shape)),
        (0, *shape, 0),
        (1, *shape),
        (),
        (0,),
        (0, *rng.choice(HUGE)),
    ]
    like: Any = torch.empty((0,), dtype=dtype).new_empty(rng.choice(forms))
    return coded._replace(like=rng.choice([like] * 8 + [None, 3, {}, "float32"]))


MUTATIONS: list[Mutation] = [flip, put, reshape, retype, restructure, splice, say]


class Allocations(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns, but for those without content."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for a in out if isinstance(out, tuple | list) else [out]:
            if isinstance(a, Tensor) and a.device.type != "meta":
                self.largest = max(self.largest, a.numel() * a.element_size())
        return out


def outcome(own: Coder, value: Coded) -> str:
    """Check a value and decode it; and check the result."""
    try:
        own.check(value)
    except WireError as error:
        assert str(error)
        return "refused"
    got = own.decode(value)
    if not isinstance(value, Coded):
        return "as it is"
    assert got.shape == value.like.shape[1:] and got.dtype == value.like.dtype
    given = [bool(a.isfinite().all()) for a in leaves_of(value) if a.is_floating_point()]
    assert not all(given) or bool(got.isfinite().all()), (own, value)
    return "decoded" if all(given) else "decoded, not finite"


def run(number: int, seed: int) -> Counter[tuple[str, str]]:
    rng, seen, codes = Random(seed), Counter[tuple[str, str]](), examples()
    for i in range(number):
        mutation = MUTATIONS[i % len(MUTATIONS)]
        own, coded = rng.choice(codes)
        mutated = mutation(rng, coded, rng.choice(codes)[1])
        with Allocations() as made:
            seen[mutation.__name__, outcome(own, mutated)] += 1
        assert made.largest <= MOST
    return seen


def check(seen: Counter[tuple[str, str]], number: int) -> None:
    assert {what for _, what in seen} == {"refused", "decoded", "decoded, not finite"}
    each = number / len(MUTATIONS)
    refused = {mutation.__name__: seen[mutation.__name__, "refused"] / each for mutation in MUTATIONS}
    for name, least in {"reshape": 0.6, "retype": 0.7, "restructure": 0.95, "splice": 0.6, "say": 0.6}.items():
        assert refused[name] > least, refused
    for name in ("flip", "put"):  # most bits of a code are of values, and any values are
        assert 0.05 < refused[name] < 0.5, refused
    assert seen["put", "decoded, not finite"] > 0.1 * each  # of a sender that diverged


def test_unmutated_codes_decode() -> None:
    assert {outcome(own, coded) for own, coded in examples()} == {"decoded"}


def test_mutated_codes_are_refused_or_decode() -> None:
    check(run(2100, seed=0), 2100)


@pytest.mark.slow
def test_twenty_thousand_mutated_codes_are_refused_or_decode() -> None:
    check(run(21_000, seed=1), 21_000)


# -- what must be refused, and what must not ---------------------------------------------------------------------------


def refusal(own: Coder, code: Any, like: Tensor) -> str:
    with pytest.raises(WireError) as raised:
        own.check(Coded(code, like))
    return str(raised.value)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_what_a_diverged_sender_encodes_is_no_error(spec: Any, broken: float) -> None:
    for number, shape in enumerate(SHAPES):
        own = Coder((MODEL, ACTIVATIONS)[number % 2], made(spec))
        coded = own.encode(torch.full(shape, broken, dtype=FLOATS[number % 4]), KEY)
        own.check(coded)
        assert not bool(own.decode(coded).isfinite().all())


@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_the_largest_numbers_are_no_error(spec: Any) -> None:
    for number, shape in enumerate(SHAPES):
        dtype = FLOATS[number % 4]
        own, most = Coder(ACTIVATIONS, made(spec)), torch.finfo(dtype).max
        own.check(own.encode(filled(shape, [most, -most, most / 3, 1.0], dtype, 3), KEY))


def test_scales_are_checked() -> None:
    own, like = Coder(ACTIVATIONS, made("int8")), torch.empty(0, 1, 2)
    whole = torch.tensor([[1, -127]], dtype=torch.int8)
    for scale in (0.0, -1.0, 1e-40, 3e38, -float("inf")):
        code = {"integers": whole, "scales": torch.tensor([[scale]])}
        assert refusal(own, code, like) == "a scale of int8 is too small or too large"
    for scale in (1e-37, 2.6e36, float("inf"), float("nan")):
        own.check(Coded({"integers": whole, "scales": torch.tensor([[scale]])}, like))
    code = {"integers": whole, "scales": torch.tensor([[600.0]])}
    own.check(Coded(code, like))
    assert "too large" in refusal(own, code, like.half())  # 127 times that is beyond the range of float16
    wrong = {"integers": whole, "scales": torch.tensor([[1]])}
    assert refusal(own, wrong, like) == "what came as activations is not encoded by int8"


def test_whole_numbers_are_checked() -> None:
    like, scales = torch.empty(0, 1, 3), torch.ones(1, 1)
    code = {"integers": torch.tensor([[1, -128, 0]], dtype=torch.int8), "scales": scales}
    reason = "a whole number of {} is below -{}, or its padding is not zero"
    assert refusal(Coder(ACTIVATIONS, made("int8")), code, like) == reason.format("int8", 127)
    own = Coder(ACTIVATIONS, made("int4"))
    for pairs in ([0x80, 0x01], [0x08, 0x01], [0x11, 0x11]):  # -8 above and below, and a padding of 1
        code = {"integers": torch.tensor([pairs], dtype=torch.uint8), "scales": scales}
        assert refusal(own, code, like) == reason.format("int4", 7)
    own.check(Coded({"integers": torch.tensor([[0x97, 0x07]], dtype=torch.uint8), "scales": scales}, like))


@pytest.mark.parametrize("places", [[0, 0], [1, 0], [0, 20], [200, 255]])
def test_places_are_checked(places: list[int]) -> None:
    own, like = Coder(ACTIVATIONS, made({"name": "topk", "share": 0.1})), torch.empty(0, 1, 20)
    code = {"values": torch.ones(1, 2), "places": torch.tensor([places], dtype=torch.uint8)}
    assert refusal(own, code, like) == "the places of topk(0.1) are not in order, or not all among 20 elements"
    own.check(Coded({"values": torch.ones(1, 2), "places": torch.tensor([[0, 19]], dtype=torch.uint8)}, like))


@pytest.mark.parametrize(
    ("counts", "within", "reason"),
    [
        ([3, 0], [0, 1, 2], None),
        ([1, 2], [255, 0, 43], None),
        ([1, 2], [255, 0, 44], "the places of topk(0.01) are not in order, or not all among 300 elements"),
        ([3, 0], [0, 2, 1], "the places of topk(0.01) are not in order, or not all among 300 elements"),
        ([2, 2], [0, 1, 2], "the blocks of topk(0.01) do not have 3 elements"),
        ([0, 0], [0, 1, 2], "the blocks of topk(0.01) do not have 3 elements"),
        ([-1, 4], [0, 1, 2], "the blocks of topk(0.01) do not have 3 elements"),
        ([4, -1], [0, 1, 2], "the blocks of topk(0.01) do not have 3 elements"),
        ([32767, -32764], [0, 1, 2], "the blocks of topk(0.01) do not have 3 elements"),
    ],
)
def test_blocks_are_checked(counts: list[int], within: list[int], reason: str | None) -> None:
    own, like = Coder(ACTIVATIONS, made({"name": "topk", "share": 0.01})), torch.empty(0, 1, 300)
    packed = {
        "within": torch.tensor([within], dtype=torch.uint8),
        "counts": torch.tensor([counts], dtype=torch.int16),
    }
    code = {"values": torch.ones(1, 3), "places": packed}
    if reason is None:
        own.check(Coded(code, like))
    else:
        assert refusal(own, code, like) == reason


@pytest.mark.parametrize(
    ("packed", "sound"),
    [([0x07, 0x00], True), ([0x00, 0x0E], True), ([0x0F, 0], False), ([1, 0], False), ([3, 16], False)],
)
def test_bits_are_checked(packed: list[int], sound: bool) -> None:
    own, like = Coder(ACTIVATIONS, made({"name": "topk", "share": 0.25})), torch.empty(0, 1, 12)
    code = {"values": torch.ones(1, 3), "places": {"bits": torch.tensor([packed], dtype=torch.uint8)}}
    if sound:
        own.check(Coded(code, like))
    else:  # more, fewer, or behind the end
        assert refusal(own, code, like) == "the bits of topk(0.25) do not name 3 of 12 elements"


def test_products_that_overflow_are_refused() -> None:
    own, like = Coder(MODEL, made({"name": "lowrank", "rank": 1})), torch.empty(0, 3, 4)
    left, right = torch.full((1, 3, 1), 1e30), torch.full((1, 4, 1), 1e30)
    assert (
        refusal(own, {"left": left, "right": right}, like) == "the product of the matrices of lowrank(1) is too large"
    )
    own.check(Coded({"left": left, "right": right / 1e30}, like))
    left[0, 0, 0] = float("nan")
    own.check(Coded({"left": left, "right": right}, like))
    own = Coder(MODEL, made({"name": "lowrank", "rank": 2}))  # the sum overflows to NaN: inf - inf
    left = torch.full((1, 5, 2), 1e200, dtype=torch.float64)
    right = torch.tensor([1e200, -1e200], dtype=torch.float64).expand(1, 6, 2)
    refused = refusal(own, {"left": left, "right": right.contiguous()}, torch.empty(0, 5, 6, dtype=torch.float64))
    assert "too large" in refused


def test_one_sample_that_diverged_does_not_hide_another() -> None:
    own, like = Coder(ACTIVATIONS, made({"name": "lowrank", "rank": 1})), torch.empty(0, 2, 3, 4)
    left, right = torch.full((2, 3, 1), 1e30), torch.full((2, 4, 1), 1e30)
    left[0] = float("nan")
    assert "too large" in refusal(own, {"left": left, "right": right}, like)


@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_nothing_is_allocated_for_a_tensor_that_is_only_said_to_be_there(spec: Any) -> None:
    tracemalloc.start()
    own = Coder(ACTIVATIONS, made(spec))
    coded = own.encode(normal(2, 3, 20, dtype=torch.float32), KEY)
    for shape in HUGE:
        with Allocations() as seen:
            reason = refusal(own, coded.code, torch.empty((0, *shape)))
        assert seen.largest <= 1024
        assert reason.startswith("what came as ")
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_checks_allocate_no_more_than_the_tensor(spec: Any) -> None:
    own = Coder(ACTIVATIONS, made(spec))
    coded = own.encode(normal(8, 4, 1000, dtype=torch.float32), KEY)
    with Allocations() as seen:
        own.check(coded)
    assert seen.largest <= 8 * 4 * 1000 * 4
    with Allocations() as seen:
        own.decode(coded)
    assert seen.largest <= 2 * 8 * 4 * 1000 * 4
