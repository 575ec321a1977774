"""Specifies two servers with two owners: they give the numbers of one process, and neither holds both halves."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CODECS, SEED, agree, clients_of, images
from test_codecs_agree import outcome as with_codecs
from test_engines_agree import CASES, on_loop, plain
from test_remote import method_of
from torch import Tensor
from two_servers import Halves, Said, trained_apart

from cutlayer.core import tree
from cutlayer.errors import CheckpointError
from cutlayer.remote.protocol.messages import Answer, SavedRounds, Sent, Work
from cutlayer.remote.server.exchange import FedValues
from cutlayer.remote.server.peer import Peer
from cutlayer.remote.server.sessions import ClientSession, Sessions
from cutlayer.runs.folder import Folder

QUICK = ("fedavg", "fednag", "sl", "hosfl", "mu_splitfed", "hasfl own cuts")


@cache
def halves(case: str, shape: str) -> Halves:
    batching = CASES[case].batching
    return trained_apart(lambda: method_of(case, shape), images(), clients_of(), batching=batching, seed=SEED)


def here(value: Any) -> list[Tensor]:
    return [a for a in tree.tensors(plain(value)) if not a.is_meta]


def must_have_the_numbers_of_one(case: str, shape: str) -> None:
    found, expected = halves(case, shape), on_loop(case, "momentum", shape, torch.float64).state
    agree(here(found.train.server), tree.tensors(plain(expected.server)), tol=0.0)
    agree(here(found.fed.client), tree.tensors(plain(expected.client)), tol=0.0)
    assert here(found.train.client) == [] and here(found.fed.server) == []


@pytest.mark.parametrize("case", QUICK)
def test_two_servers_together_have_the_numbers_of_one(case: str) -> None:
    must_have_the_numbers_of_one(case, "two-part")


@pytest.mark.parametrize("codecs", ["sparse", pytest.param("noisy", marks=pytest.mark.slow)])
def test_two_servers_decode_what_one_does(codecs: str) -> None:
    """In each process, the codecs of the other server run on shapes."""
    given: Any = {"batching": CASES["smofi"].batching, "seed": SEED, "codecs": CODECS[codecs], "rounds": 3}
    found = trained_apart(lambda: method_of("smofi", "two-part"), images(), clients_of(), **given)
    expected = with_codecs("smofi", codecs, "loop").state
    agree(here(found.train.server), tree.tensors(plain(expected.server)), tol=0.0)
    agree(here(found.fed.client), tree.tensors(plain(expected.client)), tol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "shape"),
    [*((c, "two-part") for c in CASES if c not in QUICK), *((c, "u-shaped") for c in ("sfl_v1", "sfl_v2", "mergesfl"))],
)
def test_two_servers_together_have_the_numbers_of_one_for_every_method(case: str, shape: str) -> None:
    must_have_the_numbers_of_one(case, shape)


def contents(said: list[Said], kind: type) -> set[bytes]:
    """The bytes of the tensors in these messages, of those large enough to be unique."""
    tensors = [a for s in said if isinstance(s.message, kind) for a in s.tensors if a.numel() > 3 and a.any()]
    return {a.contiguous().numpy().tobytes() for a in tensors}


@pytest.mark.parametrize("case", ["sfl_v1", "hasfl own cuts", "hosfl", "zo_sfl"])
def test_no_server_sees_both_a_clients_layers_and_its_activations(case: str) -> None:
    said = halves(case, "two-part").said
    layers, at_the_cut = contents(said["fed"], Answer), contents(said["train"], Answer) | contents(said["train"], Work)
    between = contents(said["peer"], object)
    assert layers and at_the_cut
    assert not layers & at_the_cut  # each went to one server only ...
    assert not (layers | contents(said["train"], Answer)) & between  # ... which did not hand it on
    if case != "hasfl own cuts":  # whose layers between the cuts start from the same aggregate at both servers
        assert not between and not contents(said["fed"], Sent) & at_the_cut


def test_a_client_sends_each_kind_only_to_its_home() -> None:
    said = halves("sfl_v1", "two-part").said
    kinds = {server: {kind for s in said[server] for kind in s.kinds} for server in ("train", "fed")}
    assert kinds == {"train": {"activations", "labels"}, "fed": {"model"}}
    assert len([s for s in said["fed"] if s.kinds]) == 2 * len(clients_of())  # one model a client and round


# -- the newest round that both servers have ---------------------------------------------------------------------------


def test_a_new_session_gets_all_values_of_the_attempt_again() -> None:
    sessions, sent = Sessions(), []

    def rejoin() -> None:
        def send(message: Any, tensors: Any) -> int:
            sent.append((session.number, message.token, message.number, message.numbers))
            return 10

        session = ClientSession(
            client=3,
            name="3",
            number=sessions.new_session(),
            samples=1,
            kept=(),
            transmit=send,
            close=lambda reason: None,
        )
        sessions.join(session)

    values = FedValues(sessions, token=7)
    assert (values.add(3, 0.5), values.send(3)) == (1, 0)  # it is not there
    rejoin()
    assert (values.send(3), values.send(3)) == (10, 0)  # once in a session
    assert (values.add(3, 1.5), values.send(3)) == (2, 10)
    rejoin()
    assert values.send(3) == 20
    assert [one[1:] for one in sent] == [(7, 1, (0.5,)), (7, 2, (1.5,))] * 2
    assert [one[0] - sent[0][0] for one in sent] == [0, 0, 1, 1]


def beside(rounds: tuple[int, ...]) -> Peer:
    """A training server's link to a fed server that has checkpoints of these rounds."""
    peer = Peer("server")
    peer.connected(lambda message, tensors: peer.took(SavedRounds(rounds), []))
    return peer


@pytest.fixture
def at_round_two(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "run")
    for number in (1, 2):
        folder.store.save(number, {}, {})
    return folder


def test_a_server_that_is_ahead_goes_back_to_the_newest_round_of_both(at_round_two: Folder) -> None:
    assert beside((1,)).agree(at_round_two, overwrite=False) is False
    assert at_round_two.store.rounds() == [1]


def test_a_folder_in_which_another_process_trains_loses_no_checkpoint(at_round_two: Folder) -> None:
    peer = beside((1,))
    with at_round_two.guarded() as hold:
        hold()
        with pytest.raises(CheckpointError, match="is in use: another process trains this run"):
            peer.agree(at_round_two, overwrite=False)
    assert at_round_two.store.rounds() == [1, 2]
