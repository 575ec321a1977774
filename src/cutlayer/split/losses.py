"""Cross entropies of scores whose classes are on the second axis, as torch has them, or the last, as transformers."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from cutlayer.errors import ConfigError


def cross_entropy(out: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Cross entropy of classes, also of one at each position; -100 is ignored. The options are those of torch."""
    _check_axis(out, y)
    return F.cross_entropy(by_class(out, y), y, **options)


def next_token(out: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Cross entropy of each token, given those before it: the targets are the tokens, and -100 is ignored."""
    _check_axis(out, y)
    return F.cross_entropy(by_class(out, y)[..., :-1], following(y), **options)


def following(y: Tensor) -> Tensor:
    """Return the tokens that have one before them."""
    return y[:, 1:]


def by_class(out: Any, y: Tensor) -> Any:
    """Return scores with the classes on the second axis; if they fit there, they stay as they are."""
    return out.movedim(-1, 1) if _fits_last(out, y) and not _fits_second(out, y) else out


def _fits_last(out: Any, y: Tensor) -> bool:
    """Return whether each position of the targets has a row of scores."""
    return isinstance(out, Tensor) and y.dim() > 1 and out.dim() == y.dim() + 1 and out.shape[:-1] == y.shape


def _fits_second(out: Tensor, y: Tensor) -> bool:
    return (out.shape[0], *out.shape[2:]) == y.shape


def _check_axis(out: Any, y: Tensor) -> None:
    if _fits_last(out, y) and _fits_second(out, y):
        raise ConfigError(
            f"there are as many scores as positions, {out.shape[1]}, so either axis may be that of the classes; if it "
            "is the second, give loss=torch.nn.functional.cross_entropy; if it is the last, pad the samples to another "
            "length"
        )
