"""The study of the cut as a table."""

from rich.table import Table

from cutlayer.cli.papers import accuracy
from cutlayer.cli.tables import dashed, plain_table
from cutlayer.studies.cuts import CutStudy

CAPTION = "best accuracy %; costs of one client: traffic up and down in a round, work forward and backward for a sample"
MIB = 2**20


def cut_table(study: CutStudy) -> Table:
    """Return a row for each cut: accuracies by method and partition, then costs."""
    timed = [method for method in study.methods if any(method in row.seconds for row in study.rows)]
    # Where all methods send the same, one column is enough.
    sending = study.methods[:1] if study.same_traffic else study.methods
    heads = ["cut", "unit", *(f"{line.partition}\n{line.method}" for line in study.lines)]
    heads += ["MiB\na round"] if study.same_traffic else [f"{method}\nMiB a round" for method in sending]
    heads += ["MFLOPs\na sample", "client\nparams", *(f"{method}\ns a round" for method in timed)]
    rows = [
        (
            row.cut,
            row.unit,
            *(accuracy(row.accuracy.get(line)) for line in study.lines),
            *(f"{row.bytes[method] / MIB:,.2f}" if method in row.bytes else "–" for method in sending),
            f"{row.flops / 1e6:,.3f}",
            f"{row.params:,}",
            *(dashed("{:.3g}", row.seconds.get(method)) for method in timed),
        )
        for row in study.rows
    ]
    return plain_table(heads, rows, left=["unit"], caption=f"{CAPTION}; s: simulated seconds" if timed else CAPTION)
