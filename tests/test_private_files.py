"""Specifies who may read what a server and a device write, and that two of them never write in one folder."""

import os
import stat
from pathlib import Path

import pytest
from test_grpc_faults import RUN

from cutlayer.cli.private import private_files, warn_if_shared
from cutlayer.errors import CheckpointError
from cutlayer.remote.device.store import reserved
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.server import serve as server
from cutlayer.runs.folder import Folder


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_private_inside_the_block_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with private_files():
            (tmp_path / "a" / "b").mkdir(parents=True)
            (tmp_path / "a" / "b" / "c").write_text("")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("a", "a/b", "a/b/c")]
    assert modes == [0o700, 0o700, 0o600]


def test_a_run_folder_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_shared(tmp_path / "nothing")
    tmp_path.chmod(0o700)
    warn_if_shared(tmp_path)
    assert caplog.messages == []
    tmp_path.chmod(0o750)
    warn_if_shared(tmp_path)
    assert caplog.messages == [f"{tmp_path} can be read by other users of this machine; run: chmod -R go= {tmp_path}"]


def test_a_second_server_is_refused_before_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "listen", lambda *_: pytest.fail("it listens"))
    board = Board(name="small", method="sfl_v1", rounds=RUN.rounds)
    with Folder(tmp_path).guarded() as hold:
        hold()
        for overwrite in (False, True):
            with pytest.raises(CheckpointError) as refused:
                server.serve(RUN, Folder(tmp_path), server.Serving(), board, overwrite=overwrite)
            assert str(refused.value) == (
                f"{tmp_path} is in use: another process trains this run; wait until it ends, or choose another --out"
            )


def test_two_devices_do_not_share_what_they_keep(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with reserved(folder):
        with (
            pytest.raises(CheckpointError, match="is in use: another process has joined as this device; stop it"),
            reserved(folder),
        ):
            pass
        with reserved(tmp_path / "other"), reserved(None):
            pass
    with reserved(folder):
        pass


def test_a_device_that_cannot_keep_anything_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with reserved(tmp_path / "file" / "state"):
        pass
    assert "cannot be made (Not a directory): what this device keeps is lost when it stops" in caplog.messages[0]
