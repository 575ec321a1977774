"""The digest of samples: a resumed run compares it, so that it notices other data."""

import hashlib

import torch

from cutlayer.data.arrays import Arrays


def digest(*sets: Arrays | None) -> str:
    """Return the SHA-256 of all samples: inputs, targets and groups, with their types and shapes."""
    found = hashlib.sha256()
    for data in sets:
        if data is None:
            continue
        inputs = data.x if isinstance(data.x, dict) else {"x": data.x}
        named = {**inputs, "y": data.y} | ({} if data.groups is None else {"groups": data.groups})
        found.update(f"{data.num_classes} {data.group_names}".encode())
        for name, value in named.items():
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
