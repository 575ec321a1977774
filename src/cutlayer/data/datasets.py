"""Data sets of others: of torch, whose items are pairs, and of the package datasets, whose items have names."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cutlayer.data.arrays import IGNORED, Arrays, from_arrays, named_inputs
from cutlayer.data.columns import LABELS
from cutlayer.data.seeding import drawing_from
from cutlayer.errors import DataError, UnknownNameError

FEW_ITEMS = 3
TRIED_ITEMS, TRIED_SEEDS = 6, 8  # so that a change of one draw in ten is found as well


class Items(Protocol):
    """A data set of torch or of the package datasets, or a list of items."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


class Item(NamedTuple):
    """One item: its inputs, by name or alone, and its target."""

    x: Any
    y: Any


def from_dataset(
    dataset: Any,
    num_classes: int | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    pad: int | None = None,
) -> Arrays:
    """Make Arrays from a data set whose items have one shape, stacked; types as in `from_arrays`.

    An item is a pair (x, y), or a mapping such as {"input_ids": ..., "labels": ...}, as `datasets.Dataset` and
    `transformers.Trainer` have them: the target is `target`, or the first of label, labels, y and target, and x is a
    dict of the others, or of `inputs`; if that is one name, x is its value alone. A value may be a tensor, a number, a
    list, a numpy array, or an image object that numpy can read (such as PIL's), whose channels are put first.

    Lists of tokens of different lengths need `pad`, the token to fill `input_ids` with on the right; other lists are
    filled with 0 and targets with -100.

    Items are read once, so a data set that draws random numbers is refused: give its transform to `train` instead, as
    `augment=SampleTransform(...)`.
    """
    num = _length(dataset)

    def item(i: int) -> Item:
        return _item(dataset[i], i, inputs, target)

    _refuse_random(item, num)
    return _stacked([item(i) for i in range(num)], num_classes, pad)


def is_dataset(value: Any) -> bool:
    """Return whether a value is a data set or a list of items, and no array, table or mapping."""
    has_items = isinstance(value, Sized) and hasattr(value, "__getitem__")
    return has_items and not (isinstance(value, tuple | str | bytes | Mapping) or hasattr(value, "__array__"))


def inputs_of(sample: Any) -> Any:
    """Return the inputs of Arrays, or of the first few items of a data set; other inputs stay as they are."""
    if isinstance(sample, Arrays):
        return sample.x
    if not is_dataset(sample):
        return sample
    items = [Item(_inputs(sample[i]), 0) for i in range(min(FEW_ITEMS, _length(sample)))]
    return _stacked(items, None, pad=0).x


def _inputs(item: Any) -> Any:
    if isinstance(item, Mapping):
        label = next((name for name in LABELS if name in item), None)
        return {name: value for name, value in item.items() if name != label}
    return item[0] if isinstance(item, tuple | list) and len(item) == 2 else item


def _stacked(items: list[Item], num_classes: int | None, pad: int | None) -> Arrays:
    values = [{name: _value(value, name, i) for name, value in _named(each)} for i, each in enumerate(items)]
    if pad is not None:
        _pad(values, pad)
    for i, each in enumerate(values):
        _check_alike(each, values[0], i)
    *stacked, y = (_stack([each[name] for each in values]) for name in values[0])
    first = items[0].x
    x = dict(zip(first, stacked, strict=True)) if isinstance(first, Mapping) else stacked[0]
    return from_arrays(x, y, num_classes)


def _length(dataset: Any) -> int:
    if not isinstance(dataset, Sized):
        raise DataError("the data set has no length; collect its items in a list first: from_dataset(list(...))")
    if not len(dataset):
        raise DataError("the data set has no items; give at least one")
    return len(dataset)


def _item(item: Any, i: int, inputs: str | Sequence[str] | None, target: str | None) -> Item:
    if isinstance(item, Mapping):
        return _columns(item, i, inputs, target)
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"item {i} of the data set is a {type(item).__name__}, not a pair (x, y) or a mapping with labels; return "
            "both from it"
        )
    return Item(*item)


def _columns(item: Mapping[str, Any], i: int, inputs: str | Sequence[str] | None, target: str | None) -> Item:
    label = target or next((name for name in LABELS if name in item), None)
    if label is None:
        raise DataError(f"item {i} of the data set has {', '.join(item)} and no labels; name the target with target=")
    chosen = [name for name in item if name != label] if inputs is None else inputs
    for name in (label, *([chosen] if isinstance(chosen, str) else chosen)):
        if name not in item:
            raise UnknownNameError("column", name, item, f"item {i} of the data set")
    x = item[chosen] if isinstance(chosen, str) else {name: item[name] for name in chosen}
    return Item(x, item[label])


def _named(item: Item) -> list[tuple[str, Any]]:
    return [*named_inputs(item.x), ("y", item.y)]


def _refuse_random(item: Any, num_items: int) -> None:
    """Refuse a data set whose items differ each time: stacked, they would be the same in every epoch."""
    for i in sorted({int(k) for k in np.linspace(0, num_items - 1, TRIED_ITEMS)}):
        drawn = []
        for seed in range(TRIED_SEEDS):
            with drawing_from(seed):
                drawn.append([_value(value, name, i) for name, value in _named(item(i))])
        if not all(_same(a, b) for other in drawn[1:] for a, b in zip(drawn[0], other, strict=True)):
            raise DataError(
                f"item {i} of the data set is another one each time it is read, so it has a random transform, of which "
                "every epoch would see the same draw; take the transform out and give it to train, as "
                "augment=cl.SampleTransform(...), or use cl.Augment"
            )


def _same(a: Any, b: Any) -> bool:
    one, other = (np.asarray(value) for value in (a, b))
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _value(value: Any, name: str, i: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths inside of one item
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"item {i} of the data set has {name} of the type {type(value).__name__}; give numbers, or leave it out "
            "with inputs="
        )
    if not hasattr(value, "__array_interface__") or array.ndim not in (2, 3):
        return array
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)  # an image object: height, width, channels


def _pad(values: list[dict[str, Any]], token: int) -> None:
    """Fill lists of whole numbers on the right to the longest of their name."""
    for name in values[0]:
        column = [np.asarray(each[name]) for each in values if name in each]
        lengths = {len(value) for value in column if value.ndim == 1}
        if len(lengths) < 2 or any(value.ndim != 1 or value.dtype.kind not in "iu" for value in column):
            continue
        fill = IGNORED if name == "y" else token if "input_ids" in name or name == "x" else 0
        for each, value in zip(values, column, strict=True):
            each[name] = _filled(value, max(lengths), fill)


def _filled(value: NDArray[Any], length: int, fill: int) -> NDArray[np.int64]:
    return np.concatenate([value.astype(np.int64), np.full(length - len(value), fill)])


def _check_alike(item: dict[str, Any], first: dict[str, Any], i: int) -> None:
    if item.keys() != first.keys():
        ours, theirs = ", ".join(item), ", ".join(first)
        raise DataError(f"item {i} of the data set has {ours}, item 0 has {theirs}; give every item the same keys")
    for name, value in item.items():
        if tuple(value.shape) != tuple(first[name].shape):
            raise DataError(
                f"item {i} of the data set has {name} of shape {tuple(value.shape)}, item 0 has "
                f"{tuple(first[name].shape)}; bring all items to one shape, for example by resizing, or with pad= for "
                "tokens"
            )


def _stack(values: list[Any]) -> Any:
    return torch.stack([torch.as_tensor(v) for v in values]) if isinstance(values[0], Tensor) else np.stack(values)
