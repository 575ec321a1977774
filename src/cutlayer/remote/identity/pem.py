"""Reads certificates and private keys from files, with errors that tell a user what to do."""

from datetime import UTC, datetime
from pathlib import Path

from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError
from cutlayer.remote.identity.register import content

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
except ImportError as missing:
    raise ConfigError(
        "mutual TLS needs cryptography, which is not installed; pip install 'cutlayer[deploy]'"
    ) from missing


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
        raise ConfigError(f"{path} expired on {day(ends)}; {advice}")
    if now < begins:
        raise ConfigError(f"{path} is valid from {day(begins)} on; check the clock of this machine")


def load_key(path: Path, certificate: x509.Certificate, advice: str) -> PrivateKeyTypes:
    """Read a private key, which must be the one of this certificate."""
    try:
        key = load_pem_private_key(content(path, advice), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key ({reason(error)}); {advice}") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{path} is the key of another certificate than the one beside it; {advice}")
    return key


def issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Return whether this CA signed the certificate."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


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


def day(moment: datetime) -> str:
    """Format a date as 2027-11-15."""
    return f"{moment:%Y-%m-%d}"
