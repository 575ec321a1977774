"""Specifies files with several runs: [[run]] entries, a [grid] of settings, their names, and one that fails."""

from pathlib import Path
from typing import Any

import pytest
from test_cli import mistake, say  # noqa: F401

from cutlayer.cli import launch
from cutlayer.errors import CutlayerError
from cutlayer.results import figures
from cutlayer.runs.config import Run

SMALL = """
clients = 2
rounds = 1
engine = "loop"
partition = "iid"
model = { name = "mlp", hidden = [4] }
batching = { steps = 1 }
"""


def runs_of(tmp_path: Path, text: str) -> list[Run]:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return list(launch.named(str(path)))


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(CutlayerError) as caught:
        runs_of(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_entries_change_the_keys_above_them(tmp_path: Path) -> None:
    first, second, third = runs_of(
        tmp_path,
        'rounds = 7\n[optimiser]\nlr = 0.5\n[[run]]\nname = "slow"\noptimiser.lr = 0.1\nrounds = 9\n'
        '[[run]]\nmethod = "smofi"\n[[run]]\nname = "big"\n[run.batching]\nsize = 64\n',
    )
    assert [run.name for run in (first, second, third)] == ["mine/slow", "mine/smofi", "mine/big"]
    assert (first.rounds, first.optimiser.options, second.rounds, third.rounds) == (9, {"lr": 0.1}, 7, 7)
    assert (second.method.name, second.optimiser.options, third.batching.size) == ("smofi", {"lr": 0.5}, 64)


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    found = runs_of(
        tmp_path,
        'name = "study"\n[grid]\nmethod = ["fedavg", "sfl_v1"]\nseed = [0, 1]\noptimiser.lr = [0.1, 1.0]\n',
    )
    assert [(run.name, run.seed) for run in found] == [
        *(("study/lr=0.1/fedavg", 0), ("study/lr=1.0/fedavg", 0), ("study/lr=0.1/fedavg", 1)),
        *(("study/lr=1.0/fedavg", 1), ("study/lr=0.1/sfl_v1", 0), ("study/lr=1.0/sfl_v1", 0)),
        *(("study/lr=0.1/sfl_v1", 1), ("study/lr=1.0/sfl_v1", 1)),
    ]
    assert {(run.method.name, run.optimiser.options["lr"]) for run in found} == {
        *(("fedavg", 0.1), ("fedavg", 1.0), ("sfl_v1", 0.1), ("sfl_v1", 1.0)),
    }


def test_values_become_words(tmp_path: Path) -> None:
    def names(text: str) -> list[str]:
        return [run.name for run in runs_of(tmp_path, text)]

    assert names(
        "[grid]\noptimiser.lr = [0.1]\nserver_optimiser = [{ name = 'sgd', lr = 0.2 }]\nmodel = "
        "[{ name = 'mlp', hidden = [8, 4] }]\ndata = ['some/mine.npz']\nper_client = [true]\n",
    ) == ["mine/lr=0.1/server_optimiser=sgd,lr=0.2/model=mlp,hidden=8x4/data=some_mine.npz/per_client=true"]
    both = "server_optimiser = {name = 'sgd', lr = 1}\n[grid]\noptimiser.lr = [1]\nserver_optimiser.lr = [2]"
    assert names(both) == ["mine/optimiser.lr=1/server_optimiser.lr=2"]
    options = "[grid]\nmethod = [{ name = 'smofi', agg = 'uniform' }, 'smofi']"
    assert names(options) == ["mine/smofi,agg=uniform", "mine/smofi"]


def test_entries_a_grid_and_a_recipe_multiply(tmp_path: Path) -> None:
    text = '[[run]]\nname = "a"\n[[run]]\nname = "b"\ncut = 2\n[grid]\npartition.alpha = [0.1, 1.0]\n'
    names = ["mine/alpha=0.1/a", "mine/alpha=1.0/a", "mine/alpha=0.1/b", "mine/alpha=1.0/b"]
    assert [run.name for run in runs_of(tmp_path, text)] == names
    found = runs_of(tmp_path, 'recipe = "digits"\n[grid]\ncut = [1, 2]\n')
    plain = [run.name.removeprefix("digits/") for run in launch.named("digits")]
    assert [run.name for run in found] == [f"mine/cut={cut}/{name}" for name in plain for cut in (1, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nname = 'a'", "mine.toml: run must be a list of tables; write [[run]] above each of them"),
        ("[[run]]\nrounds = 3", 'mine.toml, [[run]] 1 needs a name; write for example name = "first"'),
        ("[[run]]\nname = 'a'\nroundz = 3", "unknown key 'roundz' in mine.toml, [[run]] 1; did you mean 'rounds' or"),
        ("[[run]]\nname = 'a'\n[[run]]\nname = 'a'\ncut = 2", "mine.toml has two runs named mine/a with seed 0; give"),
        ("grid = 3", "mine.toml, [grid] must be a table of lists"),
        ("[grid]\nrounds = 3", "mine.toml, [grid]: rounds = 3 must be a list of values"),
        ("[grid]\nrounds = []", "mine.toml, [grid]: rounds = [] must be a list of values"),
        ("[grid]\nname = ['a']", "mine.toml, [grid]: the names are made from the values; leave name out"),
        ("[grid]\nmethod = ['smof']", "unknown method 'smof' in mine.toml, [grid], [method]; did you mean 'smofi'"),
    ],
)
def test_mistakes_name_their_place(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


def test_all_runs_of_a_file_are_trained_and_compared(say: Any) -> None:  # noqa: F811
    Path("mine.toml").write_text(f"{SMALL}[grid]\nmethod = ['fedavg', 'sfl_v1']\ncut = [1, 2]\n")
    found = say("run", "mine.toml", "--quiet", "--json").json
    assert len(found["runs"]) == 4 and len(found["panels"]) == 2
    folders = sorted(str(path.parent) for path in Path("runs").rglob("metrics.jsonl"))
    assert folders == [f"runs/mine/cut={cut}/{name}/seed-0" for cut in (1, 2) for name in ("fedavg", "sfl_v1")]
    assert say("run", "mine.toml", "--quiet", "--only", "cut=2", "--only", "fedavg", "--overwrite").code == 0


def test_a_run_that_fails_does_not_stop_the_others(say: Any) -> None:  # noqa: F811
    Path("mine.toml").write_text(f"{SMALL}[grid]\ncut = [1, 9, 'head']\nmethod = ['sfl_v1', 'fedavg']\n")
    said = say("run", "mine.toml", "--quiet")
    assert said.code == 2
    reason = "cut 9 is out of range: Sequential has 2 units, so cuts go from 0 to 2: 1 'fc1', 2 'head'."
    assert said.err.split("error: ")[1] == (
        f"2 of 6 runs failed:\nmine/cut=9/sfl_v1: {reason}\nmine/cut=9/fedavg: {reason}\n"
    )
    folders = sorted(str(path.parent) for path in Path("runs").rglob("metrics.jsonl"))
    assert folders == [f"runs/mine/cut={cut}/{name}/seed-0" for cut in (1, "head") for name in ("fedavg", "sfl_v1")]
    assert "fedavg" in said.out  # those that have ended are compared
    Path("one.toml").write_text(f"{SMALL}cut = 9\n")
    assert mistake(say("run", "one.toml", "--quiet")) == reason


def test_a_bug_is_reported_like_a_mistake(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def broken(run: Run, *args: Any, **options: Any) -> None:
        raise RuntimeError(f"no memory for {run.name}")

    Path("mine.toml").write_text(f"{SMALL}[grid]\ncut = [1, 2]\n")
    monkeypatch.setattr(launch, "execute", broken)
    said = say("run", "mine.toml", "--quiet")
    assert (said.code, said.out) == (2, "")
    assert said.err.split("error: ")[1] == (
        "2 of 2 runs failed:\nmine/cut=1: RuntimeError: no memory for mine/cut=1\n"
        "mine/cut=2: RuntimeError: no memory for mine/cut=2\n"
    )


def test_a_server_serves_one_run(say: Any) -> None:  # noqa: F811
    Path("mine.toml").write_text(f"{SMALL}[grid]\ncut = [1, 2]\n")
    assert mistake(say("serve", "mine.toml", "--insecure")) == (
        "mine.toml has 2 runs, and a server serves one; write the one you mean in a TOML file"
    )


def test_runs_do_not_share_a_folder(say: Any) -> None:  # noqa: F811
    Path("mine.toml").write_text(f"{SMALL}[[run]]\nname = 'a'\n[[run]]\nname = 'b'\noptimiser.lr = 0.5\n")
    assert mistake(say("run", "mine.toml", "--set", "name=foo", "--dry-run")) == (
        "two runs are called foo and have seed 0, so they would share a folder; keep one of them with --only, or leave "
        "out --set name"
    )
    assert say("run", "mine.toml", "--set", "name=foo", "--only", "b", "--dry-run").code == 0
    Path("seeds.toml").write_text(f"{SMALL}[grid]\nseed = [0, 1]\n")
    assert mistake(say("run", "seeds.toml", "--seeds", "2", "--quiet")) == (
        "two runs are called seeds and have seed 1, so they would share a folder; leave out --seeds, or the seeds in "
        "the file"
    )
    assert not Path("runs").exists()


def test_the_figure_keeps_the_order_of_the_file(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Whatever was trained last: its order decides who comes first in the legend, and whose line is wide."""
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        figures, "draw", lambda found, path: drawn.append([g.label for panel in found.panels for g in panel.groups])
    )
    runs = "".join(f"[[run]]\nmethod = '{name}'\n" for name in ("sfl_v2", "fedavg", "sl"))
    Path("mine.toml").write_text(SMALL + runs)
    for scale in ([], ["--scale", "0.5"]):
        whole = ["run", "mine.toml", "--quiet", *scale]
        assert say(*whole).code == 0
        assert say(*whole, "--only", "sl", "--overwrite").code == 0
        assert drawn == [["sfl_v2", "fedavg", "sl"]] * 2
        drawn.clear()
