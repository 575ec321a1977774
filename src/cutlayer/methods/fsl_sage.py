"""FSL-SAGE (Nair et al. 2025): clients train on estimated gradients at the cut. docs/methods/fsl_sage.md"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import nn

from cutlayer.core import keys
from cutlayer.core.checks import check
from cutlayer.core.kinds import ACTIVATIONS, AUXILIARY, LABELS, MODEL, SETTINGS
from cutlayer.core.method import method
from cutlayer.core.places import Clients, Step
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Grads, Part, Progress, State
from cutlayer.core.tree import storable
from cutlayer.core.values import Held, PerClient, united
from cutlayer.errors import ConfigError
from cutlayer.optim.optimiser import Transform, adam
from cutlayer.pieces.auxiliary import Alignment, Auxiliary, Buffer, FirstUnits, Given, Net, appended
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Arrived, in_turns
from cutlayer.pieces.factory import factory
from cutlayer.pieces.report import report
from cutlayer.pieces.sampler import shuffled
from cutlayer.pieces.start import refuse_joint_norm, refuse_u_shape, with_one_server
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.split import Split

KEPT = "auxiliary"  # the name under which clients keep it; its version is the round in which it was sent


@storable
class SageMemory(NamedTuple):
    """What the server keeps of each client between rounds."""

    auxiliary: dict[int, Held[Part]]
    buffer: dict[int, Held[Buffer]]
    sent: dict[int, int]  # the round in which the client was last sent its auxiliary model, unless aligned since


SageState = State[SageMemory]


@method
@dataclass(frozen=True, kw_only=True)
class FslSage:
    """Each client trains with an auxiliary model, which the server aligns with its own gradient at the cut."""

    model: Split
    client_opt: Transform
    server_opt: Transform
    net: Net  # the auxiliary model
    server_interval: int = 5  # q: local iterations from one upload to the next
    align_interval: int = 1  # l: rounds from one alignment to the next
    align_epochs: int = 100
    align_opt: Transform = field(default_factory=lambda: adam(1e-3))
    buffer: int = 1000  # samples of each client that the server keeps
    agg: Agg = "samples"
    client: SplitClient = field(init=False)
    auxiliary: Auxiliary = field(init=False)

    def __post_init__(self) -> None:
        for name, least in (("server_interval", 1), ("align_interval", 1), ("align_epochs", 0), ("buffer", 1)):
            value = getattr(self, name)
            check(type(value) is int and value >= least, name, value, f"a whole number from {least} up")
        check_agg(self.agg)
        refuse_u_shape("FSL-SAGE", self.model)
        refuse_joint_norm("FSL-SAGE", self.client_opt, self.server_opt, self.align_opt)
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))
        object.__setattr__(self, "auxiliary", Auxiliary(model=self.model, net=self.net))

    @property
    def alignment(self) -> Alignment:
        return Alignment(auxiliary=self.auxiliary, opt=self.align_opt)

    def start(self, server: Server, fed: Fed) -> SageState:
        state = with_one_server(self.model, self.server_opt, server, fed)
        return state._replace(memory=SageMemory({}, {}, {}))

    def round(self, state: SageState, clients: Clients, server: Server, fed: Fed) -> SageState:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        s = server.do(self.server_opt.resume, state.server, state.round)
        progress = dict.fromkeys(clients.ids, s.progress)
        memory = SageMemory._make(by_client.copy() for by_client in state.memory)
        for step in clients.steps():
            z, pull = step.active.vjp(self.client.forward, c, step.x, step.key)
            if step.number % self.server_interval == 0:
                arrived = Arrived(self.model, server, *step.active.up(ACTIVATIONS(z), LABELS(step.y)))
                order = shuffled(step.active.ids, step.active.key, step.number)
                s, _ = in_turns(self.turn, order, arrived, self.model, step, server, s, progress)
                self.remember(step, server, memory, arrived)
            if step.number == 0:
                if state.round % self.align_interval == 0:
                    self.align(state.round, step.active, server, s, memory)
                a = self.hand_out(state.round, step.active, server, memory)
            local = step.active.grad(self.auxiliary.local_loss, z, a, step.y, step.key, cut=0)
            c[step.active] = step.active.do(self.client.update, c, step.active.do(pull, local.cut))
        return State(
            round=state.round + 1,
            client=fed.mean(clients.up(MODEL(c.model)), weights(clients, self.agg)),
            server=s,
            memory=memory,
            report=server.sum(server.each(report, server.rows(progress))),
        )

    def turn(self, part: Part, progress: Progress, grads: Grads) -> Part:
        """Take one step of the server-side model for one client."""
        return self.server_opt.step(part._replace(progress=progress), grads)

    def remember(self, step: Step, server: Server, memory: SageMemory, arrived: Arrived) -> None:
        """Append what came up to each client's buffer; a new client gets an auxiliary model."""
        for j in step.active.ids:
            z, y = server.pick(arrived.z, j), server.pick(arrived.y, j)
            before = [memory.buffer[j]] if j in memory.buffer else []
            memory.buffer[j] = server.do(partial(appended, self.buffer), z, y, *before)
            if j not in memory.auxiliary:
                model = server.do(self.net.start, z, keys.fold(step.active.key, "auxiliary", j))
                memory.auxiliary[j] = server.do(self.align_opt.begin, model, 0)

    def align(self, round: int, clients: Clients, server: Server, s: Held, memory: SageMemory) -> None:
        """Train each client's auxiliary model towards the server's gradient at the cut, on the client's buffer."""
        key = server.rows({j: server.hold(keys.fold(clients.key, "align", j)) for j in clients.ids})
        buffer, a = (server.rows({j: kept[j] for j in clients.ids}) for kept in (memory.buffer, memory.auxiliary))
        target = server.each(self.alignment.target, s, buffer, key)
        a = server.each(self.align_opt.resume, a, round)
        for _ in range(self.align_epochs):
            a = server.each(self.alignment.step, a, buffer, target, key)
        for j in clients.ids:
            memory.auxiliary[j] = server.pick(a, j)
            memory.sent.pop(j, None)

    def hand_out(self, round: int, clients: Clients, server: Server, memory: SageMemory) -> PerClient:
        """Return each client's auxiliary model; send it to clients that do not hold the current one."""
        held, sent = clients.memory.versions(KEPT), memory.sent
        holding = clients.only(tuple(j for j in clients.ids if j in held and held[j] == sent.get(j)))
        others = clients.only(tuple(j for j in clients.ids if j not in holding.ids))
        rows = server.rows({j: memory.auxiliary[j].model for j in others.ids})
        sent.update(dict.fromkeys(others.ids, round))
        new = others.memory.keep(KEPT, others.down(AUXILIARY, rows), round)
        return united(new, holding.memory.recall(KEPT))


@factory
def fsl_sage(
    *,
    model: Split,
    client_opt: Transform,
    server_opt: Transform,
    server_interval: int = 5,
    align_interval: int = 1,
    align_epochs: int = 100,
    align_lr: float = 1e-3,
    auxiliary_units: int | None = None,
    auxiliary: nn.Module | None = None,
    buffer: int = 1000,
    agg: Agg = "samples",
) -> FslSage:
    """FSL-SAGE with an auxiliary model of the server's first units and a linear layer, or with your own."""
    if auxiliary is not None and auxiliary_units is not None:
        raise ConfigError(
            "auxiliary_units says how many of the server's units to copy, but auxiliary is a model of your own; leave "
            "one of them out"
        )
    return FslSage(
        model=model,
        client_opt=client_opt,
        server_opt=server_opt,
        net=FirstUnits.of(model, auxiliary_units) if auxiliary is None else Given.of(model, auxiliary),
        server_interval=server_interval,
        align_interval=align_interval,
        align_epochs=align_epochs,
        align_opt=adam(align_lr),
        buffer=buffer,
        agg=agg,
    )
