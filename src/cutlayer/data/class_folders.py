"""Pictures in a folder for each class, decoded with pillow as they are: nothing is resized."""

import logging
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutlayer.data.files import Bytes
from cutlayer.data.pictures import decode_all, opened, pillow
from cutlayer.data.sample import Sample
from cutlayer.errors import DataError

log = logging.getLogger("cutlayer")

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
MODES = {1: "L", 3: "RGB"}
GREY = ("1", "L", "LA")
DEEP = ("I", "F")  # pillow would clip more than 8 bits to white


def read_class_folders(path: Path, sample: Sample | None) -> tuple[Tensor, Tensor]:
    """The pictures of each class in the order of their names, and their labels."""
    folders = [entry for entry in entries_of(path) if entry.is_dir()]
    labels = _numbered(path, [folder.name for folder in folders], sample)
    pictures = [(file, k) for folder, k in zip(folders, labels, strict=True) for file in _pictures(folder)]
    if not pictures:
        raise DataError(f"the sub-folders of {path} hold no pictures; put {', '.join(SUFFIXES)} files into them")
    paths = [file for file, _ in pictures]
    image_module = pillow(str(path))
    x = _decoded(image_module, paths, _shape(image_module, paths[0], sample))
    return torch.from_numpy(x), torch.tensor([k for _, k in pictures])


def entries_of(folder: Path) -> list[Path]:
    """What a folder holds, by name, without what is hidden."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _numbered(path: Path, names: list[str], sample: Sample | None) -> list[int]:
    """The class of each folder: its name where all names are numbers, or else its place among them."""
    if all(name.isdecimal() for name in names):
        return [int(name) for name in names]
    if sample is not None and sample.classes is not None and len(names) != sample.classes:
        raise DataError(
            f"{path} has {len(names)} sub-folders for {sample.classes} classes, so numbers by the order of their names "
            "would differ from those of other devices; name each sub-folder by the number of its class"
        )
    log.info("%s: the classes are %s", path, _shortened(f"{k} {name}" for k, name in enumerate(names)))
    return list(range(len(names)))


def _pictures(folder: Path) -> list[Path]:
    entries = entries_of(folder)
    pictures = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in SUFFIXES]
    if left_out := sorted(set(entries) - set(pictures)):
        log.info("%s: left out, as no pictures: %s", folder, _shortened(entry.name for entry in left_out))
    return pictures


def _shortened(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(names), 200, placeholder=" ...")


def _shape(image_module: Any, first: Path, sample: Sample | None) -> tuple[int, ...]:
    """The shape of a sample, by default that of the first picture."""
    if sample is None:
        with opened(image_module, first) as image:
            return (1 if image.mode in GREY else 3, image.height, image.width)
    if len(sample.shape) != 3 or sample.shape[0] not in MODES:
        raise DataError(
            f"{first} is a picture, but a sample here has the shape {sample.shape}; pictures are (1, height, width) "
            "or (3, height, width): give the samples as an .npz file"
        )
    return sample.shape


def _decoded(image_module: Any, paths: list[Path], shape: tuple[int, ...]) -> Bytes:
    channels, height, width = shape

    def checked(image: Any) -> Any:
        if image.size != (width, height):
            raise DataError(
                f"{image.filename} has {image.width} x {image.height} pixels (width x height), but a sample here has "
                f"{width} x {height}; resize the pictures, on every device in the same way"
            )
        if image.mode.startswith(DEEP):
            raise DataError(f"{image.filename} has pixels of more than 8 bits; save it with 8")
        return image.convert(MODES[channels])

    return decode_all(image_module, paths, shape, checked)
