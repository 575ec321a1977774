"""Checks of hyper-parameters, with error messages for users."""

import math
import re
from typing import TypeGuard, get_args

import torch

from cutlayer.errors import ConfigError, UnknownNameError


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}, but it must be {wanted}.")


def check_choice(name: str, value: object, literal: object, where: str = "") -> None:
    """Refuse a value that a `Literal` type does not list."""
    if value not in get_args(literal):
        raise UnknownNameError(name, str(value), get_args(literal), where)


def check_count(name: str, value: object) -> None:
    check(type(value) is int and value > 0, name, value, "a whole number above 0")


def check_positive(name: str, value: object) -> None:
    check(is_number(value) and value > 0, name, value, "a number above 0")


def check_most_weight(value: object) -> None:
    check(value is None or (is_number(value) and value >= 1), "most_weight", value, "a number from 1 up")


def check_decay(rate: object) -> None:
    check(is_number(rate) and rate >= 0, "weight_decay", rate, "a number from 0 up")


def check_device_name(name: str) -> None:
    """Refuse a name that is no device of cutlayer, whether or not this machine has one."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"unknown device {name!r}; known: cpu, cuda")


def check_device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    check_device_name(name)
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r} cannot be used here: {reason(error)}; use cpu, or cuda where torch has it"
        ) from None


def check_type(name: str, value: object, wanted: type, how: str) -> None:
    """Refuse an argument of the wrong type, and say how to make one of the right type."""
    if not isinstance(value, wanted):
        raise ConfigError(f"{name} is {_a(type(value))}; give {_a(wanted)}, {how}")


def check_optimiser(name: str, value: object) -> None:
    """Refuse an optimiser of torch, which holds the parameters of one module, and what is no optimiser at all."""
    if isinstance(value, torch.optim.Optimizer):
        raise ConfigError(
            f"{name} is torch's {type(value).__name__}, which updates the parameters of one module; cutlayer's are "
            f"functions of the settings alone: give {_as_function(value)}"
        )
    if value is not None and isinstance(value, str | int | float | type):
        raise ConfigError(f"{name} is {value!r}; give an optimiser, such as cutlayer.sgd(0.1)")
    if value is not None and not (callable(getattr(value, "begin", None)) and callable(getattr(value, "step", None))):
        raise ConfigError(
            f"{name} is {_a(type(value))}, which is no optimiser of cutlayer: give cutlayer.sgd, adam or adamw, with a "
            "learning rate or a schedule of it, such as cutlayer.sgd(cutlayer.schedules.cosine(0.1, rounds=100))"
        )


def _as_function(optimiser: torch.optim.Optimizer) -> str:
    """Return the call that makes the same optimiser, as far as there is one."""
    name = type(optimiser).__name__.lower()
    known = {"sgd": ("momentum", "nesterov", "weight_decay"), "adam": ("betas", "eps", "weight_decay")}
    known["adamw"] = known["adam"]
    if name not in known:
        return "cutlayer.sgd, adam or adamw"
    own = optimiser.defaults
    usual = type(optimiser)([torch.zeros(1)], lr=own["lr"]).defaults  # type: ignore[call-arg]
    options = [f"{key}={own[key]!r}" for key in known[name] if own[key] != usual[key]]
    return f"cutlayer.{name}({', '.join([repr(own['lr']), *options])})"


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"
