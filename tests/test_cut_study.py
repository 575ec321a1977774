"""Specifies a study of the cut on one's own run."""

from dataclasses import replace

from cutlayer.cli.study import planned
from cutlayer.recipes.compose import label
from cutlayer.recipes.cut_study import study
from cutlayer.runs.config import Choice, Run

BASE = Run(name="mine/anything", model=Choice("mlp", {"hidden": (8, 8)}), rounds=7)


def test_a_study_covers_every_cut_on_even_and_uneven_data() -> None:
    recipe = study(BASE)
    assert [run.name for run in recipe.runs] == [
        f"mine_cuts/{panel}/{method}-cut{cut}"
        for panel in ("iid", "dirichlet")
        for method in ("sfl_v1", "sfl_v2")
        for cut in (1, 2)
    ]
    assert recipe.runs[0].partition == Choice("iid")
    assert recipe.runs[-1].partition == Choice("dirichlet", {"alpha": 0.1})
    assert {(run.cut, run.rounds, run.devices.name) for run in recipe.runs} == {(1, 7, "pool"), (2, 7, "pool")}
    assert [recipe.figure[0].x(run) for run in recipe.runs[:4]] == [1.0, 2.0, 1.0, 2.0]
    assert {recipe.figure[0].series(run) for run in recipe.runs} == {"sfl_v1", "sfl_v2"}


def test_a_study_takes_cuts_by_name_and_keeps_what_the_base_says() -> None:
    base = replace(
        BASE,
        method=Choice("sfl_v2", {"order": "fixed"}),
        partition=Choice("dirichlet", {"alpha": 0.5, "min_size": 4}),
        devices=Choice("pool", {"kappa": 10.0}),
    )
    recipe = study(base, methods=["sfl_v2", "smofi"], cuts=["fc2"], alpha=0.3)
    assert [label(run) for run in recipe.runs[:2]] == ["sfl_v2-cut2", "smofi-cut2"]
    assert recipe.runs[0].method == Choice("sfl_v2", {"order": "fixed"})
    assert recipe.runs[1].method == Choice("smofi")
    assert recipe.runs[2].partition == Choice("dirichlet", {"alpha": 0.3, "min_size": 4})
    assert recipe.runs[0].devices == Choice("pool", {"kappa": 10.0})


def test_a_study_has_the_cuts_of_the_model_that_is_set() -> None:
    runs = planned("digits", ["model=mlp", "model.hidden=[8, 8, 8]"], methods=["sfl_v1"], cuts=None, alpha=0.1)
    assert [run.cut for run in runs] == [1, 2, 3, 1, 2, 3]
