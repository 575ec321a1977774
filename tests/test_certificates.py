"""Specifies identities on the network: what credentials contain, and who passes the handshake."""

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID

from cutlayer.errors import ConfigError, LinkError
from cutlayer.remote.identity import certificates, key_folder, requests
from cutlayer.remote.identity.authority import CertifiedKey, issue, new_ca
from cutlayer.remote.identity.certificates import (
    Credentials,
    Identity,
    grpc_server_credentials,
    identity_of,
    secure_channel,
)
from cutlayer.remote.identity.key_folder import read_ca
from cutlayer.remote.identity.trial import trial

SECONDS = 60.0  # until a refusal counts as a hang


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of two servers and two clients, which no test changes."""
    folder = tmp_path_factory.mktemp("made") / "keys"
    trial(folder, clients="ann,bob")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "keys"))


def write_party(folder: Path, ca: CertifiedKey, pair: CertifiedKey) -> Path:
    """The folder of a party as `cutlayer keys` would leave it, whatever is in the certificate."""
    folder.mkdir()
    for name, data in (("ca.pem", ca.certificate_pem), ("cert.pem", pair.certificate_pem), ("key.pem", pair.key_pem)):
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return folder


COPY = "copy here the files that `cutlayer keys` made for this party"
RENEW = "renew it: `cutlayer keys request --renew` here, then `cutlayer keys sign --renew` at the CA"


class TestCredentials:
    @pytest.mark.parametrize(
        ("party", "role", "name"), [("clients/ann", "client", "ann"), ("train", "server", "train")]
    )
    def test_credentials_say_whose_they_are(
        self, made: Path, party: str, role: str, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = Credentials.load(made / party)
        assert (found.role, found.name, found.expires) == (
            role,
            name,
            certificates.load_certificate(made / party / "cert.pem", "").not_valid_after_utc,
        )
        assert found.certificate == (made / party / "cert.pem").read_bytes()
        assert "PRIVATE" not in repr(found)
        assert caplog.messages == []

    @pytest.mark.parametrize("file", ["ca.pem", "cert.pem", "key.pem"])
    def test_a_file_is_missing(self, folder: Path, file: str) -> None:
        path = folder / "clients/ann" / file
        path.unlink()
        with pytest.raises(ConfigError) as refused:
            Credentials.load(folder / "clients/ann")
        assert str(refused.value) == f"{path} is not there; {COPY}"

    def test_the_folder_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            Credentials.load(tmp_path / "an")
        assert str(refused.value) == (
            f"there is no folder {tmp_path / 'an'}; give the one that `cutlayer keys` made for this party"
        )

    @pytest.mark.parametrize(
        ("file", "what"), [("ca.pem", "certificate"), ("cert.pem", "certificate"), ("key.pem", "private key")]
    )
    def test_a_file_is_damaged(self, folder: Path, file: str, what: str) -> None:
        path = folder / "clients/ann" / file
        path.write_bytes(path.read_bytes()[:90])
        with pytest.raises(ConfigError, match=rf"{re.escape(str(path))} is not a {what} \(.+\); {COPY}"):
            Credentials.load(folder / "clients/ann")

    def test_a_file_cannot_be_read(self, folder: Path) -> None:
        path = folder / "clients/ann/key.pem"
        path.unlink()
        path.mkdir()
        with pytest.raises(ConfigError) as refused:
            Credentials.load(folder / "clients/ann")
        assert str(refused.value) == f"{path} cannot be read: Is a directory; check who owns it and its mode"

    def test_the_key_is_of_another_certificate(self, folder: Path) -> None:
        shutil.copy(folder / "clients/bob/key.pem", folder / "clients/ann/key.pem")
        with pytest.raises(ConfigError) as refused:
            Credentials.load(folder / "clients/ann")
        key = folder / "clients/ann/key.pem"
        assert str(refused.value) == f"{key} is the key of another certificate than the one beside it; {COPY}"

    def test_another_ca(self, folder: Path) -> None:
        ann = folder / "clients/ann"
        (ann / "ca.pem").write_bytes(new_ca().certificate_pem)
        with pytest.raises(ConfigError) as refused:
            Credentials.load(ann)
        assert str(refused.value) == f"{ann / 'cert.pem'} was not issued by the CA of {ann / 'ca.pem'}; {COPY}"

    def test_an_expired_certificate(self, tmp_path: Path) -> None:
        ca = new_ca()
        ann = write_party(tmp_path / "ann", ca, issue(ca, Identity("client", "ann"), -2))
        with pytest.raises(ConfigError) as refused:
            Credentials.load(ann)
        ended = datetime.now(UTC) - timedelta(days=2)
        assert str(refused.value) == (f"{ann / 'cert.pem'} expired on {ended:%Y-%m-%d}; {RENEW}")

    def test_a_warning_comes_in_the_last_fourteen_days_of_a_certificate(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ca = new_ca()
        Credentials.load(write_party(tmp_path / "bob", ca, issue(ca, Identity("client", "bob"), 14.1)))
        assert caplog.messages == []
        ann = Credentials.load(write_party(tmp_path / "ann", ca, issue(ca, Identity("client", "ann"), 13.9)))
        assert caplog.messages == [f"the certificate of ann expires on {ann.expires:%Y-%m-%d}; {RENEW}"]
        assert caplog.records[0].levelno == logging.WARNING

    def test_a_key_that_others_can_read_is_warned_of(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        key = folder / "clients/ann/key.pem"
        key.chmod(0o644)
        Credentials.load(folder / "clients/ann")
        assert caplog.messages == [f"{key} can be read by other users of this machine; run: chmod 600 {key}"]

    def test_a_client_is_no_server(self, made: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            grpc_server_credentials(Credentials.load(made / "clients/ann"))
        assert str(refused.value) == (
            "this certificate is of client 'ann', and a server needs one of its own: give the folder train or fed that "
            "`cutlayer keys` made"
        )

    def test_a_channel_says_which_package_is_missing(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        credentials = Credentials.load(made / "clients/ann")
        monkeypatch.setitem(sys.modules, "grpc", None)
        with pytest.raises(ConfigError) as refused:
            secure_channel("127.0.0.1:1", credentials, "train")
        assert str(refused.value) == (
            "a real network needs grpcio, which is not installed; pip install 'cutlayer[deploy]'"
        )


class TestIdentity:
    def test_a_link_without_certificates_names_nobody(self) -> None:
        for context in ({}, {"transport_security_type": [b"insecure"], "x509_common_name": [b"ann"]}):
            with pytest.raises(LinkError, match="the other end shows no certificate: this link is not encrypted"):
                identity_of(context)

    @pytest.mark.parametrize(
        ("name", "others"),
        [
            (b"ann", [b"cutlayer://client/bob"]),
            (b"ann", [b"cutlayer://client/ann", b"cutlayer://client/bob"]),
            (b"ann", [b"cutlayer://server/ann"]),
            (b"train", [b"cutlayer://client/train"]),
            (b"ann", [b"ann"]),
            (b"an/na", [b"cutlayer://client/an/na"]),
            (b"\xff", [b"cutlayer://client/\xff"]),
        ],
    )
    def test_a_certificate_of_other_making_names_nobody(self, name: bytes, others: list[bytes]) -> None:
        context = {
            "transport_security_type": [b"ssl"], "x509_common_name": [name], "x509_subject_alternative_name": others
        }  # fmt: skip
        with pytest.raises(LinkError, match="does not say which client or server it belongs to; use one that"):
            identity_of(context)


@dataclass
class Echo:
    """A server that answers a stream with the same messages, and notes whom it heard."""

    port: int = 0
    heard: list[Identity] = field(default_factory=list)

    def handle(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.heard.append(identity_of(context.auth_context()))
        yield from messages


@contextmanager
def serving(credentials: Any) -> Iterator[Echo]:
    """An Echo on a free port of the loopback interface."""
    echo = Echo()
    handler = grpc.method_handlers_generic_handler("test", {"Echo": grpc.stream_stream_rpc_method_handler(echo.handle)})
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[handler])
        echo.port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield echo
        finally:
            server.stop(None).wait()


def answer(channel: Any) -> list[bytes] | str:
    """What comes back, or the status of the refusal."""
    with channel:
        try:
            return list(channel.stream_stream("/test/Echo")(iter([b"one", b"two"]), timeout=SECONDS))
        except grpc.RpcError as error:
            return str(error.code().name)


@pytest.fixture(scope="module")
def echo(made: Path) -> Iterator[Echo]:
    """The training server, up for all tests."""
    with serving(grpc_server_credentials(Credentials.load(made / "train"))) as echo:
        yield echo


class TestHandshake:
    @pytest.mark.parametrize(("party", "role"), [("ann", "client"), ("bob", "client"), ("fed", "server")])
    def test_the_certificate_names_who_is_there(self, made: Path, echo: Echo, party: str, role: str) -> None:
        credentials = Credentials.load(made / "clients" / party if role == "client" else made / party)
        echo.heard.clear()
        assert answer(secure_channel(f"127.0.0.1:{echo.port}", credentials, "train")) == [b"one", b"two"]
        assert [(who.role, who.name) for who in echo.heard] == [(role, party)]

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    def test_host_names_and_addresses_are_in_the_certificate(self, made: Path, echo: Echo, host: str) -> None:
        ann = Credentials.load(made / "clients/ann")
        credentials = grpc.ssl_channel_credentials(ann.ca, ann.key, ann.certificate)
        assert answer(grpc.secure_channel(f"{host}:{echo.port}", credentials)) == [b"one", b"two"]

    def test_a_renewed_certificate_is_let_in(self, folder: Path, echo: Echo) -> None:
        request = requests.renew(folder / "clients/ann")
        key_folder.sign(folder, read_ca(folder), [request], key_folder.SigningTerms(renew=True))
        credentials = Credentials.load(folder / "clients/ann")
        assert answer(secure_channel(f"127.0.0.1:{echo.port}", credentials, "train")) == [b"one", b"two"]

    @pytest.mark.parametrize("stranger", ["plaintext", "no certificate", "wrong CA", "expired", "signed by a client"])
    def test_a_stranger_never_reaches_the_handler(self, made: Path, echo: Echo, stranger: str) -> None:
        address, ca = f"127.0.0.1:{echo.port}", read_ca(made)
        ann, bob = Credentials.load(made / "clients/ann"), Identity("client", "bob")
        client = issue(ca, Identity("client", "ann"), 1)
        pairs = {
            "wrong CA": issue(new_ca(), bob, 1),
            "expired": issue(ca, bob, -1),
            "signed by a client": issue(client, bob, 1),
        }
        if stranger == "plaintext":
            channel = grpc.insecure_channel(address)
        elif stranger == "no certificate":
            channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ann.ca))
        else:
            own = pairs[stranger]
            chain = own.certificate_pem + (client.certificate_pem if stranger == "signed by a client" else b"")
            channel = secure_channel(address, replace(ann, certificate=chain, key=own.key_pem), "train")
        echo.heard.clear()
        assert answer(channel) == "UNAVAILABLE"
        assert echo.heard == []

    def test_a_client_cannot_pass_for_a_server(self, made: Path) -> None:
        ca, ann = read_ca(made), Credentials.load(made / "clients/ann")
        train = issue(ca, Identity("server", "train"), 1)
        only_client = with_purposes(ca, train, ExtendedKeyUsageOID.CLIENT_AUTH)
        both = with_purposes(ca, train, ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
        assert asked_of(ca, issue(ca, Identity("client", "bob"), 1), ann) == ("UNAVAILABLE", 0)
        assert asked_of(ca, only_client, ann) == ("UNAVAILABLE", 0)  # its names are right, so the purpose alone refuses
        assert asked_of(ca, both, ann) == ([b"one", b"two"], 1)

    @pytest.mark.parametrize("own", ["fed", "expired", "wrong CA"])
    def test_a_client_sees_through_a_false_server(self, made: Path, own: str) -> None:
        ca, train = read_ca(made), Identity("server", "train")
        pairs = {
            "fed": issue(ca, Identity("server", "fed"), 1, ["127.0.0.1"]),
            "expired": issue(ca, train, -1, ["127.0.0.1"]),
            "wrong CA": issue(new_ca(), train, 1, ["127.0.0.1"]),
        }
        assert asked_of(ca, pairs[own], Credentials.load(made / "clients/ann")) == ("UNAVAILABLE", 0)


def with_purposes(ca: CertifiedKey, own: CertifiedKey, *purposes: x509.ObjectIdentifier) -> CertifiedKey:
    """The same certificate but for what it may be used for."""
    old = own.certificate
    builder = x509.CertificateBuilder(
        old.issuer, old.subject, own.key.public_key(), old.serial_number, old.not_valid_before_utc,
        old.not_valid_after_utc,
    )  # fmt: skip
    for extension in old.extensions:
        is_purpose = isinstance(extension.value, x509.ExtendedKeyUsage)
        value = x509.ExtendedKeyUsage(purposes) if is_purpose else extension.value
        builder = builder.add_extension(value, extension.critical)
    return CertifiedKey(certificate=builder.sign(ca.key, SHA256()), key=own.key)


def asked_of(ca: CertifiedKey, own: CertifiedKey, client: Credentials) -> tuple[list[bytes] | str, int]:
    """What a server that shows this certificate is told, and how often its handler ran."""
    credentials = grpc.ssl_server_credentials([(own.key_pem, own.certificate_pem)], ca.certificate_pem, True)
    with serving(credentials) as echo:
        return answer(secure_channel(f"127.0.0.1:{echo.port}", client, "train")), len(echo.heard)
