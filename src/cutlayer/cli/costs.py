"""What a model of the zoo costs, unit by unit, and on both sides of a cut."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cutlayer import optim, registry
from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError
from cutlayer.models import MODELS
from cutlayer.planning.profile import Profile, profile
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.split import Split

OPTIMISERS = {  # what they keep for a parameter, and how they update it, takes the same memory at any rate
    "sgd": optim.sgd(1e-3),
    "momentum": optim.sgd(1e-3, momentum=0.9),
    "adam": optim.adam(1e-3),
    "adamw": optim.adamw(1e-3),
}
USUAL_SIDE, USUAL_CLASSES = 32, 10  # of images
FITTING = {
    "cnn": ((1, 8, 8), 10),
    "mlp": ((1, 8, 8), 10),
    "char_transformer": ((80,), 80),
    "causal_lm": ((64,), 2),
}  # one sample, and classes
VALUE_BYTES = 4  # float32
LABEL_BYTES = 8  # int64


def parse_shape(text: str) -> tuple[int, ...]:
    """3x32x32 as (3, 32, 32)."""
    words = text.lower().replace("×", "x").split("x")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--input {text!r} is no shape; write for example --input 3x32x32")
    return tuple(int(word) for word in words)


def parse_cut(text: str) -> int | str:
    """A number of units, or the name of one."""
    return int(text) if text.lstrip("-").isdecimal() else text


def model_costs(
    name: str,
    options: Mapping[str, Any],
    *,
    shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    optimiser: str = "momentum",
    cut: str | None = None,
) -> dict[str, Any]:
    """The costs as plain numbers, for one sample of this shape; shape and classes fit the model by default."""
    slots = len(registry.find("optimiser", OPTIMISERS, optimiser).moments)
    shape, classes = fitting(name, options, shape, classes)
    fitted_options = fitted(name, options, shape, classes)
    with torch.device("meta"):  # shapes are enough
        model = build.model(name, fitted_options)
    try:
        costs = profile(model, _sample(model, shape), slots)
    except RuntimeError as error:
        raise misfit(name, shape, error) from None
    document = {
        "model": name,
        "options": fitted_options,
        "input": list(shape),
        "optimiser": optimiser,
        "macs": costs.macs,
        "params": costs.params,
        "units": [_unit(costs, number) for number in range(1, len(costs.rows) + 1)],
    }
    if cut is not None:
        document["cut"] = _sides(costs, Split(model, parse_cut(cut)).cut)
    return document


def fitting(
    name: str, options: Mapping[str, Any], shape: tuple[int, ...] | None, classes: int | None
) -> tuple[tuple[int, ...], int]:
    """One sample and the classes, as given or as they fit the model."""
    registry.find("model", MODELS, name)
    usual_shape, usual_classes = FITTING.get(name) or (_image(name, options), USUAL_CLASSES)
    return shape or usual_shape, classes or usual_classes


def fitted(name: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """The model's options as they were given, with those that such samples decide."""
    choice = config.changed(Run(), {"model": {**options, "name": name}}, "--set").model
    return build.fitted(choice, shape, classes)


def batch(model: nn.Module, shape: tuple[int, ...], size: int) -> Tensor:
    """So many samples that the model can read."""
    return torch.zeros(size, *shape, dtype=torch.int64) if _embeds(model) else torch.randn(size, *shape)


def misfit(name: str, shape: tuple[int, ...], error: Exception) -> ConfigError:
    """A sample that the model cannot read, in a user's words."""
    words = "x".join(str(size) for size in shape)
    return ConfigError(f"{name} does not take an input of {words}: {reason(error)}. Try another --input.")


def _image(name: str, options: Mapping[str, Any]) -> tuple[int, ...]:
    """An image with as many channels as the model has by default, or is given."""
    default = registry.options_of(MODELS[name])["in_channels"].default
    channels = options.get("in_channels", default)
    return channels if isinstance(channels, int) else default, USUAL_SIDE, USUAL_SIDE


def _sample(model: nn.Module, shape: tuple[int, ...]) -> Tensor | tuple[int, ...]:
    """One of them; where the model embeds nothing its shape is enough."""
    return batch(model, shape, 1) if _embeds(model) else shape


def _embeds(model: nn.Module) -> bool:
    """Whether it reads numbers of words or characters."""
    return any(isinstance(module, nn.Embedding) for module in model.modules())


def _unit(costs: Profile, number: int) -> dict[str, Any]:
    row = costs.rows[number - 1]
    return {
        "cut": number,
        "unit": row.name,
        "forward_flops": row.forward_flops,
        "backward_flops": row.backward_flops,
        "activation": row.activation,
        "activation_bytes": VALUE_BYTES * row.activation,
        "params": row.params,
        "optimiser_state": row.optimiser_state,
        "cumulative_macs": costs.cumulative_forward_flops[number] // 2,
        "cumulative_params": costs.cumulative_params[number],
        "share": costs.share(number),
    }


def _sides(costs: Profile, cut: int) -> dict[str, Any]:
    names = [row.name for row in costs.rows]
    crossing = VALUE_BYTES * costs.activations[cut]
    state = costs.cumulative_optimiser_state
    return {
        "number": cut,
        "bytes_up": crossing + LABEL_BYTES,
        "bytes_down": crossing,
        "client": {
            "units": names[:cut],
            "params": costs.cumulative_params[cut],
            "optimiser_state": state[cut],
            "share": costs.share(cut),
        },
        "server": {
            "units": names[cut:],
            "params": costs.params - costs.cumulative_params[cut],
            "optimiser_state": state[-1] - state[cut],
            "share": 1 - costs.share(cut),
        },
    }
