"""The folder of a CA: its key, the list of clients, and for each party a folder of what to send to it.

    ca.pem  ca.key  clients.toml            stay with whoever runs the CA; ca.key is encrypted with a passphrase
    train/  ca.pem  cert.pem  clients.toml
    fed/    ca.pem  cert.pem  clients.toml
    clients/ann/  ca.pem  cert.pem

Private keys stay with their owners, who send requests; only `trial` makes them here, each in its party's folder.

The list is written before the certificates: after a crash in between, a name may lack its certificate, which a renewal
makes, but no number is used twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.remote.identity import authority, certificates
from cutlayer.remote.identity.authority import CertifiedKey
from cutlayer.remote.identity.certificates import NEW_CA, SOON, Identity
from cutlayer.remote.identity.files import make_folder, put, refuse_to_overwrite, writing
from cutlayer.remote.identity.register import SERVERS, Register, content
from cutlayer.remote.identity.requests import SigningRequest, spki

HOSTS = ("localhost", "127.0.0.1", "::1")
LIST = "clients.toml"
ADVICE = "put it back from a copy, or " + NEW_CA
LEAST_LETTERS = 8  # of a passphrase
SCRYPT_COST = 2**17  # 128 MB and half a second for each guess
PartyRole = Literal["client", "train", "fed"]
State = Literal["valid", "expires soon", "expired", "revoked", "no certificate"]


@dataclass(frozen=True, kw_only=True)
class SigningTerms:
    """What the operator of a CA agrees to sign."""

    role: str = "client"  # of all requests
    hosts: Sequence[str] = ()  # for a server: its host names and addresses
    days: int = 365
    renew: bool = False  # whether the names are in the list already

    def __post_init__(self) -> None:
        check_role(self.role)
        for host in self.hosts:
            authority.host_name(host)
        if self.hosts and self.role == "client":
            raise ConfigError("--server goes into the certificate of a server: give it with --role train or --role fed")


@dataclass(frozen=True, kw_only=True)
class Party:
    """A client or a server that the CA knows."""

    who: Identity
    folder: Path
    number: int | None
    state: State
    expires: datetime | None


def check_role(role: str) -> None:
    if role not in get_args(PartyRole):
        raise UnknownNameError("role", role, get_args(PartyRole))


def create(folder: Path, passphrase: bytes | None) -> None:
    """Make a CA; without a passphrase, whoever can read its key can make certificates."""
    if passphrase is not None and len(passphrase) < LEAST_LETTERS:
        raise ConfigError(f"the passphrase has {len(passphrase)} characters; choose one of at least {LEAST_LETTERS}")
    put_ca(folder, authority.new_ca(), passphrase)


def put_ca(folder: Path, ca: CertifiedKey, passphrase: bytes | None) -> None:
    """Write the files of a new CA; its certificate comes last, so that a CA with a certificate is complete."""
    for name in ("ca.pem", "ca.key"):
        refuse_to_overwrite(folder / name)
    secret = None if passphrase is None else _stretched(passphrase, ca.certificate)
    with writing(folder):
        make_folder(folder)
        put(folder / "ca.key", authority.key_pem(ca.key, secret))
        put(folder / LIST, Register().as_toml().encode())
        put(folder / "ca.pem", ca.certificate_pem)


def encrypted(folder: Path) -> bool:
    """Return whether the key of the CA needs a passphrase."""
    return b"ENCRYPTED" in content(folder / "ca.key", ADVICE).partition(b"\n")[0]


def read_ca(folder: Path, passphrase: bytes | None = None) -> CertifiedKey:
    """Read the CA of a folder with its key."""
    certificate = _own_certificate(folder)
    secret = _stretched(passphrase, certificate) if passphrase is not None and encrypted(folder) else None
    key = certificates.load_key(folder / "ca.key", certificate, ADVICE, secret)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / 'ca.key'} is not a key that `cutlayer keys` made; {ADVICE}")
    return CertifiedKey(certificate=certificate, key=key)


def _own_certificate(folder: Path) -> x509.Certificate:
    certificate = certificates.load_certificate(folder / "ca.pem", ADVICE)
    certificates.check_dates(folder / "ca.pem", certificate, NEW_CA)
    return certificate


def _stretched(passphrase: bytes, certificate: x509.Certificate) -> bytes:
    """Return what encrypts the key: the rounds of an encrypted PEM file alone would let passphrases be guessed."""
    salt = spki(certificate.public_key())  # another one for each CA
    return Scrypt(salt=salt, length=32, n=SCRYPT_COST, r=8, p=1).derive(passphrase).hex().encode()


def checked(folder: Path, requests: Sequence[SigningRequest], terms: SigningTerms) -> Register:
    """Refuse requests that cannot be signed on these terms; return the list of clients that they lead to."""
    known = Register.read(folder / LIST)
    names = [request.who.name for request in requests]
    owners = {spki(c.public_key()): name for name, c in _signed(folder, known)}
    for request in requests:
        _check_request(request, terms, known, owners)
        if names.count(request.who.name) > 1:
            raise ConfigError(f"two requests are of {request.who.name!r}; sign only the one that its owner has now")
    authority.check_days(_own_certificate(folder), terms.days)
    return known if terms.role in SERVERS else known.adding(names)


def sign(folder: Path, ca: CertifiedKey, requests: Sequence[SigningRequest], terms: SigningTerms) -> list[Party]:
    """Check all requests, then sign them; return their parties, whose folders go back to them."""
    register, names = checked(folder, requests, terms), [request.who.name for request in requests]
    with writing(folder):
        for name in names:
            make_folder(place_of(folder, name))
        write_list(folder, register)
        for request in requests:
            certify(folder, ca, request.who.name, request.key, terms)
    return parties(folder, names)


def certify(folder: Path, ca: CertifiedKey, name: str, key: ec.EllipticCurvePublicKey, terms: SigningTerms) -> None:
    """Put a new certificate into a party's folder; a server keeps its hosts unless others are given."""
    place, hosts = place_of(folder, name), terms.hosts
    if name in SERVERS and not hosts:
        before = _certificate(folder, name)
        hosts = HOSTS if before is None else authority.hosts_in(before)
    certificate = authority.certify(ca, key, Identity.named(name), terms.days, hosts)
    put(place / "cert.pem", authority.certificate_pem(certificate))
    put(place / "ca.pem", ca.certificate_pem)


def revoke(folder: Path, names: Sequence[str]) -> list[Party]:
    """Take clients off the list for good."""
    register = Register.read(folder / LIST).revoking(names)
    with writing(folder):
        write_list(folder, register)
    return parties(folder, names)


def parties(folder: Path, names: Sequence[str] = ()) -> list[Party]:
    """Return these parties, or everyone that the CA knows, the servers first."""
    register = Register.read(folder / LIST)
    servers = [name for name in SERVERS if place_of(folder, name).exists()]
    return [_party(folder, name, register) for name in names or (*servers, *register.clients, *register.revoked)]


def write_list(folder: Path, register: Register) -> None:
    """Write the list of clients for the CA, and for each server that it has signed."""
    for place in (folder, *(place_of(folder, name) for name in SERVERS)):
        if place.exists():
            put(place / LIST, register.as_toml().encode())


def place_of(folder: Path, name: str) -> Path:
    """Return the folder of what goes to a party."""
    return folder / name if name in SERVERS else folder / "clients" / name


def _check_request(
    request: SigningRequest, terms: SigningTerms, register: Register, owners: Mapping[bytes, str]
) -> None:
    """Refuse a request of another role than the operator named, or of a name or key that another party has."""
    who, path = request.who, request.path
    if request.role != terms.role:
        raise ConfigError(
            f"{path} asks for the role {request.role}, and you sign for {terms.role}; give --role {request.role} if it "
            "is meant"
        )
    if who.name in register.revoked:
        raise ConfigError(f"client {who.name!r} was revoked and gets no certificate; it needs another name")
    signed = who.name in register.clients or who.name in owners.values()
    if signed and not terms.renew:
        raise ConfigError(
            f"{who.name!r} has a certificate already: if its owner asks for a renewal, sign with --renew; if not, "
            f"{path} is of somebody who wants to pass for {who.name!r}"
        )
    if not signed and terms.renew:
        raise ConfigError(f"{who.name!r} has no certificate to renew; sign without --renew")
    other = owners.get(spki(request.key), who.name)
    if other != who.name:
        raise ConfigError(f"{path} has the key of {other!r}; every party has a key of its own")


def _signed(folder: Path, register: Register) -> Iterator[tuple[str, x509.Certificate]]:
    for name in (*SERVERS, *register.clients, *register.revoked):
        if (certificate := _certificate(folder, name)) is not None:
            yield name, certificate


def _certificate(folder: Path, name: str) -> x509.Certificate | None:
    path = place_of(folder, name) / "cert.pem"
    return certificates.load_certificate(path, ADVICE) if path.exists() else None


def _party(folder: Path, name: str, register: Register) -> Party:
    certificate = _certificate(folder, name)
    expires = None if certificate is None else certificate.not_valid_after_utc
    return Party(
        who=Identity.named(name),
        folder=place_of(folder, name),
        number=register.clients.get(name, register.revoked.get(name)),
        state="revoked" if name in register.revoked else _state(expires),
        expires=expires,
    )


def _state(expires: datetime | None) -> State:
    if expires is None:
        return "no certificate"
    left = expires - datetime.now(UTC)
    return "valid" if left > SOON else "expires soon" if left.total_seconds() > 0 else "expired"
