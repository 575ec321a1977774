"""Values that a separate fed server sends to clients directly, so that the training server never sees them."""

from cutlayer.core.tree import Tree
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.tensors.trees import sendable


class FedValues:
    """The values for each client in one attempt at a round. Both servers number them alike."""

    def __init__(self, sessions: Sessions, token: int) -> None:
        self.sessions, self.token = sessions, token
        self._values: dict[int, list[Tree]] = {}
        self._num_sent: dict[int, int] = {}  # by the number of the session

    def add(self, client: int, value: Tree) -> int:
        """Add a value for a client and return its number."""
        values = self._values.setdefault(client, [])
        values.append(value)
        return len(values)

    def send(self, client: int) -> int:
        """Send a client the values that it has not got in its current session, and return the bytes sent."""
        session, values = self.sessions.get(client), self._values.get(client, [])
        if session is None:
            return 0
        first = self._num_sent.get(session.number, 0)
        self._num_sent[session.number] = len(values)
        messages = (sendable(self.token, first + k, value) for k, value in enumerate(values[first:], start=1))
        return sum(session.transmit(message, tensors) for message, tensors in messages)
