"""SFL-V1 (Thapa et al. 2022; Algorithm 1 of the cut-layer study). docs/methods/sfl_v1.md"""

from dataclasses import dataclass, field
from typing import Literal

from cutlayer.errors import UnknownNameError
from cutlayer.kinds import MODEL, SETTINGS
from cutlayer.methods.base import final
from cutlayer.optim import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Exchange, by_shape, through_server
from cutlayer.pieces.fuse import AverageEachEpoch, AverageEachStep, Fuse, Keep
from cutlayer.pieces.norms import Side, joint_norms
from cutlayer.pieces.outer import Outer, Replace
from cutlayer.pieces.report import report
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.places import Clients
from cutlayer.servers import Fed, Server
from cutlayer.split import Split
from cutlayer.state import State

Sync = Literal["round", "epoch", "step"]


@final
@dataclass(frozen=True, kw_only=True)
class SplitFed:
    """Every client owns a server-side copy; both halves are averaged when the round ends."""

    model: Split
    client_opt: Transform
    server_opt: Transform
    exchange: Exchange = by_shape
    fuse: Fuse = Keep()  # after every step, over the server-side parts
    outer: Outer = Replace()  # after every round, at each half's own place
    agg: Agg = "samples"
    client: SplitClient = field(init=False)

    def __post_init__(self) -> None:
        check_agg(self.agg)
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        memory = {"client": fed.hold(self.outer.start(lower)), "server": server.hold(self.outer.start(upper))}
        return State(0, fed.hold(lower), server.hold(upper), memory)

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        s = server.each(self.server_opt.begin, server.copies(state.server, clients), state.round)
        for step in clients.steps(barrier=self.fuse.barrier):
            crossing = self.exchange(self.client, step, server, c)
            gs = through_server(crossing, self.model, step, server, s[step.active])
            gc = crossing.back(gs.cut)
            if self.client_opt.joint_norm or self.server_opt.joint_norm:
                gc, gs = joint_norms(self.client, self.server_opt, step, server, Side(c, gc), Side(s[step.active], gs))
            s[step.active] = server.each(self.server_opt.step, s[step.active], gs)
            c[step.active] = step.active.do(self.client.update, c, gc)
            self.fuse(server, self.server_opt, s, step)
        models, w = clients.up(MODEL(c.model)), weights(clients, self.agg)
        lower, upper = fed.mean(models, w), server.mean(s[models].model, w)
        rate_c, rate_s = self.client_opt.lr(state.round), self.server_opt.lr(state.round)
        memory_c, client = fed.do(self.outer, state.memory["client"], state.client, lower, rate_c)
        memory_s, upper = server.do(self.outer, state.memory["server"], state.server, upper, rate_s)
        return State(
            round=state.round + 1,
            client=client,
            server=upper,
            memory={"client": memory_c, "server": memory_s},
            report=server.sum(server.each(report, s.progress)),
        )


def sfl_v1(
    *, model: Split, client_opt: Transform, server_opt: Transform, sync: Sync = "round", agg: Agg = "samples"
) -> SplitFed:
    """SFL-V1 whose server-side copies are averaged after every `round`, `epoch` or `step`."""
    fuses: dict[str, Fuse] = {"round": Keep(), "epoch": AverageEachEpoch(agg), "step": AverageEachStep(agg)}
    if sync not in fuses:
        raise UnknownNameError("sync", str(sync), fuses, where="sfl_v1")
    return SplitFed(model=model, client_opt=client_opt, server_opt=server_opt, fuse=fuses[sync], agg=agg)
