"""HASFL in plain PyTorch: every client has a whole model, and some of its layers are kept equal."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from conftest import round_key
from torch import Tensor, nn

from cutlayer.core.batches import Batching, Walk
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.split import Split

Loss = Callable[[Tensor, Tensor], Tensor]
Samples = list[np.ndarray]  # of every client


class Told(NamedTuple):
    """Loss, gradients and new buffers of one batch."""

    gradient: dict[str, Tensor]
    buffers: dict[str, Tensor]
    loss: Tensor


class World(NamedTuple):
    """What everything is computed on."""

    data: Arrays
    partition: Partition
    lr: float = 0.1
    loss: Loss = F.cross_entropy

    @property
    def everyone(self) -> range:
        return range(len(self.partition))

    def batches(self, number: int, steps: int, sizes: Sequence[int]) -> Iterator[Samples]:
        """The samples of every client, step by step, in a round."""
        walk = Walk(Batching(size=4), self.partition.clients, round_key(number), dict(enumerate(sizes)))
        for step in range(steps):
            yield [walk.samples(j, step) for j in self.everyone]

    def told(self, net: nn.Module, samples: np.ndarray) -> Told:
        """Compute one batch without changing the module."""
        net, batch = copy.deepcopy(net).train(), self.data.take(samples)
        loss = self.loss(net(batch.x), batch.y)
        loss.backward()
        return Told({name: p.grad for name, p in net.named_parameters()}, dict(net.named_buffers()), loss.detach())

    def train(self, nets: list[nn.Module], steps: Iterator[Samples], deepest: int, bad: Sequence[int] = ()) -> None:
        """Each client's layers up to the deepest cut by its own gradient, those above by the mean of all.

        Bad clients stand still and play no part in the common layers.
        """
        own, well = below(nets[0], deepest), [j for j in self.everyone if j not in bad]
        for samples in steps:
            seen = [self.told(net, some) for net, some in zip(nets, samples, strict=True)]
            for j, net in enumerate(nets):
                before = parameters(net)
                common = {n: p - self.lr * mean(seen[k].gradient[n] for k in well) for n, p in before.items()}
                common |= {n: mean(seen[k].buffers[n] for k in well) for n in seen[j].buffers}
                mine = {n: p - self.lr * seen[j].gradient[n] for n, p in before.items()} | seen[j].buffers
                put(net, {n: value for n, value in common.items() if n not in own})
                if j not in bad:
                    put(net, {n: value for n, value in mine.items() if n in own})

    def rounds(self, net: nn.Module, deepest: Sequence[int], interval: int, sizes: Sequence[int]) -> dict[str, Tensor]:
        """Train rounds, each with its deepest cut; layers that differ are averaged at the end of a round."""
        now = net.state_dict()
        for number, cut in enumerate(deepest):
            nets = copies(net, now, len(self.partition))
            self.train(nets, self.batches(number, interval, sizes), cut)
            now = averaged(nets)
        return now

    def data_parallel(self, net: nn.Module, steps: Iterator[Samples]) -> dict[str, Tensor]:
        """One model; at every step the mean of the clients' gradients, each of its own batch's mean, all alike."""
        net = copy.deepcopy(net)
        for samples in steps:
            seen = [self.told(net, own) for own in samples]
            moved = {n: p - self.lr * mean(s.gradient[n] for s in seen) for n, p in parameters(net).items()}
            put(net, {**moved, **{n: mean(s.buffers[n] for s in seen) for n in seen[0].buffers}})
        return net.state_dict()


def mean(some: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """Return the mean, or the largest of integers such as batch counters."""
    stack = torch.stack(list(some))
    return stack.mean(0) if stack.is_floating_point() else stack.amax(0)


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in net.named_parameters()}


@torch.no_grad()
def put(net: nn.Module, new: dict[str, Tensor]) -> None:
    named = net.state_dict()
    for name, value in new.items():
        named[name].copy_(value)


def copies(net: nn.Module, values: dict[str, Tensor], num: int) -> list[nn.Module]:
    nets = [copy.deepcopy(net) for _ in range(num)]
    for one in nets:
        put(one, values)
    return nets


def below(net: nn.Module, deepest: int) -> set[str]:
    """Names of the values up to a cut."""
    lower, _ = Split(net, deepest).initial()
    return {name for group in lower for name in group}


def averaged(nets: Sequence[nn.Module]) -> dict[str, Tensor]:
    found = [net.state_dict() for net in nets]
    return {name: mean([one[name] for one in found]) for name in found[0]}
