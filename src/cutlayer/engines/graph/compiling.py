"""Fuse many small operations into a few kernels with torch's compiler, for recordings that are replayed many thousand
times."""

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
REWRITTEN_ON = ("cuda",)  # devices on which functions are rewritten (`kernels`) before they are compiled
MOST_FUNCTIONS = 64  # compiled functions in the cache; each keeps its model or optimiser alive
MOST_OPERATIONS = 2000  # larger functions take minutes to compile, and their operations are large anyway

_outliving: ContextVar[bool] = ContextVar("outliving", default=False)


@contextmanager
def outliving() -> Iterator[None]:
    """Inside, compile functions for gradients that are asked for later, perhaps repeatedly.

    They are compiled separately: at its first backward pass, compiled code decides whether it may overwrite what it
    saved.
    """
    token = _outliving.set(True)
    try:
        yield
    finally:
        _outliving.reset(token)


class Compiled:
    """A function of trees that is traced to tensor operations and compiled, once for each form of its arguments.

    The function may write into its arguments, even if it is given the same tensor twice.
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
        except Exception as error:  # a compiler can fail in many ways, and the plain function still works
            if self._made[key] is self._fn or out_of_memory(error):
                raise
            self._made[key] = self._plain(reason(error))
            return self._fn(*args)

    def _compiled(self, args: tuple[Tree, ...], firsts: tuple[int, ...]) -> Callable[..., Tree]:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a while to import

        from cutlayer.engines.graph.kernels.picking import with_picked_pixels
        from cutlayer.engines.graph.kernels.replacing import with_own_norms

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a function was traced during a recording, which would then contain it twice")
        if torch.is_grad_enabled() and _has_backward_of_its_own(self._fn, args):
            return self._plain("it has a backward pass of its own, which a trace would lose")
        shape: list[Tree] = []

        def on_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            distinct = dict(zip(sorted(set(firsts)), tensors, strict=True))
            given = iter([distinct[first] for first in firsts])
            made = self._fn(*tree.map(lambda _: next(given), args))
            shape.append(tree.shapes(made))
            return tuple(tree.tensors(made))

        try:  # in the caller's grad mode; a mode that the function changes is restored when it returns
            traced = make_fx(on_tensors, pre_dispatch=True)(*(a.detach() for a in _distinct(args, firsts)))
        except Exception as error:
            if out_of_memory(error):
                raise  # the function is not to blame
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
    """Inside, compile the functions that can be compiled."""
    return compiling_by(_compiled)


def compiled(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return the compiled function inside `compiling`, else the function itself."""
    by = compiler()
    return fn if by is None else by(fn)


_compiled = lru_cache(maxsize=MOST_FUNCTIONS)(Compiled)


def _in_fewer_kernels(traced: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile a trace. Kernels are chosen by rules: chosen by timing, the same seed would not give the same bits."""
    # The compiler's cache compares options, but not whether a backward pass may overwrite what was saved for it. So
    # pullbacks that outlive their chain got code that overwrites, and other gradients each time. `benchmark_harness`
    # has no effect here; it only makes the options differ.
    options: dict[str, Any] = {"benchmark_harness": not _outliving.get(), "deterministic": True}
    own = options if BACKEND == "inductor" else None
    return torch.compile(traced, backend=BACKEND, dynamic=False, fullgraph=True, options=own)


def _has_backward_of_its_own(fn: Callable[..., Tree], args: tuple[Tree, ...]) -> bool:
    """Whether a user's own `autograd.Function` computes a gradient anywhere inside the function."""
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
    """Return, for each tensor, the index of the first one that is the same view of the same memory."""
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
    """Return what a trace depends on: types and shapes of tensors, and all other values."""
    structure, leaves = tree.flatten(value)
    return structure, tuple((a.dtype, tuple(a.shape)) if isinstance(a, Tensor) else a for a in leaves)
