"""What a part consists of, as functions that a server can run on the part that it holds."""

from cutlayer.state import Model, Part, Progress, Tensors


def model_of(part: Part) -> Model:
    return part.model


def moments_of(part: Part) -> dict[str, Tensors]:
    return part.moments


def progress_of(part: Part) -> Progress:
    return part.progress
