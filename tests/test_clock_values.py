"""Specifies how simulated time travels with values: devices, links, servers, barriers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import clients_of, images, run, simulation
from torch import Tensor

from cutlayer import models, optim
from cutlayer.core.batches import Batching
from cutlayer.core.kinds import ACTIVATIONS, LABELS, MODEL, SCALARS, SETTINGS, STATISTICS, SYNC
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.program import at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State
from cutlayer.core.values import PerClient
from cutlayer.pieces.start import with_one_server
from cutlayer.planning.devices import Device, Devices
from cutlayer.split import Split

# -- time travels with values ------------------------------------------------------------------------------------

# Three clients with a batch of four 8x8 images each. Seconds of one product of a batch with itself (4 * 2 * 8**3
# FLOPs), and of one batch (4 * 64 * 32 bits) up and down; the server needs a quarter of a second for a product.
PRODUCT, BATCH_BITS = 4096, 8192
WORK, UP, DOWN, AT_SERVER = (4.0, 2.0, 1.0), (1.0, 3.0, 2.0), (1.0, 0.5, 8.0), 0.25
ALL = tuple(Device(PRODUCT / w, BATCH_BITS / u, BATCH_BITS / d) for w, u, d in zip(WORK, UP, DOWN, strict=True))
SPEEDS = Devices(clients=ALL, server=PRODUCT / AT_SERVER)
Ready = dict[int, float]


def product(x: Tensor) -> Tensor:
    return x @ x


def power(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x @ x
    return x


class Scene(NamedTuple):
    """The places of a round, and each client's batch."""

    method: "Told"
    clients: Clients
    x: PerClient
    y: PerClient
    server: Server
    fed: Fed

    def work(self, value: PerClient | None = None) -> PerClient:
        """The same work on each client's batch, or on what came of it."""
        value = self.x if value is None else value
        return self.clients.do(self.method.work if value.blocks[0].raw else self.method.more, value)

    def sent(self) -> PerClient:
        """Work that is at the server: there at 5, 5 and 3 seconds."""
        rows: PerClient = self.clients.up(ACTIVATIONS(self.work()))
        return rows


@method
@dataclass(frozen=True, kw_only=True)
class Told:
    """A method whose round is a story."""

    model: Split
    story: Callable[[Scene], None]
    labels_leave = True

    def start(self, server: Server, fed: Fed) -> State:
        return with_one_server(self.model, optim.sgd(0.1), server, fed)

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        step = next(clients.steps())
        self.story(Scene(self, clients, step.x, step.y, server, fed))
        return state._replace(round=state.round + 1)

    @at_client(gives=ACTIVATIONS)
    def work(self, x: Tensor) -> Tensor:
        return x @ x

    @at_client(gives=ACTIVATIONS)
    def more(self, made: Tensor) -> Tensor:
        return made @ made

    @at_client(gives=ACTIVATIONS)
    def bent(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x @ x, {}

    @at_client()
    def loss(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (x @ x).sum(), {}

    @at_client(gives=MODEL)
    def as_model(self, x: Tensor) -> Tensor:
        return x

    @at_client(gives=SCALARS)
    def as_scalars(self, x: Tensor) -> Tensor:
        return x

    @at_client(gives=STATISTICS)
    def as_statistics(self, x: Tensor) -> Tensor:
        return x

    @at_client(gives=ACTIVATIONS)
    def from_nothing(self) -> Tensor:
        return torch.ones(8, 8) @ torch.ones(8, 8)

    @at_client(gives=ACTIVATIONS)
    def with_numpy(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.numpy())) @ x


def tell(story: Callable[[Scene], Any], given: Devices | None = SPEEDS, **options: Any) -> Any:
    """What one round of a story gives, and the second at which it ends."""
    told: list[Any] = []
    method = Told(model=Split(models.build("cnn", width=2), 2), story=lambda scene: told.append(story(scene)))
    sim = simulation(
        method, images(16, torch.float32), **{"partition": clients_of((4, 4, 4)), **options}, devices=given
    )
    run(sim, 1)
    return told[0], sim.clock and sim.clock.now


def test_a_device_does_one_thing_at_a_time_and_devices_do_not_wait_for_each_other() -> None:
    def story(scene: Scene) -> tuple[Ready, Ready]:
        return scene.work().ready, scene.work().ready

    assert tell(story) == (({0: 4, 1: 2, 2: 1}, {0: 8, 1: 4, 2: 2}), 8)


def test_clients_that_are_asked_one_after_another_work_at_the_same_time() -> None:
    def story(scene: Scene) -> list[Ready]:
        return [scene.clients.only((j,)).do(scene.method.work, scene.x).ready for j in (2, 0, 1)]

    assert tell(story) == ([{2: 1}, {0: 4}, {1: 2}], 4)


def test_a_device_works_in_the_order_of_the_program() -> None:
    """It waits for a value that is on its way, although it could do what comes next."""

    def story(scene: Scene) -> list[Ready]:
        back = scene.clients.down(ACTIVATIONS, scene.sent())
        return [back.ready, scene.work(back).ready, scene.work().ready]

    assert tell(story) == ([{0: 6, 1: 5.5, 2: 11}, {0: 10, 1: 7.5, 2: 12}, {0: 14, 1: 9.5, 2: 13}], 14)


def test_rows_at_the_server_do_not_wait_for_each_other() -> None:
    def story(scene: Scene) -> list[Ready]:
        rows = scene.sent()
        squared = scene.server.each(product, rows)
        out, pull = scene.server.vjp(lambda x, _: (x @ x, {}), rows, rows)
        pulled = scene.server.each(pull, out)
        grad = scene.server.grad(lambda x: ((x @ x).sum(), {}), rows)
        return [rows.ready, squared.ready, out.ready, pulled.ready, grad.ready]

    (rows, *made), end = tell(story)
    assert rows == {0: 5, 1: 5, 2: 3}
    assert made == [{j: t + n * AT_SERVER for j, t in rows.items()} for n in (1, 1, 3, 3)]
    assert end == 5 + 3 * AT_SERVER


COMBINED: dict[str, Callable[[Scene, PerClient], Any]] = {
    "mean": lambda scene, rows: scene.server.mean(rows).ready,
    "sum": lambda scene, rows: scene.server.sum(rows, {0: 1.0, 1: 1.0, 2: 0.0}).ready,
    "concat": lambda scene, rows: scene.server.concat(rows)[0].ready,
}


@pytest.mark.parametrize("combine", COMBINED.values(), ids=COMBINED)
def test_a_combination_of_rows_is_ready_when_the_last_row_is(combine: Callable[[Scene, PerClient], float]) -> None:
    assert tell(lambda scene: combine(scene, scene.sent())) == (5, 5)
    assert tell(lambda scene: combine(scene, scene.sent()[scene.clients.only((2,))]))[0] == 3


def test_rows_together_and_rows_made_of_one_value_are_there_at_the_same_time() -> None:
    def story(scene: Scene) -> list[Ready]:
        rows, server = scene.sent(), scene.server
        merged, back = server.concat(rows)
        picked = server.rows({j: server.pick(rows, j) for j in (1, 2)})
        copies = server.copies(server.mean(rows), scene.clients)
        return [r.ready for r in (server.together(rows), back(server.do(product, merged)), copies, picked)]

    times, _ = tell(story)
    assert times == [dict.fromkeys((0, 1, 2), t) for t in (5, 5 + 3 * AT_SERVER, 5)] + [{1: 5, 2: 5}]


def test_a_mean_is_sent_down_when_the_slowest_client_has_arrived() -> None:
    def story(scene: Scene) -> list[Ready]:
        everyone = scene.clients.down(ACTIVATIONS, scene.server.mean(scene.sent()))
        return [everyone.ready, scene.work(everyone).ready]

    assert tell(story) == ([{0: 6, 1: 5.5, 2: 13}, {0: 10, 1: 7.5, 2: 14}], 14)


def test_one_value_at_the_server_is_worked_on_from_its_own_time_on() -> None:
    def story(scene: Scene) -> list[float]:
        server, rows = scene.server, scene.sent()
        one = server.pick(rows, 2)
        out, pull = server.vjp(lambda x, _: (x @ x, {}), one, one)
        return [one.ready, server.do(product, one).ready, out.ready, server.do(pull, out).ready]

    assert tell(story)[0] == [3, 3 + AT_SERVER, 3 + AT_SERVER, 3 + 3 * AT_SERVER]


def test_a_pullback_takes_two_passes_once_its_gradient_is_there_and_a_gradient_three() -> None:
    def story(scene: Scene) -> list[Ready]:
        out, pull = scene.clients.vjp(scene.method.bent, scene.x)
        gradient = scene.clients.down(ACTIVATIONS, scene.clients.up(ACTIVATIONS(out)))
        return [scene.clients.do(pull, gradient).ready, scene.clients.grad(scene.method.loss, scene.x).ready]

    pulled = {0: 6 + 8.0, 1: 5.5 + 4, 2: 11 + 2.0}
    assert tell(story)[0] == [pulled, {j: t + 3 * WORK[j] for j, t in pulled.items()}]


def test_selected_and_replaced_values_keep_their_own_times() -> None:
    def story(scene: Scene) -> list[Ready]:
        made, some = scene.work(), scene.clients.only((1,))
        made[some] = some.do(scene.method.more, made)
        assert some.up(ACTIVATIONS(made)).ready == {1: 4 + 3}
        return made.ready

    assert tell(story) == ({0: 4, 1: 4, 2: 1}, 7)


BARRIERS_OF_STORY = {
    None: [{0: 4, 1: 2, 2: 1}, {0: 8, 1: 4, 2: 2}, {0: 12}, {0: 16}],
    "step": [{0: 4, 1: 2, 2: 1}, {0: 8, 1: 6, 2: 5}, {0: 12}, {0: 16}],
    "epoch": [{0: 4, 1: 2, 2: 1}, {0: 8}, {0: 12, 1: 10, 2: 9}, {0: 16}],
}


@pytest.mark.parametrize("barrier", BARRIERS_OF_STORY)
def test_at_a_barrier_devices_wait_for_the_slowest(barrier: Any) -> None:
    def story(scene: Scene) -> list[Ready]:
        steps = scene.clients.steps(barrier=barrier)
        return [step.active.do(scene.method.work, step.x).ready for step in steps]

    two_steps_and_one = {"partition": clients_of((8, 4, 4)), "batching": Batching(size=4, epochs=2)}
    assert tell(story, **two_steps_and_one) == (BARRIERS_OF_STORY[barrier], 16)


@pytest.mark.parametrize("sync", (False, True))
def test_models_take_time_only_if_asked_and_numbers_always(sync: bool) -> None:
    def up(kind: Any, name: str) -> Ready:
        times, _ = tell(lambda s: s.clients.up(kind(s.clients.do(getattr(s.method, name), s.x))).ready, given)
        return times

    def down(scene: Scene) -> Ready:
        rows = scene.clients.up(MODEL(scene.clients.do(scene.method.as_model, scene.x)))
        return scene.clients.down(MODEL, scene.fed.mean(rows)).ready

    given = replace(SPEEDS, model_sync=sync)
    nothing, there = dict.fromkeys((0, 1, 2), 0), dict(enumerate(UP))
    assert up(MODEL, "as_model") == (there if sync else nothing)
    assert tell(down, given)[0] == ({j: 3 + t for j, t in enumerate(DOWN)} if sync else nothing)
    assert up(SCALARS, "as_scalars") == there
    assert up(STATISTICS, "as_statistics") == nothing
    assert tell(lambda scene: scene.clients.down(SETTINGS, 1).ready, given) == (nothing, 0)
    assert tell(lambda scene: scene.clients.up(LABELS(scene.y)).ready, given) == (nothing, 0)


def test_an_aggregate_takes_its_time_along_to_the_other_server() -> None:
    def story(scene: Scene) -> float:
        mean = scene.fed.mean(scene.clients.up(MODEL(scene.clients.do(scene.method.as_model, scene.x))))
        return scene.fed.send(SYNC, mean, scene.server).ready

    assert tell(story, replace(SPEEDS, model_sync=True)) == (3, 3)


def test_transfers_on_a_shared_link_take_turns() -> None:
    def story(scene: Scene) -> list[Ready]:
        made = scene.work()
        first, second = scene.clients.up(ACTIVATIONS(made), ACTIVATIONS(made))
        mean = scene.server.mean(scene.server.each(torch.add, first, second))
        for _ in range(2):
            down = scene.clients.down(ACTIVATIONS, mean)
        return [scene.server.each(torch.add, first, second).ready, down.ready]

    assert tell(story) == ([{0: 4 + 2, 1: 2 + 6, 2: 1 + 4}, {0: 8 + 2, 1: 8 + 1, 2: 8 + 16}], 24)


def test_functions_of_nothing_and_of_plain_numbers_have_a_time() -> None:
    def story(scene: Scene) -> list[Any]:
        made = scene.clients.do(scene.method.from_nothing)
        number = scene.server.do(float, 3)
        return [made.ready, number.ready, scene.server.do(partial(torch.ones, 2)).ready]

    quarter = {j: w / 4 for j, w in enumerate(WORK)}  # one 8x8 product instead of four
    assert tell(story) == ([quarter, 0, 0], 1)


def test_a_function_that_leaves_torch_can_be_timed() -> None:
    times, _ = tell(lambda scene: scene.clients.do(scene.method.with_numpy, scene.x).ready)
    assert times == dict(enumerate(WORK))


def test_functions_with_other_numbers_inside_are_other_functions() -> None:
    def story(scene: Scene) -> list[float]:
        one = scene.server.pick(scene.sent(), 0)
        return [scene.server.do(partial(power, times=n), one).ready for n in (1, 3)]

    assert tell(story)[0] == [5 + AT_SERVER, 5 + 3 * AT_SERVER]


def test_without_devices_no_value_has_a_time() -> None:
    def story(scene: Scene) -> list[Any]:
        rows = scene.sent()
        mean = scene.server.mean(rows)
        down = scene.clients.down(ACTIVATIONS, mean)
        held = scene.server.rows({0: scene.server.pick(rows, 0)})
        values = (rows, down, scene.work(down), scene.server.together(rows), scene.server.each(product, rows), held)
        return [mean.ready, scene.server.do(product, mean).ready, *(v.ready for v in values)]

    assert tell(story, None) == ([0.0, 0.0] + [{}] * 6, None)
