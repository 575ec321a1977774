"""Attacks of servers that succeed: what nothing in cutlayer stops, so that nobody believes it does."""

from dataclasses import replace

import pytest
import torch
from evil_server import EvilServer
from torch import Tensor
from victims import RUNS, VICTIM, Attack, answered, attack, credentials, first, process, victim

from cutlayer.core.batches import Batching
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.tensors.trees import flatten
from cutlayer.runs import build

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks on devices")]

PIXELS = 64  # half as many as the first layer has units
RATE = 0.05


def window(a: Attack) -> Tree:
    """Return layers that give each pixel, where it is above zero and where it is below."""
    pixels = torch.eye(PIXELS)
    return a.model._replace(tensors=[torch.cat([pixels, -pixels]), torch.zeros(2 * PIXELS)]).tree()


def seen_through(z: Tensor) -> Tensor:
    return z[:, :PIXELS] - z[:, PIXELS:]


def test_a_single_owner_of_both_servers_wants_the_inputs_and_gets_them_bit_by_bit() -> None:
    with attack("linear") as a:
        z, _ = answered(a.first_step(model=window(a)))
        assert torch.equal(seen_through(z), a.batch().x.flatten(1))


def test_two_servers_that_collude_want_the_inputs_and_get_them_bit_by_bit() -> None:
    with attack("linear", two=True) as a:
        z, _ = answered(a.first_step(model=window(a)))
        assert torch.equal(seen_through(z), a.batch().x.flatten(1))


def test_a_training_server_wants_to_compare_samples_by_gradients_of_its_choice_and_can() -> None:
    """Hijacking of the feature space: the gradient of one sample turns the layers towards it, and activations tell the
    product of this sample with all later ones."""
    with attack("linear", two=True) as a:
        z, _ = answered(a.first_step())
        chosen, much = torch.zeros_like(z), 1e6
        active = int((z[0] > 0).nonzero()[0])
        chosen[0, active] = -much
        back = (c.Put(9, "tensor"), c.Pull(10, 8, 9), c.Do(11, "client.update", (2, 10)))
        step = (c.Batch(12, 13), c.Own(14), c.Key(15), c.Vjp(16, 17, "client.forward", (11, 12, 15)))
        later, _ = answered(a((*back, *step, c.Up(("activations", "labels"), (16, 13))), [8, 1, 11, 1, 11], [chosen]))
        told = later[:, active] / (RATE * much) - 1  # the bias moves, too
        x = [a.batch(step).x.flatten(1) for step in (0, 1)]
        torch.testing.assert_close(told, x[1] @ x[0][0], rtol=1e-3, atol=1e-3)


def test_a_curious_training_server_wants_to_recognise_samples_that_it_knows_and_can() -> None:
    """In the first round it knows the layers, as they follow from the seed of the run."""
    with attack("linear", two=True) as a:
        z, _ = answered(a.first_step())
        weight, bias = a.model.tensors
        known = build.dealt(RUNS["linear"]).data
        signs = torch.relu(known.x.flatten(1) @ weight.T + bias)
        found = torch.cdist(z.double(), signs.double()).argmin(dim=1)
        assert torch.equal(known.x[found], a.batch().x)


def test_a_curious_training_server_wants_the_labels_of_a_u_shape_from_gradients_and_gets_them() -> None:
    with attack("u-shaped", two=True) as a:
        assert a.fed is not None
        a.fed.send(a.model.tree())
        begin = (*first(None)[:-1], c.Up(("activations",), (7,)))
        answered(a(begin, [1, a.round, 8, 0, 11, 0, 11], begins=True))
        h = torch.linspace(-1, 1, 8 * 8).reshape(8, 8)
        head = (c.Put(9, "tensor"), c.Key(13), c.Grad(10, "client.head_loss", (2, 9, 4, 13), 1))
        fields = (c.Field(11, 10, "cut"), c.Field(12, 10, "loss"), c.Up(("gradients", "scalars"), (11, 12)))
        gradient, _ = answered(a((*head, *fields), [11], [h]))
        weight, bias = a.model.tensors[3:5]
        outcomes = torch.softmax(h @ weight.T + bias, dim=1)[:, None] - torch.eye(10)  # by sample and label
        told = (outcomes @ weight / len(h) - gradient[:, None]).norm(dim=2).argmin(dim=1)
        assert torch.equal(told, a.batch().y)


def test_a_server_wants_its_own_run_from_a_device_that_agrees_to_any() -> None:
    """All samples in one mini-batch, through the layers that it likes: `--any-run` is for trials."""
    run = replace(RUNS["linear"], batching=Batching(size=48), name="greedy")
    server = EvilServer(credentials("train"), run)
    order = victim("linear").order
    process().order(replace(order, address=server.address, settings={**order.settings, "config": None}))
    a = Attack.__new__(Attack)
    a.visit, a.fed, a.round, a.run = server.visit(), None, 0, run
    whole = build.dealt(run)
    a.model = flatten(build.model_of(run, whole.data).initial()[0])
    z, y = answered(a.first_step(size=48, model=window(a)))
    mine: Arrays = whole.data.take(whole.partition.clients[VICTIM])
    assert len(y) == len(mine) and sorted(y.tolist()) == sorted(mine.y.tolist())
    assert sorted(seen_through(z).tolist()) == sorted(mine.x.flatten(1).tolist())
    a.visit.end(m.Done("over"))
    process().hear("left")
    server.close()


def test_a_server_wants_the_same_noise_in_each_attempt_at_a_round_and_gets_it() -> None:
    """A server that was killed must come to the same bits. With --attempts 1 there is no second attempt."""
    with attack("coded") as a:
        step = first(a.model.skeleton)[:-1]
        coded = (c.Own(9), c.Do(10, "codecs.activations.encode", (7, 9)), c.Up(("activations", "labels"), (10, 4)))
        numbers = [*a.model.numbers, a.round, 8, 0, 11, 0, 11, (1 << 32) + 1]
        seen = [answered(a((*step, *coded), numbers, a.model.tensors, begins=True))[0] for _ in range(2)]
        assert torch.equal(*seen)
