"""A cut that is drawn anew every round, the same for all clients (SMoFi, Fig. 9). docs/methods/smofi.md"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from cutlayer import keys
from cutlayer.errors import ConfigError
from cutlayer.kinds import SYNC
from cutlayer.methods.base import final
from cutlayer.methods.splitfed import SplitFed
from cutlayer.places import Clients
from cutlayer.servers import Fed, Keeper, Server
from cutlayer.split import Split
from cutlayer.state import Model, State, Tensors
from cutlayer.values import Held


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
        return after._replace(memory={**after.memory, "cut": drawn})


def _is_range(cuts: Any, last: int) -> bool:
    numbers = isinstance(cuts, tuple) and len(cuts) == 2 and all(type(k) is int for k in cuts)
    return numbers and 0 <= cuts[0] <= cuts[1] <= last


def _recut(state: State, old: Split, new: Split, server: Server, fed: Fed) -> State:
    """The state with every value at the side of the new cut that holds it."""
    (fed_has, server_has), (fed_needs, server_needs) = _sides(old), _sides(new)
    lower = _moved(state.client, state.server, fed, server, fed_has, fed_needs, _model)
    upper = _moved(state.server, state.client, server, fed, server_has, server_needs, _model)
    below, above = state.memory["client"], state.memory["server"]
    memory = {
        "client": _moved(below, above, fed, server, fed_has, fed_needs, _tensors),
        "server": _moved(above, below, server, fed, server_has, server_needs, _tensors),
    }
    return state._replace(client=lower, server=upper, memory=memory)


@cache
def _sides(split: Split) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the values on both sides of the cut."""
    lower, upper = ({k for values in model for k in values} for model in split.initial())
    return frozenset(lower), frozenset(upper)


Pick = Callable[..., Model | Tensors]


def _moved(
    own: Held, other: Held, here: Keeper, there: Keeper, has: frozenset[str], needs: frozenset[str], pick: Pick
) -> Held:
    """What this keeper needs, of what it has and of what the other one sends."""
    if needs <= has:
        kept: Held = here.do(partial(pick, needs), own)
        return kept
    sent = there.send(SYNC, there.do(partial(pick, needs - has), other), here)
    joined: Held = here.do(partial(pick, needs), own, sent)
    return joined


def _model(names: frozenset[str], *models: Model) -> Model:
    """The values of these names from all of the models."""
    return Model(*(_tensors(names, *some) for some in zip(*models, strict=True)))


def _tensors(names: frozenset[str], *some: Tensors) -> Tensors:
    return {k: v for tensors in some for k, v in tensors.items() if k in names}
