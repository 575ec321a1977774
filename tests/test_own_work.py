"""Specifies that docs/own-work.md works line by line in an empty folder: its files, its commands, what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "own-work.md"
SOURCE = Path(__file__).parents[1] / "src"
BLOCK = re.compile(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = f'cutlayer() {{ "{sys.executable}" -m cutlayer "$@"; }}; python() {{ "{sys.executable}" "$@"; }}\n'
METHODS = ("FedAvg", "SFL-V2", "elastic")


class Said(NamedTuple):
    """A command of the page, the lines that the page shows of its output, and what it printed."""

    command: str
    shown: list[str]
    code: int
    printed: str


def commands(terminal: str) -> list[tuple[str, list[str]]]:
    """The commands of a terminal, each with the lines below it."""
    assert terminal.startswith("$ ")
    first, *lines = (part.splitlines() for part in re.split(r"^\$ ", terminal, flags=re.MULTILINE))
    assert first == []
    return [(command, shown) for command, *shown in lines]


def said(command: str, shown: list[str], folder: Path) -> Said:
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONPATH": paths}
    ran = subprocess.run(
        ["bash", "-c", SHELL + command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return Said(command, shown, ran.returncode, ran.stderr + ran.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own-work")


@pytest.fixture(scope="module")
def done(folder: Path) -> list[Said]:
    """Follow the page from top to bottom."""
    found = []
    for name, language, content in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        assert bool(name) == (language != "console"), f"a block is a file or a terminal: {content}"
        if name:
            (folder / name).write_text(content, encoding="utf-8")
        else:
            found += [said(command, shown, folder) for command, shown in commands(content)]
    return found


def shape(line: str) -> str:
    """A line without its numbers, which depend on the machine to rounding, and without the widths of its columns."""
    plain = re.sub(r"\\textbf\{(.*?)\}", r"\1", line).replace("$-$", "-")
    return " ".join(re.sub(r"[-+]?\d[\d.–]*", "0", plain).split())


def test_every_command_of_the_page_succeeds(done: list[Said]) -> None:
    assert [(one.command, one.printed) for one in done if one.code] == []
    assert [one.command.split()[:2] for one in done].count(["cutlayer", "compare"]) == 3


def test_what_the_page_shows_is_printed_in_this_order(done: list[Said]) -> None:
    for one in done:
        printed = iter([shape(line) for line in one.printed.splitlines()])
        for line in one.shown:
            assert line == "..." or shape(line) in printed, (line, one.printed)


def test_nobody_is_warned(done: list[Said]) -> None:
    assert [one.printed for one in done if "warning" in one.printed.lower()] == []


def test_all_methods_and_seeds_are_in_the_table(done: list[Said], folder: Path) -> None:
    table = (folder / "table.tex").read_text(encoding="utf-8")
    body = table.partition("\\midrule\n")[2].partition("  \\bottomrule")[0]
    assert table.count("\\begin{tabular}") == table.count("\\toprule") == table.count("\\end{tabular}") == 1
    assert sorted(row.split(" & ")[0].strip() for row in body.splitlines()) == sorted(METHODS)
    assert body.count("$\\pm$") == 2 * len(METHODS)
    runs = {path.relative_to(folder / "runs/ward").as_posix() for path in (folder / "runs/ward").glob("*/seed-*")}
    assert runs == {f"{run}/seed-{seed}" for run in ("fedavg", "sfl_v2", "elastic") for seed in range(3)}
    assert all((folder / "runs/ward" / run / "best.safetensors").exists() for run in runs)


def test_the_figure_is_a_pdf(done: list[Said], folder: Path) -> None:
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF-")


def test_the_new_method_without_its_idea_is_the_old_one(done: list[Said]) -> None:
    assert "without a pull it is SFL-V1: True" in next(one for one in done if one.command == "python pulls.py").printed


def test_the_page_imports_only_what_users_are_told_of() -> None:
    modules = set(re.findall(r"^(?:from|import) ([\w.]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert modules == {"csv", "cutlayer", "dataclasses", "mine", "numpy", "safetensors.torch", "torch"}
