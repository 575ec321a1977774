"""What `cutlayer keys` leaves in a folder, what it says about it, and what it refuses."""

import json
import re
import shutil
import stat
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from cryptography import x509
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from cutlayer.cli.identity import keys
from cutlayer.errors import ConfigError, LinkError
from cutlayer.remote.identity import authority, certificates, key_folder
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.identity.key_folder import Asked, Party, carry_out
from cutlayer.remote.identity.register import Register

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The keys of two servers and two clients."""
    carry_out(tmp_path / "keys", Asked(clients="ann,bob"))
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

    def test_private_keys_and_folders_are_their_owners_alone(self, folder: Path) -> None:
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
        assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
        assert {mode for path, mode in modes.items() if path.name in ("ca.key", "key.pem")} == {0o600}

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
        carry_out(folder, Asked(renew=["ann"], days=30))
        assert abs(read(folder / "clients/ann").not_valid_after_utc - now - timedelta(days=30)) < timedelta(minutes=10)

    def test_more_clients_leave_every_other_key_alone(self, folder: Path) -> None:
        before = contents(folder)
        parties = carry_out(folder, Asked(clients="carol,ann"))
        after = contents(folder)
        assert {path for path in before if after[path] != before[path]} == {
            "clients.toml", "train/clients.toml", "fed/clients.toml"
        }  # fmt: skip
        assert states(parties) == {
            "train": "as before", "fed": "as before", "ann": "as before", "bob": "as before", "carol": "new"
        }  # fmt: skip
        for place in (folder, folder / "train", folder / "fed"):
            assert Register.read(place / "clients.toml").clients == {"ann": 0, "bob": 1, "carol": 2}
        read(folder / "clients/carol").verify_directly_issued_by(certificates.load_certificate(folder / "ca.pem", ""))

    def test_a_renewal_makes_a_new_key_for_the_same_name_and_number(self, folder: Path) -> None:
        before = contents(folder)
        assert states(carry_out(folder, Asked(renew=["ann", "train"])))["train"] == "renewed"
        after = contents(folder)
        changed = {path for path in after if after[path] != before[path]}
        assert changed == {"clients/ann/cert.pem", "clients/ann/key.pem", "train/cert.pem", "train/key.pem"}
        assert Credentials.load(folder / "clients/ann").name == "ann"
        assert Register.read(folder / "clients.toml").number("ann") == 0

    def test_a_renewed_server_keeps_its_hosts_unless_told_others(self, tmp_path: Path) -> None:
        folder = tmp_path / "keys"
        carry_out(folder, Asked(hosts=["a.example", "10.0.0.7", "fe80::1"]))
        carry_out(folder, Asked(renew=["train"]))
        assert authority.hosts_in(read(folder / "train")) == ["a.example", "10.0.0.7", "fe80::1"]
        carry_out(folder, Asked(renew=["train"], hosts=["b.example"]))
        assert authority.hosts_in(read(folder / "train")) == ["b.example"]
        assert authority.hosts_in(read(folder / "fed")) == ["a.example", "10.0.0.7", "fe80::1"]

    def test_the_number_of_a_revoked_client_is_never_given_again(self, folder: Path) -> None:
        parties = carry_out(folder, Asked(revoke=["bob"], clients="carol"))
        assert states(parties) | {"bob": "revoked", "carol": "new"} == states(parties)
        assert carry_out(folder, Asked(revoke=["carol"], clients="dave"))[3].number == 3
        for server in ("train", "fed"):
            register = Register.read(folder / server / "clients.toml")
            assert (register.clients, register.revoked) == ({"ann": 0, "dave": 3}, {"bob": 1, "carol": 2})

    def test_a_key_that_was_moved_away_is_not_made_again_in_silence(self, folder: Path) -> None:
        shutil.rmtree(folder / "clients/ann")
        assert carry_out(folder, Asked(clients="ann"))[2].expires is None
        assert not (folder / "clients/ann").exists()
        assert carry_out(folder, Asked(renew=["ann"]))[2].expires is not None

    def test_numbered_clients_sort_and_keep_their_digits(self) -> None:
        nobody = Register()
        assert key_folder.client_names("4", nobody) == ["client-1", "client-2", "client-3", "client-4"]
        ten = key_folder.client_names("10", nobody)
        assert (ten[0], ten[9], sorted(ten)) == ("client-01", "client-10", ten)
        known = nobody.adding(["client-1", "client-2"]).revoking(["client-2"])
        assert key_folder.client_names("10", known)[:2] == ["client-1", "client-3"]


LETTERS = "it must be of letters, digits and -_. only, begin with a letter or digit, and have at most 64 of them"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(clients="an na"), f"'an na' cannot be the name of a client: {LETTERS}"),
        (Asked(clients="../x"), f"'../x' cannot be the name of a client: {LETTERS}"),
        (Asked(clients=".."), f"'..' cannot be the name of a client: {LETTERS}"),
        (Asked(clients="carol,"), f"'' cannot be the name of a client: {LETTERS}"),
        (Asked(clients="x" * 65), f"'{'x' * 65}' cannot be the name of a client: {LETTERS}"),
        (Asked(clients="josé"), f"'josé' cannot be the name of a client: {LETTERS}"),
        (
            Asked(clients="carol,7"),
            "'7' cannot be the name of a client: it reads like a number of clients; add a letter",
        ),
        (Asked(clients="fed"), "'fed' cannot be the name of a client: the servers are called train and fed"),
        (Asked(clients="Train"), "'Train' cannot be the name of a client: the servers are called train and fed"),
        (Asked(clients="carol,carol"), "--clients has 'carol' twice; every client has a name of its own"),
        (Asked(clients="Ann"), "clients 'ann' and 'Ann' differ in capitals only; choose another name"),
        (Asked(clients="0"), "--clients 0 is no number of clients; give one from 1 up, or their names"),
        (
            Asked(clients="bob", revoke=["bob"]),
            "client 'bob' was revoked, and its name is not given again; choose another name",
        ),
        (Asked(revoke=["eve"]), "client 'eve' cannot be revoked: it is not in the list of clients"),
        (Asked(revoke=["bob", "bob"]), "client 'bob' cannot be revoked: it is revoked already"),
        (Asked(revoke=["fed"]), "the fed server cannot be revoked; make a new CA in another folder instead"),
        (Asked(renew=["eve"]), "there is no client 'eve' to renew; add it with --clients eve"),
        (
            Asked(renew=["bob"], revoke=["bob"]),
            "client 'bob' was revoked and cannot be renewed; add one of another name",
        ),
        (
            Asked(hosts=["a.example"]),
            "--server goes into the certificates of the servers, which are made already; add --renew train --renew fed",
        ),
        (
            Asked(hosts=["a.example:50051"], renew=["train"]),
            "--server 'a.example:50051' is neither a host name nor an IP address; give it without scheme, port or "
            "brackets",
        ),
        (
            Asked(hosts=["10.0.0.256"], renew=["train"]),
            "--server '10.0.0.256' is neither a host name nor an IP address; give it without scheme, port or brackets",
        ),
        (
            Asked(hosts=["train.cutlayer.internal"], renew=["fed"]),
            "--server 'train.cutlayer.internal': names under cutlayer.internal stand for the roles of servers; give "
            "another",
        ),
    ],
)  # fmt: skip
def test_a_mistake_changes_nothing(folder: Path, asked: Asked, message: str) -> None:
    before = contents(folder)
    with pytest.raises(ConfigError) as refused:
        carry_out(folder, asked)
    assert str(refused.value) == message
    assert contents(folder) == before


class TestBrokenFolders:
    def test_a_slip_in_the_name_of_the_folder_makes_no_ca(self, tmp_path: Path) -> None:
        message = f"there is no CA in {tmp_path / 'kesy'}, so nothing to renew or revoke; check the name of the folder"
        with pytest.raises(ConfigError, match=re.escape(message)):
            carry_out(tmp_path / "kesy", Asked(revoke=["ann"]))
        assert not (tmp_path / "kesy").exists()

    def test_a_key_that_is_there_is_not_overwritten(self, folder: Path) -> None:
        (folder / "ca.pem").unlink()
        message = f"{folder / 'ca.key'} is there already and is not overwritten; move it away, or choose another folder"
        with pytest.raises(ConfigError, match=re.escape(message)):
            carry_out(folder, Asked())
        (folder / "ca.key").unlink()
        with pytest.raises(ConfigError, match=re.escape(f"{folder / 'train/key.pem'} is there already and is not")):
            carry_out(folder, Asked())
        assert not (folder / "ca.key").exists()

    def test_without_the_key_of_the_ca_nothing_can_be_signed(self, folder: Path) -> None:
        (folder / "ca.key").unlink()
        with pytest.raises(ConfigError, match=re.escape(f"{folder / 'ca.key'} is not there; put it back from a copy")):
            carry_out(folder, Asked(clients="carol"))

    def test_no_certificate_outlives_its_ca(self, folder: Path) -> None:
        message = r"--days 3651 is beyond the CA, which expires on \d{4}-\d\d-\d\d; give at most 36(49|50)$"
        with pytest.raises(ConfigError, match=message):
            carry_out(folder, Asked(clients="carol", days=3651))
        assert "carol" not in Register.read(folder / "clients.toml").clients
        carry_out(folder, Asked(revoke=["ann"], days=3651))  # which makes no certificate

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("")
        with pytest.raises(ConfigError, match=r"^keys could not be written to .+: File exists; mend that or choose"):
            carry_out(tmp_path / "keys", Asked())


class TestRegister:
    def test_strangers_are_refused_with_the_reason(self) -> None:
        register = Register().adding(["ann", "bob"]).revoking(["ann"])
        assert register.number("bob") == 1
        with pytest.raises(LinkError) as revoked:
            register.number("ann")
        assert str(revoked.value) == (
            "client 'ann' was revoked and may not join; it needs a certificate with another name"
        )
        with pytest.raises(LinkError) as unknown:
            register.number("eve")
        assert str(unknown.value) == (
            "client 'eve' is not in this server's list of clients; add it with `cutlayer keys FOLDER --clients eve` "
            "and copy the new clients.toml to the servers"
        )

    def test_the_register_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        register = Register().adding(["a.b", "c", "d_e"]).revoking(["c"])
        (tmp_path / "clients.toml").write_text(register.as_toml())
        assert Register.read(tmp_path / "clients.toml") == register

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
                "{} must have the tables [clients] and [revoked], each of lines name = number, no more",
            ),
            ("", "{} must have the tables [clients] and [revoked], each of lines name = number, no more"),
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
            "beside its certificate: copy the whole folder"
        )


class TestCommand:
    @staticmethod
    def run(*words: str) -> str:
        app = typer.Typer()
        app.command()(keys)
        result = CliRunner().invoke(app, words)
        if result.exception is not None:
            raise result.exception
        return result.output

    def test_the_command_says_what_was_made_and_what_to_copy_where(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        text = self.run("keys", "--clients", "2", "--days", "30")
        assert max(map(len, text.splitlines())) <= 80
        ends = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}"
        rows = [line.split() for line in text.splitlines()]
        assert ["train", "server", "–", "new", ends, "keys/train"] in rows
        assert ["client-2", "client", "1", "new", ends, "keys/clients/client-2"] in rows
        assert "Copy each folder whole to its owner, by a safe way: there is a private key in it." in " ".join(
            text.split()
        )
        assert "keys/ca.key stays here: whoever has it can make certificates.\n" in text

    def test_the_command_says_what_has_changed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder.parent)
        text = self.run("keys", "--revoke", "ann", "--renew", "bob")
        ends = f"{read(folder / 'clients/bob').not_valid_after_utc:%Y-%m-%d}"
        rows = [line.split() for line in text.splitlines()]
        assert ["ann", "client", "0", "revoked", ends, "–"] in rows
        assert ["bob", "client", "1", "renewed", ends, "keys/clients/bob"] in rows
        assert "2 others are as before; `cutlayer keys keys` shows all.\n" in text
        assert (
            "The list of clients has changed: copy keys/train/clients.toml and keys/fed/clients.toml to the servers."
        ) in " ".join(text.split())
        assert "The certificate before a renewal stays good until it expires." in text

    def test_without_options_the_command_lists_the_clients(self, folder: Path) -> None:
        rows = json.loads(self.run(str(folder), "--json"))["parties"]
        assert [(row["name"], row["role"], row["number"], row["state"]) for row in rows] == [
            ("train", "server", None, "as before"),
            ("fed", "server", None, "as before"),
            ("ann", "client", 0, "as before"),
            ("bob", "client", 1, "as before"),
        ]

    def test_the_command_says_which_package_is_missing(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "cutlayer.remote.identity.key_folder")
        monkeypatch.delattr("cutlayer.remote.identity.key_folder")
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
        with pytest.raises(ConfigError) as refused:
            self.run(str(folder))
        assert str(refused.value) == (
            "cutlayer keys needs cryptography, which is not installed; pip install 'cutlayer[deploy]'"
        )
