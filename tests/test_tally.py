"""What a device has given is counted in files that outlive its process, and a damaged one is never taken for none."""

import json
import os
from datetime import date
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import SEED, clients_of, images
from in_process import terms
from test_engines_agree import CASES
from test_remote import method_of

from cutlayer.core import keys
from cutlayer.errors import ConfigError, LawError
from cutlayer.remote.device.audit import Audit
from cutlayer.remote.device.terms import Allowance, Attempts, Day, Terms, UsedUp
from cutlayer.remote.joining.join import DeviceSettings
from cutlayer.remote.protocol.messages import Work

NOV_19, NOV_20 = date(2026, 11, 19), date(2026, 11, 20)
DAMAGED = (
    "{} is damaged and no longer tells what this device has given; put back a copy, or delete it to count from zero"
)


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """The attempts of a device that has played the first round twice."""
    attempts = Attempts(20, 2, tmp_path / "state" / "attempts")
    for _ in range(2):
        attempts.check(0, tests=False)
        attempts.count(0, tests=False)
    return tmp_path / "state" / "attempts"


def test_attempts_outlive_a_restart(counted: Path) -> None:
    again = Attempts(20, 2, counted)
    with pytest.raises(UsedUp):
        again.check(0, tests=False)
    again.check(0, tests=True)
    again.check(1, tests=False)
    assert json.loads(counted.read_text()) == {"training in round 1": 2}
    assert [path.name for path in counted.parent.iterdir()] == ["attempts"]
    assert (counted.stat().st_mode & 0o777, counted.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_run_of_another_length_counts_in_the_same_file(counted: Path) -> None:
    short, long = Attempts(20, 3, counted), Attempts(40, 3, counted)
    for attempts in (short, long):
        attempts.check(0, tests=False)
    long.count(0, tests=False)
    with pytest.raises(UsedUp):
        short.check(0, tests=False)


@pytest.mark.parametrize("change", [*range(26), "longer", "no numbers", "negative", "list"])
def test_attempts_in_a_damaged_file_are_not_counted_anew(counted: Path, change: int | str) -> None:
    whole = counted.read_bytes()
    assert len(whole) == 26
    others = {"longer": whole + b"\0", "no numbers": b'{"a": true}', "negative": b'{"a": -1}', "list": b"[]"}
    counted.write_bytes(whole[:change] if isinstance(change, int) else others[change])
    with pytest.raises(ConfigError) as refused:
        Attempts(20, 2, counted)
    assert str(refused.value) == DAMAGED.format(counted)


def test_attempts_that_cannot_be_read_are_not_counted_anew(counted: Path) -> None:
    counted.unlink()
    counted.mkdir()
    with pytest.raises(ConfigError) as refused:
        Attempts(20, 2, counted)
    assert str(refused.value) == f"{counted} cannot be read: Is a directory; check who owns it and its mode"


def test_a_process_does_not_forget_what_it_has_counted(counted: Path) -> None:
    running = Attempts(20, 2, counted)
    counted.unlink()
    with pytest.raises(UsedUp):
        running.check(0, tests=False)


def test_an_attempt_is_on_the_disk_before_it_is_played(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    Attempts(20, 2, counted).count(3, tests=False)
    assert synced == [counted.stat().st_ino, counted.parent.stat().st_ino]


def test_a_server_does_not_learn_where_a_device_has_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("this is no folder")
    file = tmp_path / "state" / "attempts"
    with pytest.raises(LawError) as told:
        Attempts(20, 2, file).count(0, tests=False)
    assert str(told.value) == "this device cannot count what it gives; its own log says why"

    audit, full = Audit(tmp_path / "sent.jsonl"), Mock(**{"write.side_effect": OSError(28, "No space left on device")})
    monkeypatch.setattr(audit, "_lines", full)
    with pytest.raises(LawError) as told:
        audit.leaving(0, "train", [], [])
    assert str(told.value) == "this device cannot record what leaves it; its own log says why"
    assert caplog.messages == [
        f"{file} cannot be written: File exists",
        f"{audit.file} cannot be written: No space left on device",
    ]


class TestDay:
    def test_its_seconds_outlive_a_restart_but_not_the_day(self, tmp_path: Path) -> None:
        file = tmp_path / "state" / "day"
        assert Day(file, lambda: NOV_19).worked(30.5) == 30.5
        assert json.loads(file.read_text()) == {"2026-11-19": 30.5}
        assert file.stat().st_mode & 0o777 == 0o600
        assert Day(file, lambda: NOV_19).worked(2) == 32.5
        assert Day(file, lambda: NOV_20).seconds == 0
        assert Day(file, lambda: NOV_20).worked(2) == 2
        assert json.loads(file.read_text()) == {"2026-11-20": 2}

    def test_short_pieces_of_work_are_written_once_a_second(self, tmp_path: Path) -> None:
        day = Day(tmp_path / "day", lambda: NOV_19)
        kept = [(day.worked(0.375), Day(tmp_path / "day", lambda: NOV_19).seconds) for _ in range(6)]
        assert kept == [(0.375, 0), (0.75, 0), (1.125, 1.125), (1.5, 1.125), (1.875, 1.125), (2.25, 2.25)]

    def test_it_ends_while_the_device_works(self) -> None:
        today = iter([NOV_19, NOV_19, NOV_19, NOV_20])
        day = Day(None, lambda: next(today))
        assert [day.worked(10), day.worked(20), day.worked(5)] == [10, 30, 5]

    def test_a_damaged_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "day").write_text("")
        with pytest.raises(ConfigError) as refused:
            Day(tmp_path / "day")
        assert str(refused.value) == DAMAGED.format(tmp_path / "day")

    def test_a_device_counts_in_its_state_if_its_owner_limits_the_day(self, tmp_path: Path) -> None:
        config = tmp_path / "ward.toml"
        config.write_text('data = "digits"\nclients = 4\nmodel = "mlp"\ncut = 1\nmethod = "sfl_v1"\n')
        files = []
        for seconds in (60.0, inf):
            allowance = Allowance(day_seconds=seconds)
            settings = DeviceSettings(data="digits", config=config, state=tmp_path / "state", allowance=allowance)
            own = settings.rehearsed().terms
            assert own is not None
            files.append(own.day.file)
        assert files == [tmp_path / "state" / "day", None]


def test_work_beyond_the_day_does_not_begin(tmp_path: Path) -> None:
    """Nor after a restart."""
    case = CASES["sfl_v1"]
    own: Terms = terms(method_of("sfl_v1"), images(), clients_of(), case.batching, 0, SEED)
    own.allowance, file = Allowance(day_seconds=60.0), tmp_path / "day"
    key = keys.fold(SEED, "round", 0)
    work = Work(session=0, number=1, round=0, key=key, token=0, begins=True, list=0, commands=(), numbers=())
    Day(file, lambda: NOV_19).worked(60.0)
    own.day = Day(file, lambda: NOV_19)
    with pytest.raises(LawError, match=r"^this device works at most 60 seconds a day$"):
        own.begun(work)
    own.day = Day(file, lambda: NOV_20)
    own.begun(work)
