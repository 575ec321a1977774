"""The study of the cut as a table."""

from rich.table import Table

from cutlayer.cli.papers import accuracy
from cutlayer.cli.tables import plain_table
from cutlayer.studies.cuts import CutRow, CutStudy

CAPTION = "best accuracy %; costs of one client: traffic up and down in a round, work forward and backward for a sample"


def cut_table(study: CutStudy) -> Table:
    """A row for each cut: accuracies by method and partition, then costs."""
    timed = [method for method in study.methods if any(method in row.seconds for row in study.rows)]
    times = [f"{method}\ns a round" for method in timed]
    # Where all methods send the same, it is told once.
    sending = study.methods[:1] if study.same_traffic else study.methods
    traffic = ["MiB\na round"] if study.same_traffic else [f"{method}\nMiB a round" for method in sending]
    table = plain_table("", caption=f"{CAPTION}; s: simulated seconds" if timed else CAPTION)
    table.add_column("cut", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    heads = [f"{line.partition}\n{line.method}" for line in study.lines]
    for head in [*heads, *traffic, "MFLOPs\na sample", "client\nparams", *times]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in study.rows:
        table.add_row(
            str(row.cut),
            row.unit,
            *(accuracy(row.accuracy.get(line)) for line in study.lines),
            *(f"{row.bytes[method] / 2**20:,.2f}" if method in row.bytes else "–" for method in sending),
            f"{row.flops / 1e6:,.3f}",
            f"{row.params:,}",
            *(_seconds(row, method) for method in timed),
        )
    return table


def _seconds(row: CutRow, method: str) -> str:
    return f"{row.seconds[method]:.3g}" if method in row.seconds else "–"
