"""The costs of a model, unit by unit and on both sides of a cut."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cutlayer import optim, registry
from cutlayer.cli.tables import NONE, Sheet, plain_table
from cutlayer.core.checks import reason
from cutlayer.core.text import human_bytes, percent
from cutlayer.errors import ConfigError
from cutlayer.models import MODELS
from cutlayer.planning.profile import Profile, profile
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.split import Split

OPTIMISERS = {  # by the memory that they need, which does not depend on the learning rate
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
}  # the shape of one sample, and the number of classes
VALUE_BYTES = 4  # float32
LABEL_BYTES = 8  # int64
MOST_UNITS = 6  # listed by name


def parse_cut(text: str) -> int | str:
    """Read a number of units, or the name of one."""
    return int(text) if text.lstrip("-").isdecimal() else text


def fitting(
    name: str, options: Mapping[str, Any], shape: str | None, classes: int | None
) -> tuple[tuple[int, ...], int]:
    """Return the shape of one sample and the number of classes, as given (3x32x32) or as they fit the model."""
    registry.find("model", MODELS, name)
    usual_shape, usual_classes = FITTING.get(name, (None, USUAL_CLASSES))
    if shape is None:
        return usual_shape or _image(name, options), classes or usual_classes
    words = shape.lower().replace("×", "x").split("x")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--input {shape!r} is no shape; write for example --input 3x32x32")
    return tuple(int(word) for word in words), classes or usual_classes


def fitted(name: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """Return the model's options: those given, and those that follow from the samples."""
    choice = config.changed(Run(), {"model": {**options, "name": name}}, "--set").model
    return build.fitted(choice, shape, classes)


def batch(model: nn.Module, shape: tuple[int, ...], size: int) -> Tensor:
    """Return a batch of this size that the model can read."""
    return torch.zeros(size, *shape, dtype=torch.int64) if _embeds(model) else torch.randn(size, *shape)


def misfit(name: str, shape: tuple[int, ...], error: Exception) -> ConfigError:
    """Return the error for a sample that the model cannot read."""
    words = "x".join(str(size) for size in shape)
    return ConfigError(f"{name} does not take an input of {words}: {reason(error)}. Try another --input.")


def unit_costs(
    name: str, options: Mapping[str, Any], shape: tuple[int, ...], opt: optim.Optimiser, cut: str | None
) -> dict[str, Any]:
    """Return what one sample costs, unit by unit and on both sides of the cut if there is one."""
    with torch.device("meta"):  # shapes are enough
        model = build.model(name, options)
    # A model that embeds nothing needs only the shape of a sample.
    sample = batch(model, shape, 1) if _embeds(model) else shape
    try:
        costs = profile(model, sample, len(opt.moments))
    except RuntimeError as error:
        raise misfit(name, shape, error) from None
    units = [_unit(costs, number) for number in range(1, len(costs.rows) + 1)]
    sides = {} if cut is None else {"cut": _sides(costs, Split(model, parse_cut(cut)).cut)}
    return {"macs": costs.macs, "params": costs.params, "units": units, **sides}


def _image(name: str, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of an image with the model's channels, by default or as given."""
    known = registry.options_of(MODELS[name])
    default = known["in_channels"].default if "in_channels" in known else None
    if not isinstance(default, int):
        raise ConfigError(f"the model {name!r} does not tell what it reads; give the shape of a sample with --input")
    channels = options.get("in_channels", default)
    return channels if isinstance(channels, int) else default, USUAL_SIDE, USUAL_SIDE


def _embeds(model: nn.Module) -> bool:
    """Return whether the model reads the numbers of words or characters."""
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
    params, state, share = costs.cumulative_params[cut], costs.cumulative_optimiser_state, costs.share(cut)

    def side(units: list[str], params: int, state: int, share: float) -> dict[str, Any]:
        return {"units": units, "params": params, "optimiser_state": state, "share": share}

    return {
        "number": cut,
        "bytes_up": crossing + LABEL_BYTES,
        "bytes_down": crossing,
        "client": side(names[:cut], params, state[cut], share),
        "server": side(names[cut:], costs.params - params, state[-1] - state[cut], 1 - share),
    }


def cost_tables(costs: Mapping[str, Any]) -> list[Sheet]:
    """Return the costs of each unit, and of both sides where a cut was given."""
    shape = "x".join(str(size) for size in costs["input"])
    work = f"{costs['macs'] / 1e6:.2f} M multiply-adds, {costs['params']:,} parameters"
    heads = ["cut", "unit", "forward\nMFLOPs", "backward\nMFLOPs", "elements\nout", "KiB\nout", "params"]
    rows = [
        (
            unit["cut"],
            unit["unit"],
            f"{unit['forward_flops'] / 1e6:.3f}",
            f"{unit['backward_flops'] / 1e6:.3f}",
            f"{unit['activation']:,}",
            f"{unit['activation_bytes'] / 1024:.1f}",
            f"{unit['params']:,}",
            f"{unit['optimiser_state']:,}",
            f"{100 * unit['share']:.1f}",
        )
        for unit in costs["units"]
    ]
    units = plain_table(
        [*heads, "optimiser\nstate", "O(L)\n%"],
        rows,
        left=["unit"],
        title=f"{costs['model']}, one sample of {shape}: {work}",
        caption="O(L): share of the forward pass up to this unit",
    )
    return [units, _side_table(costs["cut"])] if "cut" in costs else [units]


def _side_table(cut: Mapping[str, Any]) -> Sheet:
    crossing = f"a sample sends {cut['bytes_up']:,} B up (its label too) and {cut['bytes_down']:,} B down"
    rows = [
        (
            side,
            _units(cut[side]["units"]),
            f"{cut[side]['params']:,}",
            human_bytes(VALUE_BYTES * cut[side]["params"]),
            f"{cut[side]['optimiser_state']:,}",
            percent(cut[side]["share"]),
        )
        for side in ("client", "server")
    ]
    heads = ["", "units", "params", "size", "optimiser\nstate", "work"]
    return plain_table(heads, rows, left=["", "units"], fold=["units"], title=f"cut {cut['number']}: {crossing}")


def _units(names: Sequence[str]) -> str:
    """Return all names, or a range of them where they are many."""
    if len(names) > MOST_UNITS:
        return f"{names[0]} … {names[-1]} ({len(names)} units)"
    return ", ".join(names) or NONE
