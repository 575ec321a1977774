"""The list of clients that a server lets in, clients.toml: their names and numbers.

    [clients]
    "ann" = 0
    "bob" = 2

    [revoked]
    "eve" = 1

    [samples]
    "ann" = 600

The last table may be left out: the most samples for training that a client is believed to have.
Certificates are renewed while names stay, so the list says nothing about certificates. A number is never reused, as it
identifies what a client did in a run. Reading is cheap and the file is replaced atomically, so a running server may
read it at every handshake.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cutlayer.errors import ConfigError, LinkError

SERVERS = ("train", "fed")
NEEDED = ("clients", "revoked")  # tables of the list
MOST_LETTERS = 64  # of a common name, by X.509
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_LETTERS - 1}}}")
COPY_FOLDER = "a server needs the list of clients that `cutlayer keys` writes beside its certificate: copy it here, too"


def check_name(name: str) -> None:
    """Refuse a name that cannot be used for a client, its folder and its certificate alike."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a client: it must be of letters, digits and -_. only, begin with a letter "
            f"or digit, and have at most {MOST_LETTERS} of them"
        )
    if name.isdigit():
        raise ConfigError(f"{name!r} cannot be the name of a client: it reads like a number of clients; add a letter")
    if name.lower() in SERVERS:
        raise ConfigError(f"{name!r} cannot be the name of a client: the servers are called train and fed")


def content(path: Path, advice: str) -> bytes:
    """Return the bytes of a file that must exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; {advice}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check who owns it and its mode") from None


@dataclass(frozen=True, kw_only=True)
class Register:
    """The clients that may join and those that were revoked, with their numbers; `samples` are the most of a client."""

    clients: Mapping[str, int] = field(default_factory=dict)
    revoked: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Register":
        """Read the list as it is now."""
        try:
            document = tomllib.loads(content(path, COPY_FOLDER).decode())
        except ValueError as error:  # not TOML, or not UTF-8
            raise ConfigError(f"{path} is damaged: {error}; copy it again from the folder of the CA") from None
        _check(document, path)
        return cls(**document)

    def number(self, name: str) -> int:
        """Return the number of a client; raise LinkError if it may not join."""
        if name in self.revoked:
            raise LinkError(f"client {name!r} was revoked; to take part again it needs a certificate under a new name")
        if name not in self.clients:
            raise LinkError(
                f"client {name!r} is not in this server's list of clients; sign its request with `cutlayer keys sign` "
                "and copy the new clients.toml to the servers"
            )
        return self.clients[name]

    def adding(self, names: Iterable[str]) -> "Register":
        """Add these clients under the next free numbers; those that are in the list stay as they are."""
        known, clients = self.clients.keys() | self.revoked.keys(), dict(self.clients)
        taken = {name.lower(): name for name in known}  # some file systems cannot tell Ann from ann
        following = max([*self.clients.values(), *self.revoked.values()], default=-1) + 1
        for name in names:
            check_name(name)
            if name in self.revoked:
                raise ConfigError(f"client {name!r} was revoked, and its name is not given again; choose another name")
            same = taken.setdefault(name.lower(), name)
            if same != name:
                raise ConfigError(f"clients {same!r} and {name!r} differ in capitals only; choose another name")
            if name not in clients:
                clients[name] = following
                following += 1
        return replace(self, clients=clients)

    def revoking(self, names: Iterable[str]) -> "Register":
        """Revoke these clients; their numbers stay taken."""
        clients, revoked = dict(self.clients), dict(self.revoked)
        for name in names:
            if name in SERVERS:
                raise ConfigError(f"the {name} server cannot be revoked; make a new CA in another folder instead")
            if name not in clients:
                why = "is revoked already" if name in revoked else "is not in the list of clients"
                raise ConfigError(f"client {name!r} cannot be revoked: it {why}")
            revoked[name] = clients.pop(name)
        return replace(self, clients=clients, revoked=revoked)

    def as_toml(self) -> str:
        """Return the list as the text that `read` reads."""
        return "\n".join(
            f"[{table}]\n" + "".join(f'"{name}" = {number}\n' for name, number in entries.items())
            for table, entries in asdict(self).items()
            if entries or table in NEEDED
        )


def _check(document: dict[str, Any], path: Path) -> None:
    """Refuse a list that was cut short, or edited by hand so that a name or a number is in it twice."""
    if set(NEEDED) != document.keys() - {"samples"} or not all(isinstance(table, dict) for table in document.values()):
        raise ConfigError(
            f"{path} must have the tables [clients] and [revoked], each of lines name = number, and may have [samples]"
        )
    pairs = [pair for table in NEEDED for pair in document[table].items()]
    for name, number in document.get("samples", {}).items():
        if name not in dict(pairs) or type(number) is not int or number < 1:
            raise ConfigError(f"{path}: {name!r} = {number!r} in [samples] is not a client of the list and its samples")
    for name, number in pairs:
        if not NAME.fullmatch(name) or name in SERVERS or type(number) is not int or number < 0:
            raise ConfigError(f"{path}: {name!r} = {number!r} is not the name of a client and its number, from 0 up")
    for what, values in (("name", [name for name, _ in pairs]), ("number", [number for _, number in pairs])):
        for value, times in Counter(values).items():
            if times > 1:
                raise ConfigError(f"{path} has the {what} {value!r} twice; copy it again from the folder of the CA")
