"""Two methods by hand, in plain PyTorch, as a good engineer would write them: what the benchmarks compare with.

One network is loaded with the global values for each client in turn, so nothing is copied that need not be, and
clients take one batch after another, which gives SFL-V1's numbers because its server-side copies meet only when the
round ends.
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

Values = dict[str, Tensor]


class Client(NamedTuple):
    """What one client does in a round."""

    num_samples: int
    batches: list[Tensor]  # the samples of each of its steps


class Training(NamedTuple):
    """The data that clients hold together, and the optimiser's settings."""

    x: Tensor
    y: Tensor
    lr: float
    momentum: float


def cut(model: nn.Module, last: str) -> tuple[nn.Sequential, nn.Sequential]:
    """The children of a model up to this one, and those behind it, under the names that they have in it."""
    children = list(model.named_children())
    at = [name for name, _ in children].index(last) + 1
    return nn.Sequential(OrderedDict(children[:at])), nn.Sequential(OrderedDict(children[at:]))


def fedavg_round(net: nn.Module, clients: list[Client], job: Training) -> float:
    """One round of FedAvg: the network goes from one global model to the next. Gives the mean batch loss."""
    start, mean, losses = copied(net), Mean(clients), []
    for client in clients:
        net.load_state_dict(start)
        opt = SGD(net.parameters(), lr=job.lr, momentum=job.momentum)
        for batch in client.batches:
            opt.zero_grad()
            loss = F.cross_entropy(net(job.x[batch]), job.y[batch])
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        mean.add(net, client)
    net.load_state_dict(mean.values)
    return float(torch.stack(losses).mean())


def sfl_v1_round(lower: nn.Module, upper: nn.Module, clients: list[Client], job: Training) -> float:
    """One round of SFL-V1: both halves go from one global model to the next. Gives the mean batch loss."""
    start_lower, start_upper = copied(lower), copied(upper)
    mean_lower, mean_upper, losses = Mean(clients), Mean(clients), []
    for client in clients:
        lower.load_state_dict(start_lower)
        upper.load_state_dict(start_upper)
        lower_opt = SGD(lower.parameters(), lr=job.lr, momentum=job.momentum)
        upper_opt = SGD(upper.parameters(), lr=job.lr, momentum=job.momentum)
        for batch in client.batches:
            lower_opt.zero_grad()
            upper_opt.zero_grad()
            activations = lower(job.x[batch])
            received = activations.detach().requires_grad_()
            loss = F.cross_entropy(upper(received), job.y[batch])
            loss.backward()
            activations.backward(received.grad)
            upper_opt.step()
            lower_opt.step()
            losses.append(loss.detach())
        mean_lower.add(lower, client)
        mean_upper.add(upper, client)
    lower.load_state_dict(mean_lower.values)
    upper.load_state_dict(mean_upper.values)
    return float(torch.stack(losses).mean())


def copied(net: nn.Module) -> Values:
    return {name: value.clone() for name, value in net.state_dict().items()}


class Mean:
    """The clients' mean model, weighted by their samples; counters by maximum."""

    def __init__(self, clients: list[Client]) -> None:
        self.values: Values = {}
        self._total = sum(client.num_samples for client in clients)

    def add(self, net: nn.Module, client: Client) -> None:
        share = client.num_samples / self._total
        for name, value in net.state_dict().items():
            old = self.values.get(name)
            if not value.is_floating_point():
                self.values[name] = value.clone() if old is None else torch.maximum(old, value)
            elif old is None:
                self.values[name] = value * share
            else:
                old.add_(value, alpha=share)
