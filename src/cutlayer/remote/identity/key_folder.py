"""The folder of a CA: its key, the list of clients, and for each client and server a folder to copy to it whole.

    ca.pem  ca.key  clients.toml               stay with whoever runs the CA
    train/  ca.pem  cert.pem  key.pem  clients.toml
    fed/    ca.pem  cert.pem  key.pem  clients.toml
    clients/ann/  ca.pem  cert.pem  key.pem

A key is never overwritten unless its renewal is requested. The list is written before the keys: after a crash in
between, a name may lack its key, which a renewal makes, but no number is used twice.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.asymmetric import ec

from cutlayer.errors import ConfigError
from cutlayer.remote.identity import authority, certificates
from cutlayer.remote.identity.authority import CertifiedKey
from cutlayer.remote.identity.certificates import NEW_CA, Identity
from cutlayer.remote.identity.register import SERVERS, Register, check_name

HOSTS = ("localhost", "127.0.0.1", "::1")
LIST = "clients.toml"
ADVICE = "put it back from a copy, or " + NEW_CA
PRIVATE, PUBLIC = 0o600, 0o644
State = Literal["new", "renewed", "as before", "revoked"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request to change a folder; `clients` is how many there are, or their names separated by commas."""

    clients: str | None = None
    hosts: Sequence[str] = ()
    days: int = 365
    renew: Sequence[str] = ()
    revoke: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Party:
    """A client or a server; the date of expiry is known only while its folder is here."""

    who: Identity
    folder: Path
    number: int | None
    state: State
    expires: datetime | None


def carry_out(folder: Path, asked: Asked) -> list[Party]:
    """Check the whole request, then make or change the folder; return everyone in it now, the servers first."""
    fresh = not (folder / "ca.pem").exists()
    known = Register() if fresh else Register.read(folder / LIST)
    _check_servers(folder, asked, fresh)
    register = known.revoking(asked.revoke)
    register = register.adding(client_names(asked.clients, register))
    _check_renewals(asked.renew, register)
    ca = authority.new_ca() if fresh else read_ca(folder)
    added = [*(SERVERS if fresh else ()), *(name for name in register.clients if name not in known.clients)]
    if added or asked.renew:
        authority.check_days(ca, asked.days)
    for path in (*((folder / "ca.key",) if fresh else ()), *(_place(folder, name) / "key.pem" for name in added)):
        if path.exists():
            raise ConfigError(f"{path} is there already and is not overwritten; move it away, or choose another folder")
    try:
        for place in (folder, folder / "clients", *(folder / server for server in SERVERS)):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if fresh:
            _put(folder / "ca.key", ca.key_pem, PRIVATE)
            _put(folder / "ca.pem", ca.certificate_pem, PUBLIC)
        for place in (folder, *(folder / server for server in SERVERS)):
            _put(place / LIST, register.as_toml().encode(), PUBLIC)
        for name in dict.fromkeys([*added, *asked.renew]):
            _give(folder, ca, name, asked)
    except OSError as error:
        raise ConfigError(
            f"keys could not be written to {folder}: {error.strerror or error}; mend that or choose another folder"
        ) from error
    everyone = (*SERVERS, *register.clients, *register.revoked)
    return [_party(folder, name, register, added, asked.renew) for name in everyone]


def client_names(text: str | None, known: Register) -> list[str]:
    """Return the names that --clients gives; numbered ones have as many digits as the existing ones, or as needed."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if len(words) == 1 and words[0].isdecimal():
        count = int(words[0])
        if count < 1:
            raise ConfigError(f"--clients {count} is no number of clients; give one from 1 up, or their names")
        everyone = (*known.clients, *known.revoked)
        digits = [len(name.removeprefix("client-")) for name in everyone if re.fullmatch(r"client-\d+", name)]
        width = min(digits, default=len(str(count)))
        names = (f"client-{i:0{width}}" for i in range(1, count + 1))
        return [name for name in names if name not in known.revoked]
    for word in words:
        check_name(word)
        if words.count(word) > 1:
            raise ConfigError(f"--clients has {word!r} twice; every client has a name of its own")
    return words


def _check_servers(folder: Path, asked: Asked, fresh: bool) -> None:
    """Refuse a request that would have no effect, or that has the wrong folder."""
    for host in asked.hosts:
        authority.host_name(host)
    if fresh and (asked.renew or asked.revoke):
        raise ConfigError(f"there is no CA in {folder}, so nothing to renew or revoke; check the name of the folder")
    if asked.hosts and not fresh and not set(asked.renew) & set(SERVERS):
        raise ConfigError(
            "--server goes into the certificates of the servers, which are made already; add --renew train --renew fed"
        )


def _check_renewals(names: Sequence[str], register: Register) -> None:
    for name in names:
        if name in register.revoked:
            raise ConfigError(f"client {name!r} was revoked and cannot be renewed; add one of another name")
        if name not in SERVERS and name not in register.clients:
            raise ConfigError(f"there is no client {name!r} to renew; add it with --clients {name}")


def read_ca(folder: Path) -> CertifiedKey:
    """Read the CA of a folder with its key."""
    certificate = certificates.load_certificate(folder / "ca.pem", ADVICE)
    key = certificates.load_key(folder / "ca.key", certificate, ADVICE)
    certificates.check_dates(folder / "ca.pem", certificate, NEW_CA)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / 'ca.key'} is not a key that `cutlayer keys` made; {ADVICE}")
    return CertifiedKey(certificate=certificate, key=key)


def _place(folder: Path, name: str) -> Path:
    return folder / name if name in SERVERS else folder / "clients" / name


def _give(folder: Path, ca: CertifiedKey, name: str, asked: Asked) -> None:
    """Put a new certificate and key into a party's folder; a server keeps its hosts unless others are given."""
    place, hosts = _place(folder, name), asked.hosts
    if name in SERVERS and not hosts:
        own = place / "cert.pem"
        hosts = authority.hosts_in(certificates.load_certificate(own, ADVICE)) if own.exists() else HOSTS
    pair = authority.issue(ca, Identity.named(name), asked.days, hosts)
    place.mkdir(mode=0o700, exist_ok=True)
    _put(place / "key.pem", pair.key_pem, PRIVATE)
    _put(place / "cert.pem", pair.certificate_pem, PUBLIC)
    _put(place / "ca.pem", ca.certificate_pem, PUBLIC)


def _party(folder: Path, name: str, register: Register, added: Sequence[str], renewed: Sequence[str]) -> Party:
    place = _place(folder, name)
    own = place / "cert.pem"
    state: State = "new" if name in added else "renewed" if name in renewed else "as before"
    return Party(
        who=Identity.named(name),
        folder=place,
        number=register.clients.get(name, register.revoked.get(name)),
        state="revoked" if name in register.revoked else state,
        expires=certificates.load_certificate(own, ADVICE).not_valid_after_utc if own.exists() else None,
    )


def _put(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically, with its final permissions from the start."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    partial.replace(path)
