"""Specifies that the threat model names every attack; `test_docs.py` looks whether the named tests exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "security.md"
NOT_ATTACKS = {"test_threat_table"}


def defined(folder: Path) -> set[str]:
    """The tests of the files in a folder."""
    files = (file for file in folder.rglob("test_*.py") if file.stem not in NOT_ATTACKS)
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)}


def rows() -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [line.split(" | ") for line in lines if "`test_" in line]


def named() -> set[str]:
    return {name for row in rows() for name in re.findall(r"`(test_\w+)`", row[-1])}


def test_every_attack_is_in_the_threat_model() -> None:
    assert defined(TESTS / "attacks") - named() == set()


def test_the_threat_model_knows_everybody() -> None:
    assert {row[0] for row in rows()} >= {
        *("stranger", "network", "client", "training server", "fed server", "any server"),
        *("owner of both servers", "two servers that collude", "thief of a key", "operator"),
    }
    assert len(defined(TESTS / "attacks")) >= 60
