"""SL, vanilla split learning (Gupta and Raskar 2018): clients train one after another. docs/methods/sl.md"""

from dataclasses import dataclass, field
from typing import Literal

from cutlayer.core.checks import check_choice
from cutlayer.core.kinds import MODEL, SETTINGS
from cutlayer.core.method import PYTHON_ONLY, method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Part, State
from cutlayer.core.values import Held
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Exchange, Side, by_shape, joint_norms, through_server
from cutlayer.pieces.report import Report, nothing, report
from cutlayer.pieces.sampler import shuffled
from cutlayer.pieces.start import with_one_server
from cutlayer.split import Split

Order = Literal["random", "fixed"]


@method
@dataclass(frozen=True, kw_only=True)
class Relay:
    """Split learning: one client at a time trains, and its layers are handed on to the next.

    They go through the fed server.
    """

    model: Split
    client_opt: Transform
    server_opt: Transform
    exchange: Exchange = field(default=by_shape, metadata=PYTHON_ONLY)
    order: Order = "random"
    client: SplitClient = field(init=False)

    def __post_init__(self) -> None:
        check_choice("order", self.order, Order, where="sl")
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))

    def start(self, server: Server, fed: Fed) -> State:
        return with_one_server(self.model, self.server_opt, server, fed)

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        lower, s, told = state.client, state.server, server.hold(nothing())
        for j in shuffled(clients.ids, clients.key) if self.order == "random" else clients.ids:
            one = clients.only((j,))
            turn = self.train(one, lower, server.do(self.server_opt.resume, s, state.round), state.round, server, fed)
            if turn is not None:
                lower, s = turn
                told = server.do(_added, told, s)
        return state._replace(round=state.round + 1, client=lower, server=s, report=told)

    def train(
        self, one: Clients, lower: Held, upper: Held, round: int, server: Server, fed: Fed
    ) -> tuple[Held, Held] | None:
        """Train all local steps of one client, from the models of the client before it, and return both halves.

        Return None if the client disconnects before it returns its layers: its turn does not count for either half.
        """
        c = one.do(self.client.begin, one.down(MODEL, lower), one.down(SETTINGS, round))
        s = server.copies(upper, one)
        for step in one.steps():
            crossing = self.exchange(self.client, step, server, c)
            gs = through_server(crossing, self.model, step, server, s)
            gc = crossing.back(gs.cut)
            if self.client_opt.joint_norm or self.server_opt.joint_norm:
                gc, gs = joint_norms(self.client, self.server_opt, step, server, Side(c, gc), Side(s, gs))
            s = server.each(self.server_opt.step, s, gs)
            c = one.do(self.client.update, c, gc)
        models = one.up(MODEL(c.model))
        halves = [(fed.pick(models, j), server.pick(s, j)) for j in models.ids]
        return halves[0] if halves else None


def _added(told: Report, part: Part) -> Report:
    return told.plus(report(part.progress))


sl = Relay
