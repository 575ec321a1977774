"""Many small operations as a few kernels, by torch's compiler: inside recordings, where a chain is made once and then
replayed many thousand times."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from cutlayer.core import tree
from cutlayer.core.checks import reason
from cutlayer.core.compiling import compiler, compiling_by
from cutlayer.core.tree import Tree
from cutlayer.engines.out_of_memory import out_of_memory

log = logging.getLogger("cutlayer")
BACKEND = "inductor"  # of torch.compile
REWRITTEN_ON = ("cuda",)  # where the compiler is given a function that this package has rewritten, as that is faster
MOST_FUNCTIONS = 64  # that are kept, with the models and optimisers that they belong to
MOST_OPERATIONS = 2000  # of a function that is compiled: a larger one takes minutes and has large operations anyway

_outliving: ContextVar[bool] = ContextVar("outliving", default=False)


@contextmanager
def outliving() -> Iterator[None]:
    """Inside, functions are run whose gradients are asked for later, perhaps again and again.

    They are compiled apart: at its first backward pass compiled code settles whether it may write over what it saved.
    """
    token = _outliving.set(True)
    try:
        yield
    finally:
        _outliving.reset(token)


class Compiled:
    """A function of trees. For each form of its arguments it is traced to its tensor operations, and compiled.

    It may write into tensors that it is given, also where one of them is given twice.
    """

    def __init__(self, fn: Callable[..., Tree]) -> None:
        self._fn = fn
        self._made: dict[Any, Callable[..., Tree]] = {}

    def __call__(self, *args: Tree) -> Tree:
        tensors = tree.tensors(args)
        firsts, leaves = _firsts(tensors), tuple(a.requires_grad for a in tensors)
        modes = torch.is_grad_enabled() and leaves, torch.is_autocast_enabled(_device(args)), _outliving.get()
        key = _look(args), firsts, modes
        if key not in self._made:
            self._made[key] = self._compiled(args, firsts)
        try:
            return self._made[key](*args)
        except Exception as error:  # a compiler has many ways to fail, and its caller can do without it
            if self._made[key] is self._fn or out_of_memory(error):
                raise
            self._made[key] = self._plain(reason(error))
            return self._fn(*args)

    def _compiled(self, args: tuple[Tree, ...], firsts: tuple[int, ...]) -> Callable[..., Tree]:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a while to import

        from cutlayer.engines.graph.kernels.picking import with_picked_pixels
        from cutlayer.engines.graph.kernels.replacing import with_own_norms

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a function was to be traced in the middle of a recording, which would hold it twice")
        if torch.is_grad_enabled() and _has_backward_of_its_own(self._fn, args):
            return self._plain("it has a backward pass of its own, which a trace would lose")
        shape: list[Tree] = []

        def on_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            distinct = dict(zip(sorted(set(firsts)), tensors, strict=True))
            given = iter([distinct[first] for first in firsts])
            made = self._fn(*tree.map(lambda _: next(given), args))
            shape.append(tree.shapes(made))
            return tuple(tree.tensors(made))

        try:  # in the caller's mode: what the function switches off inside is on again after that, as it was
            traced = make_fx(on_tensors, pre_dispatch=True)(*(a.detach() for a in _distinct(args, firsts)))
        except Exception as error:
            if out_of_memory(error):
                raise  # which says nothing of the function
            return self._plain(reason(error))
        if len(traced.graph.nodes) > MOST_OPERATIONS:
            return self._fn
        if _device(args) in REWRITTEN_ON:
            traced = with_picked_pixels(with_own_norms(traced))
        compiled = _in_fewer_kernels(traced)

        def run(*own: Tree) -> Tree:
            outputs = iter(compiled(*_distinct(own, firsts)))
            return tree.map(lambda _: next(outputs), shape[-1])

        return run

    def _plain(self, why: str) -> Callable[..., Tree]:
        log.warning("not compiled, and so slower: %s (%s)", getattr(self._fn, "__qualname__", ""), why)
        return self._fn


def compiling() -> AbstractContextManager[None]:
    """Inside, functions that can be compiled are."""
    return compiling_by(_compiled)


def compiled(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """The function itself, or, where functions are compiled, the same in as few kernels as possible."""
    by = compiler()
    return fn if by is None else by(fn)


_compiled = lru_cache(maxsize=MOST_FUNCTIONS)(Compiled)


def _in_fewer_kernels(traced: torch.fx.GraphModule) -> Callable[..., Any]:
    """The same in fewer kernels, which are chosen by rules: by timing, the same seed would not give the same bits."""
    # The compiler's cache looks at options, but not at whether a backward pass may write over what was saved for it:
    # code that may was given to pullbacks that last, with other gradients each time. The first of these does nothing.
    options: dict[str, Any] = {"benchmark_harness": not _outliving.get(), "deterministic": True}
    own = options if BACKEND == "inductor" else None
    return torch.compile(traced, backend=BACKEND, dynamic=False, fullgraph=True, options=own)


def _has_backward_of_its_own(fn: Callable[..., Tree], args: tuple[Tree, ...]) -> bool:
    """Whether a gradient on the way through a function is computed by a user's own `autograd.Function`."""
    if not any(a.requires_grad for a in tree.tensors(args)):
        return False
    made = fn(*tree.map(lambda a: a.detach().requires_grad_(a.requires_grad), args))
    waiting = [a.grad_fn for a in tree.tensors(made) if a.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            return True
        new = {later for later, _ in node.next_functions if later is not None} - seen
        seen |= new
        waiting += new
    return False


def _firsts(tensors: list[Tensor]) -> tuple[int, ...]:
    """For each tensor the number of the first one that is the same memory, seen in the same way."""
    found: dict[Any, int] = {}
    return tuple(
        found.setdefault((a.data_ptr(), a.dtype, a.shape, a.stride()) if a.numel() else k, k)
        for k, a in enumerate(tensors)
    )


def _distinct(args: Tree, firsts: tuple[int, ...]) -> list[Tensor]:
    return [a for k, (a, first) in enumerate(zip(tree.tensors(args), firsts, strict=True)) if k == first]


def _device(args: Tree) -> str:
    return next((a.device.type for a in tree.tensors(args)), "cpu")


def _look(value: Tree) -> Any:
    """What a trace depends on: forms of tensors, and everything else as it is."""
    structure, leaves = tree.flatten(value)
    return structure, tuple((a.dtype, tuple(a.shape)) if isinstance(a, Tensor) else a for a in leaves)
