"""What the benchmarks share: their options, and rows as a Markdown table or as JSON."""

import argparse
import json
from typing import Any

Row = dict[str, Any]


def options(description: str, *own: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The command line of a benchmark, with options of its own: each a name and what argparse is told of it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small and few: checks that it works, measures nothing")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    for name, told in own:
        parser.add_argument(name, **told)
    return parser.parse_args()


def show(rows: list[Row], as_json: bool) -> None:
    """Print the rows, which all have the same columns."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row.values()) + " |")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:.2f}"
    return str(value)
