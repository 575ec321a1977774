"""Specifies random layers by key: which numbers are drawn, what replaces torch's functions, and who falls back."""

import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SEED, agree, distance, images, run, simulation, trained
from test_engines_agree import random_layers
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core import masks
from cutlayer.core.masks import Masks
from cutlayer.core.method import global_model
from cutlayer.core.state import Model
from cutlayer.core.values import Block, PerClient
from cutlayer.engines.graph.compiling import compiling
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

KEY, UNIT = 0x1234_5678_9ABC_DEF0, 3
WORD = (1 << 64) - 1


# -- the generator, in Python's integers ------------------------------------------------------------------------------


def mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def integers(num: int, call: int = 0, key: int = KEY, unit: int = UNIT) -> list[int]:
    """The random integers below 2^32 of the elements of a call."""
    golden = 0x9E3779B97F4A7C15
    seed = (mixed(key) + golden * ((1 << 62) + (unit << 32) + call + 1)) & WORD
    hashes = [mixed((mixed(seed) ^ (k // 2)) * golden & WORD) for k in range(num)]
    return [h >> 32 if k % 2 == 0 else h & 0xFFFFFFFF for k, h in enumerate(hashes)]


def kept(shape: tuple[int, ...], p: float, call: int = 0) -> Tensor:
    """The elements that stay, by hand."""
    numbers = torch.tensor(integers(math.prod(shape), call)).reshape(shape)
    return numbers >= round(p * 2**32)


def drawing(key: int = KEY, unit: int = UNIT) -> Masks:
    own = Masks(torch.tensor(key))
    own.begin(unit)
    return own


def test_a_number_is_a_hash_of_key_unit_call_and_element() -> None:
    ones = torch.ones(3, 5)
    with drawing() as own:
        first, second = F.dropout(ones, 0.25), F.dropout(ones, 0.25)
        own.begin(0)
        other = F.dropout(ones, 0.25)
    agree_on(first, kept((3, 5), 0.25, call=0))
    agree_on(second, kept((3, 5), 0.25, call=1))
    agree_on(other, torch.tensor(integers(15, unit=0)).reshape(3, 5) >= 2**30)
    # Written down once, so that no release changes the masks of an old run.
    assert integers(4) == [1199312214, 1734294323, 3279154266, 110948439]


def agree_on(out: Tensor, expected: Tensor) -> None:
    assert torch.equal(out != 0, expected) and torch.equal(out[expected], torch.full_like(out, 4 / 3)[expected])


def test_the_largest_key_fits() -> None:
    with drawing(2**63 - 1):
        out = F.dropout(torch.ones(64), 0.5)
    assert torch.equal(out != 0, torch.tensor(integers(64, key=2**63 - 1)) >= 2**31)
    assert torch.equal(masks.on_device(2**63 - 1, torch.device("cpu")), torch.tensor(2**63 - 1))


@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_the_rate_is_right_for_elements_keys_units_and_calls(p: float) -> None:
    """Each is a sum of independent draws, within 4 standard deviations of its mean."""
    num = 20_000

    def rate(drawn: Tensor) -> float:
        assert drawn.numel() == num
        return float((drawn.double().mean() - (1 - p)) / math.sqrt(p * (1 - p) / num))

    def first(key: int = KEY, unit: int = UNIT) -> Tensor:
        return drawing(key, unit).kept((10,), p)

    own = drawing()
    found = {
        "elements": own.kept((num,), p),
        "calls": torch.stack([own.kept((10,), p) for _ in range(num // 10)]),
        "units": torch.stack([first(unit=unit) for unit in range(num // 10)]),
        "keys": torch.stack([first(key) for key in range(num // 10)]),
    }
    assert {name: abs(rate(drawn)) < 4 for name, drawn in found.items()} == dict.fromkeys(found, True)


def test_neighbours_are_independent() -> None:
    """Chi-square of the four pairs of two masks, for neighbours in elements, calls, units and keys."""
    num, p = 20_000, 0.5
    own = drawing()
    mask, later = own.kept((num,), p), own.kept((num,), p)
    beside, next_key = drawing(unit=UNIT + 1).kept((num,), p), drawing(KEY + 1).kept((num,), p)
    for other in (mask.roll(1), mask.roll(2), later, beside, next_key):
        counts = torch.bincount(2 * mask.long() + other.long(), minlength=4).double()
        assert float(((counts - num / 4) ** 2 / (num / 4)).sum()) < 16.27  # 3 degrees of freedom, one in a thousand


def test_uniform_numbers_fill_their_range_evenly() -> None:
    drawn = drawing().uniform((20_000,))
    counts = torch.histc(drawn, 20, 0.0, 1.0)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.82  # 19 degrees of freedom, one in a thousand
    assert torch.equal(drawn[:3] * 2**32, torch.tensor(integers(3), dtype=torch.float64))


# -- what replaces torch's functions ----------------------------------------------------------------------------------

P = 0.3
SCALE = 1 / (1 - P)


def dropped(x: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    return x * kept(shape or tuple(x.shape), P) * SCALE


def selu_dropped(x: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """What is dropped becomes SELU's floor, then all is scaled and shifted to keep mean and variance."""
    floor = -1.0507009873554805 * 1.6732632423543772
    a = (1 - P + P * (1 - P) * floor**2) ** -0.5
    stays = kept(shape or tuple(x.shape), P).double()
    return a * (x * stays + floor * (1 - stays)) - a * P * floor


def leaky(x: Tensor, lower: float, upper: float) -> Tensor:
    slope = torch.tensor(integers(x.numel()), dtype=torch.float64).reshape(x.shape) / 2**32 * (upper - lower) + lower
    return torch.where(x > 0, x, x * slope)


aten = torch.ops.aten
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "F.dropout": (lambda x: F.dropout(x, P), dropped),
    "nn.Dropout": (nn.Dropout(P), dropped),
    "nn.Dropout in place": (nn.Dropout(P, inplace=True), dropped),
    "torch.dropout": (lambda x: torch.dropout(x, p=P, train=True), dropped),
    "torch.dropout_": (lambda x: torch.dropout_(x, P, True), dropped),
    "aten.dropout": (lambda x: aten.dropout.default(x, P, True), dropped),
    "aten.dropout, any overload": (lambda x: aten.dropout(x, P, True), dropped),
    "aten.dropout_": (lambda x: aten.dropout_.default(x, P, True), dropped),
    "torch.native_dropout": (lambda x: torch.native_dropout(x, P, True)[0], dropped),
    "aten.native_dropout": (lambda x: aten.native_dropout.default(x, P, True)[0], dropped),
    "nn.Dropout1d": (nn.Dropout1d(P), lambda x: dropped(x, (4, 6, 1))),
    "F.dropout1d of one sample": (lambda x: F.dropout1d(x[0], P), lambda x: dropped(x[0], (6, 1))),
    "nn.Dropout2d": (lambda x: nn.Dropout2d(P)(x[..., None]), lambda x: dropped(x[..., None], (4, 6, 1, 1))),
    "nn.Dropout3d": (
        lambda x: nn.Dropout3d(P, inplace=True)(x[..., None, None]),
        lambda x: dropped(x[..., None, None], (4, 6, 1, 1, 1)),
    ),
    "F.dropout3d of one sample": (
        lambda x: F.dropout3d(x[..., None], P),
        lambda x: dropped(x[..., None], (4, 1, 1, 1)),
    ),
    "aten.feature_dropout": (lambda x: aten.feature_dropout.default(x, P, True), lambda x: dropped(x, (4, 6, 1))),
    "nn.AlphaDropout": (nn.AlphaDropout(P), selu_dropped),
    "F.alpha_dropout in place": (lambda x: F.alpha_dropout(x, P, True, inplace=True), selu_dropped),
    "aten.alpha_dropout": (lambda x: aten.alpha_dropout.default(x, P, True), selu_dropped),
    "nn.FeatureAlphaDropout": (nn.FeatureAlphaDropout(P), lambda x: selu_dropped(x, (4, 6, 1))),
    "nn.RReLU": (nn.RReLU(0.1, 0.4), lambda x: leaky(x, 0.1, 0.4)),
    "nn.RReLU in place": (nn.RReLU(inplace=True), lambda x: leaky(x, 1 / 8, 1 / 3)),
    "torch.rrelu_": (lambda x: torch.rrelu_(x, 0.1, 0.4, training=True), lambda x: leaky(x, 0.1, 0.4)),
    "aten.rrelu_": (lambda x: aten.rrelu_.default(x, 0.1, 0.4, True, None), lambda x: leaky(x, 0.1, 0.4)),
    "aten.rrelu": (lambda x: aten.rrelu.default(x, 0.1, 0.4, True), lambda x: leaky(x, 0.1, 0.4)),
}


def inputs(*shape: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, generator=random)


def with_gradient(function: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of its sum weighted by 1, 2, 3, ..."""
    leaf = x.clone().requires_grad_()
    out = function(leaf * 1.0)  # in-place functions may not write into a leaf
    (gradient,) = torch.autograd.grad((out * torch.arange(1.0, 1 + out.numel()).reshape(out.shape)).sum(), leaf)
    return out.detach(), gradient


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("error")
def test_a_function_is_replaced_forwards_and_backwards(name: str) -> None:
    function, by_hand = FUNCTIONS[name]
    x, state = inputs(4, 6, 5), torch.get_rng_state()
    with drawing():
        found = with_gradient(function, x)
    torch.testing.assert_close(found, with_gradient(by_hand, x), rtol=1e-14, atol=1e-14)
    assert torch.equal(torch.get_rng_state(), state)  # torch's own generator plays no part


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.endswith(("in place", "_"))])
def test_a_function_in_place_writes_into_its_input(name: str) -> None:
    x = inputs(4, 6, 5)
    with drawing():
        out = FUNCTIONS[name][0](x)
    assert out is x and not torch.equal(x, inputs(4, 6, 5))


@pytest.mark.filterwarnings("ignore:dropout")  # of inputs with few axes
@pytest.mark.parametrize("name", ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu"])
def test_a_function_that_draws_nothing_is_torchs_own(name: str) -> None:
    function, x = getattr(F, name), inputs(4, 6, 5)
    with drawing():
        assert torch.equal(function(x, training=False), function(x, training=False))
        if name != "rrelu":
            assert torch.equal(function(x, 0.0, training=True), x)
            assert not function(x, 1.0, training=True).any()
            with pytest.raises(ValueError, match="between 0 and 1"):
                function(x, 1.5)


# -- attention --------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, scale: float | None = None) -> Tensor:
    weights = torch.softmax(q @ k.mT * (scale or q.shape[-1] ** -0.5) + bias, -1)
    weights = weights.nan_to_num(0.0)  # of rows in which everything is masked
    return dropped(weights) @ v


HIDDEN = torch.tensor([[True, True, False], [False, False, False], [True, True, True], [False, True, True]])
BIAS = torch.where(HIDDEN, 0.5, -math.inf).double()
ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scaled": ({"scale": 0.3}, {"scale": 0.3}),
    "causal": ({"is_causal": True}, {"bias": torch.full((4, 3), -math.inf, dtype=torch.float64).triu(1)}),
    "boolean mask": ({"attn_mask": HIDDEN}, {"bias": torch.where(HIDDEN, 0.0, -math.inf)}),
    "bias": ({"attn_mask": BIAS}, {"bias": BIAS}),
}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("of", (F, aten), ids=("F", "aten"))
def test_attention_drops_weights(name: str, of: Any) -> None:
    options, by_hand = ATTENTIONS[name]
    q, k, v = inputs(2, 4, 6), inputs(2, 3, 6) + 0.1, inputs(2, 3, 5)
    for x in (q, k, v):
        x.requires_grad_()
    with drawing():
        found = of.scaled_dot_product_attention(q, k, v, dropout_p=P, **options)
    expected = attention(q, k, v, **by_hand)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients, wanted = (torch.autograd.grad((out**2).sum(), (q, k, v)) for out in (found, expected.nan_to_num()))
    assert all(g.isfinite().all() for g in gradients)
    if "mask" not in name and name != "bias":  # by hand, a row without anything to attend to has a gradient of NaN
        torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)


def test_attention_shares_keys_between_heads_and_is_torchs_own_without_dropout() -> None:
    q, k, v = inputs(2, 4, 3, 6), inputs(2, 2, 3, 6), inputs(2, 2, 3, 5)
    k4, v4 = (a.repeat_interleave(2, dim=1) for a in (k, v))
    with drawing():
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=P, enable_gqa=True)
        still = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(found, attention(q, k4, v4), rtol=1e-12, atol=1e-12)
    assert torch.equal(still, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("need_weights", (True, False))
def test_multi_head_attention_drops_weights(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(6, 2, dropout=P, batch_first=True).double(), inputs(2, 4, 6)
    with drawing():
        found, weights = layer(x, x, x, need_weights=need_weights)
    heads = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).reshape(2, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
    q, k, v = heads.reshape(3, 4, 4, 3)  # samples and heads are one axis
    merged = attention(q, k, v).reshape(2, 2, 4, 3).transpose(1, 2).reshape(2, 4, 6)
    torch.testing.assert_close(found, layer.out_proj(merged), rtol=1e-12, atol=1e-12)
    assert (weights is None) is not need_weights


def test_a_transformer_layer_draws_nothing_from_torch() -> None:
    layer, x = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True), torch.ones(2, 4, 6)
    state = torch.get_rng_state()
    with drawing() as own:
        one = layer(x)
        assert own._calls == 4  # attention, and three more
    with drawing():
        two = layer(x)
    assert torch.equal(one, two) and torch.equal(torch.get_rng_state(), state)


# -- segments ---------------------------------------------------------------------------------------------------------


def whole(split: Split) -> Model:
    client, server = split.initial()
    return client.joined(server)


def test_a_key_may_be_a_number_or_a_tensor() -> None:
    split, x = Split(random_layers(), 2), images(4).x
    by_number, by_tensor = (split.whole(whole(split), x, key)[0] for key in (KEY, torch.tensor(KEY)))
    assert torch.equal(by_number, by_tensor)
    assert not torch.equal(by_number, split.whole(whole(split), x, KEY + 1)[0])


def test_the_calls_of_a_unit_are_numbered_from_0() -> None:
    split, ones = Split(nn.Sequential(nn.Flatten(), nn.Sequential(nn.Dropout(P), nn.Dropout(P))), 1), torch.ones(3, 5)
    out, _ = split.whole(Model({}, {}, {}), ones, KEY)
    own = drawing(unit=1)
    assert torch.equal(out != 0, own.kept((3, 5), P) & own.kept((3, 5), P))


@pytest.mark.parametrize("cut", range(6))
def test_the_cut_does_not_change_what_is_drawn(cut: int) -> None:
    split, x = Split(random_layers(), 0), images(4).x
    values = whole(split)
    assert torch.equal(split.with_cut(cut).whole(values, x, KEY)[0], split.whole(values, x, KEY)[0])


def test_every_row_of_a_stack_draws_by_its_own_key() -> None:
    split, x = Split(random_layers(), 2), images(12).x.reshape(3, 4, 1, 8, 8)
    values, keys = whole(split), torch.tensor([KEY, 5, 2**63 - 1])
    found = torch.func.vmap(lambda x, key: split.whole(values, x, key)[0])(x, keys)
    agree(found, torch.stack([split.whole(values, own, int(key))[0] for own, key in zip(x, keys, strict=True)]))


@torch.no_grad()
def test_evaluation_draws_nothing() -> None:
    split, x = Split(random_layers(), 2), images(4).x
    assert torch.equal(split.predict(whole(split), x), random_layers().eval()(x))


def test_bfloat16_draws_the_same() -> None:
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    with drawing():
        half = F.dropout(x, P)
    with drawing():
        assert half.dtype == x.dtype and torch.equal(half != 0, F.dropout(x.float(), P) != 0)


class Exported(nn.Module):
    """Random functions as torch.export writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = random_layers()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def test_an_exported_model_draws_what_the_model_draws() -> None:
    x = images(4).x
    exported = torch.export.export(Exported(), (x,), strict=False).module()
    outs = []
    for net in (Exported(), exported):
        with drawing():
            outs.append(net(x))
    agree(outs[1], outs[0])


class DropPath(nn.Module):
    """Drops whole samples, as timm does; transformers does it with `torch.rand`."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), *(1 for _ in x.shape[1:])).bernoulli_(0.75)
        return x * kept.div_(0.75)


class RandomDepth(nn.Module):
    """Drops whole samples, as transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        kept = 0.75 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)
        kept.floor_()
        return x.div(0.75) * kept


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", (nn.RReLU, DropPath, RandomDepth))
def test_compiled_layers_draw_the_same_bits(kind: type[nn.Module]) -> None:
    """Torch's compiler must not take the counter for an index of memory."""
    split, x = Split(nn.Sequential(nn.Dropout(P), kind()), 1), -torch.ones(1000, 37, requires_grad=True)
    for key in (5, 2**63 - 1):
        plain, _ = split.whole(Model({}, {}, {}), x, torch.tensor(key))
        with compiling():
            fast, _ = split.whole(Model({}, {}, {}), x, torch.tensor(key))
        assert "Compiled" in str(fast.grad_fn)
        assert torch.equal(plain, fast)
        assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (plain, fast)))


# -- runs -------------------------------------------------------------------------------------------------------------

OPT = optim.sgd(0.05, momentum=0.9)


def simulated(net: nn.Module | None = None, name: str = "sfl_v1", cut: int = 2, **options: Any) -> Simulation:
    return simulation(methods.build(name, Split(net or random_layers(), cut), OPT, OPT), **options)


def test_two_cuts_train_alike() -> None:
    at = {cut: trained(methods.build("sfl_v1", Split(random_layers(), cut), OPT, OPT)) for cut in (1, 3)}
    agree(at[1], at[3])


@pytest.mark.parametrize("engine", ("vmap", "auto"))
def test_a_model_with_random_layers_stays_on_vmap(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    assert simulated(engine=engine).engine_name == "vmap"
    assert not caplog.records


DROPPING = Split(nn.Sequential(nn.Dropout(P), nn.Dropout(P)), 1)


def drop(x: Tensor, key: Tensor) -> Tensor:
    out: Tensor = DROPPING.whole(Model({}, {}, {}), x, key)[0]
    return out


def check_replays(engine: Graph, device: str) -> None:
    """Chains of two clients with another key at each step draw what each key says, in one recording for each lane."""
    ones = torch.ones(2, 6, 7, device=device)
    for step in range(6):
        keys = {j: 10**18 + 10 * step + j for j in (0, 1)}
        x = PerClient("clients", [Block((0, 1), ones, stacked=True)])
        made = PerClient("clients", engine.call(drop, [x, engine.keys(keys)], (0, 1)))
        for j, key in keys.items():
            expected = drop(torch.ones(6, 7), torch.tensor(key))
            assert torch.equal(engine.real(made.at(j)).cpu(), expected), (step, j)
    assert engine.num_recordings == 2 and not engine.refused


def test_a_recording_takes_the_key_of_each_step() -> None:
    check_replays(Graph(Again(torch.device("cpu")), 2), "cpu")


def test_recordings_are_replayed_with_new_masks() -> None:
    sim = simulated()
    sim.backend.engine = engine = Graph(Again(torch.device("cpu")), 5)
    state = run(sim, 3)
    before = engine.num_recordings
    states = [state := sim.round(state) for _ in range(3)]
    assert 0 < engine.num_recordings == before and not engine.refused
    agree(global_model(states[-1]).params, global_model(run(simulated(), 6)).params)


def test_a_round_that_is_resumed_draws_the_same() -> None:
    first = simulated(engine="vmap")
    state = first.round(first.start())
    expected, again = first.round(state), simulated(engine="vmap").round(state)
    agree(global_model(again).params, global_model(expected).params, 0)
    other = simulated(engine="vmap", seed=SEED + 1).round(state)
    assert distance(global_model(other).params, global_model(expected).params) > 1e-3


def test_uniform_numbers_and_coins_are_hashes() -> None:
    numbers = torch.tensor(integers(15), dtype=torch.float64).reshape(3, 5)
    rates = torch.linspace(0, 1, 15, dtype=torch.float64).reshape(3, 5)
    draws = {
        "rand": (lambda: torch.rand(3, 5, dtype=torch.float64), numbers / 2**32),
        "rand of a list": (lambda: torch.rand([3, 5]), (numbers / 2**8).floor().float() / 2**24),
        "rand of aten": (lambda: torch.ops.aten.rand.default([3, 5], dtype=torch.float64), numbers / 2**32),
        "rand_like": (lambda: torch.rand_like(rates), numbers / 2**32),
        "rand_like in bfloat16": (
            lambda: torch.rand_like(rates, dtype=torch.bfloat16),
            (numbers / 2**24).floor().bfloat16() / 2**8,
        ),
        "bernoulli": (lambda: torch.bernoulli(rates), (numbers / 2**32 < rates).double()),
        "bernoulli of a method": (lambda: rates.bernoulli(0.25), (numbers < 2**30).double()),
        "bernoulli_": (lambda: torch.empty(3, 5).bernoulli_(0.25), (numbers < 2**30).float()),
        "bernoulli_ of aten": (
            lambda: torch.ops.aten.bernoulli_.float(torch.empty(3, 5), 0.25),
            (numbers < 2**30).float(),
        ),
        "bernoulli_ of rates": (lambda: torch.empty(3, 5).bernoulli_(rates), (numbers / 2**32 < rates).float()),
    }
    before = torch.get_rng_state()
    for name, (draw, expected) in draws.items():
        with drawing():
            found = draw()
        assert found.dtype == expected.dtype and torch.equal(found, expected), name
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_ones_own_is_used() -> None:
    with drawing():
        found = torch.rand(5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, torch.rand(5, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16))
def test_no_uniform_number_is_rounded_to_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = torch.full((1,), 2**32 - 1)
    monkeypatch.setattr(masks.directions, "halves", lambda hashes: (largest, largest))
    found = drawing().uniform((2,), dtype)
    assert found.dtype == dtype and bool((found > 0.99).all() and (found < 1).all())


@pytest.mark.parametrize("kind", (DropPath, RandomDepth))
def test_stochastic_depth_runs_on_every_engine(kind: type[nn.Module]) -> None:
    def sim(engine: str = "loop", cut: int = 3, seed: int = SEED) -> Simulation:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), kind(), nn.Tanh(), kind(), nn.Linear(8, 10)).double()
        return simulated(net, cut=cut, engine=engine, seed=seed)

    vmap, graph = sim("vmap"), sim()
    graph.backend.engine = Graph(Again(torch.device("cpu")), 5)
    assert vmap.engine_name == "vmap"
    expected = global_model(run(sim())).params
    for other in (vmap, graph, sim(cut=1)):
        agree(global_model(run(other)).params, expected, 1e-9)
    assert not graph.backend.engine.refused and graph.backend.engine.num_recordings
    assert distance(global_model(run(sim(seed=SEED + 1))).params, expected) > 1e-4


class Gumbel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x)


def noise(x: Tensor) -> Tensor:
    return torch.randn_like(x)


class Noisy(nn.Module):
    """Draws in a function that its forward does not name."""

    def forward(self, x: Tensor) -> Tensor:
        return x + noise(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 8, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)[0]
        return out


OTHERS = {
    "gumbel_softmax in Gumbel": Gumbel,
    "torch.randn_like": Noisy,
    "the dropout of '2.layers' (LSTM)": Recurrent,
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize(
    ("engine", "why"), [("vmap", "vmap cannot stack"), ("auto", "vmap cannot stack"), ("graph", "graph cannot record")]
)
def test_what_only_torch_can_draw_falls_back_to_loop_and_says_why(
    what: str, engine: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def net() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            layers = nn.Flatten(), nn.Linear(64, 8), OTHERS[what](), nn.Dropout(0.5), nn.Linear(8, 10)
            return nn.Sequential(*layers).double()

    sim = simulated(net(), cut=3, engine=engine)
    assert sim.engine_name == "loop"
    assert caplog.messages == [f"engine loop: in training, {what} draws from torch's random generator, which {why}"]
    found = global_model(run(sim)).params
    torch.manual_seed(7)  # what is drawn still depends on the seed of the run alone
    agree(global_model(run(simulated(net(), cut=3))).params, found, 0)
    assert distance(global_model(run(simulated(net(), cut=3, seed=SEED + 1))).params, found) > 1e-4
