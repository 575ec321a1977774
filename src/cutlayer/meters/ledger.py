"""The ledger: the bytes that cross, by kind, direction and client, and the round trips."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cutlayer.core import tree
from cutlayer.core.codec import before_encoding, holds_codes
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.meter import Direction
from cutlayer.core.state import Model
from cutlayer.core.tree import Tree
from cutlayer.core.values import PerClient


class Ledger:
    """Counts the bytes of everything that crosses, after encoding; the counts are the same on every engine.

    Of a model it counts the parameters. Running statistics are left out, as in the papers, unless `count_buffers`.
    """

    def __init__(self, *, count_buffers: bool = False) -> None:
        self.count_buffers = count_buffers
        self.totals: Counter[str] = Counter()  # "up_activations" -> bytes
        self.before: Counter[str] = Counter()  # the same before they were encoded, of what was
        self.per_client: dict[int, Counter[str]] = {}
        self.trips: Counter[int] = Counter()
        self.samples = 0  # processed by all clients

    def stepped(self, sizes: Mapping[int, int]) -> None:
        self.samples += sum(sizes.values())

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        name = f"{direction}_{kind.name}"
        for j, size in self.sizes(value).items():
            self.totals[name] += size
            self.per_client.setdefault(j, Counter())[name] += size
        if any(holds_codes(b.tree) for b in value.blocks):
            blocks = [b._replace(tree=before_encoding(b.tree, stacked=b.stacked)) for b in value.blocks]
            self.before[name] += sum(self.sizes(PerClient(value.place, blocks)).values())

    def waited(self, ids: tuple[int, ...]) -> None:
        self.trips.update(ids)

    def sent(self, kind: Kind, origin: Place, to: Place, value: PerClient) -> None:
        self.totals[f"inter_server_{kind.name}"] += sum(self.sizes(value).values())

    def content(self) -> dict[str, Any]:
        """Return all counts for a checkpoint."""
        return {
            "totals": dict(self.totals),
            **({"before": dict(self.before)} if self.before else {}),
            "per_client": {j: dict(c) for j, c in self.per_client.items()},
            "trips": dict(self.trips),
            "samples": self.samples,
        }

    def restore(self, content: dict[str, Any]) -> None:
        """Continue from these counts."""
        self.totals, self.before = Counter(content["totals"]), Counter(content.get("before", {}))
        self.per_client = {j: Counter(c) for j, c in content["per_client"].items()}
        self.trips = Counter(content["trips"])
        self.samples = content["samples"]

    def sizes(self, value: PerClient) -> dict[int, int]:
        """Return the bytes of each client's value."""
        sizes: dict[int, int] = {}
        for block in value.blocks:
            sizes |= dict.fromkeys(block.ids, self.size(block.tree, rows=len(block.ids) if block.stacked else 1))
        return sizes

    def size(self, value: Tree, rows: int = 1) -> int:
        """Return the bytes of one row of a stacked value; plain numbers count in full for each row."""
        value = tree.bare(value)
        counted = value._replace(buffers={}) if isinstance(value, Model) and not self.count_buffers else value
        stacked = tree.num_bytes(tuple(tree.tensors(counted)))
        return stacked // rows + tree.num_bytes(counted) - stacked
