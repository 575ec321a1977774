"""Where an engine compiles functions of tensors, and by what: who has one that is worth it asks here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cutlayer.core.torch_private import is_inside_vmap
from cutlayer.core.tree import Tree

Compiler = Callable[[Callable[..., Tree]], Callable[..., Tree]]

_compiler: ContextVar[Compiler | None] = ContextVar("compiler", default=None)


@contextmanager
def compiling_by(own: Compiler) -> Iterator[None]:
    """Inside, functions are compiled by this."""
    token = _compiler.set(own)
    try:
        yield
    finally:
        _compiler.reset(token)


def compiler() -> Compiler | None:
    """What compiles functions here, if anything does; inside of vmap there are no tensors to trace."""
    own = _compiler.get()
    return None if own is None or is_inside_vmap() else own
