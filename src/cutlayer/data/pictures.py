"""Picture files, decoded with pillow: the data sets Tiny ImageNet and HAM10000, and folders of pictures by class.

The data sets are resized, decoded once and then kept as an .npz file beside the pictures, which is read instead of
them; remove it to decode the pictures again. The pictures of class folders are taken as they are.
"""

import csv
import io
import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cutlayer.core.keys import generator
from cutlayer.data.columns import Columns, Stored
from cutlayer.data.files import Bytes, FileForm, Images, Sets, bad_file, files_of, incomplete, keep, read_bytes, reading
from cutlayer.data.sample import Sample
from cutlayer.errors import DataError

log = logging.getLogger("cutlayer")

SIZE = 64
SHAPE = (3, SIZE, SIZE)
TINY_FOLDER = "tiny-imagenet-200"
DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
SKIN_FOLDERS = ("HAM10000_images_part_1", "HAM10000_images_part_2", "images")
SKIN_TEST, SKIN_KEY = 0.2, 42
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
MODES = {1: "L", 3: "RGB"}
GREY = ("1", "L", "LA")
DEEP = ("I", "F")  # modes of more than 8 bits, which pillow would clip to white


class Encoded(NamedTuple):
    """A picture that is no file of its own."""

    name: Path  # in messages
    content: bytes


Picture = Path | Encoded


def _read_tiny_imagenet(folder: Path) -> Sets | None:
    """Read Tiny ImageNet; its validation set is the test set, as the published test set has no labels."""
    place = folder / TINY_FOLDER
    lists = files_of(place, [["wnids.txt"], ["val/val_annotations.txt"]])
    if lists is None:
        return None
    classes = {wnid: k for k, wnid in enumerate(_text(lists[0]).split())}
    train = [(path, k) for wnid, k in classes.items() for path in _pictures(place, f"train/{wnid}/images")]
    test = []
    for row in _text(lists[1]).splitlines():
        file, wnid, *_ = [*row.split("\t"), ""]
        if wnid not in classes:
            raise bad_file(lists[1], f"its line {row!r} does not name one of the {len(classes)} classes of wnids.txt")
        test.append((place / "val/images" / file, classes[wnid]))
    x = _decoded("tiny_imagenet", [path for path, _ in (*train, *test)])
    y = np.array([k for _, k in (*train, *test)], dtype=np.int64)
    return _kept("tiny_imagenet", folder, Sets(*(Images(x[part], y[part]) for part in _halves(len(train)))))


def _halves(at: int) -> tuple[slice, slice]:
    return slice(None, at), slice(at, None)


def _read_ham10000(folder: Path) -> Sets | None:
    """Read HAM10000; a fifth of the images, drawn with a fixed key, is the test set.

    Images are drawn, not lesions, as in published experiments, so pictures of one lesion may be in both sets.
    """
    found = files_of(folder, [["HAM10000_metadata.csv"]])
    if found is None:
        return None
    rows = sorted(_diagnoses(found[0]).items())  # the split must not depend on the order of the rows
    paths = {p.stem: p for name in SKIN_FOLDERS for p in sorted((folder / name).glob("*.jpg"))}
    for image, _ in rows:
        if image not in paths:
            raise incomplete(folder, f"{image}.jpg (in {' or '.join(f'{name}/' for name in SKIN_FOLDERS)})")
    x = _decoded("ham10000", [paths[image] for image, _ in rows])
    y = np.array([k for _, k in rows], dtype=np.int64)
    order = generator(SKIN_KEY, "ham10000").permutation(len(y))
    test, train = (np.sort(order[part]) for part in _halves(round(SKIN_TEST * len(y))))
    return _kept("ham10000", folder, Sets(Images(x[train], y[train]), Images(x[test], y[test])))


def _diagnoses(path: Path) -> dict[str, int]:
    """Return the class of each image."""
    classes = {}
    for row in csv.DictReader(_text(path).splitlines()):
        image, diagnosis = row.get("image_id"), row.get("dx")
        if not image or diagnosis not in DIAGNOSES:
            raise bad_file(path, f"it has image_id {image!r} with dx {diagnosis!r}; known dx: {', '.join(DIAGNOSES)}")
        classes[image] = DIAGNOSES.index(diagnosis)
    if not classes:
        raise bad_file(path, "it names no image")
    return classes


def _text(path: Path) -> str:
    return read_bytes(path).decode("utf-8-sig", errors="replace")


def _pictures(place: Path, folder: str) -> list[Path]:
    paths = sorted((place / folder).glob("*.JPEG"))
    if not paths:
        raise incomplete(place, f"{folder}/*.JPEG")
    return paths


def _decoded(name: str, paths: Sequence[Path]) -> Bytes:
    """Return the pictures in RGB and in one size."""
    image_module = pillow(name)
    log.info("%s: decoding %s images, once", name, f"{len(paths):,}")

    def small(image: Any) -> Any:
        return image.convert("RGB").resize((SIZE, SIZE), image_module.Resampling.BILINEAR)

    return decode_all(image_module, paths, SHAPE, small)


def decode_all(
    image_module: Any, paths: Sequence[Picture], shape: tuple[int, ...], convert: Callable[[Any], Any]
) -> Bytes:
    """Decode pictures into one array (pictures, channels, height, width), each as `convert` returns it."""
    channels, *size = shape
    x = np.empty((len(paths), *shape), dtype=np.uint8)

    def decode(i: int) -> None:
        with opened(image_module, paths[i]) as image:
            x[i] = np.asarray(convert(image)).reshape(*size, channels).transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:  # pillow releases the GIL while it decodes
        list(pool.map(decode, range(len(paths))))
    return x


@contextmanager
def opened(image_module: Any, picture: Picture) -> Iterator[Any]:
    """Open a picture; if it cannot be opened or decoded, raise a DataError that names it."""
    name, file = (picture.name, io.BytesIO(picture.content)) if isinstance(picture, Encoded) else (picture, picture)
    with (
        reading(name, OSError, ValueError, SyntaxError, image_module.DecompressionBombError),
        image_module.open(file) as image,
    ):
        image.filename = str(name)
        yield image


def pillow(name: str) -> Any:
    """Import pillow's Image module, which decodes the images of this data set."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            f"{name}: its images cannot be decoded without pillow; install it with: pip install 'cutlayer[images]'"
        ) from None
    return Image


def _kept(name: str, folder: Path, sets: Sets) -> Sets:
    """Cache the sets as <name>.npz, if the folder can be written, and return them."""
    (x_train, y_train), (x_test, y_test) = sets
    arrays: dict[str, Any] = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    keep(name, "the decoded images", folder / f"{name}.npz", arrays)
    return sets


def read_class_folders(path: Path, sample: Sample | None, columns: Columns) -> Stored:
    """Return the pictures of each class, ordered by file name, and their labels."""
    folders = [entry for entry in entries_of(path) if entry.is_dir()]
    named = columns.words and not all(folder.name.isdecimal() for folder in folders)
    labels = [] if named else _numbered(path, [folder.name for folder in folders], sample)
    pictures = [(file, k) for k, folder in enumerate(folders) for file in _pictures_of_class(folder)]
    if not pictures:
        raise DataError(f"the sub-folders of {path} hold no pictures; put {', '.join(SUFFIXES)} files into them")
    x = decode_alike(str(path), [file for file, _ in pictures], sample)
    if named:
        return Stored(x, tuple(folders[k].name for _, k in pictures))
    return Stored(x, torch.tensor([labels[k] for _, k in pictures]))


def decode_alike(name: str, pictures: Sequence[Picture], sample: Sample | None = None) -> Tensor:
    """Decode pictures of one size; `name` is the place that they come from."""
    image_module = pillow(name)
    return torch.from_numpy(_as_stored(image_module, pictures, _shape(image_module, pictures[0], sample)))


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder that are not hidden, sorted by name."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _numbered(path: Path, names: list[str], sample: Sample | None) -> list[int]:
    """Return the class of each folder: its name if all names are numbers, else its position among them."""
    if all(name.isdecimal() for name in names):
        return [int(name) for name in names]
    if sample is not None and sample.classes is not None and len(names) != sample.classes:
        raise DataError(
            f"{path} has {len(names)} sub-folders for {sample.classes} classes, so numbers by the order of their names "
            "would differ from those of other devices; name each sub-folder by the number of its class"
        )
    log.info("%s: the classes are %s", path, _shortened(f"{k} {name}" for k, name in enumerate(names)))
    return list(range(len(names)))


def _pictures_of_class(folder: Path) -> list[Path]:
    entries = entries_of(folder)
    pictures = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in SUFFIXES]
    if left_out := sorted(set(entries) - set(pictures)):
        log.info("%s: left out, as no pictures: %s", folder, _shortened(entry.name for entry in left_out))
    return pictures


def _shortened(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(names), 200, placeholder=" ...")


def _shape(image_module: Any, first: Picture, sample: Sample | None) -> tuple[int, ...]:
    """Return the shape of a sample, by default that of the first picture."""
    if sample is None:
        with opened(image_module, first) as image:
            return (1 if image.mode in GREY else 3, image.height, image.width)
    if len(sample.shape) != 3 or sample.shape[0] not in MODES:
        name = first.name if isinstance(first, Encoded) else first
        raise DataError(
            f"{name} is a picture, but a sample here has the shape {sample.shape}; pictures are (1, height, width) "
            "or (3, height, width): give the samples as an .npz file"
        )
    return sample.shape


def _as_stored(image_module: Any, paths: Sequence[Picture], shape: tuple[int, ...]) -> Bytes:
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


TINY_IMAGENET = FileForm(f"{TINY_FOLDER}/", _read_tiny_imagenet)
HAM10000 = FileForm(
    f"HAM10000_metadata.csv with its pictures in {SKIN_FOLDERS[0]}/ and {SKIN_FOLDERS[1]}/, or in {SKIN_FOLDERS[2]}/",
    _read_ham10000,
)
