"""What the folder of a CA holds, with all keys of a trial, and what it refuses; the list of clients."""

import os
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from cutlayer.errors import ConfigError, LinkError
from cutlayer.remote.identity import certificates, key_folder, requests
from cutlayer.remote.identity.certificates import Identity
from cutlayer.remote.identity.key_folder import Party
from cutlayer.remote.identity.register import Register
from cutlayer.remote.identity.trial import client_names, trial

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The keys of two servers and two clients."""
    trial(tmp_path / "keys", "ann,bob")
    return tmp_path / "keys"


def states(parties: list[Party]) -> dict[str, str]:
    return {party.who.name: party.state for party in parties}


def read(folder: Path) -> x509.Certificate:
    return certificates.load_certificate(folder / "cert.pem", "")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, by its path within the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestFolder:
    def test_each_folder_holds_what_its_owner_needs_and_no_more(self, folder: Path) -> None:
        server, client = ("ca.pem", "cert.pem", "key.pem", "clients.toml"), ("ca.pem", "cert.pem", "key.pem")
        assert contents(folder).keys() == {
            *("ca.pem", "ca.key", "clients.toml"),
            *(f"{name}/{file}" for name in ("train", "fed") for file in server),
            *(f"clients/{name}/{file}" for name in ("ann", "bob") for file in client),
        }

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_all_files_and_folders_are_their_owners_alone_whatever_the_umask(self, tmp_path: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            trial(tmp_path / "keys", "ann,bob")
            key_folder.revoke(tmp_path / "keys", ["bob"])
            request = requests.renew(tmp_path / "keys/clients/ann")
            ca, terms = key_folder.read_ca(tmp_path / "keys"), key_folder.SigningTerms(renew=True)
            key_folder.sign(tmp_path / "keys", ca, [request], terms)
            requests.make(tmp_path / "dave", Identity("client", "dave"))
            key_folder.create(tmp_path / "ca", None)
        finally:
            os.umask(before)
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
        assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
        assert {path.name: mode for path, mode in modes.items() if path.is_file()} == dict.fromkeys(
            ["ca.key", "ca.pem", "clients.toml", "cert.pem", "key.pem", "next.key.pem", "ann.csr", "dave.csr"], 0o600
        )

    def test_the_chain_holds_for_the_purpose_and_the_names(self, folder: Path) -> None:
        policy = verification.PolicyBuilder().store(
            verification.Store([certificates.load_certificate(folder / "ca.pem", "")])
        )
        for server in ("train", "fed"):
            for name in (x509.DNSName("localhost"), x509.DNSName(f"{server}.cutlayer.internal")):
                policy.build_server_verifier(name).verify(read(folder / server), [])
        for party in ("train", "fed", "clients/ann", "clients/bob"):
            verified = policy.build_client_verifier().verify(read(folder / party), [])
            name = party.removeprefix("clients/")
            role = "client" if party.startswith("clients") else "server"
            assert x509.UniformResourceIdentifier(f"cutlayer://{role}/{name}") in verified.subjects
        with pytest.raises(verification.VerificationError):
            policy.build_server_verifier(x509.DNSName("fed.cutlayer.internal")).verify(read(folder / "train"), [])

    @pytest.mark.parametrize(("party", "purposes"), [("clients/ann", {CLIENT}), ("train", {CLIENT, SERVER})])
    def test_only_servers_may_serve_and_nobody_may_sign(
        self, folder: Path, party: str, purposes: set[x509.ObjectIdentifier]
    ) -> None:
        extensions = read(folder / party).extensions
        assert set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == purposes
        assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign

    def test_certificates_last_as_long_as_asked_and_the_ca_ten_years(self, folder: Path) -> None:
        now = datetime.now(UTC)
        ca, ann = certificates.load_certificate(folder / "ca.pem", ""), read(folder / "clients/ann")
        assert abs(ca.not_valid_after_utc - now - timedelta(days=3650)) < timedelta(minutes=10)
        assert abs(ann.not_valid_after_utc - now - timedelta(days=365)) < timedelta(minutes=10)
        trial(folder, "carol", days=30)
        carol = read(folder / "clients/carol")
        assert abs(carol.not_valid_after_utc - now - timedelta(days=30)) < timedelta(minutes=10)

    def test_more_clients_leave_every_other_key_alone(self, folder: Path) -> None:
        before = contents(folder)
        parties = trial(folder, "carol,ann")
        after = contents(folder)
        assert {path for path in before if after[path] != before[path]} == {
            "clients.toml", "train/clients.toml", "fed/clients.toml"
        }  # fmt: skip
        assert states(parties) == {"carol": "valid"}
        for place in (folder, folder / "train", folder / "fed"):
            assert Register.read(place / "clients.toml").clients == {"ann": 0, "bob": 1, "carol": 2}
        read(folder / "clients/carol").verify_directly_issued_by(certificates.load_certificate(folder / "ca.pem", ""))

    def test_the_number_of_a_revoked_client_is_never_given_again(self, folder: Path) -> None:
        assert states(key_folder.revoke(folder, ["bob"])) == {"bob": "revoked"}
        assert trial(folder, "carol")[0].number == 2
        key_folder.revoke(folder, ["carol"])
        assert trial(folder, "dave")[0].number == 3
        assert states(key_folder.parties(folder)) == {
            "train": "valid", "fed": "valid", "ann": "valid", "dave": "valid", "bob": "revoked", "carol": "revoked"
        }  # fmt: skip
        for server in ("train", "fed"):
            register = Register.read(folder / server / "clients.toml")
            assert (register.clients, register.revoked) == ({"ann": 0, "dave": 3}, {"bob": 1, "carol": 2})

    def test_numbered_clients_sort_and_keep_their_digits(self) -> None:
        nobody = Register()
        assert client_names("4", nobody) == ["client-1", "client-2", "client-3", "client-4"]
        ten = client_names("10", nobody)
        assert (ten[0], ten[9], sorted(ten)) == ("client-01", "client-10", ten)
        known = nobody.adding(["client-1", "client-2"]).revoking(["client-2"])
        assert client_names("10", known)[:2] == ["client-1", "client-3"]


LETTERS = "it must be of letters, digits and -_. only, begin with a letter or digit, and have at most 64 of them"


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ("an na", f"'an na' cannot be the name of a client: {LETTERS}"),
        ("../x", f"'../x' cannot be the name of a client: {LETTERS}"),
        ("..", f"'..' cannot be the name of a client: {LETTERS}"),
        ("carol,", f"'' cannot be the name of a client: {LETTERS}"),
        ("x" * 65, f"'{'x' * 65}' cannot be the name of a client: {LETTERS}"),
        ("josé", f"'josé' cannot be the name of a client: {LETTERS}"),
        (
            "carol,7",
            "'7' cannot be the name of a client: it reads like a number of clients; add a letter",
        ),
        ("fed", "'fed' cannot be the name of a client: the servers are called train and fed"),
        ("Train", "'Train' cannot be the name of a client: the servers are called train and fed"),
        ("carol,carol", "--clients has 'carol' twice; every client has a name of its own"),
        ("Ann", "clients 'ann' and 'Ann' differ in capitals only; choose another name"),
        ("0", "--clients 0 is no number of clients; give one from 1 up, or their names"),
]
)  # fmt: skip
def test_a_mistake_changes_nothing(folder: Path, clients: str, message: str) -> None:
    before = contents(folder)
    with pytest.raises(ConfigError) as refused:
        trial(folder, clients)
    assert str(refused.value) == message
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["eve"], "client 'eve' cannot be revoked: it is not in the list of clients"),
        (["bob", "bob"], "client 'bob' cannot be revoked: it is revoked already"),
        (["fed"], "the fed server cannot be revoked; make a new CA in another folder instead"),
    ],
)
def test_a_mistake_in_a_revocation_changes_nothing(folder: Path, names: list[str], message: str) -> None:
    before = contents(folder)
    with pytest.raises(ConfigError) as refused:
        key_folder.revoke(folder, names)
    assert str(refused.value) == message
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("a.example:50051", "is neither a host name nor an IP address; give it without scheme, port or brackets"),
        ("10.0.0.256", "is neither a host name nor an IP address; give it without scheme, port or brackets"),
        ("train.cutlayer.internal", "names under cutlayer.internal stand for the roles of servers; give another"),
    ],
)
def test_a_mistake_in_a_host_makes_nothing(tmp_path: Path, host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        trial(tmp_path / "keys", "ann", [host])
    assert not (tmp_path / "keys").exists()


class TestBrokenFolders:
    def test_a_key_that_is_there_is_not_overwritten(self, folder: Path) -> None:
        (folder / "ca.pem").unlink()
        message = f"{folder / 'ca.key'} is there already and is not overwritten; move it away, or choose another folder"
        with pytest.raises(ConfigError, match=re.escape(message)):
            trial(folder)
        (folder / "ca.key").unlink()
        with pytest.raises(ConfigError, match=re.escape(f"{folder / 'train/key.pem'} is there already and is not")):
            trial(folder)
        assert not (folder / "ca.key").exists()

    def test_without_the_key_of_the_ca_nothing_can_be_signed(self, folder: Path) -> None:
        (folder / "ca.key").unlink()
        with pytest.raises(ConfigError, match=re.escape(f"{folder / 'ca.key'} is not there; put it back from a copy")):
            trial(folder, "carol")

    def test_no_certificate_outlives_its_ca(self, folder: Path, tmp_path: Path) -> None:
        message = r"--days 3651 is beyond the CA, which expires on \d{4}-\d\d-\d\d; give at most 36(49|50)$"
        with pytest.raises(ConfigError, match=message):
            trial(folder, "carol", days=3651)
        assert "carol" not in Register.read(folder / "clients.toml").clients
        with pytest.raises(ConfigError, match=message):
            trial(tmp_path / "other", days=3651)
        assert not (tmp_path / "other").exists()

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("")
        with pytest.raises(ConfigError, match=r"^keys could not be written to .+: File exists; mend that or choose"):
            trial(tmp_path / "keys")


class TestRegister:
    def test_strangers_are_refused_with_the_reason(self) -> None:
        register = Register().adding(["ann", "bob"]).revoking(["ann"])
        assert register.number("bob") == 1
        with pytest.raises(LinkError) as revoked:
            register.number("ann")
        assert str(revoked.value) == (
            "client 'ann' was revoked; to take part again it needs a certificate under a new name"
        )
        with pytest.raises(LinkError) as unknown:
            register.number("eve")
        assert str(unknown.value) == (
            "client 'eve' is not in this server's list of clients; sign its request with `cutlayer keys sign` and copy "
            "the new clients.toml to the servers"
        )

    def test_the_register_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        register = Register(samples={"c": 600}).adding(["a.b", "c", "d_e"]).revoking(["c"])
        (tmp_path / "clients.toml").write_text(register.as_toml())
        assert Register.read(tmp_path / "clients.toml") == register
        assert register.as_toml().endswith('[samples]\n"c" = 600\n')
        assert "[samples]" not in Register().as_toml()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "[clients]\nann = 0\nbob = 0\n[revoked]",
                "{} has the number 0 twice; copy it again from the folder of the CA",
            ),
            (
                "[clients]\nann = 0\n[revoked]\nann = 1\n",
                "{} has the name 'ann' twice; copy it again from the folder of the CA",
            ),
            (
                "[clients]\nann = true\n[revoked]",
                "{}: 'ann' = True is not the name of a client and its number, from 0 up",
            ),
            (
                "[clients]\ntrain = 0\n[revoked]",
                "{}: 'train' = 0 is not the name of a client and its number, from 0 up",
            ),
            (
                "ann = 0\n",
                "{} must have the tables [clients] and [revoked], each of lines name = number, and may have [samples]",
            ),
            ("", "{} must have the tables [clients] and [revoked], each of lines name = number, and may have"),
            (
                "[clients]\nann = 0\n[revoked]\n[samples]\nann = 0\n",
                "{}: 'ann' = 0 in [samples] is not a client of the list and its samples",
            ),
            (
                "[clients]\nann = 0\n[revoked]\n[samples]\neve = 5\n",
                "{}: 'eve' = 5 in [samples] is not a client of the list and its samples",
            ),
            ("samples = 3\n[clients]\n[revoked]\n", "{} must have the tables [clients] and [revoked], each of lines"),
            ("[clients", "{} is damaged: "),
        ],
    )
    def test_a_list_that_was_edited_badly_lets_nobody_in(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "clients.toml"
        path.write_text(text)
        with pytest.raises(ConfigError) as refused:
            Register.read(path)
        assert str(refused.value).startswith(message.format(path))

    def test_a_list_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            Register.read(tmp_path / "clients.toml")
        assert str(refused.value) == (
            f"{tmp_path / 'clients.toml'} is not there; a server needs the list of clients that `cutlayer keys` writes "
            "beside its certificate: copy it here, too"
        )
