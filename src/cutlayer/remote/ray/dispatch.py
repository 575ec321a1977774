"""Dispatch of a round's requests to the workers: all requests of one `up` to a worker go in one call.

Tensors that go to the same workers travel in one bundle, which lies in Ray's object store once.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
from torch import Tensor

from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError
from cutlayer.remote.protocol.messages import Answer, KeptVersion, Message, Refusal, Work
from cutlayer.remote.ray.worker import NumpyTensor
from cutlayer.remote.server.exchange import AllClientsLost
from cutlayer.remote.server.sessions import Answered, ClientSession, Sessions

DECODER = msgspec.msgpack.Decoder(Answer | Refusal)
GONE = "its actor"  # the place in a refusal that no client wrote
START_SECONDS = 300.0

WorkerSet = frozenset[int]


class PendingWork(NamedTuple):
    """A client's work that waits to be sent."""

    client: int
    work: Work
    tensors: Sequence[Tensor]


class WorkerActor(NamedTuple):
    """An actor and, in Ray's object store, its clients, which it loads after each start."""

    actor: Any
    content: list[Any]


class Dispatch:
    """Carries the requests and answers of one round."""

    def __init__(self, ray: Any, workers: Sequence[WorkerActor]) -> None:
        self.sessions = Sessions(self._flush)
        self._ray, self._workers = ray, workers
        self._waiting: dict[int, list[PendingWork]] = {}

    def begin(self, samples: Mapping[int, int]) -> None:
        """Open a session for each client of the round; it states what the client keeps."""
        numbers: dict[int, dict[int, int]] = {}
        for j in samples:
            numbers.setdefault(j % len(self._workers), {})[j] = self.sessions.new_session()
        # Ray restarts an actor that has died, and then repeats the call.
        begun = ((self._workers[k], own) for k, own in numbers.items())
        calls = [w.actor.begin.options(max_task_retries=-1).remote(own, w.content) for w, own in begun]
        for own, kept in zip(numbers.values(), self._results(calls), strict=True):
            for j, number in own.items():
                self.sessions.join(self._session(j, number, samples[j], kept[j]))

    def _results(self, calls: list[Any]) -> list[Any]:
        """Wait for these calls. If an actor is gone the round can be retried, unless the actor could never start."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(calls, timeout=START_SECONDS)  # type: ignore[no-any-return]
        except errors.GetTimeoutError:
            why = f"the cluster had no CPU for it within {START_SECONDS:g} seconds"
        except errors.RayError as error:
            if isinstance(error, errors.RayActorError) and not error.actor_init_failed:
                raise AllClientsLost(f"a round cannot begin: an actor is gone: {reason(error)}") from None
            why = str(error).strip().splitlines()[-1]  # the line of a traceback that names the error
        raise ConfigError(f"an actor of engine 'ray' cannot start: {why}")

    def close(self) -> None:
        """Make the workers drop everything of the round except what their clients keep."""
        for worker in self._workers:
            worker.actor.begin.remote({}, worker.content)

    def _session(self, client: int, number: int, samples: int, kept: tuple[KeptVersion, ...]) -> ClientSession:
        def send(message: Message, tensors: Sequence[Tensor]) -> int:
            item = PendingWork(client, cast(Work, message), tensors)  # a worker is sent nothing else
            self._waiting.setdefault(client % len(self._workers), []).append(item)
            return 0

        return ClientSession(
            client=client,
            name=str(client),
            number=number,
            samples=samples,
            kept=kept,
            transmit=send,
            close=lambda reason: None,
        )

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        bundles = bundled(waiting)
        arrays = {who: [NumpyTensor.of(a) for a in tensors] for who, tensors in bundles.items()}
        sent = {who: self._ray.put(own) if len(who) > 1 else own for who, own in arrays.items()}
        for k, items in waiting.items():
            own = [who for who in bundles if k in who]
            places = {id(a): i for i, a in enumerate(a for who in own for a in bundles[who])}
            orders = [
                (client, msgspec.msgpack.encode(work), [places[id(a)] for a in tensors])
                for client, work, tensors in items
            ]
            answer = self._workers[k].actor.work.remote(orders, *(sent[who] for who in own))
            answer.future().add_done_callback(partial(self._take, items))

    def _take(self, items: Sequence[PendingWork], future: Any) -> None:
        """Pass on a worker's answers. A client without one gets a refusal, as a round waits for all that it asked."""
        where, why = GONE, "it has started again in the middle of the round"
        answers: dict[int, tuple[Answer | Refusal, list[Tensor]]] = {}
        try:
            # Copies: what a run computes outlives Ray's object store.
            answers = {j: (DECODER.decode(text), [a.copy() for a in arrays]) for j, text, arrays in future.result()}
        except self._ray.exceptions.RayTaskError as error:
            where, why = type(error.cause).__name__, reason(error.cause)
        except Exception as error:  # whatever else is wrong with an actor, the round must learn of it
            why = reason(error)
        for client, work, _ in items:
            refusal = Refusal(session=work.session, number=work.number, where=where, reason=why)
            self.sessions.take(Answered(client, work.session, *answers.get(client, (refusal, []))))


def bundled(waiting: Mapping[int, Sequence[PendingWork]]) -> dict[WorkerSet, list[Tensor]]:
    """Return the distinct tensors of these requests, grouped by the workers that they go to."""
    found: dict[int, tuple[Tensor, set[int]]] = {}
    for k, items in waiting.items():
        for a in (a for item in items for a in item.tensors):
            found.setdefault(id(a), (a, set()))[1].add(k)
    bundles: dict[WorkerSet, list[Tensor]] = {}
    for a, who in found.values():
        bundles.setdefault(frozenset(who), []).append(a)
    return bundles
