"""A cut that is drawn anew every round, the same for all clients (SMoFi, Fig. 9). docs/methods/smofi.md"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlayer import keys
from cutlayer.errors import ConfigError
from cutlayer.methods.base import check_left, final
from cutlayer.methods.splitfed import SplitFed
from cutlayer.pieces.recut import of_model, of_tensors, recut
from cutlayer.places import Clients
from cutlayer.servers import Fed, Server
from cutlayer.split import Split
from cutlayer.state import State


@final
@dataclass(frozen=True, kw_only=True)
class RandomCut:
    """One method at several cuts. Before a round, the layers between the old and the new cut change servers.

    They move as aggregates, so no single client's weights reach the training server.
    """

    methods: tuple[SplitFed, ...]  # by rising cut

    @classmethod
    def over(cls, cuts: tuple[int, int], model: Split, at: Callable[[Split], SplitFed]) -> "RandomCut":
        """The method that `at` makes of the model, at each cut of an inclusive range of numbers of units."""
        last = model.num_units if model.head is None else model.head
        if not _is_range(cuts, last):
            given = list(cuts) if isinstance(cuts, tuple) else cuts
            raise ConfigError(
                f"random_cut is {given!r}; it must be the lowest and the highest number of units at the client, "
                f"from 0 to {last}"
            )
        return cls(methods=tuple(at(model.with_cut(k, model.head)) for k in range(cuts[0], cuts[1] + 1)))

    @property
    def model(self) -> Split:
        return self.methods[0].model

    @property
    def fewest(self) -> int:
        """Clients that a round needs: the layers of a single one would tell of it when they change servers."""
        return min(2, len(self.methods))

    def start(self, server: Server, fed: Fed) -> State:
        state = self.methods[0].start(server, fed)
        return state._replace(memory={**state.memory, "cut": 0})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        drawn = int(keys.generator(clients.key, "cut").integers(len(self.methods)))
        before, method = self.methods[state.memory["cut"]], self.methods[drawn]
        after = method.round(_recut(state, before.model, method.model, server, fed), clients, server, fed)
        check_left("a random cut", after.client, self.fewest)
        return after._replace(memory={**after.memory, "cut": drawn})


def _is_range(cuts: Any, last: int) -> bool:
    numbers = isinstance(cuts, tuple) and len(cuts) == 2 and all(type(k) is int for k in cuts)
    return numbers and 0 <= cuts[0] <= cuts[1] <= last


def _recut(state: State, old: Split, new: Split, server: Server, fed: Fed) -> State:
    """The state with every value at the side of the new cut that holds it."""
    lower, upper = recut(state.client, state.server, old, new, server, fed, of_model)
    below, above = recut(state.memory["client"], state.memory["server"], old, new, server, fed, of_tensors)
    return state._replace(client=lower, server=upper, memory={"client": below, "server": above})
