"""Specifies what a device brings to a run, and what it refuses: methods, runs and plugins that it did not agree to."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import using
from in_process import join

from cutlayer import methods, models, plugins, registry
from cutlayer.core import keys
from cutlayer.core.kinds import GRADIENTS, LABELS, MODEL, STATISTICS
from cutlayer.core.program import Program
from cutlayer.data.sample import Sample
from cutlayer.errors import ConfigError, CutlayerError, DataError, LinkError
from cutlayer.remote.device.session import ClientDevice, Session
from cutlayer.remote.device.worker import WorkError
from cutlayer.remote.joining.join import DeviceSettings, leaving
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol.messages import Hello, Welcome, Work
from cutlayer.remote.server.serve import Serving, _first_come
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.server.streams import _check_plugins, _check_version
from cutlayer.remote.tensors.trees import flatten
from cutlayer.runs import build, config
from cutlayer.runs.config import Choice, Run

RUN = Run(clients=4, rounds=2)


def welcome(run: Run = RUN, client: int = 1) -> Welcome:
    return Welcome(session=7, client=client, run=config.dumps(run))


def trusting(settings: DeviceSettings, run: Run = RUN) -> ClientDevice:
    """A device without terms: the laws hold whatever a server asks, and not only for what its method would."""
    return replace(settings.ready(welcome(run)), terms=None)


def refusal(settings: DeviceSettings, run: Run = RUN, client: int = 1) -> str:
    with pytest.raises(CutlayerError) as caught:
        settings.ready(welcome(run, client))
    return str(caught.value)


def test_a_device_takes_its_share_of_a_named_data_set_as_the_run_deals_it() -> None:
    whole = build.dealt(RUN)
    device = DeviceSettings(data="digits").ready(welcome(client=2))
    assert torch.equal(device.data.y, whole.data.y[whole.partition.clients[2]])
    assert device.batching == RUN.batching and device.client == 2


def test_a_device_is_made_once_for_a_run_and_again_for_another() -> None:
    settings = DeviceSettings(data="digits")
    first = settings.ready(welcome())
    assert settings.ready(welcome()) is first
    assert settings.ready(welcome(replace(RUN, seed=5))) is not first


def test_a_device_reads_its_own_file_as_the_run_says(tmp_path: Path) -> None:
    x, y = np.full((5, 1, 8, 8), 51, dtype=np.uint8), np.arange(5)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    sample = Sample(shape=(1, 8, 8), classes=10, mean=(0.1,), std=(0.5,))
    device = DeviceSettings(data=str(tmp_path / "mine.npz")).ready(welcome(replace(RUN, sample=sample)))
    assert torch.allclose(device.data.x, torch.full((5, 1, 8, 8), 0.2))  # 51 of 255, less the mean, by the deviation
    assert device.data.y.tolist() == [0, 1, 2, 3, 4]


def test_a_device_sends_only_what_the_methods_functions_give() -> None:
    names = {name: leaving(Program(method_of(replace(RUN, method=Choice(name))))) for name in ("fedavg", "hosfl")}
    assert names["fedavg"] == [MODEL, STATISTICS]
    assert LABELS in names["hosfl"] and GRADIENTS not in names["hosfl"] and MODEL not in names["hosfl"]


def method_of(run: Run) -> methods.Method:
    data = build.dealt(run).data.take([0, 1])
    return build.planned_method(run, build.model_of(run, data), data, run.clients)[0]


REFUSED = {
    "labels": (
        DeviceSettings(data="digits", never=frozenset({"labels"})),
        RUN,
        "this run's method sends labels, which this device never sends (--never labels)",
    ),
    "raw inputs": (
        DeviceSettings(data="digits"),
        replace(RUN, cut=0),
        "at cut 0 this run leaves no weights at the clients, so their raw inputs would leave as activations; join with "
        "--allow-raw if that is meant",
    ),
    "raw inputs at a cut that is drawn": (
        DeviceSettings(data="digits"),
        replace(RUN, method=Choice("smofi", {"random_cut": (0, 2)})),
        "at cut 0 this run leaves no weights at the clients, so their raw inputs would leave as activations; join with "
        "--allow-raw if that is meant",
    ),
    "the name of a data set": (
        DeviceSettings(data="digits"),
        replace(RUN, sample=Sample(shape=(1, 8, 8), classes=10)),
        "this run's samples are the devices' own: give a file or a folder, not the name digits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_device_refuses_what_it_did_not_agree_to(case: str) -> None:
    settings, run, message = REFUSED[case]
    assert refusal(settings, run) == message


def test_data_that_are_not_there_are_told_of_before_any_server_is() -> None:
    with pytest.raises(DataError) as caught:
        DeviceSettings(data="nowhere.npz")
    assert str(caught.value) == "there is no file or folder nowhere.npz, and no data set of that name; check --data"


def test_a_run_on_devices_is_not_simulated_on_other_data() -> None:
    with pytest.raises(ConfigError) as caught:
        build.training(replace(RUN, sample=Sample(shape=(1, 8, 8), classes=10)))
    assert str(caught.value) == (
        "this run has a [sample], so its samples are on devices: use `cutlayer serve`. To simulate it, leave [sample] "
        "out and name its data"
    )


def test_without_certificates_a_place_is_free_when_nobody_is_there() -> None:
    sessions = Sessions()
    number = _first_come(2, sessions)
    assert [number(name) for name in ("ann", "bob", "ann", "1")] == [0, 1, 0, 1]
    device = DeviceSettings(data="digits").ready(welcome(client=0))
    for client in (0, 1):
        join(sessions, replace(device, client=client))
    with pytest.raises(LinkError) as caught:
        number("carol")
    assert str(caught.value) == "there is no place left for 'carol': this run is for 2 clients"


def test_labels_stay_where_the_split_is_u_shaped() -> None:
    shaped = replace(RUN, head=3)
    assert DeviceSettings(data="digits", never=frozenset({"labels"})).ready(welcome(shaped)).client == 1


def test_raw_inputs_leave_only_if_the_device_says_so() -> None:
    assert DeviceSettings(data="digits", raw=True).ready(welcome(replace(RUN, cut=0))).client == 1


def test_an_unknown_kind_is_refused_at_once() -> None:
    with pytest.raises(CutlayerError, match="unknown kind 'label'; did you mean 'labels'"):
        DeviceSettings(data="digits", never=frozenset({"label"}))


def test_a_device_that_names_its_run_takes_part_in_no_other(tmp_path: Path) -> None:
    agreed = tmp_path / "run.toml"
    agreed.write_text("clients = 4\nrounds = 2\n")
    settings = DeviceSettings(data="digits", config=agreed)
    assert settings.ready(welcome()).client == 1
    assert refusal(settings, replace(RUN, method=Choice("fedavg"))) == (
        f"the server's run is not the one in {agreed}: method is {{'name': 'fedavg'}} there and {{'name': 'sfl_v1'}} "
        "here; ask who runs the server"
    )


def test_a_client_without_a_share_is_told() -> None:
    assert refusal(DeviceSettings(data="digits"), client=9) == "digits is dealt to 4 clients, and this one is number 9"


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ({"activations": "int8"}, 'activations = { name = "int8" }', ""),
        ({"activations": "none", "model": {"name": "topk", "share": 1.0}}, 'gradients = ["none"]', ""),
        ({"gradients": {"name": "topk", "share": 0.1}}, "gradients = { name = 'topk', share = 0.1 }", ""),
        ({"activations": "int8"}, "", "codecs.activations is int8 there and none here"),
        ({}, 'model = { name = "int8", error_feedback = true }',
         "codecs.model is none there and int8 with error feedback here"),
        ({"gradients": {"name": "topk", "share": 0.2}}, 'gradients = [{ name = "topk", share = 0.1 }, "int8"]',
         "codecs.gradients is topk(0.2) there and topk(0.1), int8 here"),
    ],
)  # fmt: skip
def test_a_device_compares_what_codecs_do_and_not_how_they_are_written(
    theirs: dict[str, Any], ours: str, told: str, tmp_path: Path
) -> None:
    agreed = tmp_path / "run.toml"
    agreed.write_text(f"clients = 4\nrounds = 2\n[codecs]\n{ours}\n")
    settings, run = DeviceSettings(data="digits", config=agreed), replace(RUN, codecs=theirs)
    if not told:
        assert settings.ready(welcome(run)).client == 1
    else:
        run_of = f"the server's run is not the one in {agreed}: "
        assert refusal(settings, run) == f"{run_of}{told}; ask who runs the server"


# -- private seeds -----------------------------------------------------------------------------------------------------


def own_seed(secret: str | None) -> int:
    device = trusting(DeviceSettings(data="digits", secret=secret))
    session = Session(device, 7)
    round_ = session._round_of(_work())
    round_.run((c.Own(0),), [3], [])
    return int(flatten(round_.slots[0].blocks[0].tree).tensors[0])


def _work() -> Work:
    return Work(session=7, number=1, round=0, key=11, token=1, begins=True, list=0, commands=(), numbers=())


def test_a_secret_of_its_own_hides_a_devices_seeds_from_everybody_else() -> None:
    assert own_seed(None) == keys.fold(11, "own", 3, 1)  # what a server can compute, too
    assert len({own_seed(None), own_seed("a"), own_seed("b")}) == 3
    assert own_seed("a") != own_seed("a")  # in another attempt, even if a server gives it the same key


# -- what a client refuses in the middle of a run ----------------------------------------------------------------------


def test_a_server_cannot_ask_for_raw_data_or_for_what_is_not_declared() -> None:
    device = trusting(DeviceSettings(data="digits"))
    round_ = Session(device, 7)._round_of(_work())
    round_.run((c.Batch(0, 1),), [4, 0, 5], [])
    refused: list[tuple[c.AnyCommand, str]] = [
        (
            c.Up(("activations",), (0,)),
            "command 1 (up): client 1 refuses to send activations: the value was not made by a function of SplitFed "
            "that gives activations (it gives nothing that may leave whole)",
        ),
        (
            c.Do(2, "__init__", (0,)),
            "command 1 (do __init__): unknown function '__init__'; known: client.begin, client.both_ends, "
            "client.forward, client.head_loss, client.squared_norm, client.update, client.with_norm.",
        ),
        (c.Field(2, 0, "__class__"), "command 1 (field __class__): a Tensor has no field '__class__'"),
        (c.Get(2), "command 1 (get): there is no fed server of its own that could send a parcel"),
        (
            c.Put(2, ["os.system", []]),
            "command 1 (put): it holds a os.system, which this version of cutlayer does not know",
        ),
    ]
    for command, message in refused:
        with pytest.raises(WorkError) as caught:
            round_.run((command,), [1] if isinstance(command, c.Get) else [], [])
        assert str(caught.value) == message


EVERY_METHOD = [name for name in methods.METHODS if name != "splitlora"]


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_own_data_go_only_where_a_function_takes_them_and_nothing_else_goes_there(name: str) -> None:
    """Every function that a method declares, each of its parameters, inputs and labels and neither."""
    run = replace(using(RUN, name), optimiser=Choice("sgd", {"lr": 0.1, "momentum": 0.9}))
    device = trusting(DeviceSettings(data="digits", raw=True), run)
    round_ = Session(device, 7)._round_of(_work())
    round_.run((c.Batch(0, 1), c.Put(2, "number")), [4, 0, 5, 1], [])
    given = {"x": 0, "y": 1, "": 2}  # the slots of inputs, labels, and something else
    for address, fn in device.program.functions.items():
        names = list(inspect.signature(fn).parameters)
        right = [given[n if n in ("x", "y") else ""] for n in names]
        for place, wanted in enumerate(names):
            for slot in set(given.values()) - {right[place]}:
                arguments = (*right[:place], slot, *right[place + 1 :])
                with pytest.raises(WorkError) as caught:
                    round_.run((c.Do(3, address, arguments),), [], [])
                takes = {"x": "takes a client's own inputs", "y": "takes a client's own labels"}.get(
                    wanted, "takes none of a client's own data"
                )
                what = {0: "inputs", 1: "labels", 2: "something else"}[slot]
                expected = f"argument {place + 1} of {address} {takes}, but it was given {what}"
                assert caught.value.reason == expected


def test_a_server_cannot_move_the_cut_below_the_first_layer() -> None:
    device = trusting(DeviceSettings(data="digits"))
    round_ = Session(device, 7)._round_of(_work())
    round_.run((c.Batch(0, 1), c.Key(2), c.Put(3, "number")), [4, 0, 5, 9, 0], [])
    model = flatten(device.program.functions["client.begin"].__self__.model.initial()[0])
    round_.run((c.Put(4, model.skeleton),), model.numbers, model.tensors)
    round_.run((c.Put(5, "number"), c.Do(6, "client.begin", (4, 5))), [0], [])
    with pytest.raises(WorkError) as caught:
        round_.run((c.Vjp(7, 8, "client.forward", (6, 0, 2, 3)), c.Up(("activations",), (7,))), [], [])
    assert caught.value.reason == "a cut of 0 would leave no layer at the client, so its raw inputs would go up"


def test_own_data_are_neither_kept_nor_pulled_back() -> None:
    device = trusting(DeviceSettings(data="digits"))
    round_ = Session(device, 7)._round_of(_work())
    round_.run((c.Batch(0, 1),), [4, 0, 5], [])
    with pytest.raises(WorkError, match="a client's own data are there already; what it keeps is what came of them"):
        round_.run((c.KeepValue(2, "mine", 0),), [1], [])


# -- plugins -----------------------------------------------------------------------------------------------------------

PLUGIN = """
from cutlayer.methods import sfl_v1

def mine(*, model, client_opt, server_opt):
    return sfl_v1(model=model, client_opt=client_opt, server_opt=server_opt, sync="step")

METHODS = {"mine": mine}
"""


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the registries after the test."""
    before = dict(methods.METHODS), dict(models.MODELS)
    yield
    for table, entries in zip((methods.METHODS, models.MODELS), before, strict=True):
        table.clear()
        table.update(entries)
    plugins.LOADED.clear()


def test_a_plugin_brings_methods_and_its_hash(tmp_path: Path, restored: None) -> None:
    file = tmp_path / "own.py"
    file.write_text(PLUGIN)
    assert {name: len(digest) for name, digest in plugins.load([file]).items()} == {"own.py": 64}
    run = config.changed(Run(), {"method": "mine", "clients": 4}, "own.toml")
    assert DeviceSettings(data="digits").ready(welcome(run)).program.name == "SplitFed"


def broken(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        plugins.load([path])
    return str(caught.value)


def test_a_plugin_that_cannot_be_used_is_told_of(tmp_path: Path, restored: None) -> None:
    missing, wrong, taken = tmp_path / "missing.py", tmp_path / "wrong.py", tmp_path / "taken.py"
    assert broken(missing) == f"the plugin {missing} cannot be read: No such file or directory"
    wrong.write_text("METHODS = 3")
    assert broken(wrong) == f"METHODS of the plugin {wrong} must be a dict of names and functions"
    wrong.write_text("1 / 0")
    assert broken(wrong) == f"the plugin {wrong} cannot be loaded: ZeroDivisionError: division by zero"
    wrong.write_text("x = 1")
    assert broken(wrong) == f"the plugin {wrong} has none of {', '.join(registry.TABLES)}, so it brings nothing"
    taken.write_text("METHODS = {'sfl_v1': print}")
    assert broken(taken) == (f"the plugin {taken} has 'sfl_v1' in METHODS, which there is already; choose another name")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({}, {"own.py": "a"}, "this run needs the plugin own.py; join with --plugin own.py"),
        ({"own.py": "a"}, {}, "the client has the plugin own.py, which this run does not use; leave it out"),
        (
            {"own.py": "a"},
            {"own.py": "b"},
            "the plugin own.py is not the same on both sides; copy the server's to the client",
        ),
    ],
)
def test_plugins_must_be_the_same_on_both_sides(theirs: dict[str, str], ours: dict[str, str], message: str) -> None:
    with pytest.raises(LinkError) as caught:
        _check_plugins(theirs, ours)
    assert str(caught.value) == message
    _check_plugins(ours, ours)


def test_another_protocol_is_told_of_with_both_versions() -> None:
    with pytest.raises(LinkError, match=r"the client speaks protocol 1 \(cutlayer 9.9\) and this server 4 \(cutlayer"):
        _check_version(Hello(protocol=1, version="9.9", name="ann", plugins={}))


# -- settings of a server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": 0}, "deadline is 0"),
        ({"patience": -1.0}, "patience is -1.0; it must be at least 0 seconds"),
        ({"least": 0}, "least is 0; a round needs at least 1 client"),
        ({"role": "trane"}, "unknown role 'trane'; did you mean 'train'?"),
        ({"role": "fed"}, "a fed server of its own needs to know the training server, and only that one: --train"),
    ],
)
def test_a_server_refuses_settings_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(CutlayerError) as caught:
        Serving(**options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_data_of_another_shape_are_refused_at_the_device(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((5, 8, 8, 1), dtype=np.float32), y=np.arange(5))
    with pytest.raises(DataError, match="shape"):
        DeviceSettings(data=str(tmp_path / "mine.npz")).ready(
            welcome(replace(RUN, sample=Sample(shape=(1, 8, 8), classes=10)))
        )
