"""SFL-V2 (Thapa et al. 2022; Algorithm 2 of the cut-layer study): one server-side model. docs/methods/sfl_v2.md"""

from dataclasses import dataclass, field
from typing import Literal

from cutlayer.core.checks import check_choice, check_count
from cutlayer.core.kinds import MODEL, SETTINGS
from cutlayer.core.method import PYTHON_ONLY, Needs, method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Grads, Part, Progress, State
from cutlayer.core.values import Held
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Exchange, by_shape, in_turns
from cutlayer.pieces.report import report
from cutlayer.pieces.sampler import shuffled
from cutlayer.pieces.start import refuse_joint_norm, with_one_server
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.split import Split

Reset = Literal["never", "round", "step"]
Interleave = Literal["step", "client"]
Order = Literal["random", "fixed"]


@method
@dataclass(frozen=True, kw_only=True)
class SplitFedV2:
    """SFL-V2: one server-side model takes the clients' batches one after another."""

    model: Split
    client_opt: Transform
    server_opt: Transform
    exchange: Exchange = field(default=by_shape, metadata=PYTHON_ONLY)
    interleave: Interleave = "step"  # whose batch is next: another client's, or this client's until it has none left
    order: Order = "random"  # drawn at each step (or round, with interleave "client"), or by client number
    server_opt_reset: Reset = "never"  # when the server's moments and count are reset
    # mini-batches of each client between averages; None: as the run's batching says
    interval: int | None = field(default=None, metadata=PYTHON_ONLY)
    agg: Agg = "samples"
    client: SplitClient = field(init=False)

    def __post_init__(self) -> None:
        check_choice("interleave", self.interleave, Interleave, where="sfl_v2")
        check_choice("order", self.order, Order, where="sfl_v2")
        check_choice("server_opt_reset", self.server_opt_reset, Reset, where="sfl_v2")
        if self.interval is not None:
            check_count("interval", self.interval)
        check_agg(self.agg)
        refuse_joint_norm("SFL-V2", self.client_opt, self.server_opt)
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))

    @property
    def needs(self) -> Needs:
        return Needs(counts_steps=self.interval is not None)

    def start(self, server: Server, fed: Fed) -> State:
        state = with_one_server(self.model, self.server_opt, server, fed)
        return state._replace(server=self.kept(state.server))

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        begin = self.server_opt.resume if self.server_opt_reset == "never" else self.server_opt.begin
        s = server.do(begin, state.server, state.round)
        progress = dict.fromkeys(clients.ids, s.progress)
        for group in self._groups(clients):
            for step in group.steps(count=self.interval):
                crossing = self.exchange(self.client, step, server, c)
                order = self._ordered(step.active, step.number)
                s, cuts = in_turns(self.turn, order, crossing, self.model, step, server, s, progress)
                gc = crossing.back(cuts)
                c[step.active] = step.active.do(self.client.update, c, gc)
        return state._replace(
            round=state.round + 1,
            client=fed.mean(clients.up(MODEL(c.model)), weights(clients, self.agg)),
            server=self.kept(s),
            report=server.sum(server.each(report, server.rows(progress))),
        )

    def _groups(self, clients: Clients) -> list[Clients]:
        if self.interleave == "step":
            return [clients]
        return [clients.only((j,)) for j in self._ordered(clients, 0)]

    def _ordered(self, who: Clients, number: int) -> tuple[int, ...]:
        return shuffled(who.ids, who.key, number) if self.order == "random" else who.ids

    def kept(self, s: Held) -> Held:
        """Return what the server keeps between rounds: its model, and its moments unless they are reset."""
        return s if self.server_opt_reset == "never" else s.model

    def turn(self, part: Part, progress: Progress, grads: Grads) -> Part:
        """Take one step of the server-side model for one client."""
        part = part._replace(progress=progress)
        if self.server_opt_reset == "step":
            part = self.server_opt.restart(part, part.model)
        return self.server_opt.step(part, grads)


sfl_v2 = SplitFedV2
