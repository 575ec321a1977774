"""Certificates and private keys in files, and what is wrong with them, in a user's words."""

from datetime import UTC, datetime
from pathlib import Path

from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
except ImportError as missing:
    raise ConfigError(
        "mutual TLS needs cryptography, which is not installed; pip install 'cutlayer[deploy]'"
    ) from missing


def content(path: Path, advice: str) -> bytes:
    """The bytes of a file that must be there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; {advice}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check who owns it and its mode") from None


def load_certificate(path: Path, advice: str) -> x509.Certificate:
    """The certificate in a file."""
    try:
        return x509.load_pem_x509_certificate(content(path, advice))
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate ({reason(error)}); {advice}") from None


def check_dates(path: Path, certificate: x509.Certificate, advice: str) -> None:
    """Refuse one that is not valid today."""
    now, begins, ends = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends <= now:
        raise ConfigError(f"{path} expired on {day(ends)}; {advice}")
    if now < begins:
        raise ConfigError(f"{path} is valid from {day(begins)} on; check the clock of this machine")


def load_key(path: Path, certificate: x509.Certificate, advice: str) -> PrivateKeyTypes:
    """The private key in a file, which must be that of the certificate."""
    try:
        key = load_pem_private_key(content(path, advice), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key ({reason(error)}); {advice}") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{path} is the key of another certificate than the one beside it; {advice}")
    return key


def issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether this CA signed the certificate."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def common_names(certificate: x509.Certificate) -> list[str]:
    """The names of its owner; a proper one has one."""
    return [str(a.value) for a in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]


def other_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    """The URIs, host names and addresses of its owner."""
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def uris(certificate: x509.Certificate) -> list[str]:
    """The URIs among the other names of its owner."""
    return other_names(certificate).get_values_for_type(x509.UniformResourceIdentifier)


def day(moment: datetime) -> str:
    """2027-11-15."""
    return f"{moment:%Y-%m-%d}"
