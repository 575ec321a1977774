"""Identities on the network: the credentials that a party shows, and the identity that it reads from the other's.

A certificate names the role and the name of its owner, cutlayer://client/ann or cutlayer://server/train. Both are taken
from the certificate alone, never from a message. A server's certificate also has a host name that stands for its role,
and the other end insists on that name: the fed server cannot pass for the training server at any address.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError, LinkError
from cutlayer.remote.identity.register import NAME, SERVERS, content
from cutlayer.remote.identity.repeating import repeating

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
except ImportError as missing:
    raise ConfigError(
        "mutual TLS needs cryptography, which is not installed; pip install 'cutlayer[deploy]'"
    ) from missing

log = logging.getLogger("cutlayer")

Role = Literal["client", "server"]
SCHEME = "cutlayer://"
ROLE_HOSTS = "cutlayer.internal"  # the domain of the host names that stand for roles; no resolver knows it
RENEWAL = "renew it: `cutlayer keys request --renew` here, then `cutlayer keys sign --renew` at the CA"
SOON = timedelta(days=14)  # before a certificate expires: warn
ADVICE = "copy here the files that `cutlayer keys` made for this party"
ADVICE_ON_FOLDER = "give the one that `cutlayer keys` made for this party"
NEW_CA = "make a new CA with `cutlayer keys init` in another folder, and new certificates for all"
DAY = 86400.0  # seconds
KEY, NEXT_KEY = "key.pem", "next.key.pem"  # the second is of a renewal, until its certificate has come


@dataclass(frozen=True)
class Identity:
    """The owner of a certificate."""

    role: Role
    name: str

    @classmethod
    def named(cls, name: str) -> "Identity":
        """Return the identity of this name; no client may have the name of a server."""
        return cls("server" if name in SERVERS else "client", name)

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A party's certificate and key, and the CA that it trusts."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    name: str
    role: Role
    expires: datetime

    def warn_of_expiry(self) -> None:
        """Warn if the certificate expires soon."""
        if self.expires - datetime.now(UTC) < SOON:
            log.warning("the certificate of %s expires on %s; %s", self.name, f"{self.expires:%Y-%m-%d}", RENEWAL)

    @classmethod
    def load(cls, folder: Path) -> "Credentials":
        """Read ca.pem, cert.pem and the key; refuse with a reason what would fail in every handshake."""
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; {ADVICE_ON_FOLDER}")
        ca_file, own_file = (folder / name for name in ("ca.pem", "cert.pem"))
        ca, own = (load_certificate(file, ADVICE) for file in (ca_file, own_file))
        key_file = folder / (NEXT_KEY if renewed(folder, own) else KEY)
        load_key(key_file, own, ADVICE)
        try:
            own.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):
            raise ConfigError(f"{own_file} was not issued by the CA of {ca_file}; {ADVICE}") from None
        who, expires = agreed_identity(*owner(own)), own.not_valid_after_utc
        check_dates(ca_file, ca, NEW_CA)
        check_dates(own_file, own, RENEWAL)
        if os.name == "posix" and stat.S_IMODE(key_file.stat().st_mode) & 0o077:
            log.warning("%s can be read by other users of this machine; run: chmod 600 %s", key_file, key_file)
        found = cls(
            ca=ca_file.read_bytes(),
            certificate=own_file.read_bytes(),
            key=key_file.read_bytes(),
            name=who.name,
            role=who.role,
            expires=expires,
        )
        found.warn_of_expiry()
        return found


@contextmanager
def warning_of_expiry(credentials: Credentials | None) -> Iterator[None]:
    """Warn once a day inside the block when the certificate expires soon."""
    with nullcontext() if credentials is None else repeating(DAY, credentials.warn_of_expiry):
        yield


def renewed(folder: Path, certificate: x509.Certificate) -> bool:
    """Return whether this is the certificate that was asked for with the next key."""
    path = folder / NEXT_KEY
    return path.exists() and read_key(path, ADVICE).public_key() == certificate.public_key()


def role_host(server: str) -> str:
    """Return the host name that stands for the role of a server in its certificate."""
    return f"{server}.{ROLE_HOSTS}"


def load_certificate(path: Path, advice: str) -> x509.Certificate:
    """Read a certificate."""
    try:
        return x509.load_pem_x509_certificate(content(path, advice))
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate ({reason(error)}); {advice}") from None


def check_dates(path: Path, certificate: x509.Certificate, advice: str) -> None:
    """Refuse a certificate that is not valid today."""
    now, begins, ends = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends <= now:
        raise ConfigError(f"{path} expired on {ends:%Y-%m-%d}; {advice}")
    if now < begins:
        raise ConfigError(f"{path} is valid from {begins:%Y-%m-%d} on; check the clock of this machine")


def read_key(path: Path, advice: str, passphrase: bytes | None = None) -> PrivateKeyTypes:
    """Read a private key; it must be encrypted if there is a passphrase."""
    try:
        return load_pem_private_key(content(path, advice), passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if passphrase is not None:
            raise ConfigError(f"this passphrase does not open {path}; give the one that it was made with") from None
        raise ConfigError(f"{path} is not a private key ({reason(error)}); {advice}") from None


def load_key(
    path: Path, certificate: x509.Certificate, advice: str, passphrase: bytes | None = None
) -> PrivateKeyTypes:
    """Read a private key, which must be the one of this certificate."""
    key = read_key(path, advice, passphrase)
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{path} is the key of another certificate than the one beside it; {advice}")
    return key


def other_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    """Return the URIs, host names and addresses of a certificate's owner."""
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def owner(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    """Return the common names and the URIs of a certificate's owner; a valid certificate has one of each."""
    names = [str(a.value) for a in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    return names, other_names(certificate).get_values_for_type(x509.UniformResourceIdentifier)


def grpc_server_credentials(credentials: Credentials, on_handshake: Callable[[], None] = lambda: None) -> Any:
    """Return what `server.add_secure_port` takes; only certificates of this CA get through the handshake.

    `on_handshake` is called when one begins.
    """
    if credentials.role != "server":
        raise ConfigError(
            f"this certificate is of client {credentials.name!r}, and a server needs one of its own: give the folder "
            "train or fed that `cutlayer keys` made"
        )
    grpc, own = _grpc(), (credentials.key, credentials.certificate)
    fixed = grpc.ssl_server_certificate_configuration([own], root_certificates=credentials.ca)

    def begins() -> None:  # and changes no certificate
        on_handshake()

    return grpc.dynamic_ssl_server_credentials(fixed, begins, require_client_authentication=True)


def secure_channel(address: str, credentials: Credentials, server: str, options: Sequence[tuple[str, Any]] = ()) -> Any:
    """Open a gRPC channel to the training server (train) or the fed server (fed), and to nobody else."""
    own = _grpc().ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
    role = ("grpc.ssl_target_name_override", role_host(server))
    return _grpc().secure_channel(address, own, options=[*options, role])


def identity_of(auth_context: Mapping[str, Iterable[bytes]]) -> Identity:
    """Return who is at the other end, from the auth_context() of a gRPC ServicerContext."""

    def words(key: str) -> list[str]:
        return [value.decode("utf-8", errors="replace") for value in auth_context.get(key, ())]

    if words("transport_security_type") != ["ssl"]:
        raise LinkError("the other end shows no certificate: this link is not encrypted")
    return agreed_identity(words("x509_common_name"), words("x509_subject_alternative_name"))


def agreed_identity(common_names: Sequence[str], other_names: Sequence[str]) -> Identity:
    """Return the owner of a certificate, whose common name and URI must agree."""
    for name in common_names[:1]:
        who = Identity.named(name)
        if NAME.fullmatch(name) and [other for other in other_names if other.startswith(SCHEME)] == [who.uri]:
            return who
    raise LinkError(
        f"the certificate of {', '.join(common_names) or 'nobody'} does not say which client or server it belongs to; "
        "use one that `cutlayer keys` made"
    )


def _grpc() -> Any:
    try:
        import grpc
    except ImportError as missing:
        raise ConfigError(
            "a real network needs grpcio, which is not installed; pip install 'cutlayer[deploy]'"
        ) from missing
    return grpc
