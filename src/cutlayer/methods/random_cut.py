"""A cut that is drawn anew every round, the same for all clients (SMoFi, Fig. 9). docs/methods/smofi.md"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlayer.core import keys
from cutlayer.core.method import Needs, check_left, method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State
from cutlayer.core.tree import storable
from cutlayer.errors import ConfigError
from cutlayer.methods.splitfed import SplitFed, SplitFedMemory, SplitFedState
from cutlayer.pieces.recut import of_model, of_tensors, recut
from cutlayer.split import Split


@storable
class RandomCutMemory(NamedTuple):
    """The method of the last round, and the memory of the methods."""

    cut: int
    method: SplitFedMemory


RandomCutState = State[RandomCutMemory]


@method
@dataclass(frozen=True, kw_only=True)
class RandomCut:
    """One method at several cuts. Before a round, the layers between the old and the new cut change servers.

    They move as aggregates, so no single client's weights reach the training server.
    """

    methods: tuple[SplitFed, ...]  # by rising cut

    @classmethod
    def over(cls, cuts: tuple[int, int], model: Split, at: Callable[[Split], SplitFed]) -> "RandomCut":
        """Make a method with `at` for each cut of an inclusive range of numbers of units."""
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
    def needs(self) -> Needs:
        several = len(self.methods) > 1
        # Moved layers would reveal a single client's.
        return Needs(fewest_clients=1 + several, moves_cut=several, draws_cut=several)

    def start(self, server: Server, fed: Fed) -> RandomCutState:
        state: State = self.methods[0].start(server, fed)
        return state._replace(memory=RandomCutMemory(0, state.memory))

    def round(self, state: RandomCutState, clients: Clients, server: Server, fed: Fed) -> RandomCutState:
        drawn = int(keys.generator(clients.key, "cut").integers(len(self.methods)))
        before, method = self.methods[state.memory.cut], self.methods[drawn]
        after: State = method.round(_recut(state, before.model, method.model, server, fed), clients, server, fed)
        check_left("a random cut", after.client, self.needs.fewest_clients)
        return after._replace(memory=RandomCutMemory(drawn, after.memory))


def _is_range(cuts: Any, last: int) -> bool:
    numbers = isinstance(cuts, tuple) and len(cuts) == 2 and all(type(k) is int for k in cuts)
    return numbers and 0 <= cuts[0] <= cuts[1] <= last


def _recut(state: RandomCutState, old: Split, new: Split, server: Server, fed: Fed) -> SplitFedState:
    """Return the state with every value on its side of the new cut."""
    lower, upper = recut(state.client, state.server, old, new, server, fed, of_model)
    memory = state.memory.method
    below, above = recut(memory.client, memory.server, old, new, server, fed, of_tensors)
    return State(state.round, lower, upper, SplitFedMemory(below, above))
