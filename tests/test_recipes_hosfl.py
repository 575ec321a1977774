"""Specifies the recipes of the HO-SFL paper: its settings, its numbers, and how long its runs are."""

from dataclasses import replace

import pytest
import torch

from cutlayer import recipes
from cutlayer.core.batches import Batching
from cutlayer.data.augment import Augment
from cutlayer.models import build
from cutlayer.recipes import hosfl
from cutlayer.recipes.recipe import Apart, Published
from cutlayer.recipes.scale import scaled
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run
from cutlayer.split import Split
from cutlayer.studies import traffic

NAMES = [name for name in recipes.RECIPES if name.startswith("hosfl_")]
BY_NAME = {run.name: run for name in NAMES for run in recipes.runs(name)}
ADAMW = {"betas": (0.9, 0.999), "weight_decay": 5e-4}
IID, DIR1 = Choice("iid"), Choice("dirichlet", {"alpha": 1.0, "min_size": 32})
FIVE = ("sfl_v1", "fsl_sage", "zo_sfl", "mu_splitfed", "hosfl")
THREE = ("splitlora", "zo_sfl", "hosfl")

IMAGES = Run(  # the paper's, but for what differs from method to method
    augment=Augment(crop=4, flip=True),
    clients=100,
    per_round=10,
    model=Choice("resnet18", {"stem": "imagenet"}),
    cut="layer2.1",
    weights="resnet18.safetensors",
    fresh=("fc",),
    freeze_norms=True,
    optimiser=Choice("adamw", {"lr": 1e-5, **ADAMW}),
    batching=Batching(size=32, drop_last=False),
    rounds=500,
    until_samples=160_000,
)
TEXTS = Run(
    clients=10,
    per_round=3,
    partition=IID,
    optimiser=Choice("adamw", {"lr": 1e-5, **ADAMW}),
    batching=Batching(size=32, drop_last=False),
    rounds=834,
    until_samples=80_000,
)
SAGE = {"server_interval": 5, "align_interval": 1, "auxiliary_units": 2, "align_epochs": 100}
SGD = {"optimiser": Choice("sgd", {"lr": 0.005}), "server_optimiser": Choice("sgd", {"lr": 0.01})}
BY_EPOCH = {"eval_every": 1, "checkpoint_every": 5}
BY_STEP = {"eval_every": 16, "checkpoint_every": 80}
METHODS = {
    "sfl_v1": {"method": Choice("sfl_v1"), **BY_EPOCH},
    "fsl_sage": {"method": Choice("fsl_sage", SAGE), **BY_EPOCH},
    "zo_sfl": {"method": Choice("zo_sfl", {"smoothing": 1e-3}), **BY_EPOCH},
    "mu_splitfed": {
        "method": Choice("mu_splitfed", {"server_steps": 2, "global_lr": 0.3, "smoothing": 1e-3}),
        **SGD,
        **BY_STEP,
    },
    "hosfl": {"method": Choice("hosfl", {"perturbations": 5, "smoothing": 1e-3}), **BY_STEP},
}
LANGUAGE = {
    "splitlora": Choice("splitlora", {"mode": "per_client"}),
    "zo_sfl": Choice("zo_sfl", {"smoothing": 1e-3}),
    "hosfl": Choice("hosfl", {"perturbations": 2, "smoothing": 1e-3}),
}
PANELS = {
    "cifar10-iid": ("cifar10", IID),
    "cifar10-dir1": ("cifar10", DIR1),
    "cifar100-iid": ("cifar100", IID),
    "cifar100-dir1": ("cifar100", DIR1),
}


def lora(path: str, **more: str | int) -> Choice:
    return Choice("causal_lm", {"path": path, "rank": 8, "alpha": 16.0, "targets": ("q_proj", "v_proj"), **more})


# -- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hosfl_table2", "hosfl_fig3", "hosfl_fig6"])
def test_vision_runs_are_the_papers(name: str) -> None:
    data = {"hosfl_fig3": "cifar10-", "hosfl_fig6": "cifar100-"}.get(name, "cifar")
    here = [panel for panel in PANELS if panel.startswith(data)]
    assert [run.name for run in recipes.runs(name)] == [f"{name}/{panel}/{word}" for panel in here for word in FIVE]
    for panel in here:
        data, partition = PANELS[panel]
        for word, changes in METHODS.items():
            run = f"{name}/{panel}/{word}"
            assert BY_NAME[run] == replace(IMAGES, name=run, data=data, partition=partition, **changes)


@pytest.mark.parametrize(
    ("word", "model", "cut"),
    [
        ("opt", lora("facebook/opt-125m"), "layer3"),
        ("gemma", lora("google/gemma-3-270m"), "layer5"),
        ("llama", lora("meta-llama/Llama-3.2-1B", dtype="bfloat16"), "layer5"),
    ],
)
def test_language_runs_are_the_papers(word: str, model: Choice, cut: str) -> None:
    """Measured about every 4,000 samples: 42 steps of three clients, or epochs of three tenths of the data."""
    for task, epochs in (("sst2", 1), ("wsc", 24), ("rte", 5)):
        for method, choice in LANGUAGE.items():
            run, every = f"hosfl_table1/{word}-{task}/{method}", 42 if method == "hosfl" else epochs
            often = {"eval_every": every, "checkpoint_every": 5 * every}
            assert BY_NAME[run] == replace(TEXTS, name=run, data=task, model=model, cut=cut, method=choice, **often)


def test_the_client_of_the_paper_has_683_072_parameters_and_2048_values_at_the_cut() -> None:
    split = Split(build("resnet18", stem="imagenet"), IMAGES.cut)
    z = split.lower(split.initial()[0], torch.zeros(1, 3, 32, 32), None)[0]
    assert sum(p.numel() for p in split.initial()[0].params.values()) == 683_072
    assert z.numel() == 2048
    ours = Split(build("mobilenet_v2", stem="3x3"), BY_NAME["hosfl_cifar10/cifar10-iid/hosfl"].cut)
    assert ours.lower(ours.initial()[0], torch.zeros(1, 3, 32, 32), None)[0].numel() == 2048


def test_runs_of_the_depth_differ_in_the_cut_only() -> None:
    first, *rest = recipes.runs("hosfl_fig7")
    assert first == replace(BY_NAME["hosfl_table1/llama-sst2/hosfl"], name="hosfl_fig7/llama-sst2/cut2", cut="layer2")
    assert rest == [replace(first, name=f"hosfl_fig7/llama-sst2/cut{n}", cut=f"layer{n}") for n in (4, 6, 8)]


def test_perturbations_and_smoothing_each_have_a_sweep() -> None:
    recipe = hosfl.hosfl_fig8()
    by_number, by_distance = recipe.figure
    assert [by_number.x(run) for run in recipe.runs] == [1, 2, 5, 10, 20, 50, *[Apart.ABSENT] * 3]
    away = [Apart.ABSENT] * 3
    assert [by_distance.x(run) for run in recipe.runs] == [*away, 1e-4, *away[:2], 1e-5, 1e-3, 1e-2]
    assert {by_number.series(run) for run in recipe.runs} == {"hosfl"}
    paper = BY_NAME["hosfl_table2/cifar10-iid/hosfl"]
    for run in recipe.runs:
        assert run == replace(paper, name=run.name, method=run.method)
        options = run.method.options
        assert run.name.endswith(f"/p{options['perturbations']}-mu{options['smoothing']:.0e}")


def test_runs_of_table_3_are_as_long_as_the_papers_and_need_no_weights() -> None:
    for name in ("hosfl_table3", "hosfl_fig4"):
        runs = {run.name.rpartition("/")[2]: run for run in recipes.runs(name)}
        lengths = {word: run.rounds for word, run in runs.items()}
        assert lengths == {"sfl_v1": 33, "fsl_sage": 33, "zo_sfl": 33, "mu_splitfed": 500, "hosfl": 500}
        for word, run in runs.items():
            assert (run.weights, run.until_samples, run.eval_every) == (None, None, run.rounds)
            assert run.model == Choice(IMAGES.model.name, {"init": "torch", **IMAGES.model.options})
            assert (run.cut, run.batching) == (IMAGES.cut, IMAGES.batching)
            assert run.method.name == word
            assert run.optimiser == (Choice("sgd", {"lr": 1e-9}) if word == "mu_splitfed" else IMAGES.optimiser)
        assert runs["fsl_sage"].method.options == {**SAGE, "align_epochs": 1}


def test_what_we_run_ourselves_is_the_papers_setting_with_a_smaller_model() -> None:
    runs = recipes.runs("hosfl_cifar10")
    assert [run.name for run in runs] == [f"hosfl_cifar10/cifar10-{p}/{word}" for p in ("iid", "dir1") for word in FIVE]
    rates = set()
    for run in runs:
        paper = BY_NAME[run.name.replace("hosfl_cifar10", "hosfl_table2")]
        smaller = {"weights": "mobilenet_v2.safetensors", "fresh": ("classifier",), "cut": "block6", "engine": "loop"}
        often = {"eval_every": run.eval_every, "checkpoint_every": run.checkpoint_every}
        shorter = {"rounds": 310, "until_samples": 310 * 10 * 32}
        others = {"optimiser": run.optimiser, "method": run.method, "model": Choice("mobilenet_v2", {"stem": "3x3"})}
        assert run == replace(paper, name=run.name, **smaller, **often, **shorter, **others)
        assert run.eval_every == (62 if run.method.name in ("mu_splitfed", "hosfl") else 4)  # of 20,000 samples
        assert run.method.name == paper.method.name
        if run.method.name == "mu_splitfed":
            assert run.optimiser == paper.optimiser
        else:
            rates.add(run.optimiser.options["lr"])
            assert run.optimiser == Choice("adamw", {**ADAMW, "lr": run.optimiser.options["lr"]})
    assert len(rates) == 1
    sst2 = recipes.runs("hosfl_sst2")
    assert [run.name for run in sst2] == [f"hosfl_sst2/stories15m/{word}" for word in THREE]
    assert len({run.optimiser.options["lr"] for run in sst2}) == 1
    for run in sst2:
        paper = BY_NAME[f"hosfl_table1/opt-sst2/{run.method.name}"]
        smaller = {
            "model": lora("stories15m", max_length=hosfl.MAX_LENGTH),
            "engine": "loop",
            "optimiser": run.optimiser,
        }
        assert run == replace(paper, name=run.name, **smaller)


# -- length ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [run for run in BY_NAME.values() if run.until_samples], ids=lambda run: run.name)
def test_rounds_are_enough_for_the_samples_and_no_more_than_one_step_a_round_needs(run: Run) -> None:
    of_a_round = (run.per_round or run.clients) * run.batching.size
    assert (run.rounds - 1) * of_a_round < run.until_samples <= run.rounds * of_a_round


@pytest.mark.parametrize("factor", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("hosfl_table3", "hosfl_fig4")])
def test_scaled_runs_of_a_recipe_process_as_many_samples_as_each_other(name: str, factor: float) -> None:
    small = [scaled(run, factor) for run in recipes.runs(name)]
    (samples,) = {run.until_samples for run in small}
    one = small[0]
    of_a_round = one.per_round * one.batching.size
    assert one.rounds * of_a_round == pytest.approx(samples, abs=of_a_round)
    assert all(run.eval_every <= run.rounds for run in small)


# -- the paper's numbers -----------------------------------------------------------------------------


def test_numbers_of_tables_1_and_2() -> None:
    table1, table2 = hosfl.hosfl_table1().published, hosfl.hosfl_table2().published
    assert table1["hosfl_table1/llama-sst2/hosfl"] == Published(accuracy=93.9)  # the text says 93.2
    assert table1["hosfl_table1/gemma-rte/hosfl"] == Published(accuracy=65.0)
    assert table1["hosfl_table1/opt-wsc/splitlora"] == Published(accuracy=64.4)
    assert {p.accuracy for run, p in table1.items() if run.endswith("-wsc/zo_sfl")} == {round(100 * 38 / 104, 1)}
    assert table2["hosfl_table2/cifar10-dir1/fsl_sage"] == Published(accuracy=37.9, std=2.9)
    assert table2["hosfl_table2/cifar100-iid/hosfl"] == Published(accuracy=44.2, std=0.3)
    cells = [p.accuracy for p in table1.values()]
    assert (len(cells), round(sum(cells), 1)) == (27, 1732.3)
    assert [round(sum(p.accuracy for run, p in table2.items() if run.endswith(word)), 1) for word in FIVE] == [
        229.5,
        112.3,
        26.5,
        30.2,
        231.3,
    ]


def test_what_the_text_says_of_the_tables() -> None:
    table1 = {run.partition("/")[2]: p.accuracy for run, p in hosfl.hosfl_table1().published.items()}
    table2 = {run.partition("/")[2]: p.accuracy for run, p in hosfl.hosfl_table2().published.items()}
    assert table1["llama-rte/hosfl"] > table1["llama-rte/splitlora"]
    assert 0 < table2["cifar10-iid/sfl_v1"] - table2["cifar10-iid/hosfl"] < 3
    for panel in ("cifar10-dir1", "cifar100-iid", "cifar100-dir1"):
        assert max(table2[f"{panel}/{word}"] for word in FIVE) == table2[f"{panel}/hosfl"]


def test_traffic_of_table_3_adds_up_to_the_totals_of_the_text() -> None:
    recipe = hosfl.hosfl_table3()
    totals = {run.rpartition("/")[2]: sum(map(float, cells)) for run, cells in recipe.traffic.items()}
    for word, total in {"hosfl": 2.44, "sfl_v1": 4.20, "zo_sfl": 4.20, "fsl_sage": 3.71}.items():
        assert totals[word] == pytest.approx(total, abs=0.005)
    up, down = recipe.traffic["hosfl_table3/cifar10-iid/mu_splitfed"][1::3]
    assert (up, down) == ("12.97", "12.97")
    assert all(len(cells) == len(traffic.PAPER_ROWS) for cells in recipe.traffic.values())


def test_figure_7_has_the_two_numbers_of_the_text() -> None:
    assert hosfl.hosfl_fig7().published == {
        "hosfl_fig7/llama-sst2/cut2": Published(accuracy=94.5),
        "hosfl_fig7/llama-sst2/cut8": Published(accuracy=93.0),
    }


@pytest.mark.parametrize("name", NAMES)
def test_curves_are_drawn_against_processed_samples(name: str) -> None:
    recipe = recipes.recipe(name)
    assert (recipe.axis, recipe.race) == ("samples", "rounds")
    assert len(recipe.notes) >= 3
    assert all(config.as_dict(run)["batching"]["drop_last"] is False for run in recipe.runs)
