"""The models that can be cut: modules of Python code that can be copied and whose forward changes no attribute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cutlayer.core import tree
from cutlayer.errors import CutError

PLAIN = (bool, int, float, complex, str)
WRAPPERS: dict[tuple[type[nn.Module], ...], str] = {
    (nn.DataParallel, nn.parallel.DistributedDataParallel): "the module inside, its .module,",
    (torch.jit.ScriptModule,): "the module that it was compiled from",
}


def check_model(model: Any) -> None:
    """Refuse what is no module, hides its code, or holds what cannot be copied or trained."""
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        instead = f"the class {model.__name__}; make a model of it: {model.__name__}(...)" if is_class else repr(model)
        raise CutError(f"Split takes an nn.Module, not {instead}")
    if type(model).__name__ == "OptimizedModule":  # inside an nn.Sequential it is a unit as it is
        raise CutError("a model made by torch.compile hides the forward that a cut needs: use the model given to it.")
    for path, module in model.named_modules():
        _check_module(f"{path!r} ({type(module).__name__})" if path else type(module).__name__, module)


def _check_module(where: str, module: nn.Module) -> None:
    for kinds, instead in WRAPPERS.items():
        if isinstance(module, kinds):
            raise CutError(f"{where} hides the forward that a cut needs: use {instead} instead.")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise CutError(f"{where} has sparse gradients, which cannot be averaged or sent: make it with sparse=False.")
    for name, value in vars(module).items():
        if any(a.grad_fn is not None for a in tree.tensors(value)):
            raise CutError(
                f"{where} keeps a tensor of an earlier forward pass in {name!r}, which cannot be copied: set it to "
                "None before Split, or let the forward keep a detached copy."
            )


class ChangedError(CutError):
    """A forward changes a plain attribute."""


@contextmanager
def constant_attributes(model: nn.Module) -> Iterator[None]:
    """Refuse a forward that changes a number, a text or a switch: the graph would keep one value for all steps."""
    before = _plain(model)
    yield
    after = _plain(model)
    for (path, name), value in before.items():
        new = after.get((path, name), value)
        if new is not value and new != value:
            where = f" of {path!r}" if path else ""
            raise ChangedError(
                f"{type(model).__name__} cannot be cut because its forward changes the attribute {name!r}{where}, here "
                f"from {value!r} to {new!r}: a traced forward would read the same value in every step. "
                "Keep it in a buffer that is updated in place (register_buffer, then self.count.add_(1)); or write the "
                "model as nn.Sequential or give it a units() method, whose units run as they are."
            )


def _plain(model: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, PLAIN)
    }
