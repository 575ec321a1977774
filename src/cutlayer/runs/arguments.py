"""Checks of the arguments of `cutlayer.train`, before anything is computed or written."""

import inspect
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from torch import nn

from cutlayer.core.checks import check_type
from cutlayer.core.meter import Meter
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment, SampleTransform
from cutlayer.data.datasets import from_dataset, is_dataset
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError
from cutlayer.planning.devices import Devices
from cutlayer.runs.simulation import HOW_ARRAYS, HOW_PARTITION
from cutlayer.split import Split

OF_A_FOLDER = {
    "resume": False,
    "overwrite": False,
    "name": None,
    "checkpoint_every": 1,
}  # arguments with their defaults


def check(given: Mapping[str, Any]) -> None:
    """Refuse arguments of the wrong type before anything is computed or written."""
    _check_method(given["method"])
    if not is_dataset(given["data"]):
        check_type("data", given["data"], Arrays, HOW_ARRAYS)
    check_type("partition", given["partition"], Partition, HOW_PARTITION)
    check_type("codecs", given["codecs"], Mapping, 'such as {"activations": "int8"}')
    optional: dict[str, tuple[type, str]] = {
        "devices": (Devices, "such as Devices(clients=(phone, laptop), server=1e12)"),
        "test_partition": (Partition, HOW_PARTITION),
    }
    for name, (kind, how) in optional.items():
        if given[name] is not None:
            check_type(name, given[name], kind, how)
    if not isinstance(given["augment"], SampleTransform | None):
        check_type("augment", given["augment"], Augment, "such as Augment(crop=4, flip=True), or a SampleTransform")
    for name, what in (("sampler", "a function of a Draw, which returns the clients of the round"),
                       ("on_round", "a function of the record of a round")):  # fmt: skip
        if given[name] is not None and not callable(given[name]):
            raise ConfigError(f"{name} is {given[name]!r}; give {what}")
    for name in ("seed", "per_round", "rounds"):
        if isinstance(given[name], bool) or not isinstance(given[name], Integral | None):
            raise ConfigError(f"{name} is {given[name]!r}; it must be a whole number")
    for meter in given["meters"]:
        check_type("a meter", meter, Meter, "an instance of a class with its methods")
    if given["test_partition"] is not None and (given["hold_out"] or given["test"] is None):
        raise ConfigError("test_partition says which client holds which samples of test: give test, and no hold_out")
    if given["out"] is None:
        for name, default in OF_A_FOLDER.items():
            if given[name] != default:
                raise ConfigError(f"{name} is about the folder of a run; give the folder, such as out='runs/mine/x'")
    elif given["resume"] and given["overwrite"]:
        raise ConfigError("resume and overwrite contradict each other; give one of them")


def with_arrays(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the samples of data sets and lists of items in memory."""
    sets = {name: given[name] for name in ("data", "test", "validation")}
    return {**given, **{name: from_dataset(held) for name, held in sets.items() if is_dataset(held)}}


def _check_method(method: object) -> None:
    such = "such as cutlayer.sfl_v1(model=Split(net, cut=1), client_opt=sgd(0.1), server_opt=sgd(0.1))"
    if isinstance(method, type) or inspect.isroutine(method):
        raise ConfigError(f"method is {method.__name__} itself; call it with a model and optimisers, {such}")
    if isinstance(method, str | Split | nn.Module):
        raise ConfigError(f"method is a {type(method).__name__}; give a method, {such}")
