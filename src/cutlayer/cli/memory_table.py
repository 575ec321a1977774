"""A client's memory in training and in inference, for people and for machines."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cutlayer.cli import costs
from cutlayer.cli.tables import Sheet, plain_table
from cutlayer.core.checks import check_device
from cutlayer.core.text import human_bytes
from cutlayer.errors import ConfigError
from cutlayer.models import freeze_norms
from cutlayer.optim import Optimiser
from cutlayer.runs import build
from cutlayer.split import Split
from cutlayer.split.units import units_of
from cutlayer.studies.client_memory import client_memory

CAPTION = (
    "weights: all values of the client's layers, trained or not; moments: the optimiser's; step: the most beyond these "
    "and the batch at any time, measured with a stand-in for the server; peak: all of it. "
    "BatchNorm layers are frozen. HO-SFL and ZO-SFL take about 1 MiB to make a direction, which shows in a small model."
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How a client's step is measured."""

    batch: int = 32
    perturbations: int = 5
    overlap: int = 0
    device: str = "cpu"


def asked(memory: bool, given: Mapping[str, Any]) -> Measurement | None:
    """Return how to measure, if at all; refuse options that would be ignored."""
    told = {option: value for option, value in given.items() if value is not None}
    if told and not memory:
        raise ConfigError(f"--{next(iter(told))} is about the memory of a client; add --memory")
    return Measurement(**told) if memory else None


def client_bytes(
    name: str, options: Mapping[str, Any], shape: tuple[int, ...], opt: Optimiser, cut: str | None, how: Measurement
) -> dict[str, Any]:
    """Return the bytes of a client for each kind of work; it holds half of the units unless a cut is given."""
    check_device(how.device)
    net = freeze_norms(build.model(name, options)).to(how.device)
    x = costs.batch(net, shape, how.batch).to(how.device)
    try:
        with torch.no_grad():
            out: Tensor = net(x[:1])
    except RuntimeError as error:
        raise costs.misfit(name, shape, error) from None
    y = torch.zeros(how.batch, *out.shape[2:], dtype=torch.int64, device=how.device)
    split = Split(net, len(units_of(net)) // 2 if cut is None else costs.parse_cut(cut))
    overlaps = (0, how.overlap) if how.overlap else (0,)
    found = client_memory(split, opt, x, y, perturbations=how.perturbations, overlaps=overlaps)
    rows = [{**asdict(row), "peak": row.peak, "relative": found.relative(row)} for row in found.rows]
    about = {"cut": split.cut, "units": list(split.units), "cut_tensor": found.cut_tensor}
    return {**asdict(how), **about, "rows": rows}


def table(found: Mapping[str, Any]) -> Sheet:
    """Return a row for each kind of work that a client may do with a batch."""
    shape, cut, units = "x".join(map(str, found["input"])), found["cut"], found["units"]
    title = f"{found['model']}, cut after {units[cut - 1]} ({cut} of {len(units)} units), {found['batch']} samples of "
    title += f"{shape} on {found['device']}, {found['optimiser']}, {found['perturbations']} perturbations: "
    title += f"a cut tensor is {human_bytes(found['cut_tensor'])}"
    rows = [
        (
            f"{row['work']}, {row['overlap']} ahead" if row["overlap"] else row["work"],
            *(human_bytes(row[key]) for key in ("weights", "optimiser", "step", "peak")),
            f"{row['relative']:.3f}",
        )
        for row in found["rows"]
    ]
    heads = ["one client", "weights", "moments", "step", "peak", "× inference"]
    return plain_table(heads, rows, left=["one client"], title=title, caption=CAPTION)
