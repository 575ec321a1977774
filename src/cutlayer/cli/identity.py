"""`cutlayer keys`: make a private CA, and certificates for the servers and the clients."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cutlayer.cli import show
from cutlayer.cli.options import Json
from cutlayer.cli.tables import NONE, dashed, plain_table
from cutlayer.errors import ConfigError

if TYPE_CHECKING:
    from cutlayer.remote.identity.key_folder import Party


def keys(
    folder: Annotated[Path, Argument(help="The folder of the CA, created if it is missing.")],
    clients: Annotated[
        str | None, Option(metavar="NAMES|N", help="Comma-separated names, or a number: client-1, client-2 and so on.")
    ] = None,
    server: Annotated[
        list[str] | None,
        Option(
            metavar="HOST",
            help="Host name or IP address of a server; by default localhost, 127.0.0.1 and ::1; may be repeated.",
        ),
    ] = None,
    days: Annotated[
        int, Option(min=1, help="Validity of the certificates; the CA's own is valid for ten years.")
    ] = 365,
    renew: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Make a new certificate and key for a client, train or fed; may be repeated."),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Remove a client from the servers' lists for good; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the keys of a real network: a private CA, and certificates for the servers and the clients.

    Each party gets a folder, to copy to it as a whole. Run the command again with more names to add clients, or without
    options to list all parties. It never overwrites a key unless --renew names it.

    Examples:
        cutlayer keys keys --clients ann,bob,carol --server train.example.org
        cutlayer keys keys --clients dave
        cutlayer keys keys --renew ann --revoke bob
    """
    try:
        from cutlayer.remote.identity.key_folder import Asked, carry_out
    except ImportError as missing:
        raise ConfigError(
            "cutlayer keys needs cryptography, which is not installed; pip install 'cutlayer[deploy]'"
        ) from missing
    asked = Asked(clients=clients, hosts=server or (), days=days, renew=renew or (), revoke=revoke or ())
    fresh = not (folder / "ca.pem").exists()
    parties = carry_out(folder, asked)
    changed = [party for party in parties if party.state in ("new", "renewed") or party.who.name in asked.revoke]
    document = {"folder": str(folder), "parties": [_row(party) for party in parties]}
    heads = ["name", "role", "number", "state", "expires", "copy to it"]
    rows = [_cells(party) for party in changed or parties]
    table = plain_table(heads, rows, left={*heads} - {"number"}, fold=["copy to it"], title=f"keys in {folder}")
    show.result(document, table, machine=as_json)
    if not as_json:
        show.prose(*_advice(folder, parties, changed, fresh))


def _row(party: "Party") -> dict[str, Any]:
    return {
        "name": party.who.name,
        "role": party.who.role,
        "number": party.number,
        "state": party.state,
        "expires": None if party.expires is None else party.expires.isoformat(),
        "folder": str(party.folder),
    }


def _cells(party: "Party") -> list[str]:
    expires, copied = f"{party.expires:%Y-%m-%d}" if party.expires else NONE, str(party.folder)
    if party.state == "revoked":
        copied = NONE
    elif party.expires is None:
        copied = f"{NONE} (moved away; --renew makes a new one)"
    return [party.who.name, party.who.role, dashed("{}", party.number), party.state, expires, copied]


def _advice(folder: Path, parties: Sequence["Party"], changed: Sequence["Party"], fresh: bool) -> list[str]:
    """Return what the user should do next."""
    lines = []
    if others := len(parties) - len(changed or parties):
        lines.append(f"{others} others are as before; `cutlayer keys {folder}` shows all.")
    if fresh:
        lines.append("Copy each folder whole to its owner, by a safe way: there is a private key in it.")
        lines.append(f"{folder / 'ca.key'} stays here: whoever has it can make certificates.")
    elif any(party.who.role == "client" and party.state in ("new", "revoked") for party in changed):
        lists = " and ".join(str(folder / server / "clients.toml") for server in ("train", "fed"))
        lines.append(f"The list of clients has changed: copy {lists} to the servers.")
    if any(party.state == "renewed" for party in changed):
        lines.append(
            "The certificate before a renewal stays good until it expires. If somebody else has its key, revoke the "
            "client and add it under another name; if it is a server's, make a new CA in another folder."
        )
    return lines
