"""Builds what a configured run names: data, model, method, devices and the training itself."""

import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from cutlayer import methods, optim, registry
from cutlayer.core import keys
from cutlayer.core.checks import check_device, reason
from cutlayer.core.meter import Meter
from cutlayer.core.method import Method
from cutlayer.data import own
from cutlayer.data.arrays import Arrays, split_off
from cutlayer.data.digest import digest
from cutlayer.data.hold_out import hold_out
from cutlayer.data.language import DEFINITIONS, MAX_LENGTH
from cutlayer.data.partition import PARTITIONS, Partition
from cutlayer.data.sample import channels_first
from cutlayer.data.sources import DATA, SOURCES, TASKS, Dataset, load, located, tokenised
from cutlayer.errors import ConfigError, DataError
from cutlayer.meters import METERS
from cutlayer.models import MODELS, freeze_norms
from cutlayer.models.language import tokenizer
from cutlayer.models.weights import load_weights
from cutlayer.pieces.losses import LOSSES, num_outputs, usual_loss, usual_metrics
from cutlayer.pieces.sampler import SAMPLERS, Available, Sampler, digests
from cutlayer.planning.devices import DEVICES, Devices
from cutlayer.planning.problem import Costs
from cutlayer.planning.profile import Profile, profile
from cutlayer.runs.codecs import bits
from cutlayer.runs.config import Choice, Run, literal
from cutlayer.runs.federated import ClientTests
from cutlayer.runs.metrics import Metric, by_name
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.stopping import Limits
from cutlayer.runs.training import REMEDIES, Training
from cutlayer.split import Split

log = logging.getLogger("cutlayer")
STANDARDISE = "set standardise = true in [data]"


def training(run: Run, root: Path | None = None, sets: Dataset | None = None) -> Training:
    """Return the training of a run in simulation, ready for its first round; `sets` are its data if they are loaded."""
    check_device(run.device)
    if run.sample is not None:
        raise ConfigError(
            "this run has a [sample], so its samples are on devices: use `cutlayer serve`. To simulate it, leave "
            "[sample] out and name its data"
        )
    sets = dataset(run, root) if sets is None else sets
    data, partition, test, validation = deal(run, sets)
    client_tests, placed = None, data.to(run.device)
    if run.hold_out:
        partition, held = hold_out(partition, run.hold_out, keys.fold(run.seed, "hold_out"))
        client_tests = ClientTests(placed, held)
    planned, pool = planned_method(run, model_of(run, data, root), data, len(partition))
    draws = sampler(run)
    runner = Simulation(
        planned,
        placed,
        partition,
        batching=run.batching,
        per_round=run.per_round,
        sampler=draws,
        engine=run.engine,
        server_engine=run.server_engine,
        chunk=run.chunk,
        codecs=run.codecs,
        seed=run.seed,
        precision=run.precision,
        guard=run.guard,
        most_weight=run.most_weight,
        meters=meters(run),
        devices=pool,
        augment=run.augment,
        name=run.method.name,
    )
    return Training(
        runner=runner,
        name=f"{run.name}, seed {run.seed}",
        test=test.to(run.device),
        validation=None if validation is None else validation.to(run.device),
        client_tests=client_tests,
        metrics=metrics(run, data),
        eval_every=run.eval_every,
        per_client=run.per_client,
        limits=Limits.of(run),
        remedies=(
            *REMEDIES,
            *([STANDARDISE] if isinstance(run.data, own.OwnData) and not run.data.standardise else []),
        ),
        inputs={**_digest_of_data(run, sets), **digests(draws)},
    )


def metrics(run: Run, like: Arrays) -> dict[str, Metric]:
    """Return the metrics that a run names, or those that fit its loss and samples like these."""
    named = run.metrics or usual_metrics(run.loss or usual_loss(like.y), like.y)
    return by_name(named, like.num_classes)


def meters(run: Run) -> tuple[Meter, ...]:
    """Return the meters that a run names."""
    if "ledger" in run.meters:
        raise ConfigError("the ledger watches every run; leave it out of meters")
    return tuple(registry.find("meter", METERS, name)() for name in run.meters)


def sampler(run: Run) -> Sampler:
    """Return the sampler of a run; a trace file that it needs is read."""
    made = registry.make("sampler", SAMPLERS, run.sampler.name, run.sampler.options)
    if isinstance(made, Available) and made.trace is not None:
        log.info("%s has rounds of %d clients", made.trace, len(made.intervals))
    return made


class Dealt(NamedTuple):
    """The samples of a run, and which client holds which."""

    data: Arrays
    partition: Partition
    test: Arrays
    validation: Arrays | None


def dealt(run: Run, root: Path | None = None) -> Dealt:
    """Load the run's data and divide them among its clients."""
    return deal(run, dataset(run, root))


def deal(run: Run, sets: Dataset) -> Dealt:
    """Divide a data set among the run's clients."""
    data, test = sets.train, sets.test
    if run.subset < 1:
        data, test = (split_off(whole, run.subset, keys.fold(run.seed, "subset"))[1] for whole in (data, test))
    validation = None
    if run.validation:
        data, validation = split_off(data, run.validation, keys.fold(run.seed, "validation"))
    scheme = registry.make("partition", PARTITIONS, run.partition.name, run.partition.options)
    partition = scheme.draw(data, run.clients, keys.fold(run.seed, "partition"))
    if data.groups is not None and run.partition.name == "natural":
        test = test.of_groups(partition.names)  # test on the groups (roles, speakers) that are clients
    return Dealt(data, partition, test, validation)


def _digest_of_data(run: Run, sets: Dataset) -> dict[str, str]:
    """Return the digest of data that the user supplies, in files or by a plug-in."""
    is_own = isinstance(run.data, own.OwnData) or run.data in DATA.origins
    return {f"the data {run.data}": digest(sets.train, sets.test)} if is_own else {}


def planned_method(run: Run, split: Split, data: Arrays, num_clients: int) -> tuple[Method, Devices | None]:
    """Build the run's method for samples like these, and its simulated devices, if it has any."""
    options, pool = dict(run.method.options), None
    if run.devices is not None:
        known = costs(run, split, data.take(range(min(2, len(data)))).to(run.device))
        pool = devices(run.devices, known, num_clients, keys.fold(run.seed, "devices"))
        up, down = (bits(run.codecs, name) for name in ("activations", "gradients"))
        if _regulates(run):
            below = sum(unit.forward_flops for unit in known.client_units(split.cut, split.head))
            shapes = known.crossing(split.cut, split.head)
            options["seconds_per_sample"] = pool.seconds_per_sample(
                flops_below=below, up_bits=up(shapes), down_bits=down(shapes)
            )
        if _plans(run):
            options |= {"devices": pool, "costs": Costs.of(known, up, down)}
    client_opt, server_opt = (
        optim.build(choice.name, **choice.options) for choice in (run.optimiser, run.server_optimiser or run.optimiser)
    )
    return methods.build(run.method.name, split, client_opt, server_opt, **options), pool


def dataset(run: Run, root: Path | None = None) -> Dataset:
    """Load the run's data set; texts are encoded with the tokenizer of its model."""
    if isinstance(run.data, own.OwnData):
        return own.read(run.data, root)
    if run.data in SOURCES and run.model.name == "causal_lm":
        raise ConfigError(
            f"the data {run.data!r} are no texts, which the model 'causal_lm' reads: use {', '.join(TASKS)}, or "
            "another model"
        )
    if run.data not in TASKS:
        return load(run.data, root)
    if run.model.name != "causal_lm":
        raise ConfigError(
            f"the data {run.data!r} are text, which the model {run.model.name!r} cannot read: use causal_lm"
        )
    options = run.model.options
    registry.check_options("model 'causal_lm'", registry.options_of(MODELS["causal_lm"]), options)
    reads = tokenizer(options["path"], options.get("root", root))
    return tokenised(run.data, reads, root, options.get("max_length", MAX_LENGTH))


def model_of(run: Run, data: Arrays, root: Path | None = None) -> Split:
    """Return the run's model, cut; its initial weights are a function of the seed, or come from a file."""
    task = DEFINITIONS.get(str(run.data))
    loss = run.loss or usual_loss(data.y)
    texts = {"answers": task.answers if task else None, "root": None if root is None else str(root)}
    shape = tuple(data.x.shape[1:]) if isinstance(data.x, torch.Tensor) else ()
    _refuse_channels_last(run, shape)
    options = fitted(run.model, shape, num_outputs(loss, data.y, data.num_classes), **texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keys.fold(run.seed, "model"))
        net = model(run.model.name, options)
    if run.weights is not None:
        load_weights(net, located(run.weights, root), fresh=run.fresh)
    if run.freeze_norms:
        freeze_norms(net)
    few = data.take(range(min(2, len(data)))).to(run.device)
    return Split(net.to(run.device), run.cut, head=run.head, loss=registry.find("loss", LOSSES, loss), sample=few.x)


def _refuse_channels_last(run: Run, shape: tuple[int, ...]) -> None:
    """Refuse images of this shape that are square if the channels come last, and not if they come first."""
    reads_images = "in_channels" in registry.options_of(registry.find("model", MODELS, run.model.name))
    if reads_images and len(shape) == 3 and shape[0] == shape[1] != shape[2]:
        raise DataError(
            f"{run.data}: inputs have the shape {shape}, and the model {run.model.name!r} reads channels first; "
            f"{channels_first(len(shape))}"
        )


def costs(run: Run, split: Split, few: Arrays) -> Profile:
    """Profile each unit on such samples; refuse a model that does not fit them."""
    split.rehearse(few.x, few.y, few.num_classes)
    client_opt = optim.build(run.optimiser.name, **run.optimiser.options)
    return profile(split, few.x, optimiser_slots=len(client_opt.moments))


def devices(choice: Choice, model: Profile, num_clients: int, key: int) -> Devices:
    """Draw the simulated devices for a model of these costs."""
    scheme = registry.make("devices", DEVICES, choice.name, choice.options)
    return scheme.draw(num_clients, model.cumulative_forward_flops[-1], key)


def reads_devices(run: Run) -> bool:
    """Return whether devices influence the run's method; for other methods they only set the simulated time."""
    return _regulates(run) or _plans(run)


def _regulates(run: Run) -> bool:
    return bool(run.method.options.get("regulate"))


def _plans(run: Run) -> bool:
    return "devices" in registry.options_of(methods.METHODS[run.method.name])


def model(name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build the model of this name; refuse options that it cannot be built with."""
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


def fitted(model: Choice, shape: tuple[int, ...], num_classes: int | None, **more: Any) -> dict[str, Any]:
    """Return the model's options, plus those that follow from the data; `shape`: of one input, if it is one tensor."""
    known = registry.options_of(registry.find("model", MODELS, model.name))
    facts = {"num_classes": num_classes, "in_features": math.prod(shape) if shape else None, **more}
    if len(shape) == 1:
        facts |= {"context": shape[0]}
    if len(shape) == 3:
        facts |= {"in_channels": shape[0], "image_size": shape[-1]}
    return {**{k: v for k, v in facts.items() if k in known and v is not None}, **model.options}
