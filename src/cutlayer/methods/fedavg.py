"""FedAvg (McMahan et al. 2017): local training of the whole model, then the weighted mean. docs/methods/fedavg.md"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from cutlayer.core.kinds import MODEL, SETTINGS, STATISTICS
from cutlayer.core.masks import Key
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.program import at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Grads, Model, Part, Progress, State, Tensors
from cutlayer.core.tree import storable
from cutlayer.core.values import Held
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.carry import Carry, Reset
from cutlayer.pieces.factory import factory
from cutlayer.pieces.outer import Outer, Replace
from cutlayer.pieces.report import Report, plausible, report
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.split import Split


@storable
class FedAvgMemory(NamedTuple):
    """What FedAvg keeps between rounds."""

    outer: Held[Tensors]
    carry: Any


FedAvgState = State[FedAvgMemory]


@method
@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """FedAvg: clients hold all layers, so the cut has no effect, and a round is one round trip."""

    model: Split
    opt: Transform
    outer: Outer = Replace()  # applied to the clients' mean after every round
    carry: Carry = Reset()  # what the local optimisers keep of earlier rounds
    agg: Agg = "samples"

    def __post_init__(self) -> None:
        check_agg(self.agg)

    def start(self, server: Server, fed: Fed) -> FedAvgState:
        client, upper = self.model.initial()
        whole = client.joined(upper)
        memory = FedAvgMemory(fed.hold(self.outer.start(whole)), self.carry.start(self.opt, whole, fed))
        return State(0, fed.hold(whole), server.hold(Model({}, {}, {})), memory)

    def round(self, state: FedAvgState, clients: Clients, server: Server, fed: Fed) -> FedAvgState:
        c = clients.do(self.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        c = self.carry.enter(clients, c, state.memory.carry)
        steps = dict.fromkeys(clients.ids, 0)
        for step in clients.steps():
            g = step.active.grad(self.loss, c, step.x, step.y, step.key)
            c[step.active] = step.active.do(self.update, c, g)
            steps |= dict.fromkeys(step.active.ids, step.number + 1)
        progress = STATISTICS(clients.do(self.report, c.progress))
        models, reports, *moments = clients.up(MODEL(c.model), progress, *self.carry.leave(clients, c))
        w, lr = weights(clients, self.agg), self.opt.lr(state.round)
        mean = fed.mean(models, w)
        after = fed.do(self.outer, state.memory.outer, state.client, mean, lr)
        carried = self.carry.keep(fed, state.memory.carry, moments, w, max(steps[j] for j in models.ids))
        return state._replace(
            round=state.round + 1,
            client=after.model,
            memory=FedAvgMemory(after.memory, carried),
            report=fed.sum(fed.each(plausible, reports)),
        )

    @at_client(gives={"model": MODEL})
    def begin(self, model: Model, round: int) -> Part:
        return self.opt.begin(model, round)

    @at_client()
    def loss(self, part: Part, x: Tensor, y: Tensor, key: Key) -> tuple[Tensor, Tensors]:
        out, buffers = self.model.whole(part, x, key)
        return self.model.loss(out, y), buffers

    @at_client(gives={"model": MODEL})
    def update(self, part: Part, grads: Grads) -> Part:
        if self.opt.joint_norm:  # the client has all layers, so it computes the joint norm itself
            grads = grads._replace(norm2=self.opt.norm2(part, grads))
        return self.opt.step(part, grads)

    @at_client(gives=STATISTICS)
    def report(self, progress: Progress) -> Report:
        return report(progress)


@factory
def fedavg(*, model: Split, client_opt: Transform, server_opt: Transform | None = None, agg: Agg = "samples") -> FedAvg:
    """FedAvg; the client's optimiser trains all layers."""
    return FedAvg(model=model, opt=client_opt, agg=agg)
