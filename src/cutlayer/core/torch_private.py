"""The names of torch that it does not promise to keep, each with the reason for it: no other module uses such a name.

They were tested with the versions that pyproject.toml allows, and are what to look at before it allows others.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._C._profiler import _EventType
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

BatchNorm = _BatchNorm  # the one class of batch normalisation in 1, 2 and 3 dimensions
NormBase = _NormBase  # of all layers with running statistics
Dropout = _DropoutNd  # of all kinds of dropout

# One kernel for many small tensors; torch's own optimisers use them, and there is no public name.
foreach_add, foreach_add_ = torch._foreach_add, torch._foreach_add_
foreach_copy_, foreach_div_ = torch._foreach_copy_, torch._foreach_div_

ALLOCATION = _EventType.Allocation  # the tag of events in which torch's profiler tells of memory


def is_inside_vmap() -> bool:
    """Tensors inside of a transform stand for many and cannot be traced; nothing public tells where they are."""
    return peek_interpreter_stack() is not None


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Its own sub-modules: `named_children` leaves out the second use of a module."""
    return module._modules


def tensor_homes(module: nn.Module) -> Iterator[tuple[Any, Iterable[tuple[Any, Any]]]]:
    """The dicts and lists from which a module reads its tensors, with their content: others are put there for a call.

    `torch.func.functional_call` does that, too, but takes no list of recurrent layers and costs more at each call.
    """
    yield module._parameters, module._parameters.items()
    yield module._buffers, module._buffers.items()
    if isinstance(module, nn.RNNBase):  # recurrent layers compute with a list of their own
        yield module._flat_weights, enumerate(module._flat_weights)
