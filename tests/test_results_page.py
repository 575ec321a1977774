"""The page of results says what hand-made metrics files say, and the page in docs is what the script writes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from cutlayer import config, recipes
from cutlayer.folder import Folder

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import results_page

    return results_page


def left(root: Path, name: str, accuracies: Sequence[float], hours: float | None = None, rounds: int = 0) -> None:
    """The folder of a run of a recipe with these accuracies, whose rounds take so many simulated hours, if told."""
    run = next(run for run in recipes.runs(name.partition("/")[0]) if run.name == name)
    folder = Folder(root / name / "seed-0")
    folder.path.mkdir(parents=True)
    folder.config.write_text(config.dumps(replace(run, rounds=rounds or len(accuracies), device="cuda", engine="vmap")))
    folder.environment.write_text(json.dumps({"torch": "2.9", "machine": "x86_64", "engine": "vmap"}))
    (folder.path / "machine.txt").write_text("A GPU\n")
    lines = [
        {"round": number, "loss": 1.0, "samples": 64 * number, "bytes": {"up_model": number}, "test_accuracy": accuracy}
        | ({} if hours is None else {"simulated_seconds": 3600 * hours * number})
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.timing.write_text("".join(json.dumps({"round": n + 1, "seconds": 0.5}) + "\n" for n in range(len(lines))))


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
        "paper's best %": "77.16 ± 0.11",
        "points above FedAvg": "–",
        "paper's": "–",
        "wall s a round": "0.50",
        "client steps a s": "4",  # 64 samples in half a second, 32 a step
        "R to 54.00 % (ours)": "4",  # 0.9 × 60
        "R to 69.44 % (paper's)": ">4",  # 0.9 × 77.16
        "paper's R": "258",
        "speed-up": "1.00×",
        "paper's speed-up": "1.00×",
    }
    assert (slowmo["rounds"], slowmo["in round"], slowmo["R to 54.00 % (ours)"]) == ("3", "2", "2")
    assert (smofi["points above FedAvg"], smofi["paper's"]) == ("+10.00", "+4.66")  # 81.82 - 77.16
    assert (smofi["R to 54.00 % (ours)"], smofi["R to 69.44 % (paper's)"], smofi["speed-up"]) == ("2", "3", "2.00×")


def test_the_text_tells_how_it_was_made_and_where_it_differs(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.6])
    left(tmp_path, "smofi_table1/cifar10/fedavgm", [0.2, 0.5])
    left(tmp_path, "smofi_table1/cifar10/smofi", [0.3, 0.7], rounds=3)
    text = section(results_page.page(results_page.panels(tmp_path)), "smofi_table1/cifar10")
    assert "$ python bench/headline.py --data DATA --runs RUNS --device cuda --engine vmap" in text
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
    assert "- `smofi` had 2 of 3 rounds when its time was up.\n" in text
    assert "- The paper names no augmentation: none is used" in text
    assert "- Not run: slowmo, fednag, fedprox, " in text


def test_simulated_hours_compare_as_ratios(results_page: ModuleType, tmp_path: Path) -> None:
    left(tmp_path, "smofi_table2/cifar10/fedavg", [0.2, 0.6], hours=0.5)
    left(tmp_path, "smofi_table2/cifar10/sfl_v1-step", [0.2, 0.3], hours=0.75)
    left(tmp_path, "smofi_table2/cifar10/smofi", [0.3, 0.7], hours=0.25)
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, step, smofi = rows(page, "smofi_table2/cifar10")
    assert (fedavg["simulated h to 54.00 %"], fedavg["paper's h"]) == ("1.00", "–")
    assert (step["simulated h to 54.00 %"], step["paper's h"]) == (">1.50", ">551.62")
    assert (step["h a round ÷ smofi's"], step["paper's ÷"]) == ("3.00×", "1.06×")  # 551.62 / 1000 over 29.02 / 56
    assert (smofi["simulated h to 54.00 %"], smofi["paper's h"], smofi["R to 69.44 % (paper's)"]) == (
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
    assert "smofi_table2/cifar10/fedavg \\\n" in text  # in the command
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
        "paper's best %": "92.30 ± 0.15",
        "wall s a round": "0.50",
        "client steps a s": "2",  # of 64 samples
    }
    assert last["paper's best %"] == "87.57 ± 0.34"
    text = section(page, "cut_table3_as_run/cifar10")
    assert "- sfl_v2 from cut1 to cut3: -20.00 points, in the paper -4.73.\n" in text
    assert "- The paper says: SFL-V1 hardly depends on the cut" in text
    assert "target" not in text.lower()


def test_the_page_has_its_curves(
    results_page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path / "runs", "smofi_table1/cifar10/fedavg", [0.2, 0.6])
    page = tmp_path / "results.md"
    monkeypatch.setattr("sys.argv", ["results_page.py", "--results", str(tmp_path / "runs"), "--page", str(page)])
    results_page.main()
    assert capsys.readouterr().out == f"{page}: 1 tables\n"
    picture = "images/results-smofi_table1-cifar10.png"
    assert f"]({picture})" in page.read_text(encoding="utf-8")
    assert (tmp_path / picture).stat().st_size > 10_000


def test_the_page_in_docs_is_what_the_script_writes(results_page: ModuleType) -> None:
    if not results_page.RESULTS.is_dir():
        pytest.skip("needs bench/results/headline")
    found = results_page.panels(results_page.RESULTS)
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.page(found)
    for panel in found:
        assert (results_page.PAGE.parent / results_page.picture(panel)).is_file()
    size = sum(path.stat().st_size for path in (ROOT / "bench" / "results").rglob("*") if path.is_file())
    assert size < 3 * 2**20
