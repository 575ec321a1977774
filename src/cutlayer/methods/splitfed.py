"""SFL-V1 (Thapa et al. 2022; Algorithm 1 of the cut-layer study). docs/methods/sfl_v1.md"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cutlayer.core.kinds import MODEL, SETTINGS
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State, Tensors
from cutlayer.core.tree import storable
from cutlayer.core.values import Held
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Exchange, Side, by_shape, joint_norms, through_server
from cutlayer.pieces.factory import factory
from cutlayer.pieces.fuse import AverageEachEpoch, AverageEachStep, Fuse, Keep
from cutlayer.pieces.outer import Outer, Replace
from cutlayer.pieces.report import report
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.registry import find
from cutlayer.split import Split

Sync = Literal["round", "epoch", "step"]


@storable
class SplitFedMemory(NamedTuple):
    """The memory of the outer rule for each half of the model."""

    client: Held[Tensors]
    server: Held[Tensors]


SplitFedState = State[SplitFedMemory]


@method
@dataclass(frozen=True, kw_only=True)
class SplitFed:
    """Every client has its own server-side copy; both halves are averaged at the end of a round."""

    model: Split
    client_opt: Transform
    server_opt: Transform
    exchange: Exchange = by_shape
    fuse: Fuse = Keep()  # applied to the server-side parts after every step
    outer: Outer = Replace()  # applied after every round, at each half's own place
    agg: Agg = "samples"
    client: SplitClient = field(init=False)

    def __post_init__(self) -> None:
        check_agg(self.agg)
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))

    def start(self, server: Server, fed: Fed) -> SplitFedState:
        lower, upper = self.model.initial()
        memory = SplitFedMemory(fed.hold(self.outer.start(lower)), server.hold(self.outer.start(upper)))
        return State(0, fed.hold(lower), server.hold(upper), memory)

    def round(self, state: SplitFedState, clients: Clients, server: Server, fed: Fed) -> SplitFedState:
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
        after_c = fed.do(self.outer, state.memory.client, state.client, lower, rate_c)
        after_s = server.do(self.outer, state.memory.server, state.server, upper, rate_s)
        return State(
            round=state.round + 1,
            client=after_c.model,
            server=after_s.model,
            memory=SplitFedMemory(after_c.memory, after_s.memory),
            report=server.sum(server.each(report, s.progress)),
        )


@factory
def sfl_v1(
    *, model: Split, client_opt: Transform, server_opt: Transform, sync: Sync = "round", agg: Agg = "samples"
) -> SplitFed:
    """SFL-V1; server-side copies are averaged after every `round`, `epoch` or `step`."""
    fuses: dict[str, Fuse] = {"round": Keep(), "epoch": AverageEachEpoch(agg), "step": AverageEachStep(agg)}
    fuse = find("sync", fuses, sync, "sfl_v1")
    return SplitFed(model=model, client_opt=client_opt, server_opt=server_opt, fuse=fuse, agg=agg)
