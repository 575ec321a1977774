"""The costs and the accuracy of each cut: a study of runs that differ in their cut."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isclose
from statistics import fmean
from typing import Any

from cutlayer.core.text import percent
from cutlayer.planning.devices import PASSES
from cutlayer.planning.profile import Profile
from cutlayer.results.measures import ACCURACY
from cutlayer.results.names import codec_of, codecs_of
from cutlayer.results.report import Comparison
from cutlayer.results.trials import Group, Spread
from cutlayer.runs.config import Run

NEAR = 2.0  # points of accuracy below the best


@dataclass(frozen=True, order=True)
class CutLine:
    """Runs that differ only in their cut and their seed."""

    partition: str
    method: str
    alpha: float | None = field(default=None, compare=False)  # of a Dirichlet partition

    def __str__(self) -> str:
        return f"{self.method}, {self.partition}"

    @property
    def panel(self) -> str:
        """The partition as figures name it."""
        words = {"iid": "IID", "dirichlet": "Dirichlet" if self.alpha is None else f"Dirichlet {self.alpha:g}"}
        return words.get(self.partition, self.partition)


@dataclass(frozen=True, kw_only=True)
class CutRow:
    """One cut, with one codec where several are tried.

    Costs are for one client; they hardly depend on the partition, so they are means over partitions.
    """

    cut: int  # units at the client
    unit: str  # the last of them
    accuracy: dict[CutLine, Spread]  # best, by line
    bytes: dict[str, float]  # up and down in a round, by method
    flops: int  # forward and backward, for one sample, as the clock counts them
    params: int
    seconds: dict[str, float]  # simulated, of a round, by method
    codec: str = ""  # of activations and gradients, if several are tried


@dataclass(frozen=True, kw_only=True)
class CutStudy:
    """All cuts that were tried, from the input on."""

    rows: tuple[CutRow, ...]
    lines: tuple[CutLine, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.method for line in self.lines))

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs, if several are tried."""
        return tuple(dict.fromkeys(row.codec for row in self.rows if row.codec))

    @property
    def same_traffic(self) -> bool:
        """Whether all methods send the same amount at every cut."""
        return all(isclose(min(row.bytes.values()), max(row.bytes.values())) for row in self.rows)

    def conclusions(self) -> list[str]:
        """Say for each line how much the cut matters, and where it is best."""
        return [self._conclusion(line) for line in self.lines if any(line in row.accuracy for row in self.rows)]

    def _conclusion(self, line: CutLine) -> str:
        known = [(100 * row.accuracy[line].mean, row) for row in self.rows if line in row.accuracy]
        if self.codecs:
            return _thrifty(line, known)
        accuracies = [accuracy for accuracy, _ in known]
        best = known[accuracies.index(max(accuracies))][1]
        if len(known) == 1:
            return f"{line}: {max(accuracies):.1f} % at {best.cut} ({best.unit})"
        if max(accuracies) - min(accuracies) < 0.05:
            return f"{line}: {max(accuracies):.1f} % at every cut"
        return (
            f"{line}: {max(accuracies) - min(accuracies):.1f} points between the cuts, "
            f"best at {best.cut} ({best.unit}) with {max(accuracies):.1f} %"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the study for JSON."""
        return {
            "cuts": [
                {
                    "cut": row.cut,
                    "unit": row.unit,
                    **({"codec": row.codec} if row.codec else {}),
                    "best_accuracy": [
                        {"partition": line.partition, "method": line.method, **asdict(spread)}
                        for line, spread in row.accuracy.items()
                    ],
                    "client_bytes_per_round": row.bytes,
                    "client_flops_per_sample": row.flops,
                    "client_params": row.params,
                    "simulated_seconds_per_round": row.seconds,
                }
                for row in self.rows
            ],
            "conclusions": self.conclusions(),
        }


def summary(comparison: Comparison, costs: Profile) -> CutStudy:
    """Arrange the runs of a comparison by their cut; a panel is a partition."""
    units = [row.name for row in costs.rows]
    found: dict[tuple[int, str], list[tuple[CutLine, Group]]] = {}
    for panel in comparison.panels:
        for group in panel.groups:
            alpha = group.run.partition.options.get("alpha")
            line = CutLine(panel.name.rpartition("/")[2], group.run.method.name, alpha)
            found.setdefault((_number(group.run, units), _codec(group.run)), []).append((line, group))
    lines = dict.fromkeys(line for pairs in found.values() for line, _ in pairs)
    several = len({codec for _, codec in found}) > 1
    rows = [
        replace(_row(key[0], units, found[key], costs), codec=key[1] if several else "")
        for key in sorted(found, key=lambda key: key[0])
    ]
    return CutStudy(rows=tuple(rows), lines=tuple(lines))


def _row(cut: int, units: list[str], pairs: list[tuple[CutLine, Group]], costs: Profile) -> CutRow:
    own = costs.client_units(cut, _head(pairs[0][1].run, units))
    seconds: dict[str, list[float]] = {}
    traffic: dict[str, list[float]] = {}
    for line, group in pairs:
        traffic.setdefault(line.method, []).append(_bytes_per_round(group))
        if group.simulated is not None:
            seconds.setdefault(line.method, []).append(group.simulated / fmean(group.rounds))
    return CutRow(
        cut=cut,
        unit=units[cut - 1] if cut else "none",
        accuracy={line: best for line, g in pairs if g.measure == ACCURACY and (best := g.best) is not None},
        bytes={method: fmean(some) for method, some in traffic.items()},
        flops=PASSES * sum(unit.forward_flops for unit in own),
        params=sum(unit.params for unit in own),
        seconds={method: fmean(some) for method, some in seconds.items()},
    )


def _thrifty(line: CutLine, known: Sequence[tuple[float, CutRow]]) -> str:
    """Say which cut and codec are best, and which others that are almost as good send least."""
    most, best = max(known, key=lambda pair: pair[0])
    near = [row for accuracy, row in known if accuracy >= most - NEAR]
    least = min(near, key=lambda row: row.bytes[line.method])
    told = f"{line}: best with {best.codec} at {best.cut} ({best.unit}), {most:.1f} %; "
    if least is best:
        return f"{told}nothing within {NEAR:g} points sends less"
    share = percent(least.bytes[line.method] / best.bytes[line.method])
    return f"{told}within {NEAR:g} points, {least.codec} at {least.cut} ({least.unit}) sends least, {share} as much"


def _codec(run: Run) -> str:
    """Return the codec of what crosses the cut."""
    codecs = {kind: run.codecs.get(kind, "none") for kind in ("activations", "gradients")}
    names = {codec_of(codec) for codec in codecs.values()}
    return names.pop() if len(names) == 1 else codecs_of(codecs)


def _bytes_per_round(group: Group) -> float:
    clients = group.run.per_round or group.run.clients
    return (group.bytes("up") + group.bytes("down")) / fmean(group.rounds) / clients


def _head(run: Run, units: list[str]) -> int | None:
    return units.index(run.head) if isinstance(run.head, str) else run.head


def _number(run: Run, units: list[str]) -> int:
    return run.cut if isinstance(run.cut, int) else units.index(run.cut) + 1
