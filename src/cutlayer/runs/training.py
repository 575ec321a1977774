"""Training from Python: takes data, a partition and a method; returns a state dict and a history."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.checks import check_type
from cutlayer.core.engine import Engine
from cutlayer.core.meter import Meter, Reporting
from cutlayer.core.method import Method, global_model, metrics_of
from cutlayer.core.precision import Precision, computing
from cutlayer.core.state import Model, State
from cutlayer.core.transport import Augmentation
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.out_of_memory import out_of_memory, release
from cutlayer.errors import ConfigError, DataError
from cutlayer.meters.clock import Clock
from cutlayer.pieces.sampler import Sampler, uniform
from cutlayer.planning.devices import Devices
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.simulation import HOW_ARRAYS, Simulation
from cutlayer.split import Split

log = logging.getLogger("cutlayer")

Record = dict[str, Any]
Metric = Callable[[Tensor, Tensor], Tensor]


def accuracy(out: Tensor, y: Tensor) -> Tensor:
    """Top-1: whether each sample's largest output is its class."""
    return (out.argmax(1) == y).double()


@torch.no_grad()
def evaluate(
    split: Split, model: Model, data: Arrays, metrics: Mapping[str, Metric], targets: int | None = None
) -> dict[str, float]:
    """Return the mean loss and the mean of each metric over all samples, in eval mode, without changing the model.

    A metric maps outputs and targets to one number a sample, or to their mean. A batch holds at most `targets` targets,
    by default 512, or 4096 on a GPU; a text has a target at every position, each with scores for a whole vocabulary.
    On out-of-memory, the batch is halved until it fits.
    """
    if targets is None:
        targets = 4096 if data.y.is_cuda else 512
    batch = max(1, min(len(data), targets // max(1, data.y[:1].numel())))
    while True:
        try:
            return _means(split, model, data, {"loss": split.loss, **metrics}, batch)
        except RuntimeError as error:
            if batch == 1 or not out_of_memory(error):
                raise
        release()  # outside of the except block, where the error no longer references tensors
        batch //= 2
        log.info("out of memory: evaluating %d samples at a time", batch)


def _means(split: Split, model: Model, data: Arrays, measures: Mapping[str, Metric], batch: int) -> dict[str, float]:
    """Return the mean of each measure, computed in batches."""
    sums = torch.zeros(len(measures), dtype=torch.float64, device=data.y.device)
    for start in range(0, len(data), batch):
        rows = slice(start, start + batch)  # views, no copies
        y = data.y[rows]
        out = split.predict(model, tree.map(lambda a, rows=rows: a[rows], data.x))
        sums += len(y) * torch.stack([fn(out, y).double().mean() for fn in measures.values()])
    return dict(zip(measures, (sums / len(data)).tolist(), strict=True))  # the only wait for the device


@dataclass(kw_only=True)
class Training:
    """A training in progress: the state, the history, and the evaluation after each round."""

    runner: Rounds
    test: Arrays | None = None
    validation: Arrays | None = None
    metrics: Mapping[str, Metric] | None = None  # for a classification, the accuracy by default
    eval_every: int = 1
    per_client: bool = False  # also evaluate on each client's own training samples
    rounds: int = 0  # of the whole run; the last one is always evaluated
    until_samples: int | None = None  # the round that reaches it is the last
    digest: str | None = None  # of the data; a resumed run must have the same
    history: list[Record] = field(default_factory=list)
    state: State = field(init=False)

    def __post_init__(self) -> None:
        for setting, least in (("eval_every", 1), ("rounds", 0)):
            if getattr(self, setting) < least:
                raise ConfigError(f"{setting} is {getattr(self, setting)}; it must be at least {least}")
        classes = self.runner.backend.num_classes
        for name, data in self._held_out().items():
            check_type(f"the {name} set", data, Arrays, HOW_ARRAYS)
            if classes is not None and data.num_classes is not None and data.num_classes > classes:
                raise DataError(
                    f"the {name} set has labels up to {data.num_classes - 1}, but the training data have {classes} "
                    "classes; give both the same num_classes"
                )
            if not len(data):
                raise DataError(f"the {name} set has no samples; give at least one, or leave it out")
        self.state = self.runner.start()
        if self.metrics is None:
            self.metrics = {"accuracy": accuracy} if classes is not None else {}

    def round(self) -> Record:
        """Play one more round and return its record."""
        self.state = tree.owned(self.runner.round(self.state))  # as a checkpoint would restore it
        record = self._record()
        self.history.append(record)
        return record

    @property
    def model(self) -> Model:
        """The current global model."""
        return global_model(self.state)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the current model as a state dict of the unsplit module."""
        exported: dict[str, Tensor] = self.runner.method.model.export(self.model)
        return exported

    def half(self) -> dict[str, Tensor] | None:
        """Return this server's values by name if another server holds the rest; None if all are here."""
        if is_here((self.state.client, self.state.server)):
            return None
        return {k: v for part in self.model for k, v in part.items() if not v.is_meta}

    def _record(self) -> Record:
        ledger, number = self.runner.ledger, self.state.round
        report = self.state.report  # None if the method reports nothing
        told = report is not None and is_here(report)
        loss, batches, stopped = (float(v) for v in report.tree) if told else (0.0, 0.0, 0.0)
        record: Record = {
            "round": number,
            "loss": _finite(loss / batches) if batches else None,
            "stopped": int(stopped),
            "samples": ledger.samples,
            "bytes": dict(ledger.totals),
        }
        if self.runner.clock is not None:
            record |= self._timed(self.runner.clock)
        for meter in self.runner.meters:
            if isinstance(meter, Reporting):
                record |= meter.metrics()
        if is_here(self.state):
            record |= metrics_of(self.runner.method, self.state)
        if number % self.eval_every == 0 or self.is_last(record):
            record |= self._measured()
        return record

    def is_last(self, record: Record) -> bool:
        """Return whether this round is the last by the number of rounds or samples."""
        spent = self.until_samples is not None and record["samples"] >= self.until_samples
        return spent or bool(record["round"] == self.rounds)

    def _timed(self, clock: Clock) -> Record:
        training, aggregation, straggler = clock.spent
        names = self.runner.backend.names()
        return {
            "simulated_seconds": clock.now,
            "training_seconds": training,
            "aggregation_seconds": aggregation,
            "straggler": None if straggler is None else names[straggler],
            "client_flops": clock.client_flops,
        }

    def _measured(self) -> Record:
        found: Record = {}
        for name, data in self._held_out().items():
            found |= {f"{name}_{k}": v for k, v in self._evaluate(data).items()}
        if self.per_client:
            backend = self.runner.backend
            found["clients"] = {name: self._evaluate(backend.samples_of(j)) for j, name in backend.names().items()}
        return found

    def _held_out(self) -> dict[str, Arrays]:
        named = {"test": self.test, "validation": self.validation}
        return {name: data for name, data in named.items() if data is not None}

    def _evaluate(self, data: Arrays) -> dict[str, float | None]:
        with computing(self.runner.precision):
            found = evaluate(self.runner.method.model, self.model, data, self.metrics or {})
        return {name: _finite(value) for name, value in found.items()}


def is_here(value: Tree) -> bool:
    """Return whether all tensors of a value are at this server."""
    return not any(a.is_meta for a in tree.tensors(value))


def _finite(value: float) -> float | None:
    """Return None for a value that is not finite, as JSON has no NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `train`."""

    state_dict: dict[str, Tensor]  # of the unsplit module, for its load_state_dict
    history: list[Record]  # one record a round; see `train`
    state: State  # of the method, with the client and the server part
    engine: str  # that ran the rounds


def train(
    method: Method,
    data: Arrays,
    partition: Partition,
    *,
    rounds: int,
    test: Arrays | None = None,
    validation: Arrays | None = None,
    batching: Batching = Batching(),
    per_round: int | None = None,
    sampler: Sampler = uniform,
    engine: str | Engine = "auto",
    chunk: int | None = None,
    seed: int = 0,
    precision: Precision = "fp32",
    meters: Sequence[Meter] = (),
    devices: Devices | None = None,
    augment: Augmentation | None = None,
    metrics: Mapping[str, Metric] | None = None,
    eval_every: int = 1,
    per_client: bool = False,
    on_round: Callable[[Record], None] | None = None,
) -> Result:
    """Train a method on data that is divided among clients, and return the whole model.

        split = Split(model, cut=2)
        method = sfl_v1(model=split, client_opt=sgd(0.1), server_opt=sgd(0.1))
        result = train(method, data, dirichlet(data.y, 20, alpha=0.3, key=0), rounds=40, test=test)
        model.load_state_dict(result.state_dict)

    Args:
        method: what to train and how; see `cutlayer.methods`. The model's type (float32, or float64 after
            `model.double()`) and device must be those of the data.
        data: the clients' samples; see `from_arrays` and `from_dataset`.
        partition: which client holds which samples; see `iid`, `dirichlet`, `shards` and `natural`.
        rounds: how many rounds to train.
        test: samples to evaluate the global model on.
        validation: more such samples, reported separately.
        batching: batch size, and passes over the data or steps in a round.
        per_round: how many clients are sampled for each round; all of them by default.
        sampler: samples them: `uniform` by default, `weighted` by their samples, `available(...)`, or a function of a
            `Draw` (`cutlayer.pieces.sampler`).
        engine: "loop", "vmap", "graph" (on a GPU), "ray", an engine of your own, or "auto": graph on a GPU, elsewhere
            loop or vmap by a rule (`cutlayer.engines.auto`). They agree to rounding.
        chunk: to save memory, the most clients that vmap stacks at a time, or that have their own memory at a time on
            graph.
        seed: of everything random: clients, batches, dropout. The initial weights are those of the model.
        precision: what layers compute in: "fp32", "tf32" (rounded products on a GPU) or "bf16" (bfloat16, by autocast);
            everything that is stored or sent stays float32. See `cutlayer.core.precision`.
        meters: observe every crossing, besides the ledger; see `cutlayer.core.meter.Meter`.
        devices: how fast each client is; with them every record has the simulated time. See `Devices`.
        augment: random changes of the training samples, an `Augment` or a `SampleTransform`; none by default.
        metrics: functions of (outputs, targets), by name; for classes the accuracy by default.
        eval_every: evaluate after every so many rounds, and after the last.
        per_client: also evaluate the global model on each client's own samples.
        on_round: called with the record of each round.

    Returns:
        The state dict, the method's state, and the history: for each round a record with

        - `round`, from 1 on; `loss`, the mean of the round's batch losses; `stopped`, clients whose gradients were not
          finite and whose parts did not change from then on;
        - `samples`, processed so far, and `bytes`, crossed so far by direction and kind, such as `up_activations`;
        - with devices, `simulated_seconds` until the end of the round and `client_flops` of all clients so far; of the
          round itself `training_seconds`, `aggregation_seconds` (transfers of models, if they take time) and the
          `straggler`, whose own work and transfers took the longest;
        - where evaluated, `test_loss`, `test_accuracy` and so on for each metric; `validation_...` alike; and
          `clients`, the same by the clients' names.

        A number that is not finite is None.
    """
    runner = Simulation(
        method,
        data,
        partition,
        batching=batching,
        per_round=per_round,
        sampler=sampler,
        engine=engine,
        chunk=chunk,
        seed=seed,
        precision=precision,
        meters=tuple(meters),
        devices=devices,
        augment=augment,
    )
    training = Training(
        runner=runner,
        test=test,
        validation=validation,
        metrics=metrics,
        eval_every=eval_every,
        per_client=per_client,
        rounds=rounds,
    )
    for _ in range(rounds):
        record = training.round()
        if on_round is not None:
            on_round(record)
    return Result(
        state_dict=training.state_dict(),
        history=training.history,
        state=training.state,
        engine=runner.engine_name,
    )
