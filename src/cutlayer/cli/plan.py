"""`cutlayer plan`: decide which device holds which layers, and how large its batches are."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from rich.text import Text
from torch import nn
from typer import Option

from cutlayer import optim, registry
from cutlayer.cli import costs, launch, plan_table, show
from cutlayer.cli.options import Classes, InputShape, Json, Settings, figure_option
from cutlayer.cli.progress import logging_to
from cutlayer.core import keys
from cutlayer.core.checks import check_positive
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError, DataError, UnknownNameError
from cutlayer.planning.device_files import read
from cutlayer.planning.devices import DEVICES, Devices
from cutlayer.planning.probe import probe
from cutlayer.planning.problem import Bound, Costs
from cutlayer.results import figures
from cutlayer.runs import build, config
from cutlayer.runs.codecs import bits
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.split import Split

if TYPE_CHECKING:
    from cutlayer.planning.planner import Planned

Mode = Literal["joint", "paper"]
MODES: dict[str, Mode] = {"joint": "joint", "paper": "paper"}
USUAL_INTERVAL = 15
USUAL_DEVICES = "table1"
USUAL_LR = 5e-4
PROBED = 32  # samples in the batch that the bound is estimated on
OPTIMISERS: dict[str, dict[str, Any]] = {  # by the names of --optimiser
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "momentum": 0.9},
    "adam": {"name": "adam"},
}
DATA = {  # the data set with samples of this shape and this number of classes
    ((1, 8, 8), 10): "digits",
    ((1, 28, 28), 10): "mnist",
    ((3, 32, 32), 10): "cifar10",
    ((3, 32, 32), 100): "cifar100",
    ((3, 64, 64), 200): "tiny_imagenet",
    ((3, 64, 64), 7): "ham10000",
    ((80,), 80): "shakespeare",
    ((1, 32, 32), 35): "speech_commands",
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command; None stands for what the user leaves open."""

    model: Annotated[str | None, Option(help="A model (see `cutlayer list models`); by default the run's.")] = None
    devices: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE",
            help="A list of devices (.csv, .json), sample for the one that comes with cutlayer, table1 or pool for "
            "devices at random; by default the run's, or table1.",
        ),
    ] = None
    clients: Annotated[
        int | None, Option(min=1, help="Number of devices; by default all of a file, or 20 at random.")
    ] = None
    interval: Annotated[
        int | None, Option(min=1, help="Mini-batches between aggregations; by default the run's, or 15.")
    ] = None
    lr: Annotated[float | None, Option(help="Learning rate; by default the run's, or 0.0005.")] = None
    mode: Annotated[
        str, Option(help="joint chooses batches and deadlines together, paper in turns, as HASFL does.")
    ] = "joint"
    target: Annotated[
        float | None,
        Option(metavar="EPS", help="Target for the mean squared gradient norm; by default one within reach."),
    ] = None
    samples: Annotated[
        int | None, Option(min=1, help="Samples at each device, the largest batch; by default an even share of --data.")
    ] = None
    least_batch: Annotated[int, Option(min=1, help="The smallest batch; use 4 or more for a model with BatchNorm.")] = 1
    shape: InputShape = None
    classes: Classes = None
    optimiser: Annotated[str, Option(help="sgd, momentum or adam, whose state takes memory.")] = "sgd"
    data: Annotated[
        str | None,
        Option(
            metavar="NAME|PATH",
            help="Estimate the bound on this data set (see `cutlayer list data`), from $CUTLAYER_DATA, or on your own "
            "file or folder; by default on random samples.",
        ),
    ] = None
    run: Annotated[
        Path | None,
        Option(
            metavar="FOLDER", help="Plan for the model, data and devices of this run, with its estimates of the bound."
        ),
    ] = None
    seed: Annotated[int | None, Option(help="The seed of weights, devices and random samples.")] = None
    settings: Settings = None

    def __post_init__(self) -> None:
        if self.model is None and self.run is None:
            raise ConfigError("there is no model to plan for; give --model, or --run with the folder of a run")
        for option in ("lr", "target"):
            if getattr(self, option) is not None:
                check_positive(f"--{option}", getattr(self, option))
        registry.find("mode", MODES, self.mode, "--mode")
        registry.find("optimiser", OPTIMISERS, self.optimiser, "--optimiser")
        if self.data is not None and self.run is not None:
            raise ConfigError(
                "--run brings its own estimates, so there is nothing to probe on --data; give one of them"
            )
        if (self.data is not None or self.run is not None) and (self.shape or self.classes):
            raise ConfigError("the data tell the shape of a sample and the classes; leave out --input and --classes")


def plan(
    asked: PlanRequest,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the plan as a run (.toml), for `cutlayer run FILE`.")
    ] = None,
    figure: Annotated[Path | None, figure_option("Draw a mini-batch of all devices before and after")] = None,
    as_json: Json = False,
) -> None:
    """Choose each device's cut and batch size to reach a target soonest, and show the gain.

    The number of mini-batches comes from a bound on convergence, whose constants are estimated from one batch; their
    time comes from the speed of the devices and their links.

    Examples:
        cutlayer plan --model vgg16 --devices sample
        cutlayer plan --model vgg16 --devices devices.csv --out plan.toml --figure plan.png
        cutlayer plan --model resnet18 --data cifar100 --devices table1 --clients 50 --set devices.server_tflops=40
        cutlayer plan --run runs/mine/seed-0 --target 0.05 --json
    """
    if out is not None and out.suffix != ".toml":  # else `cutlayer run` would take it for a recipe
        raise ConfigError(f"cannot write a plan into {out}; use a name that ends in .toml")
    answer = answered(asked)
    document = plan_table.document(answer) | {"out": None if out is None else str(out)}
    draw = partial(figures.draw_plan, answer.planned, names=answer.names)
    show.with_figure(document, plan_table.tables(document), machine=as_json, figure=figure, draw=draw)
    if out is not None:
        write(answer, out)
    if out is not None and not as_json:
        run, problem = answer.run, answer.planned.problem
        about = f"{run.rounds} rounds of {problem.interval} mini-batches with lr {problem.bound.lr:g}"
        show.people(Text(f"plan: {out}, for {run.data}: {about}"), Text(f"train it with: cutlayer run {out}"))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanAnswer:
    """A plan, with the model, devices and estimates that it is based on."""

    planned: "Planned"
    run: Run  # with the same model and devices; data is "" if no data set is known to fit
    devices: Devices
    units: tuple[str, ...]
    estimated: str  # what the bound's constants were estimated from
    samples: int | None  # of each device
    mode: Mode

    @property
    def names(self) -> list[str]:
        """The names of all devices, including those that the plan leaves out."""
        return [device.name or f"device {j}" for j, device in enumerate(self.devices.clients)]


def answered(asked: PlanRequest) -> PlanAnswer:
    """Build the model, draw the devices, estimate the bound's constants, and plan."""
    from cutlayer.planning import planner  # here because scipy loads slowly, and no other command needs it

    folder = None if asked.run is None else Folder(asked.run)
    if folder is not None and not folder.config.exists():
        raise DataError(
            f"there is no run in {asked.run}; give the folder with its config.toml, such as runs/mine/seed-0"
        )
    run = _run(asked, folder)
    real = asked.data is not None or folder is not None
    data = build.dataset(run).train if real else _random(run, asked)
    split = build.model_of(run, data)
    batch = _batch(split, data, keys.fold(run.seed, "probe"), real).to(run.device)
    table = build.costs(run, split, batch)
    choice = run.devices or Choice(USUAL_DEVICES)
    devices = build.devices(choice, table, run.clients, keys.fold(run.seed, "devices"))
    bound, estimated = _bound(asked, run, folder, split, batch)
    samples = asked.samples or (max(int(run.subset * len(data)) // run.clients, 1) if real else None)
    up, down = (bits(run.codecs, kind) for kind in ("activations", "gradients"))
    with logging_to(logging.NullHandler()):  # the table has the notes that the planner logs
        planned = planner.plan(
            Costs.of(table, up, down),
            devices,
            replace(bound, target=asked.target),
            interval=asked.interval or run.method.options.get("interval", USUAL_INTERVAL),
            samples=None if samples is None else [samples] * run.clients,
            least_batch=asked.least_batch,
            mode=MODES[asked.mode],
        )
    return PlanAnswer(
        planned=planned,
        run=replace(run, devices=choice),
        devices=devices,
        units=split.units,
        estimated=estimated,
        samples=samples,
        mode=MODES[asked.mode],
    )


def write(answer: PlanAnswer, path: Path) -> None:
    """Write the plan as a run in TOML, which `cutlayer run` trains."""
    planned = answer.planned
    if planned.excluded:
        left_out = ", ".join(answer.names[j] for j in planned.excluded)
        raise ConfigError(
            f"{path} is not written: the plan leaves out {left_out}, but a run needs all of its devices; "
            "give them more memory, or take them off the list and plan again"
        )
    if not answer.run.data:
        raise ConfigError(
            f"{path} is not written: no data set is known to have such samples; name one with --data, "
            "or with --set data=NAME"
        )
    options = {
        "interval": planned.problem.interval,
        "mode": answer.mode,
        "batches": planned.plan.batches,
        "cuts": planned.plan.cuts,
    }
    deepest = max(planned.plan.cuts)  # the run starts with this cut, so that no layer has to move
    run = replace(answer.run, name=path.stem, cut=deepest, method=Choice("hasfl", options))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.dumps(run), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the plan could not be written to {path}: {error.strerror or error}; choose another --out"
        ) from error


# -- the run ----------------------------------------------------------------------------------------------------------


def _run(asked: PlanRequest, folder: Folder | None) -> Run:
    """Return the run to plan: its model, data and devices."""
    changes: dict[str, Any] = {key: value for key in ("data", "seed") if (value := getattr(asked, key)) is not None}
    if asked.model is not None:
        changes["model"] = {"name": asked.model}
    if asked.devices is not None:
        changes["devices"] = _devices(asked.devices)
    path = changes.get("devices", {}).get("path")
    if asked.clients is not None or path is not None:
        changes["clients"] = asked.clients or len(read(path))
    if folder is None:  # all devices are assumed to hold equally many samples
        changes |= {"optimiser": {**OPTIMISERS[asked.optimiser], "lr": asked.lr or USUAL_LR}, "partition": "iid"}
    settings = launch.parsed(asked.settings or [])
    base = Run(devices=Choice(USUAL_DEVICES)) if folder is None else folder.run()
    run = config.changed(base, changes, "the command line")
    run = config.changed(run, settings, "--set")
    if run.head is not None:
        raise ConfigError("a plan has one cut for each device, but a head makes the model U-shaped; leave head out")
    if folder is None and asked.data is None and "data" not in settings:
        run = replace(run, data=DATA.get(_sample(run, asked), ""))
    return run


def _devices(word: str) -> dict[str, Any]:
    """Return the configuration of a scheme or file of devices, with the clock set to count what the planner counts."""
    schemes = [name for name in DEVICES if name != "file"]
    if word in schemes:
        return {"name": word, "model_sync": True}
    if word == "sample" or Path(word).suffix or Path(word).is_file():
        return {"name": "file", "path": word, "lanes": "shared", "model_sync": True}
    raise UnknownNameError("devices", word, [*schemes, "sample", "FILE.csv", "FILE.json"], "--devices")


def _sample(run: Run, asked: PlanRequest) -> tuple[tuple[int, ...], int]:
    """Return the shape of one sample and the number of classes, as asked for or as they fit the model."""
    return costs.fitting(run.model.name, run.model.options, asked.shape, asked.classes)


def _random(run: Run, asked: PlanRequest) -> Arrays:
    """Return a batch of noise with random labels."""
    shape, classes = _sample(run, asked)
    random = keys.generator(run.seed, "random batch")
    x = torch.from_numpy(random.standard_normal((PROBED, *shape), dtype=np.float32))
    return Arrays(x=x, y=torch.from_numpy(random.integers(classes, size=PROBED)), num_classes=classes)


# -- the bound --------------------------------------------------------------------------------------------------------


def _batch(split: Split, data: Arrays, key: int, real: bool) -> Arrays:
    """Return the samples to probe with; a model with embeddings gets random indices instead of noise."""
    if real:
        return data.take(keys.generator(key).permutation(len(data))[:PROBED])
    embeddings = [m.num_embeddings for m in split.model.modules() if isinstance(m, nn.Embedding)]
    if not embeddings or not isinstance(data.x, torch.Tensor):
        return data
    return replace(data, x=torch.from_numpy(keys.generator(key).integers(min(embeddings), size=data.x.shape)))


def _bound(asked: PlanRequest, run: Run, folder: Folder | None, split: Split, batch: Arrays) -> tuple[Bound, str]:
    """Return the constants of the bound, and where they come from."""
    if folder is not None:
        return _from_run(folder, asked.lr)
    lr = optim.build(run.optimiser.name, **run.optimiser.options).lr(0)
    bound = probe(split, batch.x, batch.y, lr=lr, key=keys.fold(run.seed, "probe"))
    what = f"samples of {run.data}" if asked.data is not None else "random samples (name a data set with --data)"
    return bound, f"one batch of {len(batch)} {what}, at the initial weights"


class Recorded(msgspec.Struct):
    """The constants of the bound as a run records them."""

    beta: float
    lr: float
    noise: list[float]
    slope: list[float]
    gap: float


def _from_run(folder: Folder, lr: float | None) -> tuple[Bound, str]:
    """Return the constants that a run has recorded last."""
    found = [record for record in folder.history() if "bound" in record]
    if not found:
        raise DataError(
            f"{folder.metrics} has no estimates of the bound; the method hasfl records them where its batches or cuts "
            "are planned in training; give such a run, or leave out --run to probe the model"
        )
    number = found[-1]["round"]
    try:
        known = msgspec.convert(found[-1]["bound"], Recorded)
    except msgspec.ValidationError as error:
        why = str(error).replace("`", "")
        raise DataError(f"{folder.metrics}: the bound of round {number} is damaged: {why}; run it again") from None
    bound = Bound(
        beta=known.beta, lr=lr or known.lr, noise=np.array(known.noise), slope=np.array(known.slope), gap=known.gap
    )
    return bound, f"{folder.path}, round {number}"
