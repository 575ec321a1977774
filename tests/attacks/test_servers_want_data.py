"""Attacks of servers on the data of a device that has agreed to a run with two owners, and has told its terms."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_pool import Served, shared
from evil_server import EvilServer
from test_grpc_faults import RUN, devices, outcome, serving, simulated
from victims import BACK, NAMES, NEXT, RUNS, answered, attack, credentials, first, folder, own, refused, victim

from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.server.streams import OVER
from cutlayer.runs import config
from cutlayer.runs.config import Run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks on devices")]

OWN = "this device's own run has "
STEP = (c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6)))
BEGIN = (c.Get(0), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1)))


# -- the training server of two owners -----------------------------------------------------------------------------


def test_a_training_server_wants_the_inputs_through_weights_of_its_choice() -> None:
    with attack(two=True) as a:
        chosen = [torch.ones_like(t) for t in a.model.tensors]
        said = a(first(a.model.skeleton), [*a.model.numbers, a.round, 8, 0, 11, 0, 11], chosen, begins=True)
        refused(said, OWN + "'receive model' here, but the server asks for: receive something else")


def test_a_training_server_wants_to_change_the_weights_in_the_middle_of_a_round() -> None:
    with attack(two=True) as a:
        answered(a.first_step())
        said = a(
            (c.Put(0, a.model.skeleton), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1))), [0], a.model.tensors
        )
        refused(said, "receive something else")


def test_a_training_server_wants_all_samples_in_one_mini_batch() -> None:
    with attack(two=True) as a:
        refused(a.first_step(size=48), OWN + "batches of 8 samples, but the server asks for 48")


def test_a_training_server_wants_each_sample_alone() -> None:
    with attack(two=True) as a:
        refused(a.first_step(size=1), OWN + "batches of 8 samples, but the server asks for 1")


def test_a_training_server_wants_mini_batches_that_the_round_does_not_have() -> None:
    with attack(two=True) as a:
        refused(a.first_step(step=5), OWN + "2 mini-batches in a round, but the server asks for number 6")


def test_a_training_server_wants_the_second_mini_batch_with_the_first_weights() -> None:
    with attack(two=True) as a:
        refused(a.first_step(step=1), "load the other mini-batch")


def test_a_training_server_wants_the_same_mini_batch_twice() -> None:
    with attack() as a:
        z, _ = answered(a.first_step())
        refused(a((*BACK, *NEXT), (8, 0, 11, 1, 11), (torch.zeros_like(z),)), "load the first mini-batch")


def test_a_training_server_wants_mini_batches_of_its_choice_by_a_key() -> None:
    with attack(two=True) as a:
        refused(a.first_step(key=5), f"the key of round {a.round + 1} is not that of this device's own run")


def test_a_training_server_wants_rounds_beyond_the_run() -> None:
    with attack(two=True) as a:
        refused(a.first_step(round=10**6), "the server asks for round 1000001, but this device's own run has 1000")


def test_a_training_server_wants_a_round_as_often_as_it_likes() -> None:
    with attack() as a:
        for _ in range(3):
            answered(a.first_step())
        refused(a.first_step(), f"this device has played round {a.round + 1} as often as its owner allows (3)")


def test_a_training_server_wants_a_round_again_under_the_numbers_of_others() -> None:
    """Attempts would be counted where they do no harm."""
    with attack() as a:
        numbers = [*a.model.numbers, a.round, 8, 0, 11, 0, 11]
        commands = first(a.model.skeleton)
        for other in (a.round + 500, 10**9):
            a.visit.tell(commands[:3], numbers[: len(a.model.numbers) + 1], a.model.tensors, begins=True, round=a.round)
            rest = numbers[len(a.model.numbers) + 1 :]
            refused(a(commands[3:], rest, round=other), "another round came than the one that it began with")


def test_a_training_server_wants_a_round_again_after_the_device_has_come_back() -> None:
    with attack() as a:
        for _ in range(3):
            answered(a.first_step())
        last = a.round
    with attack() as a:
        refused(a.first_step(round=last), "as often as its owner allows (3)")


def test_a_training_server_wants_the_attempts_counted_anew_through_another_welcome() -> None:
    """The device is made again for another number, but not its count of attempts."""
    with attack() as a:
        for _ in range(3):
            answered(a.first_step())
        last, server = a.round, a.who.train
        server.client = 1
    try:
        with attack() as a:
            refused(a.first_step(round=last), "as often as its owner allows (3)")
    finally:
        server.client = 0
    with attack() as a:  # and now it is what it was
        refused(a.first_step(round=last), "as often as its owner allows (3)")


def test_a_training_server_wants_to_go_on_after_a_refusal_with_other_values_in_the_slots() -> None:
    """A device that noted what it had refused would take the labels for what it was told they were."""
    with attack() as a:
        answered(a.first_step())
        refused(a((c.Vjp(4, 8, "client.forward", (2, 3, 6)),)), OWN)
        refused(a((c.Put(9, "tensor"), c.Pull(10, 8, 9)), (), (torch.zeros(8, 2, 4, 4),)), OWN)


def test_a_training_server_wants_two_answers_to_two_gradients_of_one_mini_batch() -> None:
    with attack() as a:
        z, _ = answered(a.first_step())
        refused(a((*BACK[:2], *BACK[:2]), (), (z, z)), OWN + "'do client.update")


def test_a_training_server_wants_a_private_layer_through_norms_of_gradients_of_its_choice() -> None:
    """Norms for many gradients through one layer would tell the layer; there is one for each mini-batch."""
    with attack("joint norm") as a:
        z, _ = answered(a.first_step())
        norm = (
            c.Put(9, "tensor"),
            c.Pull(10, 8, 9),
            c.Do(11, "client.squared_norm", (2, 10)),
            c.Up(("scalars",), (11,)),
        )
        answered(a(norm, (), (z,)))
        refused(a(norm, (), (z,)), "receive something else")


def test_a_training_server_wants_the_layers_of_a_device() -> None:
    with attack(two=True) as a:
        answered(a.first_step())
        z = torch.zeros(8, 2, 4, 4)
        refused(a((*BACK, c.Field(12, 11, "model"), c.Up(("model",), (12,))), (), (z,)), OWN)


def test_a_training_server_wants_the_layers_in_the_shadow_of_activations() -> None:
    """A list with two answers would send both to the home of the last."""
    with attack("hasfl", two=True) as a:
        found = [c.Deliver(("statistics",), (2,)), c.Up(("activations",), (7,))]
        a.fed and a.fed.send(a.model.tree())
        refused(a((*BEGIN, *found), [1, a.round, 1], begins=True))


def test_a_training_server_wants_the_activations_to_reach_the_fed_server() -> None:
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.send(a.model.tree())
        step = (*BEGIN, *STEP, c.Deliver(("activations", "labels"), (7, 4)))
        refused(a(step, [1, a.round, 8, 0, 11, 0, 11, 1], begins=True), OWN)
        assert a.fed.heard.empty()


def test_a_training_server_wants_activations_and_layers_delivered_together() -> None:
    """The device would send what belongs to the training server with what belongs to the fed server."""
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.send(a.model.tree())
        z = torch.zeros(8, 2, 4, 4)
        last = (*BACK[:2], c.Do(18, "client.update", (11, 10)), c.Field(19, 18, "model"), c.Deliver(("model",), (19,)))
        whole = (*BEGIN, *STEP, c.Up(("activations", "labels"), (7, 4)), *BACK, *NEXT, *last)
        refused(a(whole, [1, a.round, 8, 0, 11, 0, 11, 8, 1, 11, 1, 11, 1], (z, z), begins=True), "which ends a list")
        assert a.fed.heard.empty()


# -- raw data by another name --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["activations", "gradients", "scalars", "model"])
def test_a_server_wants_raw_inputs_as_something_that_may_leave(kind: str) -> None:
    with attack() as a:
        numbers = [*a.model.numbers, a.round, 8, 0, 11]
        commands = (*first(a.model.skeleton)[:4], c.Up((kind,), (3,)))
        refused(a(commands, numbers, a.model.tensors, begins=True), OWN)


def test_a_server_wants_raw_inputs_through_a_function_that_passes_them_on() -> None:
    """The derivative of a function that returns inputs would have lost their mark."""
    with attack("hasfl") as a:
        numbers, halves = [*a.model.numbers, a.round], c.Vjp(9, 10, "observer.first_half", (3,))
        commands = (*first(a.model.skeleton)[:3], c.Batch(3, 4), halves, c.Up(("activations",), (9,)))
        refused(a(commands, [*numbers, 8, 0, 11], a.model.tensors, begins=True), OWN)


def test_a_server_wants_raw_inputs_as_a_value_that_is_kept() -> None:
    with attack() as a:
        commands = (*first(a.model.skeleton)[:4], c.KeepValue(9, "mine", 3), c.Up(("model",), (9,)))
        refused(a(commands, [*a.model.numbers, a.round, 8, 0, 11, 1], a.model.tensors, begins=True), OWN)


def test_a_server_wants_labels_as_activations() -> None:
    with attack() as a:
        commands = (*first(a.model.skeleton)[:-1], c.Up(("activations", "labels"), (4, 4)))
        refused(a(commands, [*a.model.numbers, a.round, 8, 0, 11, 0, 11], a.model.tensors, begins=True), OWN)


def test_a_server_wants_the_labels_of_a_u_shape() -> None:
    with attack("u-shaped", two=True) as a:
        refused(a.first_step(), OWN + "'send client.forward as activations'")


def test_a_server_wants_the_labels_of_a_u_shape_through_a_head_of_its_choice() -> None:
    """The layers, and the head with them, come from the fed server alone."""
    with attack("u-shaped", two=True) as a:
        chosen = [torch.eye(*t.shape) if t.dim() == 2 else torch.zeros_like(t) for t in a.model.tensors]
        refused(a(first(a.model.skeleton), [*a.model.numbers, a.round], chosen, begins=True), "receive something else")


def test_a_server_wants_the_seed_that_only_the_device_knows() -> None:
    with attack() as a:
        refused(a((c.Own(5), c.Up(("scalars",), (5,))), [0], begins=True), OWN)


def test_a_server_wants_two_values_with_the_same_noise() -> None:
    """Their difference would have none."""
    with attack("coded") as a:
        conversation = own_lines("coded")
        seeds = [k for k, line in enumerate(conversation) if line.startswith("make the own seed")]
        assert len(seeds) >= 2  # one of the step, one of the codec
        commands = (*first(a.model.skeleton)[:4], c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6)))
        coded = (c.Own(9), c.Do(10, "codecs.activations.encode", (7, 9)), c.Up(("activations", "labels"), (10, 4)))
        numbers = [*a.model.numbers, a.round, 8, 0, 11, 7, 11, 7]
        refused(a((*commands, *coded), numbers, a.model.tensors, begins=True), "only once in a round")


def own_lines(name: str) -> list[str]:
    from cutlayer.remote.joining.join import DeviceSettings

    device = DeviceSettings(data="digits").ready(m.Welcome(session=0, client=0, run=config.dumps(RUNS[name])))
    assert device.terms is not None
    return [str(line) for passage in device.terms.conversation(0).passages for line in passage]


def test_a_server_wants_a_value_without_its_codec() -> None:
    with attack("coded") as a:
        refused(a.first_step(), OWN)


def test_a_server_wants_activations_of_shallower_layers_than_the_run_cuts_at() -> None:
    """HASFL sends each device its cut: it must be the one of the device's own run."""
    with attack("deep") as a:
        shallow = (*first(a.model.skeleton)[:3], c.Put(20, "number"), *STEP[:3])
        step = (c.Vjp(7, 8, "client.forward", (2, 3, 6, 20)), c.Up(("activations", "labels"), (7, 4)))
        numbers = [*a.model.numbers, a.round, 1, 8, 0, 11, 0, 11]
        said = a((*shallow, *step), numbers, a.model.tensors, begins=True)
        assert isinstance(said, str), [t.shape for t in said or []]


def test_a_server_wants_test_samples_that_the_device_does_not_have() -> None:
    with attack() as a:
        refused(a.first_step(tests=True), "holds no samples for testing")


def test_a_server_wants_the_label_of_a_single_test_sample() -> None:
    with attack("held out") as a:
        refused(a.first_step(tests=True, size=1))


# -- code ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["os.system", "client.opt.step", "__init__", "client.forward.__globals__"])
def test_a_server_wants_a_function_that_the_method_does_not_declare(name: str) -> None:
    with attack() as a:
        refused(a((c.Do(2, name, ()), c.Up(("model",), (2,))), begins=True), OWN)


def test_a_server_wants_a_private_attribute() -> None:
    with attack() as a:
        answered(a.first_step())
        refused(a((c.Field(9, 2, "__class__"), *NEXT), [8, 1, 0, 1, 0]), OWN)


def test_a_server_wants_an_object_of_a_class_of_its_choice() -> None:
    with attack() as a:
        refused(a((c.Put(0, ["Popen", ["args"], ["number"]]), *NEXT), [1], begins=True), "does not know")


# -- other runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"), [("cut", 0), ("model", None), ("batching", None), ("seed", 9), ("rounds", 5000), ("head", "head")]
)
def test_a_server_wants_another_run_than_the_device_has_agreed_to(key: str, value: object) -> None:
    from cutlayer.core.batches import Batching
    from cutlayer.runs.config import Choice

    other: dict[str, object] = {"model": Choice("mlp"), "batching": Batching(size=1)}
    assert refusal_of(replace(RUNS["sfl_v1"], **{key: other.get(key, value)})).startswith(
        "ConfigError: the server's run is not the one in "
    )


def refusal_of(run: Run) -> str:
    """Return the last words of a device that is welcomed to this run."""
    from victims import process

    server = EvilServer(credentials("train"), run)
    process().order(replace(victim().order, address=server.address))
    name, words = process().hear("left")
    server.close()
    assert name == "ann"
    return str(words)


def test_two_servers_want_to_serve_different_runs() -> None:
    """A fed server of another run might be anybody's."""
    from victims import process

    train = EvilServer(credentials("train"), RUNS["sfl_v1"])
    fed = EvilServer(credentials("fed"), replace(RUNS["sfl_v1"], seed=1))
    process().order(replace(victim().order, address=train.address, fed=fed.address))
    _, words = process().hear("left")
    train.close()
    fed.close()
    assert "the two servers do not serve the same run" in words


# -- the fed server of two owners ----------------------------------------------------------------------------------


def test_a_fed_server_wants_activations() -> None:
    """It sends layers of its choice, and what they give goes to the training server alone."""
    with attack(two=True) as a:
        assert a.fed is not None
        answered(a.first_step(model=own("sfl_v1").model.tree()))
        assert a.fed.heard.empty()


def test_a_fed_server_wants_layers_of_another_form() -> None:
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.send({"wide": torch.zeros(5000)})
        refused(a(first(None), [1, a.round, 8, 0, 11, 0, 11], begins=True), OWN)


def test_a_fed_server_wants_to_command() -> None:
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.tell(first(a.model.skeleton), [*a.model.numbers, 0, 8, 0, 11, 0, 11], a.model.tensors, begins=True)
        answered(a.first_step())
        assert a.fed.heard.empty()


# -- and then ------------------------------------------------------------------------------------------------------


def test_a_device_that_servers_have_attacked_takes_part_in_a_run_that_ends_with_the_numbers_of_loop(
    tmp_path: Path,
) -> None:
    """An evil server listens where an honest one will."""
    run = replace(RUN, rounds=2)
    file = tmp_path / "small.toml"
    file.write_text(config.dumps(run), encoding="utf-8")
    keys = folder() / "keys"
    order = Served(run=run, folder=tmp_path / "served", serving=serving(keys))
    evil = EvilServer(credentials("train"), run, address=order.serving.listen)
    with shared().some(2) as (server, clients):
        clients.order(replace(devices(order, keys, tmp_path / "state", NAMES[:1]), settings={"config": file}))
        visit, flat = evil.visit(), own("sfl_v1").model
        numbers = [*flat.numbers, 0, 8, 0, 11, 0, 11]
        for _ in range(2):
            answered(visit.ask(first(flat.skeleton), numbers, flat.tensors, begins=True))
            refused(visit.ask((c.Up(("model",), (0,)),)), OWN)
        visit.end()
        evil.close()
        server.order(order)
        clients.order(replace(devices(order, keys, tmp_path / "state", NAMES[1:]), settings={"config": file}))
        server.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES) == [(name, OVER) for name in NAMES]
    assert outcome(order.folder) == simulated(run, tmp_path / "simulated")
