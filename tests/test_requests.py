"""Keys as people run them: a CA with a passphrase, requests from devices, signatures, renewals and revocations."""

import json
import shutil
import stat
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from typer.testing import CliRunner

from cutlayer.cli import asking
from cutlayer.cli.identity import keys
from cutlayer.errors import ConfigError, CutlayerError
from cutlayer.remote.identity import authority, key_folder, requests
from cutlayer.remote.identity.certificates import Credentials, Identity, load_certificate
from cutlayer.remote.identity.register import Register

SECRET = "correct horse battery"
Keys = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(asking.PASSPHRASE, SECRET)
    monkeypatch.setattr(key_folder, "SCRYPT_COST", 2**4)
    return tmp_path


@pytest.fixture
def say(here: Path) -> Keys:
    """Run `cutlayer keys` and return what it prints; a refusal is raised."""

    def said(*words: str, typed: str = "") -> str:
        result = CliRunner().invoke(keys, words, input=typed)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    return said


@pytest.fixture
def ca(say: Keys, here: Path) -> Path:
    say("init", "ca")
    return here / "ca"


def signed(say: Keys, name: str, *more: str) -> Path:
    """Request and sign; the files that come back are copied to the party."""
    role = name if name in ("train", "fed") else "client"
    say("request", *([] if role == name else [name]), "--role", role)
    say("sign", "ca", f"{name}/{name}.csr", "--role", role, "--name", name, *more)
    return received(name)


def received(name: str) -> Path:
    shutil.copytree(key_folder.place_of(Path("ca"), name), name, dirs_exist_ok=True)
    return Path(name)


def refused(say: Keys, *words: str) -> str:
    with pytest.raises(CutlayerError) as error:
        say(*words)
    return str(error.value)


def request_of(who: Identity, key: object = None, common: str = "") -> bytes:
    """A request that any tool might make."""
    key = key or authority.new_key()
    builder = x509.CertificateSigningRequestBuilder(
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common or who.name)])
    ).add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(who.uri)]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)  # type: ignore[arg-type]


class TestAuthority:
    def test_its_key_is_encrypted_and_opens_with_the_passphrase_only(self, ca: Path) -> None:
        assert (ca / "ca.key").read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
        assert key_folder.read_ca(ca, SECRET.encode()).certificate.subject.rfc4514_string() == "CN=cutlayer CA"
        with pytest.raises(ConfigError) as wrong:
            key_folder.read_ca(ca, b"another one")
        assert str(wrong.value) == f"this passphrase does not open {ca / 'ca.key'}; give the one that it was made with"
        with pytest.raises(ConfigError, match="is not a private key"):
            key_folder.read_ca(ca)

    def test_guessing_the_passphrase_is_expensive(self, ca: Path) -> None:
        """The passphrase itself is not what encrypts the file, whose own rounds are few."""
        with pytest.raises(ValueError):
            load_pem_private_key((ca / "ca.key").read_bytes(), SECRET.encode())

    def test_it_is_private_whatever_the_umask(self, ca: Path) -> None:
        assert stat.S_IMODE(ca.stat().st_mode) == 0o700
        assert stat.S_IMODE((ca / "ca.key").stat().st_mode) == 0o600

    def test_the_passphrase_is_asked_for_twice_at_a_terminal(
        self, say: Keys, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(asking.PASSPHRASE)
        assert refused(say, "init", "ca") == (
            "there is no terminal to ask for the passphrase: give --passphrase-file FILE, set $CUTLAYER_PASSPHRASE, or "
            "--no-passphrase"
        )
        monkeypatch.setattr(asking, "terminal", lambda: True)
        text = say("init", "ca", typed=f"{SECRET}\na slip\n{SECRET}\n{SECRET}\n")
        assert text.count("Repeat for confirmation") == 2
        key_folder.read_ca(here / "ca", SECRET.encode())

    def test_the_passphrase_may_come_from_a_file(self, say: Keys, here: Path) -> None:
        (here / "secret").write_text("from the file\n")
        say("init", "ca", "--passphrase-file", "secret")
        key_folder.read_ca(here / "ca", b"from the file")
        assert refused(say, "init", "other", "--passphrase-file", "nowhere").startswith(
            "--passphrase-file nowhere cannot be read: "
        )

    def test_without_a_passphrase_there_is_a_warning(self, say: Keys, here: Path) -> None:
        text = say("init", "ca", "--no-passphrase")
        assert "warning: ca/ca.key is not encrypted: whoever can read it can make certificates" in text
        key_folder.read_ca(here / "ca")
        assert "contradict each other" in refused(say, "init", "b", "--no-passphrase", "--passphrase-file", "x")

    def test_a_short_passphrase_makes_nothing(self, say: Keys, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(asking.PASSPHRASE, "short")
        assert refused(say, "init", "ca") == "the passphrase has 5 characters; choose one of at least 8"
        monkeypatch.setenv(asking.PASSPHRASE, "")
        assert refused(say, "init", "ca") == "the passphrase is empty; give one"
        assert list(here.iterdir()) == []

    def test_a_ca_is_not_made_twice(self, say: Keys, ca: Path) -> None:
        before = (ca / "ca.key").read_bytes()
        assert refused(say, "init", "ca").startswith("ca/ca.pem is there already and is not overwritten")
        assert (ca / "ca.key").read_bytes() == before

    def test_a_trial_does_not_mix_with_it(self, say: Keys, ca: Path) -> None:
        assert refused(say, "trial", "ca", "--clients", "eve").startswith("ca is a CA with a passphrase and no trial")
        assert Register.read(ca / "clients.toml").clients == {}


class TestRequest:
    def test_the_private_key_stays_where_it_was_made(self, say: Keys, ca: Path, here: Path) -> None:
        ann = signed(say, "ann")
        assert stat.S_IMODE(ann.stat().st_mode) == 0o700
        assert stat.S_IMODE((ann / "key.pem").stat().st_mode) == 0o600
        assert Credentials.load(ann).name == "ann"
        secret = (ann / "key.pem").read_bytes().split(b"\n")[1]
        assert [path for path in here.rglob("*") if path.is_file() and secret in path.read_bytes()] == [
            here / "ann/key.pem"
        ]

    def test_both_sides_show_the_same_fingerprint(self, say: Keys, ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        told = say("request", "ann").partition("fingerprint: ")[2][:39]
        monkeypatch.setattr(asking, "terminal", lambda: True)
        text = say("sign", "ca", "ann/ann.csr", typed="y\n")
        assert f"ann client {told}" in text
        assert "Are these the fingerprints that their owners told you?" in text

    def test_a_key_is_never_overwritten(self, say: Keys, here: Path) -> None:
        say("request", "ann")
        before = (here / "ann/key.pem").read_bytes()
        assert refused(say, "request", "ann").startswith("ann/key.pem is there already and is not overwritten")
        assert (here / "ann/key.pem").read_bytes() == before

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["an na"], "'an na' cannot be the name of a client"),
            (["train"], "'train' cannot be the name of a client: the servers are called train and fed"),
            ([], "a device needs a name, such as `cutlayer keys request ann`; a server gives --role train"),
            (["ann", "--role", "fed"], "'ann' cannot be the name of a server: the fed server is called fed"),
            (["ann", "--role", "admin"], "unknown role 'admin'"),
            (["--renew"], "say whose certificate to renew"),
            (["ann", "--renew"], "ann/cert.pem is not there"),
        ],
    )
    def test_a_mistake_makes_nothing(self, say: Keys, here: Path, words: list[str], message: str) -> None:
        assert message in refused(say, "request", *words)
        assert list(here.iterdir()) == []


class TestSign:
    def test_nothing_is_signed_without_consent(self, say: Keys, ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        say("request", "ann")
        assert refused(say, "sign", "ca", "ann/ann.csr").startswith("there is no terminal to ask at: say with --name")
        monkeypatch.setattr(asking, "terminal", lambda: True)
        with pytest.raises(ConfigError, match="nothing was signed"):
            say("sign", "ca", "ann/ann.csr", typed="n\n")
        assert not (ca / "clients").exists()
        assert Register.read(ca / "clients.toml").clients == {}

    def test_a_request_of_another_name_is_refused(self, say: Keys, ca: Path) -> None:
        say("request", "eve", "--out", "ann")
        text = refused(say, "sign", "ca", "ann/eve.csr", "--name", "ann")
        assert text == "the requests are of eve, and --name agrees to ann"

    def test_a_request_of_another_role_is_refused(self, say: Keys, ca: Path, here: Path) -> None:
        """A device asks for the certificate of the training server, under the name that its operator expects."""
        (here / "ann.csr").write_bytes(request_of(Identity("server", "train")))
        assert refused(say, "sign", "ca", "ann.csr", "--name", "train") == (
            "ann.csr asks for the role train, and you sign for client; give --role train if it is meant"
        )
        assert not (ca / "train").exists()

    def test_what_cannot_be_signed_is_refused_before_anybody_is_asked(
        self, say: Keys, ca: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        signed(say, "ann")
        signed(say, "bob")
        say("revoke", "ca", "bob")
        for name in ("fed", "dave", "ANN"):
            say("request", *(["--role", "fed"] if name == "fed" else [name]))
        monkeypatch.setattr(asking, "terminal", lambda: True)
        monkeypatch.setattr(typer, "confirm", lambda *_, **__: pytest.fail("it asks"))
        for words, reason in [
            (["fed/fed.csr", "--role", "train"], "fed/fed.csr asks for the role fed, and you sign for train"),
            (["ann/ann.csr"], "'ann' has a certificate already"),
            (["bob/bob.csr"], "client 'bob' was revoked"),
            (["dave/dave.csr", "--renew"], "'dave' has no certificate to renew"),
            (["dave/dave.csr", "dave/dave.csr"], "two requests are of 'dave'"),
            (["dave/dave.csr", "--days", "3651"], "--days 3651 is beyond the CA"),
            (["dave/dave.csr", "--name", "eve"], "the requests are of dave, and --name agrees to eve"),
            (["ANN/ANN.csr"], "clients 'ann' and 'ANN' differ in capitals only"),
        ]:
            assert refused(say, "sign", "ca", *words).startswith(reason)

    @pytest.mark.parametrize(("name", "role"), [("ann", "client"), ("train", "train"), ("fed", "fed")])
    def test_the_role_that_is_shown_is_the_one_asked_for(
        self, say: Keys, ca: Path, monkeypatch: pytest.MonkeyPatch, name: str, role: str
    ) -> None:
        say("request", *([name] if role == "client" else []), "--role", role)
        request_ = requests.read(Path(f"{name}/{name}.csr"))
        assert request_.role == role
        monkeypatch.setattr(asking, "terminal", lambda: True)
        text = say("sign", "ca", f"{name}/{name}.csr", "--role", role, typed="y\n")
        assert f"{name} {role} {request_.fingerprint}" in text

    @pytest.mark.parametrize(
        "request_",
        [
            request_of(Identity("client", "train")),
            request_of(Identity("client", "ann"), common="bob"),
            request_of(Identity("client", "../ann")),
            request_of(Identity("client", "ann"), rsa.generate_private_key(65537, 2048)),
            request_of(Identity("client", "ann"), ec.generate_private_key(ec.SECP384R1())),
            request_of(Identity("client", "ann"))[:200],
            b"",
        ],
        ids=["server's name", "two names", "path", "RSA", "another curve", "damaged", "empty"],
    )
    def test_a_request_of_other_making_is_refused(self, say: Keys, ca: Path, here: Path, request_: bytes) -> None:
        (here / "x.csr").write_bytes(request_)
        assert "ask for one that `cutlayer keys request` made" in refused(say, "sign", "ca", "x.csr", "--name", "ann")

    def test_a_request_that_was_changed_on_its_way_is_refused(self, say: Keys, ca: Path, here: Path) -> None:
        say("request", "ann")
        der = x509.load_pem_x509_csr((here / "ann/ann.csr").read_bytes()).public_bytes(Encoding.DER)
        other = x509.load_der_x509_csr(der.replace(b"ann", b"bob")).public_bytes(Encoding.PEM)
        (here / "bob.csr").write_bytes(other)
        assert "is not signed with the key that it names" in refused(say, "sign", "ca", "bob.csr", "--name", "bob")

    def test_a_stranger_does_not_get_the_name_of_a_client(self, say: Keys, ca: Path) -> None:
        signed(say, "ann")
        say("request", "ann", "--out", "eve")
        assert refused(say, "sign", "ca", "eve/ann.csr", "--name", "ann") == (
            "'ann' has a certificate already: if its owner asks for a renewal, sign with --renew; if not, eve/ann.csr "
            "is of somebody who wants to pass for 'ann'"
        )

    def test_nobody_holds_the_keys_of_both_servers(self, say: Keys, ca: Path, here: Path) -> None:
        """The roles are signed apart, and one key is never signed for two parties."""
        key = authority.new_key()
        for name in ("train", "fed"):
            (here / f"{name}.csr").write_bytes(request_of(Identity("server", name), key))
        both = ("train.csr", "fed.csr", "--name", "train", "--name", "fed")
        assert refused(say, "sign", "ca", *both, "--role", "train").startswith("fed.csr asks for the role fed")
        say("sign", "ca", "train.csr", "--role", "train", "--name", "train")
        assert refused(say, "sign", "ca", "fed.csr", "--role", "fed", "--name", "fed") == (
            "fed.csr has the key of 'train'; every party has a key of its own"
        )

    def test_servers_get_the_list_of_clients_and_their_hosts(self, say: Keys, ca: Path) -> None:
        train = signed(say, "train", "--server", "train.example.org")
        assert authority.hosts_in(load_certificate(train / "cert.pem", "")) == ["train.example.org"]
        signed(say, "ann")
        signed(say, "bob")
        assert Register.read(ca / "train/clients.toml").clients == {"ann": 0, "bob": 1}
        assert not (ca / "fed").exists()
        assert "--server goes into the certificate of a server" in refused(
            say, "sign", "ca", "ann/ann.csr", "--server", "a.example"
        )

    def test_several_at_once_and_their_days(self, say: Keys, ca: Path) -> None:
        for name in ("ann", "bob"):
            say("request", name)
        two = ("sign", "ca", "ann/ann.csr", "bob/bob.csr", "--name", "ann", "--name", "bob")
        assert "is beyond the CA" in refused(say, *two, "--days", "3651")
        assert Register.read(ca / "clients.toml").clients == {}
        say(*two, "--days", "30")
        ends = Credentials.load(received("bob")).expires
        assert abs(ends - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=10)
        text = refused(say, "sign", "ca", *["ann/ann.csr"] * 2, "--name", "ann", "--name", "ann", "--renew")
        assert text == "two requests are of 'ann'; sign only the one that its owner has now"


class TestRenewal:
    def test_a_new_key_under_the_same_number_while_the_old_one_is_in_use(self, say: Keys, ca: Path) -> None:
        signed(say, "eve")
        ann = signed(say, "ann")
        before = Credentials.load(ann)
        say("request", "--renew", "--out", "ann")
        assert Credentials.load(ann) == before
        assert "'ann' has a certificate already" in refused(say, "sign", "ca", "ann/ann.csr", "--name", "ann")
        say("sign", "ca", "ann/ann.csr", "--name", "ann", "--renew")
        after = Credentials.load(received("ann"))
        assert after.key not in (before.key, b"") and after.certificate != before.certificate
        assert Register.read(ca / "clients.toml").number("ann") == 1

    def test_it_can_be_done_again_and_again(self, say: Keys, ca: Path) -> None:
        seen = {Credentials.load(signed(say, "ann")).key}
        for _ in range(3):
            say("request", "ann", "--renew")
            say("sign", "ca", "ann/ann.csr", "--name", "ann", "--renew")
            seen.add(Credentials.load(received("ann")).key)
        assert len(seen) == 4
        assert sorted(path.name for path in Path("ann").glob("*key.pem")) == ["key.pem", "next.key.pem"]

    def test_a_request_that_waits_is_not_lost(self, say: Keys, ca: Path) -> None:
        signed(say, "ann")
        say("request", "ann", "--renew")
        assert refused(say, "request", "ann", "--renew").startswith("ann/ann.csr waits for its certificate")

    def test_a_key_in_the_folder_of_a_trial_is_renewed_there(self, say: Keys, here: Path) -> None:
        say("trial", "t", "--clients", "ann")
        before = Credentials.load(here / "t/clients/ann")
        say("request", "--renew", "--out", "t/clients/ann")
        say("sign", "t", "t/clients/ann/ann.csr", "--name", "ann", "--renew")
        assert Credentials.load(here / "t/clients/ann").key != before.key

    def test_a_server_keeps_its_hosts_unless_told_others(self, say: Keys, ca: Path) -> None:
        signed(say, "train", "--server", "a.example", "--server", "10.0.0.7")
        for more, hosts in (([], ["a.example", "10.0.0.7"]), (["--server", "b.example"], ["b.example"])):
            say("request", "--renew", "--out", "train")
            say("sign", "ca", "train/train.csr", "--role", "train", "--name", "train", "--renew", *more)
            assert authority.hosts_in(load_certificate(received("train") / "cert.pem", "")) == hosts

    def test_nothing_to_renew(self, say: Keys, ca: Path) -> None:
        say("request", "ann")
        text = refused(say, "sign", "ca", "ann/ann.csr", "--name", "ann", "--renew")
        assert text == "'ann' has no certificate to renew; sign without --renew"

    def test_a_revoked_client_gets_no_other_certificate(self, say: Keys, ca: Path) -> None:
        signed(say, "ann")
        text = say("revoke", "ca", "ann")
        assert "copy ca/clients.toml to the folder of each server" in text
        say("request", "ann", "--renew")
        for renew in ([], ["--renew"]):
            assert refused(say, "sign", "ca", "ann/ann.csr", "--name", "ann", *renew) == (
                "client 'ann' was revoked and gets no certificate; it needs another name"
            )


class TestList:
    def test_it_shows_everyone_and_warns_before_a_certificate_expires(self, say: Keys, ca: Path) -> None:
        signed(say, "train")
        signed(say, "ann")
        signed(say, "bob", "--days", "13")
        signed(say, "eve")
        say("revoke", "ca", "eve")
        soon = f"{datetime.now(UTC) + timedelta(days=13):%Y-%m-%d}"
        text = say("list", "ca")
        assert f"bob client 1 expires soon {soon} ca/clients/bob" in text
        assert f"warning: the certificate of bob expires on {soon}; its owner renews it with" in text
        rows = json.loads(CliRunner().invoke(keys, ["list", "ca", "--json"]).stdout)["parties"]
        assert [(row["name"], row["role"], row["number"], row["state"]) for row in rows] == [
            ("train", "server", None, "valid"),
            ("ann", "client", 0, "valid"),
            ("bob", "client", 1, "expires soon"),
            ("eve", "client", 2, "revoked"),
        ]

    def test_a_slip_in_the_name_of_the_folder_makes_no_ca(self, say: Keys, here: Path) -> None:
        for words in (["list", "kesy"], ["revoke", "kesy", "ann"]):
            assert refused(say, *words).startswith("kesy/clients.toml is not there")
        assert not (here / "kesy").exists()


def test_a_trial_says_what_it_is(say: Keys, here: Path) -> None:
    text = say("trial", "keys", "--clients", "2", "--days", "30")
    ends = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}"
    assert f"train server – valid {ends} keys/train" in text
    assert f"client-2 client 1 valid {ends} keys/clients/client-2" in text
    assert "All private keys are in keys, so it is for trials only." in text


def test_the_command_says_which_package_is_missing(say: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, requests.__name__)
    monkeypatch.delattr("cutlayer.remote.identity.requests")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    assert refused(say, "request", "ann") == (
        "cutlayer keys needs cryptography, which is not installed; pip install 'cutlayer[deploy]'"
    )


def test_a_group_without_a_command_shows_its_help() -> None:
    text = CliRunner().invoke(keys, []).output
    assert "cutlayer keys init ca" in text and "cutlayer keys trial keys --clients ann,bob" in text
    assert isinstance(keys, typer.Typer)
