"""Attacks of servers on the data of a device that has agreed to a run with two owners, and has told its terms."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_pool import Served, shared
from evil_server import EvilServer
from test_grpc_faults import RUN, devices, outcome, serving, simulated
from victims import (
    BACK,
    NAMES,
    NEXT,
    RUNS,
    Victim,
    answered,
    attack,
    attacking,
    credentials,
    first,
    folder,
    own,
    process,
    refused,
    trusting,
    victim,
)

from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.server.streams import OVER
from cutlayer.runs import config
from cutlayer.runs.config import Run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks on devices")]

OWN = "this device's own run has "
UP = ("activations", "labels")
STEP = (c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6)))
BEGIN = (c.Get(0), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1)))


# -- the training server of two owners -----------------------------------------------------------------------------


def test_a_training_server_wants_the_inputs_through_weights_of_its_choice() -> None:
    with attack(two=True) as a:
        chosen = [torch.ones_like(t) for t in a.model.tensors]
        said = a(first(a.model.skeleton), [*a.model.numbers, a.round, 8, 0, 0, 0, 0], chosen, begins=True)
        refused(
            said,
            OWN + "'receive model from the fed server' here, ",
        )


def test_a_training_server_wants_to_change_the_weights_in_the_middle_of_a_round() -> None:
    with attack(two=True) as a:
        answered(a.first_step())
        said = a(
            (c.Put(0, a.model.skeleton), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1))), [0], a.model.tensors
        )
        refused(said, OWN + "'receive gradients' here, ")


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
        refused(a.first_step(step=1), OWN + "'load the first mini-batch' here, ")


def test_a_training_server_wants_the_same_mini_batch_twice() -> None:
    with attack() as a:
        z, _ = answered(a.first_step())
        refused(a((*BACK, *NEXT), (8, 0, 0, 0, 0), (torch.zeros_like(z),)), "load the first mini-batch")


def test_a_training_server_wants_mini_batches_of_its_choice_by_a_key() -> None:
    with attack(two=True) as a:
        refused(a.first_step(key=5), f"the key of round {a.round + 1} is not that of this device's own run")


def test_a_training_server_wants_rounds_beyond_the_run() -> None:
    with attack(two=True) as a:
        refused(a.first_step(round=10**6), "the server asks for round 1000001, but this device's own run has 1000")


def leaves_because_of(round: int) -> None:
    """The device has left the run for good: its owner must say that it may go on."""
    said = (
        f"this device has already played round {round + 1} three times, its limit; join with --attempts N to allow more"
    )
    assert process().hear("left") == ("ann", f"LinkError: {said}")


def test_a_training_server_wants_a_round_as_often_as_it_likes() -> None:
    with attacking(Victim("sfl_v1", False, {})) as a:
        for _ in range(3):
            answered(a.first_step())
        refused(a.first_step(), "three times, its limit")
    leaves_because_of(a.round)


def test_a_training_server_wants_a_round_again_under_the_numbers_of_others() -> None:
    """Attempts would be counted where they do no harm."""
    with attack() as a:
        numbers = [*a.model.numbers, a.round, 8, 0, 0, 0, 0]
        commands = first(a.model.skeleton)
        for other in (a.round + 500, 10**9):
            a.visit.tell(commands[:3], numbers[: len(a.model.numbers) + 1], a.model.tensors, begins=True, round=a.round)
            rest = numbers[len(a.model.numbers) + 1 :]
            refused(a(commands[3:], rest, round=other), "another round came than the one that it began with")


def test_a_training_server_wants_a_round_again_after_the_device_has_come_back() -> None:
    who = Victim("sfl_v1", False, {})
    with attacking(who) as a:
        for _ in range(3):
            answered(a.first_step())
        last = a.round
    for _ in range(2):  # the second time its owner starts it again
        with attacking(who) as a:
            refused(a.first_step(round=last), "three times, its limit")
        leaves_because_of(last)
        process().order(who.order)


def test_a_training_server_wants_the_attempts_counted_anew_through_another_welcome() -> None:
    """The device is made again for another number, but not its count of attempts."""
    who = Victim("sfl_v1", False, {})
    with attacking(who) as a:
        for _ in range(3):
            answered(a.first_step())
        last = a.round
        who.train.client = 1
    with attacking(who) as a:
        refused(a.first_step(round=last), "three times, its limit")
    leaves_because_of(last)


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
        refused(a(norm, (), (z,)), OWN + "'receive scalars' here, ")


def test_a_training_server_wants_the_layers_of_a_device() -> None:
    with attack(two=True) as a:
        answered(a.first_step())
        z = torch.zeros(8, 2, 4, 4)
        refused(a((*BACK, c.Field(12, 11, "model"), c.Up(("model",), (12,))), (), (z,)), OWN)


def test_a_training_server_wants_statistics_of_layers_in_the_shadow_of_activations() -> None:
    """HASFL's next mini-batch follows the statistics that go to the fed server. In one list, both would go to the home
    of the last."""
    with attack("hasfl", two=True) as a:
        assert a.fed is not None
        step = (c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6, 12)), c.Up(UP, (7, 4)))
        begin = (c.Get(0), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1)), c.Put(12, "number"))
        back = (c.Put(9, "tensor"), c.Pull(10, 8, 9), c.Do(13, "client.update", (2, 10)))
        (before, between, after), (before2, between2, after2) = look(2, 30), look(13, 31)
        shadow = (c.Do(32, "observer.compare", (30, 31)), c.Deliver(("statistics",), (32,)))
        z, half = torch.zeros(8, 2, 4, 4), torch.zeros(4, 2, 4, 4)
        for number in (1, 2):
            a.fed.send(a.model.tree(), number)
        answered(a((*begin, *before), [1, a.round, 1, 8, 0, 0, 0, 0], begins=True))
        answered(a(between, [0], [half]))
        answered(a((*after, *step), [8, 0, 0, 0, 0], [half]))
        answered(a((*back, *before2), [8, 0, 0, 0, 0], [z]))
        answered(a(between2, [0], [half]))
        said = a((*after2, *shadow, *begin, *step), [1, 2, a.round, 1, 8, 0, 0, 0, 0], [half])
        refused(said, "it comes after an up or deliver, which ends a list")
        assert a.fed.heard.empty()


def look(part: int, out: int) -> tuple[tuple[c.AnyCommand, ...], ...]:
    """What HASFL asks to measure layers: the gradients of the halves of a mini-batch, in three lists."""

    def half(which: str) -> tuple[c.AnyCommand, ...]:
        halves = c.Do(20, f"observer.{which}_half", (3,)), c.Do(21, f"observer.{which}_labels", (4,))
        return (*halves, c.Key(6), c.Vjp(7, 8, "client.forward", (part, 20, 6, 12)), c.Up(UP, (7, 21)))

    return (
        (c.Batch(3, 4), c.Own(5), *half("first")),
        (c.Put(9, "tensor"), c.Pull(10, 8, 9), *half("second")),
        (c.Put(9, "tensor"), c.Pull(11, 8, 9), c.Do(out, "observer.look", (part, 10, 11))),
    )


def test_a_training_server_wants_the_activations_to_reach_the_fed_server() -> None:
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.send(a.model.tree())
        step = (*BEGIN, *STEP, c.Deliver(("activations", "labels"), (7, 4)))
        refused(a(step, [1, a.round, 8, 0, 0, 0, 0, 1], begins=True), OWN)
        assert a.fed.heard.empty()


def test_a_training_server_wants_activations_and_layers_delivered_together() -> None:
    """The device would send what belongs to the training server with what belongs to the fed server."""
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.send(a.model.tree())
        z = torch.zeros(8, 2, 4, 4)
        back = (c.Put(9, "tensor"), c.Pull(10, 17, 9), c.Do(18, "client.update", (11, 10)))
        last = (*back, c.Field(19, 18, "model"), c.Deliver(("model",), (19,)))
        whole = (*BEGIN, *STEP, c.Up(("activations", "labels"), (7, 4)), *BACK, *NEXT, *last)
        refused(a(whole, [1, a.round, 8, 0, 0, 0, 0, 8, 1, 1, 1, 1, 1], (z, z), begins=True), "which ends a list")
        assert a.fed.heard.empty()


# -- raw data by another name --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["activations", "gradients", "scalars", "model"])
def test_a_server_wants_raw_inputs_as_something_that_may_leave(kind: str) -> None:
    with attack() as a:
        numbers = [*a.model.numbers, a.round, 8, 0, 0]
        commands = (*first(a.model.skeleton)[:4], c.Up((kind,), (3,)))
        refused(a(commands, numbers, a.model.tensors, begins=True), OWN)


def test_a_server_wants_raw_inputs_through_a_function_that_passes_them_on() -> None:
    """The derivative of a function that returns inputs would lose their mark."""
    halves = c.Vjp(9, 10, "observer.first_half", (3,))
    with attack("hasfl") as a:
        begin = (c.Put(0, a.model.skeleton), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1)), c.Put(12, "number"))
        numbers = [*a.model.numbers, a.round, 1, 8, 0, 0, 0]
        said = a((*begin, c.Batch(3, 4), c.Own(5), halves), numbers, a.model.tensors, begins=True)
        refused(said, "but the server asks for: vjp observer.first_half(x)")
    said = trusting("hasfl")((c.Batch(3, 4), halves), [8, 0, 0], begins=True)
    refused(said, "observer.first_half passes a client's own inputs on, so it is not differentiated; run it with `do`")


def test_a_server_wants_raw_inputs_as_a_value_that_is_kept() -> None:
    with attack() as a:
        commands = (*first(a.model.skeleton)[:4], c.KeepValue(9, "mine", 3), c.Up(("model",), (9,)))
        refused(a(commands, [*a.model.numbers, a.round, 8, 0, 0, 1], a.model.tensors, begins=True), OWN)


def test_a_server_wants_labels_as_activations() -> None:
    with attack() as a:
        commands = (*first(a.model.skeleton)[:-1], c.Up(("activations", "labels"), (4, 4)))
        refused(a(commands, [*a.model.numbers, a.round, 8, 0, 0, 0, 0], a.model.tensors, begins=True), OWN)


def test_a_server_wants_the_labels_of_a_u_shape() -> None:
    with attack("u-shaped", two=True) as a:
        refused(a.first_step(), OWN + "'send client.forward as activations'")


def test_a_server_wants_the_labels_of_a_u_shape_through_a_head_of_its_choice() -> None:
    """The layers, and the head with them, come from the fed server alone."""
    with attack("u-shaped", two=True) as a:
        chosen = [torch.eye(*t.shape) if t.dim() == 2 else torch.zeros_like(t) for t in a.model.tensors]
        refused(
            a(first(a.model.skeleton), [*a.model.numbers, a.round], chosen, begins=True),
            OWN + "'receive model from the fed server' here, ",
        )


def test_a_server_wants_the_seed_that_only_the_device_knows() -> None:
    with attack() as a:
        refused(a((c.Own(5), c.Up(("scalars",), (5,))), [0], begins=True), OWN)


def test_a_server_wants_two_values_with_the_same_noise() -> None:
    """Their difference would have none."""
    with attack("coded") as a:
        conversation = own_lines("coded")
        seeds = [k for k, line in enumerate(conversation) if line.startswith("make this device's seed")]
        assert len(seeds) >= 2  # one of the step, one of the codec
        commands = (*first(a.model.skeleton)[:4], c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6)))
        coded = (c.Own(9), c.Do(10, "codecs.activations.encode", (7, 9)), c.Up(("activations", "labels"), (10, 4)))
        numbers = [*a.model.numbers, a.round, 8, 0, 0, 0, 0, 0]
        refused(a((*commands, *coded), numbers, a.model.tensors, begins=True), "only once in a round")


def own_lines(name: str) -> list[str]:
    from cutlayer.remote.joining.join import DeviceSettings

    device = DeviceSettings(data="digits").ready(m.Welcome(session=0, client=0, run=config.dumps(RUNS[name])))
    assert device.terms is not None
    return [str(line) for passage in device.terms.conversation(0).passages for line in passage]


def test_a_server_wants_a_value_without_its_codec() -> None:
    with attack("coded") as a:
        refused(a.first_step(), "but the server asks for: send client.forward as activations, y as labels")
    said = trusting("coded").first_step()
    refused(said, "client 0 sends activations only as gaussian(0.5, ")


def test_a_server_wants_activations_of_shallower_layers_than_the_run_cuts_at() -> None:
    """HASFL sends each device its cut: it must be the one of the device's own run."""
    with attack("deep") as a:
        shallow = (*first(a.model.skeleton)[:3], c.Put(20, "number"), *STEP[:3])
        step = (c.Vjp(7, 8, "client.forward", (2, 3, 6, 20)), c.Up(("activations", "labels"), (7, 4)))
        numbers = [*a.model.numbers, a.round, 1, 8, 0, 0, 0, 0]
        said = a((*shallow, *step), numbers, a.model.tensors, begins=True)
        assert isinstance(said, str), [t.shape for t in said or []]


def test_a_server_wants_test_samples_that_the_device_does_not_have() -> None:
    with attack() as a:
        refused(a.first_step(tests=True), "holds no samples for testing")


def test_a_server_wants_the_label_of_a_single_test_sample() -> None:
    """From the figures of a single sample its label can be told."""
    load = (c.Batch(3, 4),)
    with attack("held out") as a:
        refused(a(load, [1, 0, 0], begins=True, tests=True), OWN + "batches of 14 samples, but the server asks for 1")
    said = trusting("held out")(load, [1, 0, 0], begins=True, tests=True)
    refused(said, "a batch of this client's test has 14 samples; a server asked for 1")


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
    server = EvilServer(credentials("train"), run)
    process().order(replace(victim().order, address=server.address))
    name, words = process().hear("left")
    server.close()
    assert name == "ann"
    return str(words)


def test_two_servers_want_to_serve_different_runs() -> None:
    """A fed server of another run might be anybody's."""
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
        refused(a(first(None), [1, a.round, 8, 0, 0, 0, 0], begins=True), OWN)


def test_a_fed_server_wants_to_command() -> None:
    with attack(two=True) as a:
        assert a.fed is not None
        a.fed.tell(first(a.model.skeleton), [*a.model.numbers, 0, 8, 0, 0, 0, 0], a.model.tensors, begins=True)
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
        numbers = [*flat.numbers, 0, 8, 0, 0, 0, 0]
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
