"""Checks of a run before its first round, the same in simulation, on Ray and on devices."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.checks import check_type
from cutlayer.core.kinds import ACTIVATIONS
from cutlayer.core.method import Method, needs_of, shallowest
from cutlayer.core.precision import Precision, check_precision, computing
from cutlayer.core.program import Program
from cutlayer.core.transport import Augmentation
from cutlayer.data.arrays import IGNORED, Arrays
from cutlayer.data.augment import Augment
from cutlayer.errors import ConfigError
from cutlayer.pieces.losses import LOSSES
from cutlayer.split import Split
from cutlayer.split.losses import cross_entropy
from cutlayer.split.rehearsal import is_cross_entropy

log = logging.getLogger("cutlayer")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What is known about a run before it begins."""

    method: Method
    num_clients: int
    counts: Sequence[int] | None  # samples of each client; None if unknown until devices join
    like: Arrays  # two or more samples that show the shape and type of all
    batching: Batching = Batching()
    per_round: int | None = None
    precision: Precision = "fp32"
    chunk: int | None = None
    augment: Augmentation | None = None
    name: str = ""  # of the method in warnings; by default that of its class


def check_run(plan: RunPlan) -> None:
    """Refuse a run that cannot work, before any file is written or deleted and any port is opened."""
    method, batching = plan.method, plan.batching
    check_type("batching", batching, Batching, "such as Batching(size=32)")
    check_type("the method's model", method.model, Split, "such as Split(net, cut=1)")
    needs = needs_of(method)
    if plan.counts is not None:
        check_batch(batching, plan.counts)
    if needs.counts_steps and (batching.steps is not None or batching.epochs != 1):
        given = "steps" if batching.steps is not None else "epochs"
        raise ConfigError(f"this method counts the mini-batches of a round itself; leave {given} out of the batching")
    check_precision(plan.precision, method.model.model)
    if needs.num_clients not in (None, plan.num_clients):
        raise ConfigError(f"the method's lists are for {needs.num_clients} clients, but there are {plan.num_clients}")
    ids = able(plan)
    _check_per_round(plan.per_round, len(ids), needs.fewest_clients)
    if plan.chunk is not None and (type(plan.chunk) is not int or plan.chunk < 1):
        raise ConfigError(f"chunk is {plan.chunk!r}; it must be at least 1, or None for all clients at once")
    if plan.like.num_classes == 1 and is_cross_entropy(method.model.loss):
        raise ConfigError(
            "the data have a single class, so there is nothing to tell apart: check the targets, or give num_classes "
            "if other classes are absent"
        )
    if plan.counts is not None and method.model.loss is cross_entropy and _copies(plan.like):
        raise ConfigError(
            "the targets are the tokens of the inputs, so a model would learn to copy them; to predict the next token, "
            "give loss=cutlayer.losses.next_token, or loss = 'next_token' in a run file"
        )
    _rehearse(plan, ids)
    _warn(plan)


def _copies(data: Arrays) -> bool:
    """Return whether the targets are tokens of the inputs at the same positions, as those of `transformers.Trainer`."""
    known = data.y != IGNORED
    alike = (x for x in tree.tensors(data.x) if x.shape == data.y.shape and x.dtype == data.y.dtype == torch.int64)
    return data.y.dim() > 1 and bool(known.any()) and any(bool((x == data.y)[known].all()) for x in alike)


def able(plan: RunPlan) -> tuple[int, ...]:
    """Return the clients that hold enough samples for a batch; all of them while the counts are unknown."""
    batching = plan.batching
    if plan.counts is None:
        return tuple(range(plan.num_clients))
    return tuple(j for j, num in enumerate(plan.counts) if batching.per_epoch(num, batching.size))


def check_labels(split: Split, data: Arrays) -> None:
    """Refuse labels to be ignored with a loss by name that would take -100 for a value."""
    counts_all = split.loss in LOSSES.values() and not is_cross_entropy(split.loss)
    if counts_all and data.num_classes is not None and bool((data.y == IGNORED).any()):
        raise ConfigError(
            f"the data have labels {IGNORED}, which only cross entropy ignores; leave these samples out, or give a "
            "loss that does"
        )


def check_batch(batching: Batching, counts: Iterable[int]) -> None:
    """Refuse a batch size that no client can fill: each would train on a single smaller batch."""
    largest = max(counts, default=0)
    if batching.size > largest:
        raise ConfigError(
            f"batch size {batching.size} is larger than every client's data (the largest client holds {largest} "
            f"samples); use a batch of at most {largest}, or fewer clients"
        )


def _check_per_round(per_round: int | None, num_clients: int, fewest: int) -> None:
    if num_clients == 0:
        raise ConfigError("no client holds at least 2 samples, so nobody can train; use fewer clients or more data")
    chosen = num_clients if per_round is None else per_round
    if not 1 <= chosen <= num_clients:
        raise ConfigError(f"per_round is {per_round}; it must be from 1 to the {num_clients} clients that hold data")
    if chosen < fewest:
        raise ConfigError(f"this method needs at least {fewest} clients a round, but per_round is {chosen}")


def _rehearse(plan: RunPlan, ids: tuple[int, ...]) -> None:
    """Run the smallest batch that can occur through the model, and compare its parts with the whole."""
    needs, size = needs_of(plan.method), plan.batching.size
    sizes = needs.batch_sizes(ids[-(plan.per_round or len(ids)) :], size)
    few = plan.like.take(range(min(2, size, needs.smallest_batch or 2, *sizes.values())))
    with computing(plan.precision):
        if plan.augment is not None:
            if isinstance(plan.augment, Augment) and (not isinstance(few.x, torch.Tensor) or few.x.dim() != 4):
                raise ConfigError("augment changes images, but the inputs of these data are none; leave it out")
            plan.augment(tree.map(lambda a: a[None], few.x), [0])
        plan.method.model.rehearse(few.x, few.y, few.num_classes)
    plan.method.model.prove(few.x, few.y)
    if needs.merges_batches and (names := plan.method.model.without_rows(few.x)):
        raise ConfigError(
            f"this method merges the clients' batches, but {names[0]!r}, which crosses the cut, has no row for each "
            "sample: it is a client's own for all of its samples. Cut elsewhere, or take a method that keeps clients "
            "apart, such as sfl_v1 or sfl_v2"
        )


def _warn(plan: RunPlan) -> None:
    program = Program(plan.method)
    model = shallowest(plan.method)
    if model.passes_raw and any(program.gives(fn) == ACTIVATIONS for fn in program.functions.values()):
        log.warning(
            "cut %d leaves no weights at the clients: what goes up as activations is their raw input", model.cut
        )
    if plan.precision == "bf16" and needs_of(plan.method).full_precision:
        log.warning(
            "precision bf16: %s compares passes that differ by little, and bfloat16 may round their differences away; "
            "fp32 and tf32 are safer",
            plan.name or program.name,
        )
