"""Specifies the shared directions: which numbers a seed stands for, to the last bit, and that they are normal."""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from conftest import agree
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from cutlayer.core import directions
from cutlayer.core.state import Tensors

U64 = 1 << 64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def hexed(values: Tensor) -> list[str]:
    return [float(v).hex() for v in values]


def some_params(dtype: torch.dtype = torch.float32) -> Tensors:
    random = torch.Generator().manual_seed(0)
    shapes = {"weight": (7, 5), "scale": (), "bias": (3,), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def flat(params: Tensors) -> Tensor:
    return torch.cat([p.flatten() for p in params.values()])


def length(params: Tensors) -> int:
    return sum(p.numel() for p in params.values())


# -- the same, written again from the definition, with Python's integers and 50 digits ---------------------------------


def signed(z: int) -> int:
    return (z + (U64 >> 1)) % U64 - (U64 >> 1)


def hashed(z: int) -> int:
    """The finaliser of SplitMix64."""
    z %= U64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % U64
    return z ^ (z >> 31)


def pair(seed: int, number: int) -> tuple[float, float]:
    """Normal numbers 2k and 2k + 1 of a seed."""
    bits = hashed(hashed(seed) + 0x9E3779B97F4A7C15 * number)
    with mpmath.workdps(50):
        radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf((bits >> 32) + 1) / 2**32))
        half_turns = mpmath.mpf(bits & 0xFFFFFFFF) / 2**31
        return float(radius * mpmath.cospi(half_turns)), float(radius * mpmath.sinpi(half_turns))


SEEDS = (0, 1, 7, -1, 123456789, -(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_numbers_of_a_seed_are_box_and_mullers_of_a_hash(seed: int) -> None:
    expected = [x for k in range(200) for x in pair(seed, k)]
    agree(directions.normals(torch.tensor(seed), 0, 400), tensor(*expected), 1e-14)


def test_the_hash_is_splitmix64s_for_every_sign() -> None:
    values = [0, 1, 2, -1, -2, 1 << 62, -(1 << 62), *SEEDS]
    assert directions.mixed(torch.tensor(values)).tolist() == [signed(hashed(v)) for v in values]


def test_seeds_are_those_of_splitmix64_from_the_key_on() -> None:
    for key in (0, 5, (1 << 63) - 1):
        expected = [signed(hashed(key + 0x9E3779B97F4A7C15 * k)) for k in (1, 2, 3)]
        assert directions.seeds(key, 3).tolist() == expected
    assert directions.seeds(0, 1).tolist() == [signed(0xE220A8397B1DCDAF)]  # the first number of its reference code


def test_a_childs_seed_by_the_same_hash() -> None:
    for seed in SEEDS:
        for number in (0, 1, 5, 1_000_000):
            expected = signed(hashed(hashed(seed) + 0x9E3779B97F4A7C15 * (number + 1)))
            assert int(directions.child(torch.tensor(seed), number)) == expected


# Seed 0 is the hash's one fixed point: its first number is the largest that there is.
GOLDEN = {
    0: ["0x1.aa4499161cd48p+2", "0x0.0p+0", "-0x1.fa72db2a49a69p-2", "0x1.e7f78bf3320d1p-5"],
    1: ["0x1.2114c148edff6p+0", "0x1.c4f6bcfb68757p-2", "0x1.0345294dc6d98p-1", "-0x1.2174112e0b0e8p-1"],
    -1: ["0x1.5fc6849de835ep+0", "-0x1.787b6b9d2b8dbp-1", "0x1.e3f0e74f0bf98p-4", "-0x1.da7e4aae7aa45p-1"],
    123456789: ["0x1.04759a1c3a92fp+0", "-0x1.5303411aa8b04p+1", "0x1.0a7e5f63cce12p+1", "0x1.c4af9862601d2p-2"],
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_every_bit_of_the_first_numbers(seed: int) -> None:
    """Kept runs and clients on other machines count on these."""
    assert hexed(directions.normals(torch.tensor(seed), 0, 4)) == GOLDEN[seed]


# -- the elementary functions ------------------------------------------------------------------------------------------

DENSE = torch.linspace(1, 2**32, 20_000, dtype=torch.float64).round() / 2**32
ROOT = round(math.sqrt(0.5) * 2**32)
CORNERS = tensor(
    *(k / 2**32 for k in range(1, 50)),
    *(1 - k / 2**32 for k in range(50)),
    *((ROOT + k) / 2**32 for k in range(-2000, 2000)),
    *(float.fromhex("0x1.6a09ep-1") * s + d for s in (1, 0.5, 2**-20, 2**-31) for d in (0, 2**-32, -(2**-32))),
    *(2.0**-k * (1 + d) for k in range(1, 33) for d in (0, 2**-20, -(2**-20))),
)


@pytest.mark.parametrize("x", (DENSE, CORNERS), ids=("everywhere", "corners"))
def test_the_logarithm(x: Tensor) -> None:
    found = directions.log(x)
    with mpmath.workdps(40):
        for value, ours in zip(x.tolist(), found.tolist(), strict=True):
            exact = mpmath.log(value)
            assert abs(ours - exact) <= 2e-15 * abs(exact), value


def test_the_logarithm_of_the_two_ends() -> None:
    assert directions.log(tensor(1.0, 0.5, 2.0**-32)).tolist() == [0.0, -directions.LOG2, -32 * directions.LOG2]
    assert math.log(2) == directions.LOG2


EIGHTHS = tensor(*((k / 8 + d / 2**32) % 1 for k in range(8) for d in range(-50, 51)))


@pytest.mark.parametrize("turns", (DENSE % 1, EIGHTHS), ids=("everywhere", "eighths of a turn"))
def test_sine_and_cosine(turns: Tensor) -> None:
    sine, cosine = directions.sine_and_cosine(turns)
    with mpmath.workdps(40):
        for value, s, c in zip(turns.tolist(), sine.tolist(), cosine.tolist(), strict=True):
            exact = mpmath.sinpi(2 * mpmath.mpf(value)), mpmath.cospi(2 * mpmath.mpf(value))
            # Relative, so also where one of them goes to zero.
            assert abs(s - exact[0]) <= 2e-15 * abs(exact[0]), value
            assert abs(c - exact[1]) <= 2e-15 * abs(exact[1]), value


def test_quarter_turns_are_exact() -> None:
    sine, cosine = directions.sine_and_cosine(tensor(0.0, 0.25, 0.5, 0.75))
    assert sine.tolist() == [0.0, 1.0, 0.0, -1.0]
    assert cosine.tolist() == [1.0, 0.0, -1.0, 0.0]


SQUARES = torch.cat((-2 * directions.log(DENSE[:-1]), torch.logspace(-10, 2, 5000, base=10, dtype=torch.float64)))
POWERS = tensor(*(2.0**k * (1 + d) for k in range(-33, 8) for d in (0, 2**-52, -(2**-53), 0.5, 0.6, 0.7)))


@pytest.mark.parametrize("x", (SQUARES, POWERS), ids=("everywhere", "powers of 2"))
def test_the_square_root(x: Tensor) -> None:
    found = directions.sqrt(x)
    with mpmath.workdps(40):
        for value, ours in zip(x.tolist(), found.tolist(), strict=True):
            exact = mpmath.sqrt(value)
            assert abs(ours - exact) <= 4e-16 * exact, value


def test_the_square_root_of_nothing_is_next_to_nothing() -> None:
    """The radius where the uniform number is 1."""
    assert 0.0 <= float(directions.sqrt(tensor(0.0))) < 1e-150


def test_the_largest_number_there_is() -> None:
    """Of a uniform number of 32 bits: sqrt(64 log 2), never infinite."""
    largest = float(directions.normals(torch.tensor(0), 0, 1))
    assert largest == pytest.approx(math.sqrt(64 * math.log(2)), rel=1e-15)


# -- normal and independent --------------------------------------------------------------------------------------------

NUM = 1_000_000
SIGMAS = 4.0


def near(mean: float, expected: float, deviation: float, num: int = NUM) -> None:
    """Within four standard errors of a mean over so many."""
    assert abs(mean - expected) <= SIGMAS * deviation / math.sqrt(num), (mean, expected)


@pytest.fixture(scope="module")
def many() -> Tensor:
    return directions.normals(torch.tensor(11), 0, NUM)


def test_moments_are_those_of_a_normal_number(many: Tensor) -> None:
    near(float(many.mean()), 0, 1)
    near(float(many.square().mean()), 1, math.sqrt(2))  # var u² = 3 - 1
    near(float(many.pow(3).mean()), 0, math.sqrt(15))
    near(float(many.pow(4).mean()), 3, math.sqrt(105 - 9))  # E u⁸ = 105
    near(float(many.pow(6).mean()), 15, math.sqrt(10395 - 225))  # E u¹² = 10395


def test_the_whole_distribution_is_normal(many: Tensor) -> None:
    """Kolmogorov and Smirnov: a largest distance above 2 / sqrt(n) has a probability of 0.07 %."""
    ordered = many.sort().values
    below = torch.special.ndtr(ordered)
    rank = torch.arange(NUM, dtype=torch.float64)
    distance = torch.maximum(below - rank / NUM, (rank + 1) / NUM - below).max()
    assert float(distance) < 2 / math.sqrt(NUM)


def covariances(a: Tensor, b: Tensor) -> None:
    """Uncorrelated, and so are their squares."""
    near(float((a * b).mean()), 0, 1, a.numel())
    near(float(((a.square() - 1) * (b.square() - 1)).mean()), 0, 2, a.numel())


def test_numbers_of_a_seed_are_independent(many: Tensor) -> None:
    covariances(many[0::2], many[1::2])  # of one pair
    for lag in (1, 2, 3, 64):
        covariances(many[lag:], many[:-lag])


def test_seeds_that_are_neighbours_have_nothing_in_common() -> None:
    for a, b in ((0, 1), (1, 2), (41, -41), (3, 3 + (1 << 32)), (5, 5 + directions.GOLDEN)):
        one, other = (directions.normals(torch.tensor(s), 0, NUM // 4) for s in (a, b))
        covariances(one, other)


def test_the_first_number_of_one_seed_after_another_is_normal_too() -> None:
    """What P directions of a thousand rounds have at one parameter."""
    rounds = torch.cat([directions.seeds(key, 50) for key in range(4000)])
    first = directions.normals(rounds[:, None], 0, 2)
    num = len(first)
    near(float(first.mean()), 0, 1, 2 * num)
    near(float(first.square().mean()), 1, math.sqrt(2), 2 * num)
    covariances(first[:, 0], first[:, 1])
    covariances(first[1:, 0], first[:-1, 0])


def test_children_differ_from_their_parent_and_each_other() -> None:
    parent = torch.tensor(17)
    family = [parent, *(directions.child(parent, k) for k in range(4)), directions.child(torch.tensor(18), 0)]
    assert len({int(seed) for seed in family}) == len(family)
    own = [directions.normals(seed, 0, NUM // 10) for seed in family]
    for k, a in enumerate(own):
        for b in own[:k]:
            covariances(a, b)


# -- the same bits, however they are made ------------------------------------------------------------------------------


@pytest.mark.parametrize("stretch", (2, 6, 38, 40, 1 << 20))
def test_bits_do_not_depend_on_how_many_are_made_at_a_time(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params, seeds = some_params(torch.float64), directions.seeds(9, 3)
    whole = directions.shifted(params, seeds[0], 0.1), directions.combined(params, seeds, tensor(1.5, -0.3, 2.0))
    monkeypatch.setattr(directions, "STRETCH", {"cpu": stretch})
    again = directions.shifted(params, seeds[0], 0.1), directions.combined(params, seeds, tensor(1.5, -0.3, 2.0))
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(flat(a), flat(b))


def test_any_stretch_can_be_made_again() -> None:
    seed = torch.tensor(4)
    whole = directions.normals(seed, 0, 1001)
    for start, stop in ((0, 1), (0, 2), (6, 7), (100, 333), (998, 1001), (500, 500)):
        assert torch.equal(directions.normals(seed, start, stop), whole[start:stop])


def test_bits_do_not_depend_on_threads_or_on_a_seeds_company() -> None:
    seeds = directions.seeds(3, 4)
    alone = [directions.normals(seed, 0, 100_001) for seed in seeds]
    threads = torch.get_num_threads()
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            together = directions.normals(seeds[:, None], 0, 100_001)
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_bits_are_the_same_side_by_side() -> None:
    """Under vmap, where the seed, the parameters or the factors are each client's own."""
    params, seeds, factors = some_params(), directions.seeds(3, 4), torch.rand(4, 2, dtype=torch.float64)
    moved = vmap(lambda seed: directions.shifted(params, seed, 0.1))(seeds)
    wide = {name: torch.stack([p * k for k in range(4)]) for name, p in params.items()}
    own = vmap(lambda p, seed: directions.shifted(p, seed, 0.1))(wide, seeds)
    summed = vmap(lambda f: directions.combined(params, seeds[:2], f))(factors)
    drawn = vmap(lambda seed, f: directions.combined(params, directions.child(seed, 1)[None], f[:1]))(seeds, factors)
    for k in range(4):
        row = {name: p[k] for name, p in wide.items()}
        alone = directions.child(seeds[k], 1)[None]
        for stacked, single in (
            (moved, directions.shifted(params, seeds[k], 0.1)),
            (own, directions.shifted(row, seeds[k], 0.1)),
            (summed, directions.combined(params, seeds[:2], factors[k])),
            (drawn, directions.combined(params, alone, factors[k, :1])),
        ):
            assert torch.equal(flat({name: a[k] for name, a in stacked.items()}), flat(single))


def test_parameters_are_one_vector_in_their_order() -> None:
    params, seed = some_params(torch.float64), torch.tensor(5)
    expected = flat(params) + 0.25 * directions.normals(seed, 0, length(params))
    assert torch.equal(flat(directions.shifted(params, seed, 0.25)), expected)
    assert torch.equal(directions.shifted({"all": flat(params)}, seed, 0.25)["all"], expected)
    halves = dict(enumerate(flat(params).split(13)))
    assert torch.equal(flat(directions.shifted(halves, seed, 0.25)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_another_type_only_rounds(dtype: torch.dtype) -> None:
    params, seeds, factors = some_params(dtype), directions.seeds(2, 3), tensor(0.7, -1.1, 0.2)
    u = [directions.normals(seed, 0, length(params)) for seed in seeds]
    moved = directions.shifted(params, seeds[0], 0.5)
    assert torch.equal(flat(moved), flat(params) + 0.5 * u[0].to(dtype))
    summed = directions.combined(params, seeds, factors)
    assert torch.equal(flat(summed), (u[0] * factors[0] + u[1] * factors[1] + u[2] * factors[2]).to(dtype))
    assert {a.dtype for a in (*moved.values(), *summed.values())} == {dtype}


def test_each_of_mixed_types_is_rounded_by_itself() -> None:
    params = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.float64)}
    u, moved = directions.normals(torch.tensor(6), 0, 7), directions.shifted(params, torch.tensor(6), 1.0)
    assert torch.equal(moved["a"], u[:4].to(torch.bfloat16)) and torch.equal(moved["b"], u[4:])


def test_shifted_leaves_its_argument_untouched() -> None:
    params = some_params()
    before, places = {k: p.clone() for k, p in params.items()}, {p.data_ptr() for p in params.values() if p.numel()}
    moved = directions.shifted(params, torch.tensor(1), 0.1)
    assert all(torch.equal(params[name], before[name]) for name in params)
    assert list(moved) == list(params) and all(moved[name].shape == p.shape for name, p in params.items())
    assert places.isdisjoint({p.data_ptr() for p in moved.values()})
    assert not torch.equal(flat(moved), flat(params))


def test_combined_is_the_sum_in_the_order_of_the_seeds() -> None:
    """Bit for bit; in another order the roundings differ."""
    params, seeds = some_params(torch.float64), directions.seeds(21, 7)
    factors = torch.logspace(-6, 3, 7, dtype=torch.float64)
    total = torch.zeros(length(params), dtype=torch.float64)
    for seed, factor in zip(seeds, factors, strict=True):
        total = total + directions.normals(seed, 0, length(params)) * factor
    assert torch.equal(flat(directions.combined(params, seeds, factors)), total)
    backwards = directions.combined(params, seeds.flip(0), factors.flip(0))
    assert not torch.equal(flat(backwards), total)
    agree(flat(backwards), total, 1e-9)


def test_no_parameters_have_no_direction() -> None:
    assert directions.shifted({}, torch.tensor(1), 0.1) == {}
    assert directions.combined({}, directions.seeds(1, 2), tensor(1.0, 2.0)) == {}


# -- the law of the module ---------------------------------------------------------------------------------------------

# Exact, or rounded as IEEE 754 prescribes; and what moves numbers without computing.
ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "neg", "floor", "remainder"}
INTEGERS = {"__lshift__", "__rshift__", "bitwise_and", "bitwise_or", "bitwise_xor", "eq", "ge", "where"}
MOVES = {
    "_to_copy", "alias", "arange", "cat", "clone", "detach", "lift_fresh", "promote_types", "select", "slice",
    "split_with_sizes", "stack", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


class Recording(TorchDispatchMode):
    """Notes every operation of the tensor library."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = fn.__name__.split(".")[0]
        assert (kwargs or {}).get("alpha", 1) == 1, "a fused multiply-add"
        out = fn(*args, **(kwargs or {}))
        self.seen.setdefault(name, set()).add(str(getattr(out, "dtype", None)))
        return out


USES: dict[str, Callable[[Tensors], Any]] = {
    "seeds": lambda params: directions.child(directions.seeds(5, 3)[1], 2),
    "shifted": lambda params: directions.shifted(params, torch.tensor(5), 0.1),
    "combined": lambda params: directions.combined(params, torch.tensor([5, 6]), tensor(0.5, 2.0)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_only_operations_whose_every_bit_is_prescribed(use: str, dtype: torch.dtype) -> None:
    params = some_params(dtype)
    with Recording() as recording:
        USES[use](params)
    assert recording.seen.keys() <= ARITHMETIC | INTEGERS | MOVES
    assert {"__rshift__", "bitwise_xor", "mul", "add"} <= recording.seen.keys()  # it did see them
    if use != "seeds":
        assert recording.seen["div"] == recording.seen["rsub"] == {"torch.float64"}
