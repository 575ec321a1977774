"""MergeSFL (Liao et al. 2024): the clients' features merged into one server batch. docs/methods/mergesfl.md"""

from dataclasses import dataclass, field
from typing import Literal

from cutlayer.core import keys
from cutlayer.core.checks import check_choice
from cutlayer.core.kinds import MODEL, SETTINGS
from cutlayer.core.method import Needs, Sizes, equal_batches, method
from cutlayer.core.places import Clients, Step
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State
from cutlayer.core.values import Held, PerClient
from cutlayer.errors import ConfigError
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Crossing, Exchange, by_shape
from cutlayer.pieces.factory import factory
from cutlayer.pieces.merge import finite_or_zero, in_share, or_zeros, own_mean, watched, while_any
from cutlayer.pieces.report import report
from cutlayer.pieces.sizes import Regulated
from cutlayer.pieces.start import refuse_joint_norm, with_one_server
from cutlayer.split import Split

Agg = Literal["batch", "uniform"]


@method
@dataclass(frozen=True, kw_only=True)
class MergeSFL:
    """All batches of a step are merged into one, and the one server-side model takes one step."""

    model: Split
    client_opt: Transform
    server_opt: Transform
    exchange: Exchange = by_shape
    sizes: Sizes = equal_batches  # of the round's clients
    agg: Agg = "batch"  # weights of the clients' models: their batch sizes, or equal
    client: SplitClient = field(init=False)

    def __post_init__(self) -> None:
        check_choice("agg", self.agg, Agg, where="mergesfl")
        refuse_joint_norm("MergeSFL", self.client_opt, self.server_opt)
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))

    @property
    def needs(self) -> Needs:
        regulated = self.sizes if isinstance(self.sizes, Regulated) else None
        return Needs(
            batch_sizes=self.sizes,
            chooses_batches=regulated is not None,
            largest_batch=None if regulated is None else regulated.largest,
            merges_batches=True,
        )

    def start(self, server: Server, fed: Fed) -> State:
        return with_one_server(self.model, self.server_opt, server, fed)

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        s = server.do(self.server_opt.resume, state.server, state.round)
        progress = server.copies(s.progress, clients)
        batch = dict.fromkeys(clients.ids, 0)
        for step in clients.steps(sizes=self.sizes(clients.ids, clients.batch)):
            crossing = self.exchange(self.client, step, server, c)
            found = self.merged(crossing, step, server, s, progress) if crossing.z.ids else None
            if found is None:  # all clients with a batch left have disconnected
                continue
            gs, cut = found
            s = server.do(self.server_opt.step, s, gs)
            c[step.active] = step.active.do(self.client.update, c, crossing.back(cut))
            batch |= {j: max(batch[j], b) for j, b in step.sizes.items()}  # the last batch of a pass may be smaller
        return state._replace(
            round=state.round + 1,
            client=fed.mean(clients.up(MODEL(c.model)), batch if self.agg == "batch" else None),
            server=s,
            report=server.sum(server.each(report, progress)),
        )

    def merged(
        self, crossing: Crossing, step: Step, server: Server, s: Held, progress: PerClient
    ) -> tuple[Held, PerClient] | None:
        """Return the gradient of the merged batch's mean loss, and for each client that of its own batch's mean loss.

        The mean is over the samples whose loss is known. Return None if no client is left.
        """
        z, back = server.concat(server.each(finite_or_zero, crossing.z))
        h, pull = server.vjp(self.model.upper, s, z, keys.fold(step.everyone.key, "merged", step.number))
        loss, gradient = crossing.loss(back(h))
        if not gradient.ids:
            return None
        total = sum(step.sizes[j] for j in gradient.ids)
        share = server.rows({j: server.hold(step.sizes[j] / total) for j in gradient.ids})
        progress[step.active] = server.each(watched, progress, crossing.z, loss)
        ok = progress[step.active].ok
        merged, _ = server.concat(or_zeros(server, server.each(in_share, gradient, share, ok), back(h)))
        gs = server.do(while_any, server.do(pull, merged), server.sum(ok))
        return gs, server.each(own_mean, back(gs.cut), share, ok)


@factory
def mergesfl(
    *,
    model: Split,
    client_opt: Transform,
    server_opt: Transform,
    agg: Agg = "batch",
    regulate: bool = False,
    seconds_per_sample: tuple[float, ...] = (),
    largest_batch: int | None = None,
    ingress: int | None = None,
) -> MergeSFL:
    """MergeSFL; given the clients' seconds per sample, batch sizes are regulated to equal step times.

    `regulate` takes the seconds from the run's devices.
    """
    sizes: Sizes = equal_batches
    if seconds_per_sample:
        sizes = Regulated(seconds=tuple(seconds_per_sample), largest=largest_batch, ingress=ingress)
    elif regulate:
        raise ConfigError(
            "mergesfl: regulate needs what a sample takes each client; give the run devices, or seconds_per_sample"
        )
    elif largest_batch is not None or ingress is not None:
        name = "ingress" if largest_batch is None else "largest_batch"
        raise ConfigError(f"mergesfl: {name} regulates nothing without seconds_per_sample; give that too, or neither")
    return MergeSFL(model=model, client_opt=client_opt, server_opt=server_opt, sizes=sizes, agg=agg)
