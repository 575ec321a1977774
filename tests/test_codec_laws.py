"""Specifies what the seam of codecs guarantees: what is counted, what a device refuses, and that nothing is lost."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BATCH, SEED, agree, clients_of, images, resnet, run, simulation
from in_process import deployment, device, join, terms
from torch import Tensor

import cutlayer as cl
from cutlayer import codecs, methods, optim
from cutlayer.core import tree
from cutlayer.core.codec import Coder
from cutlayer.core.coders import ErrorFeedback
from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, MODEL
from cutlayer.core.method import Method, method
from cutlayer.core.places import Clients
from cutlayer.core.program import at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Model, State, Tensors
from cutlayer.errors import ConfigError, LawError, WireError
from cutlayer.meters.ledger import Ledger
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.problem import Costs
from cutlayer.planning.profile import profile
from cutlayer.remote.device import conversation
from cutlayer.remote.device.session import Session
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol.messages import Answer, Refusal, Work
from cutlayer.remote.server.exchange import AllClientsLost
from cutlayer.remote.server.remote import Remote
from cutlayer.remote.tensors.forms import form_of, num_bytes
from cutlayer.remote.tensors.trees import flatten
from cutlayer.remote.tensors.wire import encode
from cutlayer.runs.codecs import bits, coders
from cutlayer.split import Split

OPT = optim.sgd(0.05, momentum=0.9)
SPARSE = {"name": "topk", "share": 0.2}
EVERYTHING = {
    "activations": [SPARSE, "int8"],
    "gradients": {"name": "randtopk", "share": 0.3},
    "model": {**SPARSE, "error_feedback": True},
}


def sfl(name: str = "sfl_v1", cut: int = 1, **options: Any) -> Method:
    return methods.build(name, Split(resnet(), cut), OPT, OPT, **options)


def there(given: Mapping[str, Any], method: Method | None = None, **options: Any) -> Any:
    return deployment(method or sfl(), images(), clients_of(), batching=BATCH, seed=SEED, codecs=given, **options)


# -- what is counted ---------------------------------------------------------------------------------------------------


def payload(message: Work | Answer, tensors: Sequence[Tensor]) -> int:
    """The bytes of tensors in an encoded message, without those that align them."""
    *_, body = Struct("<3sBIQ").unpack_from(b"".join(encode(message, tensors)))
    return int(body) - sum(-num_bytes(form_of(a)) % 16 for a in tensors)


@pytest.mark.parametrize("given", [{}, EVERYTHING, {"activations": "int4", "gradients": "bf16", "model": "int8"}])
def test_the_ledger_counts_the_payload_of_the_messages_to_the_byte(given: dict[str, Any], monkeypatch: Any) -> None:
    full = Ledger(count_buffers=True)
    far = there(given, meters=(full,), followed=(0, 3))
    up: Counter[str] = Counter()
    work = Session.work

    def counting(session: Session, message: Work, tensors: Sequence[Tensor]) -> Any:
        reply = work(session, message, tensors)
        up["down"] += payload(message, tensors)
        if reply is not None:
            assert isinstance(reply.message, Answer)
            up["up"] += payload(reply.message, reply.tensors) + 8 * len(reply.message.numbers)
        return reply

    monkeypatch.setattr(Session, "work", counting)
    run(far)
    total = {way: sum(v for k, v in full.totals.items() if k.startswith(f"{way}_")) for way in ("up", "down")}
    assert up["up"] == total["up"]
    assert up["down"] == total["down"] - full.totals["down_settings"]  # plain numbers are in the header


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", SPARSE, [SPARSE, "int4"]])
def test_a_batch_counts_as_its_codec_says(codec: Any) -> None:
    """Activations are (b, 2, 8, 8) in float64: the size follows from the shape alone."""
    ledger = simulation(sfl(), codecs={"activations": codec})
    run(ledger, 1)
    coder = Coder(ACTIVATIONS, codecs.build(codec))  # type: ignore[arg-type]
    plain = simulation(sfl())
    run(plain, 1)
    shape = tuple(Split(resnet(), 1).lower(Split(resnet(), 1).initial()[0], images().x[:4], 0)[0].shape)
    per_batch = {b: coder.size((b, *shape[1:]), torch.float64) for b in (3, 4)}
    assert ledger.ledger.before == {"up_activations": plain.ledger.totals["up_activations"]}
    assert ledger.ledger.totals["up_activations"] == 15 * per_batch[4] + per_batch[3]  # of SIZES
    others = {k: v for k, v in plain.ledger.totals.items() if k != "up_activations"}
    assert {k: v for k, v in ledger.ledger.totals.items() if k != "up_activations"} == others


def test_the_clock_knows_what_crosses() -> None:
    """The only work is the transfer of activations: a fourth of the bits (and a scale) takes a fourth of the time."""
    slow = Devices(clients=tuple(Device(flops=1e30, up=1e3, down=1e30) for _ in range(5)), server=1e30)

    def seconds(given: dict[str, Any]) -> tuple[float, int]:
        sim = simulation(sfl(), codecs=given, devices=slow, per_round=1)
        run(sim, 1)
        assert sim.clock is not None
        return sim.clock.now, sim.ledger.totals["up_activations"]

    (raw, bytes_raw), (rounded, bytes_rounded) = seconds({}), seconds({"activations": "int8"})
    assert bytes_raw > 7 * bytes_rounded
    assert raw - rounded == pytest.approx(8 * (bytes_raw - bytes_rounded) / 1e3)


NEUTRAL = [
    {"activations": "none", "gradients": "none", "model": "none"},
    {"activations": {"name": "topk", "share": 1.0}, "gradients": {"name": "randtopk", "share": 1}, "model": ["none"]},
    {"activations": {"name": "gaussian", "std": 0}, "gradients": {"name": "laplace", "scale": 0.0}},
    {"model": {"name": "topk", "share": 1, "error_feedback": True}},
]


@pytest.mark.parametrize("given", NEUTRAL)
def test_a_codec_that_does_nothing_changes_no_bit(given: dict[str, Any]) -> None:
    plain, neutral = simulation(sfl("smofi")), simulation(sfl("smofi"), codecs=given)
    agree(run(neutral).client.tree, run(plain).client.tree, 0)
    assert neutral.ledger.content() == plain.ledger.content()
    assert neutral.coders == {}


def test_the_planner_knows_the_scales_of_channels_and_features() -> None:
    """Of a sample of 2 channels with 8 rows of 8 numbers, each feature is a scale of its own."""
    known = profile(resnet(), (1, 8, 8))
    assert known.shapes[1] == ((2, 8, 8),)
    for per, scales in (("sample", 1), ("channel", 2), ("feature", 8)):
        up = bits({"activations": {"name": "int8", "per": per}}, "activations")
        assert Costs.of(known, up).up[0] == 8 * (2 * 8 * 8 + 4 * scales)
        assert up((*known.shapes[1], (0, 4), (3,))) == 8 * (2 * 8 * 8 + 4 * scales + 3 + 4)


def test_the_planner_knows_what_crosses() -> None:
    """Of n elements of a sample, n bytes and a scale go up, and n / 10 values with about a byte for a place down."""
    known = profile(resnet(), (1, 8, 8))
    plain = Costs.of(known)
    given = {"activations": "int8", "gradients": {"name": "topk", "share": 0.1}}
    costs = Costs.of(known, bits(given, "activations"), bits(given, "gradients"))
    n = np.array(known.activations[1:])
    assert costs.up.tolist() == (8 * (n + 4)).tolist()
    kept, blocks = -(-n // 10), -(-n // 256)
    assert costs.down.tolist() == (8 * (5 * kept + np.where(n > 256, 2 * blocks, 0))).tolist()
    assert costs.held.tolist() == plain.held.tolist()  # in memory nothing is encoded


# -- what a device refuses ---------------------------------------------------------------------------------------------


def lost(given: Mapping[str, Any], at_devices: Mapping[str, Any], followed: bool = False) -> str:
    """Why a server of these codecs gets nothing from devices of those."""
    far, method = there(given), sfl()
    own = coders(at_devices, method.model, images().x[:2])
    same: tuple[Any, ...] = (method, images(), clients_of(), BATCH)
    devices = [
        device(*same, j, coders=own, terms=terms(*same, j, SEED, own) if followed else None)
        for j in range(len(clients_of()))
    ]
    for each in devices:
        join(far.backend.sessions, each)
    far.backend.gather = returning(far, devices)
    with pytest.raises(ConfigError) as caught:
        run(far)
    return str(caught.value)


@pytest.mark.parametrize(
    ("server", "devices", "why"),
    [
        ({}, {"activations": "int8"}, " sends activations only as int8 encodes them"),
        ({}, {"model": SPARSE}, " sends model only as topk(0.2) encodes them"),
        ({"activations": "int8"}, {}, "unknown function 'codecs.activations.encode'"),
        ({"activations": "int8"}, {"activations": "int4"}, "the activations have the type uint8"),
        (
            {"activations": "int8"},
            {"activations": SPARSE},
            "the activations have the type float64 and the shape (3, 26), but int8",
        ),
        ({"gradients": SPARSE}, {"gradients": "int8"}, "what came as gradients is not encoded by int8"),
        ({"gradients": SPARSE}, {"gradients": {"name": "topk", "share": 0.3}}, "is not encoded by topk(0.3)"),
    ],
)
def test_a_receiver_refuses_another_codec_than_its_own(
    server: dict[str, Any], devices: dict[str, Any], why: str
) -> None:
    assert why in lost(server, devices)


@pytest.mark.parametrize("codec", [SPARSE, "int8"])
def test_a_device_whose_gradients_are_encoded_refuses_a_server_whose_are_not(codec: Any) -> None:
    why = lost({}, {"gradients": codec}, followed=True)
    assert "this device's own run has 'receive gradients' here, but the server asks for: receive " in why


@pytest.mark.parametrize("codec", ["int8", SPARSE, {"name": "int8", "per": "tensor"}])
def test_the_number_of_samples_is_no_part_of_a_codes_form(codec: Any) -> None:
    own = Coder(GRADIENTS, codecs.build(codec))  # type: ignore[arg-type]
    few, many, wide = (own.encode({"hidden": torch.ones(shape)}) for shape in ((2, 3, 4), (9, 3, 4), (2, 3, 5)))
    forms = [conversation.form_of("gradients", value) for value in (few, many, wide)]
    assert forms[0] == forms[1] != forms[2]
    model = Coder(MODEL, codecs.build(codec))  # type: ignore[arg-type]
    two, nine = (conversation.form_of("model", model.encode({"w": torch.ones(n, 3)})) for n in (2, 9))
    assert two != nine
    broken = few["hidden"]._replace(like=None), few["hidden"]._replace(like=torch.ones(()))
    assert forms[0] not in [conversation.form_of("gradients", {"hidden": value}) for value in broken]


class Attacker:
    """A server that sends a device commands of its choice."""

    def __init__(self, given: Mapping[str, Any], secret: str | None = None) -> None:
        self.method = sfl()
        self.coders = coders(given, self.method.model, images().x[:2])
        own = device(self.method, images(), clients_of(), BATCH, 0, coders=self.coders, secret=secret)
        self.session = Session(own, 1)
        self.number = 0
        self.token = 1
        self.begins = True

    def told(self, *commands: c.AnyCommand, numbers: Sequence[float] = (), tensors: Sequence[Tensor] = ()) -> Any:
        self.number += 1
        work = Work(
            session=1,
            number=self.number,
            round=0,
            key=5,
            token=self.token,
            begins=self.begins,
            list=self.number,
            commands=commands,
            numbers=tuple(numbers),
        )
        self.begins = False
        return self.session.work(work, list(tensors))

    def answer(self, *commands: c.AnyCommand, **more: Any) -> Any:
        reply = self.told(*commands, **more)
        return None if reply is None else reply.message

    def sent(self, *commands: c.AnyCommand, **more: Any) -> Tensor:
        """Return the code that these commands leave in slot 8, as it comes up as activations."""
        reply = self.told(*commands, c.Up(("activations",), (8,)), **more)
        assert isinstance(reply.message, Answer), reply.message
        code: Tensor = next(a for a in reply.tensors if a.numel())
        return code

    def again(self) -> None:
        """Begin another attempt at the same round."""
        self.token, self.begins = self.token + 1, True
        self.begin()

    def begin(self) -> None:
        """Put the client's layers into slot 1, a model that is encoded into slot 0, and activations into slot 4."""
        model = flatten(self.method.model.initial()[0])
        assert self.answer(c.Put(0, model.skeleton), tensors=model.tensors, numbers=model.numbers) is None
        commands = (
            c.Put(6, "number"),
            c.Do(1, "client.begin", (0, 6)),
            c.Batch(2, 3),
            c.Key(7),
            c.Vjp(4, 5, "client.forward", (1, 2, 7)),
        )
        assert self.answer(*commands, numbers=(0, 4, 0, 9, 9)) is None

    def refusal(self, *commands: c.AnyCommand, **more: Any) -> str:
        found = self.answer(*commands, **more)
        assert isinstance(found, Refusal), found
        return found.reason


def test_a_device_encodes_only_what_may_leave_as_that_kind() -> None:
    attacker = Attacker({"activations": "int8"})
    wrong = "argument 1 of codecs.activations.encode is not made as activations, so it is not encoded"
    takes = "argument 1 of codecs.activations.encode takes none of a client's own data, but it was given labels"
    refused: list[tuple[c.AnyCommand, str]] = [
        (c.Up(("activations",), (4,)), "client 0 sends activations only as int8 encodes them"),
        (c.Do(8, "codecs.activations.encode", (1,)), wrong),  # the client's own layers
        (c.Do(8, "codecs.activations.encode", (5,)), wrong),  # a pullback
        (c.Do(8, "codecs.activations.encode", (3,)), takes),
    ]
    for command, reason in refused:
        attacker.begin()  # a refusal ends a round
        assert attacker.refusal(command) == reason
    attacker.begin()
    found = attacker.answer(c.Do(8, "codecs.activations.encode", (4,)), c.Up(("activations",), (8,)))
    assert isinstance(found, Answer)


def test_a_device_adds_only_what_its_codec_lost() -> None:
    attacker = Attacker({"model": {**SPARSE, "error_feedback": True}})
    attacker.begin()
    name = "codecs.model.0.a"
    refused = attacker.refusal(c.KeepValue(9, name, 4), numbers=(1,))
    assert refused == f"only what the codec of model lost is kept as {name!r}"
    made = "argument 3 of codecs.model.encode_with_rest is not the rest of model, so it is not encoded"
    base = "argument 2 of codecs.model.encode_with_rest is not the base of model, so it is not encoded"
    for arguments, reason in (((8, 11, 10), made), ((8, 0, 10), base)):
        attacker.begin()
        assert attacker.answer(c.KeepValue(9, "elsewhere", 0), c.RecallValue(10, "elsewhere"), numbers=(1,)) is None
        assert attacker.answer(c.Field(8, 1, "model"), c.Do(11, "codecs.model.decode", (0,))) is None
        assert attacker.refusal(c.Do(12, "codecs.model.encode_with_rest", arguments)) == reason


def test_a_device_refuses_a_damaged_code_before_it_decodes_it() -> None:
    attacker = Attacker({"gradients": SPARSE})
    coder = attacker.coders[GRADIENTS]
    code = coder.encode(torch.randn(4, 2, 8, 8, dtype=torch.float64))
    code.code["places"]["bits"][0, 0] ^= 1
    flat = flatten(code)
    refused = attacker.refusal(
        c.Put(0, flat.skeleton), c.Do(1, "codecs.gradients.decode", (0,)), tensors=flat.tensors, numbers=flat.numbers
    )
    assert refused == "the bits of topk(0.2) do not name 26 of 128 elements"


@pytest.mark.parametrize("codec", [SPARSE, "int8"])
def test_a_device_refuses_gradients_that_are_not_encoded(codec: Any) -> None:
    attacker = Attacker({"gradients": codec})
    flat = flatten(torch.randn(4, 2, 8, 8, dtype=torch.float64))
    refused = attacker.refusal(
        c.Put(0, flat.skeleton), c.Do(1, "codecs.gradients.decode", (0,)), tensors=flat.tensors, numbers=flat.numbers
    )
    assert refused == f"what came as gradients is not all encoded by {attacker.coders[GRADIENTS].codec}"


def test_what_a_coder_encodes_comes_encoded_or_is_refused() -> None:
    one, two = torch.ones(2, 3), torch.arange(6.0).reshape(2, 3)
    own = Coder(ACTIVATIONS, codecs.int8(), skipped=frozenset({"mask"}))
    whole = {"mask": one, "ids": torch.arange(2), "none": torch.zeros(0, 3)}
    own.check(own.encode({**whole, "hidden": two}))
    own.check(whole)
    for value in ({**whole, "hidden": two}, {**own.encode({"hidden": two}), "other": one}, two):
        with pytest.raises(WireError, match=r"^what came as activations is not all encoded by int8$"):
            own.check(value)
    model = Model({"w": two, "b": one}, {"frozen": one}, {"mean": one})
    for codec in (codecs.int8(), codecs.topk(share=0.5), codecs.clip(norm=1.0)):
        own = Coder(MODEL, codec)
        coded = own.encode_change(model, tree.map(torch.zeros_like, model))
        own.check(coded)
        params = [*coded.params, one] if isinstance(coded.params, list) else {**coded.params, "b": one}
        with pytest.raises(WireError, match=r"^what came as model is not all encoded by "):
            own.check(coded._replace(params=params))
    Coder(MODEL, codecs.topk(share=0.5)).check(model)  # it comes down whole
    with pytest.raises(WireError, match=r"^what came as model is not all encoded by int8$"):
        Coder(MODEL, codecs.int8()).check(model)


def test_a_model_that_never_came_down_has_no_change_to_encode() -> None:
    sim = simulation(Uploading(model=Split(resnet(), 1), opt=OPT), codecs={"model": SPARSE})
    with pytest.raises(LawError) as caught:
        run(sim, 1)
    assert str(caught.value) == (
        "topk(0.2) encodes how a model changed since it came down, but not all of these clients got one of this form "
        "in this round; take a codec that rounds, such as int8"
    )
    whole = simulation(Uploading(model=Split(resnet(), 1), opt=OPT), codecs={"model": "bf16"})
    agree(run(whole, 1).client.tree.params, tree.map(lambda a: a.bfloat16().double(), trained_alone()), 0)


@method
@dataclass(frozen=True, kw_only=True)
class Uploading:
    """Sends the layers up under another form than that in which they came down."""

    model: Split
    opt: Any

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(lower), server.hold(upper), None)

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        part = clients.do(self.begin, clients.down(MODEL, fed.do(_params, state.client)))
        mean = fed.mean(clients.up(MODEL(part)))
        return State(state.round + 1, mean, state.server, None)

    @at_client(gives=MODEL)
    def begin(self, params: Tensors) -> Model:
        return Model(params, {}, {})


def _params(model: Model) -> Tensors:
    return model.params


def trained_alone() -> Tensors:
    return Split(resnet(), 1).initial()[0].params


# -- nothing lost ------------------------------------------------------------------------------------------------------


def returning(far: Any, own: Sequence[Any]) -> Callable[[int], tuple[int, ...]]:
    """Devices that join again, with what they keep, as soon as a round begins."""

    def gather(round: int) -> tuple[int, ...]:
        for dev in own:
            if dev.client not in far.backend.sessions.present():
                join(far.backend.sessions, dev)
        return tuple(far.backend.sessions.present())

    return gather


def test_a_round_that_fails_after_the_clients_have_sent_their_models_leaves_no_trace(monkeypatch: Any) -> None:
    """What the codec lost is kept at the devices; the attempt that failed must not count."""
    expected = run(there(EVERYTHING), 4)
    far = there(EVERYTHING)
    own = [device(far.method, images(), clients_of(), BATCH, j, coders=far.coders) for j in range(len(clients_of()))]
    for dev in own:
        join(far.backend.sessions, dev)
    far.backend.gather = returning(far, own)
    up, failures = Remote.up, []

    def failing(remote: Remote, parcels: Any, ids: Any) -> Any:
        brought = up(remote, parcels, ids)
        if parcels[0].kind is MODEL and remote.round.number in (1, 3) and failures.count(remote.round.number) < 2:
            failures.append(remote.round.number)
            raise AllClientsLost("nobody is left")
        return brought

    monkeypatch.setattr(Remote, "up", failing)
    agree(run(far, 4).client.tree, expected.client.tree, 0)
    assert failures == [1, 1, 3, 3]


def test_a_run_with_codecs_resumes_to_the_same_bits(tmp_path: Path) -> None:
    data, partition = images(), clients_of()
    given = {**EVERYTHING, "model": ErrorFeedback(codecs.topk(share=0.2))}

    def trained(out: str, rounds: int, resume: bool = False) -> dict[str, Tensor]:
        options: dict[str, Any] = {"batching": BATCH, "codecs": given, "out": tmp_path / out, "seed": SEED}
        found = cl.train(sfl(), data, partition, rounds=rounds, per_round=3, resume=resume, **options)
        return found.state_dict

    whole = trained("whole", 5)
    trained("parts", 2)
    agree(trained("parts", 5, resume=True), whole, 0)
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts")]
    assert records[0] == records[1]
    assert b"bytes_before_codecs" in records[0]
    with pytest.raises(cl.UsageError, match=r"codecs\.activations"):
        cl.train(sfl(), data, partition, rounds=6, per_round=3, batching=BATCH, out=tmp_path / "parts", seed=SEED,
                 resume=True, codecs={**given, "activations": "int4"})  # fmt: skip


def test_only_parameters_are_encoded_and_statistics_cross_as_they_are() -> None:
    lower = Split(resnet(), 1).initial()[0]
    assert lower.buffers
    coder = Coder(MODEL, codecs.topk(share=0.2))
    moved = Model(tree.map(lambda a: a + 1.0, lower.params), lower.frozen, tree.map(lambda a: a + 1, lower.buffers))
    coded = coder.encode_change(moved, lower)
    got = coder.decode_change(coded, lower)
    agree(got.buffers, moved.buffers, 0)
    for name, a in got.params.items():
        kept = int((a != lower.params[name]).sum())
        assert kept == -(-a.numel() // 5)
