"""Figures show what the numbers say: which lines, where they lie, and against what."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from test_report import FEDAVG, SPLIT, left

from cutlayer import recipes
from cutlayer.cli.study import cut_table
from cutlayer.errors import ConfigError
from cutlayer.recipes import Apart, Recipe, Sweep
from cutlayer.results import figures, report
from cutlayer.results.figures.looks import LOOKS, looks
from cutlayer.results.names import NAMES, method_of
from cutlayer.results.trials import Spread
from cutlayer.runs.config import Run
from cutlayer.studies import cuts_figure, overlap_figure
from cutlayer.studies.cuts import CutLine, CutRow, CutStudy
from cutlayer.studies.cuts_figure import draw_cuts


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures instead of writing files."""
    seen: list[Figure] = []

    @contextmanager
    def kept(path: Path, **_: str) -> Iterator[Figure]:
        figure = Figure()
        yield figure
        seen.append(figure)

    for module in (figures, cuts_figure, overlap_figure):
        monkeypatch.setattr(module, "written", kept)
    return seen


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The named lines of axes."""
    named = [(line.get_label(), line) for line in axes.lines]
    named += [(c.get_label(), c.lines[0]) for c in axes.containers]
    return {
        label: [(round(float(x), 6), round(float(y), 6)) for x, y in zip(*line.get_data(), strict=True)]
        for label, line in named
        if not label.startswith("_")
    }


def names_in_legend(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_one_panel_lies_flat_against_rounds_and_traffic(tmp_path: Path, drawn: list[Figure]) -> None:
    left(tmp_path, FEDAVG, [0.2, 0.6], seed=0)
    left(tmp_path, FEDAVG, [0.4, 0.6], seed=1)
    left(tmp_path, SPLIT, [0.1, 0.7], seed=0)
    left(tmp_path, SPLIT, [0.1, 0.7], seed=1)
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    by_round, by_bytes = drawn[0].axes
    assert lines(by_round) == {"FedAvg": [(1, 30), (2, 60)], "SFL-V1": [(1, 10), (2, 70)]}
    assert lines(by_bytes)["FedAvg"] == [(3, 30), (6, 60)]  # 3 MiB a round
    assert by_bytes.get_xlabel() == "traffic, up and down (MiB)"
    assert [text.get_text() for text in by_bytes.texts] == ["target\n54.0 %"]  # beside the axes
    assert names_in_legend(drawn[0]) == ["FedAvg", "SFL-V1"]


def test_simulated_time_goes_before_traffic(tmp_path: Path, drawn: list[Figure]) -> None:
    left(tmp_path, FEDAVG, [0.2, 0.6], simulated=5400)
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    by_time = drawn[0].axes[1]
    assert by_time.get_xlabel() == "simulated hours"
    assert lines(by_time) == {"FedAvg": [(1.5, 20), (3, 60)]}


def test_a_run_without_a_clock_leaves_traffic_to_all(tmp_path: Path, drawn: list[Figure]) -> None:
    left(tmp_path, FEDAVG, [0.2, 0.6], simulated=60)
    left(tmp_path, SPLIT, [0.2, 0.6])
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    assert drawn[0].axes[1].get_xlabel() == "traffic, up and down (MiB)"


def test_long_curves_are_smoothed_over_faint_ones(tmp_path: Path, drawn: list[Figure]) -> None:
    scattered = [0.5, 0.6, 0.7] * 20
    left(tmp_path, FEDAVG, scattered)
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    axes = drawn[0].axes[0]
    smoothed, faint = lines(axes)["FedAvg"], axes.lines[0]
    assert axes.get_ylabel() == "test accuracy (%),\nmean of 9 rounds"
    assert [y for _, y in smoothed[4:-4]] == pytest.approx([60] * 52)  # three of each in every window
    assert smoothed[-1] == (60, pytest.approx((60 + 70 + 50 + 60 + 70) / 5))
    assert list(faint.get_ydata()) == pytest.approx([100 * a for a in scattered])


def test_each_panel_has_its_axes_and_a_label_has_one_colour(tmp_path: Path, drawn: list[Figure]) -> None:
    for i in range(3):
        left(tmp_path, replace(FEDAVG, name=f"paper/set{i}/fedavg"), [0.2, 0.6])
        left(tmp_path, replace(SPLIT, name=f"paper/set{i}/split{i % 2}"), [0.2, 0.6])
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    axes = drawn[0].axes
    assert [a.get_title() for a in axes if a.get_title()] == [f"set{i} (target 54.0 %)" for i in range(3)]
    assert names_in_legend(drawn[0]) == ["FedAvg", "split0", "split1"]  # once each
    assert len({line.get_color() for a in axes for line in a.lines if line.get_label() == "FedAvg"}) == 1


def test_a_target_above_all_lines_is_shown(tmp_path: Path, drawn: list[Figure]) -> None:
    left(tmp_path, FEDAVG, [0.1, 0.6, 0.8])
    figures.draw(report.compare(report.find([tmp_path]), 0.99), Path("a.png"))
    assert all(axes.get_ylim()[1] > 99 for axes in drawn[0].axes)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FedAvg without the setting, and SFL-V1 with two values of it, one of which does not arrive."""

    def x(run: Run) -> float | Apart:
        return Apart.LEVEL if run.method.name == "fedavg" else float(run.name.rpartition("=")[2])

    swept = Sweep(label="exponent", x=x, series=lambda run: run.method.name, log=True)
    monkeypatch.setitem(recipes.RECIPES, "paper", lambda: Recipe(runs=(), figure=(swept,)))
    left(tmp_path, FEDAVG, [0.2, 0.2, 0.6, 0.6])
    for value, accuracies in ((-10, [0.1, 0.2, 0.3, 0.4]), (-0.1, [0.1, 0.7, 0.7, 0.7])):
        left(tmp_path, replace(SPLIT, name=f"paper/a={value}"), accuracies, seed=0)
        left(tmp_path, replace(SPLIT, name=f"paper/a={value}"), accuracies, seed=1)
    return tmp_path


def test_a_sweep(sweep: Path, drawn: list[Figure]) -> None:
    figures.draw(report.compare(report.find([sweep])), Path("a.png"))
    accuracy, rounds = drawn[0].axes
    # negative values have no logarithm: they stand evenly, in order
    assert [t.get_text() for t in accuracy.get_xticklabels()] == ["-10", "-0.1"]
    assert lines(accuracy) == {"SFL-V1": [(0, 40), (1, 70)], "FedAvg": [(0, 60), (1, 60)]}
    # to 0.54: FedAvg in round 3, one value in round 2, the other not in its 4 rounds
    assert lines(rounds) == {"SFL-V1": [(1, 2)], "not reached by every seed": [(0, 4)], "FedAvg": [(0, 3), (1, 3)]}
    assert (accuracy.get_ylabel(), rounds.get_ylabel()) == ("best accuracy (%)", "rounds to target")
    assert rounds.get_xlabel() == "exponent"
    assert set(names_in_legend(drawn[0])) == {"FedAvg", "SFL-V1", "not reached by every seed"}


ALPHAS = {"smofi-alpha-0.01": 0.5, "smofi": 0.6, "smofi-alpha-1": 0.7, "smofi-alpha-10": 0.8}  # best accuracies
CUTS = {"smofi-cut0": 0.3, "smofi-cut1": 0.4, "smofi-cut5": 0.9}


def left_by(root: Path, panel: str, best: dict[str, float]) -> None:
    """Two rounds of some runs of a recipe's panel."""
    runs = {run.name: run for run in recipes.runs(panel.partition("/")[0])}
    for name, accuracy in best.items():
        left(root, runs[f"{panel}/{name}"], [0.0, accuracy])


def test_sweeps_of_a_panel_stand_side_by_side(tmp_path: Path, drawn: list[Figure]) -> None:
    left_by(tmp_path, "smofi_fig3/cifar10", {"fedavg": 0.2, **ALPHAS, **CUTS})
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    by_alpha, by_cut, rounds_by_alpha, rounds_by_cut = drawn[0].axes
    assert [t.get_text() for t in rounds_by_alpha.get_xticklabels()] == ["-10", "-1", "-0.1", "-0.01"]
    # the default run, 60 %, is the staleness factor -0.1 of the one and the two blocks of the other
    assert lines(by_alpha) == {"FedAvg": [(0, 20), (1, 20)], "SMoFi": [(0, 80), (1, 70), (2, 60), (3, 50)]}
    assert lines(by_cut) == {"FedAvg": [(0, 20), (1, 20)], "SMoFi": [(0, 30), (1, 40), (2, 60), (5, 90)]}
    assert [t.get_text() for t in rounds_by_cut.get_xticklabels()] == ["0", "1", "2", "5"]
    assert lines(rounds_by_alpha)["SMoFi"] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert (rounds_by_alpha.get_xlabel(), rounds_by_cut.get_xlabel()) == (
        "staleness factor",
        "residual blocks at the client",
    )


STUDY = CutStudy(
    lines=(CutLine("iid", "sfl_v1"), CutLine("iid", "sfl_v2")),
    rows=tuple(
        CutRow(
            cut=cut,
            unit=unit,
            accuracy={CutLine("iid", "sfl_v1"): Spread(0.5, None), CutLine("iid", "sfl_v2"): Spread(best, 0.01)},
            bytes={"sfl_v1": cut * 2**20, "sfl_v2": cut * 2**20},
            flops=cut * 10**6,
            params=cut,
            seconds={"sfl_v1": 2.0 * cut, "sfl_v2": 3.0 * cut},
        )
        for cut, unit, best in ((1, "conv1", 0.7), (2, "conv2", 0.6))
    ),
)


def test_a_study_of_the_cut_has_four_pictures(drawn: list[Figure]) -> None:
    draw_cuts(STUDY, Path("a.png"))
    accuracy, traffic, work, time = drawn[0].axes
    assert lines(accuracy) == {"SFL-V1, IID": [(0, 50), (1, 50)], "SFL-V2, IID": [(0, 70), (1, 60)]}
    assert [list(a.lines[0].get_ydata()) for a in (traffic, work)] == [[1, 2], [1, 2]]
    assert lines(time) == {"SFL-V1": [(0, 2), (1, 4)], "SFL-V2": [(0, 3), (1, 6)]}
    for axes in drawn[0].axes:
        assert [t.get_text() for t in axes.get_xticklabels()] == ["1 conv1", "2 conv2"]


def test_traffic_that_depends_on_the_method_is_told_for_each(drawn: list[Figure]) -> None:
    rows = tuple(replace(row, bytes={"sfl_v1": 2**20, "sfl_v2": row.cut * 2**20}) for row in STUDY.rows)
    draw_cuts(replace(STUDY, rows=rows), Path("a.png"))
    assert lines(drawn[0].axes[1]) == {"SFL-V1": [(0, 1), (1, 1)], "SFL-V2": [(0, 1), (1, 2)]}
    table = cut_table(replace(STUDY, rows=rows))
    columns = dict(zip(table.heads, map(list, zip(*table.rows, strict=True)), strict=True))
    assert columns["sfl_v1\nMiB a round"] == ["1.00", "1.00"]
    assert columns["sfl_v2\nMiB a round"] == ["1.00", "2.00"]


def test_conclusions_are_read_off_the_numbers() -> None:
    assert STUDY.conclusions() == [
        "sfl_v1, iid: 50.0 % at every cut",
        "sfl_v2, iid: 10.0 points between the cuts, best at 1 (conv1) with 70.0 %",
    ]
    assert replace(STUDY, rows=STUDY.rows[1:]).conclusions() == [
        "sfl_v1, iid: 50.0 % at 2 (conv2)",
        "sfl_v2, iid: 60.0 % at 2 (conv2)",
    ]


def test_the_name_of_the_file_decides_its_format(tmp_path: Path) -> None:
    left(tmp_path, SPLIT, [None, None])  # a figure without lines is a figure all the same
    for name, magic in (("new/curves.png", b"\x89PNG"), ("curves.pdf", b"%PDF")):
        figures.draw(report.compare(report.find([tmp_path])), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_figure_of_an_unknown_format() -> None:
    with pytest.raises(ConfigError) as caught:
        figures.check_format(Path("curves.gif"))
    assert str(caught.value) == "cannot draw a figure into curves.gif; use a name that ends in .png, .pdf or .svg"


# -- converged runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path, drawn: list[Figure]) -> Path:
    """Runs of Figure 10 of HASFL: HABS after 2 rounds of a minute, b8 after 4 of three, b16 in one of two seeds."""
    runs = {run.name: run for run in recipes.runs("hasfl_fig10")}
    level, later = [0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6], [0.1, 0.3, 0.4, 0.52, 0.5, 0.5, 0.5, 0.5, 0.5]
    panel = "hasfl_fig10/cifar10-iid"
    for seed in (0, 1):
        left(tmp_path, runs[f"{panel}/habs"], level, simulated=60, seed=seed)
        left(tmp_path, runs[f"{panel}/b8"], later, simulated=180, seed=seed)
    left(tmp_path, runs[f"{panel}/b16"], level, simulated=60, seed=0)
    left(tmp_path, runs[f"{panel}/b16"], level[:6], simulated=60, seed=1)
    return tmp_path


def test_bars_of_converged_runs(ended: Path, drawn: list[Figure]) -> None:
    figures.draw(report.compare(report.find([ended])), Path("a.png"))
    above, below = drawn[0].axes
    assert (above.get_ylabel(), below.get_ylabel()) == ("converged accuracy (%)", "converged after (minutes)")
    bars = [[(round(b.get_center()[0], 6), round(b.get_height(), 6)) for b in a.patches] for a in (above, below)]
    assert bars == [[(0, 60), (1, 52)], [(0, 2), (1, 12)]]
    assert [text.get_text() for text in below.texts] == ["2.00", "12.00"]
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["habs", "b8", "b16"]
    # b16 stands for its whole run, 6.5 minutes on average
    (late,) = below.lines
    assert (late.get_label(), late.get_xydata().tolist()) == ("not converged with every seed", [[2, 6.5]])


# -- one look for each method ------------------------------------------------------------------------------------------


def test_every_method_has_a_colour_and_a_marker_that_no_other_has() -> None:
    assert set(LOOKS) == set(NAMES)
    assert len(set(LOOKS.values())) == len(LOOKS)
    in_grey = [(look.marker, look.hollow) for look in LOOKS.values()]
    assert len(set(in_grey)) == len(in_grey)


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_methods_of_a_recipe_differ_in_their_colours(recipe: str) -> None:
    names = {method_of(run.name.rpartition("/")[2], run.method.name) for run in recipes.runs(recipe)}
    assert len({LOOKS[name].colour for name in names}) == len(names)


def test_the_look_of_a_method_does_not_depend_on_the_others() -> None:
    alone = looks({"smofi": "smofi"})["smofi"]
    among = looks({name: name for name in NAMES})["smofi"]
    shared = ("color", "marker", "markerfacecolor", "linestyle", "label")
    assert [alone[key] for key in shared] == [among[key] for key in shared]
    assert (alone["color"], alone["marker"], alone["label"]) == ("#D55E00", "o", "SMoFi")


def test_runs_of_one_method_differ_in_their_dashes_and_fedavgs_are_dashed() -> None:
    style = looks({"sfl_v1-cut1": "sfl_v1", "sfl_v1-cut2": "sfl_v1", "fedavg": "fedavg"})
    one, two, fedavg = style.values()
    assert one["color"] == two["color"] == LOOKS["sfl_v1"].colour and one["marker"] == two["marker"] == "s"
    assert one["linestyle"] == "-" and two["linestyle"] == fedavg["linestyle"] == (0, (5, 1.5))
    assert fedavg["markerfacecolor"] == "white"
    apart = looks({"b8": "hasfl", "b16": "hasfl", "b32": "hasfl"})  # of one method alone: colours tell them apart
    assert len({look["color"] for look in apart.values()}) == 3
    assert apart["b8"]["color"] == LOOKS["hasfl"].colour


def test_a_plug_ins_method_has_a_colour_of_its_own_in_every_figure() -> None:
    alone = looks({"fedavg": "fedavg", "tilted": "tilted"})["tilted"]
    again = looks({"tilted": "tilted", "sfl_v1": "sfl_v1", "fedavg": "fedavg"})["tilted"]
    assert (alone["color"], alone["marker"]) == (again["color"], again["marker"])
    own = [f"mine{i}" for i in range(4)]
    crowd = looks({name: name for name in ("fedavg", "sl", "sfl_v1", "sfl_v2", "mergesfl", "smofi", *own)})
    assert len({look["color"] for look in crowd.values()}) == 10
    assert len({(look["marker"], look["markerfacecolor"] == "white") for look in crowd.values()}) == 10


def test_bands_are_standard_deviations(tmp_path: Path, drawn: list[Figure]) -> None:
    for seed, accuracy in enumerate((0.4, 0.5, 0.6, 0.9)):  # mean 60, deviation 21.6
        left(tmp_path, FEDAVG, [accuracy, 0.5], seed=seed)
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    (band,) = drawn[0].axes[0].collections
    first = [y for x, y in band.get_paths()[0].vertices if x == 1]
    assert (min(first), max(first)) == (pytest.approx(60 - 21.602, abs=1e-3), pytest.approx(60 + 21.602, abs=1e-3))


def test_a_figure_is_as_wide_as_one_or_two_columns(tmp_path: Path, drawn: list[Figure]) -> None:
    for name in ("a", "b", "c"):
        left(tmp_path, replace(FEDAVG, name=f"paper/{name}/fedavg"), [0.2, 0.6])
    three = report.compare(report.find([tmp_path]))
    one = report.compare(report.find([tmp_path / "paper/a"]))
    for comparison in (one, three):
        for width in figures.Width:
            figures.draw(comparison, Path("a.png"), width)
    assert [figure.get_figwidth() for figure in drawn] == [3.3, 6.8, 3.3, 6.8]
    assert [axes.get_subplotspec().rowspan.start for axes in drawn[0].axes] == [0, 1]  # one above the other


def test_a_figure_keeps_all_evaluations_of_the_seeds_that_are_compared(tmp_path: Path, drawn: list[Figure]) -> None:
    left(tmp_path, FEDAVG, [0.2, 0.4, 0.6, 0.8], seed=0)
    left(tmp_path, FEDAVG, [0.9, 0.9, 0.9, 0.9], seed=1)
    left(tmp_path, SPLIT, [None, 0.5, None, 0.7], seed=0)
    figures.draw(report.compare(report.find([tmp_path])), Path("a.png"))
    assert lines(drawn[0].axes[0]) == {
        "FedAvg": [(1, 20), (2, 40), (3, 60), (4, 80)],
        "SFL-V1": [(2, 50), (4, 70)],
    }
