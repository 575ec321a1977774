"""What engines are compared with: the step by hand in plain PyTorch, and the limit of the device."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from cutlayer.benching.cases import LR, MOMENTUM, WARM_UP, WEIGHT_DECAY, BenchProblem
from cutlayer.benching.contenders import MemoryUse
from cutlayer.core.precision import Precision, computing
from cutlayer.core.torch_private import foreach_add_, foreach_copy_, foreach_div_
from cutlayer.split.units import units_of

CAPTURE_WARM_UP = 3  # steps before a CUDA graph is recorded, as torch advises


@contextmanager
def fastest(precision: Precision) -> Iterator[None]:
    """This precision of products, and the kernels of cuDNN that are the fastest here, if not the same in every run."""
    with computing(precision):  # which puts all of them back afterwards
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False
        yield


def casting(precision: Precision, device: str) -> AbstractContextManager[None]:
    """For a forward pass."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")


class ByHand:
    """A step of SMoFi as an experienced person would write it: two modules and two optimisers a client, and loops."""

    def __init__(self, problem: BenchProblem) -> None:
        case = problem.case
        self.precision, self.device = case.precision, case.device
        self.x, self.y = _channels_last(problem.images), problem.data.y
        self.nets = [_channels_last_net(problem.net) for _ in range(case.clients)]
        halves = [_halves(net, problem.split.cut) for net in self.nets]
        self.halves = [(lower, upper, _sgd(lower), _sgd(upper)) for lower, upper in halves]
        self.turns = iter([problem.batches(turn) for turn in range(WARM_UP + case.turns)])
        self.losses: list[Tensor] = []

    def turn(self) -> int:
        batches = next(self.turns)
        self.losses = []
        with fastest(self.precision):
            for of_clients in batches:
                self.step(of_clients)
        return batches.shape[0] * batches.shape[1]

    def step(self, of_clients: Tensor) -> None:
        """One batch of each client, then the mean of the momenta at the server."""
        for (lower, upper, lower_opt, upper_opt), batch in zip(self.halves, of_clients, strict=True):
            x, y = self.x[batch], self.y[batch]
            with casting(self.precision, self.device):
                activations = lower(x)
                received = activations.detach().requires_grad_()
                loss = F.cross_entropy(upper(received), y)
            torch.autograd.backward(loss)
            torch.autograd.backward(activations, received.grad)
            for opt in (lower_opt, upper_opt):
                opt.step()
                opt.zero_grad()
            self.losses.append(loss.detach())
        _fuse([upper_opt for *_, upper_opt in self.halves])

    def loss(self) -> float | None:
        return float(torch.stack(self.losses).double().mean())

    def memory(self) -> MemoryUse | None:
        return None


class Limit:
    """One model on the batches of all clients merged; on CUDA a step is one graph, so that nothing waits for Python."""

    def __init__(self, problem: BenchProblem) -> None:
        case = problem.case
        self.precision, self.device = case.precision, case.device
        self.x, self.y = _channels_last(problem.images), problem.data.y
        self.net = _channels_last_net(problem.net)
        self.opt = _sgd(self.net)
        self.turns = iter([problem.batches(turn).flatten(1) for turn in range(WARM_UP + case.turns)])
        self.num_clients = case.clients
        self.batch = problem.batches(0)[0].flatten()  # the graph reads the samples of its next step from here
        with fastest(self.precision):
            self.graph = self._recorded() if self.x.is_cuda else None

    def turn(self) -> int:
        batches = next(self.turns)
        with fastest(self.precision):
            for batch in batches:
                self.batch.copy_(batch)
                if self.graph is None:
                    self._step()
                else:
                    self.graph.replay()
        return len(batches) * self.num_clients

    def _step(self) -> None:
        self.opt.zero_grad()
        with casting(self.precision, self.device):
            loss = F.cross_entropy(self.net(self.x[self.batch]), self.y[self.batch])
        torch.autograd.backward(loss)
        self.opt.step()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(CAPTURE_WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads of its own
            self._step()
        return graph

    def loss(self) -> float | None:
        return None

    def memory(self) -> MemoryUse | None:
        return None


def _halves(net: nn.Module, cut: int) -> tuple[nn.Module, nn.Module]:
    modules = [unit.module for unit in units_of(net)]
    return nn.Sequential(*modules[:cut]), nn.Sequential(*modules[cut:])


def _fuse(opts: list[SGD]) -> None:
    """Every optimiser goes on from the mean of their momenta."""
    momenta = [[opt.state[p]["momentum_buffer"] for p in opt.param_groups[0]["params"]] for opt in opts]
    mean, *others = momenta
    for other in others:
        foreach_add_(mean, other)
    foreach_div_(mean, len(opts))
    for other in others:
        foreach_copy_(other, mean)


def _sgd(net: nn.Module) -> SGD:
    on_gpu = next(net.parameters()).is_cuda
    return SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True if on_gpu else None)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _channels_last_net(net: nn.Module) -> nn.Module:
    """A copy that trains on images whose channels come last in memory."""
    return copy.deepcopy(net).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
