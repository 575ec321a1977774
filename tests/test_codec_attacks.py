"""Specifies what a server cannot make a device do with its codecs: draw noise that the server can take off again."""

from typing import Any

import pytest
import torch
from test_codec_laws import SPARSE, Attacker

from cutlayer.remote.protocol import commands as c

NOISE = {"activations": {"name": "gaussian", "std": 5.0, "clip": 1.0}}
ENCODE = "codecs.activations.encode"
NUMBER = 1 << 33  # of a seed


def begun(given: Any = NOISE, secret: str | None = "secret") -> Attacker:
    attacker = Attacker(given, secret)
    attacker.begin()
    return attacker


@pytest.mark.parametrize(
    ("commands", "numbers"),
    [
        ([c.Do(8, ENCODE, (4,))], []),
        ([c.Key(9), c.Do(8, ENCODE, (4, 9))], [123]),
        ([c.Put(9, "number"), c.Do(8, ENCODE, (4, 9))], [123]),
        ([c.Own(9), c.Key(10), c.Do(8, ENCODE, (4, 10, 9))], [NUMBER, 123]),
        ([c.Own(9), c.Key(10), c.Do(8, ENCODE, (4, 9, 10))], [NUMBER, 123]),
        ([c.Own(9), c.KeepValue(10, "mine", 9), c.Do(8, ENCODE, (4, 10))], [NUMBER, 0]),
    ],
)
def test_a_device_draws_noise_from_a_seed_of_its_own_alone(commands: list[c.AnyCommand], numbers: list[int]) -> None:
    refused = begun().refusal(*commands, numbers=numbers)
    assert refused == f"{ENCODE} takes 2 arguments, the last of them a seed of the client's own, which it draws with"


def test_a_codec_that_does_not_draw_takes_no_seed() -> None:
    refused = begun({"activations": "int8"}).refusal(c.Own(9), c.Do(8, ENCODE, (4, 9)), numbers=[NUMBER])
    assert refused == f"{ENCODE} takes 1 argument"


def test_no_two_values_leave_a_device_under_the_same_noise() -> None:
    used = "client 0 has drawn with this seed before; each code needs a seed of its own"
    again: list[tuple[tuple[c.AnyCommand, ...], list[int]]] = [
        ((c.Do(8, ENCODE, (4, 9)),), []),
        ((c.Own(10), c.Do(8, ENCODE, (4, 10))), [NUMBER]),
    ]
    for commands, numbers in again:
        attacker = begun()
        attacker.sent(c.Own(9), c.Do(8, ENCODE, (4, 9)), numbers=[NUMBER])
        assert attacker.refusal(*commands, numbers=numbers) == used
    attacker = begun()
    attacker.sent(c.Own(9), c.Do(8, ENCODE, (4, 9)), numbers=[NUMBER])
    attacker.sent(c.Own(10), c.Do(8, ENCODE, (4, 10)), numbers=[NUMBER + 1])


def test_no_two_attempts_have_the_same_noise() -> None:
    attacker = begun()
    sent = []
    for _ in range(3):
        sent.append(attacker.sent(c.Own(9), c.Do(8, ENCODE, (4, 9)), numbers=[NUMBER]))
        attacker.again()
    reconnected = begun()  # the same device in another session
    sent.append(reconnected.sent(c.Own(9), c.Do(8, ENCODE, (4, 9)), numbers=[NUMBER]))
    for i, one in enumerate(sent):
        for other in sent[:i]:
            assert 0.8 < float((one - other).std()) / (5 * 2**0.5) < 1.2  # as of independent noise


def test_without_a_secret_an_attempt_is_repeatable() -> None:
    attacker = begun(secret=None)
    one = attacker.sent(c.Own(9), c.Do(8, ENCODE, (4, 9)), numbers=[NUMBER])
    attacker.again()
    assert torch.equal(one, attacker.sent(c.Own(9), c.Do(8, ENCODE, (4, 9)), numbers=[NUMBER]))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (NOISE, {ENCODE}),
        ({"gradients": "int8"}, {"codecs.gradients.encode"}),
        ({"model": "int8"}, {"codecs.model.encode", "codecs.model.encode_change"}),
        ({"model": SPARSE}, {"codecs.model.encode_change"}),
        ({"model": {**SPARSE, "error_feedback": True}}, {"codecs.model.encode_with_rest", "codecs.model.no_rest"}),
    ],
)
def test_a_device_runs_only_the_functions_that_its_codec_needs(given: dict[str, Any], names: set[str]) -> None:
    """With error feedback, which it does not have, a codec of noise would take its noise back."""
    attacker = Attacker(given)
    found = {name for name in attacker.session.device.program.by_address if name.startswith("codecs.")}
    (kind,) = given
    assert found == {*names, f"codecs.{kind}.decode"}
    attacker.begin()
    for name in ("encode", "encode_change", "encode_with_rest", "no_rest"):
        if f"codecs.{kind}.{name}" not in names:
            refused = attacker.refusal(c.Do(20, f"codecs.{kind}.{name}", (4,)))
            assert refused.startswith(f"unknown function 'codecs.{kind}.{name}'")
