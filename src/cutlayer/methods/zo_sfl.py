"""ZO-SFL (baseline of Chen et al. 2026): SFL-V1 with SPSA on both sides of the cut. docs/methods/zo_sfl.md"""

from dataclasses import dataclass, field

from cutlayer.core.checks import check_positive
from cutlayer.core.kinds import ACTIVATIONS, LABELS, MODEL, SCALARS, SETTINGS
from cutlayer.core.method import Needs, method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.report import report
from cutlayer.pieces.start import refuse_joint_norm, refuse_live_norms, refuse_u_shape
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.pieces.zeroth import Surrogate, ZerothClient
from cutlayer.split import Split


@method
@dataclass(frozen=True, kw_only=True)
class ZerothOrder:
    """ZO-SFL: SFL-V1 without back-propagation on either side; a step is two forward passes and one scalar back."""

    model: Split
    client_opt: Transform
    server_opt: Transform
    smoothing: float = 1e-3  # μ
    agg: Agg = "samples"
    client: ZerothClient = field(init=False)
    surrogate: Surrogate = field(init=False)

    def __post_init__(self) -> None:
        check_positive("smoothing", self.smoothing)
        check_agg(self.agg)
        refuse_u_shape("ZO-SFL", self.model)
        refuse_live_norms("ZO-SFL", self.model)
        refuse_joint_norm("ZO-SFL", self.client_opt, self.server_opt)
        client = ZerothClient(model=self.model, opt=self.client_opt, smoothing=self.smoothing)
        surrogate = Surrogate(model=self.model, opt=self.server_opt, smoothing=self.smoothing)
        object.__setattr__(self, "client", client)
        object.__setattr__(self, "surrogate", surrogate)

    @property
    def needs(self) -> Needs:
        return Needs(full_precision=True)

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), {})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        s = server.each(self.server_opt.begin, server.copies(state.server, clients), state.round)
        for step in clients.steps():
            moved = step.active.do(self.client.both_ways, c, step.x, step.key, step.own)
            z, y = step.active.up(ACTIVATIONS(moved), LABELS(step.y))
            losses = server.each(self.surrogate.losses, s, z, y, step.key, step.key)
            slope = server.each(self.surrogate.slope, losses)
            s[step.active] = server.each(self.surrogate.update, s, slope, step.key, losses)
            c[step.active] = step.active.do(self.client.update, c, step.active.down(SCALARS, slope), step.own)
        models, w = clients.up(MODEL(c.model)), weights(clients, self.agg)
        return State(
            round=state.round + 1,
            client=fed.mean(models, w),
            server=server.mean(s[models].model, w),
            memory={},
            report=server.sum(server.each(report, s.progress)),
        )


zo_sfl = ZerothOrder
