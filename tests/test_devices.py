"""Specifies the devices: pools and ranges, the server's speed, files in every form, and the words for bad ones."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlayer import registry
from cutlayer.errors import ConfigError, DataError
from cutlayer.models import resnet18
from cutlayer.planning.device_files import SAMPLE, Measured, read
from cutlayer.planning.devices import DEVICES, REFERENCE_FLOPS, Device, Devices, File, Pool, Uniform, server_speed
from cutlayer.planning.profile import profile

MANY = 20_000
MODEL = 4e6  # forward FLOPs of some model
RANGE = "two numbers above 0, the smaller one first."


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, so that messages name files as a user does."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seconds(devices: Devices, flops: float) -> list[float]:
    return [flops / device.flops for device in devices.clients]


# -- the pool --------------------------------------------------------------------------------------------------


def test_the_reference_is_the_profile_of_resnet18_on_small_images() -> None:
    assert 1_769_472 + 5 * 75_497_472 + 3 * 58_720_256 + 5_120 == 555_422_720
    assert profile(resnet18(), (3, 32, 32)).cumulative_forward_flops[-1] == REFERENCE_FLOPS == 1_110_845_440


def test_a_large_pool_has_the_medians_and_sigmas_that_were_asked_for() -> None:
    pool = Pool(seconds_median=0.05, seconds_sigma=0.4, kbits_median=2000.0, kbits_sigma=1.1)
    devices = pool.draw(MANY, MODEL, key=1)
    logs = np.log([(s, d.up) for s, d in zip(seconds(devices, REFERENCE_FLOPS), devices.clients, strict=True)])
    for column, median, sigma in ((logs[:, 0], 0.05, 0.4), (logs[:, 1], 2e6, 1.1)):
        assert abs(np.median(column) - math.log(median)) < 3 * sigma * math.sqrt(math.pi / 2 / MANY)
        assert abs(column.std() - sigma) < 3 * sigma / math.sqrt(2 * MANY)
    assert abs(np.corrcoef(logs.T)[0, 1]) < 3 / math.sqrt(MANY)  # a slow device may have a fast network


def test_without_a_spread_all_devices_are_the_median_one() -> None:
    devices = Pool(seconds_sigma=0.0, kbits_sigma=0.0).draw(3, MODEL, key=0)
    assert devices.clients == (Device(flops=REFERENCE_FLOPS / 0.034, up=59e6, down=59e6),) * 3
    assert devices.server == pytest.approx(100 * REFERENCE_FLOPS / 0.034, rel=1e-15)


def test_a_pool_is_a_function_of_its_key_and_its_first_clients_stay_when_more_join() -> None:
    few, same, more = (Pool().draw(n, MODEL, key=5) for n in (10, 10, 30))
    assert few == same
    assert more.clients[:10] == few.clients
    assert len(set(more.clients)) == 30
    assert not set(few.clients) & set(Pool().draw(10, MODEL, key=6).clients)


def test_a_model_of_twice_the_flops_takes_twice_as_long_on_the_same_devices() -> None:
    small, large = Pool().draw(5, MODEL, key=0), Pool().draw(5, 2 * MODEL, key=0)
    assert small == large
    assert seconds(large, 2 * MODEL) == [2 * s for s in seconds(small, MODEL)]


def test_the_server_needs_a_kappath_of_the_clients_mean_seconds() -> None:
    devices = Pool(kappa=40.0).draw(50, MODEL, key=2)
    assert MODEL / devices.server == pytest.approx(math.fsum(seconds(devices, MODEL)) / 50 / 40, rel=1e-14)
    # 1 s and 3 s for 12 FLOPs: 2 s on average; a mean of the speeds would be 8 FLOP/s, or 1.5 s.
    pair = (Device(flops=12.0, up=1.0, down=1.0), Device(flops=4.0, up=1.0, down=1.0))
    assert server_speed(pair, kappa=10.0) == pytest.approx(60.0, rel=1e-15)


@pytest.mark.parametrize("scheme", [Pool(model_sync=True), File(path="devices.csv", model_sync=True)])
def test_timing_the_models_transfer_is_passed_on(scheme: Pool | File, here: Path) -> None:
    (here / "devices.csv").write_text("seconds_per_sample,kbit_per_s\n1,1\n")
    assert scheme.draw(1, MODEL, key=0).model_sync is True
    assert Pool().draw(1, MODEL, key=0).model_sync is False


# -- ranges ------------------------------------------------------------------------------------------------------


def test_the_default_ranges_are_table_one() -> None:
    devices = registry.make("devices", DEVICES, "table1", {}).draw(2000, MODEL, key=3)
    assert (devices.server, devices.lanes, devices.model_sync) == (20e12, "shared", True)
    drawn = np.array([device[:5] for device in devices.clients], dtype=float)
    limits = np.array([(1e12, 2e12), (75e6, 80e6), (360e6, 380e6), (75e6, 80e6), (360e6, 380e6)])
    share = (drawn - limits[:, 0]) / (limits[:, 1] - limits[:, 0])
    assert share.min() >= 0 and share.max() < 1
    assert np.abs(share.mean(axis=0) - 1 / 2).max() < 4 * math.sqrt(1 / 12 / 2000)
    assert np.abs(np.corrcoef(share.T) - np.eye(5)).max() < 4 / math.sqrt(2000)  # the fed server's links are their own
    assert {device.memory for device in devices.clients} == {math.inf}
    between = (devices.server_up, devices.server_down)
    assert all(360e6 <= rate < 380e6 for rate in between) and len(set(between)) == 2


def test_ranges_are_a_function_of_their_key_and_the_first_clients_stay_when_more_join() -> None:
    few, same, more = (Uniform(memory_gb=(1.0, 2.0)).draw(n, MODEL, key=5) for n in (4, 4, 30))
    assert few == same
    assert more.clients[:4] == few.clients
    assert (more.server_up, more.server_down) == (few.server_up, few.server_down)
    assert len(set(more.clients)) == 30
    other = Uniform(memory_gb=(1.0, 2.0)).draw(4, 2 * MODEL, key=6)
    assert not set(few.clients) & set(other.clients) and few.server_up != other.server_up


def test_a_wider_range_moves_each_device_within_it_and_nothing_else() -> None:
    narrow, wide = Uniform().draw(6, MODEL, key=0), Uniform(tflops=(0.1, 2.0), mbits_up=(10.0, 80.0))
    for a, b in zip(narrow.clients, wide.draw(6, MODEL, key=0).clients, strict=True):
        assert (b.flops - 0.1e12) / 1.9e12 == pytest.approx((a.flops - 1e12) / 1e12, rel=1e-12)
        assert (b.up - 10e6) / 70e6 == pytest.approx((a.up - 75e6) / 5e6, rel=1e-9)
        assert (b.down, b.fed_down) == (a.down, a.fed_down)
    limited = Uniform(memory_gb=(0.5, 0.5)).draw(6, MODEL, key=0)
    assert limited.clients == tuple(device._replace(memory=4e9) for device in narrow.clients)  # bits


def test_a_range_of_one_number_is_that_number() -> None:
    same = (1.5, 1.5)
    scheme = Uniform(server_tflops=3.0, tflops=same, mbits_up=same, mbits_down=(9.0, 9.0), mbits_servers=same)
    devices = scheme.draw(2, MODEL, key=0)
    device = Device(flops=1.5e12, up=1.5e6, down=9e6, fed_up=1.5e6, fed_down=9e6)
    assert devices == Devices(
        clients=(device, device), server=3e12, lanes="shared", server_up=1.5e6, server_down=1.5e6, model_sync=True
    )


# -- what a device means -----------------------------------------------------------------------------------------


def test_seconds_of_one_sample_in_training_by_hand() -> None:
    clients = (Device(flops=100.0, up=8.0, down=16.0), Device(flops=50.0, up=32.0, down=4.0))
    devices = Devices(clients=clients, server=1e3)
    # 3 x 20 / 100 + 16 / 8 + 16 / 16 and 3 x 20 / 50 + 16 / 32 + 16 / 4
    seconds = devices.seconds_per_sample(flops_below=20.0, up_bits=16.0, down_bits=16.0)
    assert seconds == pytest.approx((3.6, 5.7), rel=1e-15)


@pytest.mark.parametrize(
    ("clients", "server", "message"),
    [
        ((), 1.0, "devices for no clients; give at least one"),
        ((Device(1.0, 1.0, 1.0),), 0.0, "the server's flops is 0.0, but it must be a number above 0."),
        (
            (Device(1.0, 1.0, 1.0), Device(1.0, math.nan, 1.0)),
            1.0,
            "up of client 1's device is nan, but it must be a number above 0.",
        ),
        (
            (Device(1.0, 1.0, 1.0, memory=0.0),),
            1.0,
            "memory of client 0's device is 0.0, but it must be a number above 0.",
        ),
        (
            (Device(1.0, 1.0, 1.0, fed_down=-2.0),),
            1.0,
            "fed_down of client 0's device is -2.0, but it must be a number above 0.",
        ),
    ],
)
def test_devices_that_make_no_sense_are_refused(clients: tuple[Device, ...], server: float, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Devices(clients=clients, server=server)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pool", {"kappa": 0.0}, "kappa is 0.0, but it must be a number above 0."),
        ("pool", {"seconds_median": -1.0}, "seconds_median is -1.0, but it must be a number above 0."),
        ("pool", {"kbits_median": math.inf}, "kbits_median is inf, but it must be a number above 0."),
        ("pool", {"seconds_sigma": -0.1}, "seconds_sigma is -0.1, but it must be a number from 0 to 10."),
        ("pool", {"kbits_sigma": 11.0}, "kbits_sigma is 11.0, but it must be a number from 0 to 10."),
        ("file", {"path": "devices.csv", "kappa": math.nan}, "kappa is nan, but it must be a number above 0."),
        ("file", {}, "devices 'file' needs path; add it"),
        (
            "file",
            {"path": "devices.csv", "kappa": 50.0, "server_tflops": 2.0},
            "kappa is 50.0 and server_tflops is 2.0, but either gives the server's speed; keep one",
        ),
        (
            "file",
            {"path": "devices.csv", "server_tflops": 0.0},
            "server_tflops is 0.0, but it must be a number above 0.",
        ),
        (
            "file",
            {"path": "devices.csv", "mbits_servers": -1.0},
            "mbits_servers is -1.0, but it must be a number above 0.",
        ),
        ("file", {"path": "devices.csv", "lanes": "one"}, "lanes is 'one', but it must be 'parallel' or 'shared'."),
        ("table1", {"lanes": "one"}, "lanes is 'one', but it must be 'parallel' or 'shared'."),
        ("table1", {"server_tflops": 0.0}, "server_tflops is 0.0, but it must be a number above 0."),
        ("table1", {"tflops": [2.0, 1.0]}, f"tflops is (2.0, 1.0), but it must be {RANGE}"),
        ("table1", {"mbits_up": [0.0, 1.0]}, f"mbits_up is (0.0, 1.0), but it must be {RANGE}"),
        ("table1", {"mbits_down": [1.0, math.inf]}, f"mbits_down is (1.0, inf), but it must be {RANGE}"),
        ("table1", {"mbits_servers": [1.0]}, f"mbits_servers is (1.0,), but it must be {RANGE}"),
        ("table1", {"memory_gb": 4.0}, f"memory_gb is 4.0, but it must be {RANGE}"),
    ],
)
def test_settings_are_checked_when_they_are_made(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.make("devices", DEVICES, name, options)
    assert str(caught.value) == message


def test_a_model_without_flops_has_no_speed_on_measured_devices() -> None:
    with pytest.raises(ConfigError, match=r"^forward_flops is 0, but it must be a number above 0\.$"):
        File(path="devices.csv").draw(1, 0, key=0)


# -- files --------------------------------------------------------------------------------------------------------

TWO = [Measured(seconds=0.5, up=1e6, down=1e6), Measured(seconds=2.0, up=8e6, down=8e6)]
BOTH_WAYS = [Measured(seconds=0.5, up=1e6, down=4e6), Measured(seconds=2.0, up=8e6, down=9e6)]
FORMS: dict[str, tuple[str, str, list[Measured]]] = {
    "csv": ("a.csv", "seconds_per_sample,kbit_per_s\n0.5,1000\n2,8e3\n", TWO),
    "other columns, spaces, blank lines and a byte order mark": (
        "a.CSV",
        '\ufeffowner, kbit_per_s ,seconds_per_sample,,\r\n"Smith, J.",1000, 0.5\r\n\r\nJones,8000,2.0\r\n',
        TWO,
    ),
    "rates for each direction": (
        "a.csv",
        "seconds_per_sample,kbit_per_s_down,kbit_per_s_up\n0.5,4000,1000\n2,9000,8000\n",
        BOTH_WAYS,
    ),
    "a rate for one direction before that for both": (
        "a.csv",
        "seconds_per_sample,kbit_per_s,kbit_per_s_down\n0.5,1000,4000\n2,8000,9000\n",
        BOTH_WAYS,
    ),
    "megabits": ("a.csv", "seconds_per_sample,mbit_per_s_up,mbit_per_s_down\n0.5,1,4\n2,8,9\n", BOTH_WAYS),
    "everything": (
        "a.csv",
        "name,tflops,mbit_per_s,fed_mbit_per_s,fed_mbit_per_s_up,memory_gb\nold phone,0.5,10,40,20,1.5\n",
        [Measured(name="old phone", flops=5e11, up=1e7, down=1e7, fed_up=2e7, fed_down=4e7, memory=1.2e10)],
    ),
    "a link to the fed server in one direction": (
        "a.csv",
        "tflops,kbit_per_s,fed_kbit_per_s_down\n0.5,10,40\n",
        [Measured(flops=5e11, up=1e4, down=1e4, fed_down=4e4)],
    ),
    "json": (
        "a.json",
        '[{"seconds_per_sample": 0.5, "kbit_per_s": 1000}, {"kbit_per_s": 8e3, "seconds_per_sample": 2, "id": 7}]',
        TWO,
    ),
    "json in which entries differ": (
        "a.json",
        '[{"name": "a", "tflops": 2, "kbit_per_s_up": 10, "kbit_per_s_down": 20}, '
        '{"seconds_per_sample": 3, "mbit_per_s": 1, "memory_gb": 2}]',
        [Measured(name="a", flops=2e12, up=1e4, down=2e4), Measured(seconds=3.0, up=1e6, down=1e6, memory=1.6e10)],
    ),
    "fedscale": (
        "a.json",
        '{"9": {"computation": 500, "communication": 1000}, "1": {"computation": 2000.0, "communication": 8000}}',
        [TWO[0]._replace(name="9"), TWO[1]._replace(name="1")],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file(form: str, here: Path) -> None:
    name, text, expected = FORMS[form]
    (here / name).write_bytes(text.encode())
    assert read(name) == expected


def test_seconds_in_a_file_are_those_of_the_runs_own_model(here: Path) -> None:
    (here / "a.csv").write_text(FORMS["rates for each direction"][1])
    devices = File(path="a.csv", kappa=10.0).draw(2, MODEL, key=0)
    assert devices.clients == (Device(flops=8e6, up=1e6, down=4e6), Device(flops=2e6, up=8e6, down=9e6))
    assert seconds(devices, MODEL) == [0.5, 2.0]
    assert devices.server == pytest.approx(MODEL / 0.125, rel=1e-15)


def test_speeds_in_a_file_are_those_of_the_device_whatever_the_model(here: Path) -> None:
    (here / "a.csv").write_text(FORMS["everything"][1])
    scheme = File(path="a.csv", server_tflops=7.0, lanes="shared", mbits_servers=30.0, model_sync=True)
    device = Device(flops=5e11, up=1e7, down=1e7, fed_up=2e7, fed_down=4e7, memory=1.2e10, name="old phone")
    assert scheme.draw(1, MODEL, key=0) == scheme.draw(1, 2 * MODEL, key=1)
    assert scheme.draw(1, MODEL, key=0) == Devices(
        clients=(device,), server=7e12, lanes="shared", server_up=3e7, server_down=3e7, model_sync=True
    )
    assert [device.rate("up"), device.rate("down"), device.rate("up", "fed"), device.rate("down", "fed")] == [
        1e7, 1e7, 2e7, 4e7,
    ]  # fmt: skip


def test_without_options_a_file_has_parallel_lanes_and_servers_that_are_one(here: Path) -> None:
    (here / "a.csv").write_text("tflops,mbit_per_s\n1,1\n")
    found = File(path="a.csv").draw(1, MODEL, key=0)
    assert found == Devices(clients=(Device(flops=1e12, up=1e6, down=1e6),), server=1e14)


def test_the_sample_has_twenty_devices_of_different_kinds() -> None:
    found = read("sample")
    assert found == read(SAMPLE)
    assert len(found) == len({device.name for device in found}) == 20
    for numbers in zip(*((d.flops, d.up, d.down, d.memory) for d in found), strict=True):
        assert max(numbers) > 100 * min(numbers)
    drawn = File(path="sample", server_tflops=20.0).draw(20, MODEL, key=0)
    assert drawn.clients[0] == Device(flops=4e9, up=2e6, down=8e6, memory=0.24e9, name="door camera")


def test_of_more_devices_than_clients_the_first_are_taken_and_fewer_are_refused(here: Path) -> None:
    (here / "a.csv").write_text(FORMS["csv"][1])
    scheme = File(path="a.csv")
    assert scheme.draw(1, MODEL, key=0) == scheme.draw(1, MODEL, key=1)
    assert scheme.draw(1, MODEL, key=0).clients == (Device(flops=8e6, up=1e6, down=1e6),)
    assert scheme.draw(1, MODEL, key=0).server == pytest.approx(8e8, rel=1e-15)  # the other device takes no part
    with pytest.raises(DataError) as caught:
        scheme.draw(3, MODEL, key=0)
    message = "the device file a.csv holds 2 devices, but the run has 3 clients; add devices, or use at most 2 clients"
    assert str(caught.value) == message


positive = st.floats(1e-6, 1e9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=8))
def test_devices_that_are_written_and_read_again_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[float, float, float]]
) -> None:
    path = tmp_path_factory.mktemp("devices") / "devices.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("seconds_per_sample", "kbit_per_s_up", "kbit_per_s_down"), *table])
    devices = File(path=str(path)).draw(len(table), MODEL, key=0)
    assert devices.clients == tuple(Device(MODEL / s, 1000 * up, 1000 * down) for s, up, down in table)


# -- bad files ------------------------------------------------------------------------------------------------------

HEAD = "name,seconds_per_sample,kbit_per_s\n"
GOOD = HEAD + "a,1,1\n\n"
BAD: dict[str, tuple[str, str | bytes, str]] = {
    "no rows": ("d.csv", HEAD, "the device file d.csv holds no devices; give one for each client"),
    "nothing": ("d.csv", "", "the device file d.csv holds no devices; give one for each client"),
    "no entries": ("d.json", "[]", "the device file d.json holds no devices; give one for each client"),
    "no clients": ("d.json", "{}", "the device file d.json holds no devices; give one for each client"),
    "no speed": (
        "d.csv",
        "name,kbit_per_s\na,1\n",
        "d.csv, line 1: there is no seconds_per_sample or tflops among column 1 (name), column 2 (kbit_per_s); add one",
    ),
    "no rate": (
        "d.csv",
        "seconds_per_sample\n1\n",
        "d.csv, line 1: there is no rate up among column 1 (seconds_per_sample); add kbit_per_s, or kbit_per_s_up",
    ),
    "one rate": (
        "d.csv",
        "tflops,mbit_per_s_up\n1,1\n",
        "d.csv, line 1: there is no rate down among column 1 (tflops), column 2 (mbit_per_s_up); add mbit_per_s, or "
        "mbit_per_s_down",
    ),
    "both speeds": (
        "d.csv",
        "tflops,kbit_per_s,seconds_per_sample\n1,1,1\n",
        "d.csv, line 1, column 1 (tflops) and seconds_per_sample both give its speed; keep one",
    ),
    "both units": (
        "d.csv",
        "tflops,kbit_per_s_up,mbit_per_s_down\n1,1,1\n",
        "d.csv, line 1, column 3 (mbit_per_s_down) and kbit_per_s_up are in different units; keep one unit",
    ),
    "a misspelt column": (
        "d.csv",
        "tflops,kbit_per_s,Memory_GB\n1,1,1\n",
        "d.csv, line 1, column 3 (Memory_GB) is no known name; did you mean 'memory_gb'?",
    ),
    "semicolons": (
        "d.csv",
        "tflops;kbit_per_s\n1;1\n",
        "d.csv, line 1, column 1 (tflops;kbit_per_s): semicolons separate its cells; separate them by commas",
    ),
    "tabs": (
        "d.csv",
        "tflops\tkbit_per_s\n1\t1\n",
        "d.csv, line 1, column 1 (tflops\tkbit_per_s): tabs separate its cells; separate them by commas",
    ),
    "semicolons below commas": (
        "d.csv",
        HEAD + "a;1;1\n",
        "d.csv, line 2, column 2 (seconds_per_sample) is empty; give a number above 0",
    ),
    "a column twice": (
        "d.csv",
        "seconds_per_sample,kbit_per_s,kbit_per_s\n1,1,1\n",
        "d.csv, line 1, column 3 (kbit_per_s) is there already as column 2; keep one",
    ),
    "an empty cell": (
        "d.csv",
        GOOD + "b,,1\n",
        "d.csv, line 4, column 2 (seconds_per_sample) is empty; give a number above 0",
    ),
    "an empty optional cell": (
        "d.csv",
        "tflops,mbit_per_s,memory_gb\n1,1,1\n1,1,\n",
        "d.csv, line 3, column 3 (memory_gb) is empty; give a number above 0",
    ),
    "a short row": ("d.csv", GOOD + "b,1\n", "d.csv, line 4, column 3 (kbit_per_s) is empty; give a number above 0"),
    "a decimal comma": (
        "d.csv",
        GOOD + "b,0,034,1\n",
        "d.csv, line 4, column 4: there are 4 cells below 3 columns; write numbers as 0.034",
    ),
    "text": (
        "d.csv",
        "name,tflops,mbit_per_s\na,1,1\nb,fast,1\n",
        "d.csv, line 3, column 2 (tflops) is 'fast'; it must be a number above 0",
    ),
    "negative": (
        "d.csv",
        GOOD + "b,1,-3\n",
        "d.csv, line 4, column 3 (kbit_per_s) is '-3'; it must be a number above 0",
    ),
    "zero": (
        "d.csv",
        GOOD + "b,0.0,1\n",
        "d.csv, line 4, column 2 (seconds_per_sample) is '0.0'; it must be a number above 0",
    ),
    "no number": (
        "d.csv",
        GOOD + "b,nan,1\n",
        "d.csv, line 4, column 2 (seconds_per_sample) is 'nan'; it must be a number above 0",
    ),
    "infinite": (
        "d.csv",
        GOOD + "b,1,inf\n",
        "d.csv, line 4, column 3 (kbit_per_s) is 'inf'; it must be a number above 0",
    ),
    "infinite in bits": (
        "d.csv",
        "tflops,mbit_per_s\n1e300,1\n",
        "d.csv, line 2, column 1 (tflops) is '1e300'; it must be a number above 0",
    ),
    "a giant cell": (
        "d.csv",
        GOOD + f"{'b' * 200_000},1,1\n",
        "d.csv, line 4: field larger than field limit (131072); write it as plain CSV",
    ),
    "not JSON": ("d.json", '[{"a": }]', "d.json is not JSON: Expecting value: line 1 column 8 (char 7)"),
    "JSON that is a number": (
        "d.json",
        "3",
        "d.json is neither a list of devices nor a mapping from clients to devices; write one of these",
    ),
    "an entry that is a number": (
        "d.json",
        '[{"seconds_per_sample": 1, "kbit_per_s": 1}, 3]',
        "d.json, entry 2 is 3; it must be a mapping from names to numbers",
    ),
    "a client that is a list": (
        "d.json",
        '{"7": [1, 2]}',
        "d.json, client 7 is [1, 2]; it must be a mapping from names to numbers",
    ),
    "an empty entry": ("d.json", "[{}]", "d.json, entry 1 is {}; it must be a mapping from names to numbers"),
    "an entry without a speed": (
        "d.json",
        '[{"id": 3, "kbit_per_s": 1}]',
        "d.json, entry 1: there is no seconds_per_sample or tflops among id, kbit_per_s; add one",
    ),
    "an entry with two speeds": (
        "d.json",
        '[{"tflops": 1, "seconds_per_sample": 1, "kbit_per_s": 1}]',
        "d.json, entry 1, tflops and seconds_per_sample both give its speed; keep one",
    ),
    "a client without a rate": (
        "d.json",
        '{"7": {"computation": 1}}',
        "d.json, client 7: there is no communication among computation; add it",
    ),
    "nothing in an entry": (
        "d.json",
        '[{"tflops": 1, "kbit_per_s": 1}, {"seconds_per_sample": null, "kbit_per_s": 1}]',
        "d.json, entry 2, seconds_per_sample is empty; give a number above 0",
    ),
    "JSON's own infinity": (
        "d.json",
        '{"7": {"computation": 1, "communication": Infinity}}',
        "d.json, client 7, communication is inf; it must be a number above 0",
    ),
    "a truth value": (
        "d.json",
        '[{"seconds_per_sample": true, "kbit_per_s": 1}]',
        "d.json, entry 1, seconds_per_sample is True; it must be a number above 0",
    ),
    "a list for a number": (
        "d.json",
        '[{"seconds_per_sample": [1], "kbit_per_s": 1}]',
        "d.json, entry 1, seconds_per_sample is [1]; it must be a number above 0",
    ),
    "too large": (
        "d.json",
        '[{"seconds_per_sample": 1' + "0" * 400 + ', "kbit_per_s": 1}]',
        "d.json, entry 1, seconds_per_sample is 1" + "0" * 39 + "; it must be a number above 0",
    ),
    "another encoding": (
        "d.csv",
        b"\xff\xfe",
        "the device file d.csv cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "another ending": (
        "d.txt",
        GOOD,
        "the device file 'd.txt' is of no known form; give a path that ends in .csv or .json, or 'sample'",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_by_name_line_and_column(what: str, here: Path) -> None:
    name, content, message = BAD[what]
    (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        File(path=name).draw(1, MODEL, key=0)
    assert str(caught.value) == message


def test_json_that_is_nested_too_deeply_is_refused(here: Path) -> None:
    (here / "d.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"^d\.json is not JSON: maximum recursion depth exceeded"):
        read("d.json")


def test_a_path_that_is_no_file_is_refused(here: Path) -> None:
    with pytest.raises(DataError) as caught:
        read("lab/none.csv")
    assert str(caught.value) == (
        "there is no device file lab/none.csv; check the path, which is relative to the working directory"
    )
    (here / "folder.json").mkdir()
    with pytest.raises(DataError, match=r"^the device file folder\.json cannot be read: \[Errno \d+\] "):
        read("folder.json")
