"""Attacks of servers that succeed: what nothing in cutlayer stops, so that nobody believes it does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import agree
from evil_server import EvilServer
from safetensors.torch import save_file
from test_engines_agree import plain
from test_two_servers import contents, here
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from two_servers import trained_apart
from victims import RATE, RUNS, VICTIM, WIDE, Attack, answered, attack, credentials, first, own, process, victim

from cutlayer.core import directions, keys, tree
from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol import messages as m
from cutlayer.runs import build
from cutlayer.runs.simulation import Simulation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks on devices")]

PIXELS = 64  # half as many as the first layer has units
Gradient = Callable[[Tensor, Tensor], Tensor]  # of activations and labels


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
        later, _ = answered(a((*back, *step, c.Up(("activations", "labels"), (16, 13))), [8, 1, 1, 1, 1], [chosen]))
        told = later[:, active] / (RATE * much) - 1  # the bias moves, too
        x = [a.batch(step).x.flatten(1) for step in (0, 1)]
        torch.testing.assert_close(told, x[1] @ x[0][0], rtol=1e-3, atol=1e-3)


# -- two owners, on layers that can be inverted ----------------------------------------------------------------------


def unknown(a: Attack) -> Tree:
    """Return layers that only the fed server knows."""
    drawn = torch.Generator().manual_seed(99)
    return a.model._replace(tensors=[torch.randn(t.shape, generator=drawn) for t in a.model.tensors]).tree()


def round_of(a: Attack, gradient: Gradient, model: Tree = None) -> Iterator[Tensor]:
    """Play a round over the layers of the fed server; yield activations, and at the end the model that it is sent."""
    size = a.run.batching.size
    z, y = answered(a.first_step(size=size, model=model))
    part = 2
    for step in range(1, a.run.batching.per_round(len(a.own.data), size)):
        yield z
        back = (c.Put(9, "tensor"), c.Pull(10, 8, 9), c.Do(11, "client.update", (part, 10)))
        part = 11
        again = (c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (part, 3, 6)))
        up = c.Up(("activations", "labels"), (7, 4))
        z, y = answered(a((*back, *again, up), [size, step, step, step, step], [gradient(z, y)]))
    yield z
    back = (c.Put(9, "tensor"), c.Pull(10, 8, 9), c.Do(11, "client.update", (part, 10)))
    a.visit.tell((*back, c.Field(12, 11, "model"), c.Deliver(("model",), (12,))), [1], [gradient(z, y)], round=a.round)


def solved(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return inputs from the activations of a linear layer: each unit above zero is an equation."""
    rows = [(row > 1e-3 * row.max(), row) for row in z.double()]
    w, b = weight.double(), bias.double()
    return torch.stack([torch.linalg.lstsq(w[above], row[above] - b[above]).solution for above, row in rows])


def errors(found: Tensor, data: Arrays) -> Tensor:
    """Return the largest error of each found input, compared with the nearest sample."""
    return torch.cdist(found.double(), data.x.flatten(1).double(), p=torch.inf).min(dim=1).values


def test_a_training_server_wants_the_inputs_behind_the_initial_layers_and_solves_for_them() -> None:
    """Of two owners. The layers follow from the seed of the run, and gradients of zero leave them as they are. Layers
    that only the fed server knows keep the inputs."""
    with attack("wide", two=True) as a:
        found = [solved(z, *a.model.tensors) for z in round_of(a, lambda z, y: torch.zeros_like(z))]
        off = errors(torch.cat(found), a.own.data)
        assert (len(off), len(a.own.data)) == (29 * 16, 479)
        assert off.max() < 2e-6
    with attack("wide", two=True) as a:
        z, _ = answered(a.first_step(size=16, model=unknown(a)))
        assert errors(solved(z, *a.model.tensors), a.own.data).min() > 0.3


def test_a_fed_server_may_start_from_layers_that_the_training_server_does_not_know(tmp_path: Path) -> None:
    """Both read a file of the same name, each its own, and train on its own half of it."""
    run = replace(RUNS["linear"], weights="start.safetensors", rounds=2)
    data, parts = (whole := build.dealt(run)).data, whole.partition

    def method(root: Path | None) -> Method:
        split = build.model_of(run if root else replace(run, weights=None), data, root)
        return build.planned_method(run, split, data, run.clients)[0]

    model = method(None).model
    lower, shapes = model.initial()[0].params.keys(), model.model.state_dict()
    drawn = torch.Generator().manual_seed(1)
    train, fed = ({name: torch.randn(t.shape, generator=drawn) / 8 for name, t in shapes.items()} for _ in range(2))
    files = {"train": train, "fed": fed, "both": {**train, **{name: fed[name] for name in lower}}}
    for name, values in files.items():
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "start.safetensors")
    roots = iter([*[None] * run.clients, tmp_path / "train", tmp_path / "fed"])
    found = trained_apart(lambda: method(next(roots)), data, parts, batching=run.batching, seed=run.seed)
    both = Simulation(method(tmp_path / "both"), data, parts, batching=run.batching, seed=run.seed, engine="loop")
    expected = both.round(both.round(both.start()))
    agree(here(found.fed.client), tree.tensors(plain(expected.client)), tol=0.0)
    agree(here(found.train.server), tree.tensors(plain(expected.server)), tol=0.0)
    of_fed = {fed[name].numpy().tobytes() for name in lower}
    assert of_fed <= contents(found.said["fed"], m.Sent)
    assert not of_fed & (contents(found.said["train"], object) | contents(found.said["peer"], object))


@pytest.mark.parametrize("secret", [None, "of the device"], ids=["by default", "--private-seed"])
def test_a_training_server_wants_the_inputs_by_a_huge_slope_and_solves_for_them_by_default(secret: str | None) -> None:
    """Of two owners, with ZO-SFL: the slope replaces the layers by a direction, which follows from the seed of the run
    unless the device draws it from a secret."""
    with attack("zo_sfl", two=True, **({} if secret is None else {"secret": secret})) as a:
        assert a.fed is not None
        a.fed.send(unknown(a))
        look = (c.Batch(3, 4), c.Own(5), c.Key(6))
        up = c.Up(("activations", "labels"), (7, 4))
        begin = (c.Get(0), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1)))
        first_step = (*begin, *look, c.Do(7, "client.both_ways", (2, 3, 6, 5)), up)
        answered(a(first_step, [1, a.round, 8, 0, 0, 0, 0], begins=True))
        slope = torch.tensor(1e6)
        update = (c.Put(9, "tensor"), c.Do(11, "client.update", (2, 9, 5)))
        next_step = (*look, c.Do(7, "client.both_ways", (11, 3, 6, 5)), up)
        plus, minus, _ = answered(a((*update, *next_step), [8, 1, 1, 1, 1], [slope]))
        seed = keys.fold(keys.fold(a.run.seed, "round", a.round), "own", 0, VICTIM)
        direction = directions.combined(a.model.tree().params, torch.tensor([seed]), slope[None].double())
        off = errors(solved((plus + minus) / 2, *(-RATE * u for u in direction.values())), a.batch(1))
        assert len(off) == 8
        assert off.max() < 2e-4 if secret is None else off.min() > 0.3


def test_a_fed_server_wants_inputs_through_layers_that_few_samples_pass_and_gets_some() -> None:
    """Of two owners, and the training server is honest. A unit that one sample alone has passed has moved by this
    sample, times a number by which its bias has moved. With unit thresholds from public samples, it may be so."""
    with attack("wide", two=True) as a:
        assert a.fed is not None
        torch.manual_seed(0)
        whole, units = build.dealt(RUNS["wide"]), WIDE.options["hidden"][0]
        public = whole.data.take(whole.partition.clients[1]).x.flatten(1)
        weight = torch.randn(units, PIXELS)
        bias = -(public @ weight.T).quantile(1 - 1 / 400, dim=0)
        head = nn.Linear(units, 10)
        opt = torch.optim.SGD(head.parameters(), lr=RATE)

        def honest(z: Tensor, y: Tensor) -> Tensor:
            at_cut = z.clone().requires_grad_()
            opt.zero_grad()
            cross_entropy(head(at_cut), y).backward()
            opt.step()
            assert at_cut.grad is not None
            return at_cut.grad

        for _ in round_of(a, honest, a.model._replace(tensors=[weight, bias]).tree()):
            pass
        new_weight, new_bias = answered(a.fed.hear())
        moved = (new_bias - bias).abs() > 1e-6
        found = ((new_weight - weight) / (new_bias - bias)[:, None])[moved]
        x = a.own.data.x.flatten(1)
        nearest = torch.cdist(found, x, p=torch.inf).min(dim=1)
        told = nearest.indices[nearest.values < 0.01].unique()
        assert len(told) > 40 and len(x) == 479


def test_a_curious_training_server_wants_the_labels_of_a_u_shape_from_gradients_and_gets_them() -> None:
    with attack("u-shaped", two=True) as a:
        assert a.fed is not None
        a.fed.send(a.model.tree())
        begin = (*first(None)[:-1], c.Up(("activations",), (7,)))
        answered(a(begin, [1, a.round, 8, 0, 0, 0, 0], begins=True))
        h = torch.linspace(-1, 1, 8 * 8).reshape(8, 8)
        head = (c.Put(9, "tensor"), c.Key(13), c.Grad(10, "client.head_loss", (2, 9, 4, 13), 1))
        fields = (c.Field(11, 10, "cut"), c.Field(12, 10, "loss"), c.Up(("gradients", "scalars"), (11, 12)))
        gradient, _ = answered(a((*head, *fields), [0], [h]))
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
    a = Attack(server.visit(), None, own("linear"))
    z, y = answered(a.first_step(size=48, model=window(a)))
    mine = a.own.data
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
        numbers = [*a.model.numbers, a.round, 8, 0, 0, 0, 0, (1 << 32) + 1]
        seen = [answered(a((*step, *coded), numbers, a.model.tensors, begins=True))[0] for _ in range(2)]
        assert torch.equal(*seen)
