"""Attacks of one client, with a valid certificate, on a server and on the other clients."""

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_grpc_strangers
import torch
from device_pool import Served, shared, wait_for
from safetensors.torch import load
from test_grpc_faults import RUN, devices, outcome, serving, simulated
from test_grpc_strangers import Twist, hello, leave, saying, take_part, with_eve, with_label, with_nan
from torch import Tensor
from victims import NAMES, credentials, folder

from cutlayer.remote.device.session import Reply, forms_of
from cutlayer.remote.device.stream import Stream, StreamEnded
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.server.streams import OVER
from cutlayer.runs import build
from cutlayer.runs.config import Choice

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks of clients")]

TWO = replace(RUN, rounds=2)


def keys() -> Path:
    return folder() / "keys"


@pytest.fixture(scope="module")
def without_eve(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves if eve disconnects where she would attack."""
    return with_eve(leave, shared(), keys(), tmp_path_factory.mktemp("lost"))[0]


def fails(twist: Twist, path: Path, without: dict[str, bytes], why: str) -> None:
    """Check that eve is refused and counted, and that the others train as if she had disconnected."""
    left, status, _ = with_eve(twist, shared(), keys(), path)
    eve = status.clients[2]
    assert (eve.state, eve.refusals) == ("refused", 1) and why in eve.reason
    assert [c.state for c in status.clients.values()][:2] == ["done"] * 2
    assert left == without


def test_a_client_wants_the_model_to_be_nan(tmp_path: Path, without_eve: dict[str, bytes]) -> None:
    fails(saying(with_nan), tmp_path, without_eve, "is not finite")


def test_a_client_wants_a_server_to_crash_on_a_label(tmp_path: Path, without_eve: dict[str, bytes]) -> None:
    fails(with_label(2**40), tmp_path, without_eve, "but there are the classes 0 to 9")


def test_a_client_wants_a_server_to_crash_on_a_shape(tmp_path: Path, without_eve: dict[str, bytes]) -> None:
    fails(saying(lambda z, y: [z.flatten(1), y]), tmp_path, without_eve, "were asked for")


def test_a_client_wants_the_memory_of_a_server_by_a_large_answer(tmp_path: Path, without_eve: dict[str, bytes]) -> None:
    def large(z: Tensor, y: Tensor) -> list[Tensor]:
        return [z.repeat(1000, 1, 1, 1), y]

    fails(saying(large), tmp_path, without_eve, "is too long; at most")


def test_a_client_wants_to_answer_in_the_session_of_another(tmp_path: Path, without_eve: dict[str, bytes]) -> None:
    def other(stream: Stream, reply: Reply) -> None:
        stream.say(msgspec.structs.replace(reply.message, session=reply.message.session - 1), reply.tensors)

    fails(other, tmp_path, without_eve, "came where it does not belong")


def test_a_client_wants_to_forge_a_line_of_the_log(tmp_path: Path, without_eve: dict[str, bytes]) -> None:
    def forge(stream: Stream, reply: Reply) -> None:
        words = '\x1b[2J\r\n{"level": "info"}[bold]'
        stream.say(m.Refusal(session=reply.message.session, number=reply.message.number, where=words, reason=words))

    fails(forge, tmp_path, without_eve, "\\x1b[2J\\r\\n")


def test_a_client_wants_its_answer_to_count_twice(tmp_path: Path) -> None:
    def twice(stream: Stream, reply: Reply) -> None:
        stream.say(reply.message, reply.tensors)
        stream.say(reply.message, reply.tensors)

    left, status, words = with_eve(twice, shared(), keys(), tmp_path)
    assert left == simulated(TWO, tmp_path / "simulated") and words == OVER
    assert [c.refusals for c in status.clients.values()] == [0] * 3


def test_a_client_wants_its_samples_to_count_with_wrong_labels_and_they_do(tmp_path: Path) -> None:
    """A plausible poison passes: nobody but the client knows what its labels should be."""

    def flipped(z: Tensor, y: Tensor) -> list[Tensor]:
        return [z, 9 - y]

    left, status, words = with_eve(saying(flipped), shared(), keys(), tmp_path)
    assert [(c.state, c.refusals) for c in status.clients.values()] == [("done", 0)] * 3 and words == OVER
    assert left != simulated(TWO, tmp_path / "simulated")


MODEL_AT = 3  # the request for the client's layers


@pytest.mark.parametrize("number", [3e38, 1e30])
def test_a_client_wants_to_overflow_or_to_drown_the_mean(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def huge(stream: Stream, reply: Reply) -> None:
        stream.say(reply.message, [torch.full_like(a, number) if a.is_floating_point() else a for a in reply.tensors])

    monkeypatch.setattr(test_grpc_strangers, "AT", MODEL_AT)
    left, status, words = with_eve(huge, shared(), keys(), tmp_path)
    assert words == OVER and [c.state for c in status.clients.values()] == ["done"] * 3
    model = load(left["model.safetensors"])
    assert all(value.double().abs().max() < 10 for name, value in model.items() if "running" not in name)
    assert b'"guarded"' in left["metrics.jsonl"]


def test_a_client_wants_to_be_asked_until_the_server_gives_up(tmp_path: Path) -> None:
    """Each of its answers is not a number; whoever has failed is not drawn again in the round."""
    run = replace(TWO, rounds=4, per_round=1)
    order = Served(run=run, folder=tmp_path / "served", serving=serving(keys(), patience=0.3, least=3))

    def always(stream: Stream, reply: Reply) -> None:
        stream.say(
            reply.message, [torch.full_like(a, torch.nan) if a.is_floating_point() else a for a in reply.tensors]
        )

    stop = threading.Event()

    def come_again() -> None:
        while not stop.is_set():
            with suppress(Exception):
                take_part(order.serving.listen, keys(), always)

    with shared().some(2) as (server, clients):
        server.order(order)
        server.hear("open")
        clients.order(devices(order, keys(), tmp_path / "state", NAMES[:2]))
        threading.Thread(target=come_again, daemon=True).start()
        server.hear("served")
        stop.set()
        assert sorted(clients.hear("left") for _ in NAMES[:2]) == [(name, OVER) for name in NAMES[:2]]


def test_a_client_wants_all_weight_in_the_mean_and_gets_it_by_default(tmp_path: Path) -> None:
    """Ann and bob have 48 samples each, and so has eve, who says that she has 3.2 million."""
    run = replace(TWO, rounds=1, method=Choice("fedavg"), model=Choice("mlp", {"hidden": (8,)}))
    order, sent = Served(run=run, folder=tmp_path / "served", serving=serving(keys())), list[list[Tensor]]()
    with shared().some(2) as (server, clients):
        server.order(order)
        server.hear("open")
        clients.order(devices(order, keys(), tmp_path / "state", NAMES[:2]))
        take_part_as("eve", order.serving.listen, sent, [], samples=3_200_000)
        server.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES[:2]) == [(name, OVER) for name in NAMES[:2]]
    model, honest = (load(left["model.safetensors"]) for left in (outcome(order.folder), simulated(run, tmp_path)))
    hers = {a.shape: a for a in sent[0]}
    for name, value in model.items():
        off, usual = ((a - hers[a.shape]).abs().max() for a in (value, honest[name]))
        assert off < 1e-4 * usual


# -- when it joins -------------------------------------------------------------------------------------------------


def told(ready: dict[str, Any], served: str, name: str = "eve") -> str:
    """Return what a client hears that is ready in this way."""
    stream = Stream(served, "train", credentials(name))
    stream.say(hello(name))
    forms = forms_of(build.dealt(TWO).data)
    try:
        for message, _ in stream:
            assert isinstance(message, m.Welcome), message
            own = {"session": message.session, "samples": 48, "sample": forms, "kept": (), **ready}
            stream.say(m.Ready(**own))
    except StreamEnded as left:
        return str(left)
    finally:
        stream.close()
    return ""


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that waits for its clients, and whose run ends when they have come."""
    path = tmp_path_factory.mktemp("waiting")
    order = Served(run=TWO, folder=path / "served", serving=serving(keys(), patience=300))
    with shared().some(2) as (server, clients):
        server.order(order)
        server.hear("open")
        yield order, server, clients


CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "a billion samples": ({"samples": 10**9}, "it says that it holds 1000000000 samples"),
    "a billion test samples": ({"tests": 10**9}, "it says that it holds 1000000000 samples"),
    "one sample": ({"samples": 1}, "at least 2 are needed"),
    "samples of another shape": ({"sample": (m.TensorForm("float32", (3, 9)),)}, "but those of this run are"),
    "the session of another": ({"session": 1}, "where it does not belong"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_client_wants_more_weight_than_it_has(claim: str, waiting: Any) -> None:
    ready, why = CLAIMS[claim]
    assert why in told(ready, waiting[0].serving.listen)


def test_a_client_wants_to_be_taken_for_one_that_keeps_values(waiting: Any) -> None:
    """A server believes only what it has told this client in a round that was saved."""
    kept = tuple(m.KeptVersion(f"mine {k}", 10**9, 5) for k in range(1000))
    stream = Stream(waiting[0].serving.listen, "train", credentials("eve"))
    stream.say(hello("eve"))
    message, _ = next(iter(stream))
    assert isinstance(message, m.Welcome)
    stream.say(m.Ready(session=message.session, samples=48, sample=forms_of(build.dealt(TWO).data), kept=kept))
    stream.close("it has seen enough")


def test_a_client_wants_to_say_hello_for_ever(waiting: Any) -> None:
    stream = Stream(waiting[0].serving.listen, "train", credentials("eve"))
    for _ in range(100):
        stream.say(hello("eve"))
    with pytest.raises(StreamEnded, match="where it does not belong"):
        list(stream)
    stream.close()


def test_a_client_wants_a_server_to_hold_the_names_of_its_plug_ins(waiting: Any) -> None:
    stream = Stream(waiting[0].serving.listen, "train", credentials("eve"))
    stream.say(msgspec.structs.replace(hello("eve"), plugins={f"{k}.py": "0" * 64 for k in range(100_000)}))
    with pytest.raises(StreamEnded, match=r"too long|not what it should be"):
        list(stream)
    stream.close()


def test_the_thief_of_a_key_wants_the_place_of_its_owner_and_gets_it(waiting: Any) -> None:
    """Until the key is revoked: of two with one certificate the newer stays, and the older is told so."""
    order, *_ = waiting
    forms, words = forms_of(build.dealt(TWO).data), list[str]()
    streams = [Stream(order.serving.listen, "train", credentials("eve")) for _ in range(2)]

    def stay(stream: Stream) -> None:
        try:
            for message, _ in stream:
                if isinstance(message, m.Welcome):
                    stream.say(m.Ready(session=message.session, samples=48, sample=forms, kept=()))
                    ready.set()
        except StreamEnded as left:
            words.append(str(left))

    for stream in streams:
        ready = threading.Event()
        stream.say(hello("eve"))
        threading.Thread(target=stay, args=(stream,), daemon=True).start()
        assert ready.wait(60)
    wait_for(lambda: bool(words))
    assert "another process has joined as the same client" in words[0]
    streams[1].close("it has what it wants")


def test_the_run_that_clients_have_attacked_ends_with_the_numbers_of_loop(waiting: Any, tmp_path: Path) -> None:
    order, server, clients = waiting
    clients.order(devices(order, keys(), tmp_path / "state"))
    status, _ = server.hear("served")
    assert sorted(clients.hear("left") for _ in NAMES) == [(name, OVER) for name in NAMES]
    assert [c.state for c in status.clients.values()] == ["done"] * 3
    assert outcome(order.folder) == simulated(TWO, tmp_path / "simulated")


# -- each other ----------------------------------------------------------------------------------------------------


def test_a_client_wants_the_layers_of_the_only_other_and_gets_them(tmp_path: Path) -> None:
    """From the mean of two, each can compute the other's: run with three or more."""
    run = replace(TWO, clients=2, method=Choice("fedavg"), model=Choice("mlp", {"hidden": (8,)}))
    order = Served(run=run, folder=tmp_path / "served", serving=serving(keys()))
    sent: dict[str, list[list[Tensor]]] = {"ann": [], "bob": []}
    heard: list[list[Tensor]] = []

    def join(name: str) -> None:
        take_part_as(name, order.serving.listen, sent[name], heard if name == "bob" else [])

    with shared().some() as (server,):
        server.order(order)
        server.hear("open")
        both = [threading.Thread(target=join, args=(name,)) for name in sent]
        for one in both:
            one.start()
        for one in both:
            one.join(60)
        server.hear("served")
    mean, own, theirs = heard[1], sent["bob"][0], sent["ann"][0]
    for mine, middle, hidden in zip(own, mean, theirs, strict=False):
        torch.testing.assert_close(2 * middle - mine, hidden, rtol=1e-4, atol=1e-5)


def take_part_as(name: str, address: str, sent: list[list[Tensor]], heard: list[list[Tensor]], **claims: Any) -> None:
    """Take part honestly but for these claims, and note what is sent and what comes."""
    from cutlayer.remote.device.client import _ready
    from cutlayer.remote.device.session import Session
    from cutlayer.remote.joining.join import DeviceSettings

    stream, settings = Stream(address, "train", credentials(name)), DeviceSettings(data="digits")
    stream.most = (2**24, 2**24)
    stream.say(hello(name))
    for message, tensors in stream:
        if isinstance(message, m.Welcome):
            session = Session(settings.ready(message), message.session)
            stream.say(msgspec.structs.replace(_ready(session.device, message.session), **claims))
        elif isinstance(message, m.Work):
            heard.append(list(tensors))
            reply = session.work(message, tensors)
            assert reply is not None
            sent.append(reply.tensors)
            stream.say(reply.message, reply.tensors)
        else:
            break
    stream.close()
