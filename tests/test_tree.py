"""Who may import whom: methods and their pieces mention no engine, meter, transport or file."""

import ast
from pathlib import Path

import pytest

import cutlayer

ROOT = Path(cutlayer.__file__).parent
VOCABULARY = {
    "cutlayer.checks",
    "cutlayer.directions",
    "cutlayer.errors",
    "cutlayer.keys",
    "cutlayer.kinds",
    "cutlayer.methods",
    "cutlayer.optim",
    "cutlayer.pieces",
    "cutlayer.places",
    "cutlayer.planning",
    "cutlayer.program",
    "cutlayer.registry",
    "cutlayer.rules",
    "cutlayer.servers",
    "cutlayer.split",
    "cutlayer.state",
    "cutlayer.sums",
    "cutlayer.tree",
    "cutlayer.values",
}
FILES = sorted([*ROOT.glob("methods/*.py"), *ROOT.glob("pieces/*.py")])


def imported(file: Path) -> set[str]:
    """The modules of this package that a file imports, by their first two names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "cutlayer":
            found |= {f"cutlayer.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {".".join(name.split(".")[:2]) for name in found if name.startswith("cutlayer")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_method_knows_only_the_vocabulary(file: Path) -> None:
    assert imported(file) <= VOCABULARY


def test_the_walk_sees_imports() -> None:
    assert "cutlayer.engines" in imported(ROOT / "simulation.py")
