"""Tables in the formats of papers and other programs: LaTeX, Markdown, CSV and JSON."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import typer

from cutlayer.cli import show
from cutlayer.cli.tables import Section, Sheet, sections_for_people
from cutlayer.results.names import printed

ESCAPES = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "÷": r"$\div$",
    "–": "--",
    "²": "$^2$",
    "↓": r"$\downarrow$",
    ">": "$>$",
    "<": "$<$",
    "|": "$|$",
}
MINUS = r"(?<![\w-])-(?=\d)"


class Format(StrEnum):
    """What `compare` prints."""

    TABLE = "table"
    LATEX = "latex"
    CSV = "csv"
    MARKDOWN = "markdown"
    JSON = "json"


def shown(
    form: Format, document: Mapping[str, Any], sections: Sequence[Section], records: Sequence[Mapping[str, Any]]
) -> None:
    """Print a result in a format: the document as JSON, the sections as tables, the records as CSV."""
    if form is Format.JSON:
        show.result(document, machine=True)
    elif form is Format.TABLE:
        show.people(sections_for_people(sections))
    elif form is Format.CSV:
        typer.echo(as_csv(records))
    else:
        typer.echo(latex(sections) if form is Format.LATEX else markdown(sections))


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return lines of CSV; what is missing is empty."""
    text = io.StringIO()
    columns = dict.fromkeys(key for record in records for key in record)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().rstrip("\n")


def markdown(sections: Sequence[Section]) -> str:
    """Return tables with pipes between their cells, and the remarks below as lists."""
    parts = []
    for section in sections:
        parts += [f"**{section.name}**"] if section.name else []
        parts += [_pipes(section.sheet), "\n".join(f"- {line}" for line in section.remarks)]
    return "\n\n".join(parts)


def _pipes(sheet: Sheet) -> str:
    heads = [_title(head) for head in sheet.heads]
    rules = [":--" if head in sheet.left else "--:" for head in sheet.heads]
    rows = [[printed(name), *cells] for name, *cells in sheet.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in (heads, rules, *rows)
    )


def latex(sections: Sequence[Section]) -> str:
    """Return tabulars, with the remarks as comments above them; they need the package booktabs and no other."""
    parts = [r"% \usepackage{booktabs}"]
    for section in sections:
        comments = [f"% {line}" for line in ([section.name] if section.name else []) + list(section.remarks)]
        columns = section.printed or range(len(section.sheet.heads))
        heads = [_title(section.sheet.heads[i]) for i in columns]
        rows = [_cells([row[i] for i in columns], section.bold) for row in section.sheet.rows]
        parts.append("\n".join([*comments, *_tabular(heads, rows)]))
    return "\n\n".join(parts)


def _cells(row: Sequence[str], bold: str | None) -> list[str]:
    """Return a row as LaTeX; the rows of seeds are indented."""
    name, *values = row
    cells = [escaped(value) for value in values]
    if name == bold:
        cells[0] = rf"\textbf{{{cells[0]}}}"
    indented = r"\quad " if name.startswith(" ") else ""
    return [indented + escaped(printed(name.strip())), *cells]


def _tabular(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}"
    yield r"  \toprule"
    yield rf"  {' & '.join(map(escaped, heads))} \\"
    yield r"  \midrule"
    for row in rows:
        yield rf"  {' & '.join(row)} \\"
    yield r"  \bottomrule"
    yield r"\end{tabular}"


def escaped(text: str) -> str:
    """Return a text as LaTeX prints it."""
    return re.sub(MINUS, "$-$", "".join(ESCAPES.get(sign, sign) for sign in text))


def _title(head: str) -> str:
    """Return the head of a column in one line, with methods as they are printed."""
    return printed(head.replace("-\n", "-").replace("\n", " "))
