"""Specifies remote rounds: every method gives the loop engine's numbers, bytes and round trips."""

from typing import Any, NamedTuple

import pytest
import torch
from conftest import SEED, clients_of, images, resnet, run
from in_process import deployment, device, join
from test_engines_agree import CASES, OPTIMISERS, SHAPES, Outcome, fits, must_agree, net_of, on_loop
from torch import Tensor

from cutlayer import methods, optim
from cutlayer.core.method import Method
from cutlayer.core.program import Program
from cutlayer.core.values import Block, PerClient
from cutlayer.errors import ConfigError
from cutlayer.remote.server.queue import Queue, Ref
from cutlayer.remote.server.remote import Remote
from cutlayer.remote.server.shape_runner import ShapeRunner
from cutlayer.split import Split

PLANS = ("hasfl random", "hasfl planned", "hasfl planned cuts", "hasfl by resources")  # no U-shape has a plan
RUNS = [
    (case, shape)
    for case in CASES
    for shape in ("two-part", "u-shaped")
    if fits(case, shape) and (shape == "two-part" or case not in PLANS)
]


def method_of(case: str, shape: str = "two-part", device: str = "cpu") -> Method:
    name, options, _ = CASES[case]
    cut, head = SHAPES[shape]
    opt = OPTIMISERS["momentum"]
    return methods.build(name, Split(net_of(case).to(device), cut, head=head), opt, opt, **options)


def remotely(case: str, shape: str, **options: Any) -> Outcome:
    there = deployment(
        method_of(case, shape),
        images(),
        clients_of(),
        batching=CASES[case].batching,
        seed=SEED,
        followed=(3,),
        **options,
    )
    return Outcome(run(there), there.ledger)  # type: ignore[arg-type]


@pytest.mark.parametrize(("case", "shape"), RUNS)
def test_remote_rounds_give_the_loop_engines_numbers(case: str, shape: str) -> None:
    must_agree(remotely(case, shape), on_loop(case, "momentum", shape, torch.float64), 0.0)


class Homonyms(NamedTuple):
    """Fields with the names of what handles have themselves."""

    bare: Tensor
    item: Tensor
    queue: Tensor
    signature: Tensor
    slot: Tensor
    spec: Tensor


def test_a_field_may_have_the_name_of_something_that_handles_have() -> None:
    assert {name for name in dir(Ref) if not name.startswith("_")} == set(Homonyms._fields)
    queue = Queue(ShapeRunner(Program(method_of("sfl_v1")), images()))
    ref = queue.put(Homonyms(*(torch.zeros(k) for k in range(6))))
    value = PerClient("clients", [Block((0,), ref, stacked=False)])
    for k, name in enumerate(Homonyms._fields):
        assert getattr(value, name).at(0).spec.value.at(0).shape == (k,)


def test_a_client_that_comes_back_with_less_than_it_held_is_not_asked_as_if_it_held_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed after a round begins and before its first request, and had not yet saved what it kept last."""
    case = CASES["hosfl"]
    there = deployment(method_of("hosfl"), images(), clients_of(), batching=case.batching, seed=SEED, deadline=2.0)
    back = device(there.method, images(), clients_of(), case.batching, 2)
    state = there.round(there.start())
    held = there.backend.sessions.get(2)
    assert held is not None
    earlier = held.kept  # nothing: it joined before the first round
    begin = Remote.__post_init__

    def with_a_stranger(remote: Remote) -> None:
        begin(remote)
        monkeypatch.setattr(Remote, "__post_init__", begin)
        join(there.backend.sessions, back)

    monkeypatch.setattr(Remote, "__post_init__", with_a_stranger)
    assert earlier == back.store.statement() == ()
    without = there.round(state)
    assert float(without.report.tree.batches) == len(clients_of()) - 1  # it is out of this round ...
    after = there.round(without)
    assert float(after.report.tree.batches) == len(clients_of())  # ... and downloads the model in the next one
    assert back.store.versions("part") == {2: 3}


def test_a_run_that_diverges_ends_with_the_reason() -> None:
    batching, opt = CASES["sfl_v1"].batching, optim.sgd(1e300)
    method = methods.build("sfl_v1", Split(resnet(), 1), opt, opt)
    there = deployment(method, images(), clients_of(), batching=batching, seed=SEED, deadline=2.0)

    def all_back(round: int) -> tuple[int, ...]:
        for j in {*range(len(clients_of()))} - there.backend.sessions.present().keys():
            join(there.backend.sessions, device(method, images(), clients_of(), batching, j))
        return tuple(there.backend.sessions.present())

    there.backend.gather = all_back
    state = there.start()
    with pytest.raises(ConfigError) as caught:
        for _ in range(9):
            state = there.round(state)
    assert str(caught.value).endswith(
        "every client is lost, 3 times; what they sent could not be used: what came as model is not "
        "finite. Look at the data and the learning rate; the rounds before are saved"
    )
