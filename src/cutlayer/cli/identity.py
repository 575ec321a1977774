"""`cutlayer keys`: a private CA, requests for certificates, and their signatures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option, Typer

from cutlayer.cli import asking, show
from cutlayer.cli.options import Json, add
from cutlayer.cli.tables import NONE, dashed, plain_table
from cutlayer.errors import ConfigError

if TYPE_CHECKING:
    from cutlayer.remote.identity.key_folder import Party
    from cutlayer.remote.identity.requests import SigningRequest

keys = Typer(
    name="keys",
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Make the keys of a real network: a private CA, and a certificate for each server and device.",
    epilog="\n\n".join(
        [
            "One person runs the CA; every party makes its own key, which never leaves it:",
            "[bold]ca$    cutlayer keys init ca[/bold]",
            "[bold]ann$   cutlayer keys request ann[/bold]",
            "[bold]ca$    cutlayer keys sign ca ann.csr[/bold]",
            "[bold]ann$   cp received/* ann/   # ca.pem and cert.pem, from ca/clients/ann[/bold]",
            "For a trial: [bold]cutlayer keys trial keys --clients ann,bob[/bold]",
        ]
    ),
)

CA = Annotated[Path, Argument(metavar="FOLDER", help="The folder of the CA.")]
Hosts = Annotated[
    list[str] | None,
    Option(
        "--server",
        metavar="HOST",
        help="Host name or IP address of a server; by default localhost, 127.0.0.1 and ::1; may be repeated.",
    ),
]
Days = Annotated[int, Option(min=1, help="Validity of the certificates; the CA's own is valid for ten years.")]
PassphraseFile = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help=f"A file that holds the passphrase; otherwise ${asking.PASSPHRASE}, or a question at the terminal.",
    ),
]


def init(
    folder: Annotated[Path, Argument(help="The folder of the CA, which is made.")],
    passphrase_file: PassphraseFile = None,
    no_passphrase: Annotated[
        bool,
        Option("--no-passphrase", help="Do not encrypt the key of the CA: whoever reads it can make certificates."),
    ] = False,
) -> None:
    """Make a CA; its key is encrypted with a passphrase.

    Do this on a machine that is neither a server nor a device, and keep a copy of the folder.

    Examples:
        cutlayer keys init ca
        cutlayer keys init ca --passphrase-file /run/secrets/ca
    """
    with _identity():
        from cutlayer.remote.identity.key_folder import create
    if no_passphrase and passphrase_file is not None:
        raise ConfigError("--no-passphrase and --passphrase-file contradict each other; give one of them")
    create(folder, None if no_passphrase else asking.passphrase(passphrase_file, new=True))
    if no_passphrase:
        show.warn([f"{folder / 'ca.key'} is not encrypted: whoever can read it can make certificates"])
    show.prose(
        f"{folder} is a CA. It stays here; parties send their requests (`cutlayer keys request`), and "
        f"`cutlayer keys sign {folder} REQUEST` answers them."
    )


def request(
    name: Annotated[str | None, Argument(help="Name of the device; a server is called by its role.")] = None,
    role: Annotated[str, Option(help="client, or train or fed for a server.")] = "client",
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="This party's folder of keys; by default its name, here.")
    ] = None,
    renew: Annotated[
        bool,
        Option("--renew", help="Request a new certificate for a new key; the present ones stay in use until then."),
    ] = False,
) -> None:
    """Make this party's private key, and a request for its certificate to send to the CA.

    Run it on the device or the server itself: the private key never leaves its folder.

    Examples:
        cutlayer keys request ann
        cutlayer keys request --role train --out /etc/cutlayer/train
        cutlayer keys request --renew --out ann
    """
    with _identity():
        from cutlayer.remote.identity import requests
        from cutlayer.remote.identity.certificates import Identity
        from cutlayer.remote.identity.key_folder import check_role
    check_role(role)
    if renew:
        if out is None and name is None:
            raise ConfigError("say whose certificate to renew: give its name, or its folder with --out")
        made = requests.renew(out or Path(str(name)))
    else:
        name = _party_name(name, role)
        made = requests.make(out or Path(name), Identity("client" if role == "client" else "server", name))
    show.prose(
        f"fingerprint: {made.fingerprint}",
        f"Send {made.path} to whoever runs the CA, and read the fingerprint to them. Copy the files that come back "
        f"into {made.path.parent}. The private key in it goes nowhere.",
    )


def sign(
    folder: CA,
    requests: Annotated[list[Path], Argument(metavar="REQUEST", help="Files that `cutlayer keys request` made.")],
    role: Annotated[str, Option(help="The role that you agree to: client, train or fed.")] = "client",
    name: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="The name that you agree to, in place of the question; one for each request."),
    ] = None,
    renew: Annotated[bool, Option("--renew", help="Sign new certificates for parties that have one.")] = False,
    server: Hosts = None,
    days: Days = 365,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Sign requests, after a look at their names, roles and fingerprints, and add the clients to the servers' list.

    A request whose role or name is not the one that you agree to is refused. Each party gets back the files of its
    folder, which hold no secret.

    Examples:
        cutlayer keys sign ca ann.csr bob.csr
        cutlayer keys sign ca train.csr --role train --server train.example.org
        cutlayer keys sign ca ann.csr --renew --name ann --passphrase-file /run/secrets/ca
    """
    with _identity():
        from cutlayer.remote.identity import key_folder
        from cutlayer.remote.identity.requests import read
    terms = key_folder.SigningTerms(role=role, hosts=server or (), days=days, renew=renew)
    found = [read(path) for path in requests]
    key_folder.checked(folder, found, terms)
    _confirm(found, name or [])
    secret = asking.passphrase(passphrase_file) if key_folder.encrypted(folder) else None
    signed = key_folder.sign(folder, key_folder.read_ca(folder, secret), found, terms)
    show.people(_table(folder, signed))
    show.prose("Send the files of each folder back to its owner; they hold no secret.", *_lists(folder, signed))


def revoke(folder: CA, names: Annotated[list[str], Argument(metavar="NAME", help="Clients to revoke.")]) -> None:
    """Take clients off the servers' list for good: their sessions end, and they cannot join again.

    It takes effect within seconds of copying clients.toml to the servers. Names and numbers are never given again.

    Examples:
        cutlayer keys revoke ca bob
    """
    with _identity():
        from cutlayer.remote.identity.key_folder import revoke
    gone = revoke(folder, names)
    show.people(_table(folder, gone))
    show.prose(*_lists(folder, gone))


def list_(folder: CA, as_json: Json = False) -> None:
    """List all parties with their numbers and the dates when their certificates expire.

    Examples:
        cutlayer keys list ca
        cutlayer keys list ca --json
    """
    with _identity():
        from cutlayer.remote.identity.key_folder import parties
    found = parties(folder)
    document = {"folder": str(folder), "parties": [_row(party) for party in found]}
    show.result(document, _table(folder, found), machine=as_json)
    show.warn(
        f"the certificate of {party.who.name} {'expires' if party.state == 'expires soon' else 'expired'} on "
        f"{_date(party.expires)}; its owner renews it with `cutlayer keys request --renew`"
        for party in found
        if party.state in ("expires soon", "expired")
    )


def trial(
    folder: Annotated[Path, Argument(help="The folder of the keys, created if it is missing.")],
    clients: Annotated[
        str | None, Option(metavar="NAMES|N", help="Comma-separated names, or a number: client-1, client-2 and so on.")
    ] = None,
    server: Hosts = None,
    days: Days = 365,
) -> None:
    """Make everything for a trial in one place: a CA, both servers and all clients, with their private keys.

    Whoever has this folder can pass for everyone in it, so it is for trials only. Run the command again with more names
    to add clients; it never overwrites a key.

    Examples:
        cutlayer keys trial keys --clients ann,bob
        cutlayer keys trial keys --clients 10 --server train.example.org
    """
    with _identity():
        from cutlayer.remote.identity.trial import trial
    made = trial(folder, clients, server or (), days)
    show.people(_table(folder, made))
    show.prose(
        "Copy each whole folder to its owner over a secure channel: there is a private key in it.",
        f"All private keys are in {folder}, so it is for trials only. For real devices use `cutlayer keys request`.",
    )


for command in (init, request, sign, revoke, list_, trial):
    add(keys, command)


def _party_name(name: str | None, role: str) -> str:
    """Return the name of a party of this role: a server has the name of its role."""
    if role == "client" and name is None:
        raise ConfigError("a device needs a name, such as `cutlayer keys request ann`; a server gives --role train")
    if role != "client" and name not in (None, role):
        raise ConfigError(f"{name!r} cannot be the name of a server: the {role} server is called {role}")
    return role if name is None else name


def _confirm(found: Sequence["SigningRequest"], names: Sequence[str]) -> None:
    """Show what would be signed; go on only with requests that the operator agrees to, one by one or by name."""
    asked = [request.who.name for request in found]
    if names and sorted(names) != sorted(asked):
        raise ConfigError(f"the requests are of {', '.join(asked)}, and --name agrees to {', '.join(names)}")
    if not names and not asking.terminal():
        raise ConfigError("there is no terminal to ask at: say with --name whose requests you agree to sign")
    rows = [[request.who.name, request.role, request.fingerprint] for request in found]
    heads = ["name", "role", "fingerprint"]
    Console(stderr=True).print(plain_table(heads, rows, left=heads, title="to be signed"))
    if not names and not typer.confirm("Are these the fingerprints that their owners told you?", err=True):
        raise ConfigError("nothing was signed")


@contextmanager
def _identity() -> Iterator[None]:
    """Say which package is missing."""
    try:
        yield
    except ImportError as missing:
        raise ConfigError(
            "cutlayer keys needs cryptography, which is not installed; pip install 'cutlayer[deploy]'"
        ) from missing


def _table(folder: Path, parties: Sequence["Party"]) -> Any:
    heads = ["name", "role", "number", "state", "expires", "folder"]
    rows = [[p.who.name, p.who.role, dashed("{}", p.number), p.state, _date(p.expires), _place(p)] for p in parties]
    return plain_table(heads, rows, left={*heads} - {"number"}, fold=["folder"], title=f"keys in {folder}")


def _row(party: "Party") -> dict[str, Any]:
    return {
        "name": party.who.name,
        "role": party.who.role,
        "number": party.number,
        "state": party.state,
        "expires": None if party.expires is None else party.expires.isoformat(),
        "folder": str(party.folder),
    }


def _place(party: "Party") -> str:
    return NONE if party.state in ("revoked", "no certificate") else str(party.folder)


def _date(moment: datetime | None) -> str:
    return NONE if moment is None else f"{moment:%Y-%m-%d}"


def _lists(folder: Path, parties: Sequence["Party"]) -> list[str]:
    """Return what to do after a change of the list of clients."""
    if all(party.who.role == "server" for party in parties):
        return []
    return [f"The list of clients may have changed: copy {folder / 'clients.toml'} to the folder of each server."]
