"""The post between a round and its crews: all letters of one `up` to a crew go in one call.

Tensors that go to the same crews travel in one bundle, which lies in Ray's object store once.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from torch import Tensor

from cutlayer import plugins
from cutlayer.checks import reason
from cutlayer.errors import ConfigError
from cutlayer.remote.crew import Order, Sheet
from cutlayer.remote.messages import Answer, Kept, Message, Refusal, Work
from cutlayer.remote.office import Answered, Line, Office

DECODER = msgspec.msgpack.Decoder(Answer | Refusal)
GONE = "its actor"  # the place in a refusal that no client wrote
START_SECONDS = 300.0

Crews = frozenset[int]


class Item(NamedTuple):
    """A letter that waits to be sent."""

    client: int
    work: Work
    tensors: Sequence[Tensor]


class Manned(NamedTuple):
    """An actor and, in Ray's object store, what it needs whenever it starts."""

    actor: Any
    kit: Any
    share: Any


class Post:
    """Carries the letters and answers of one round."""

    def __init__(self, ray: Any, crews: Sequence[Manned]) -> None:
        self.office = Office(self._flush)
        self._ray, self._crews = ray, crews
        self._waiting: dict[int, list[Item]] = {}

    def meet(self, samples: Mapping[int, int]) -> None:
        """The clients of the round take their places, each with what it keeps."""
        sessions: dict[int, dict[int, int]] = {}
        for j in samples:
            sessions.setdefault(j % len(self._crews), {})[j] = self.office.new_session()
        stated = self._stated(sessions)
        while empty := {k: own for k, own in sessions.items() if stated[k] is None}:
            self._got([call for k in empty for call in self._boarding(self._crews[k])])
            stated |= self._stated(empty)
        for k, own in sessions.items():
            for j, session in own.items():
                self.office.join(self._line(j, session, samples[j], stated[k][j]))

    def _boarding(self, crew: Manned) -> list[Any]:
        paths = [path or str(Path.cwd()) for path in sys.path]
        files = [str(path) for path in plugins.LOADED]
        return [crew.actor.prepare.remote(paths, files), crew.actor.board.remote(crew.kit, crew.share)]

    def _stated(self, sessions: Mapping[int, Mapping[int, int]]) -> dict[int, Any]:
        """What the clients of each crew keep, or None if it has nobody in it; Ray starts those again that died."""
        meet = [self._crews[k].actor.meet.options(max_task_retries=-1).remote(own) for k, own in sessions.items()]
        return dict(zip(sessions, self._got(meet), strict=True))

    def _got(self, answers: list[Any]) -> list[Any]:
        errors = self._ray.exceptions
        try:
            return self._ray.get(answers, timeout=START_SECONDS)  # type: ignore[no-any-return]
        except errors.GetTimeoutError:
            why = f"the cluster had no CPU for it within {START_SECONDS:g} seconds"
        except errors.RayError as error:
            why = str(error).strip().splitlines()[-1]  # the line of a traceback that names the error
        raise ConfigError(f"an actor of engine 'ray' cannot start: {why}")

    def close(self) -> None:
        """The round is over: crews hold nothing of it but what their clients keep."""
        for crew in self._crews:
            crew.actor.meet.remote({})

    def _line(self, client: int, session: int, samples: int, kept: Sequence[Kept]) -> Line:
        def send(message: Message, tensors: Sequence[Tensor]) -> int:
            item = Item(client, cast(Work, message), tensors)  # a crew is sent nothing else
            self._waiting.setdefault(client % len(self._crews), []).append(item)
            return 0

        return Line(
            client=client,
            name=str(client),
            session=session,
            samples=samples,
            kept=kept,
            send=send,
            close=lambda reason: None,
        )

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        bundles = bundled(waiting)
        sent = {who: self._sent(who, tensors) for who, tensors in bundles.items()}
        for k, items in waiting.items():
            own = [who for who in bundles if k in who]
            places = {id(a): i for i, a in enumerate(a for who in own for a in bundles[who])}
            orders = [
                Order(client, msgspec.msgpack.encode(work), [places[id(a)] for a in tensors])
                for client, work, tensors in items
            ]
            answer = self._crews[k].actor.work.remote(orders, *(sent[who] for who in own))
            answer.future().add_done_callback(partial(self._came, [(i.client, i.work) for i in items]))

    def _sent(self, who: Crews, tensors: Sequence[Tensor]) -> Any:
        sheets = [Sheet.of(a) for a in tensors]
        return self._ray.put(sheets) if len(who) > 1 else sheets

    def _came(self, asked: Sequence[tuple[int, Work]], future: Any) -> None:
        """Whoever has no answer is told to be gone, or in trouble: a round waits for all that it asked."""
        where, why = GONE, "it has started again in the middle of the round"
        answers: dict[int, tuple[Answer | Refusal, list[Tensor]]] = {}
        try:
            # Copies: what a run computes outlives Ray's object store.
            answers = {j: (DECODER.decode(text), [s.copy() for s in sheets]) for j, text, sheets in future.result()}
        except self._ray.exceptions.RayTaskError as error:
            where, why = type(error.cause).__name__, reason(error.cause)
        except Exception as error:  # whatever else is wrong with an actor, a round must hear of it
            why = reason(error)
        for client, work in asked:
            refusal = Refusal(session=work.session, number=work.number, where=where, reason=why)
            self.office.take(Answered(client, work.session, *answers.get(client, (refusal, []))))


def bundled(waiting: Mapping[int, Sequence[Item]]) -> dict[Crews, list[Tensor]]:
    """The different tensors of these letters, by the crews that they go to."""
    found: dict[int, tuple[Tensor, set[int]]] = {}
    for k, items in waiting.items():
        for a in (a for item in items for a in item.tensors):
            found.setdefault(id(a), (a, set()))[1].add(k)
    bundles: dict[Crews, list[Tensor]] = {}
    for a, who in found.values():
        bundles.setdefault(frozenset(who), []).append(a)
    return bundles
