"""Specifies what people see of codecs: the list, the traffic before and after, comparisons, the study of the cut."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import BATCH, clients_of, fit_for, images, resnet
from matplotlib.figure import Figure
from test_cli import mistake, say, wide  # noqa: F401
from test_figures import STUDY, drawn, lines  # noqa: F401
from test_plugins import restored  # noqa: F401
from test_report import FEDAVG, MIB, SPLIT, left

import cutlayer as cl
from cutlayer import methods
from cutlayer.cli.study import cut_table, read_codecs
from cutlayer.recipes.compose import label
from cutlayer.recipes.cut_study import study
from cutlayer.results import report
from cutlayer.results.names import codec_of, codecs_of
from cutlayer.results.trials import Spread
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.split import Split
from cutlayer.studies import traffic
from cutlayer.studies.cuts import CutLine, CutRow, CutStudy
from cutlayer.studies.cuts_figure import draw_cuts

TOPK = {"name": "topk", "share": 0.1}
MODEL = {"chain": [TOPK, "int8"], "error_feedback": True}
MINE = """
data = "digits"
rounds = 1
per_round = 2
engine = "loop"
method = "sfl_v2"
[[run]]
name = "plain"
[[run]]
name = "coded"
codecs.activations = "int8"
codecs.gradients = { name = "topk", share = 0.1 }
"""


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("int8", "int8"),
        ({"name": "bf16"}, "bf16"),
        (TOPK, "topk(0.1)"),
        ({"name": "randtopk", "share": 0.1, "alpha": 0.2}, "randtopk(share=0.1, alpha=0.2)"),
        ([TOPK, "int8"], "topk(0.1)+int8"),
        (MODEL, "topk(0.1)+int8 with error feedback"),
        ({**TOPK, "error_feedback": True}, "topk(0.1) with error feedback"),
        ({"name": "Chained", "first": {"name": "Bf16"}, "then": "int8"}, "Chained(first=Bf16, then=int8)"),
    ],
)
def test_a_codec_has_a_short_name(codec: Any, name: str) -> None:
    assert codec_of(codec) == name


def test_the_codecs_of_a_run_are_named_by_kind() -> None:
    assert codecs_of({"activations": "int8", "model": TOPK}) == "activations int8, model topk(0.1)"
    assert codecs_of({}) == ""


# -- the list ----------------------------------------------------------------------------------------------------------


def test_codecs_are_listed_with_their_options(say: Any) -> None:  # noqa: F811
    found = {entry["name"]: entry for entry in say("list", "codecs", "--json").json["codecs"]}
    assert found["int8"]["options"] == {"per": "sample"}
    assert (found["topk"]["needs"], found["topk"]["options"]) == (["share"], {})
    assert (found["gaussian"]["needs"], found["gaussian"]["options"]) == (["std"], {"clip": None})
    assert all(entry["about"].endswith(".") for entry in found.values())
    assert max(len(line.rstrip()) for line in say("list", "codecs").out.splitlines()) <= 80


def test_a_plug_ins_codec_is_listed(say: Any, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mine.py").write_text(
        'from cutlayer import codecs\n\ndef mine(*, bits: int = 8):\n    """Like int8."""\n    return codecs.int8()\n\n'
        'CODECS = {"mine": mine}\n'
    )
    found = say("list", "codecs", "--plugin", "mine.py", "--json").json["codecs"][-1]
    assert found == {"name": "mine", "about": "Like int8.", "options": {"bits": 8}, "needs": [], "source": "mine.py"}


def test_packing_of_earlier_versions_is_now_a_codec(say: Any) -> None:  # noqa: F811
    for old, new in (("int8", "int8"), ("raw", "none"), ("fp16", "bf16")):
        for what in ("ward.toml", "digits"):
            assert mistake(say("serve", what, "--packing", old)) == (
                f"--packing is gone: give --set codecs.activations={new}, or name it in the run file, which devices "
                "read"
            )
        assert mistake(say("join", "--data", "digits", "--any-run", "--insecure", "--packing", old)) == (
            f'--packing is gone: write codecs = {{ activations = "{new}" }} into the run file that --config names'
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["gradients=topk", "gradients.share=2"],
            "[codecs.gradients]: share is 2, but it must be a fraction above 0 and",
        ),
        (
            ["labels=int8"],
            "[codecs.labels]: labels cannot be encoded: any change of a label is another class; kinds that",
        ),
        (["model.chain=3"], "[codecs.model]: chain is 3; it must be a list of codecs"),
        (["model=int9"], "[codecs.model]: unknown codec 'int9'; did you mean 'int8' or 'int4'?"),
        (
            ["model=topk", "model.shar=0.1"],
            "[codecs.model]: unknown option 'shar' in codec 'topk'; did you mean 'share'?",
        ),
        (["activation=int8"], "[codecs.activation]: unknown kind 'activation'; did you mean 'activations'?"),
    ],
)
def test_a_mistake_in_a_codec_names_its_kind(say: Any, settings: list[str], message: str) -> None:  # noqa: F811
    words = [word for setting in settings for word in ("--set", f"codecs.{setting}")]
    assert mistake(say("run", "digits", *words)).startswith(f"--set, {message}")


def test_codecs_are_set_as_for_the_study_of_the_cut(say: Any) -> None:  # noqa: F811
    words = ["--set", "codecs.activations=randtopk:0.2:alpha=0.5", "--set", "codecs.gradients=topk:share=0.1+int8"]
    (run,) = say("run", "digits", "--only", "sl", *words, "--dry-run", "--json").json["runs"]
    assert run["codecs"] == {
        "activations": {"name": "randtopk", "share": 0.2, "alpha": 0.5},
        "gradients": [TOPK, {"name": "int8"}],
    }
    assert mistake(say("run", "digits", "--set", "codecs.model=int9:levels=3")) == (
        "unknown codec 'int9' in --set codecs.model; did you mean 'int8' or 'int4'?"
    )


@pytest.mark.parametrize(
    ("method", "codecs", "idle"),
    [
        ("fedavg", {"activations": "int8", "model": "int8"}, ["activations"]),
        ("hosfl", {"model": "bf16", "gradients": TOPK}, ["model"]),
        ("sfl_v2", {"activations": "int8", "auxiliary": "int8"}, ["auxiliary"]),
        ("sfl_v2", {"activations": "int8", "gradients": "int8", "model": "int8"}, []),
    ],
)
def test_a_codec_of_what_never_crosses_is_told_once(
    method: str, codecs: dict[str, Any], idle: list[str], caplog: Any
) -> None:
    split = Split(fit_for(method, resnet()), 1)
    opt = cl.sgd(0.05)
    made = methods.build(method, split, opt, opt)
    cl.train(made, images(), clients_of(), rounds=2, batching=BATCH, engine="loop", codecs=codecs)
    told = [r.getMessage() for r in caplog.records if "codecs." in r.getMessage()]
    assert told == [
        f"codecs.{kind}: nothing crossed as {kind} in the first round, so {codecs[kind]} encoded nothing"
        for kind in idle
    ]


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_traffic_shows_bytes_before_and_after(say: Any, tmp_path: Path) -> None:  # noqa: F811
    Path("mine.toml").write_text(MINE)
    assert say("run", "mine.toml", "--quiet").code == 0
    end = json.loads((tmp_path / "runs/mine/coded/seed-0/metrics.jsonl").read_text())
    plain = json.loads((tmp_path / "runs/mine/plain/seed-0/metrics.jsonl").read_text())
    assert end["bytes_before_codecs"] == {k: plain["bytes"][k] for k in ("up_activations", "down_gradients")}
    coded, other = say("compare", "runs/mine", "--traffic", "--format", "json").json["panels"][0]["runs"]
    assert (coded["label"], other["label"]) == ("coded", "plain")
    assert coded["bytes"]["Uplink (Act)"] == end["bytes"]["up_activations"]
    assert coded["bytes"]["Downlink (Grad)"] == end["bytes"]["down_gradients"]
    assert coded["bytes_before_codecs"] == other["bytes"] and "bytes_before_codecs" not in other
    said = say("compare", "runs/mine", "--traffic").out
    assert "before codecs" in said and max(len(line.rstrip()) for line in said.splitlines()) <= 80
    csv = say("compare", "runs/mine", "--traffic", "--format", "csv").out.splitlines()
    assert csv[0] == "panel,run,samples,row,bytes,bytes_before_codecs"
    assert csv[-1].startswith("mine,plain,") and csv[-1].endswith(",")
    shown = say("compare", "runs/mine")
    assert "codecs of coded: activations int8, gradients topk(0.1)" in shown.out
    found = say("compare", "runs/mine", "--format", "json").json["runs"]
    assert [run.get("codecs") for run in found] == [{"activations": "int8", "gradients": TOPK}, None]


def coded(folder: Folder, before: dict[str, int]) -> Folder:
    """The folder, with bytes before codecs in its records."""
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    lines = [json.dumps({**record, "bytes_before_codecs": before}) for record in records]
    folder.metrics.write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_traffic_before_codecs_is_scaled_like_the_other(tmp_path: Path) -> None:
    coded(left(tmp_path, SPLIT, [0.1]), {"up_activations": 4 * MIB})  # of 8 samples, 1 MiB after
    (group,) = report.compare(report.find([tmp_path])).panels[0].groups
    found = traffic.column(group, 80)
    assert (found.rows["Uplink (Act)"], found.before["Uplink (Act)"]) == (10 * MIB, 40 * MIB)
    assert found.before["Uplink (Model)"] == found.rows["Uplink (Model)"] == 10 * MIB
    assert sum(found.before.values()) == 60 * MIB


def test_a_table_without_codecs_has_no_column_for_them(say: Any, tmp_path: Path) -> None:  # noqa: F811
    left(tmp_path, FEDAVG, [0.2])
    assert "before codecs" not in say("compare", ".", "--traffic").out
    assert "codecs" not in say("compare", ".", "--format", "json").out


def test_runs_that_differ_in_their_codecs_are_told_apart(say: Any) -> None:  # noqa: F811
    Path("grid.toml").write_text(
        'method = "sfl_v2"\n[grid]\ncodecs.activations = ["none", "int8", [{ name = "topk", share = 0.1 }, "int8"]]\n'
    )
    runs = say("run", "grid.toml", "--dry-run", "--json").json["runs"]
    assert [run["name"] for run in runs] == [
        "grid/activations=none",
        "grid/activations=int8",
        "grid/activations=topk,share=0.1+int8",
    ]
    table = say("run", "grid.toml", "--dry-run").out
    assert "activations topk(0.1)+int8" in table and "codecs" in table


def test_runs_of_one_name_with_other_codecs_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    left(tmp_path / "a", SPLIT, [0.1])
    left(tmp_path / "b", replace(SPLIT, codecs={"activations": "int8"}), [0.1])
    groups = report.compare(report.find([tmp_path])).panels[0].groups
    assert len({group.label for group in groups}) == 2


# -- the study of the cut ----------------------------------------------------------------------------------------------


def test_codecs_of_a_study_are_read_from_the_command_line() -> None:
    assert read_codecs("none, int8,topk,topk:0.05,topk:0.1+int8,randtopk:0.2:alpha=0.5,int4:per=channel") == {
        "none": {"name": "none"},
        "int8": {"name": "int8"},
        "topk": TOPK,
        "topk-0.05": {"name": "topk", "share": 0.05},
        "topk-0.1+int8": [TOPK, {"name": "int8"}],
        "randtopk-0.2-alpha=0.5": {"name": "randtopk", "share": 0.2, "alpha": 0.5},
        "int4-per=channel": {"name": "int4", "per": "channel"},
    }


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ("int9", "unknown codec 'int9' in --codecs; did you mean 'int8'"),
        ("topk,topk:0.1", "--codecs names 'topk:0.1' twice; leave one out"),
        ("none,,int8", "--codecs: a name is missing; give names and options, such as none,int8,topk:0.1+int8"),
        ("int8+", "--codecs: a name is missing"),
        ("bf16:2", "--codecs 'bf16:2': bf16 has no options; leave '2' out"),
        ("topk:0.1:3", "--codecs 'topk:0.1:3': topk has 1 option; leave '3' out"),
        ("topk:2.0", "--codecs, [codecs.activations]: share is 2.0, but it must be a fraction above 0 and up to 1."),
        (
            "topk:shares=0.1",
            "--codecs, [codecs.activations]: unknown option 'shares' in codec 'topk'; did you mean 'share'?",
        ),
        ("gaussian", "--codecs, [codecs.activations]: codec 'gaussian' needs std; add it"),
        ("int8+topk", "--codecs, [codecs.activations]: topk(0.1) cannot follow int8, which leaves no tensor of values"),
    ],
)
def test_mistakes_in_codecs_are_told(say: Any, codecs: str, message: str) -> None:  # noqa: F811
    assert mistake(say("cuts", "--codecs", codecs)).startswith(message)


def test_a_study_with_codecs_makes_every_run_with_each() -> None:
    base = Run(name="mine/x", model=Choice("mlp", {"hidden": (8, 8)}), codecs={"model": "bf16", "activations": "int4"})
    recipe = study(base, methods=["sfl_v2"], codecs=read_codecs("none,topk"))
    assert [run.name for run in recipe.runs[:4]] == [
        f"mine_cuts_codecs/iid/sfl_v2-cut{cut}-{codec}" for cut in (1, 2) for codec in ("none", "topk")
    ]
    assert recipe.runs[1].codecs == {"model": "bf16", "activations": TOPK, "gradients": TOPK}
    assert [recipe.figure[0].x(run) for run in recipe.runs[:4]] == [1.0, 1.0, 2.0, 2.0]
    assert [label(run) for run in study(base, methods=["sfl_v2"]).runs[:2]] == ["sfl_v2-cut1", "sfl_v2-cut2"]


def test_a_small_study_with_codecs(wide: Any) -> None:  # noqa: F811
    words = ["cuts", "--cut", "conv1", "--method", "sfl_v2", "--codecs", "none,int8", "--figure", "a.png"]
    said = wide(*words, "--rounds", "1", "--engine", "loop", "--set", "per_round=2", "--quiet", "--json").json
    assert [(cut["cut"], cut["codec"]) for cut in said["cuts"]] == [(1, "none"), (1, "int8")]
    assert said["figure"] == "a.png" and Path("a.png").stat().st_size > 10_000
    records = {
        partition: json.loads(
            Path(f"runs/digits_cuts_codecs/{partition}/sfl_v2-cut1-int8/seed-0/metrics.jsonl").read_text()
        )
        for partition in ("iid", "dirichlet")
    }
    crossed = [sum(size for kind, size in r["bytes"].items() if kind[:3] in ("up_", "dow")) for r in records.values()]
    assert said["cuts"][1]["client_bytes_per_round"]["sfl_v2"] == sum(crossed) / 2 / 2  # partitions and clients
    assert said["cuts"][1]["client_flops_per_sample"] == said["cuts"][0]["client_flops_per_sample"]


def row(cut: int, codec: str, best: float, size: float) -> CutRow:
    line, unit = CutLine("iid", "sfl_v2"), ("conv1", "conv2")[cut - 1]
    return CutRow(
        cut=cut, unit=unit, accuracy={line: Spread(best, None)}, bytes={"sfl_v2": size * MIB}, flops=1, params=1,
        seconds={}, codec=codec,
    )  # fmt: skip


WITH_CODECS = CutStudy(
    lines=(CutLine("iid", "sfl_v2"),),
    rows=(row(1, "none", 0.9, 4.0), row(1, "int8", 0.89, 1.0), row(2, "none", 0.8, 2.0), row(2, "int8", 0.7, 0.5)),
)


def test_the_table_of_a_study_has_a_row_for_each_codec() -> None:
    table = cut_table(WITH_CODECS)
    assert table.heads[:5] == ["cut", "unit", "codec", "iid\nsfl_v2", "MiB\na round"]
    assert [list(cells[:5]) for cells in table.rows] == [
        ["1", "conv1", "none", "90.0", "4.000"],
        ["1", "conv1", "int8", "89.0", "1.000"],
        ["2", "conv2", "none", "80.0", "2.000"],
        ["2", "conv2", "int8", "70.0", "0.500"],
    ]
    assert "codec" not in cut_table(STUDY).heads and "codec" not in STUDY.as_dict()["cuts"][0]


def test_a_study_says_what_is_best_and_what_is_almost_as_good_and_smaller() -> None:
    best = "sfl_v2, iid: best with none at 1 (conv1), 90.0 %; "
    assert WITH_CODECS.conclusions() == [f"{best}within 2 points, int8 at 1 (conv1) sends least, 25.0 % as much"]
    only = replace(WITH_CODECS, rows=(WITH_CODECS.rows[0], WITH_CODECS.rows[3]))
    assert only.conclusions() == [f"{best}nothing within 2 points sends less"]


def test_the_picture_has_a_point_for_every_cut_and_codec(drawn: list[Figure]) -> None:  # noqa: F811
    draw_cuts(WITH_CODECS, Path("a.png"))
    (axes,) = drawn[0].axes
    assert lines(axes) == {"none": [(4, 90), (2, 80)], "int8": [(1, 89), (0.5, 70)]}
    assert (axes.get_xscale(), axes.get_title()) == ("log", "SFL-V2, IID")
    assert [text.get_text() for text in axes.texts] == ["1", "2", "1", "2"]
    first, second = (container.lines[0] for container in axes.containers)
    assert first.get_color() != second.get_color() and first.get_marker() != second.get_marker()


def test_cuts_at_one_point_are_named_together(drawn: list[Figure]) -> None:  # noqa: F811
    draw_cuts(replace(WITH_CODECS, rows=(row(1, "none", 0.9, 4.0), row(2, "none", 0.9, 4.0))), Path("a.png"))
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["1,2"]
