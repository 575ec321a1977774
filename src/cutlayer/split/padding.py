"""Embeddings with padding: inside vmap, torch's own function trains the row of the padding, too."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def embedding(weight: Tensor, indices: Tensor, padding: int = -1, *_: Any) -> Tensor:
    """Return rows of a table, as torch does; that of the padding, if there is one, gets no gradient."""
    rows = F.embedding(indices, weight)
    return rows if padding < 0 else torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)


def keep_padding(structure: nn.Module) -> None:
    """Let the embeddings of a structure leave the row of their padding alone, on every engine."""
    plain = [m for m in structure.modules() if isinstance(m, nn.Embedding) and type(m).forward is nn.Embedding.forward]
    for module in plain:
        special = module.scale_grad_by_freq or module.sparse or module.max_norm is not None
        if module.padding_idx is not None and not special:
            module.forward = functools.partial(_looked_up, module)  # type: ignore[method-assign]


def _looked_up(module: nn.Embedding, indices: Tensor) -> Tensor:
    return embedding(module.weight, indices, -1 if module.padding_idx is None else module.padding_idx)
