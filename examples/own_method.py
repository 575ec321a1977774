"""A method of one's own: SFL-V1 whose clients send each activation as one byte instead of four.

    python own_method.py

The client rounds its activations to 255 levels; the server computes with the rounded values, and its gradient goes back
as if nothing had been rounded. The byte counts come from the ledger, which observes every transfer.
"""

# ruff: noqa: F403, F405
from dataclasses import dataclass, field

import torch
from torch import Tensor

import cutlayer as cl
from cutlayer.authoring import *


@method
@dataclass(frozen=True, kw_only=True)
class OneByte:
    """SFL-V1 with activations of one byte."""

    model: Split
    client_opt: Transform
    server_opt: Transform
    client: SplitClient = field(init=False)  # the client's half of every method that back-propagates across the cut

    labels_leave = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "client", SplitClient(model=self.model, opt=self.client_opt))

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), {})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        c = clients.do(self.client.begin, clients.down(MODEL, state.client), clients.down(SETTINGS, state.round))
        s = server.each(self.server_opt.begin, server.copies(state.server, clients), state.round)
        for step in clients.steps():
            active = step.active
            z, pull_client = active.vjp(self.client.forward, c, step.x, step.key)
            coded, y = active.up(ACTIVATIONS(active.do(self.code, z)), LABELS(step.y))
            h, pull_server = server.vjp(self.model.upper, s[active], server.each(decode, coded), step.key)
            top = server.grad(self.loss, h, y)
            gs = server.each(with_loss, server.each(pull_server, top.cut), top.loss)
            gc = active.do(pull_client, active.down(GRADIENTS, gs.cut))
            s[active] = server.each(self.server_opt.step, s[active], gs)
            c[active] = active.do(self.client.update, c, gc)
        models, share = clients.up(MODEL(c.model)), weights(clients, "samples")
        told = server.sum(server.each(report, s.progress))
        return State(state.round + 1, fed.mean(models, share), server.mean(s[models].model, share), {}, told)

    @at_client(gives=ACTIVATIONS)
    def code(self, z: Tensor) -> Tensors:
        scale = z.abs().amax() / 127 + 1e-12
        return {"levels": (z / scale).round().to(torch.int8), "scale": scale}

    def loss(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
        return self.model.loss(h, y), {}


def decode(coded: Tensors) -> Tensor:
    return coded["levels"] * coded["scale"]


def with_loss(grads: Grads, loss: Tensor) -> Grads:
    return grads._replace(loss=loss)


digits = cl.load("digits")
parts = cl.dirichlet(digits.train.y, num_clients=10, alpha=0.5, min_size=16, key=0)
opt = cl.sgd(0.05, momentum=0.9)
for name, build in (("SFL-V1", cl.sfl_v1), ("OneByte", OneByte)):
    torch.manual_seed(0)
    mine = build(model=Split(cl.models.cnn(width=8), cut="conv1"), client_opt=opt, server_opt=opt)
    result = cl.train(mine, digits.train, parts, rounds=15, test=digits.test, batching=cl.Batching(size=8))
    last = result.history[-1]
    print(f"{name}: accuracy {last['test_accuracy']:.3f}, {last['bytes']['up_activations']:,} bytes of activations")
