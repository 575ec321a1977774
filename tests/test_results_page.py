"""The page of results says what hand-made metrics files say, and the page in docs is what the script writes."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cutlayer import config, recipes
from cutlayer.config import Choice, Run
from cutlayer.folder import Folder

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import results_page

    return results_page


def left(
    root: Path, name: str, accuracies: Sequence[float | None], /, hours: float | None = None, **changes: Any
) -> Run:
    """Leave the folder of a recipe's run with these accuracies, whose rounds take so many simulated hours, if told.

    Each round sends a GiB up and takes half a second, and a minute more where it begins a session, as the third does.
    """
    original = next(run for run in recipes.runs(name.partition("/")[0]) if run.name == name)
    given = {"rounds": len(accuracies), "device": "cuda", "engine": "vmap", **changes}
    run = replace(original, **given)
    folder = Folder(root / name / f"seed-{run.seed}")
    folder.path.mkdir(parents=True)
    folder.config.write_text(config.dumps(run))
    folder.environment.write_text(json.dumps({"torch": "2.9", "machine": "x86_64", "gpu": "A GPU", "engine": "vmap"}))
    lines = [
        {"round": number, "loss": 1.0, "samples": 64 * number, "bytes": {"up_model": number * 2**30}}
        | ({} if accuracy is None else {"test_accuracy": accuracy})
        | ({} if hours is None else {"simulated_seconds": 3600 * hours * number})
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    times = [{"round": n + 1, "seconds": 60.5 if n in (0, 2) else 0.5} for n in range(len(lines))]
    for file, content in ((folder.metrics, lines), (folder.timing, times)):
        file.write_text("".join(json.dumps(line) + "\n" for line in content))
    (folder.path / "sessions.jsonl").write_text('{"round": 1}\n{"round": 3}\n')
    return run


def said(page: str) -> list[list[str]]:
    """The words of the commands on a page, after the name of the script."""
    blocks = [block.partition("```")[0] for block in page.replace("\\\n", "").split("```console\n")[1:]]
    return [shlex.split(command)[2:] for block in blocks for command in block.split("$ ")[1:]]


def rows(page: str, panel: str) -> list[dict[str, str]]:
    """The rows of the tables below the heading of a panel, put side by side."""
    tables = [block for block in section(page, panel).split("\n\n") if block.startswith("|")]
    read = [[[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()] for block in tables]
    parts = [[dict(zip(lines[0], line, strict=True)) for line in lines[2:]] for lines in read]
    return [{k: v for part in row for k, v in part.items()} for row in zip(*parts, strict=True)]


def section(page: str, panel: str) -> str:
    return page.partition(f": {panel}\n")[2].partition("\n## ")[0]


def test_ours_stand_beside_the_published_numbers(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/smofi", [0.3, 0.6, 0.7, 0.65])
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.4, 0.5, 0.6])
    left(tmp_path, "smofi_table1/cifar10/slowmo", [0.2, 0.55, 0.5])
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, slowmo, smofi = rows(page, "smofi_table1/cifar10")  # as the recipe has them
    assert fedavg == {
        "run": "`fedavg`",
        "rounds": "4",
        "best %": "60.00",
        "in round": "4",
        "paper's best % (± over seeds)": "77.16 ± 0.11",
        "points above FedAvg": "–",
        "paper's": "–",
        "traffic, GiB a round": "1.00",
        "wall s a round (mean)": "30.50",
        "samples a s (median)": "128",  # 64 in half a second, in rounds 2 and 4
        "R to 54.00 % (ours)": "4",  # 0.9 × 60
        "R to 69.44 % (paper's)": ">4",  # 0.9 × 77.16
        "paper's R": "258",
        "speed-up to 54.00 %": "1.00×",
        "paper's speed-up": "1.00×",
    }
    assert (slowmo["rounds"], slowmo["in round"], slowmo["R to 54.00 % (ours)"]) == ("3", "2", "2")
    assert (smofi["points above FedAvg"], smofi["paper's"]) == ("+10.00", "+4.66")  # 81.82 - 77.16
    assert (smofi["R to 54.00 % (ours)"], smofi["R to 69.44 % (paper's)"], smofi["speed-up to 54.00 %"]) == (
        "2",
        "3",
        "2.00×",
    )


def test_the_last_rounds_of_long_runs_tell_how_much_one_says(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.1] * 20 + [0.4, 0.6] * 5)
    left(tmp_path, "smofi_table1/cifar10/smofi", [0.1] * 19 + [0.4, 0.6] * 5)
    fedavg, smofi = rows(results_page.page(results_page.panels(tmp_path)), "smofi_table1/cifar10")
    # Five at 0.4 and five at 0.6: the variance is 10 × 0.01 / 9.
    assert [row["last 10 rounds % (± over rounds)"] for row in (fedavg, smofi)] == ["50.00 ± 10.54", "–"]


def test_an_order_within_the_scatter_of_rounds_says_little(results_page: ModuleType, tmp_path: Path) -> None:
    said = []
    for folder, best in ((tmp_path / "near", 0.65), (tmp_path / "far", 0.8)):
        left(folder, "smofi_table1/cifar10/fedavg", [0.1] * 20 + [0.4, 0.6] * 5)  # a deviation of 10.5 points
        left(folder, "smofi_table1/cifar10/smofi", [0.1] * 20 + [0.4, best] * 5)  # of 13.2, or of 21.1
        said.append("the order says little" in results_page.page(results_page.panels(folder)))
    assert said == [True, False]


def test_a_base_that_is_much_faster_than_the_papers_is_told_of(results_page: ModuleType, tmp_path: Path) -> None:
    pages = []
    for folder, until in ((tmp_path / "faster", 9), (tmp_path / "as fast", 199)):
        left(folder, "smofi_table1/cifar10/fedavg", [0.5] * until + [0.7])
        left(folder, "smofi_table1/cifar10/fedavgm", [0.6] * 10)
        left(folder, "smofi_table1/cifar10/smofi", [0.5] * 6 + [0.7] * 4)
        pages.append(results_page.page(results_page.panels(folder)))
    assert "- So the paper's advantage is not seen here" in pages[0]  # equal best rounds
    told = "- Rounds to 69.44 %, ours as a share of the paper's: fedavg 0.04, smofi 0.12. "  # 10 / 258 and 7 / 56
    assert [told in page for page in pages] == [True, False]


def test_a_run_that_is_a_base_of_its_own_says_so(results_page: ModuleType, tmp_path: Path) -> None:
    for name in ("fedavg", "fedprox"):
        left(tmp_path, f"smofi_table1/cifar10/{name}", (0.5, 0.8))
    assert "Speed-ups of fedprox are over themselves" in results_page.page(results_page.panels(tmp_path))


def test_the_text_tells_how_it_was_made_and_where_it_differs(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.6])
    left(tmp_path, "smofi_table1/cifar10/fedavgm", [0.2, 0.5])
    left(tmp_path, "smofi_table1/cifar10/smofi", [0.3, 0.7], rounds=3)
    text = section(results_page.page(results_page.panels(tmp_path)), "smofi_table1/cifar10")
    assert "$ python bench/headline.py --runs runs --device cuda --engine vmap --precision fp32 --seed 0 \\\n" in text
    assert "smofi_table1/cifar10/fedavg:2 \\\n" in text
    assert "smofi_table1/cifar10/smofi:3\n" in text
    assert "Seed 0. A GPU, torch 2.9, engine vmap, fp32.\n" in text
    assert "- By best accuracy, ours: smofi > fedavg > fedavgm.\n" in text
    assert "- By best accuracy, the paper's: smofi > fedavgm > fedavg.\n" in text
    assert "- Of 3 pairs of runs, 2 are in the paper's order.\n" in text
    assert "- Our target is 0.9 × the best accuracy of fedavg, here 54.00 %; the paper's is 69.44 %.\n" in text
    assert "- Runs that reach 69.44 % within 2 rounds: ours smofi (2); the paper's none.\n" in text
    assert "- 1 seed; the paper averages three.\n" in text
    assert "- rounds 2 instead of 1000: the time on the machine; " in text
    assert "- `smofi` had 2 of 3 rounds when it was stopped.\n" in text
    assert "- The paper names no augmentation: none is used" in text
    assert "- Not run: slowmo, fednag, fedprox, " in text


def test_simulated_hours_compare_as_ratios(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table2/cifar10/fedavg", [0.2, 0.6], hours=0.5)
    left(tmp_path, "smofi_table2/cifar10/sfl_v1-step", [0.2, 0.3], hours=0.75)
    left(tmp_path, "smofi_table2/cifar10/smofi", [0.3, 0.7], hours=0.25)
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, step, smofi = rows(page, "smofi_table2/cifar10")
    assert (fedavg["simulated h to 54.00 %"], fedavg["paper's h, on its devices"]) == ("1.00", "–")
    assert (step["simulated h to 54.00 %"], step["paper's h, on its devices"]) == (">1.50", ">551.62")
    assert (step["h a round ÷ smofi's"], step["paper's ÷"]) == ("3.00×", "1.06×")  # 551.62 / 1000 over 29.02 / 56
    assert (smofi["simulated h to 54.00 %"], smofi["paper's h, on its devices"], smofi["R to 69.44 % (paper's)"]) == (
        "0.50",
        "29.02",
        "2",
    )


def test_a_run_with_devices_serves_the_table_without_them(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table2/cifar10/fedavg", [0.2, 0.6], hours=0.5)
    left(tmp_path, "smofi_table2/cifar10/mergesfl", [0.2, 0.6], hours=0.5)
    left(tmp_path, "smofi_table1/cifar10/fedavgm", [0.2, 0.7])
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, fedavgm = rows(page, "smofi_table1/cifar10")
    assert (fedavg["run"], fedavg["best %"], fedavgm["points above FedAvg"]) == ("`fedavg`", "60.00", "+10.00")
    assert not any("simulated" in head for head in fedavg)
    text = section(page, "smofi_table1/cifar10")
    assert "`fedavg`: trained with simulated devices, which change nothing but the clock." in text
    assert "smofi_table2/cifar10/fedavg:2 \\\n" in text  # in the command
    assert "devices" not in text.partition("Where ours differs")[2]


def test_cuts_are_set_against_each_other(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "cut_table3_as_run/cifar10/sfl_v2-cut1", [0.2, 0.9])
    left(tmp_path, "cut_table3_as_run/cifar10/sfl_v2-cut3", [0.2, 0.7])
    page = results_page.page(results_page.panels(tmp_path))
    first, last = rows(page, "cut_table3_as_run/cifar10")
    assert first == {
        "run": "`sfl_v2-cut1`",
        "rounds": "2",
        "best %": "90.00",
        "in round": "2",
        "paper's best % (± over seeds)": "92.30 ± 0.15",
        "traffic, GiB a round": "1.00",
        "wall s a round (mean)": "30.50",
        "samples a s (median)": "128",
    }
    assert last["paper's best % (± over seeds)"] == "87.57 ± 0.34"
    text = section(page, "cut_table3_as_run/cifar10")
    assert "- sfl_v2 from cut1 to cut3: -20.00 points after 2 rounds, in the paper -4.73 at its end.\n" in text
    assert "- The paper says: SFL-V1 hardly depends on the cut" in text
    assert "target" not in text.lower()


def test_every_seed_serves_the_second_table(results_page: ModuleType, tmp_path: Path) -> None:
    for seed in (0, 1):
        left(tmp_path, "smofi_table2/cifar10/fedavg", [0.2, 0.5 + seed / 10], hours=0.5, seed=seed)
    left(tmp_path, "smofi_table1/cifar10/fedavgm", [0.2, 0.7])
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, _ = rows(page, "smofi_table1/cifar10")
    assert fedavg["best %"] == "55.00 ± 7.07"


def test_the_commands_on_the_page_repeat_the_runs(results_page: ModuleType, tmp_path: Path) -> None:
    import headline

    kept = [
        left(tmp_path, "digits/fedavg", [0.2, 0.6]),
        left(tmp_path, "digits/fedavg", [0.2, 0.5, 0.6], seed=1),
        left(tmp_path, "digits/sl", [0.2], device="cpu", engine="loop", precision="tf32"),
        left(tmp_path, "digits/sfl_v1", [0.2], clients=4, cut="fc1", method=Choice("smofi", {"beta": 0.3})),
        left(tmp_path, "digits/sfl_v2", [0.2], optimiser=Choice("adam", {"lr": 0.1})),  # the same rate as SGD's
        left(
            tmp_path,
            "digits/mergesfl",
            [0.2],
            optimiser=Choice("sgd", {"lr": {"schedule": "cosine", "lr": 0.1, "rounds": 9}}),
        ),
    ]
    page = results_page.page(results_page.panels(tmp_path))
    commands = said(page)
    assert len(commands) == 6
    again = [run for words in commands for run in headline.chosen(headline.parsed(words))]
    same = [replace(run, checkpoint_every=1) for run in again]
    assert sorted(same, key=lambda run: (run.name, run.seed)) == sorted(kept, key=lambda run: (run.name, run.seed))


def test_runs_that_agree_share_a_command(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "digits/fedavg", [0.2, 0.6], checkpoint_every=7)
    left(tmp_path, "digits/sl", [0.2, 0.6, 0.7])
    (words,) = said(results_page.page(results_page.panels(tmp_path)))
    assert words[-3:] == ["0", "digits/fedavg:2", "digits/sl:3"]


def test_runs_of_no_paper_are_told_without_one(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "digits/fedavg", [0.2, 0.6], rounds=3)
    left(tmp_path, "digits/sl", [0.2, 0.7], precision="tf32")
    page = results_page.page(results_page.panels(tmp_path))
    assert "\n## digits\n\n```console\n" in page
    assert "paper" not in page.lower()
    remarks = ("rounds 3 instead of 40", "rounds 2 instead of 40", "precision tf32 instead of fp32")
    stopped = "- `fedavg` had 2 of 3 rounds when it was stopped.\n"
    assert page.endswith(
        "About these runs:\n\n"
        + "".join(f"- {remark}.\n" for remark in remarks)
        + f"{stopped}- Not run: sfl_v1, sfl_v2, mergesfl.\n"
    )


def test_what_somebody_wrote_beside_a_run_and_its_sessions_are_told(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "digits/fedavg", [0.2, 0.6, 0.7])
    left(tmp_path, "digits/sl", [0.2, 0.7])
    (tmp_path / "digits" / "sl" / "seed-0" / "remarks.txt").write_text("the fan was off.\nit was warm.\n")
    page = results_page.page(results_page.panels(tmp_path))
    assert "- `sl`: the fan was off.\n- `sl`: it was warm.\n" in page
    assert "- `fedavg` was stopped and resumed before round 3.\n" in page and "`sl` was stopped" not in page


def test_one_is_told_in_the_singular(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2])
    left(tmp_path, "smofi_table1/cifar10/smofi", [0.3])
    text = section(results_page.page(results_page.panels(tmp_path)), "smofi_table1/cifar10")
    assert "- Of 1 pair of runs, 1 is in the paper's order.\n" in text
    assert "within 1 round: ours none" in text


def test_a_run_without_an_evaluated_round_has_dashes(
    results_page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path / "runs", "smofi_table1/cifar10/fedavg", [0.2, 0.6])
    left(tmp_path / "runs", "smofi_table1/cifar10/smofi", [None])
    left(tmp_path / "runs", "cifar10/fedavg", [None, None])
    page = tmp_path / "page.md"
    assert results_page.main(["--results", str(tmp_path / "runs"), "--page", str(page)]) == 0
    _, smofi = rows(page.read_text(encoding="utf-8"), "smofi_table1/cifar10")
    assert (smofi["best %"], smofi["in round"], smofi["samples a s (median)"]) == ("–", "–", "–")
    assert "| run | rounds | traffic, GiB a round | wall s a round (mean) | samples a s (median) |\n" in page.read_text(
        encoding="utf-8"
    )


def test_the_page_has_its_curves(results_page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left(tmp_path / "runs", "smofi_table1/cifar10/fedavg", [0.2, 0.6])
    page = tmp_path / "new" / "folder" / "results.md"
    assert results_page.main(["--results", str(tmp_path / "runs"), "--page", str(page)]) == 0
    assert capsys.readouterr() == (f"wrote {page}: 1 table; curves in {page.parent / 'images'}\n", "")
    picture = "images/results-smofi_table1-cifar10.png"
    assert f"]({picture})" in page.read_text(encoding="utf-8")
    assert (page.parent / picture).stat().st_size > 10_000


def test_runs_of_no_recipe_are_skipped(
    results_page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path / "runs", "digits/fedavg", [0.2, 0.6])
    for name in ("mine", "digits@0.1/sl"):
        left(tmp_path / name, "digits/sl", [0.2, 0.6], name=name)
    found = results_page.panels(tmp_path)
    assert capsys.readouterr().out == "skipped, as no recipe has them: digits@0.1/sl, mine\n"
    assert [group.run.name for panel in found for group in panel.groups] == ["digits/fedavg"]
    assert results_page.main(["--results", str(tmp_path / "mine"), "--page", str(tmp_path / "page.md")]) == 2
    assert capsys.readouterr().err == (
        f"error: none of the runs under {tmp_path / 'mine'} is of a recipe; bench/headline.py trains such runs\n"
    )


def test_without_results_there_is_one_line(
    results_page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results_page.main(["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: there is no run under {tmp_path}; ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_in_docs_is_what_the_script_writes(results_page: ModuleType) -> None:
    if not results_page.RESULTS.is_dir():
        pytest.skip("needs bench/results/headline")
    found = results_page.panels(results_page.RESULTS)
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.page(found)
    for panel in found:
        assert (results_page.PAGE.parent / results_page.picture(panel)).is_file()
    size = sum(path.stat().st_size for path in (ROOT / "bench" / "results").rglob("*") if path.is_file())
    assert size < 3 * 2**20
