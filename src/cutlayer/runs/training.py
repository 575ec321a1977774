"""A training in progress: the state, the history, and the evaluation after each round."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.checks import check_type
from cutlayer.core.meter import Reporting
from cutlayer.core.method import global_model, metrics_of
from cutlayer.core.precision import computing
from cutlayer.core.state import Model, State
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError, DataError
from cutlayer.meters.clock import Clock
from cutlayer.runs.checks import check_labels
from cutlayer.runs.codecs import idle
from cutlayer.runs.evaluation import evaluate, finite_or_none
from cutlayer.runs.federated import TestsOfClients, summary
from cutlayer.runs.metrics import GOALS, Metrics, by_name
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.simulation import HOW_ARRAYS
from cutlayer.runs.stopping import Best, Limits, Record, StopTraining, diverged, ends, nobody_trained

log = logging.getLogger("cutlayer")
DIVERGED = "no client had a batch with a finite loss and finite gradients"
NOT_FINITE = "look for values in the data that are not finite"
REMEDIES = ("lower the learning rate", "clip the gradients")  # where gradients are not finite


@dataclass(kw_only=True)
class Training:
    """A training in progress: the state, the history, and the evaluation after each round."""

    runner: Rounds
    name: str = ""  # of the run in warnings, if it has one
    test: Arrays | None = None
    validation: Arrays | None = None
    client_tests: TestsOfClients | None = None  # test sets that the clients hold themselves
    metrics: Metrics = None  # for a classification, the accuracy by default
    eval_every: int = 1
    per_client: bool = False  # also evaluate on each client's own training samples
    limits: Limits = Limits()
    remedies: tuple[str, ...] = REMEDIES
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests of what a resumed run must not change
    history: list[Record] = field(default_factory=list)
    best: Best | None = None  # if a metric is monitored
    state: State = field(init=False)

    def __post_init__(self) -> None:
        if type(self.eval_every) is not int or self.eval_every < 1:
            raise ConfigError(f"eval_every is {self.eval_every!r}; it must be at least 1")
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
            check_labels(self.runner.method.model, data)
        self._measures = by_name(self.metrics, classes)
        if self.client_tests is not None:
            self.client_tests.check(self.runner.backend.names())
        self.monitor = self.limits.monitored(self._measured_keys())
        self._halted = ""  # why on_round stopped the training
        self._warned = False
        self.state = self.runner.start()

    def round(self) -> Record:
        """Play one more round and return its record."""
        self.state = tree.owned(self.runner.round(self.state))  # as a checkpoint would restore it
        record = self._record()
        self.history.append(record)
        self._keep_best(record)
        for codec in idle(self.runner.coders, record["bytes"]) if record["round"] == 1 else ():
            log.warning("%s", codec)
        if record["stopped"] and not self._warned:
            self._warned = True
            log.warning(
                "%sround %d: %d client%s had gradients that were not finite, and changed nothing from there on; %s. "
                "`stopped` counts such clients in each round",
                f"{self.name}, " if self.name else "",
                record["round"],
                record["stopped"],
                "" if record["stopped"] == 1 else "s",
                self._one_of(),
            )
        return record

    def tell(self, listener: Callable[[], object]) -> None:
        """Call a listener, which may stop the training."""
        try:
            listener()
        except StopTraining as stop:
            self._halted = ": ".join(["on_round stopped it", *([str(stop)] if str(stop) else [])])

    @property
    def ended(self) -> bool:
        """Whether no round is left."""
        return self.state.round >= self.limits.rounds or self.early_end is not None

    @property
    def early_end(self) -> str | None:
        """The reason to end before the last round; None if there is none yet."""
        if self.diverged:
            return "nobody could train"
        return self._halted or next(ends(self.limits, self.monitor, self.history), None)

    @property
    def diverged(self) -> str:
        """Why the training is lost, if nobody can train any more; else empty."""
        if not self._is_lost(self.history):
            return ""
        return f"nobody could train in round {self.history[-1]['round']}: {DIVERGED}; {self._one_of(NOT_FINITE)}"

    def _one_of(self, *more: str) -> str:
        """Return what may help where gradients are not finite."""
        *first, last = (*self.remedies, *more)
        return f"{', '.join(first)}{',' if len(first) > 1 else ''} or {last}"

    def _is_lost(self, history: list[Record]) -> bool:
        if not (history and nobody_trained(history[-1]) and is_here((self.state.client, self.state.server))):
            return False  # one of two servers cannot know, and both must end together
        per_round = self.runner.per_round
        everyone = per_round is None or per_round >= len(self.runner.backend.names())
        return diverged(history, everyone=everyone, last=history[-1]["round"] == self.limits.rounds)

    @property
    def model(self) -> Model:
        """The current global model."""
        return global_model(self.state)

    def state_dict(self, model: Model | None = None) -> dict[str, Tensor]:
        """Return the current model, or another one, as a state dict of the unsplit module."""
        exported: dict[str, Tensor] = self.runner.method.model.export(self.model if model is None else model)
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
            "loss": finite_or_none(loss / batches) if batches else None,
            "stopped": int(stopped),
            "samples": ledger.samples,
            "bytes": dict(ledger.totals),
        }
        if self.runner.dropped:
            record["guarded"] = len(self.runner.dropped)
        if ledger.before:
            record["bytes_before_codecs"] = dict(ledger.before)
        if self.runner.clock is not None:
            record |= self._timed(self.runner.clock)
        for meter in self.runner.meters:
            if isinstance(meter, Reporting):
                record |= meter.metrics()
        if is_here(self.state):
            record |= metrics_of(self.runner.method, self.state)
        if number % self.eval_every == 0 or self._is_last(record):
            record |= self._measured()
        return record

    def _is_last(self, record: Record) -> bool:
        """Return whether this round is the last, as far as that is known before the evaluation."""
        limit = self.limits.until_samples
        spent = limit is not None and record["samples"] >= limit
        return spent or record["round"] == self.limits.rounds or self._is_lost([*self.history, record])

    def _keep_best(self, record: Record) -> None:
        if self.monitor is None or self.monitor.key not in record:
            return
        value = self.monitor.value(record)
        if self.best is None or value > self.best.value:
            self.best = Best(record["round"], value, tree.map(Tensor.cpu, tree.owned(self.model)))

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
        if self.client_tests is not None:
            found |= self._tested_by_clients(self.client_tests)
        if self.per_client:
            backend = self.runner.backend
            found["clients"] = {name: self._evaluate(backend.samples_of(j)) for j, name in backend.names().items()}
        return found

    def _tested_by_clients(self, tests: TestsOfClients) -> Record:
        found = tests.figures(self._evaluate, self.model, self.state.round)
        if not found:
            return {}
        told: Record = {f"federated_{key}": value for key, value in summary(found).items()}
        return {**told, "client_tests": {name: {"samples": f.samples, **f.values} for name, f in found.items()}}

    def _measured_keys(self) -> list[str]:
        """Return the keys of records that can be monitored."""
        metrics, sets = ("loss", *self._measures), self._held_out()
        keys = [f"{name}_{metric}" for name in sets for metric in metrics]
        if self.client_tests is not None and self.client_tests.certain:
            keys += [f"federated_{metric}" for metric in metrics]
            keys += [f"federated_{metric}_worst" for metric in metrics if metric in GOALS]
        return keys

    def _held_out(self) -> dict[str, Arrays]:
        named = {"test": self.test, "validation": self.validation}
        return {name: data for name, data in named.items() if data is not None}

    def _evaluate(self, data: Arrays) -> dict[str, float | None]:
        with computing(self.runner.precision):
            found = evaluate(self.runner.method.model, self.model, data, self._measures)
        return {name: finite_or_none(value) for name, value in found.items()}


def is_here(value: Tree) -> bool:
    """Return whether all tensors of a value are at this server."""
    return not any(a.is_meta for a in tree.tensors(value))
