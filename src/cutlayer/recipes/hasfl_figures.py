"""Table I and the figures of the HASFL paper that show results; it prints numbers only in its text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from cutlayer.config import Run
from cutlayer.planning.policy import BASELINES
from cutlayer.recipes import published
from cutlayer.recipes.compose import label, named
from cutlayer.recipes.hasfl import CIFAR10, CIFAR100, PARTITIONS, dealt, policies, table1, with_plan
from cutlayer.recipes.recipe import Apart, Measure, Recipe, Statement, Sweep

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
)
ON_CONVERGED = (
    "The paper's five consecutive training rounds are five evaluations here, one every 15 mini-batches: after every "
    "mini-batch nearly every run would have converged at once."
)
ON_VALUES = "The values that are swept are chosen here; the paper's text does not give them."


def hasfl_table1() -> Recipe:
    """HASFL, Table I: its devices and hyper-parameters, with VGG-16 on IID CIFAR-10."""
    name = "hasfl_table1"
    return Recipe(
        runs=named(name, {"cifar10-iid": {"hasfl": policies(CIFAR10)["hasfl"]}}),
        source="HASFL, Table I",
        claims=("20 devices of 1 to 2 TFLOPS, 75 to 80 Mbit/s up, 360 to 380 Mbit/s down; a server of 20 TFLOPS.",),
        notes=(*SETTING, ON_CONVERGED),
        race="converged",
    )


def hasfl_fig2() -> Recipe:
    """HASFL, Figure 2: the batch size, the same for all devices, at eight layers each."""
    name = "hasfl_fig2"
    runs = {f"b{size}": _fixed(_sized(CIFAR10, size)) for size in BATCHES}
    return Recipe(
        runs=named(name, {"cifar10-shards": _dealt(runs, "shards")}),
        source="HASFL, Figure 2",
        claims=("Larger batches converge faster per epoch, and cost more latency per round.",),
        notes=(ON_VALUES, *SETTING, ON_CONVERGED),
        race="converged",
    )


def hasfl_fig3() -> Recipe:
    """HASFL, Figure 3: the cut, the same for all devices, in batches of 16."""
    name = "hasfl_fig3"
    runs = {f"cut{cut}": _fixed(replace(CIFAR10, cut=cut)) for cut in CUTS}
    return Recipe(
        runs=named(name, {"cifar10-shards": _dealt(runs, "shards")}),
        source="HASFL, Figure 3",
        claims=("A smaller cut is more accurate, and sends more.",),
        notes=(ON_VALUES, *SETTING, ON_CONVERGED),
        race="converged",
    )


def hasfl_fig5() -> Recipe:
    """HASFL, Figure 5: five policies on CIFAR-10 and CIFAR-100, IID and two shards each."""
    name = "hasfl_fig5"
    return Recipe(
        runs=named(name, _everything()),
        source="HASFL, Figure 5",
        claims=(
            "HASFL is best in speed and accuracy.",
            "HASFL, RBS+HAMS and RBS+RHAMS are much faster than HABS+RMS and RBS+RMS.",
            "Non-IID data converge more slowly than IID data.",
        ),
        notes=(*SETTING, ON_CONVERGED),
        race="converged",
    )


def hasfl_fig6() -> Recipe:
    """HASFL, Figure 6: converged accuracy and time of the runs of Figure 5."""
    name = "hasfl_fig6"
    return Recipe(
        runs=named(name, _everything()),
        source="HASFL, Figure 6",
        published=published.HASFL_FIG6.by_run(name),
        statements=tuple(_statements_of_fig6(name)),
        notes=(
            "The paper does not say for which partition it states RBS+RMS's time; it stands beside both.",
            "The sentence on the IID setting names the policy without optimised cuts twice; the second is read as the "
            "one without optimised batches.",
            *SETTING,
            ON_CONVERGED,
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
        yield _faster(f"{path}.time_factor", f"RBS+HAMS is {times:g} times as fast", panel, "rbs_hams", ["habs_rms"])
        yield _better(f"{path}.acc", f"RBS+HAMS is {points:g} points better", panel, "rbs_hams", ["habs_rms"])
    others = [policy for policy in BASELINES if policy != "hasfl"]
    for panel in (f"{name}/{panel}" for panel in _everything()):
        yield _faster("conclusion", "HASFL is at least 4 times as fast", panel, "hasfl", others)
        yield _better("conclusion", "HASFL is at least 1 point better", panel, "hasfl", others)


def _faster(id_: str, says: str, panel: str, run: str, than: Sequence[str]) -> Statement:
    return _statement(id_, says, panel, run, than, "time")


def _better(id_: str, says: str, panel: str, run: str, than: Sequence[str]) -> Statement:
    return _statement(id_, says, panel, run, than, "accuracy")


def _statement(id_: str, says: str, panel: str, run: str, than: Sequence[str], measure: Measure) -> Statement:
    return Statement(
        id=id_,
        says=f"{says} {'as' if measure == 'time' else 'than'} {', '.join(than)}",
        run=f"{panel}/{run}",
        than=tuple(f"{panel}/{other}" for other in than),
        measure=measure,
    )


def hasfl_fig7() -> Recipe:
    """HASFL, Figure 7: how fast the devices and the server compute."""
    return _by_resources(
        "hasfl_fig7",
        {"device": "tflops", "server": "server_tflops"},
        ("TFLOPS of a device, mean", "TFLOPS of the server"),
        "HASFL's converged time rises only marginally as computing resources shrink.",
    )


def hasfl_fig8() -> Recipe:
    """HASFL, Figure 8: the rates of the uplinks, and between the servers."""
    return _by_resources(
        "hasfl_fig8",
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
        source=f"HASFL, Figure {name[-1]}",
        claims=(claim, "HASFL converges faster than the others whatever the resources, and RBS+RMS suffers most."),
        notes=(f"{ON_VALUES} A run such as hasfl-{next(iter(keys))}0.5 has half of Table I's.", *SETTING, ON_CONVERGED),
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


def hasfl_fig9() -> Recipe:
    """HASFL, Figure 9: the number of devices."""
    name = "hasfl_fig9"
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
        source="HASFL, Figure 9",
        claims=("The gap between HASFL and the others grows with the number of devices.",),
        notes=(f"{ON_VALUES} Every device has two shards, however many devices there are.", *SETTING, ON_CONVERGED),
        race="converged",
        against={
            run: base for panel, runs in panels.items() for run, base in _of_same_setting(name, panel, runs).items()
        },
        figure=(Sweep(label="devices", x=lambda run: float(run.clients), series=_policy),),
    )


def hasfl_fig10() -> Recipe:
    """HASFL, Figure 10: planned batch sizes against fixed ones, at eight layers each."""
    name = "hasfl_fig10"
    fixed = {f"b{size}": _fixed(_sized(CIFAR10, size)) for size in BATCHES[:3]}
    runs = {"habs": with_plan(CIFAR10, "planned", "fixed"), **fixed}
    statements: list[Statement] = []
    for partition, word, times, points in (("iid", "iid", 1.4, 0.9), ("shards", "noniid", 1.6, 1.0)):
        panel, path = f"{name}/cifar10-{partition}", f"fig10.claims_numeric.{word}"
        says = f"HABS is at least {points:.1f} points better"
        statements += [
            _faster(f"{path}.time_factor", f"HABS is {times:g} times as fast", panel, "habs", [*fixed]),
            _better(f"{path}.acc_gain_min", says, panel, "habs", [*fixed]),
        ]
    return Recipe(
        runs=named(name, {f"cifar10-{partition}": _dealt(runs, partition) for partition in PARTITIONS}),
        source="HASFL, Figure 10",
        statements=tuple(statements),
        notes=(*SETTING, ON_CONVERGED),
        race="converged",
        figure=(BARS,),
    )


def hasfl_fig11() -> Recipe:
    """HASFL, Figure 11: planned cuts against fixed ones, in batches of 16."""
    name = "hasfl_fig11"
    fixed = {f"cut{cut}": _fixed(replace(CIFAR10, cut=cut)) for cut in CUTS}
    runs = {"hams": with_plan(CIFAR10, "fixed", "planned"), **fixed}
    return Recipe(
        runs=named(name, {f"cifar10-{partition}": _dealt(runs, partition) for partition in PARTITIONS}),
        source="HASFL, Figure 11",
        claims=("Time and accuracy degrade with deeper cuts, more so on non-IID data; HAMS beats all fixed cuts.",),
        notes=(ON_VALUES, *SETTING, ON_CONVERGED),
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
