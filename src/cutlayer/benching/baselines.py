"""The baselines in plain PyTorch: the step by hand, and the limit of the device."""

import copy
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from cutlayer.benching.cases import LR, MOMENTUM, WARM_UP, WEIGHT_DECAY, BenchProblem
from cutlayer.benching.contenders import Contender
from cutlayer.core.precision import Precision, computing
from cutlayer.core.torch_private import foreach_add_, foreach_copy_, foreach_div_
from cutlayer.split.units import units_of

CAPTURE_WARM_UP = 3  # steps before a CUDA graph is recorded, as torch advises


@contextmanager
def fastest(precision: Precision) -> Iterator[None]:
    """Use this precision, and the cuDNN kernels that are fastest here, even if they differ from run to run."""
    with computing(precision):  # which restores all of these settings
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False
        yield


class InTorch(Contender):
    """A baseline in plain PyTorch; a turn takes the steps of a simulation's round of the same number."""

    def __init__(self, problem: BenchProblem) -> None:
        case = problem.case
        self.precision, self.device = case.precision, case.device
        self.x = problem.images.contiguous(memory_format=torch.channels_last)
        self.y = problem.data.y
        self.turns = iter([problem.batches(turn) for turn in range(WARM_UP + case.turns)])

    def turn(self) -> int:
        batches = next(self.turns)
        with fastest(self.precision):
            for of_clients in batches:
                self.step(of_clients)
        return batches.shape[0] * batches.shape[1]

    @abstractmethod
    def step(self, of_clients: Tensor) -> None:
        """Train on one batch of each client."""

    def casting(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        dtype, kind = torch.bfloat16, torch.device(self.device).type
        return torch.autocast(kind, dtype=dtype, enabled=self.precision == "bf16")


class ByHand(InTorch):
    """A step of SMoFi as an expert would write it by hand: two modules and two optimisers per client, and loops."""

    def __init__(self, problem: BenchProblem) -> None:
        super().__init__(problem)
        self.nets = [_channels_last(problem.net) for _ in range(problem.case.clients)]
        halves = [_halves(net, problem.split.cut) for net in self.nets]
        self.halves = [(lower, upper, _sgd(lower), _sgd(upper)) for lower, upper in halves]
        self.losses: list[Tensor] = []

    def turn(self) -> int:
        self.losses = []
        return super().turn()

    def step(self, of_clients: Tensor) -> None:
        """Train on one batch of each client, then average the momenta at the server."""
        for (lower, upper, lower_opt, upper_opt), batch in zip(self.halves, of_clients, strict=True):
            x, y = self.x[batch], self.y[batch]
            with self.casting():
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


class Limit(InTorch):
    """One model on the merged batches of all clients; on CUDA a step is one graph, so that Python costs no time."""

    def __init__(self, problem: BenchProblem) -> None:
        super().__init__(problem)
        self.net = _channels_last(problem.net)
        self.opt = _sgd(self.net)
        self.batch = problem.batches(0)[0].flatten()  # the graph reads the samples of its next step from here
        with fastest(self.precision):
            self.graph = self._recorded() if self.x.is_cuda else None

    def step(self, of_clients: Tensor) -> None:
        self.batch.copy_(of_clients.flatten())
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def _step(self) -> None:
        self.opt.zero_grad()
        with self.casting():
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


def _halves(net: nn.Module, cut: int) -> tuple[nn.Module, nn.Module]:
    modules = [unit.module for unit in units_of(net)]
    return nn.Sequential(*modules[:cut]), nn.Sequential(*modules[cut:])


def _fuse(opts: list[SGD]) -> None:
    """Set the momenta of every optimiser to their mean."""
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


def _channels_last(net: nn.Module) -> nn.Module:
    """Copy a network, to train on images whose channels come last in memory."""
    return copy.deepcopy(net).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
