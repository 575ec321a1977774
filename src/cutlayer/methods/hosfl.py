"""HO-SFL (Chen et al. 2026): the server back-propagates, clients only run forward. docs/methods/hosfl.md"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cutlayer.core import directions, keys
from cutlayer.core.checks import check, check_count, check_positive
from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, LABELS, SETTINGS, SETUP, SLOPES
from cutlayer.core.method import Needs, method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Part, State
from cutlayer.core.tree import storable
from cutlayer.core.values import Held, PerClient
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.exchange import Arrived, through_server
from cutlayer.pieces.finite_mean import all_finite, heard, mean_of, or_zero
from cutlayer.pieces.hybrid import History, HybridClient, refuse_draws
from cutlayer.pieces.report import report_of
from cutlayer.pieces.start import refuse_joint_norm, refuse_live_norms, refuse_u_shape
from cutlayer.pieces.weights import Agg, check_agg, weights
from cutlayer.split import Split

Versions = dict[int, int]

PART = "part"  # the name under which clients keep it; its version is the number of rounds in it


@storable
class HybridMemory(NamedTuple):
    """What HO-SFL keeps between rounds: the log, and the version that each known client holds."""

    log: Held[History]
    oldest: int  # the first round in the log
    seen: Versions  # by client: its version after its last round
    behind: Versions  # by client that disconnected: its version before that round


HybridState = State[HybridMemory]


@method
@dataclass(frozen=True, kw_only=True)
class HybridOrder:
    """HO-SFL: the server back-propagates, clients only run forward and exchange slopes instead of models.

    A round is one step; a client that was away replays a log.
    """

    model: Split
    client_opt: Transform
    server_opt: Transform
    perturbations: int = 5  # P
    smoothing: float = 1e-3  # μ
    overlap: int = 0  # perturbed passes while the gradient is on its way; each holds one more cut tensor in memory
    side_by_side: int = 1  # perturbed passes at once: faster on a device with idle cores, but each takes memory
    max_history: int = 10_000  # most rounds in the log; a client that was away for longer downloads the model
    agg: Agg = "uniform"  # the paper's 1/K, or each client by its samples
    client: HybridClient = field(init=False)

    def __post_init__(self) -> None:
        check_count("perturbations", self.perturbations)
        check_count("max_history", self.max_history)
        check_positive("smoothing", self.smoothing)
        fits = type(self.overlap) is int and 0 <= self.overlap <= self.perturbations
        check(fits, "overlap", self.overlap, f"a whole number from 0 to {self.perturbations}, the perturbations")
        fits = type(self.side_by_side) is int and 1 <= self.side_by_side <= self.perturbations
        wanted = f"a whole number from 1 to {self.perturbations}, the perturbations"
        check(fits, "side_by_side", self.side_by_side, wanted)
        check_agg(self.agg)
        refuse_u_shape("HO-SFL", self.model)
        refuse_live_norms("HO-SFL", self.model, sides=("client",))
        refuse_joint_norm("HO-SFL", self.client_opt, self.server_opt)
        if self.side_by_side > 1:
            refuse_draws(self.model)
        client = HybridClient(
            model=self.model,
            opt=self.client_opt,
            smoothing=self.smoothing,
            overlap=self.overlap,
            side_by_side=self.side_by_side,
        )
        object.__setattr__(self, "client", client)

    @property
    def needs(self) -> Needs:
        return Needs(counts_steps=True, full_precision=True)  # a round is one mini-batch, whatever the batching

    def start(self, server: Server, fed: Fed) -> HybridState:
        lower, upper = self.model.initial()
        client, one = fed.hold(self.client_opt.begin(lower, 0)), server.hold(self.server_opt.begin(upper, 0))
        log = fed.hold(History.empty(self.perturbations))
        return State(0, client, one, HybridMemory(log, 0, {}, {}))

    def round(self, state: HybridState, clients: Clients, server: Server, fed: Fed) -> HybridState:
        drawn = fed.hold(directions.seeds(keys.fold(clients.key, "directions"), self.perturbations))
        seeds, w = clients.down(SLOPES, drawn), weights(clients, self.agg)
        kept = self.usable(state, clients)
        c = self.synchronised(state, clients, kept, fed)
        s = server.do(self.server_opt.resume, state.server, state.round)
        (step,) = clients.steps(count=1)
        # Phase 1: forward; perturbed passes may begin before the gradient arrives
        z = step.active.do(self.client.forward, c, step.x, step.key)
        ahead = step.active.do(self.client.ahead, c, step.x, step.key, seeds)
        crossing = Arrived(self.model, server, *step.active.up(ACTIVATIONS(z), LABELS(step.y)))
        # Phase 2: the server back-propagates (12, 13)
        gs = through_server(crossing, self.model, step, server, server.copies(s, step.active))
        # Phase 3: slopes along the shared directions (15-17)
        cut = step.active.down(GRADIENTS, gs.cut)
        v = step.active.up(SLOPES(step.active.do(self.client.slopes, c, step.x, step.key, seeds, z, cut, ahead)))
        # The server steps for the clients whose slopes arrived, so both halves move by the same clients (14)
        gs = gs[v]
        counts = server.each(all_finite, gs)
        s = server.do(self.server_opt.step, s, mean_of(server, server.each(heard, gs, counts), counts, w))
        # Phase 4: the mean of the slopes is the update of all clients (18-20)
        finite = fed.each(all_finite, v)
        slopes = mean_of(fed, fed.each(or_zero, v, finite), finite, w)
        c = clients.do(self.client.update, c, seeds, clients.down(SLOPES, slopes))
        clients.memory.keep(PART, c, state.round + 1)
        return State(
            round=state.round + 1,
            client=fed.do(self.client.update, state.client, drawn, slopes),
            server=s,
            memory=self.logged(state, clients, kept, fed, drawn, slopes),
            report=server.sum(server.each(report_of, gs.loss, counts)),
        )

    def usable(self, state: HybridState, clients: Clients) -> Versions:
        """Return the versions that the log can bring up to date.

        A version that is newer than the server's record comes from rounds that a restored server has lost.
        """
        memory, kept = state.memory, clients.memory.versions(PART)
        return {j: version for j, version in kept.items() if memory.oldest <= version <= memory.seen.get(j, -1)}

    def synchronised(self, state: HybridState, clients: Clients, kept: Versions, fed: Fed) -> PerClient[Part]:
        """Algorithm 3: return each client's part as of this round, from what it kept and the rounds that it missed.

        A client that kept nothing, or a version that is older than the log, downloads the model with its moments.
        """
        oldest, able = state.memory.oldest, clients.only(tuple(kept))
        others = clients.only(tuple(j for j in clients.ids if j not in able.ids))
        for version in range(min((kept[j] for j in able.ids), default=state.round), state.round):
            behind = able.only(tuple(j for j in able.ids if kept[j] <= version))
            missed = behind.down(SLOPES, fed.do(History.at, state.memory.log, version - oldest))
            # Kept at once, so that in the next step they join the clients that missed less.
            behind.memory.keep(PART, behind.do(self.client.catch_up, behind.memory.recall(PART), missed), version + 1)
        whole = [others.down(SETUP, value) for value in (state.client.model, state.client.moments)]
        downloaded = others.do(self.client.adopt, *whole, others.down(SETTINGS, state.round))
        others.memory.keep(PART, downloaded, state.round)
        return clients.memory.recall(PART)

    def logged(
        self, state: HybridState, clients: Clients, kept: Versions, fed: Fed, seeds: Held, slopes: Held
    ) -> HybridMemory:
        """Append this round to the log, and drop rounds that no known client may still miss.

        A client that disconnected in this round may hold any version from the one it came with to this round's.
        """
        now, here, before = state.round + 1, clients.ids, state.memory
        lost = {j: version for j, version in kept.items() if j not in here}
        seen = {**before.seen, **dict.fromkeys(lost, state.round), **dict.fromkeys(here, now)}
        behind = {j: version for j, version in before.behind.items() if j not in here} | lost
        oldest = max(min({**seen, **behind}.values()), now - self.max_history)
        log = fed.do(History.plus, before.log, seeds, slopes)
        log = fed.do(History.since, log, oldest - before.oldest)
        return HybridMemory(log, oldest, seen, behind)

    def metrics(self, state: HybridState) -> dict[str, Any]:
        return {"extra_cut_tensors": self.extra_cut_tensors, "history_rounds": state.round - state.memory.oldest}

    @property
    def extra_cut_tensors(self) -> int:
        """The cut tensors that a client holds beside the activations, their gradient and one pass."""
        group = min(self.side_by_side, self.perturbations - self.overlap)
        return self.overlap + max(group - 1, 0)


hosfl = HybridOrder
