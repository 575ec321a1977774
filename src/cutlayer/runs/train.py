"""Training from Python: takes data, a partition and a method; returns a state dict and a history."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor

from cutlayer.core import keys
from cutlayer.core.batches import Batching
from cutlayer.core.engine import Engine
from cutlayer.core.meter import Meter
from cutlayer.core.method import Method
from cutlayer.core.precision import Precision
from cutlayer.core.state import State
from cutlayer.core.transport import Augmentation
from cutlayer.data.arrays import Arrays
from cutlayer.data.datasets import Items
from cutlayer.data.hold_out import hold_out as divide
from cutlayer.data.partition import Partition
from cutlayer.errors import CheckpointError, DivergedError
from cutlayer.pieces.sampler import Sampler, uniform
from cutlayer.planning.devices import Devices
from cutlayer.runs.arguments import check, with_arrays
from cutlayer.runs.codecs import Codecs
from cutlayer.runs.described import described, inputs_of, name_of
from cutlayer.runs.federated import ClientTests
from cutlayer.runs.folder import Folder
from cutlayer.runs.metrics import Goal, Metrics
from cutlayer.runs.run import execute
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.stopping import Limits, Record
from cutlayer.runs.training import Training

IN_PYTHON = {"--resume": "resume=True", "--overwrite": "overwrite=True", "another --out": "another out"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `train`."""

    state_dict: dict[str, Tensor]  # of the unsplit module, for its load_state_dict
    history: list[Record]  # one record a round; see `train`
    state: State  # of the method, with the client and the server part
    engine: str  # that ran the rounds
    best: dict[str, Tensor] | None = None  # the state dict of the best evaluation, if a metric is monitored
    best_round: int | None = None
    ended: str = ""  # why it ended before the last round
    folder: Path | None = None  # of the run, if it has one

    def __repr__(self) -> str:
        numbers = self.history[-1].items() if self.history else ()
        last = {k: v for k, v in numbers if k.endswith(("loss", "accuracy")) and isinstance(v, float)}
        words = [f"rounds={len(self.history)}", *(f"{k}={v:.4g}" for k, v in last.items()), f"engine={self.engine!r}"]
        words += [] if self.best_round is None else [f"best_round={self.best_round}"]
        words += [f"ended={self.ended!r}"] if self.ended else []
        words += [] if self.folder is None else [f"folder={str(self.folder)!r}"]
        return f"Result({', '.join(words)})"


def train(
    method: Method,
    data: Arrays | Items,
    partition: Partition,
    *,
    rounds: int,
    test: Arrays | Items | None = None,
    validation: Arrays | Items | None = None,
    test_partition: Partition | None = None,
    hold_out: float = 0.0,
    batching: Batching = Batching(),
    per_round: int | None = None,
    sampler: Sampler = uniform,
    engine: str | Engine = "auto",
    chunk: int | None = None,
    seed: int = 0,
    precision: Precision = "fp32",
    codecs: Codecs = MappingProxyType({}),
    guard: bool = True,
    most_weight: float | None = None,
    meters: Sequence[Meter] = (),
    devices: Devices | None = None,
    augment: Augmentation | None = None,
    metrics: Metrics = None,
    eval_every: int = 1,
    per_client: bool = False,
    until_converged: bool = False,
    until_accuracy: float | None = None,
    until_samples: int | None = None,
    patience: int | None = None,
    monitor: str | None = None,
    mode: Goal | None = None,
    min_delta: float = 0.0,
    out: str | Path | None = None,
    name: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int = 1,
    on_round: Callable[[Record], object] | None = None,
) -> Result:
    """Train a method on data that is divided among clients, and return the whole model.

        split = Split(model, cut=2)
        method = sfl_v1(model=split, client_opt=sgd(0.1), server_opt=sgd(0.1))
        result = train(method, data, dirichlet(data.y, 20, alpha=0.3, key=0), rounds=40, test=test)
        model.load_state_dict(result.state_dict)

    Args:
        method: what to train and how; see `cutlayer.methods`. The model's type (float32, or float64 after
            `model.double()`) and device must be those of the data.
        data: the clients' samples; see `from_arrays`. A data set or a list of items goes through `from_dataset`.
        partition: which client holds which samples; see `iid`, `dirichlet`, `shards` and `natural`.
        rounds: how many rounds to train.
        test: samples to evaluate the global model on.
        validation: more such samples, reported separately.
        test_partition: which client holds which samples of `test`: each client evaluates the model on its own, too.
        hold_out: the fraction of its samples that each client keeps for such a test instead of training on them.
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
        codecs: how values are encoded before they cross, by kind, such as {"activations": "int8", "gradients":
            codecs.topk(share=0.1)}; see `cutlayer.codecs`.
        guard: leave updates out of averages that are not finite, or whose norm is above 100 times the median of the
            round; a warning names the clients.
        most_weight: the most that a client weighs in averages by samples, times the round's median number of samples.
        meters: observe every crossing, besides the ledger; see `cutlayer.core.meter.Meter`.
        devices: how fast each client is; with them every record has the simulated time. See `Devices`.
        augment: random changes of the training samples, an `Augment` or a `SampleTransform`; none by default.
        metrics: names, such as ["accuracy", "f1", "auc"] or ["mae", "rmse", "r2"], or a dict of functions of (outputs,
            targets) or of torchmetrics objects; for classes the accuracy by default. See `evaluate`.
        eval_every: evaluate after every so many rounds, and after the last.
        per_client: also evaluate the global model on each client's own training samples.
        until_converged: stop early, once five evaluations raise the test accuracy by less than 0.02 points.
        until_accuracy: stop early, once the test accuracy is this high.
        until_samples: stop early, once clients have processed so many samples in total.
        patience: stop early, after so many evaluations without a gain of the monitored metric.
        monitor: the metric whose best model is kept, such as "validation_loss". With patience it has a default: the
            accuracy, or else the loss, of the validation set, of the clients' own sets or of the test set.
        mode: "max" or "min", if the monitored metric is your own.
        min_delta: a gain is more than this.
        out: the folder of the run. Everything that the command line writes is written there: configuration, metrics,
            checkpoints, ledger and model; `cutlayer compare` reads it.
        name: of the run in comparisons; by default the last two folders of `out`, without one like `seed-3`.
        resume: continue the run in this folder as if it had never stopped; a folder without a run starts one. A run
            with other settings, data or initial weights is refused.
        overwrite: replace the run in this folder.
        checkpoint_every: rounds between checkpoints; the last round always leaves one.
        on_round: called with the record of each round. It may raise `StopTraining("why")` to end the training after
            this round. A resumed run asks it first about the last round in the folder, so that it can stay stopped.

    Returns:
        The state dict, the method's state, and the history: for each round a record with

        - `round`, from 1 on; `loss`, the mean of the round's batch losses; `stopped`, clients whose gradients were not
          finite and whose parts did not change from then on; `guarded`, clients whose updates the guard dropped, if
          there are any;
        - `samples`, processed so far, and `bytes`, crossed so far by direction and kind, such as `up_activations`; with
          codecs, `bytes_before_codecs` of the kinds that have one;
        - with devices, `simulated_seconds` until the end of the round and `client_flops` of all clients so far; of the
          round itself `training_seconds`, `aggregation_seconds` (transfers of models, if they take time) and the
          `straggler`, whose own work and transfers took the longest;
        - where evaluated, `test_loss`, `test_accuracy` and so on for each metric; `validation_...` alike;
          `federated_...` for the clients' own tests, weighted by their samples, with `..._std` and `..._worst` over the
          clients, and `client_tests`, the same by the clients' names; `clients`, that on their training samples.

        A number that is not finite is None.

    Raises:
        DivergedError: nobody can train any more, as no loss or gradient is finite. Its `result` is the result so far.
    """
    given = dict(locals())
    check(given)
    given = with_arrays(given)
    limits = Limits.of(SimpleNamespace(**given))
    trained_on, client_tests = _client_tests(given)

    def made(engine: str | Engine, inputs: Mapping[str, str]) -> Training:
        runner = Simulation(
            method,
            given["data"],
            trained_on,
            batching=batching,
            per_round=per_round,
            sampler=sampler,
            engine=engine,
            chunk=chunk,
            seed=seed,
            precision=precision,
            codecs=codecs,
            guard=guard,
            most_weight=most_weight,
            meters=tuple(meters),
            devices=devices,
            augment=augment,
        )
        return Training(
            runner=runner,
            name="" if out is None else f"{name or name_of(Path(out))}, seed {seed}",
            test=given["test"],
            validation=given["validation"],
            client_tests=client_tests,
            metrics=metrics,
            eval_every=eval_every,
            per_client=per_client,
            limits=limits,
            inputs=inputs,
        )

    tell = on_round or (lambda record: None)
    if out is None:
        training = made(engine, {})
        while not training.ended:
            training.tell(partial(tell, training.round()))
    else:
        training = _in_folder(given, made, tell)
    result = _result(training, None if out is None else Path(out))
    if training.diverged:
        raise DivergedError(training.diverged, result)
    return result


def _in_folder(
    given: Mapping[str, Any],
    made: Callable[[str | Engine, Mapping[str, str]], Training],
    tell: Callable[[Record], object],
) -> Training:
    """Train in the folder `out`."""
    inputs, engine = inputs_of(given), given["engine"]

    def begun(training: Training) -> None:
        if training.history:
            tell(training.history[-1])

    try:
        return execute(
            described(given),
            Folder(Path(given["out"])),
            resume=given["resume"],
            overwrite=given["overwrite"],
            make=lambda run: made(run.engine if isinstance(engine, str) else engine, inputs),
            on_start=begun,
            on_round=lambda _, record: tell(record),
        )
    except CheckpointError as error:
        message = str(error)
        for option, word in IN_PYTHON.items():
            message = message.replace(option, word)
        raise CheckpointError(message) from error.__cause__


def _result(training: Training, folder: Path | None) -> Result:
    best = training.best
    return Result(
        state_dict=training.state_dict(),
        history=training.history,
        state=training.state,
        engine=training.runner.engine_name,
        best=None if best is None else training.state_dict(best.model),
        best_round=None if best is None else best.round,
        ended=training.early_end or "" if training.state.round < training.limits.rounds else "",
        folder=folder,
    )


def _client_tests(given: Mapping[str, Any]) -> tuple[Partition, ClientTests | None]:
    """Return the samples that clients train on, and those that they test on."""
    fraction, partition, tests = given["hold_out"], given["partition"], given["test_partition"]
    if not fraction:
        return partition, None if tests is None else ClientTests(given["test"], tests)
    kept, held = divide(partition, fraction, keys.fold(given["seed"], "hold_out"))
    return kept, ClientTests(given["data"], held)
