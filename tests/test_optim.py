"""Optimisers against torch.optim, their guard against bad gradients, and their schedules."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from cutlayer import optim
from cutlayer.core import tree
from cutlayer.core.state import Grads, Model, Part
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.optim import rules
from cutlayer.optim.optimiser import adam, adamw, sgd
from cutlayer.optim.schedules import constant, cosine, exponential, steps, warmup

BETAS = (0.8, 0.95)
PAIRS = {
    "sgd": (sgd(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "momentum": (sgd(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "nesterov": (
        sgd(0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    ),
    "decay": (
        sgd(0.05, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (adam(0.01, betas=BETAS), lambda p: torch.optim.Adam(p, 0.01, betas=BETAS)),
    "adam_decay": (adam(0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    "adamw": (adamw(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
}


def with_clip(optimiser: optim.Optimiser, max_norm: float) -> optim.Optimiser:
    return optim.Optimiser(lr=optimiser.lr, before=(rules.Clip(max_norm), *optimiser.before), rule=optimiser.rule)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        3 * torch.randn(16, 5, generator=generator, dtype=torch.float64),
        torch.randint(3, (16,), generator=generator),
    )


def model_of(network: nn.Module) -> Model:
    return Model({k: v.detach().clone() for k, v in network.named_parameters()}, {}, {})


def gradients(network: nn.Module, params: dict[str, torch.Tensor], step: int) -> Grads:
    x, y = batch(step)

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(torch.func.functional_call(network, values, (x,)), y)

    grads, value = torch.func.grad_and_value(loss)(params)
    return Grads(grads, {}, value.detach())


def simple_part(optimiser: optim.Optimiser) -> Part:
    """Two parameters, one buffer, double precision."""
    params = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor(3.0, dtype=torch.float64)}
    return optimiser.begin(Model(params, {}, {"mean": torch.zeros(2, dtype=torch.float64)}), 0)


def simple_grads(scale: float = 1.0) -> Grads:
    grads = {"a": torch.tensor([0.5, 1.0], dtype=torch.float64), "b": torch.tensor(-2.0, dtype=torch.float64)}
    loss = torch.tensor(0.25, dtype=torch.float64)
    return Grads(tree.map(lambda g: g * scale, grads), {"mean": torch.ones(2, dtype=torch.float64)}, loss)


def same_bits(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.tensors(a), tree.tensors(b), strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("name", PAIRS)
def test_fifty_steps_equal_torch_optim(name: str, max_norm: float | None) -> None:
    ours, theirs = PAIRS[name]
    reference = network()
    torch_optimiser = theirs(reference.parameters())
    ours = ours if max_norm is None else with_clip(ours, max_norm)
    part = ours.begin(model_of(reference), 0)
    num_clipped = 0
    for step in range(50):
        part = ours.step(part, gradients(reference, part.params, step))
        x, y = batch(step)
        torch_optimiser.zero_grad()
        cross_entropy(reference(x), y).backward()
        if max_norm is not None:
            num_clipped += int(nn.utils.clip_grad_norm_(reference.parameters(), max_norm) > max_norm)
        torch_optimiser.step()
    for key, value in reference.named_parameters():
        torch.testing.assert_close(part.params[key], value.detach(), rtol=0, atol=1e-12)
    assert (part.count, int(part.progress.steps)) == (50, 50)
    assert max_norm is None or num_clipped > 0


def test_clip_option_is_the_clip_rule() -> None:
    assert sgd(0.1, clip=0.3, weight_decay=0.2).before == (rules.Clip(0.3), rules.WeightDecay(0.2))
    assert adamw(0.1, clip=0.3, clip_scope="joint").before == (rules.Clip(0.3, "joint"),)
    assert adam(0.1).before == ()
    assert not sgd(0.1, clip=0.3).joint_norm
    assert adam(0.1, clip=0.3, clip_scope="joint").joint_norm


def test_the_objectives_own_terms_come_first_and_decay_is_clipped_only_where_asked() -> None:
    clip, decay, penalty = rules.Clip(0.3), rules.WeightDecay(0.2), rules.Proximal(0.1)
    options = {"clip": 0.3, "weight_decay": 0.2, "proximal": 0.1}
    for make in (sgd, adam):
        assert make(0.1, **options).before == (penalty, clip, decay)
        assert make(0.1, clip_decay=True, **options).before == (penalty, decay, clip)
    assert adamw(0.1, **options).before == (penalty, clip)
    assert sgd(0.1, proximal=0.0).before == ()
    assert optim.proximal(sgd(0.1, clip=0.3), 0.1).before == (penalty, clip)
    assert optim.proximal(sgd(0.1), 0.0) == sgd(0.1)
    assert optim.co_clipped(sgd(0.1, weight_decay=0.2), 0.3).before == (decay, rules.Clip(0.3, "joint"))


def test_clipped_decay_by_hand() -> None:
    """u = g + λ w = (0.5 + 1, 1 − 2, −2 + 3) with λ = 1, ‖u‖² = 4.25; decay after clipping moves by g/‖g‖ + w."""
    clipped, norm = sgd(1.0, weight_decay=1.0, clip=1.0, clip_decay=True), 4.25**0.5 + 1e-6
    after = clipped.step(simple_part(clipped), simple_grads())
    assert after.params["a"].tolist() == pytest.approx([1 - 1.5 / norm, -2 + 1 / norm], abs=1e-15)
    assert after.params["b"].item() == pytest.approx(3 - 1 / norm, abs=1e-15)
    apart, norm = sgd(1.0, weight_decay=1.0, clip=1.0), 5.25**0.5 + 1e-6
    assert apart.step(simple_part(apart), simple_grads()).params["b"].item() == pytest.approx(2 / norm, abs=1e-15)


def test_the_joint_norm_of_clipped_decay_is_that_of_the_decayed_gradients() -> None:
    joint = sgd(1.0, weight_decay=1.0, clip=1.0, clip_scope="joint", clip_decay=True, proximal=0.5)
    part = simple_part(joint)
    assert joint.norm2(part, simple_grads()).item() == pytest.approx(4.25, abs=1e-14)
    apart = sgd(1.0, weight_decay=1.0, clip=1.0, clip_scope="joint")
    assert apart.norm2(part, simple_grads()).item() == pytest.approx(5.25, abs=1e-14)
    whole = sgd(1.0, weight_decay=1.0, clip=1.0, clip_decay=True).step(part, simple_grads())
    after = joint.step(part, simple_grads()._replace(norm2=joint.norm2(part, simple_grads())))
    torch.testing.assert_close(after.params, whole.params, rtol=0, atol=1e-14)


def test_the_penalty_draws_to_where_the_round_began() -> None:
    """b: 3 − 0.1 · (−2) = 3.2, then g = −2 + 5 · 0.2 = −1: 3.3."""
    optimiser = sgd(0.1, proximal=5.0)
    once = optimiser.step(simple_part(optimiser), simple_grads())
    assert once.params["b"].item() == pytest.approx(3.2, abs=1e-15)
    twice = optimiser.step(once, simple_grads())
    assert twice.params["b"].item() == pytest.approx(3.3, abs=1e-15)
    restarted = optimiser.step(optimiser.restart(once, once.model), simple_grads())
    assert restarted.params["b"].item() == twice.params["b"].item()  # within a round the anchor stays
    resumed = optimiser.step(optimiser.resume(once, 1), simple_grads())
    assert resumed.params["b"].item() == pytest.approx(3.4, abs=1e-15)  # a new round has a new one
    assert simple_part(sgd(0.1)).start == {}


@pytest.mark.parametrize("make", [sgd, adam, adamw])
def test_a_penalty_against_torch_optim(make: Callable[..., optim.Optimiser]) -> None:
    theirs = {sgd: torch.optim.SGD, adam: torch.optim.Adam, adamw: torch.optim.AdamW}[make]
    reference = network()
    start = {name: value.detach().clone() for name, value in reference.named_parameters()}
    ours, torch_optimiser = (
        make(0.05, proximal=0.3, weight_decay=0.1),
        theirs(reference.parameters(), 0.05, weight_decay=0.1),
    )
    part = ours.begin(model_of(reference), 0)
    for step in range(20):
        part = ours.step(part, gradients(reference, part.params, step))
        x, y = batch(step)
        torch_optimiser.zero_grad()
        gaps = [(value - start[name]).square().sum() for name, value in reference.named_parameters()]
        (cross_entropy(reference(x), y) + 0.15 * torch.stack(gaps).sum()).backward()
        torch_optimiser.step()
    for key, value in reference.named_parameters():
        torch.testing.assert_close(part.params[key], value.detach(), rtol=0, atol=1e-12)


def test_moments_by_rule() -> None:
    assert simple_part(sgd(0.1)).moments == {}
    assert list(simple_part(sgd(0.1, momentum=0.5)).moments) == ["momentum"]
    assert list(simple_part(adamw(0.1)).moments) == ["first", "second"]


def test_momentum_by_hand() -> None:
    """m1 = 0.5, m2 = 0.5 * 0.5 + 0.5 = 0.75; w = 1 - 0.1 * (0.5 + 0.75) = 0.875."""
    optimiser = sgd(0.1, momentum=0.5)
    part = optimiser.step(optimiser.step(simple_part(optimiser), simple_grads()), simple_grads())
    assert part.params["a"][0].item() == pytest.approx(0.875, abs=1e-15)
    assert part.moments["momentum"]["a"][0].item() == 0.75
    assert part.buffers["mean"].tolist() == [1.0, 1.0]
    assert (part.progress.loss.item(), part.progress.steps.item()) == (0.5, 2)


@pytest.mark.parametrize("optimiser", [sgd(0.1), sgd(0.1, momentum=0.9, weight_decay=0.1), adam(0.1), adamw(0.1)])
def test_inputs_are_not_changed(optimiser: optim.Optimiser) -> None:
    part, grads = simple_part(optimiser), simple_grads()
    part_before, grads_before = tree.map(torch.clone, part), tree.map(torch.clone, grads)
    optimiser.step(part, grads)
    assert same_bits(part, part_before)
    assert same_bits(grads, grads_before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("optimiser", [sgd(0.1, momentum=0.9, weight_decay=0.1, clip=1.0), adamw(0.1), sgd(0.1)])
def test_a_bad_gradient_freezes_the_part_for_the_round(optimiser: optim.Optimiser, bad: float) -> None:
    good = optimiser.step(simple_part(optimiser), simple_grads())
    spoilt = simple_grads()
    spoilt.params["a"][1] = bad
    frozen = optimiser.step(good, spoilt._replace(loss=torch.tensor(math.nan)))
    later = optimiser.step(frozen, simple_grads(2.0))
    for part in (frozen, later):
        assert same_bits((part.params, part.moments, part.buffers), (good.params, good.moments, good.buffers))
        assert (part.progress.loss.item(), part.progress.steps.item(), part.progress.ok.item()) == (0.25, 1, False)
    again = optimiser.step(optimiser.resume(later, 1), simple_grads())
    assert again.progress.ok.item()
    assert not torch.equal(again.params["a"], good.params["a"])


@pytest.mark.parametrize("optimiser", [sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip=1.0), adamw(0.1)])
def test_vmap_equals_eager_with_one_client_spoilt(optimiser: optim.Optimiser) -> None:
    parts = []
    for client in range(3):
        params = {k: v + client for k, v in simple_part(optimiser).params.items()}
        parts.append(optimiser.begin(Model(params, {}, {"mean": torch.zeros(2, dtype=torch.float64)}), 0))
    stacked_params = {k: torch.stack([p.params[k] for p in parts]) for k in parts[0].params}
    model = Model(stacked_params, {}, {"mean": torch.zeros(3, 2, dtype=torch.float64)})
    start = torch.func.vmap(lambda m: tuple(tree.tensors(optimiser.begin(m, 0))))(model)
    leaves = iter(start)
    stacked = tree.map(lambda _: next(leaves), parts[0])

    for step in range(4):
        grads = [simple_grads(client + step + 1.0) for client in range(3)]
        if step == 2:
            grads[1].params["b"].fill_(math.nan)
        parts = [optimiser.step(p, g) for p, g in zip(parts, grads, strict=True)]
        together = tree.map(lambda *rows: torch.stack(rows), *grads)
        stacked = step_all(optimiser, stacked, together)

    for client in range(3):
        for ours, rows in zip(tree.tensors(parts[client]), tree.tensors(stacked), strict=True):
            torch.testing.assert_close(rows[client], ours, rtol=0, atol=1e-14)
    assert stacked.progress.ok.tolist() == [True, False, True]
    assert stacked.progress.steps.tolist() == [4, 2, 4]


def step_all(optimiser: optim.Optimiser, stacked: Part, grads: Grads) -> Part:
    """One step of all rows under vmap, which wants plain numbers outside."""

    def step(tensors: list[torch.Tensor], grads: Grads) -> tuple[torch.Tensor, ...]:
        rows = iter(tensors)
        return tuple(tree.tensors(optimiser.step(tree.map(lambda _: next(rows), stacked), grads)))

    out = iter(torch.func.vmap(step, in_dims=(0, Grads(0, 0, 0)))(tree.tensors(stacked), grads))
    return tree.map(lambda _: next(out), stacked)._replace(count=stacked.count + 1)


@pytest.mark.parametrize("optimiser", [sgd(0.1, momentum=0.9, weight_decay=0.1), adamw(0.1)])
def test_a_missing_gradient_moves_nothing(optimiser: optim.Optimiser) -> None:
    part = optimiser.step(simple_part(optimiser), simple_grads())
    grads = simple_grads()
    del grads.params["b"]
    after = optimiser.step(part, grads._replace(buffers={}))
    assert torch.equal(after.params["b"], part.params["b"])
    assert all(torch.equal(after.moments[kind]["b"], part.moments[kind]["b"]) for kind in part.moments)
    assert not torch.equal(after.params["a"], part.params["a"])
    assert torch.equal(after.buffers["mean"], part.buffers["mean"])


def test_joint_clip_of_two_parts_is_the_clip_of_the_whole() -> None:
    whole_part, whole_grads = simple_part(sgd(0.1)), simple_grads()
    whole = sgd(0.1, clip=0.7).step(whole_part, whole_grads)
    joint = sgd(0.1, clip=0.7, clip_scope="joint")
    norm2 = sum(rules.squared_norm({k: g}) for k, g in whole_grads.params.items())
    assert norm2.item() == pytest.approx(0.25 + 1 + 4, abs=1e-14)
    for key in ("a", "b"):
        part = joint.begin(Model({key: whole_part.params[key]}, {}, {}), 0)
        after = joint.step(part, Grads({key: whole_grads.params[key]}, {}, norm2=norm2))
        torch.testing.assert_close(after.params[key], whole.params[key], rtol=0, atol=1e-14)
        alone = sgd(0.1, clip=0.7).step(part, Grads({key: whole_grads.params[key]}, {}))
        assert not torch.allclose(alone.params[key], whole.params[key])


def test_a_bad_gradient_on_the_other_side_of_the_cut_freezes_this_side() -> None:
    joint = sgd(0.1, clip=0.7, clip_scope="joint")
    part = simple_part(joint)
    after = joint.step(part, simple_grads()._replace(norm2=torch.tensor(math.nan)))
    assert same_bits((after.params, after.buffers), (part.params, part.buffers))
    assert not after.progress.ok.item()


def test_rounds_begin_resume_and_restart() -> None:
    optimiser = sgd(exponential(0.1, decay=0.5), momentum=0.9)
    part = optimiser.step(simple_part(optimiser), simple_grads())
    resumed = optimiser.resume(part, 2)
    assert (resumed.lr, resumed.count, resumed.progress.steps.item()) == (0.025, 1, 0)
    assert same_bits((resumed.params, resumed.moments), (part.params, part.moments))
    restarted = optimiser.restart(part, Model({"c": torch.ones(2)}, {"f": torch.ones(1)}, {}))
    assert (restarted.lr, restarted.count, restarted.progress.loss.item()) == (0.1, 0, 0.25)
    assert list(restarted.params) == ["c"]
    assert list(restarted.frozen) == ["f"]
    assert restarted.moments["momentum"]["c"].tolist() == [0.0, 0.0]


def test_an_empty_part_steps() -> None:
    optimiser = adam(0.1, clip=1.0)
    part = optimiser.step(optimiser.begin(Model({}, {}, {}), 0), Grads({}, {}))
    assert (part.params, part.count, part.progress.steps.item(), part.progress.ok.item()) == ({}, 1, 1, True)
    assert part.progress.loss.dtype == torch.float64  # enough for the losses of any model


def test_progress_has_the_precision_of_the_model_but_at_least_single() -> None:
    def dtype_of(dtype: torch.dtype) -> torch.dtype:
        return sgd(0.1).begin(Model({"a": torch.zeros(1, dtype=dtype)}, {}, {}), 0).progress.loss.dtype

    assert dtype_of(torch.float64) == torch.float64
    assert dtype_of(torch.bfloat16) == torch.float32


def test_half_precision_values_keep_their_type() -> None:
    optimiser = sgd(0.5, momentum=0.5, clip=1.0)
    part = optimiser.begin(Model({"a": torch.full((4,), 1.0, dtype=torch.float16)}, {}, {}), 0)
    after = optimiser.step(part, Grads({"a": torch.full((4,), 300.0, dtype=torch.float16)}, {}))
    assert after.params["a"].dtype == torch.float16  # the norm is 600: its square does not fit into half precision
    assert after.params["a"].tolist() == pytest.approx([0.75] * 4, abs=1e-3)


def test_schedules() -> None:
    assert [constant(0.1)(r) for r in (0, 9)] == [0.1, 0.1]
    assert [exponential(0.1)(r) for r in (0, 1, 2)] == pytest.approx([0.1, 0.0998, 0.0996004], abs=1e-15)
    assert [cosine(0.2, rounds=4)(r) for r in (0, 2, 4, 5)] == pytest.approx([0.2, 0.1, 0.0, 0.0], abs=1e-15)
    assert cosine(0.2, rounds=4)(1) == pytest.approx(0.1 * (1 + math.sqrt(0.5)), abs=1e-15)
    staircase = steps(1.0, milestones=(2, 4), factor=0.5)
    assert [staircase(r) for r in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.25]
    warm = warmup(staircase, rounds=4)
    assert [warm(r) for r in range(5)] == [0.25, 0.5, 0.375, 0.5, 0.25]


def test_optimisers_compare_and_print() -> None:
    assert sgd(0.1, momentum=0.9) == sgd(constant(0.1), momentum=0.9)
    assert sgd(0.1) != sgd(0.2)
    assert repr(warmup(cosine(0.1, rounds=9), rounds=2)) == "warmup(schedule=cosine(lr=0.1, rounds=9), rounds=2)"
    assert repr(sgd(0.1, momentum=0.9)) == (
        "Optimiser(lr=constant(lr=0.1), before=(), rule=Momentum(beta=0.9, nesterov=False))"
    )


def test_build_by_name() -> None:
    assert optim.build("sgd", lr=0.1, momentum=0.9) == sgd(0.1, momentum=0.9)
    assert optim.build("adam", lr=0.1, betas=[0.8, 0.9]) == adam(0.1, betas=(0.8, 0.9))
    assert optim.build("adamw", lr=0.1) == adamw(0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgd(0.0), "lr is 0.0, but it must be a number above 0."),
        (lambda: sgd("fast"), "lr is 'fast', but it must be a number above 0."),
        (lambda: adam(math.inf), "lr is inf, but it must be a number above 0."),
        (lambda: sgd(0.1, momentum=1.0), "momentum is 1.0, but it must be a number from 0 up to below 1."),
        (
            lambda: sgd(0.1, nesterov=True),
            "nesterov=True needs a momentum above 0, got 0; set momentum, for example to 0.9.",
        ),
        (lambda: sgd(0.1, clip=0), "clip is 0, but it must be a number above 0."),
        (lambda: sgd(0.1, clip=1, clip_scope="all"), "clip_scope is 'all', but it must be 'part' or 'joint'."),
        (lambda: sgd(0.1, weight_decay=-1), "weight_decay is -1, but it must be a number from 0 up."),
        (lambda: adamw(0.1, weight_decay=-1), "weight_decay is -1, but it must be a number from 0 up."),
        (lambda: adam(0.1, betas=(0.9, 1.0)), "betas is (0.9, 1.0), but it must be two numbers from 0 up to below 1."),
        (lambda: sgd(0.1, proximal=-1), "proximal is -1, but it must be a number of at least 0."),
        (lambda: adamw(0.1, proximal=math.nan), "proximal is nan, but it must be a number of at least 0."),
        (
            lambda: sgd(0.1, weight_decay=0.1, clip_decay=True),
            "clip_decay=True clips the weight decay with the gradient, but clip is not set; give both.",
        ),
        (lambda: adam(0.1, eps=0), "eps is 0, but it must be a number above 0."),
        (lambda: exponential(0.1, decay=0), "decay is 0, but it must be a number above 0."),
        (lambda: cosine(0.1, rounds=0), "rounds is 0, but it must be a number above 0."),
        (lambda: warmup(constant(0.1), rounds=0), "rounds is 0, but it must be a number above 0."),
        (lambda: steps(0.1, milestones=(3,), factor=-1), "factor is -1, but it must be a number above 0."),
        (lambda: optim.build("sgd"), "optimiser 'sgd' needs lr; add it"),
        (
            lambda: sgd(0.1, clip=1, clip_scope="joint").step(simple_part(sgd(0.1)), simple_grads()),
            "clip_scope='joint' got no joint gradient norm: this method does not share one across the cut; "
            "use clip_scope='part'.",
        ),
    ],
)
def test_values_that_make_no_sense(make: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        optim.build("adamm", lr=0.1)
    assert str(caught.value) == "unknown optimiser 'adamm'; did you mean 'adam' or 'adamw'?"
    with pytest.raises(UnknownNameError) as caught:
        optim.build("sgd", lr=0.1, momentun=0.9)
    assert str(caught.value) == "unknown option 'momentun' in optimiser 'sgd'; did you mean 'momentum'?"
