"""Specifies the recipes: each is the product of its pieces and has its paper's settings and numbers."""

import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest

from cutlayer import recipes
from cutlayer.core.batches import Batching
from cutlayer.errors import ConfigError
from cutlayer.models import default_init
from cutlayer.recipes import cut_layer, hasfl, published, smofi
from cutlayer.recipes.recipe import Apart, Published
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run

SIZES = {  # panels and runs
    "smofi_table1": (3, 45),
    "smofi_table2": (3, 18),
    "smofi_table3": (6, 30),
    "smofi_table4": (3, 15),
    "smofi_table5": (2, 10),
    "smofi_fig1": (2, 4),
    "smofi_fig3": (1, 13),
    "smofi_fig4": (4, 20),
    "smofi_fig5": (7, 35),
    "smofi_fig9": (2, 22),
    "smofi_fig10": (3, 30),
    "smofi_fig11": (3, 12),
    "cut_table3_as_paper": (3, 30),
    "cut_table3_as_run": (3, 29),
    "cut_table4_as_paper": (4, 40),
    "cut_table4_as_run": (4, 38),
    "smofi_fashion_mnist": (1, 9),
    "hasfl_fashion_mnist": (4, 20),
    "hasfl_table1": (1, 1),
    "hasfl_fig2": (1, 4),
    "hasfl_fig3": (1, 3),
    "hasfl_fig5": (4, 20),
    "hasfl_fig6": (4, 20),
    "hasfl_fig7": (1, 35),
    "hasfl_fig8": (1, 35),
    "hasfl_fig9": (2, 40),
    "hasfl_fig10": (2, 8),
    "hasfl_fig11": (2, 8),
    "hosfl_cifar10": (2, 10),
    "hosfl_sst2": (1, 3),
    "hosfl_table1": (9, 27),
    "hosfl_table2": (4, 20),
    "hosfl_table3": (1, 5),
    "hosfl_fig3": (2, 10),
    "hosfl_fig4": (1, 5),
    "hosfl_fig6": (2, 10),
    "hosfl_fig7": (1, 4),
    "hosfl_fig8": (1, 9),
}
EXTRA = {  # runs without a number in a table that has numbers
    "smofi_table2": {"fedavg"},
    "cut_table3_as_paper": {"sfl_v1-sgd-cut1"},
    "cut_table4_as_paper": {"sfl_v1-sgd-cut1"},
    "hasfl_fig6": {"hasfl", "rbs_hams", "rbs_rhams"},
    "hosfl_fig7": {"cut4", "cut6"},
}
OURS = ("smofi_fashion_mnist", "hasfl_fashion_mnist", "hosfl_cifar10", "hosfl_sst2")  # after no paper's table
FIRST = ("digits", "fashion_mnist", "cifar10")  # the basic methods side by side, after no paper
PAPERS = {name: recipes.RECIPES[name] for name in SIZES}
BY_NAME = {run.name: run for recipe in PAPERS.values() for run in recipe().runs}
PLUG_INS = ("fedavg", "fedavgm", "slowmo", "fednag", "smofi")

each_recipe = pytest.mark.parametrize("name", PAPERS)


def label(run_name: str) -> str:
    return PurePosixPath(run_name).name


def options(run: Run) -> dict[str, Any]:
    return run.optimiser.options


# -- structure ---------------------------------------------------------------------------------------


def test_every_recipe_is_specified() -> None:
    assert {*FIRST, *SIZES} == {*recipes.RECIPES}


@pytest.mark.parametrize("name", FIRST)
def test_first_experiments_differ_in_the_method_only(name: str) -> None:
    runs = recipes.runs(name)
    assert [run.name for run in runs] == [f"{name}/{m}" for m in ("fedavg", "sl", "sfl_v1", "sfl_v2", "mergesfl")]
    assert all(run == replace(runs[0], name=run.name, method=Choice(label(run.name))) for run in runs)


@each_recipe
def test_names_and_numbers_of_runs(name: str) -> None:
    recipe = PAPERS[name]()
    assert PAPERS[name].__doc__ and "\n" not in PAPERS[name].__doc__
    names = [run.name for run in recipe.runs]
    panels = {run_name.rpartition("/")[0] for run_name in names}
    assert (len(panels), len(names), len(set(names))) == (*SIZES[name], SIZES[name][1])
    assert all(panel.startswith(name) for panel in panels)
    assert recipe.source
    same = Counter(config.dumps(replace(run, name="one")) for run in recipe.runs)
    assert max(same.values()) == 1, "two runs of one recipe are the same"


@each_recipe
def test_every_run_is_what_its_file_says(name: str) -> None:
    for run in PAPERS[name]().runs:
        assert config.changed(Run(), tomllib.loads(config.dumps(run)), "a file") == run


@each_recipe
def test_papers_that_name_no_initial_weights_have_those_of_torch(name: str) -> None:
    drawn = [run for run in PAPERS[name]().runs if run.weights is None and default_init(run.model.name)]
    assert {run.model.options["init"] for run in drawn} <= {"torch"}


@pytest.mark.parametrize("name", FIRST)
def test_recipes_of_our_own_have_the_librarys_initial_weights(name: str) -> None:
    for run in recipes.runs(name):
        assert run.model.options.get("init") == ("he" if default_init(run.model.name) else None)


@each_recipe
def test_every_number_has_its_run_and_every_run_its_number(name: str) -> None:
    recipe = PAPERS[name]()
    runs = {run.name for run in recipe.runs}
    assert set(recipe.published) <= runs
    assert set(recipe.traffic) in (set(), runs)
    assert set(recipe.against) | set(recipe.against.values()) <= runs
    assert {run for s in recipe.statements for run in (s.run, *s.than)} <= runs
    if recipe.published:
        unprinted = {label(run) for run in runs - set(recipe.published)}
        beyond = {"fedavg-sgd"} if "as_run" in name else set()
        assert unprinted <= EXTRA.get(name, set()) | beyond
    else:
        assert recipe.of_paper == (name not in OURS)


@each_recipe
def test_a_panel_has_one_plain_fedavg_unless_its_target_is_given(name: str) -> None:
    recipe = PAPERS[name]()
    panels = {run.name.rpartition("/")[0] for run in recipe.runs}
    assert set(recipe.targets) <= panels
    for panel in panels - set(recipe.targets) if recipe.race == recipe.axis == "rounds" else ():
        assert BY_NAME[f"{panel}/fedavg"].method.name == "fedavg"
        if "as_run" not in name:
            assert BY_NAME[f"{panel}/fedavg"].method.options == {}


def test_table_1_is_the_product_of_bases_and_plug_ins() -> None:
    recipe = smofi.smofi_table1()
    for data, setup in smofi.IMAGES.items():
        for base, of in smofi.BASES.items():
            for plug_in, plugged in smofi.plug_ins(setup).items():
                run = BY_NAME[f"smofi_table1/{data}/{smofi.grid_label(base, plug_in)}"]
                assert (run.method, run.batching) == (plugged.method, plugged.batching)
                nesterov = {"nesterov": True} if plug_in == "fednag" else {}
                assert options(run) == {**options(plugged), **of(setup), **nesterov}
    assert [label(run.name) for run in recipe.runs[:15]] == [
        *PLUG_INS,
        *("fedprox", "fedprox+fedavgm", "fedprox+slowmo", "fedprox+fednag", "fedprox+smofi"),
        *("fednar", "fednar+fedavgm", "fednar+slowmo", "fednar+fednag", "fednar+smofi"),
    ]


def test_speed_ups_of_table_1_are_against_the_family_s_base() -> None:
    against = smofi.smofi_table1().against
    assert len(against) == 45
    assert against["smofi_table1/tiny/fedprox+smofi"] == "smofi_table1/tiny/fedprox"
    assert against["smofi_table1/tiny/fednar"] == "smofi_table1/tiny/fednar"
    assert all(against[f"smofi_table1/tiny/{plug_in}"] == "smofi_table1/tiny/fedavg" for plug_in in PLUG_INS)


# -- the papers' settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "data", "clients", "per_round", "rounds", "batch", "lr", "decay"),
    [
        ("smofi_table1/cifar10/fedavg", "cifar10", 100, 20, 1000, 32, 0.05, 5e-4),
        ("smofi_table1/cifar100/fedavg", "cifar100", 100, 20, 600, 32, 0.05, 5e-4),
        ("smofi_table1/tiny/fedavg", "tiny_imagenet", 200, 40, 400, 64, 0.05, 1e-3),
        ("smofi_table4/tiny-j30/fedavg", "tiny_imagenet", 200, 30, 400, 64, 0.05, 1e-3),
        ("smofi_table5/shakespeare/fedavg", "shakespeare", 100, 20, 300, 100, 0.01, 5e-4),
        ("smofi_table5/google_speech/fedavg", "speech_commands", 200, 20, 300, 32, 0.01, 5e-4),
        ("smofi_fig5/vgg16/fedavg", "tiny_imagenet", 200, 40, 150, 64, 0.01, 5e-4),
        ("smofi_fig5/resnet18/fedavg", "tiny_imagenet", 200, 40, 150, 64, 0.05, 5e-4),
        ("smofi_fig5/densenet169/fedavg", "tiny_imagenet", 200, 40, 150, 64, 0.05, 1e-3),
    ],
)
def test_settings_of_smofi(
    run: str, data: str, clients: int, per_round: int, rounds: int, batch: int, lr: float, decay: float
) -> None:
    found = BY_NAME[run]
    assert (found.data, found.clients, found.per_round, found.rounds) == (data, clients, per_round, rounds)
    epochs = 1 if data == "speech_commands" else 5
    assert found.batching == Batching(size=batch, epochs=epochs)
    assert found.optimiser == Choice(
        "sgd",
        {"lr": {"schedule": "exponential", "lr": lr, "decay": 0.998}, "momentum": 0.9, "weight_decay": decay},
    )
    assert found.augment is None


@pytest.mark.parametrize(
    ("panel", "mu", "fedavgm", "slowmo", "beta", "steps"),
    [
        ("smofi_table1/cifar10", 0.01, 0.3, (0.5, 0.4), 0.3, 75),
        ("smofi_table1/cifar100", 0.01, 0.5, (1.0, 0.6), 0.5, 75),
        ("smofi_table1/tiny", 0.1, 0.5, (1.0, 0.6), 0.5, 40),
        ("smofi_table5/shakespeare", None, 0.7, (1.0, 0.6), 0.5, 115),
        ("smofi_table5/google_speech", None, 0.5, (1.0, 0.6), 0.5, 15),
    ],
)
def test_choices_of_the_momentum_methods(
    panel: str, mu: float | None, fedavgm: float, slowmo: tuple[float, float], beta: float, steps: int
) -> None:
    runs = {name: BY_NAME[f"{panel}/{name}"] for name in PLUG_INS}
    assert runs["fedavgm"].method == Choice("fedavgm", {"beta": fedavgm})
    assert runs["slowmo"].method == Choice("slowmo", {"alpha": slowmo[0], "beta": slowmo[1]})
    assert runs["fednag"].method == Choice("fednag")
    assert runs["smofi"].method == Choice("smofi", {"alpha": -0.1, "beta": beta})
    assert options(runs["fednag"])["nesterov"] is True
    assert [runs[name].batching.steps for name in PLUG_INS] == [None, None, steps, steps, None]
    if mu is not None:
        assert options(BY_NAME[f"{panel}/fedprox+smofi"])["proximal"] == mu
        nar = options(BY_NAME[f"{panel}/fednar"])
        assert (nar["clip"], nar["clip_scope"], nar["clip_decay"]) == (10.0, "joint", True)


def test_cuts_of_smofi() -> None:
    assert BY_NAME["smofi_table1/cifar10/smofi"].cut == "layer1.1"
    assert BY_NAME["smofi_fig3/cifar10/smofi-cut0"].cut == 1
    assert BY_NAME["smofi_fig3/cifar10/smofi-cut8"].cut == 9
    assert BY_NAME["smofi_fig9/tiny/smofi-cut14-16"].method.options["random_cut"] == (15, 17)
    cuts = {label(run.name.rpartition("/")[0]): run.cut for run in smofi.smofi_fig5().runs}
    assert cuts == {
        "vgg11": "conv2_1",
        "vgg16": "conv2_2",
        "mobilenet_v2": "block4",
        "resnet18": "layer1.1",
        "resnet34": "layer1.1",
        "densenet121": "transition1",
        "densenet169": "transition1",
    }


def test_partitions_of_smofi() -> None:
    def partition(panel: str) -> Choice:
        return BY_NAME[f"{panel}/fedavg"].partition

    assert partition("smofi_table1/cifar10") == Choice("dirichlet", {"alpha": 0.2, "min_size": 32})
    assert partition("smofi_table3/tiny-dir05") == Choice("dirichlet", {"alpha": 0.5, "min_size": 64})
    assert partition("smofi_table3/cifar100-iid") == Choice("iid")
    assert partition("smofi_table5/shakespeare") == Choice("natural", {"min_size": 1000})


def test_table_2_tells_the_time() -> None:
    runs = {label(run.name): run for run in smofi.smofi_table2().runs[:6]}
    assert list(runs) == ["fedavg", "sfl_v1-step", "sfl_v1-epoch", "sfl_v2", "mergesfl", "smofi"]
    assert all(run.devices == Choice("pool", {"kappa": 100}) for run in runs.values())
    assert runs["mergesfl"].method == Choice("mergesfl", {"regulate": True})
    assert runs["mergesfl"].batching.steps == 75
    assert runs["sfl_v1-step"].method.options == {"sync": "step"}


def test_figures_of_smofi() -> None:
    assert smofi.smofi_fig5().share == 1.0
    recipe = smofi.smofi_fig10()
    assert recipe.targets == {
        "smofi_fig10/cifar10": 0.70,
        "smofi_fig10/cifar100": 0.43,
        "smofi_fig10/tiny": 0.30,
    }
    (sweep,) = recipe.figure
    swept = [(sweep.series(run), sweep.x(run)) for run in recipe.runs[:10]]
    assert swept == [(method, beta) for method in ("smofi", "fedavgm") for beta in (0.1, 0.2, 0.3, 0.4, 0.5)]
    adam = BY_NAME["smofi_fig4/adamw/smofi"].optimiser
    assert adam == Choice("adamw", {"lr": {"schedule": "exponential", "lr": 1e-3, "decay": 0.998}, "weight_decay": 0.0})
    assert BY_NAME["smofi_fig11/tiny/smofi-no-align"].method.options == {"alpha": -0.1, "beta": 0.5, "align": False}
    assert BY_NAME["smofi_fig11/tiny/smofi-no-global"].method.options == {"alpha": -0.1, "beta": 0.0}


def test_a_run_has_its_place_in_each_sweep() -> None:
    """FedAvg is a level line in both; a run that varies one setting is not in the sweep of the other."""
    runs = smofi.smofi_fig9().runs
    by_alpha, by_cut = smofi.smofi_fig9().figure
    assert by_alpha == smofi.smofi_fig3().figure[0]
    alphas = [Apart.LEVEL, -0.1, -0.01, -1.0, -10.0]
    assert [by_alpha.x(run) for run in runs] == [*alphas, *[Apart.ABSENT] * 8, *alphas, *[Apart.ABSENT] * 4]
    assert [by_cut.x(run) for run in runs[:13]] == [Apart.LEVEL, 2, *[Apart.ABSENT] * 3, 0, 1, 3, 4, 5, 6, 7, 8]
    assert [by_cut.x(run) for run in runs[13:]] == [Apart.LEVEL, *[Apart.ABSENT] * 4, "0-3", "4-7", "8-13", "14-16"]
    for run in runs:
        alpha, blocks = by_alpha.x(run), by_cut.x(run)
        assert isinstance(alpha, Apart) or alpha == run.method.options["alpha"]
        assert not isinstance(blocks, float) or run.cut == 1 + blocks


def test_the_cut_layer_paper_as_stated() -> None:
    for data, clients, rounds, model in (
        ("ham10000", 100, 100, "resnet18"),
        ("cifar10", 100, 200, "resnet18"),
        ("cifar100", 100, 300, "resnet50"),
        ("tiny", 10, 300, "resnet50"),
    ):
        fedavg, v1, v1_sgd, v2 = (
            BY_NAME[f"cut_table4_as_paper/{data}/{name}"]
            for name in ("fedavg", "sfl_v1-cut3", "sfl_v1-sgd-cut1", "sfl_v2-cut3")
        )
        assert {(r.clients, r.per_round, r.rounds, r.model.name) for r in (fedavg, v1, v2)} == {
            (clients, None, rounds, model)
        }
        assert fedavg.batching == Batching(size=64, epochs=5, drop_last=False)
        assert fedavg.optimiser == v1_sgd.optimiser == Choice("sgd", {"lr": 0.01})
        assert v1.optimiser == v2.optimiser == Choice("adam", {"lr": 0.001})
        assert (v1.method, v2.method) == (Choice("sfl_v1"), Choice("sfl_v2"))
        assert fedavg.model == v1.model == v2.model
        alpha = v2.partition.options.get("alpha")
        assert alpha == (None if data == "ham10000" else 0.1)


def test_the_cut_layer_paper_as_run() -> None:
    def at(name: str) -> Run:
        return BY_NAME[f"cut_table4_as_run/{name}"]

    assert at("ham10000/fedavg").rounds == 300
    assert at("ham10000/fedavg").partition == Choice("iid")
    assert at("ham10000/fedavg").optimiser.name == "adam"
    assert at("ham10000/fedavg-sgd").optimiser.name == "sgd"
    assert at("ham10000/fedavg").augment.rotate == 10
    assert at("tiny/sfl_v2-cut1").partition.options == {"alpha": 0.01, "min_size": 10, "balance_cap": True}
    fedavg = at("cifar10/fedavg")
    assert fedavg.method == Choice("fedavg", {"agg": "uniform"})
    assert fedavg.model.options == {"init": "torch", "strides": (2, 2, 2, 2), "head": (256, 256)}
    assert at("cifar10/sfl_v1-cut1").model.options == {"init": "torch"}
    assert at("tiny/fedavg").model == at("tiny/sfl_v1-cut1").model
    sgd = {"momentum": 0.9, "weight_decay": 5e-4}
    falling = {"schedule": "cosine", "lr": 0.001, "rounds": 200}
    v1, v2 = at("cifar10/sfl_v1-cut2"), at("cifar10/sfl_v2-cut2")
    assert v1.optimiser == Choice("sgd", {"lr": falling, **sgd})
    assert v1.server_optimiser == Choice("sgd", {"lr": 0.001, **sgd})
    assert v2.optimiser == Choice("adam", {"lr": falling, "weight_decay": 5e-4})
    assert v2.server_optimiser == Choice("sgd", {"lr": falling, **sgd})
    assert v2.method.options == {"agg": "uniform", "interleave": "client", "order": "fixed"}
    kept = {name for name, run in BY_NAME.items() if "as_run" in name and not run.batching.drop_last}
    assert {name.partition("/")[0] for name in kept} == {"cut_table3_as_run"}
    assert {name.split("/")[1] for name in kept} == {"cifar10", "tiny"}
    assert "cut_table3_as_run/cifar10/fedavg" not in kept
    assert BY_NAME["cut_table3_as_run/cifar10/sfl_v2-cut1"].rounds == 100


def test_a_client_has_whole_stages_of_the_network() -> None:
    cuts = [run.cut for run in cut_layer.cut_table3_as_paper().runs if "sfl_v2" in run.name]
    eighteen, fifty = ["layer1.1", "layer2.1", "layer3.1", "layer4.1"], ["layer1.2", "layer2.3", "layer3.5", "layer4.2"]
    assert cuts == [*eighteen, *fifty, *fifty]


# -- the papers' numbers -----------------------------------------------------------------------------


def test_numbers_of_the_papers() -> None:
    table1 = smofi.smofi_table1().published
    assert table1["smofi_table1/cifar10/fedavg"] == Published(accuracy=77.16, std=0.11, rounds="258", speed_up=1.0)
    assert table1["smofi_table1/tiny/fednar+smofi"] == Published(accuracy=40.47, std=0.11, rounds="16", speed_up=10.25)
    table2 = smofi.smofi_table2().published
    assert table2["smofi_table2/tiny/sfl_v1-step"] == Published(
        accuracy=21.81, std=0.98, rounds=">400", hours=">578.95"
    )
    table3 = smofi.smofi_table3().published
    assert table3["smofi_table3/tiny-iid/smofi"] == Published(accuracy=42.48, std=0.32, rounds="11", speed_up=13.36)
    assert table3["smofi_table3/cifar10-dir05/fednag"].accuracy == 82.26
    table4 = smofi.smofi_table4().published
    assert table4["smofi_table4/tiny-j20/slowmo"] == Published(accuracy=34.91, std=0.24, rounds="64", speed_up=1.95)
    table5 = smofi.smofi_table5().published
    assert table5["smofi_table5/shakespeare/fednag"] == Published(accuracy=42.56, std=2.59, rounds="210", speed_up=0.81)
    cut3, cut4 = cut_layer.cut_table3_as_run().published, cut_layer.cut_table4_as_paper().published
    assert cut3["cut_table3_as_run/cifar10/sfl_v2-cut1"] == Published(accuracy=92.30, std=0.15)
    assert cut3["cut_table3_as_run/tiny/fedavg-sgd"] == Published(accuracy=57.40, std=0.38)
    assert cut4["cut_table4_as_paper/tiny/sfl_v1-cut4"] == Published(accuracy=13.89, std=1.00)


@pytest.mark.parametrize("name", ["smofi_table1", "smofi_table3", "smofi_table4", "smofi_table5"])
def test_printed_speed_ups_are_the_ratios_of_the_printed_rounds(name: str) -> None:
    """To the rounding of the mean rounds, which are printed whole; so no number is mistyped by much."""
    table = PAPERS[name]().published
    rounds = {key: float(p.rounds) for key, p in table.items()}
    for key, p in table.items():
        panel, word = key.rpartition("/")[::2]
        base = word.partition("+")[0] if word.startswith(("fedprox", "fednar")) else "fedavg"
        gain = rounds[f"{panel}/{base}"] / rounds[key]
        assert p.speed_up == pytest.approx(gain, rel=0.5 / rounds[key] + 0.5 / rounds[f"{panel}/{base}"], abs=0.006)


# -- the files ---------------------------------------------------------------------------------------

FILE = """
[shared]
weights = ["Weights are drawn."]

[tables.one]
panels = ["a", "b"]
cells = ["accuracy", "std"]
rows.fedavg = [[50.0, 0.5], [60.0, 0.6]]

[recipes.mine]
title = "One table."
published = ["one"]
claims = ["It works."]
notes = ["weights", "The paper says nothing else."]
targets.a = 0.4
"""


def test_a_file_has_recipes_with_tables_by_run_and_shared_texts() -> None:
    (mine,) = published.read("paper.toml", FILE).values()
    assert mine.published == {
        "mine/a/fedavg": Published(accuracy=50, std=0.5),
        "mine/b/fedavg": Published(accuracy=60, std=0.6),
    }
    assert (mine.claims, mine.notes) == (("It works.",), ("Weights are drawn.", "The paper says nothing else."))
    assert (mine.title, mine.targets, mine.runs) == ("One table.", {"mine/a": 0.4}, ())


@pytest.mark.parametrize(
    ("wrong", "instead", "message"),
    [
        ("[60.0, 0.6]", "", "paper.toml: row fedavg must have 2 cells of 2 values - at `$.tables[...]`"),
        ("[60.0, 0.6]", "[60.0]", "paper.toml: row fedavg must have 2 cells of 2 values - at `$.tables[...]`"),
        ('cells = ["accuracy"', 'cells = ["rounds"', "paper.toml: Expected `str`, got `float` - at `$.rounds`"),
        ("claims", "claim", "paper.toml: Object contains unknown field `claim` - at `$.recipes[...]`"),
        ('["one"]', '["two"]', "paper.toml: unknown table 'two'; known: one."),
        ('["weights"', '["wights"', "paper.toml: unknown shared text 'wights'; did you mean 'weights'?"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(wrong: str, instead: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        published.read("paper.toml", FILE.replace(wrong, instead))
    assert str(error.value) == message


def test_fixed_steps_on_fashion_mnist_are_the_mean_of_a_round() -> None:
    runs = {label(run.name): run for run in smofi.smofi_fashion_mnist().runs}
    assert runs["fedavg"].batching == Batching(size=32, epochs=2)
    assert smofi.MEAN_STEPS == 75  # two epochs of 60,000 samples over 50 clients in batches of 32
    assert {name for name, run in runs.items() if run.batching.steps == 75} == {"slowmo", "fednag", "mergesfl"}


# -- HASFL -------------------------------------------------------------------------------------------

POLICIES = {
    "hasfl": ("planned", "planned"),
    "rbs_hams": ("random", "planned"),
    "habs_rms": ("planned", "random"),
    "rbs_rms": ("random", "random"),
    "rbs_rhams": ("random", "resources"),
}


def rules(run: Run) -> tuple[str, str]:
    return run.method.options["batches"], run.method.options["cuts"]


def test_the_setting_of_hasfl() -> None:
    (run,) = hasfl.hasfl_table1().runs
    assert (run.data, run.clients, run.per_round, run.rounds) == ("cifar10", 20, None, 1000)
    assert run.model == Choice("vgg16", {"init": "torch", "norm": "batch", "classifier": (512, 512)})
    assert run.optimiser == Choice("sgd", {"lr": 5e-4})
    planned = {"interval": 15, "batches": "planned", "cuts": "planned", "least_batch": 8}
    assert run.method == Choice("hasfl", planned)
    assert (run.partition, run.devices) == (Choice("iid"), Choice("table1"))
    for name in (name for name in SIZES if name.startswith("hasfl_fig")):
        for other in recipes.runs(name):
            assert (other.method.name, other.method.options["interval"]) == ("hasfl", 15)
            assert other.optimiser == run.optimiser


@pytest.mark.parametrize("name", ["hasfl_fig5", "hasfl_fig6"])
def test_the_five_policies_on_both_data_sets(name: str) -> None:
    runs = {run.name: run for run in recipes.runs(name)}
    panels = ("cifar10-iid", "cifar10-shards", "cifar100-iid", "cifar100-shards")
    assert list(runs) == [f"{name}/{panel}/{policy}" for panel in panels for policy in POLICIES]
    for run in runs.values():
        assert rules(run) == POLICIES[label(run.name)]
        data, partition = run.name.split("/")[1].split("-")
        assert (run.data, run.partition.name) == (data, partition)
        assert run.model.name == {"cifar10": "vgg16", "cifar100": "resnet18"}[data]


def test_fixed_batches_and_cuts_of_hasfl() -> None:
    def table(name: str) -> list[tuple[str, tuple[str, str], int, int | str]]:
        some = [run for run in recipes.runs(name) if run.partition.name == "shards"]
        return [(label(run.name), rules(run), run.batching.size, run.cut) for run in some]

    fixed = ("fixed", "fixed")
    by_batch = [(f"b{size}", fixed, size, 8) for size in (8, 16, 32, 64)]
    by_cut = [(f"cut{cut}", fixed, 16, cut) for cut in (4, 8, 12)]
    assert table("hasfl_fig2") == by_batch
    assert table("hasfl_fig3") == by_cut
    assert table("hasfl_fig10") == [("habs", ("planned", "fixed"), 16, 8), *by_batch[:3]]
    assert table("hasfl_fig11") == [("hams", ("fixed", "planned"), 16, 8), *by_cut]


def test_resources_of_hasfl_are_halved_and_doubled() -> None:
    (by_device, by_server), (by_uplink, by_link) = hasfl.hasfl_fig7().figure, hasfl.hasfl_fig8().figure
    for recipe, sweep, word, places in (
        (hasfl.hasfl_fig7(), by_device, "device", [1.5, 0.375, 0.75, 3.0]),
        (hasfl.hasfl_fig7(), by_server, "server", [20.0, 5.0, 10.0, 40.0]),
        (hasfl.hasfl_fig8(), by_uplink, "uplink", [77.5, 19.375, 38.75, 155.0]),
        (hasfl.hasfl_fig8(), by_link, "servers", [370.0, 92.5, 185.0, 740.0]),
    ):
        here = [run for run in recipe.runs if sweep.x(run) is not Apart.ABSENT]
        mine = {label(run.name): sweep.x(run) for run in here if sweep.series(run) == "rbs_rms"}
        names = ["rbs_rms", *(f"rbs_rms-{word}{factor}" for factor in ("0.25", "0.5", "2"))]
        assert mine == dict(zip(names, places, strict=True))
    assert BY_NAME["hasfl_fig7/cifar10-iid/hasfl-device0.5"].devices == Choice("table1", {"tflops": (0.5, 1.0)})
    assert BY_NAME["hasfl_fig7/cifar10-iid/hasfl-server2"].devices == Choice("table1", {"server_tflops": 40.0})
    assert BY_NAME["hasfl_fig8/cifar10-iid/hasfl-uplink2"].devices == Choice("table1", {"mbits_up": (150.0, 160.0)})
    against = hasfl.hasfl_fig7().against
    assert against["hasfl_fig7/cifar10-iid/rbs_rms-server2"] == "hasfl_fig7/cifar10-iid/hasfl-server2"
    assert against["hasfl_fig7/cifar10-iid/rbs_rms"] == "hasfl_fig7/cifar10-iid/hasfl"


def test_the_number_of_devices_of_hasfl() -> None:
    recipe = hasfl.hasfl_fig9()
    (sweep,) = recipe.figure
    places = [(sweep.series(run), sweep.x(run)) for run in recipe.runs[:20]]
    assert places == [(policy, number) for number in (10, 20, 30, 40) for policy in POLICIES]
    assert recipe.against["hasfl_fig9/cifar10-shards/habs_rms-n30"] == "hasfl_fig9/cifar10-shards/hasfl-n30"


def test_what_the_text_of_hasfl_says() -> None:
    recipe = hasfl.hasfl_fig6()
    printed = {name.partition("/")[2]: (p.points_below, p.times_first) for name, p in recipe.published.items()}
    assert printed == {
        "cifar10-iid/habs_rms": ("1.3", "~6"),
        "cifar10-iid/rbs_rms": ("", "9.4"),
        "cifar10-shards/habs_rms": ("5.6", "4.8"),
        "cifar10-shards/rbs_rms": ("", "9.4"),
        "cifar100-iid/habs_rms": ("2.4", "~15"),
        "cifar100-iid/rbs_rms": ("", "6.4"),
        "cifar100-shards/habs_rms": ("2.0", "13.4"),
        "cifar100-shards/rbs_rms": ("", "6.4"),
    }
    stated = [(s.id, s.says) for s in recipe.statements]
    assert stated[:4] == [
        ("fig6.iid.relation_to_no_BS_opt.cifar10.time_factor", "RBS+HAMS is 4.4 times as fast as habs_rms"),
        ("fig6.iid.relation_to_no_BS_opt.cifar10.acc", "RBS+HAMS is 0.7 points better than habs_rms"),
        ("fig6.iid.relation_to_no_BS_opt.cifar100.time_factor", "RBS+HAMS is 7 times as fast as habs_rms"),
        ("fig6.iid.relation_to_no_BS_opt.cifar100.acc", "RBS+HAMS is 1.6 points better than habs_rms"),
    ]
    others = "rbs_hams, habs_rms, rbs_rms, rbs_rhams"
    assert stated[4:] == 4 * [
        ("conclusion", f"HASFL is at least 4 times as fast as {others}"),
        ("conclusion", f"HASFL is at least 1 point better than {others}"),
    ]
    assert [(s.id, s.says) for s in hasfl.hasfl_fig10().statements] == [
        ("fig10.claims_numeric.iid.time_factor", "HABS is 1.4 times as fast as b8, b16, b32"),
        ("fig10.claims_numeric.iid.acc_gain_min", "HABS is at least 0.9 points better than b8, b16, b32"),
        ("fig10.claims_numeric.noniid.time_factor", "HABS is 1.6 times as fast as b8, b16, b32"),
        ("fig10.claims_numeric.noniid.acc_gain_min", "HABS is at least 1.0 points better than b8, b16, b32"),
    ]


def test_hasfl_on_fashion_mnist() -> None:
    recipe = hasfl.hasfl_fashion_mnist()
    panels = ("iid-table1", "iid-strong", "shards-table1", "shards-strong")
    assert [run.name for run in recipe.runs] == [
        f"hasfl_fashion_mnist/{panel}/{policy}" for panel in panels for policy in POLICIES
    ]
    strong = Choice("table1", {"tflops": (0.1, 2.0), "mbits_up": (10.0, 80.0)})
    for run in recipe.runs:
        assert run.devices == (strong if "strong" in run.name else Choice("table1"))
        assert (run.method.options["interval"], run.method.options["least_batch"]) == (hasfl.INTERVAL, 1)
        assert (run.rounds, run.until_accuracy) == (hasfl.ROUNDS, hasfl.TARGET)
    assert (recipe.race, set(recipe.targets.values())) == ("time", {hasfl.TARGET})
