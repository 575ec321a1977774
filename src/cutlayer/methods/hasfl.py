"""HASFL (Lin et al. 2025, Algorithm 1): every device has its own cut and batch size. docs/methods/hasfl.md"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from cutlayer.core.checks import check_count
from cutlayer.core.kinds import MODEL, SETTINGS, SYNC
from cutlayer.core.masks import Key
from cutlayer.core.method import Needs, check_left, method, too_few
from cutlayer.core.places import Clients, Step
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Grads, Model, Part, State, Tensors
from cutlayer.core.tree import storable
from cutlayer.core.values import Held, PerClient
from cutlayer.errors import ConfigError
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Exchange, by_shape, with_loss
from cutlayer.pieces.factory import factory
from cutlayer.pieces.finite_mean import all_finite, heard, loss_of_finite, mean_of
from cutlayer.pieces.observe import Estimates, Observer, Parts, Watch, renewed
from cutlayer.pieces.recut import of_model, recut, regrown
from cutlayer.pieces.report import report
from cutlayer.pieces.start import refuse_joint_norm
from cutlayer.planning.devices import Devices
from cutlayer.planning.planner import Mode
from cutlayer.planning.policy import Policy, RoundPlan
from cutlayer.planning.problem import LEAST_GAP, Bound, Costs
from cutlayer.planning.profile import Profile
from cutlayer.split import Split

Triple = tuple[PerClient[Grads], PerClient[Grads], PerClient[Grads]]
PROBE_BATCH = 32  # batch size of the first estimates


@storable
class HasflMemory(NamedTuple):
    """What HASFL keeps between rounds."""

    deepest: int  # the deepest of all cuts
    estimates: Held[Estimates] | None = None
    plan: RoundPlan | None = None


HasflState = State[HasflMemory]


@method
@dataclass(frozen=True, kw_only=True)
class Hasfl:
    """Layers above the deepest cut are shared and move at every step; the rest is averaged every `interval` steps."""

    model: Split  # its cut is used for fixed plans and for the first estimates
    client_opt: Transform  # of each device's own layers, on both sides of its cut
    server_opt: Transform  # of the common layers
    policy: Policy  # chooses the cuts and batch sizes of each round
    interval: int = 15  # I: mini-batches between aggregations; this is one round
    replan_every: int = 1  # rounds with the same plan
    target: float | None = None  # ε of the convergence bound
    exchange: Exchange = by_shape
    client: SplitClient = field(init=False)
    observer: Observer | None = field(init=False)

    def __post_init__(self) -> None:
        check_count("interval", self.interval)
        check_count("replan_every", self.replan_every)
        refuse_joint_norm("HASFL", self.client_opt, self.server_opt)
        if self.model.u_shaped and (self.policy.estimates or self.policy.cuts in ("random", "resources")):
            raise ConfigError("hasfl plans one cut for each device, not a U-shape; give it fixed batches and cuts")
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))
        object.__setattr__(self, "observer", Observer(model=self.model) if self.policy.estimates else None)

    @property
    def fewest(self) -> int:
        """The fewest clients: two if layers or estimates may change servers, which would reveal a single client's."""
        return 1 if self.policy.steady and not self.policy.estimates else 2

    @property
    def busiest(self) -> "Hasfl | None":
        """The same method with batches that are all large enough for statistics; None if it computes none."""
        if self.observer is None:
            return None
        return replace(self, policy=self.policy.of_at_least(self.fewest_samples))

    @property
    def needs(self) -> Needs:
        return Needs(
            fewest_clients=self.fewest,
            num_clients=self.policy.num_clients,
            counts_steps=True,
            smallest_batch=self.policy.smallest_batch or PROBE_BATCH,
            chooses_batches=self.policy.batches != "fixed" or self.policy.estimates,
            largest_batch=max(self.policy.largest_batch, PROBE_BATCH if self.policy.estimates else 1),
            busiest=self.busiest,
            moves_cut=self.policy.cuts in ("planned", "random", "resources"),
            lowest_cut=self.policy.lowest_cut,
        )

    def start(self, server: Server, fed: Fed) -> HasflState:
        lower, upper = self.model.initial()
        part = self.server_opt.begin(upper, 0)
        return State(0, fed.hold(lower), server.hold(part), HasflMemory(self.model.cut))

    def round(self, state: HasflState, clients: Clients, server: Server, fed: Fed) -> HasflState:
        estimates = state.memory.estimates
        if self.observer is not None and estimates is None:
            estimates = self.first_estimates(state, clients, server, fed)
        plan = self.plan(state, clients, server, estimates)
        asked, clients = clients.ids, clients.only(tuple(plan.cuts))
        if len(clients.ids) < self.fewest:
            raise ConfigError(f"only client {clients.ids[0]} can take part ({plan.notes[0]}), and two are needed")
        state = self.recut(state, max(plan.cuts.values()), server, fed)
        looks = (state.round + 1) % self.replan_every == 0
        parts, new = self.train(state, plan, clients, server, fed, self.interval, looks)
        models = clients.up(MODEL(parts.device.model))
        forged = fed.each(Model.joined, models, server.send(MODEL, parts.between[models].model, fed))
        mean = fed.mean(forged)  # (7)
        check_left("hasfl", mean, self.fewest)
        if new is not None and estimates is not None:
            estimates = server.do(renewed, estimates, new)
        return State(
            round=state.round + 1,
            client=mean,
            server=parts.common,
            memory=HasflMemory(parts.deepest, estimates, plan._replace(asked=asked)),
            report=server.sum(server.each(report, parts.between.progress)),
        )

    def train(
        self,
        state: HasflState,
        plan: RoundPlan,
        clients: Clients,
        server: Server,
        fed: Fed,
        steps: int,
        looks: bool,
    ) -> tuple[Parts, Held[Estimates] | None]:
        """Train `steps` mini-batches of every client; if `looks`, also estimate the loss's constants."""
        parts = self.hand_out(state, plan, clients, server, fed)
        watch = self.watch(clients, plan, server, fed) if looks else None
        begin = watch and watch.look(partial(self.gradients, server, parts), parts)
        for step in clients.steps(barrier="step", sizes=plan.batches, count=steps):
            gc, gm, gs = self.gradients(server, parts, step)
            parts.between[step.active] = server.each(self.client_opt.step, parts.between, gm)  # (5)
            parts.device[step.active] = step.active.do(self.client.update, parts.device, gc)  # (6)
            ok = parts.between[step.active].progress.ok
            mean = mean_of(server, server.each(heard, gs, ok), ok)
            parts = parts._replace(common=server.do(self.server_opt.step, parts.common, mean))  # (4)
        end = watch and watch.look(partial(self.gradients, server, parts), parts)
        device, between = clients.together(parts.device, parts.between, *(end or ()))[:2]
        new = watch.estimate(begin, end) if watch and begin and end else None
        return parts._replace(device=device, between=between), new

    def hand_out(self, state: HasflState, plan: RoundPlan, clients: Clients, server: Server, fed: Fed) -> Parts:
        """Give each device the layers up to its cut, and the server a copy of those from there to the deepest cut."""
        cuts = {j: plan.cuts[j] for j in clients.ids}
        deepest = state.memory.deepest
        names = {k: self.model.at(k).sides[0] for k in {*cuts.values(), deepest}}
        below = {k: fed.do(partial(of_model, names[k]), state.client) for k in names}
        between = {k: fed.do(partial(of_model, names[deepest] - names[k]), state.client) for k in names}
        nothing = server.hold(Model({}, {}, {}))
        own = clients.down(MODEL, fed.rows({j: below[k] for j, k in cuts.items()}))
        rest = server.rows(
            {j: nothing if k == deepest else fed.send(SYNC, between[k], server) for j, k in cuts.items()}
        )
        device, kept = clients.together(
            clients.do(self.client.begin, own, clients.down(SETTINGS, state.round)),
            server.each(self.client_opt.begin, rest, state.round),
        )
        cut_there = server.rows({j: server.hold(k) for j, k in cuts.items()})
        common = server.do(self.server_opt.resume, state.server, state.round)
        return Parts(device, kept, common, clients.down(SETTINGS, cut_there), cut_there, deepest)

    def gradients(self, server: Server, parts: Parts, step: Step) -> Triple:
        """Return the gradients of each device's mean loss: of its layers on both sides, and of the common ones."""
        crossing = self.exchange(self.client, step, server, parts.device, parts.cut)
        lift = partial(self.through_between, parts.deepest)
        h, pull_between = server.vjp(lift, parts.between, crossing.z, step.key, parts.cut_there)
        above = self.model.at(parts.deepest).upper
        out, pull_common = server.vjp(above, server.copies(parts.common, step.active), h, step.key)
        loss, gradient = crossing.loss(out)
        gs = server.each(with_loss, server.each(pull_common, gradient), loss)
        gm = server.each(with_loss, server.each(pull_between, gs.cut), server.each(loss_of_finite, gs))
        return crossing.back(gm.cut), gm, gs

    def through_between(self, deepest: int, part: Part, z: Tensor, key: Key, cut: int) -> tuple[Tensor, Tensors]:
        """Run the layers from a device's cut to the deepest one."""
        return self.model.at(cut, deepest).upper(part, z, key)

    def recut(self, state: HasflState, deepest: int, server: Server, fed: Fed) -> HasflState:
        """Move the layers between the old and the new deepest cut to the other server, as aggregates."""
        before = state.memory.deepest
        if deepest == before:
            return state
        old, new, common = self.model.at(before), self.model.at(deepest), state.server.model
        lower, upper = recut(state.client, common, old, new, server, fed, of_model)
        part = server.do(partial(regrown, self.server_opt), state.server, upper, state.round)
        return state._replace(client=lower, server=part, memory=state.memory._replace(deepest=deepest))

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self, state: HasflState, clients: Clients, server: Server, estimates: Held[Estimates] | None) -> RoundPlan:
        """Return this round's cuts and batch sizes: the last round's, or a new plan from what is known by now."""
        last = state.memory.plan
        if last is not None and state.round % self.replan_every and last.asked == clients.ids:
            return last
        known = None if estimates is None else self.bound(server.look(estimates), state.round)
        return self.policy(
            clients.ids,
            batch=clients.batch,
            cut=self.model.cut,
            samples={j: int(n) for j, n in clients.weights.items()},
            key=clients.key,
            bound=known,
            previous=last,
        )

    def bound(self, estimates: Estimates, round: int) -> Bound:
        beta, noise, slope, gap = (a.double().cpu().numpy() for a in estimates)
        lr = self.client_opt.lr(round)
        left = max(float(gap), LEAST_GAP)
        return Bound(beta=float(beta), lr=lr, noise=noise, slope=slope, gap=left, target=self.target)

    def first_estimates(self, state: HasflState, clients: Clients, server: Server, fed: Fed) -> Held[Estimates]:
        """Estimate from one step at the model's own cut; the trained parts are discarded."""
        samples = {j: int(n) for j, n in clients.weights.items()}
        plan = self.policy.probe(clients.ids, batch=PROBE_BATCH, cut=self.model.cut, samples=samples)
        taking = clients.only(tuple(plan.cuts))
        _, estimates = self.train(state, plan, taking, server, fed, steps=1, looks=True)
        if estimates is None and len(taking.ids) < len(plan.cuts):
            raise too_few("hasfl", self.fewest)
        if estimates is None:
            raise ConfigError(
                f"hasfl estimates its plan from at least two clients with {self.fewest_samples} samples or more each; "
                "use more clients, or give fixed batches and cuts"
            )
        if not all_finite(server.look(estimates)):
            raise ConfigError("no client's gradients are finite, so there is nothing to plan by; check the data")
        return estimates

    def watch(self, clients: Clients, plan: RoundPlan, server: Server, fed: Fed) -> Watch | None:
        """Return the clients whose batch has two halves; None if fewer than two, whose mean would reveal one client."""
        able = tuple(j for j in clients.ids if plan.batches[j] >= self.fewest_samples)
        if self.observer is None or len(able) < 2:
            return None
        return Watch(self.observer, clients.only(able), plan.batches, server, fed)

    @property
    def fewest_samples(self) -> int:
        """The smallest batch with two halves, each with batch statistics if a layer needs them."""
        return 4 if self.model.normalises else 2

    def metrics(self, state: HasflState) -> dict[str, Any]:
        plan = state.memory.plan
        assert plan is not None  # a round has been played
        found: dict[str, Any] = {"plan": {"batches": dict(plan.batches), "cuts": dict(plan.cuts), "notes": plan.notes}}
        if state.memory.estimates is not None:
            bound = self.bound(state.memory.estimates.tree, state.round - 1)
            arrays = {"noise": bound.noise.tolist(), "slope": bound.slope.tolist()}
            found["bound"] = {"beta": bound.beta, "lr": bound.lr, **arrays, "gap": bound.gap}
        return found


@factory
def hasfl(
    *,
    model: Split,
    client_opt: Transform,
    server_opt: Transform,
    interval: int = 15,
    batches: Literal["planned", "random", "fixed"] | tuple[int, ...] = "planned",
    cuts: Literal["planned", "random", "resources", "fixed"] | tuple[int, ...] = "planned",
    mode: Mode = "joint",
    least_batch: int = 1,
    random_batch: tuple[int, int] = (1, 64),
    replan_every: int = 1,
    target: float | None = None,
    devices: Devices | None = None,
    costs: Costs | Profile | None = None,
) -> Hasfl:
    """HASFL: every device has its own cut and batch size; planned or, as in the baselines, random or fixed.

    `devices` and `costs` come from the run; in Python give `train`'s devices and `cutlayer.profile(model, sample)`.
    """
    policy = Policy(
        batches=batches,
        cuts=cuts,
        mode=mode,
        interval=interval,
        least_batch=least_batch,
        random_batch=random_batch,
        devices=devices,
        costs=Costs.of(costs) if isinstance(costs, Profile) else costs,
    )
    return Hasfl(
        model=model,
        client_opt=client_opt,
        server_opt=server_opt,
        policy=policy,
        interval=interval,
        replan_every=replan_every,
        target=target,
    )
