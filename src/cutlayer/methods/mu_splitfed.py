"""MU-SplitFed (Liang et al. 2025): zeroth-order training, several server steps for each step of the clients.

docs/methods/mu_splitfed.md
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cutlayer.core import directions
from cutlayer.core.checks import check, check_choice, check_count, check_positive, is_number
from cutlayer.core.kinds import ACTIVATIONS, LABELS, MODEL, SCALARS, SETTINGS
from cutlayer.core.method import Needs, method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Model, Progress, State
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.report import Report, report
from cutlayer.pieces.start import refuse_joint_norm, refuse_live_norms, refuse_u_shape
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.pieces.zeroth import Pair, Surrogate, ZerothClient
from cutlayer.split import Split

DeltaModel = Literal["updated", "initial"]


@method
@dataclass(frozen=True, kw_only=True)
class UnbalancedZeroth:
    """MU-SplitFed: no back-propagation on either side, and several server steps for each step of the clients.

    A round is one such step; then both halves move part of the way to the mean.
    """

    model: Split
    client_opt: Transform
    server_opt: Transform
    smoothing: float = 1e-3  # λ
    server_steps: int = 2  # τ
    global_lr: float = 0.3  # η_g
    delta_model: DeltaModel = "updated"  # the server-side copy that computes the client's slope
    agg: Agg = "uniform"  # the paper's 1/K, or each client by its samples
    client: ZerothClient = field(init=False)
    surrogate: Surrogate = field(init=False)

    def __post_init__(self) -> None:
        check_positive("smoothing", self.smoothing)
        check_count("server_steps", self.server_steps)
        check(is_number(self.global_lr) and self.global_lr >= 0, "global_lr", self.global_lr, "a number from 0 up")
        check_choice("delta_model", self.delta_model, DeltaModel, where="mu_splitfed")
        check_agg(self.agg)
        refuse_u_shape("MU-SplitFed", self.model)
        refuse_live_norms("MU-SplitFed", self.model)
        refuse_joint_norm("MU-SplitFed", self.client_opt, self.server_opt)
        client = ZerothClient(model=self.model, opt=self.client_opt, smoothing=self.smoothing)
        surrogate = Surrogate(model=self.model, opt=self.server_opt, smoothing=self.smoothing)
        object.__setattr__(self, "client", client)
        object.__setattr__(self, "surrogate", surrogate)

    @property
    def needs(self) -> Needs:
        return Needs(counts_steps=True, full_precision=True)  # a round is one mini-batch, whatever the batching

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), {})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        s = server.each(self.server_opt.begin, server.copies(state.server, clients), state.round)
        (step,) = clients.steps(count=1)
        z = step.active.do(self.client.forward, c, step.x, step.key)
        moved = step.active.do(self.client.both_ways, c, step.x, step.key, step.own)
        z, moved, y = step.active.up(ACTIVATIONS(z), ACTIVATIONS(moved), LABELS(step.y))
        unmoved = server.each(Pair, z, z)
        for number in range(self.server_steps):
            seed = server.each(directions.child, step.key, number)
            losses = server.each(self.surrogate.losses, s, unmoved, y, step.key, seed)
            slope = server.each(self.surrogate.slope, losses)
            s[step.active] = server.each(self.surrogate.update, s, slope, seed, losses)
        judges = s if self.delta_model == "updated" else server.copies(state.server, clients)
        delta = server.each(self.surrogate.difference, judges, moved, y, step.key)
        c[step.active] = step.active.do(self.client.update_by, c, step.active.down(SCALARS, delta), step.own)
        models, w = clients.up(MODEL(c.model)), weights(clients, self.agg)
        return State(
            round=state.round + 1,
            client=fed.do(self.partway, state.client, fed.mean(models, w)),
            server=server.do(self.partway, state.server, server.mean(s[models].model, w)),
            memory={},
            report=server.sum(server.each(_report, s.progress, delta)),
        )

    def partway(self, old: Model, mean: Model) -> Model:
        """Return θ + η_g (mean - θ), without rounding if η_g is 0 or 1."""
        return old._replace(params={k: torch.lerp(p, mean.params[k], self.global_lr) for k, p in old.params.items()})


def _report(progress: Progress, delta: Tensor) -> Report:
    """Return the report of a client; if its difference is not finite it has stopped, even if its server copy moved."""
    return report(progress._replace(ok=progress.ok & delta.isfinite()))


mu_splitfed = UnbalancedZeroth
