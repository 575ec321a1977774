"""What the fed server sends to clients itself, where it is a process of its own: the training server never sees it."""

from collections import Counter

from cutlayer.core.tree import Tree
from cutlayer.remote.protocol.messages import FedValue
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.tensors.trees import flatten


class FedValues:
    """The values of one attempt at a round, numbered alike at both servers."""

    def __init__(self, sessions: Sessions, token: int) -> None:
        self.sessions, self.token = sessions, token
        self._counts: Counter[int] = Counter()
        self._sent: dict[int, dict[int, Tree]] = {}
        self._sent_in: dict[int, int] = {}  # the session in which they went

    def number(self, client: int) -> int:
        self._counts[client] += 1
        return self._counts[client]

    def send(self, client: int, number: int, value: Tree) -> int:
        """The bytes that go; a client that is not there gets its values when it is."""
        self._sent.setdefault(client, {})[number] = value
        return self._send(client, number, value)

    def again(self, client: int) -> None:
        """All values so far, for a client that has come back in another session."""
        session = self.sessions.get(client)
        if session is None or session.number == self._sent_in.get(client):
            return
        for number, value in self._sent.get(client, {}).items():
            self._send(client, number, value)

    def _send(self, client: int, number: int, value: Tree) -> int:
        session, flat = self.sessions.get(client), flatten(value)
        if session is None:
            return 0
        self._sent_in[client] = session.number
        message = FedValue(
            session=session.number,
            token=self.token,
            number=number,
            tree=flat.skeleton,
            numbers=tuple(flat.numbers),
        )
        return session.transmit(message, flat.tensors)
