"""The page of results says what hand-made metrics files say, and the page in docs is what the script writes."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import headline
import pytest
import results_page

from cutlayer import recipes
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder


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
    """The rows of the tables below the heading of a panel, put side by side; keys of differences begin with Δ."""
    tables = [block for block in section(page, panel).split("\n\n") if block.startswith("|")]
    found: dict[str, dict[str, str]] = {}
    for block in tables:
        head, _, *lines = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        mark = "Δ " if head[1].startswith("points above ") else ""
        for line in lines:
            own = dict(zip(head[1:], line[1:], strict=True))
            found.setdefault(line[0], {"run": line[0]}).update({mark + key: cell for key, cell in own.items()})
    return list(found.values())


def section(page: str, panel: str) -> str:
    return page.partition(f": {panel}\n")[2].partition("\n## ")[0]


def test_ours_stand_beside_the_published_numbers(tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/smofi", [0.3, 0.6, 0.7, 0.65])
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.4, 0.5, 0.6])
    left(tmp_path, "smofi_table1/cifar10/slowmo", [0.2, 0.55, 0.5])
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, slowmo, smofi = rows(page, "smofi_table1/cifar10")  # as the recipe has them
    assert fedavg == {
        "run": "`fedavg`",
        "seeds": "0",
        "rounds": "4 of 1,000",
        **{f"rounds {n}": f"{percent}.00" for n, percent in ((1, 20), (2, 40), (3, 50), (4, 60))},
        "paper's best % (± over seeds)": "77.16 ± 0.11",
        "traffic, GiB a round": "1.00",
        "wall s a round (mean)": "30.50",
        "samples a s (median)": "128",  # 64 in half a second, in rounds 2 and 4
        "paper's R": "258",
        "paper's speed-up": "1.00×",
    }
    assert (slowmo["rounds"], slowmo["rounds 3"], slowmo["rounds 4"]) == ("3 of 1,000", "50.00", "–")
    assert "R to 69.44 %, mean curve" not in smofi  # 0.9 × 77.16; one seed has no mean curve


def test_windows_have_means_over_rounds_and_seeds_with_their_scatter(tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.1] * 20 + [0.4, 0.6] * 10)
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.3] * 20 + [0.5, 0.7] * 10, seed=1)
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2] * 20 + [0.4, 0.6] * 5, seed=2)
    (fedavg,) = rows(results_page.page(results_page.panels(tmp_path)), "smofi_table1/cifar10")
    assert (fedavg["seeds"], fedavg["rounds"]) == ("0, 1, 2", "30–40 of 1,000")
    # The variance over seeds of 10, 30 and 20 is 100; five rounds of 40 and five of 60 have one of 1000 / 9.
    assert fedavg["rounds 1–10"] == "20.00 ± 10.00 (0.00)"
    assert fedavg["rounds 21–30"] == "53.33 ± 5.77 (10.54)"  # 50, 60 and 50
    assert fedavg["rounds 31–40"] == "55.00 ± 7.07 (10.54), 2 seeds"


def test_with_one_seed_nothing_is_concluded(tmp_path: Path) -> None:
    left(tmp_path, "smofi_table2/cifar10/fedavg", [0.2, 0.5, 0.8], hours=0.5)
    left(tmp_path, "smofi_table2/cifar10/smofi", [0.3, 0.9, 0.9], hours=0.5)
    left(tmp_path, "cut_table3_as_run/cifar10/sfl_v2-cut1", [0.2, 0.9])
    left(tmp_path, "cut_table3_as_run/cifar10/sfl_v2-cut3", [0.2, 0.7])
    page = results_page.page(results_page.panels(tmp_path))
    for panel in ("smofi_table2/cifar10", "cut_table3_as_run/cifar10"):
        text = section(page, panel)
        assert "- No two runs have two seeds in common yet: the numbers show how each run went, and nothing is" in text
        assert " above fedavg" not in text and " from cut1" not in text and "| speed-up |" not in text


def test_two_seeds_say_by_how_much_runs_differ(tmp_path: Path) -> None:
    for seed, gain in ((0, 0.1), (1, 0.2)):
        left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, *[0.5] * 28, *[0.8] * 11], seed=seed)
        left(tmp_path, "smofi_table1/cifar10/smofi", [0.2, *[0.6] * 9, *[0.7 + gain] * 20], seed=seed)
    page = results_page.page(results_page.panels(tmp_path))
    _, smofi = rows(page, "smofi_table1/cifar10")
    assert smofi["Δ points above fedavg, seeds"] == "0, 1"
    assert [smofi[f"Δ rounds {window}"] for window in ("1–10", "11–20")] == ["+9.00 ± 0.00", "+35.00 ± 7.07"]
    assert smofi["Δ rounds 21–30"] == "+32.00 ± 7.07" and "Δ rounds 31–40" not in smofi  # smofi has 30 rounds
    assert smofi["Δ paper's, by best rounds"] == "+4.66"
    # The mean of ten rounds reaches 69.44 % in round 15 (4 of 60 % and 6 of 85 % make 75) and in round 37.
    by_ten = [smofi[f"{what}, by the mean of 10 rounds"] for what in ("R", "speed-up")]
    assert (smofi["R to 69.44 %, mean curve"], *by_ten) == ("11", "14", "2.57×")
    assert (
        "- smofi above fedavg in rounds 21–30: +32.00 ± 7.07 points over 2 seeds; significant in rounds 1–10, of 3 "
        "windows compared (95 % over all, Student's t); in the paper, by best rounds, +4.66.\n"
        in section(page, "smofi_table1/cifar10")
    )
    assert "nothing is concluded" not in page


def test_runs_of_old_initial_weights_are_marked_and_compared_with_no_others(tmp_path: Path) -> None:
    he = Choice("resnet18", {"init": "he"})
    for seed in (0, 1):
        left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.7], seed=seed)
        left(tmp_path, "smofi_table1/cifar10/smofi", [0.3, 0.8], seed=seed, model=he)
        left(tmp_path, "smofi_table1/cifar10/fedavgm", [0.3, 0.9], seed=seed)
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, fedavgm, smofi = rows(page, "smofi_table1/cifar10")
    assert [row["run"] for row in (fedavg, smofi)] == ["`fedavg`", "`smofi (init he)`"]
    assert "Δ rounds 2" not in smofi and fedavgm["Δ rounds 2"] == "+20.00 ± 0.00"
    text = section(page, "smofi_table1/cifar10")
    assert "- model.init he instead of torch (`smofi (init he)`): older records have He's initial weights; " in text
    assert "| smofi_table1/cifar10 | 3 of 15, 1 with old initial weights | 2 | 2 of 1,000 |\n" in page
    assert "--set 'model.init=\"he\"'" in text


def test_a_seed_that_has_just_begun_hides_nothing(tmp_path: Path) -> None:
    for seed, rounds in ((0, 30), (1, 30), (2, 3)):
        left(tmp_path, "smofi_table2/cifar10/smofi", [0.2] * 4 + [0.8] * (rounds - 4) or [0.2], hours=0.5, seed=seed)
    (smofi,) = rows(results_page.page(results_page.panels(tmp_path)), "smofi_table2/cifar10")
    assert smofi["R to 69.44 %, mean curve"] == "5 (2 seeds)"
    # Eight of ten rounds at 80 % and two at 20 % make 68, nine make 74.
    assert smofi["R, by the mean of 10 rounds"] == "13 (2 seeds)"
    assert smofi["simulated h to 69.44 %, by the mean of 10 rounds"] == "6.50"


def test_runs_of_one_name_that_differ_have_labels_of_their_own(tmp_path: Path) -> None:
    for seed, init in ((0, "he"), (1, "torch"), (2, "torch")):
        model = Choice("resnet18", {"init": init})
        left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.9 if init == "he" else 0.7], seed=seed, model=model)
        left(tmp_path, "smofi_table1/cifar10/smofi", [0.2, 0.8], seed=seed)
    page = results_page.page(results_page.panels(tmp_path))
    assert str(tmp_path) not in page
    shown = {row["run"]: row.get("Δ rounds 2") for row in rows(page, "smofi_table1/cifar10")}
    assert shown == {"`fedavg (init he)`": None, "`fedavg`": None, "`smofi`": "+10.00 ± 0.00"}


def test_runs_that_end_by_samples_are_told_by_samples(tmp_path: Path) -> None:
    for seed in (0, 1):
        for name, accuracies in (("sfl_v1", [0.2, 0.4, 0.6]), ("hosfl", [0.3, 0.5 + seed / 10])):
            ends = 64 * len(accuracies)
            left(tmp_path, f"hosfl_cifar10/cifar10-iid/{name}", accuracies, seed=seed, rounds=500, until_samples=ends)
    page = results_page.page(results_page.panels(tmp_path))
    text = section(page, "hosfl_cifar10/cifar10-iid")
    assert "when it was stopped" not in text
    first, last = rows(page, "hosfl_cifar10/cifar10-iid")
    assert (first["samples"], last["samples"]) == ("192", "128")
    assert (last["samples 51–100"], last["samples 101–150"]) == ("30.00 ± 0.00", "–")
    assert "- hosfl above sfl_v1 in samples 51–100: +10.00 ± 0.00 points over 2 seeds; " in text  # 30 and 20
    assert "| hosfl_cifar10/cifar10-iid | 2 of 5 | 2 | 128–192 |\n" in page


def test_the_text_tells_how_it_was_made_and_where_it_differs(tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.6, 0.7])
    left(tmp_path, "smofi_table1/cifar10/smofi", [0.3, 0.7], rounds=3)
    (tmp_path / "smofi_table1/cifar10/smofi/seed-0/remarks.txt").write_text("the fan was off.\n")
    page = results_page.page(results_page.panels(tmp_path), recipes.runs("cut_table4_as_run"))
    text = section(page, "smofi_table1/cifar10")
    assert "A GPU, torch 2.9, engine vmap, fp32.\n" in text
    assert "- 1 of 3 seeds.\n" in text
    assert "- Ours are the first rounds of the recipe's runs, for want of time on a machine; " in text
    assert "- `smofi` had 2 of 3 rounds when it was stopped.\n" in text
    assert "- `fedavg` was stopped and resumed before round 3.\n" in text
    assert "- `smofi` has a remark: the fan was off.\n" in text
    assert "- Not run: fedavgm, slowmo, fednag, fedprox, " in text
    assert "\n| cut_table4_as_run/ham10000 | none yet | – | – |\n" in page


def test_simulated_hours_compare_as_ratios(tmp_path: Path) -> None:
    for seed, slower in ((0, 1), (1, 3)):
        left(tmp_path, "smofi_table2/cifar10/fedavg", [0.2] * 12, hours=0.5, seed=seed)
        left(tmp_path, "smofi_table2/cifar10/sfl_v1-step", [0.2] * 9, hours=0.75 * slower, seed=seed)
        left(tmp_path, "smofi_table2/cifar10/smofi", [0.8] * 12, hours=0.25, seed=seed)
    left(tmp_path, "smofi_table2/cifar10/mergesfl", [0.2] * 12, hours=0.5)
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, step, merge, smofi = rows(page, "smofi_table2/cifar10")
    to = "simulated h to 69.44 %, by the mean of 10 rounds"
    assert (fedavg[to], fedavg["paper's h, on its devices"]) == (">6.00", "–")
    assert (step[to], step["paper's h, on its devices"]) == ("–", ">551.62")  # nine rounds have no mean of ten
    ratio = "h a round ÷ smofi's"
    assert (step[ratio], step[f"paper's {ratio}"]) == ("6.00×", "1.06×")  # 3 and 9; 551.62 / 1000 over 29.02 / 56
    assert (smofi[to], smofi[ratio], smofi["paper's h, on its devices"]) == ("2.50", "1.00×", "29.02")
    assert merge[ratio] == "–"  # one seed


def test_a_run_with_devices_serves_the_table_without_them(tmp_path: Path) -> None:
    for seed in (0, 1):
        left(tmp_path, "smofi_table2/cifar10/fedavg", [0.2, 0.5 + seed / 10], hours=0.5, seed=seed)
    left(tmp_path, "smofi_table2/cifar10/mergesfl", [0.2, 0.6], hours=0.5)
    left(tmp_path, "smofi_table1/cifar10/fedavgm", [0.2, 0.7])
    page = results_page.page(results_page.panels(tmp_path))
    fedavg, _ = rows(page, "smofi_table1/cifar10")
    assert (fedavg["run"], fedavg["rounds 2"]) == ("`fedavg`", "55.00 ± 7.07")
    assert not any("simulated" in head for head in fedavg)
    text = section(page, "smofi_table1/cifar10")
    assert "`fedavg` is the run smofi_table2/cifar10/fedavg, whose content is the same." in text
    assert "devices" not in text.partition("Where ours differs")[2]


def test_a_longer_run_serves_a_table_of_fewer_rounds(tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/tiny/smofi", [0.2] * 160)
    left(tmp_path, "smofi_fig5/resnet34/fedavg", [0.2] * 2)
    found = {panel.name: panel for panel in results_page.panels(tmp_path)}
    lengths = {group.label: group.rounds for group in found["smofi_fig5/resnet34"].groups}
    assert lengths == {"fedavg": (2,), "smofi": (150,)}  # as long as the figure's runs


def test_cuts_are_set_against_each_other(tmp_path: Path) -> None:
    left(tmp_path, "cut_table3_as_run/cifar10/sfl_v2-cut2", [0.2, 0.6])
    for seed in (0, 1):
        left(tmp_path, "cut_table3_as_run/cifar10/sfl_v2-cut1", [0.2, 0.9], seed=seed)
        left(tmp_path, "cut_table3_as_run/cifar10/sfl_v2-cut3", [0.2, 0.7 + seed / 10], seed=seed)
    page = results_page.page(results_page.panels(tmp_path))
    first, _, last = rows(page, "cut_table3_as_run/cifar10")
    assert (first["rounds 2"], first["paper's best % (± over seeds)"]) == ("90.00 ± 0.00", "92.30 ± 0.15")
    assert (last["rounds 2"], last["paper's best % (± over seeds)"]) == ("75.00 ± 7.07", "87.57 ± 0.34")
    text = section(page, "cut_table3_as_run/cifar10")
    assert "- sfl_v2 from cut1 to cut3 in rounds 2: -15.00 ± 7.07 points over 2 seeds; significant " in text
    assert "in none of 2 windows compared (95 % over all, Student's t); in the paper, by best rounds, -4.73.\n" in text


def test_the_commands_on_the_page_repeat_the_runs(tmp_path: Path) -> None:
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


def test_a_run_without_an_evaluated_round_has_dashes(tmp_path: Path) -> None:
    left(tmp_path, "smofi_table1/cifar10/fedavg", [0.2, 0.6])
    left(tmp_path, "smofi_table1/cifar10/smofi", [None])
    _, smofi = rows(results_page.page(results_page.panels(tmp_path)), "smofi_table1/cifar10")
    assert (smofi["rounds 1"], smofi["samples a s (median)"]) == ("–", "–")


def test_runs_of_no_recipe_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_folder_without_results_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results_page.main(["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: there is no run under {tmp_path}; ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_in_docs_is_what_the_script_writes(tmp_path: Path) -> None:
    """To the byte, with its curves, from the files in the repository alone."""
    results_page.written(results_page.RESULTS, tmp_path / "results.md", results_page.QUEUE)
    names = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(names) > 1
    for name in names:
        assert (tmp_path / name).read_bytes() == (results_page.PAGE.parent / name).read_bytes(), name
