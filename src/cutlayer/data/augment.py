"""Random changes of training samples: of images, for a whole stack at a time, or by a function of one's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cutlayer.core import tree
from cutlayer.core.checks import check, is_number
from cutlayer.core.keys import fold, generator
from cutlayer.core.transfer import sent
from cutlayer.data.seeding import drawing_from
from cutlayer.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes of training images, drawn for each sample from the step's key; 0 or False turns one off.

    Pixels from outside of the image are 0, which is the mean of standardised images.
    """

    crop: int = 0  # pad by so many pixels, then crop to the old size at a random place
    flip: bool = False  # mirror half of the images, left and right
    vertical_flip: bool = False  # mirror half of the images, up and down
    rotate: float = 0.0  # by up to so many degrees in either direction

    def __post_init__(self) -> None:
        whole = isinstance(self.crop, int) and not isinstance(self.crop, bool)
        check(whole and self.crop >= 0, "crop", self.crop, "a whole number from 0 up")
        for name in ("flip", "vertical_flip"):
            check(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        degrees = is_number(self.rotate) and not isinstance(self.rotate, bool) and 0 <= self.rotate <= 180
        check(degrees, "rotate", self.rotate, "a number of degrees from 0 to 180")

    def __call__(self, x: Tensor, keys: Sequence[int]) -> Tensor:
        """Augment x (clients, samples, channels, height, width) with one key a client."""
        if not (self.crop or self.flip or self.vertical_flip or self.rotate):
            return x
        if x.dim() != 5 or len(x) != len(keys):
            raise DataError(
                f"cannot augment inputs of shape {tuple(x.shape)} with {len(keys)} keys; "
                "give images (clients, samples, channels, height, width) and one key a client"
            )
        draws = np.concatenate([self._draws(x.shape[1], key) for key in keys])
        angles = np.radians(draws[:, 4] * self.rotate)
        there = sent(torch.from_numpy(np.stack([*draws.T[:4], np.cos(angles), np.sin(angles)])), x.device)
        images = x.flatten(0, 1)
        if self.rotate:
            images = rotated(images, *there[4:].float())
        if self.crop or self.flip or self.vertical_flip:
            images = self._placed(images, there[:4].long())
        return images.reshape(x.shape)

    def _draws(self, num: int, key: int) -> NDArray[np.float64]:
        """Draw for each sample: where to crop (down, right), whether to flip (up and down, left and right), and a turn.

        All are drawn whichever are on, so that no option changes the draws of another.
        """
        draws = generator(key, "augment").random((num, 5))
        draws[:, :2] = np.floor(draws[:, :2] * (2 * self.crop + 1))
        draws[:, 2:4] = (draws[:, 2:4] < 0.5) & np.array([self.vertical_flip, self.flip])
        draws[:, 4] = 2 * draws[:, 4] - 1
        return draws

    def _placed(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop the padded images and flip them, with one look-up of where each pixel comes from."""
        height, width = images.shape[2:]
        down, right, upside_down, mirrored = draws[:, :, None]
        rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
        rows = down + torch.where(upside_down.bool(), height - 1 - rows, rows)
        columns = right + torch.where(mirrored.bool(), width - 1 - columns, columns)
        image, channel = (torch.arange(size, device=images.device) for size in images.shape[:2])
        padded = pad(images, (self.crop,) * 4)
        return padded[
            image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]
        ]


@dataclass(frozen=True)
class SampleTransform:
    """A function that changes one sample, such as a random transform of torchvision, at every step anew.

    What it draws from the generators of torch, numpy and Python comes from the step's key, the client and the sample,
    so that all engines and resumed runs see the same samples. It must keep their shape and type.
    """

    fn: Callable[[Any], Any]

    def __call__(self, x: Any, keys: Sequence[int]) -> Any:
        """Change x (clients, samples, ...) with one key a client."""
        num = tree.tensors(x)[0].shape[1]
        return _stacked([_stacked([self._changed(x, k, i, key) for i in range(num)]) for k, key in enumerate(keys)])

    def _changed(self, x: Any, client: int, i: int, key: int) -> Any:
        sample = tree.map(lambda a: a[client, i].clone(), x)
        with drawing_from(fold(key, "transform", i), tree.tensors(x)[0].device):
            new = self.fn(sample)
        if tree.signature(new) != tree.signature(sample):
            old, found = (_words(each) for each in (sample, new))
            raise DataError(f"the transform turns {old} into {found}; it must keep the shape and the type of a sample")
        return new


def _stacked(rows: Sequence[Any]) -> Any:
    return tree.map(lambda *a: torch.stack(a), *rows)


def _words(sample: Any) -> str:
    tensors = [f"{a.dtype} {tuple(a.shape)}" for a in tree.tensors(sample)]
    return ", ".join(tensors) or f"a {type(sample).__name__}"


def rotated(images: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate images (images, channels, height, width) anticlockwise by the angles of these cosines and sines.

    The centre stays in place, and pixels are interpolated bilinearly.
    """
    height, width = images.shape[2:]
    cos, sin = cos[:, None, None], sin[:, None, None]
    y, x = (torch.arange(size, device=images.device) - (size - 1) / 2 for size in (height, width))
    from_y = cos * y[:, None] + sin * x + (height - 1) / 2
    from_x = cos * x - sin * y[:, None] + (width - 1) / 2
    top, left = from_y.floor(), from_x.floor()
    below, right = from_y - top, from_x - left
    result = torch.zeros_like(images)
    for rows, tall in ((top, 1 - below), (top + 1, below)):
        for columns, wide in ((left, 1 - right), (left + 1, right)):
            result += _pixels(images, rows.long(), columns.long()) * (tall * wide)[:, None].to(images.dtype)
    return result


def _pixels(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the pixels at these places (images, height, width), 0 outside of the image."""
    height, width = images.shape[2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    flat = images.flatten(2)
    found = flat.gather(2, places.flatten(1)[:, None].expand_as(flat))
    return found.view_as(images) * inside[:, None]
