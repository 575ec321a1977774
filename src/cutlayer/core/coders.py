"""Which codec a kind may have: what cannot be encoded, and what is refused with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cutlayer.core.checks import reason
from cutlayer.core.codec import CODED, NOTHING, OF_SAMPLES, PROBE, Codec, Coder, code_of, traits_of
from cutlayer.core.kinds import AUXILIARY, Kind
from cutlayer.errors import ConfigError, UnknownNameError, UsageError

MORE = (7, *PROBE[1:])  # more samples: a codec may happen to fit so few
NOT_CODED = {  # by the name of a kind: why it has no codec
    "labels": "any change of a label is another class",
    "scalars": "they are a few numbers for each batch",
    "slopes": "all clients must replay the same bits",
    "statistics": "they are a few numbers for each client",
    "settings": "they must arrive as they are",
    "setup": "it must arrive as it is",
    "sync": "it goes between the servers, and codecs are for what goes up or down",
}


@dataclass(frozen=True)
class ErrorFeedback:
    """A codec whose losses are added to what is sent next (Seide et al. 2014; Karimireddy et al. 2019)."""

    codec: Codec


def coder(name: str, made: Codec | ErrorFeedback) -> Coder | None:
    """Return the coder of the kind of this name; None if its values cross as they are."""
    kinds: Mapping[str, Kind] = {kind.name: kind for kind in CODED}
    if name in NOT_CODED:
        raise ConfigError(f"{name} cannot be encoded: {NOT_CODED[name]}; kinds that can: {', '.join(kinds)}")
    if name not in kinds:
        raise UnknownNameError("kind", name, kinds)
    kind = kinds[name]
    inner, feedback = (made.codec, True) if isinstance(made, ErrorFeedback) else (made, False)
    if feedback and kind in OF_SAMPLES:
        raise ConfigError(
            f"{name} take no error feedback: they belong to samples, and what was lost of one batch says "
            "nothing of the next; models persist, and take it"
        )
    if feedback and traits_of(inner).noisy:
        raise ConfigError(f"error feedback would take back what {inner} adds; leave out one of them")
    if traits_of(inner).matrices and kind in OF_SAMPLES:
        raise ConfigError(
            f"{inner} encodes the matrices of models, and {name} are of samples, which are none; take a codec that "
            "keeps a share of them, such as topk"
        )
    if kind is AUXILIARY and (feedback or traits_of(inner).drops):
        raise ConfigError(
            f"{name} models only go down, as a whole, and {inner} encodes changes; take a codec that rounds, "
            "such as int8"
        )
    check_codec(inner)
    return None if inner == NOTHING else Coder(kind, inner, feedback)


@lru_cache(256)
def check_codec(codec: Codec) -> None:
    """Try a codec on tensors without content, and refuse one that does not keep to the protocol."""
    for shape, dtype in product((PROBE, MORE), (torch.float32, torch.float64)):
        try:
            code = code_of(codec, shape, dtype)
            if not _is_code(code, shape[0]):
                raise ConfigError(
                    f"{codec}: encode must return a tensor or a dict of tensors, with a row for each of {shape[0]} "
                    f"samples (or one for all), but it returns {_told(code)}"
                )
            got = codec.decode(code, shape, dtype)
        except UsageError:
            raise
        except Exception as error:  # it may be anybody's code
            raise ConfigError(
                f"{codec} fails on a tensor without content, from which sizes are predicted: {type(error).__name__}: "
                f"{reason(error)}"
            ) from error
        if not isinstance(got, Tensor) or got.shape != shape or got.dtype != dtype:
            wanted = torch.empty(shape, dtype=dtype, device="meta")
            raise ConfigError(f"{codec}: decode must return {_told(wanted)}, but it returns {_told(got)}")


def _is_code(code: Any, rows: int) -> bool:
    if isinstance(code, dict):
        return all(isinstance(name, str) and _is_code(own, rows) for name, own in code.items()) and bool(code)
    return isinstance(code, Tensor) and code.dim() > 0 and len(code) in (1, rows)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {', '.join(f'{name}: {_told(own)}' for name, own in value.items()) or 'nothing'}"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of the type {str(value.dtype).removeprefix('torch.')} and the shape {tuple(value.shape)}"
