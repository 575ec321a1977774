"""Specifies that what the documentation says is so: its Python runs, its quotations are in the code, its links lead."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cutlayer
from cutlayer import registry
from cutlayer.methods import METHODS

ROOT = Path(__file__).parents[1]
SOURCE = Path(cutlayer.__file__).parent
PAGES = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN_ELSEWHERE = ("own-work.md",)  # its Python is in files: test_own_work.py writes and runs them
METHOD_PAGES = [ROOT / "docs" / "methods" / f"{name}.md" for name in METHODS]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[str]:
    """The page's fenced blocks of Python; what must not run has another name after the fence."""
    return re.findall(r"^```python\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL)


def heading(line: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def with_pace(page: Path) -> object:
    """The pages of methods are many, and each starts a Python of its own."""
    return pytest.param(page, marks=pytest.mark.slow) if page.parent.name == "methods" else page


RUNNING = [with_pace(page) for page in PAGES if blocks(page) and page.name not in RUN_ELSEWHERE]


@pytest.mark.parametrize("page", RUNNING, ids=named)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)), encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    limited = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, script], cwd=empty, env=limited, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def test_the_worked_example_is_among_the_pages_that_run() -> None:
    assert len(blocks(ROOT / "docs" / "add-a-method.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_within_the_documentation_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text(page)):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in {heading(line) for line in text(there).splitlines() if line.startswith("#")}, target


def test_no_page_has_a_place_to_be_filled_in() -> None:
    assert [page.name for page in PAGES if "@@" in text(page) or "TODO" in text(page)] == []


def test_every_method_has_a_page_and_a_line_in_the_index() -> None:
    folder = ROOT / "docs" / "methods"
    assert {page.stem for page in folder.glob("*.md")} == {*METHODS, "README"}
    for name, make in METHODS.items():
        file = make.__module__.rpartition(".")[2] + ".py"
        assert f"`src/cutlayer/methods/{file}`" in text(folder / f"{name}.md")
        assert f"| [{name}]({name}.md) |" in text(folder / "README.md")
        assert f"`methods/{file}`" in text(folder / "README.md")


@pytest.mark.parametrize("page", METHOD_PAGES, ids=named)
def test_code_lines_beside_paper_lines_are_in_the_files_that_the_page_names(page: Path) -> None:
    section = text(page).partition("\n## Paper line, code line\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"\| `([^`]+)` \|$", section, re.MULTILINE)
    files = re.findall(r"src/cutlayer/([\w/]+\.py)", text(page))
    lines = {line.partition("  # ")[0].strip() for file in files for line in text(SOURCE / file).splitlines()}
    assert len(quoted) >= 7
    assert [line for line in quoted if line not in lines] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    sources = {path: text(path) for path in (ROOT / "tests").rglob("test_*.py")}
    written = "\n".join(sources.values())
    for file in re.findall(r"tests/(test_\w+\.py)", text(page)):
        assert ROOT / "tests" / file in sources, file
    for test in re.findall(r"`(test_\w+)`", text(page)):
        assert f"def {test}(" in written, test


@pytest.mark.parametrize("page", METHOD_PAGES, ids=named)
def test_every_option_of_a_method_is_on_its_page(page: Path) -> None:
    for option in registry.options_of(METHODS[page.stem], ("model", "client_opt", "server_opt")):
        assert f"| `{option}` |" in text(page), option
