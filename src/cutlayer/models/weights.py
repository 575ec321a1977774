"""Loading of pretrained weights from a file into a model that fits them exactly."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cutlayer.core.checks import reason
from cutlayer.errors import DataError, UnknownNameError


def load_weights(model: nn.Module, path: str | Path, *, fresh: tuple[str, ...] = ()) -> None:
    """Load the weights of a .safetensors, .pth or .pt file into a model; all entries and shapes must agree.

    Sub-modules named in `fresh`, such as ("classifier",), keep their values.
    """
    path = Path(path)
    for prefix in fresh:
        if prefix not in dict(model.named_modules()):
            raise UnknownNameError("sub-module", prefix, dict(model.named_children()), "fresh")
    wanted = _without(model.state_dict(), fresh)
    found = _without(_read(path), fresh)
    _check_fit(found, wanted, path, type(model).__name__)
    model.load_state_dict(found, strict=False)  # `fresh` entries are missing; all others were checked


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise DataError(f"{path} is no file of weights; give a .safetensors, .pth or .pt file")
    if not path.is_file():
        raise DataError(f"there is no file of weights {path}; check the path")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        entries: Any = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise DataError(f"{path} holds more than tensors by name; save model.state_dict() alone") from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; fetch or save it again") from error
    if not isinstance(entries, Mapping) or not all(isinstance(value, Tensor) for value in entries.values()):
        raise DataError(f"{path} does not hold tensors by name; save model.state_dict() alone")
    return entries


def _without(entries: Mapping[str, Tensor], fresh: tuple[str, ...]) -> dict[str, Tensor]:
    prefixes = tuple(f"{name}." for name in fresh)
    return {name: value for name, value in entries.items() if not name.startswith(prefixes)}


def _check_fit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path, kind: str) -> None:
    """Refuse a file at its first entry that is missing, unexpected or of another shape."""
    advice = "build the model with the options that the file was made with"
    for name in wanted:
        # Files of old PyTorch versions have no count of batches, and nothing here reads it.
        if name not in found and not name.endswith(".num_batches_tracked"):
            near = get_close_matches(name, found.keys() - wanted.keys(), n=1)
            other = f" (but {near[0]!r}: rename it)" if near else ""
            raise DataError(
                f"{path} has no {name!r}{other}, which {kind} needs; {advice}, or name the sub-module in fresh"
            )
    for name in found:
        if name not in wanted:
            raise DataError(f"{path} has {name!r}, which {kind} does not have; {advice}")
    for name, value in found.items():
        if value.shape != wanted[name].shape:
            raise DataError(
                f"{name!r} is {tuple(value.shape)} in {path} but {tuple(wanted[name].shape)} in {kind}; {advice}, "
                "or name the sub-module in fresh"
            )
