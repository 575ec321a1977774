"""The current compiler: an engine sets it, and code with a function worth compiling asks for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cutlayer.core.torch_private import is_inside_vmap
from cutlayer.core.tree import Tree

Compiler = Callable[[Callable[..., Tree]], Callable[..., Tree]]

_compiler: ContextVar[Compiler | None] = ContextVar("compiler", default=None)


@contextmanager
def compiling_by(own: Compiler) -> Iterator[None]:
    """Set the compiler for the time of the context."""
    token = _compiler.set(own)
    try:
        yield
    finally:
        _compiler.reset(token)


def compiler() -> Compiler | None:
    """Return the current compiler, if any; none inside `vmap`, whose tensors cannot be traced."""
    own = _compiler.get()
    return None if own is None or is_inside_vmap() else own
