"""The list of clients that a server lets in, clients.toml: a name and a number each.

    [clients]
    "ann" = 0
    "bob" = 2

    [revoked]
    "eve" = 1

Certificates are renewed while names stay, so the list says nothing about certificates. A number is never given again:
what a client did in a run is known by it. Reading is cheap, and the file is replaced at once, so a running server may
read it at every handshake.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutlayer.errors import ConfigError, LinkError

SERVERS = ("train", "fed")
MOST_LETTERS = 64  # of a common name, by X.509
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_LETTERS - 1}}}")
TABLES = ("clients", "revoked")


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a client, of its folder and of its certificate at once."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a client: it must be of letters, digits and -_. only, begin with a letter "
            f"or digit, and have at most {MOST_LETTERS} of them"
        )
    if name.isdigit():
        raise ConfigError(f"{name!r} cannot be the name of a client: it reads like a number of clients; add a letter")
    if name.lower() in SERVERS:
        raise ConfigError(f"{name!r} cannot be the name of a client: the servers are called train and fed")


@dataclass(frozen=True, kw_only=True)
class Register:
    """Who may join, under which number, and who may no longer."""

    clients: Mapping[str, int] = field(default_factory=dict)
    revoked: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Register":
        """The list as it stands now."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is not there; a server needs the list of clients that `cutlayer keys` writes beside its "
                "certificate: copy the whole folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; check who owns it and its mode") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is damaged: {error}; copy it again from the folder of the CA") from None
        return _checked(document, path)

    def number(self, name: str) -> int:
        """The number of a client that may join; any other is refused with the reason."""
        if name in self.revoked:
            raise LinkError(f"client {name!r} was revoked and may not join; it needs a certificate with another name")
        if name not in self.clients:
            raise LinkError(
                f"client {name!r} is not in this server's list of clients; add it with "
                f"`cutlayer keys FOLDER --clients {name}` and copy the new clients.toml to the servers"
            )
        return self.clients[name]

    def adding(self, names: Iterable[str]) -> "Register":
        """With these clients too, under the numbers that follow; those that are there stay as they are."""
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
        return Register(clients=clients, revoked=self.revoked)

    def revoking(self, names: Iterable[str]) -> "Register":
        """Without these clients, whose numbers stay taken."""
        clients, revoked = dict(self.clients), dict(self.revoked)
        for name in names:
            if name in SERVERS:
                raise ConfigError(f"the {name} server cannot be revoked; make a new CA in another folder instead")
            if name not in clients:
                why = "is revoked already" if name in revoked else "is not in the list of clients"
                raise ConfigError(f"client {name!r} cannot be revoked: it {why}")
            revoked[name] = clients.pop(name)
        return Register(clients=clients, revoked=revoked)

    def as_toml(self) -> str:
        """As `read` takes it."""
        tables = zip(TABLES, (self.clients, self.revoked), strict=True)
        return "\n".join(
            f"[{table}]\n" + "".join(f'"{name}" = {number}\n' for name, number in entries.items())
            for table, entries in tables
        )


def _checked(document: dict[str, Any], path: Path) -> Register:
    """A list that was cut short or edited by hand must not give a number twice."""
    if document.keys() != set(TABLES) or not all(isinstance(entries, dict) for entries in document.values()):
        raise ConfigError(f"{path} must have the tables [clients] and [revoked], each of lines name = number, no more")
    pairs = [pair for table in TABLES for pair in document[table].items()]
    for name, number in pairs:
        if not NAME.fullmatch(name) or name in SERVERS or type(number) is not int or number < 0:
            raise ConfigError(f"{path}: {name!r} = {number!r} is not the name of a client and its number, from 0 up")
    for what, values in (("name", [name for name, _ in pairs]), ("number", [number for _, number in pairs])):
        for value, times in Counter(values).items():
            if times > 1:
                raise ConfigError(f"{path} has the {what} {value!r} twice; copy it again from the folder of the CA")
    return Register(clients=document["clients"], revoked=document["revoked"])
