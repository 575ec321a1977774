"""Signing requests: a party makes its private key where it will be used, and only the request leaves.

ann/key.pem       the private key
ann/ann.csr       the request, for whoever runs the CA
ann/ca.pem  ann/cert.pem          what comes back
ann/next.key.pem  ann/ann.csr     of a renewal; the key is used as soon as its certificate is there
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cutlayer.errors import ConfigError, LinkError
from cutlayer.remote.identity import authority
from cutlayer.remote.identity.certificates import (
    ADVICE,
    KEY,
    NEXT_KEY,
    Identity,
    agreed_identity,
    load_certificate,
    owner,
    renewed,
)
from cutlayer.remote.identity.files import make_folder, put, refuse_to_overwrite, writing
from cutlayer.remote.identity.register import check_name, content

DIGITS = 32  # of a fingerprint, as 128 bits cannot be forged


@dataclass(frozen=True)
class SigningRequest:
    """What a request asks for, proven to come from the holder of the private key."""

    who: Identity
    key: ec.EllipticCurvePublicKey
    path: Path

    @property
    def role(self) -> str:
        """The role that it asks for: client, train or fed."""
        return self.who.name if self.who.role == "server" else "client"

    @property
    def fingerprint(self) -> str:
        """The hash of the public key, for a comparison by telephone."""
        digest = sha256(spki(self.key)).hexdigest()[:DIGITS]
        return " ".join(digest[i : i + 4] for i in range(0, DIGITS, 4))


def make(folder: Path, who: Identity) -> SigningRequest:
    """Make a party's private key in its folder, and the request beside it."""
    if who.role == "client":
        check_name(who.name)
    refuse_to_overwrite(folder / KEY)
    return _made(folder, who, folder / KEY)


def renew(folder: Path) -> SigningRequest:
    """Make a next private key beside the present one, which stays in use until the new certificate is there."""
    certificate = load_certificate(folder / "cert.pem", ADVICE)
    who, following = agreed_identity(*owner(certificate)), folder / NEXT_KEY
    if renewed(folder, certificate):
        with writing(folder):
            following.replace(folder / KEY)
    elif following.exists():
        raise ConfigError(
            f"{_request(folder, who)} waits for its certificate: have it signed, or delete {following} to begin again"
        )
    return _made(folder, who, following)


def read(path: Path) -> SigningRequest:
    """Read a request; refuse one that does not prove its key, or that `cutlayer keys request` would not make."""
    advice = "ask for one that `cutlayer keys request` made"
    try:
        request = x509.load_pem_x509_csr(content(path, advice))
        key = request.public_key()
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        proven = request.is_signature_valid
        common = [str(a.value) for a in request.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        who = agreed_identity(common, names.get_values_for_type(x509.UniformResourceIdentifier))
    except (ValueError, x509.ExtensionNotFound, LinkError) as error:
        raise ConfigError(f"{path} is not a request ({error}); {advice}") from None
    if not proven or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"{path} is not signed with the key that it names, or with one of another kind; {advice}")
    return SigningRequest(who, key, path)


def spki(key: PublicKeyTypes) -> bytes:
    """Return the bytes of a public key."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _made(folder: Path, who: Identity, key_file: Path) -> SigningRequest:
    key, path = authority.new_key(), _request(folder, who)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, who.name)])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(who.uri)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(names, critical=False)
    with writing(folder):
        make_folder(folder)
        put(key_file, authority.key_pem(key))
        put(path, builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return SigningRequest(who, key.public_key(), path)


def _request(folder: Path, who: Identity) -> Path:
    return folder / f"{who.name}.csr"
