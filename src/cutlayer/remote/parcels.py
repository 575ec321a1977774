"""What the fed server sends to clients itself, where it is a process of its own: the training server never sees it."""

from collections import Counter

from cutlayer.remote.messages import Parcel
from cutlayer.remote.office import Office
from cutlayer.remote.trees import flatten
from cutlayer.tree import Tree


class Parcels:
    """The parcels of one attempt at a round, numbered alike at both servers."""

    def __init__(self, office: Office, token: int) -> None:
        self.office, self.token = office, token
        self._counts: Counter[int] = Counter()
        self._sent: dict[int, dict[int, Tree]] = {}
        self._sessions: dict[int, int] = {}  # in which they went

    def number(self, client: int) -> int:
        self._counts[client] += 1
        return self._counts[client]

    def send(self, client: int, number: int, value: Tree) -> int:
        """The bytes that go; a client that is not there gets its parcels when it is."""
        self._sent.setdefault(client, {})[number] = value
        return self._post(client, number, value)

    def again(self, client: int) -> None:
        """All parcels so far, for a client that has come back in another session."""
        line = self.office.line(client)
        if line is None or line.session == self._sessions.get(client):
            return
        for number, value in self._sent.get(client, {}).items():
            self._post(client, number, value)

    def _post(self, client: int, number: int, value: Tree) -> int:
        line, flat = self.office.line(client), flatten(value)
        if line is None:
            return 0
        self._sessions[client] = line.session
        parcel = Parcel(
            session=line.session,
            token=self.token,
            number=number,
            tree=flat.skeleton,
            numbers=tuple(flat.numbers),
        )
        return line.deliver(parcel, flat.tensors)
