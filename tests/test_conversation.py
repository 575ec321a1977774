"""Specifies what servers may ask of a device: the conversation of its own copy of the method, and nothing beside it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SEED, clients_of, images
from in_process import deployment, device, terms
from test_cli import say  # noqa: F401
from test_engines_agree import CASES
from test_remote import method_of
from torch import Tensor, nn

from cutlayer import optim
from cutlayer.core import keys
from cutlayer.core.batches import Batching
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError, LawError
from cutlayer.methods import hasfl
from cutlayer.remote.device.audit import Audit
from cutlayer.remote.device.conversation import Conversation, Follower, Line
from cutlayer.remote.device.session import Session
from cutlayer.remote.device.terms import Allowance, Attempts
from cutlayer.remote.device.worker import walk_of
from cutlayer.remote.joining.compiling import Learned
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol.messages import Answer, Work
from cutlayer.remote.tensors.trees import flatten
from cutlayer.split import Split

CLIENT = 2


def conversation_of(case: str, shape: str = "two-part", **more: Any) -> Conversation:
    found = terms(method_of(case, shape), images(), clients_of(), CASES[case].batching, CLIENT, SEED, **more)
    return found.conversation(0)


def text(conversation: Conversation) -> list[list[str]]:
    return [[str(line) for line in passage] for passage in conversation.passages]


def test_the_conversation_of_sfl_v1_reads_like_the_method() -> None:
    """Two mini-batches of four samples: each sends activations and labels, and takes one gradient."""
    found = conversation_of("sfl_v1")
    step = ["make this device's seed", "make the key of the step"]
    back = ["receive gradients", "back-propagate gradients through client.forward"]
    assert text(found) == [
        ["receive model", "receive settings", "do client.begin(model, settings)"],
        [
            "load the first mini-batch",
            *step,
            "vjp client.forward(client.begin, x, key)",
            "send client.forward as activations, y as labels",
        ],
        [*back, "do client.update(client.begin, gradients through client.forward)"],
        [
            "load the next mini-batch",
            *step,
            "vjp client.forward(client.update, x, key)",
            "send client.forward as activations, y as labels",
        ],
        [
            *back,
            "do client.update(client.update, gradients through client.forward)",
            "take client.update.model",
            "send client.update.model as model",
        ],
    ]
    assert found.begins == {0} and found.follows == {0: {1}, 1: {2}, 2: {3}, 3: {4}, 4: frozenset()}
    assert (found.batch_sizes, found.num_steps, found.num_loads) == ((4, 4), 2, 1)
    assert found.kinds == ["activations", "labels", "model"]


def test_with_two_owners_models_come_from_the_fed_server_alone() -> None:
    lines = [line for passage in conversation_of("sfl_v1", two_servers=True).passages for line in passage]
    assert Line("get", "model", (), ("model",)) in lines and Line("put", "model", (), ("model",)) not in lines
    assert [line.verb for line in lines if line.name == "model" and line.takes] == ["field", "deliver"]


def test_a_long_round_is_played_short_and_allowed_in_full() -> None:
    batching = replace(CASES["sfl_v1"].batching, epochs=50)
    found = terms(method_of("sfl_v1"), images(), clients_of(), batching, CLIENT, SEED).conversation(0)
    num = len(clients_of().clients[CLIENT])
    assert found.num_steps == batching.per_round(num, batching.size) > 50
    assert len(found.passages) == len(conversation_of("sfl_v1").passages) + 1  # of a step between two others


def test_a_client_of_hosfl_may_be_asked_to_catch_up_as_often_as_the_run_has_rounds() -> None:
    found = conversation_of("hosfl", rounds=7)
    recalls = [passage for passage in found.passages if passage[0].verb == "recall"]
    assert any(line.name == "client.catch_up" for passage in recalls for line in passage)
    assert 7 <= found.num_recalls <= 12


# -- a server of another mind ----------------------------------------------------------------------------------------

Said = list[Tensor] | str | None  # the tensors of an answer, the reason of a refusal, or nothing


class Asked:
    """A device in a session with a server that may ask for anything."""

    def __init__(self, case: str = "sfl_v1", **more: Any) -> None:
        method, data, parts, batching = method_of(case), images(), clients_of(), CASES[case].batching
        own = terms(method, data, parts, batching, CLIENT, SEED)
        for name, value in more.items():
            setattr(own, name, value)
        self.model = flatten(method.model.initial()[0])
        self.device = device(method, data, parts, batching, CLIENT, terms=own)
        self.session, self._number = Session(self.device, 7), 0

    def __call__(
        self,
        commands: Sequence[c.AnyCommand],
        numbers: Sequence[float] = (),
        tensors: Sequence[Tensor] = (),
        *,
        begins: bool = False,
        round: int = 0,
        key: int | None = None,
        tests: bool = False,
    ) -> Said:
        self._number += 1
        work = Work(
            session=7,
            number=self._number,
            round=round,
            key=keys.fold(SEED, "round", round) if key is None else key,
            token=1,
            begins=begins,
            list=self._number,
            commands=tuple(commands),
            numbers=tuple(numbers),
            tests=tests,
        )
        reply = self.session.work(work, list(tensors))
        if reply is None:
            return None
        return reply.tensors if isinstance(reply.message, Answer) else reply.message.reason

    def first_step(self, *, size: int = 4, step: int = 0, **options: Any) -> Said:
        """Ask for what an honest server asks first: the activations and labels of a mini-batch."""
        numbers = [*self.model.numbers, options.get("round", 0), size, step, step, step, step]
        return self(first(self.model.skeleton), numbers, self.model.tensors, begins=True, **options)


def first(model: Tree) -> tuple[c.AnyCommand, ...]:
    return (
        *(c.Put(0, model), c.Put(1, "number"), c.Do(2, "client.begin", (0, 1))),
        *(c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (2, 3, 6))),
        c.Up(("activations", "labels"), (7, 4)),
    )


BACK = (c.Put(9, "tensor"), c.Pull(10, 8, 9), c.Do(11, "client.update", (2, 10)))
NEXT = (
    *(c.Batch(3, 4), c.Own(5), c.Key(6), c.Vjp(7, 8, "client.forward", (11, 3, 6))),
    c.Up(("activations", "labels"), (7, 4)),
)


def answered(said: Said) -> list[Tensor]:
    assert isinstance(said, list), said
    return said


def test_what_the_method_asks_is_answered_once_for_each_mini_batch() -> None:
    asked = Asked()
    z, first_labels = answered(asked.first_step())
    _, labels = answered(asked((*BACK, *NEXT), (4, 1, 1, 1, 1), (torch.zeros_like(z),)))
    walk = walk_of(asked.device.batching, CLIENT, len(asked.device.data), keys.fold(SEED, "round", 0))({})
    samples = [*walk.samples(CLIENT, 0), *walk.samples(CLIENT, 1)]
    assert torch.equal(torch.cat([first_labels, labels]), asked.device.data.y[samples])


OWN = "this device's own run has "
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a batch of one": ({"size": 1}, OWN + "batches of 4 samples, but the server asks for 1"),
    "all samples at once": ({"size": 1000}, OWN + "batches of 4 samples, but the server asks for 1000"),
    "another mini-batch first": (
        {"step": 1},
        OWN + "'load the first mini-batch' here, but the server asks for: load another mini-batch",
    ),
    "a mini-batch that the run does not have": (
        {"step": 2},
        OWN + "2 mini-batches in a round, but the server asks for number 3",
    ),
    "a key that draws other mini-batches": ({"key": 5}, "the key of round 1 is not that of this device's own run"),
    "a round that the run does not have": (
        {"round": 100},
        "the server asks for round 101, but this device's own run has 100",
    ),
    "a test": ({"tests": True}, "this client holds no samples for testing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_device_refuses_what_its_own_run_does_not_have(name: str) -> None:
    options, reason = REFUSED[name]
    assert Asked().first_step(**options) == reason


def test_a_mini_batch_is_not_loaded_twice() -> None:
    asked = Asked()
    z, _ = answered(asked.first_step())
    said = asked((*BACK, *NEXT), (4, 0, 0, 0, 0), (torch.zeros_like(z),))
    assert said == OWN + "'load the next mini-batch' here, but the server asks for: load the first mini-batch"


def test_a_gradient_is_not_sent_twice_through_one_mini_batch() -> None:
    """It would tell how the client's layers react to gradients of the server's choice."""
    asked = Asked()
    z, _ = answered(asked.first_step())
    said = asked((*BACK[:2], c.Put(9, "tensor")), (), (z, z))
    assert said == (
        OWN + "'do client.update(client.begin, gradients through client.forward)' here, but the server asks for: "
        "receive a value that does not belong here"
    )


def test_a_model_does_not_come_where_a_gradient_belongs() -> None:
    asked = Asked()
    asked.first_step()
    said = asked((c.Put(0, asked.model.skeleton),), asked.model.numbers, asked.model.tensors)
    assert said == OWN + "'receive gradients' here, but the server asks for: receive a value that does not belong here"


def test_a_model_of_another_form_is_refused() -> None:
    asked = Asked()
    wide = [torch.zeros(3, *a.shape) for a in asked.model.tensors]
    said = asked(first(asked.model.skeleton), [*asked.model.numbers, 0], wide, begins=True)
    assert said == OWN + "'receive model' here, but the server asks for: receive a value that does not belong here"


def test_a_round_is_played_three_times_at_most_even_if_the_device_restarts(tmp_path: Path) -> None:
    file = tmp_path / "state" / "attempts"

    def asked() -> Asked:
        return Asked(attempts=Attempts(100, 3, file))

    for _ in range(3):
        answered(asked().first_step())
    assert asked().first_step() == (
        "this device has already played round 1 three times, its limit; join with --attempts N to allow more"
    )
    answered(asked().first_step(round=1))
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_is_refused_before_anything_leaves_is_no_attempt() -> None:
    asked = Asked()
    for _ in range(9):
        assert isinstance(asked.first_step(size=1), str)
    answered(asked.first_step())


def test_a_round_goes_on_under_its_own_number() -> None:
    """Attempts would be counted where they do no harm, or nowhere."""
    for other in (1, 10**9):
        asked = Asked()
        assert asked((), begins=True) is None
        assert asked((), round=other) == "another round came than the one that it began with"


def test_a_round_that_was_refused_does_not_go_on() -> None:
    """The device would note values that it has not made."""
    asked = Asked()
    z, _ = answered(asked.first_step())
    assert isinstance(asked((c.Vjp(4, 8, "client.forward", (2, 3, 6)),)), str)
    said = asked(BACK, (), (z,))
    assert said == OWN + "'receive model' here, but the server asks for: receive a value that does not belong here"


def test_a_list_has_one_answer() -> None:
    """With two, both would go to the home of the last."""
    asked = Asked()
    commands = (*first(asked.model.skeleton), *BACK)
    numbers, z = [*asked.model.numbers, 0, 4, 0, 0, 0, 0], torch.zeros(4, 2, 8, 8, dtype=torch.float64)
    said = asked(commands, numbers, (*asked.model.tensors, z), begins=True)
    assert said == "it comes after an up or deliver, which ends a list"


def test_a_seed_is_made_once() -> None:
    asked = Asked()
    z, _ = answered(asked.first_step())
    said = asked((*BACK, *NEXT), (4, 1, 1, 0, 1), (torch.zeros_like(z),))
    assert said == "this is step 2 of the round, but the server asks for another number"


NUMBERS: dict[str, tuple[list[int], str]] = {
    "the round": ([1, 4, 0, 0, 0, 0], "the setting here is the number of the round in this device's own run, but"),
    "the key of a mini-batch": ([0, 4, 0, 7, 0, 0], "mini-batch 1 belongs to step 1, but the server asks for 8"),
    "the seed": ([0, 4, 0, 0, 7, 0], "this is step 1 of the round, but the server asks for another number"),
    "the key of a step": ([0, 4, 0, 0, 0, 7], "this is step 1 of the round, but the server asks for another number"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_from_which_a_device_draws_are_those_of_its_own_run(name: str) -> None:
    """A server that chose them would choose masks and augmentations, or noise that it has seen before."""
    numbers, reason = NUMBERS[name]
    asked = Asked("hasfl")  # whose steps have no epochs, at which a device may have waited for others
    numbers[1] = conversation_of("hasfl").batch_sizes[0]
    *settings, cut = [numbers[0], 1]
    said = asked(
        (*first(asked.model.skeleton)[:3], c.Put(12, "number"), *first(asked.model.skeleton)[3:]),
        [*asked.model.numbers, *settings, cut, *numbers[1:]],
        asked.model.tensors,
        begins=True,
    )
    assert isinstance(said, str) and said.startswith(reason)


def test_a_device_may_have_waited_for_others_where_an_epoch_begins() -> None:
    follower = Follower(conversation_of("sfl_v1 epoch"))
    per_epoch = CASES["sfl_v1 epoch"].batching.per_epoch(len(clients_of().clients[CLIENT]), 4)
    follower.check_batch(4, 0, 0)
    follower.check_batch(4, per_epoch, per_epoch + 3)
    with pytest.raises(LawError, match=f"mini-batch {per_epoch + 2} belongs to step {per_epoch + 5}, but the server"):
        follower.check_batch(4, per_epoch + 1, per_epoch + 1)
    with pytest.raises(LawError, match=f"mini-batch {per_epoch + 2} belongs to step {per_epoch + 5}, but the server"):
        follower.check_batch(4, per_epoch + 1, per_epoch + 5)


def test_a_fixed_cut_is_not_moved_even_if_all_layers_have_the_same_shape() -> None:
    """With other shapes the model would not fit."""
    split = Split(nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))), cut=3)
    opt = optim.sgd(0.1)
    method = hasfl(model=split, client_opt=opt, server_opt=opt, interval=2, batches="fixed", cuts="fixed")
    data = Arrays(x=torch.randn(40, 6, dtype=torch.float64), y=torch.arange(40) % 6)
    parts, batching = Partition([np.arange(20), np.arange(20, 40)]), Batching(size=4)
    own = terms(method, data, parts, batching, 0, SEED)
    model = flatten(split.initial()[0])
    for cut, reason in ((3, None), (2, "the setting here is 3 in this device's own run, but the server sends 2")):
        session = Session(device(method, data, parts, batching, 0, terms=own), 7)
        forward = c.Vjp(7, 8, "client.forward", (2, 3, 6, 12))
        commands = (*first(model.skeleton)[:3], c.Put(12, "number"), c.Batch(3, 4), c.Own(5), c.Key(6), forward)
        work = Work(
            session=7,
            number=1,
            round=0,
            key=keys.fold(SEED, "round", 0),
            token=1,
            begins=True,
            list=1,
            commands=(*commands, c.Up(("activations", "labels"), (7, 4))),
            numbers=(*model.numbers, 0, cut, 4, 0, 0, 0, 0),
        )
        reply = session.work(work, model.tensors)
        assert reply is not None and getattr(reply.message, "reason", None) == reason


@pytest.mark.parametrize("drawn", [0, 1, 2, 3])
def test_a_drawn_cut_is_the_one_that_the_key_of_the_round_draws(drawn: int) -> None:
    """In each round a device answers functions at that cut alone."""
    method = method_of("smofi random cut")
    learned = terms(method, images(), clients_of(), CASES["smofi random cut"].batching, CLIENT, SEED).conversation
    rounds = [r for r in range(40) if _drawn(method, r) == drawn]
    assert rounds
    for r in rounds[:3]:
        names = {line.name.split(".client.")[0] for p in learned(r).passages for line in p if ".client." in line.name}
        assert names == {f"methods.{drawn}"}


def _drawn(method: Any, round: int) -> int:
    return int(keys.generator(keys.fold(SEED, "round", round), "cut").integers(len(method.methods)))


def test_activations_leave_no_more_often_than_the_method_sends_them() -> None:
    """FSL-SAGE sends them at every second step; the passages of other steps would go on with them, too."""
    conversation = conversation_of("fsl_sage")
    follower = Follower(replace(conversation, free=frozenset(("activations", "labels"))))
    z = torch.zeros(4, 2, 8, 8)
    most = conversation.num_sent["activations labels"]
    assert most == 1  # of two mini-batches
    follower.check_leaving(("activations", "labels"), (z, z))
    with pytest.raises(LawError, match=r"^activations, labels leave 1 times in a round of this device's own run$"):
        follower.check_leaving(("activations", "labels"), (z, z))


def test_what_is_learned_of_rounds_does_not_grow_where_nothing_is_new() -> None:
    learned = terms(
        method_of("hasfl random"), images(), clients_of(), CASES["hasfl random"].batching, CLIENT, SEED
    ).conversation
    assert isinstance(learned, Learned)
    for r in range(60):
        learned(r)
    known = len(learned._heard)
    for r in range(60, 90):
        learned(r)
    assert len(learned._heard) - known <= 3


def test_a_server_is_not_told_what_another_library_says_of_own_data(caplog: pytest.LogCaptureFixture) -> None:
    """Torch names a label that does not fit the outputs."""
    asked = Asked()
    asked.device = replace(asked.device, data=replace(asked.device.data, x=asked.device.data.x.flatten(1)))
    asked.session = Session(asked.device, 7)
    said = asked.first_step()
    assert said == "it failed on this device with RuntimeError; the device's own log has the details"
    assert "client.forward" in caplog.text


def test_lists_that_are_refused_are_not_remembered() -> None:
    asked = Asked()
    for _ in range(3):
        assert asked([c.Free(0)] * 5, begins=True) == "slot 0 is empty"
    assert not asked.session._lists


def test_a_cut_that_a_server_moves_does_not_change_what_leaves() -> None:
    follower = Follower(conversation_of("sfl_v1"))
    with pytest.raises(LawError, match="these activations have another form than in this device's own run"):
        follower.check_leaving(["activations"], [torch.zeros(4, 1, 8, 8, dtype=torch.float64)])


def test_attempts_that_cannot_be_counted_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("this is no folder")
    said = Asked(attempts=Attempts(100, 3, tmp_path / "state" / "attempts")).first_step()
    assert isinstance(said, str) and said == "this device cannot count what it gives; its own log says why"


def test_a_device_works_no_longer_than_its_owner_allows() -> None:
    in_a_round = Asked(allowance=Allowance(round_seconds=1e-9)).first_step()
    assert in_a_round == "this device works at most 1e-09 seconds in a round"
    assert Asked(allowance=Allowance(day_seconds=1e-9)).first_step() == "this device works at most 1e-09 seconds a day"
    for wrong in ({"attempts": 0}, {"attempts": 256}, {"round_seconds": 0.0}, {"day_seconds": -1.0}):
        with pytest.raises(ConfigError):
            Allowance(**wrong)  # type: ignore[arg-type]


def test_with_two_owners_the_training_server_cannot_send_a_model() -> None:
    follower = Follower(conversation_of("sfl_v1", two_servers=True))
    model = method_of("sfl_v1").model.initial()[0]
    with pytest.raises(
        LawError,
        match="'receive model from the fed server' here, but the server asks for: receive a value that does not belong",
    ):
        follower.follow(c.Put(0, flatten(model).skeleton), model)
    follower.follow(c.Get(0), model)


# -- what leaves is on record, and what may come is known before -------------------------------------------------------


def test_what_leaves_is_on_record_before_it_does(tmp_path: Path) -> None:
    file = tmp_path / "audit" / "sent.jsonl"
    asked = Asked()
    asked.device = replace(asked.device, audit=Audit(file))
    asked.session = Session(asked.device, 7)
    z, y = answered(asked.first_step())
    assert isinstance(asked.first_step(size=1), str)
    line, refusal = map(json.loads, file.read_text().splitlines())
    assert (line["round"], line["to"]) == (1, "train")
    refused = "command 4 (batch): this device's own run has batches of 4 samples, but the server asks for 1"
    assert (refusal["round"], refusal["refused"], refusal.get("values")) == (1, refused, None)
    assert line["values"] == [
        {"kind": kind, "bytes": a.nbytes, "sha256": hashlib.sha256(a.contiguous().numpy().tobytes()).hexdigest()}
        for kind, a in (("activations", z), ("labels", y))
    ]
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert datetime.fromisoformat(line["time"]).tzinfo is not None


def test_a_record_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another --audit"):
        Audit(tmp_path / "file" / "sent.jsonl")


WARD = """
data = "digits"
clients = 4
rounds = 3
model = "cnn"
cut = "conv1"
method = "sfl_v1"
partition = "iid"
"""


def test_a_dry_run_prints_what_a_round_may_ask_without_a_server_or_keys(say: Any) -> None:  # noqa: F811
    Path("ward.toml").write_text(WARD)
    said = say("join", "--data", "digits", "--config", "ward.toml", "--dry-run")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == "360 samples to train on, in 3 rounds"
    assert any(line.startswith("leaves, at most ") and line.endswith(": activations, labels, model") for line in lines)
    assert "at most 11 mini-batches of 32 samples a round, each once" in lines
    assert {"     activations, labels: at most 11 times", "     model: at most once"} <= set(lines)
    assert "plain numbers that come: the number of the round" in lines
    assert {"     labels: int64 (n)", "     model: float32 (16, 1, 3, 3), float32 (16)"} <= set(lines)
    assert "     receive model" in lines and "     send client.update.model as model" in lines
    assert max(map(len, lines)) <= 80


def test_a_device_needs_a_run_of_its_own_or_says_that_it_takes_any(say: Any) -> None:  # noqa: F811
    for words in ([], ["--config", "ward.toml", "--any-run"]):
        said = say("join", "127.0.0.1:1", "--data", "digits", "--insecure", *words)
        assert said.code == 2
        assert "give --config FILE, the run that this device agrees to, or --any-run" in " ".join(said.err.split())
    assert "needs --config FILE" in say("join", "--data", "digits", "--any-run", "--dry-run").err


# -- honest rounds of all sorts are followed ---------------------------------------------------------------------------


def followed(case: str, partition: Partition, rounds: int, **options: Any) -> list[float]:
    """The mini-batches of each round of a deployment, all of whose clients follow their server."""
    there = deployment(
        method_of(case),
        images(),
        partition,
        batching=CASES[case].batching,
        seed=SEED,
        followed=range(len(partition)),
        **options,
    )
    state, found = there.start(), []
    for _ in range(rounds):
        state = there.round(state)
        found.append(float(state.report.tree.batches))
    return found


def test_a_client_that_missed_many_rounds_catches_up() -> None:
    assert followed("hosfl", clients_of(), 14, per_round=1) == [1.0] * 14


@pytest.mark.parametrize("case", ["fedavg", "sfl_v1", "fednag", "sl"])
def test_a_run_may_have_one_client(case: str) -> None:
    alone = Partition((clients_of().clients[0],))
    steps = CASES[case].batching.per_round(len(alone.clients[0]), CASES[case].batching.size)
    assert followed(case, alone, 2) == [steps, steps]


@pytest.mark.slow
def test_clients_of_very_different_sizes_are_followed_where_batches_are_planned() -> None:
    assert len({len(own) for own in clients_of().clients}) > 2
    assert all(batches > 0 for batches in followed("hasfl planned", clients_of(), 2))


def test_a_method_that_chooses_batch_sizes_takes_each_sample_once_in_a_pass() -> None:
    follower = Follower(conversation_of("mergesfl regulated"))
    num = len(clients_of().clients[CLIENT])
    follower.check_batch(2, 0, 0)
    with pytest.raises(LawError, match="a round goes on with batches of 2 samples, but the server asks for 1"):
        follower.check_batch(1, 1, 1)
    with pytest.raises(LawError, match=f"has {num // 2} mini-batches in a round, but the server asks for number 5"):
        follower.check_batch(2, 4, 4)


def test_slots_hold_no_more_than_a_round_needs() -> None:
    asked = Asked()
    most = asked.device.terms.conversation(0).most_slots  # type: ignore[union-attr]
    assert 16 < most < 64
    follower = Follower(replace(asked.device.terms.conversation(0), most_slots=1))  # type: ignore[union-attr]
    model = method_of("sfl_v1").model.initial()[0]
    follower.follow(c.Put(0, flatten(model).skeleton), model)
    with pytest.raises(LawError, match="the server keeps more than 1 values in slots"):
        follower.follow(c.Put(1, "number"), 0)
