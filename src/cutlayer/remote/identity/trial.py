"""All keys of a trial in one place: a CA without a passphrase, and the private keys of all parties in their folders."""

import re
from collections.abc import Sequence
from pathlib import Path

from cutlayer.errors import ConfigError
from cutlayer.remote.identity import authority
from cutlayer.remote.identity.certificates import KEY
from cutlayer.remote.identity.files import make_folder, put, refuse_to_overwrite, writing
from cutlayer.remote.identity.key_folder import (
    LIST,
    Party,
    SigningTerms,
    certify,
    encrypted,
    parties,
    place_of,
    put_ca,
    read_ca,
    write_list,
)
from cutlayer.remote.identity.register import SERVERS, Register, check_name


def trial(folder: Path, clients: str | None = None, hosts: Sequence[str] = (), days: int = 365) -> list[Party]:
    """Make a CA with two servers and these clients, or add clients; return the new parties, or else everyone.

    `clients` is how many there are, or their names separated by commas.
    """
    fresh = not (folder / "ca.pem").exists()
    if hosts and not fresh:
        raise ConfigError(f"--server goes into the certificates of the servers, and {folder} has them already")
    terms = {name: SigningTerms(role=name, hosts=hosts, days=days) for name in SERVERS}
    known = Register() if fresh else Register.read(folder / LIST)
    register = known.adding(client_names(clients, known))
    added = [*(SERVERS if fresh else ()), *(name for name in register.clients if name not in known.clients)]
    for path in (*((folder / "ca.key",) if fresh else ()), *(place_of(folder, name) / KEY for name in added)):
        refuse_to_overwrite(path)
    if not fresh and encrypted(folder):
        raise ConfigError(f"{folder} is a CA with a passphrase and no trial; use `keys request` and `keys sign` there")
    ca = authority.new_ca() if fresh else read_ca(folder)
    authority.check_days(ca.certificate, days)
    if fresh:
        put_ca(folder, ca, None)
    with writing(folder):
        for name in added:
            make_folder(place_of(folder, name))
        write_list(folder, register)
        for name in added:
            key = authority.new_key()
            put(place_of(folder, name) / KEY, authority.key_pem(key))
            certify(folder, ca, name, key.public_key(), terms.get(name, SigningTerms(days=days)))
    return parties(folder, added)


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
