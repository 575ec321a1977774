"""Optimisers as pure functions of a `Part` and its `Grads`, so that they also work on stacked and on remote parts.

An optimiser is a learning-rate schedule, rules that change the gradients, and one rule that updates a value:

    sgd(0.1, momentum=0.9, weight_decay=5e-4, clip=1.0)
    adamw(warmup(cosine(1e-3, rounds=200), rounds=10))

The numbers are those of torch.optim, in its order of operations.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Protocol

import torch
from torch import Tensor

from cutlayer import registry
from cutlayer.core import tree
from cutlayer.core.checks import check
from cutlayer.core.state import Grads, Model, Part, Progress, Tensors
from cutlayer.errors import ConfigError
from cutlayer.optim.rules import (
    ALIKE,
    Adam,
    AdamW,
    Clip,
    GradientRule,
    Momentum,
    Proximal,
    Scope,
    UpdateRule,
    WeightDecay,
    accumulator,
    squared_norm,
)
from cutlayer.optim.schedules import SCHEDULES, Schedule, constant, warmup


class Transform(Protocol):
    """What a method needs of an optimiser."""

    @property
    def lr(self) -> Schedule:
        """The learning-rate schedule, by round."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments kept for each value."""

    @property
    def joint_norm(self) -> bool:
        """Whether `step` needs the joint squared norm in `grads.norm2`."""

    def norm2(self, part: Part, grads: Grads) -> Tensor:
        """Return this part's share of the joint squared norm, of the gradients that reach the clipping rule."""

    def begin(self, model: Model, round: int) -> Part:
        """Return a part with fresh moments and the learning rate of this round."""

    def resume(self, part: Part, round: int) -> Part:
        """Return the part at the learning rate of this round; moments and count are kept."""

    def restart(self, part: Part, model: Model) -> Part:
        """Return the part with new values and fresh moments, in the same round."""

    def step(self, part: Part, grads: Grads) -> Part:
        """Return the part after one update; from its first gradient that is not finite on, it does not move."""


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """The `Transform` of this package: a schedule, gradient rules, and an update rule."""

    lr: Schedule
    before: tuple[GradientRule, ...] = ()
    rule: UpdateRule

    @property
    def joint_norm(self) -> bool:
        return any(rule.joint for rule in self.before)

    @property
    def moments(self) -> tuple[str, ...]:
        return self.rule.moments

    def norm2(self, part: Part, grads: Grads) -> Tensor:
        for change in itertools.takewhile(lambda rule: not rule.joint, self.before):
            grads = change(part, grads)
        return squared_norm(grads.params).double()

    def begin(self, model: Model, round: int) -> Part:
        moments, start = self._fresh_moments(model), self._start(model)
        return Part(*model, moments, count=0, lr=self.lr(round), progress=_no_progress(model), start=start)

    def resume(self, part: Part, round: int) -> Part:
        return part._replace(lr=self.lr(round), progress=_no_progress(part.model), start=self._start(part.model))

    def restart(self, part: Part, model: Model) -> Part:
        return Part(*model, self._fresh_moments(model), 0, part.lr, part.progress, part.start)

    def step(self, part: Part, grads: Grads) -> Part:
        return stepped(part.params, self, part, grads)

    @property
    def treats_values_alike(self) -> bool:
        """Whether updating all values as one flat tensor gives the same numbers as updating each value."""
        return all(type(rule) in ALIKE for rule in (*self.before, self.rule))

    def update(self, part: Part, grads: Grads) -> Part:
        """Take one step, value by value."""
        ok = _still_finite(part.progress.ok, grads)
        for change in self.before:
            grads = change(part, grads)
        params, count = dict(part.params), part.count + 1
        kept = [part.moments[kind] for kind in self.rule.moments]
        moments = [dict(of_kind) for of_kind in kept]
        for name, gradient in grads.params.items():
            old = part.params[name]
            old_moments = [of_kind[name] for of_kind in kept]
            new, new_moments = self.rule(old, gradient, old_moments, part.lr, count)
            params[name] = torch.where(ok, new, old)
            for of_kind, a, b in zip(moments, new_moments, old_moments, strict=True):
                of_kind[name] = torch.where(ok, a, b)
        buffers = {**part.buffers, **tree.where(ok, grads.buffers, part.buffers)}
        by_kind = {**part.moments, **dict(zip(self.rule.moments, moments, strict=True))}
        progress = _advance(part.progress, ok, grads.loss)
        return Part(params, part.frozen, buffers, by_kind, count, part.lr, progress, part.start)

    def update_in_place(self, part: Part, grads: Grads, params: Tensors, moments: dict[str, Tensors]) -> Part:
        """Take one step and write parameters and moments into these, which may be the part's; return the rest."""
        made = self.update(part, grads)
        for target, value in zip(
            tree.tensors((params, moments)), tree.tensors((made.params, made.moments)), strict=True
        ):
            target.copy_(value)
        return made._replace(params={}, moments={})

    def _start(self, model: Model) -> Tensors:
        return model.params if any(rule.anchored for rule in self.before) else {}

    def _fresh_moments(self, model: Model) -> dict[str, Tensors]:
        return {kind: {k: torch.zeros_like(v) for k, v in model.params.items()} for kind in self.rule.moments}


@singledispatch
def stepped(params: Tensors, opt: Optimiser, part: Part, grads: Grads) -> Part:
    """Return the part after one step; an engine with its own mapping of parameters registers its own version."""
    return opt.update(part, grads)


def _still_finite(ok: Tensor, grads: Grads) -> Tensor:
    """Return `ok` and whether the gradients, and the loss and joint norm if given, are finite."""
    norm2 = squared_norm(grads.params) if grads.params else None  # a part without parameters has only its loss
    for value in (norm2, grads.loss, grads.norm2):
        ok = ok if value is None else ok & torch.isfinite(value)
    return ok


def _no_progress(model: Model) -> Progress:
    like = next((t for t in tree.tensors(model) if t.is_floating_point()), torch.zeros((), dtype=torch.float64))
    zero = torch.zeros((), dtype=accumulator(like.dtype), device=like.device)
    return Progress(loss=zero, steps=zero.long(), ok=zero == 0)


def _advance(progress: Progress, ok: Tensor, loss: Tensor | None) -> Progress:
    total = progress.loss
    if loss is not None:
        total = torch.where(ok, total + loss.to(total.dtype), total)
    return Progress(total, progress.steps + ok, ok)


def sgd(
    lr: float | Schedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip: float | None = None,
    clip_scope: Scope = "part",
    clip_decay: bool = False,
    proximal: float = 0.0,
) -> Optimiser:
    """Stochastic gradient descent, with optional momentum."""
    before = _before(clip, clip_scope, weight_decay, clip_decay, proximal)
    return Optimiser(lr=_schedule(lr), before=before, rule=Momentum(momentum, nesterov))


def adam(
    lr: float | Schedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float | None = None,
    clip_scope: Scope = "part",
    clip_decay: bool = False,
    proximal: float = 0.0,
) -> Optimiser:
    """Adam, with coupled weight decay."""
    before = _before(clip, clip_scope, weight_decay, clip_decay, proximal)
    return Optimiser(lr=_schedule(lr), before=before, rule=Adam(betas, eps))


def adamw(
    lr: float | Schedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip: float | None = None,
    clip_scope: Scope = "part",
    proximal: float = 0.0,
) -> Optimiser:
    """Adam, with decoupled weight decay."""
    before = _before(clip, clip_scope, 0.0, False, proximal)
    return Optimiser(lr=_schedule(lr), before=before, rule=AdamW(Adam(betas, eps), weight_decay))


OPTIMISERS: registry.Table[Callable[..., Optimiser]] = registry.table(
    "OPTIMISERS", {"sgd": sgd, "adam": adam, "adamw": adamw}
)


def build(name: str, **options: Any) -> Optimiser:
    """Build the optimiser of this name; `lr` may be a table that names a schedule and a warmup."""
    if isinstance(options.get("lr"), Mapping):
        options["lr"] = _scheduled(options["lr"])
    return registry.make("optimiser", OPTIMISERS, name, options)


def proximal(opt: Optimiser, mu: float) -> Optimiser:
    """Add FedProx's penalty to the objective, so before all other rules."""
    if any(isinstance(rule, Proximal) for rule in opt.before):
        raise ConfigError("the optimiser has a proximal penalty already; give it there or to fedprox, not to both.")
    return replace(opt, before=(Proximal(mu), *opt.before)) if mu else opt


def co_clipped(opt: Optimiser, max_norm: float) -> Optimiser:
    """FedNAR: clip the joint norm of the gradient after weight decay has been added to it."""
    if isinstance(opt.rule, AdamW):
        raise ConfigError("FedNAR clips the weight decay with the gradient, but adamw keeps it apart; use adam or sgd.")
    return replace(opt, before=(*(rule for rule in opt.before if not isinstance(rule, Clip)), Clip(max_norm, "joint")))


def _schedule(lr: float | Schedule) -> Schedule:
    return lr if callable(lr) else constant(lr)


def _scheduled(table: Mapping[str, Any]) -> Schedule:
    rest = {k: v for k, v in table.items() if k not in ("schedule", "warmup")}
    schedule: Schedule = registry.make("schedule", SCHEDULES, str(table.get("schedule", "constant")), rest)
    rounds = table.get("warmup")
    if rounds is None:
        return schedule
    check(type(rounds) is int and rounds > 0, "warmup", rounds, "a whole number of rounds above 0")
    return warmup(schedule, rounds)


def _before(
    clip: float | None, scope: Scope, weight_decay: float, clip_decay: bool, proximal: float
) -> tuple[GradientRule, ...]:
    """Return the gradient rules: first the penalty, which belongs to the objective.

    Clipping comes before weight decay, as with clip_grad_norm_ and torch.optim, or after it (FedNAR).
    """
    penalty = () if proximal == 0 else (Proximal(proximal),)
    clipping = () if clip is None else (Clip(clip, scope),)
    decay = () if weight_decay == 0 else (WeightDecay(weight_decay),)
    if not clip_decay:
        return (*penalty, *clipping, *decay)
    if clip is None:
        raise ConfigError("clip_decay=True clips the weight decay with the gradient, but clip is not set; give both.")
    return (*penalty, *decay, *clipping)
