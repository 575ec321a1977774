"""Skeletons: the structures of trees as JSON values, for checkpoints and messages."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import count
from math import inf
from typing import Any

from torch import Tensor

from cutlayer.core.tree import STORABLE, Structure

# None, "tensor", "number", "text", or a list: ["tuple", skeletons], ["list", skeletons], ["dict", keys, skeletons],
# [class name, names of fields, skeletons].
Skeleton = Any
LEAVES: Mapping[str, type] = {"tensor": Tensor, "number": float, "text": str}
CONTAINERS: Mapping[str, type] = {"tuple": tuple, "list": list}  # besides dicts and storable classes
MOST_CHARACTERS = 200  # of a name in a message


@lru_cache(1024)
def encode(structure: Structure) -> Skeleton:
    """Encode a structure whose leaves are tensors, numbers and texts."""
    if structure is None:
        return None
    if isinstance(structure, type):
        return "tensor" if structure is Tensor else "text" if structure is str else "number"
    cls, names, items = structure
    below = [encode(item) for item in items]
    return [cls.__name__, below] if names is None else [cls.__name__, list(names), below]


def decode(
    skeleton: Skeleton,
    *,
    leaves: Mapping[str, type] = LEAVES,
    containers: Mapping[str, type] = CONTAINERS,
    most_depth: float = inf,
    most_items: float = inf,
) -> Structure:
    """Decode an untrusted skeleton of these leaves and containers; raise a ValueError that says what is wrong."""
    taken = count()

    def structure(skeleton: Skeleton, depth: int) -> Structure:
        if depth > most_depth or next(taken) >= most_items:
            raise ValueError(f"a value is nested deeper than {most_depth} or has more than {most_items} items")
        if skeleton is None or (type(skeleton) is str and skeleton in leaves):
            return skeleton and leaves[skeleton]
        match skeleton:
            case [str(name), [*items]] if name in containers:
                return containers[name], None, tuple([structure(item, depth + 1) for item in items])
            case [str(name), [*names], [*items]]:
                return _class(name, names, len(items)), tuple(names), tuple([structure(i, depth + 1) for i in items])
            case [str(name), *_]:
                raise _unknown(name)
        raise ValueError("a skeleton is none of those that a value can have")

    return structure(skeleton, 0)


def _class(name: str, names: list[Any], num_items: int) -> type:
    """Return the class of this name, if its fields have these names."""
    if name == "dict":
        if not all(type(n) in (str, int) for n in names) or not len(set(names)) == len(names) == num_items:
            raise ValueError("a dict needs one value for each of its keys, which are different texts or whole numbers")
        return dict
    cls: Any = STORABLE.get(name)
    if cls is None or tuple(names) != cls._fields or len(names) != num_items:
        raise _unknown(f"{name}({', '.join(map(str, names))})")
    return cls  # type: ignore[no-any-return]


def _unknown(name: str) -> ValueError:
    short = name if len(name) <= MOST_CHARACTERS else name[: MOST_CHARACTERS - 1] + "…"
    return ValueError(f"it holds a {short}, which this version of cutlayer does not know")
