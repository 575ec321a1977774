"""The result of a benchmark as text: a title, a Markdown table, and an explanation."""

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from cutlayer.benching.cases import DIRICHLET, EPOCHS, HELD_PER_ROUND, TRAIN_PER_TEST, WARM_UP

NONE = "–"
MIB = 2**20
LONGEST_REASON = 100  # characters; the JSON document has the whole reason
STEPS = {
    "ms a step": ("ms_per_step", "{:.2f}"),
    "client steps/s": ("client_steps_per_second", "{:.0f}"),
    "× the limit": ("times_the_limit", "{:.2f}"),
    "× faster than by hand": ("faster_than_by_hand", "{:.2f}"),
    "first loss": ("first_loss", "{:.4f}"),
}
ROUNDS = {
    "s a round": ("seconds_per_turn", "{:.2f}"),
    "client steps/s": ("client_steps_per_second", "{:.0f}"),
    "best": ("best_client_steps_per_second", "{:.0f}"),
    "first loss": ("first_loss", "{:.4f}"),
}
MEANINGS = {
    "client steps/s": "Client steps/s: steps of single clients, of all of them together, in a second.",
    "× the limit": "× the limit: 1 is best, lower is better. The limit is one model on all batches merged.",
    "× faster than by hand": "× faster than by hand: times the speed of the eager loop; higher is better.",
    "first loss": "First loss: the mean of the first turn, which starts from the same weights with the same batches.",
    "peak MiB": "Memory: beyond the model and the samples that all rows share.",
}
MEMORY = {"peak MiB": "peak_bytes", "reserved MiB": "peak_reserved_bytes"}


def text(document: Mapping[str, Any]) -> str:
    """Return the title, the table, and the meaning of its columns."""
    columns = ROUNDS if document["case"]["end_to_end"] else STEPS
    every = ["what", *columns, *MEMORY, "why not"], *(_cells(row, columns) for row in document["rows"])
    told = [column for column in zip(*every, strict=True) if any(cell not in ("", NONE) for cell in column[1:])]
    head, *body = (list(cells) for cells in zip(*told, strict=True))
    return "\n".join([_title(document), "", *_aligned(head, body), "", *_meaning(document["case"], head)])


def _title(document: Mapping[str, Any]) -> str:
    case, on = document["case"], document["machine"]
    clients, batch, samples = case["clients"], case["batch"], case["samples"]
    work = f"A step of SMoFi: {clients} clients x batch {batch}"
    if case["end_to_end"]:
        work = (
            f"Rounds of SMoFi: {clients} of {HELD_PER_ROUND * clients} clients x {EPOCHS} epochs x batch {batch}, "
            f"Dirichlet {DIRICHLET:g}, {samples:,} images and {samples // TRAIN_PER_TEST:,} to evaluate"
        )
    model = f"{case['model']} ({case['parameters']:,} parameters) cut after {case['cut_after']}"
    versions = f"torch {on['torch']}" + (f", jax {on['jax']}" if on["jax"] else "")
    threads = "1 thread" if on["threads"] == 1 else f"{on['threads']} threads"
    return f"{work}, {model}, {case['precision']}, {on['device']}, {threads}, {versions}"


def _cells(row: Mapping[str, Any], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    found = [NONE if row[key] is None else form.format(row[key]) for key, form in columns.values()]
    sizes = [NONE if row[key] is None else f"{row[key] / MIB:.0f}" for key in MEMORY.values()]
    return [row["what"], *found, *sizes, shorten(row["obstacle"] or "", LONGEST_REASON)]


def _aligned(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            f"{cell:{'<' if left else '>'}{width}}" for cell, left, width in zip(cells, words, widths, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    words = [name in ("what", "why not") for name in head]
    rule = ["-" * width if left else "-" * (width - 1) + ":" for left, width in zip(words, widths, strict=True)]
    return [line(head), line(rule), *map(line, body)]


def _meaning(case: Mapping[str, Any], head: Sequence[str]) -> list[str]:
    """Explain how the rows were timed, and the columns that the table has."""
    meanings = [line for column, line in MEANINGS.items() if column in head]
    if case["end_to_end"]:
        return [
            "The median round and the best one, with the drawing of batches, aggregation and evaluation. "
            f"Rounds: {case['turns']}, and {WARM_UP} to warm up. First loss: of the first round.",
            *(line for line in meanings if line != MEANINGS["first loss"]),
        ]
    return [
        f"Turns alternate, and their median counts. Turns: {case['turns']}, and {WARM_UP} to warm up; steps in each: "
        f"{case['steps']}.",
        "In a step every client computes forward, loss and backward and updates both halves; then the server-side "
        "momenta are fused. Engines run whole rounds of so many steps.",
        *meanings,
    ]
