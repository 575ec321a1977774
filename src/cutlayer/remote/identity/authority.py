"""A private certificate authority (CA), which signs the certificates of clients and servers; it touches no file."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cutlayer.errors import ConfigError
from cutlayer.remote.identity.certificates import ROLE_HOSTS, Identity, other_names, role_host

CA_DAYS = 3650
SKEW = timedelta(days=1)  # certificates begin this much earlier, for devices whose clock is slow
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")


@dataclass(frozen=True, kw_only=True)
class CertifiedKey:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        return certificate_pem(self.certificate)

    @property
    def key_pem(self) -> bytes:
        return key_pem(self.key)


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return the text of a certificate."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a private key of the one kind that cutlayer uses."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    """Return the text of a private key, encrypted if there is a passphrase."""
    how = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def new_ca() -> CertifiedKey:
    """Make a CA that signs clients and servers, but no further CAs."""
    key = new_key()
    return CertifiedKey(certificate=_signed("cutlayer CA", key.public_key(), CA_DAYS, key, None, []), key=key)


def issue(ca: CertifiedKey, who: Identity, days: float, hosts: Iterable[str] = ()) -> CertifiedKey:
    """Issue a certificate with a new key."""
    key = new_key()
    return CertifiedKey(certificate=certify(ca, key.public_key(), who, days, hosts), key=key)


def certify(
    ca: CertifiedKey, key: ec.EllipticCurvePublicKey, who: Identity, days: float, hosts: Iterable[str] = ()
) -> x509.Certificate:
    """Sign a certificate of a party's own key; a server's serves both ends of a link, as servers talk to each other."""
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(who.uri)]
    if who.role == "server":
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names += [x509.DNSName(role_host(who.name)), *(host_name(host) for host in hosts)]
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    extensions = [x509.ExtendedKeyUsage(purposes), x509.SubjectAlternativeName(names), signer]
    return _signed(who.name, key, days, ca.key, ca.certificate, extensions)


def check_days(ca: x509.Certificate, days: int) -> None:
    """Refuse a certificate that would outlive the CA: it would stop working before its own date of expiry."""
    ends = ca.not_valid_after_utc
    most = (ends - datetime.now(UTC)).days
    if days > most:
        raise ConfigError(f"--days {days} is beyond the CA, which expires on {ends:%Y-%m-%d}; give at most {most}")


def host_name(host: str) -> x509.GeneralName:
    """Encode a host name or an IP address for a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not HOST.fullmatch(host) or host.rpartition(".")[2].isdigit():
        raise ConfigError(
            f"--server {host!r} is neither a host name nor an IP address; give it without scheme, port or brackets"
        )
    if host.lower().endswith(ROLE_HOSTS):
        raise ConfigError(f"--server {host!r}: names under {ROLE_HOSTS} stand for the roles of servers; give another")
    return x509.DNSName(host)


def hosts_in(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses that a server's certificate was made for."""
    names = other_names(certificate)
    domains = [name for name in names.get_values_for_type(x509.DNSName) if not name.endswith(ROLE_HOSTS)]
    return [*domains, *(str(address) for address in names.get_values_for_type(x509.IPAddress))]


def _signed(
    name: str,
    key: ec.EllipticCurvePublicKey,
    days: float,
    signer: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate | None,
    extensions: Iterable[x509.ExtensionType],
) -> x509.Certificate:
    """Sign a certificate of this key; without a CA it is one itself. If days are negative, it has expired."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca.subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - SKEW)
        .not_valid_after(ends)
        .public_key(key)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=0 if ca is None else None), critical=True)
        .add_extension(_usage(signs_certificates=ca is None), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, hashes.SHA256())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
