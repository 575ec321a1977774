"""Codecs: rounding, sparse and low-rank codes, clips and noise, by name.

    codecs = { activations = "int8", gradients = { name = "topk", share = 0.1 } }

`cutlayer.core.codec` says what a codec is. Imports: core, errors, registry.
"""

from collections.abc import Callable, Mapping
from typing import Any

from cutlayer import registry
from cutlayer.codecs.chain import chain
from cutlayer.codecs.low_rank import lowrank
from cutlayer.codecs.noise import clip, gaussian, laplace
from cutlayer.codecs.rounding import Bf16, int4, int8
from cutlayer.codecs.sparse import randtopk, topk
from cutlayer.core.codec import NOTHING, Codec, Traits, codec
from cutlayer.core.coders import ErrorFeedback
from cutlayer.errors import ConfigError

__all__ = [
    "bf16",
    "chain",
    "clip",
    "codec",
    "error_feedback",
    "gaussian",
    "int4",
    "int8",
    "laplace",
    "lowrank",
    "none",
    "randtopk",
    "topk",
]


def none() -> Codec:
    """Tensors as they are."""
    return NOTHING


def bf16() -> Codec:
    """Rounded to bfloat16: half the bytes of float32."""
    return Bf16()


error_feedback = ErrorFeedback

CODECS: registry.Table[Callable[..., Codec]] = registry.table(
    "CODECS",
    {
        "none": none,
        "bf16": bf16,
        "int8": int8,
        "int4": int4,
        "topk": topk,
        "randtopk": randtopk,
        "lowrank": lowrank,
        "clip": clip,
        "gaussian": gaussian,
        "laplace": laplace,
    },
)


def build(given: Any) -> Codec | ErrorFeedback:
    """Return the codec that a run file or a Python program gives.

    It is a codec; a name; a table with a name and options; a list of them, which is a chain; or a table with such a
    list as `chain`. Tables may have `error_feedback = true`, but not those within a chain.
    """
    if isinstance(given, str):
        return build({"name": given})
    if isinstance(given, list | tuple):
        if not given:
            raise ConfigError('a chain has no codec; name one, or write "none"')
        return chain(*(_stage(own) for own in given))
    if not isinstance(given, Mapping):
        return _checked(given)
    options = {k: v for k, v in given.items() if k not in ("name", "chain", "error_feedback")}
    if "chain" in given:
        if "name" in given or options:
            raise ConfigError("a table with a chain has no other options but error_feedback")
        if not isinstance(given["chain"], list | tuple):
            raise ConfigError(f"chain is {given['chain']!r}; it must be a list of codecs")
        made = build(given["chain"])
    elif isinstance(given.get("name"), str):
        made = _checked(registry.make("codec", CODECS, given["name"], options))  # it may be a plug-in's
    else:
        raise ConfigError('a table needs a name, such as { name = "topk", share = 0.1 }, or a chain')
    feedback = given.get("error_feedback", False)
    if not isinstance(feedback, bool):
        raise ConfigError(f"error_feedback is {feedback!r}; it must be true or false")
    return ErrorFeedback(made) if feedback and isinstance(made, Codec) and made != NOTHING else made


def _stage(given: Any) -> Codec:
    made = build(given)
    if isinstance(made, ErrorFeedback):
        raise ConfigError("error feedback is of a whole chain: write { chain = [...], error_feedback = true }")
    return made


def _checked(given: Any) -> Codec | ErrorFeedback:
    own = given.codec if isinstance(given, ErrorFeedback) else given
    if isinstance(own, type) or not isinstance(own, Codec):
        raise ConfigError(f"{given!r} is no codec; give a name, a table, a list, or an instance of a class with @codec")
    if not isinstance(getattr(own, "traits", None), Traits):
        raise ConfigError(f"{type(own).__name__} is not a codec; decorate its class with @codec")
    return given  # type: ignore[no-any-return]
