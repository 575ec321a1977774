"""A private certificate authority: it signs who is a client and who a server, and touches no file."""

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
from cutlayer.remote.identity.certificates import ROLE_HOSTS, Identity, role_host
from cutlayer.remote.identity.pem import day, other_names

CA_DAYS = 3650
SKEW = timedelta(days=1)  # certificates begin earlier, for devices whose clock is behind
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")


@dataclass(frozen=True, kw_only=True)
class CertifiedKey:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def new_ca() -> CertifiedKey:
    """A CA that signs parties, but no further CAs."""
    key, name = ec.generate_private_key(ec.SECP256R1()), _named("cutlayer CA")
    builder = _dated(key, CA_DAYS).subject_name(name).issuer_name(name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return CertifiedKey(certificate=builder.sign(key, hashes.SHA256()), key=key)


def issue(ca: CertifiedKey, who: Identity, days: float, hosts: Iterable[str] = ()) -> CertifiedKey:
    """A certificate and a new key; a server's is good for both ends of a link, as the servers talk to each other."""
    key, purposes = ec.generate_private_key(ec.SECP256R1()), [ExtendedKeyUsageOID.CLIENT_AUTH]
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(who.uri)]
    if who.role == "server":
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names += [x509.DNSName(role_host(who.name)), *(host_name(host) for host in hosts)]
    builder = _dated(key, days).subject_name(_named(who.name)).issuer_name(ca.certificate.subject)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectAlternativeName(names), False),
        (signer, False),
    ):
        builder = builder.add_extension(extension, critical)
    return CertifiedKey(certificate=builder.sign(ca.key, hashes.SHA256()), key=key)


def check_days(ca: CertifiedKey, days: int) -> None:
    """Refuse a certificate that would outlive the CA, for it would stop working on a day that it does not tell."""
    ends = ca.certificate.not_valid_after_utc
    most = (ends - datetime.now(UTC)).days
    if days > most:
        raise ConfigError(f"--days {days} is beyond the CA, which expires on {day(ends)}; give at most {most}")


def host_name(host: str) -> x509.GeneralName:
    """A host name or an IP address as a certificate has it."""
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
    """The host names and addresses that a server's certificate was asked for with."""
    names = other_names(certificate)
    domains = [name for name in names.get_values_for_type(x509.DNSName) if not name.endswith(ROLE_HOSTS)]
    return [*domains, *(str(address) for address in names.get_values_for_type(x509.IPAddress))]


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _dated(key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    """What all certificates have; one of negative days has expired already."""
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - SKEW)
        .not_valid_after(ends)
        .public_key(public)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


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
