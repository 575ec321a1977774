"""From a run as data to the things that train."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cutlayer import keys, methods, optim, registry
from cutlayer.checks import reason
from cutlayer.config import Choice, Run, literal
from cutlayer.data.arrays import Arrays, split_off
from cutlayer.data.partition import PARTITIONS
from cutlayer.data.sources import Dataset, load
from cutlayer.errors import ConfigError
from cutlayer.methods.base import Method
from cutlayer.models import MODELS
from cutlayer.simulation import Simulation
from cutlayer.split import Split
from cutlayer.training import Training


def training(run: Run, root: Path | None = None, engine: str | None = None) -> Training:
    """Everything that a run names, ready for its first round; `engine` overrides, as a resumed run must."""
    _check_device(run.device)
    dataset = load(run.data, root)
    data, validation = dataset.train, None
    if run.validation:
        data, validation = split_off(data, run.validation, keys.fold(run.seed, "validation"))
    scheme = registry.make("partition", PARTITIONS, run.partition.name, run.partition.options)
    partition = scheme.draw(data.y, run.clients, keys.fold(run.seed, "partition"))
    simulation = Simulation(
        method(run, dataset),
        data.to(run.device),
        partition,
        batching=run.batching,
        per_round=run.per_round,
        engine=engine or run.engine,
        chunk=run.chunk,
        seed=run.seed,
    )
    return Training(
        simulation=simulation,
        test=dataset.test.to(run.device),
        validation=None if validation is None else validation.to(run.device),
        eval_every=run.eval_every,
        per_client=run.per_client,
        rounds=run.rounds,
    )


def method(run: Run, dataset: Dataset) -> Method:
    """The run's method with its model and optimisers; the initial weights are a function of the seed."""
    options = fitted(run.model, _shape(dataset.train), dataset.train.num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keys.fold(run.seed, "model"))
        net = model(run.model.name, options).to(run.device)
    client_opt, server_opt = (
        optim.build(choice.name, **choice.options) for choice in (run.optimiser, run.server_optimiser or run.optimiser)
    )
    split = Split(net, run.cut, head=run.head)
    return methods.build(run.method.name, split, client_opt, server_opt, **run.method.options)


def model(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The model of this name; options that make no model of it are told of in a user's words."""
    given = ", ".join(f"{k} = {literal(v)}" for k, v in options.items())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")  # refused below
            net = registry.make("model", MODELS, name, options)
    except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"the model {name!r} cannot be built with {given}: {reason(error)}") from error
    for path, parameter in net.named_parameters():
        if not parameter.numel():
            shape = tuple(parameter.shape)
            raise ConfigError(f"the model {name!r} with {given} is empty: {path} has the shape {shape}; make it larger")
    return net


def fitted(model: Choice, shape: tuple[int, ...], num_classes: int | None) -> dict[str, Any]:
    """The model's options, with those that the data decide filled in: the shape of one input, if it is one tensor."""
    known = registry.options_of(registry.find("model", MODELS, model.name))
    facts = {"num_classes": num_classes, "in_features": math.prod(shape) if shape else None}
    if len(shape) == 3:
        facts |= {"in_channels": shape[0], "image_size": shape[-1]}
    return {**{k: v for k, v in facts.items() if k in known and v is not None}, **model.options}


def _check_device(name: str) -> None:
    try:
        float(torch.zeros(1, device=name))  # read back: a device without values, such as meta, cannot train
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {reason(error)}; use cpu or cuda") from None


def _shape(data: Arrays) -> tuple[int, ...]:
    return tuple(data.x.shape[1:]) if isinstance(data.x, torch.Tensor) else ()
