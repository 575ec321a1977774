"""Specifies what a server believes of a client's samples, and what a client learns of a server's own troubles."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import using
from test_grpc_faults import RUN
from test_handshakes import joining, keys, listening
from torch import Tensor

from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.errors import LinkError
from cutlayer.remote.device.session import forms_of
from cutlayer.remote.device.stream import Stream, StreamEnded
from cutlayer.remote.identity.register import Register
from cutlayer.remote.protocol.messages import Ready, TensorForm, Welcome, Work
from cutlayer.remote.server.ceilings import Ceilings
from cutlayer.remote.server.claims import Claims
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.server.streams import UNSURE
from cutlayer.remote.tensors import wire
from cutlayer.runs import build
from cutlayer.runs.config import Run

__all__ = ["keys"]  # a fixture

FORMS = (TensorForm("float32", (1, 8, 8)), TensorForm("int64", ()))
WHOLE = replace(RUN, batching=Batching(size=8))  # as many steps as there are batches


def method_of(run: Run) -> Method:
    data = build.dealt(run).data
    assert forms_of(data) == FORMS
    return build.planned_method(run, build.model_of(run, data.take([0, 1]), None), data.take([0, 1]), run.clients)[0]


def claims(run: Run, path: Path | None = None, most_steps: int = 1000) -> Claims:
    return Claims.of(run, method_of(run), FORMS, most_steps, path)


def claimed(samples: int, tests: int = 0) -> Ready:
    return Ready(session=1, samples=samples, sample=FORMS, kept=(), tests=tests)


def test_a_claim_that_makes_too_many_steps_is_refused() -> None:
    check = claims(WHOLE).check
    check("ann", claimed(8 * 1000))
    with pytest.raises(LinkError) as refused:
        check("ann", claimed(8 * 1001))
    assert str(refused.value) == (
        "it says that it holds 8008 samples, with which a round has 1001 steps; this server allows 1000. Raise "
        "--most-steps there, or use larger batches"
    )
    with pytest.raises(LinkError, match="a test of the model has"):
        check("ann", claimed(8, tests=100_000_000))
    with pytest.raises(LinkError, match="no more than 100000000 are believed"):
        check("ann", claimed(2**40))


@pytest.mark.parametrize("method", ["fedavg", "sfl_v1", "sfl_v2", "fsl_sage"])
def test_no_claim_stalls_a_method_that_walks_through_the_samples(method: str) -> None:
    with pytest.raises(LinkError, match="Raise --most-steps there"):
        claims(using(WHOLE, method), most_steps=100_000).check("ann", claimed(22_000_000))


def test_steps_that_do_not_depend_on_the_samples_are_not_refused() -> None:
    for run in (RUN, using(WHOLE, "hosfl")):
        claims(run, most_steps=2).check("ann", claimed(100_000_000))


def test_by_default_a_client_is_believed_that_says_it_holds_millions_of_samples(tmp_path: Path) -> None:
    """In batches of 32, they make the most steps that are allowed; where steps are few by themselves, nothing limits
    them below a hundred million."""
    path, run = tmp_path / "clients.toml", replace(WHOLE, batching=Batching(size=32))
    path.write_text(Register().adding(["ann", "eve"]).as_toml())
    most = Ceilings().steps
    claims(run, path, most).check("eve", claimed(3_200_000))
    with pytest.raises(LinkError, match="with which a round has 100001 steps"):
        claims(run, path, most).check("eve", claimed(3_200_001 + 32))
    for few in (RUN, using(WHOLE, "hasfl")):
        claims(few, path, most).check("eve", claimed(100_000_000))


def test_the_list_of_clients_may_declare_their_samples(tmp_path: Path) -> None:
    path = tmp_path / "clients.toml"
    path.write_text(Register(samples={"ann": 600}).adding(["ann", "bob"]).as_toml())
    check = claims(WHOLE, path).check
    check("ann", claimed(600))
    check("bob", claimed(700))
    with pytest.raises(LinkError) as refused:
        check("ann", claimed(601))
    assert str(refused.value) == (
        "it says that it holds 601 samples, but [samples] in the server's clients.toml allows it 600; if it holds "
        "more, correct the list"
    )


# -- over a stream -------------------------------------------------------------------------------------------------


def ready(stream: Stream, samples: int = 100) -> None:
    messages = iter(stream)
    welcome, _ = next(messages)
    assert isinstance(welcome, Welcome)
    stream.say(Ready(session=welcome.session, samples=samples, sample=FORMS, kept=()))
    list(messages)


def test_a_claim_ends_no_round_but_the_client_that_makes_it(keys: Path) -> None:
    sessions = Sessions()
    with listening(keys, Ceilings(), sessions=sessions, check=claims(WHOLE).check) as (board, address):
        stream = joining(address, keys, "ann")
        with pytest.raises(StreamEnded, match="with which a round has 12500000 steps") as left:
            ready(stream, 100_000_000)
        stream.close()
    assert not left.value.again
    assert not sessions.met
    assert board.snapshot().refused_connections == 1


def test_work_too_long_to_send_loses_the_client_alone(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions()
    with listening(keys, Ceilings(), sessions=sessions) as (board, address):
        stream = joining(address, keys, "ann")
        welcome, _ = next(messages := iter(stream))
        assert isinstance(welcome, Welcome)
        stream.say(Ready(session=welcome.session, samples=100, sample=FORMS, kept=()))
        sessions.receive(30.0)  # it has joined
        session = sessions.get(0)
        assert session is not None
        monkeypatch.setattr(wire, "MOST_HEADER", 1000)
        work = partial(Work, session=1, number=1, round=1, key=1, token=1, begins=True, list=1, commands=None)
        none: list[Tensor] = []
        assert session.transmit(work(numbers=(1.5,) * 10), none) > 0
        assert session.transmit(work(numbers=(1.5,) * 1000), none) == 0
        with pytest.raises(StreamEnded, match="what it has to do cannot be sent to it: a header of ") as left:
            list(messages)
        stream.close()
    assert not left.value.again
    assert not sessions.present()
    assert (board.snapshot().clients[0].state, board.snapshot().clients[0].refusals) == ("refused", 1)


def test_a_damaged_list_tells_a_client_nothing_of_the_server(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "clients.toml"
    path.write_text("[clients")
    with listening(keys, Ceilings(), number_of=lambda name: Register.read(path).number(name)) as (board, address):
        stream = joining(address, keys, "ann")
        with pytest.raises(StreamEnded) as left:
            list(stream)
        stream.close()
    assert str(left.value) == f"no connection to {address} ({UNSURE})"
    assert left.value.again  # the list may be mended
    assert f"{path} is damaged: " in caplog.text
    assert board.snapshot().refused_connections == 1


def test_a_list_that_is_damaged_later_tells_a_client_nothing_either(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check = claims(WHOLE, tmp_path / "clients.toml").check
    with listening(keys, Ceilings(), check=check) as (_, address):
        stream = joining(address, keys, "ann")
        with pytest.raises(StreamEnded) as left:
            ready(stream)
        stream.close()
    assert str(left.value) == f"refused by the server: {UNSURE}"
    assert left.value.again
    assert f"{tmp_path / 'clients.toml'} is not there" in caplog.text
