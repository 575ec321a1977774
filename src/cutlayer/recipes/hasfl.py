"""The HASFL paper (Lin et al. 2025): its data sets, devices and five policies, Table I and the figures with results.

It prints numbers only in its text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from cutlayer.core.batches import Batching
from cutlayer.planning.policy import BASELINES
from cutlayer.recipes import published
from cutlayer.recipes.compose import drawn_by_torch, label, named, using
from cutlayer.recipes.recipe import OURS, Apart, Measure, Recipe, Statement, Sweep, experiment
from cutlayer.runs.config import Choice, Run

PARTITIONS: Mapping[str, Choice] = {"iid": Choice("iid"), "shards": Choice("shards", {"per_client": 2})}
INTERVAL = 15
BATCH = 16  # where it is fixed
CUT = 8  # where it is fixed: of the 16 layers of VGG-16
LEAST_BATCH = 8  # where it is planned: the networks of the paper's recipes have BatchNorm, which needs a few samples


def table1(**changes: Any) -> Choice:
    """The devices of Table I, with these figures changed."""
    return Choice("table1", changes)


def _run(data: str, model: Choice, cut: int) -> Run:
    return Run(
        data=data,
        clients=20,
        partition=PARTITIONS["iid"],
        model=model,
        cut=cut,
        optimiser=Choice("sgd", {"lr": 5e-4}),
        batching=Batching(size=BATCH),
        devices=table1(),
        rounds=1000,
        checkpoint_every=10,
    )


CIFAR10 = _run("cifar10", drawn_by_torch("vgg16", norm="batch", classifier=(512, 512)), CUT)
CIFAR100 = _run("cifar100", drawn_by_torch("resnet18"), 5)  # half of the ten: stem, eight blocks, head


def with_plan(run: Run, batches: str, cuts: str, **options: Any) -> Run:
    """The run with HASFL's training loop, and batch sizes and cuts by these rules."""
    given = {"interval": INTERVAL, "batches": batches, "cuts": cuts, "least_batch": LEAST_BATCH, **options}
    return using(run, "hasfl", **given)


def policies(run: Run, **options: Any) -> dict[str, Run]:
    """The run with each of the five policies."""
    return {label: with_plan(run, *rules, **options) for label, rules in BASELINES.items()}


def dealt(run: Run, partition: str) -> Run:
    return replace(run, partition=PARTITIONS[partition])


# An experiment of our own, for a small machine.

LR = 0.05
ROUNDS = 100  # at most
TARGET = 0.75  # test accuracy, with which a run ends

FASHION_MNIST = Run(
    data="fashion_mnist",
    clients=20,
    model=Choice("cnn", {"width": 16}),
    cut="conv1",
    optimiser=Choice("sgd", {"lr": LR}),
    batching=Batching(size=BATCH),
    rounds=ROUNDS,
    until_accuracy=TARGET,
    engine="loop",  # so that every machine takes the same one
    cpu_threads=1,
    checkpoint_every=5,
)
DEVICES = {
    "table1": table1(),
    "strong": table1(tflops=(0.1, 2.0), mbits_up=(10.0, 80.0)),
}


@experiment(OURS)
def hasfl_fashion_mnist(name: str) -> Recipe:
    """Fashion-MNIST, IID and two shards each: HASFL's five policies by simulated time, on two sets of devices."""
    panels = {
        f"{partition}-{devices}": policies(
            replace(FASHION_MNIST, partition=PARTITIONS[partition], devices=DEVICES[devices]),
            least_batch=1,
        )
        for partition, devices in product(PARTITIONS, DEVICES)
    }
    return Recipe(
        runs=named(name, panels),
        notes=(
            "The devices of table1 are those of the HASFL paper's Table I; those of strong are Table I's with 0.1 to 2 "
            "TFLOPS and 10 to 80 Mbit/s up. A network this small takes such devices no time to compute: links decide.",
            f"A round is {INTERVAL} mini-batches of every device, with cuts and batch sizes of its own. Plain SGD, one "
            "learning rate for all. A run ends when it reaches the target.",
        ),
        targets={f"{name}/{panel}": TARGET for panel in panels},
        race="time",
    )


# Table I, and the figures that show results.

BATCHES = (8, 16, 32, 64)  # Figure 2; the first three are those of Figure 10
CUTS = (4, 8, 12)  # Figures 3 and 11
NUMBERS = (10, 20, 30, 40)  # of devices, Figure 9
FACTORS = (0.25, 0.5, 2.0)  # Figures 7 and 8: of Table I's figures, which are run too
TABLE1: Mapping[str, float | tuple[float, float]] = {
    "tflops": (1.0, 2.0),
    "server_tflops": 20.0,
    "mbits_up": (75.0, 80.0),
    "mbits_servers": (360.0, 380.0),
}

SETTING = (
    "The paper gives neither the number of rounds (1000 here, a round being 15 mini-batches of every device) nor "
    "the target of its bound, memory limits, initial weights (torch's own) or augmentation (none); VGG-16 has batch "
    "normalisation and fully connected layers of 512 and 512.",
    "Plain SGD at 0.0005, as stated, is very slow. Try --set optimiser.momentum=0.9, and say so beside the numbers.",
    "Random batch sizes and cuts are drawn again in every round.",
    "The paper's five consecutive training rounds are five evaluations here, one every 15 mini-batches: after every "
    "mini-batch nearly every run would have converged at once.",
)
ON_VALUES = "The values that are swept are chosen here; the paper's text does not give them."


@experiment("HASFL, Table I")
def hasfl_table1(name: str) -> Recipe:
    """HASFL, Table I: its devices and hyper-parameters, with VGG-16 on IID CIFAR-10."""
    return Recipe(
        runs=named(name, {"cifar10-iid": {"hasfl": policies(CIFAR10)["hasfl"]}}),
        claims=("20 devices of 1 to 2 TFLOPS, 75 to 80 Mbit/s up, 360 to 380 Mbit/s down; a server of 20 TFLOPS.",),
        notes=SETTING,
        race="converged",
    )


@experiment("HASFL, Figure 2")
def hasfl_fig2(name: str) -> Recipe:
    """HASFL, Figure 2: the batch size, the same for all devices, at eight layers each."""
    runs = {f"b{size}": _fixed(_sized(CIFAR10, size)) for size in BATCHES}
    return Recipe(
        runs=named(name, {"cifar10-shards": _dealt(runs, "shards")}),
        claims=("Larger batches converge faster per epoch, and cost more latency per round.",),
        notes=(ON_VALUES, *SETTING),
        race="converged",
    )


@experiment("HASFL, Figure 3")
def hasfl_fig3(name: str) -> Recipe:
    """HASFL, Figure 3: the cut, the same for all devices, in batches of 16."""
    runs = {f"cut{cut}": _fixed(replace(CIFAR10, cut=cut)) for cut in CUTS}
    return Recipe(
        runs=named(name, {"cifar10-shards": _dealt(runs, "shards")}),
        claims=("A smaller cut is more accurate, and sends more.",),
        notes=(ON_VALUES, *SETTING),
        race="converged",
    )


@experiment("HASFL, Figure 5")
def hasfl_fig5(name: str) -> Recipe:
    """HASFL, Figure 5: five policies on CIFAR-10 and CIFAR-100, IID and two shards each."""
    return Recipe(
        runs=named(name, _everything()),
        claims=(
            "HASFL is best in speed and accuracy.",
            "HASFL, RBS+HAMS and RBS+RHAMS are much faster than HABS+RMS and RBS+RMS.",
            "Non-IID data converge more slowly than IID data.",
        ),
        notes=SETTING,
        race="converged",
    )


@experiment("HASFL, Figure 6")
def hasfl_fig6(name: str) -> Recipe:
    """HASFL, Figure 6: converged accuracy and time of the runs of Figure 5."""
    return Recipe(
        runs=named(name, _everything()),
        published=published.HASFL_FIG6.by_run(name),
        statements=tuple(_statements_of_fig6(name)),
        notes=(
            "The paper does not say for which partition it states RBS+RMS's time; it stands beside both.",
            "The sentence on the IID setting names the policy without optimised cuts twice; the second is read as the "
            "one without optimised batches.",
            *SETTING,
        ),
        race="converged",
        figure=(BARS,),
    )


def _everything() -> dict[str, dict[str, Run]]:
    data = {"cifar10": CIFAR10, "cifar100": CIFAR100}
    return {
        f"{name}-{partition}": policies(dealt(data[name], partition)) for name, partition in product(data, PARTITIONS)
    }


def _statements_of_fig6(name: str) -> Iterator[Statement]:
    """What is not said of a run and HASFL, and so has no place in the table."""
    for data, times, points in (("cifar10", 4.4, 0.7), ("cifar100", 7.0, 1.6)):
        panel, path = f"{name}/{data}-iid", f"fig6.iid.relation_to_no_BS_opt.{data}"
        yield _stated(
            "time", f"{path}.time_factor", f"RBS+HAMS is {times:g} times as fast", panel, "rbs_hams", ["habs_rms"]
        )
        yield _stated(
            "accuracy", f"{path}.acc", f"RBS+HAMS is {points:g} points better", panel, "rbs_hams", ["habs_rms"]
        )
    others = [policy for policy in BASELINES if policy != "hasfl"]
    for panel in (f"{name}/{panel}" for panel in _everything()):
        yield _stated("time", "conclusion", "HASFL is at least 4 times as fast", panel, "hasfl", others)
        yield _stated("accuracy", "conclusion", "HASFL is at least 1 point better", panel, "hasfl", others)


def _stated(measure: Measure, id_: str, says: str, panel: str, run: str, than: Sequence[str]) -> Statement:
    return Statement(
        id=id_,
        says=f"{says} {'as' if measure == 'time' else 'than'} {', '.join(than)}",
        run=f"{panel}/{run}",
        than=tuple(f"{panel}/{other}" for other in than),
        measure=measure,
    )


@experiment("HASFL, Figure 7")
def hasfl_fig7(name: str) -> Recipe:
    """HASFL, Figure 7: how fast the devices and the server compute."""
    return _by_resources(
        name,
        {"device": "tflops", "server": "server_tflops"},
        ("TFLOPS of a device, mean", "TFLOPS of the server"),
        "HASFL's converged time rises only marginally as computing resources shrink.",
    )


@experiment("HASFL, Figure 8")
def hasfl_fig8(name: str) -> Recipe:
    """HASFL, Figure 8: the rates of the uplinks, and between the servers."""
    return _by_resources(
        name,
        {"uplink": "mbits_up", "servers": "mbits_servers"},
        ("Mbit/s up, mean", "Mbit/s between servers, mean"),
        "HASFL's converged time rises only marginally as rates shrink.",
    )


def _by_resources(name: str, keys: Mapping[str, str], axes: Iterable[str], claim: str) -> Recipe:
    """Table I, and each of two figures of it made smaller and larger."""
    runs = policies(CIFAR10)
    for (word, key), factor in product(keys.items(), FACTORS):
        limits = TABLE1[key]
        value = tuple(factor * limit for limit in limits) if isinstance(limits, tuple) else factor * limits
        changed = policies(replace(CIFAR10, devices=table1(**{key: value})))
        runs |= {f"{policy}-{word}{factor:g}": run for policy, run in changed.items()}
    return Recipe(
        runs=named(name, {"cifar10-iid": runs}),
        claims=(claim, "HASFL converges faster than the others whatever the resources, and RBS+RMS suffers most."),
        notes=(f"{ON_VALUES} A run such as hasfl-{next(iter(keys))}0.5 has half of Table I's.", *SETTING),
        race="converged",
        against=_of_same_setting(name, "cifar10-iid", runs),
        figure=tuple(
            Sweep(label=axis, x=_setting_of_devices(key), series=_policy, log=True)
            for key, axis in zip(keys.values(), axes, strict=True)
        ),
    )


def _of_same_setting(name: str, panel: str, labels: Iterable[str]) -> dict[str, str]:
    """Each run's HASFL: hasfl-n10 of rbs_rms-n10."""
    settings = {word: word.partition("-")[1:] for word in labels}
    return {f"{name}/{panel}/{word}": f"{name}/{panel}/hasfl{''.join(setting)}" for word, setting in settings.items()}


def _setting_of_devices(key: str) -> Callable[[Run], float | str | Apart]:
    """Its place on the axis; Table I is in every sweep."""

    def place(run: Run) -> float | str | Apart:
        options = {} if run.devices is None else run.devices.options
        if options and key not in options:
            return Apart.ABSENT
        value = options.get(key, TABLE1[key])
        return sum(value) / len(value) if isinstance(value, tuple) else float(value)

    return place


def _policy(run: Run) -> str:
    return label(run).partition("-")[0]


@experiment("HASFL, Figure 9")
def hasfl_fig9(name: str) -> Recipe:
    """HASFL, Figure 9: the number of devices."""
    panels = {
        f"cifar10-{partition}": {
            f"{policy}-n{number}": run
            for number in NUMBERS
            for policy, run in policies(replace(dealt(CIFAR10, partition), clients=number)).items()
        }
        for partition in PARTITIONS
    }
    return Recipe(
        runs=named(name, panels),
        claims=("The gap between HASFL and the others grows with the number of devices.",),
        notes=(f"{ON_VALUES} Every device has two shards, however many devices there are.", *SETTING),
        race="converged",
        against={
            run: base for panel, runs in panels.items() for run, base in _of_same_setting(name, panel, runs).items()
        },
        figure=(Sweep(label="devices", x=lambda run: float(run.clients), series=_policy),),
    )


@experiment("HASFL, Figure 10")
def hasfl_fig10(name: str) -> Recipe:
    """HASFL, Figure 10: planned batch sizes against fixed ones, at eight layers each."""
    fixed = {f"b{size}": _fixed(_sized(CIFAR10, size)) for size in BATCHES[:3]}
    runs = {"habs": with_plan(CIFAR10, "planned", "fixed"), **fixed}
    statements: list[Statement] = []
    for partition, word, times, points in (("iid", "iid", 1.4, 0.9), ("shards", "noniid", 1.6, 1.0)):
        panel, path = f"{name}/cifar10-{partition}", f"fig10.claims_numeric.{word}"
        says = f"HABS is at least {points:.1f} points better"
        statements += [
            _stated("time", f"{path}.time_factor", f"HABS is {times:g} times as fast", panel, "habs", [*fixed]),
            _stated("accuracy", f"{path}.acc_gain_min", says, panel, "habs", [*fixed]),
        ]
    return Recipe(
        runs=named(name, {f"cifar10-{partition}": _dealt(runs, partition) for partition in PARTITIONS}),
        statements=tuple(statements),
        notes=SETTING,
        race="converged",
        figure=(BARS,),
    )


@experiment("HASFL, Figure 11")
def hasfl_fig11(name: str) -> Recipe:
    """HASFL, Figure 11: planned cuts against fixed ones, in batches of 16."""
    fixed = {f"cut{cut}": _fixed(replace(CIFAR10, cut=cut)) for cut in CUTS}
    runs = {"hams": with_plan(CIFAR10, "fixed", "planned"), **fixed}
    return Recipe(
        runs=named(name, {f"cifar10-{partition}": _dealt(runs, partition) for partition in PARTITIONS}),
        claims=("Time and accuracy degrade with deeper cuts, more so on non-IID data; HAMS beats all fixed cuts.",),
        notes=(ON_VALUES, *SETTING),
        race="converged",
        figure=(BARS,),
    )


BARS = Sweep(label="", x=label, series=label, bars=True)


def _fixed(run: Run) -> Run:
    return with_plan(run, "fixed", "fixed")


def _sized(run: Run, size: int) -> Run:
    return replace(run, batching=replace(run.batching, size=size))


def _dealt(runs: Mapping[str, Run], partition: str) -> dict[str, Run]:
    return {word: dealt(run, partition) for word, run in runs.items()}
