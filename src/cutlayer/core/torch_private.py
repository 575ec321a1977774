"""Private names of torch, each with the reason for its use: no other module uses a private name.

They were tested with the versions that pyproject.toml allows; check them before allowing others.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._C._profiler import _EventType
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

BatchNorm = _BatchNorm  # base class of batch normalisation in 1, 2 and 3 dimensions
NormBase = _NormBase  # base class of all layers with running statistics
Dropout = _DropoutNd  # base class of all kinds of dropout

# One kernel for many small tensors, as in torch's own optimisers; there is no public name.
foreach_add, foreach_add_ = torch._foreach_add, torch._foreach_add_
foreach_copy_, foreach_div_ = torch._foreach_copy_, torch._foreach_div_

ALLOCATION = _EventType.Allocation  # the tag of the profiler's memory events


def is_inside_vmap() -> bool:
    """Return whether code runs inside a `vmap`, where tensors cannot be traced; there is no public function for it."""
    return peek_interpreter_stack() is not None


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's sub-modules, including a second use of one, which `named_children` leaves out."""
    return module._modules


def mutates(target: Any) -> bool:
    """Return whether an operator of an exported graph writes into an argument, which only its schema says."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_random(target: Any) -> bool:
    """Return whether an operator of an exported graph draws random numbers, as its tags say."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def tensor_homes(module: nn.Module) -> Iterator[tuple[Any, Iterable[tuple[Any, Any]]]]:
    """Yield the dicts and lists from which a module reads its tensors, so that a call can swap in others.

    `torch.func.functional_call` swaps, too, but not the lists of recurrent layers, and costs more at each call.
    """
    yield module._parameters, module._parameters.items()
    yield module._buffers, module._buffers.items()
    if isinstance(module, nn.RNNBase):  # recurrent layers read a list
        yield module._flat_weights, enumerate(module._flat_weights)
