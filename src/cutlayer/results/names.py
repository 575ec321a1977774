"""How methods and codecs are called in print."""

import re
from collections.abc import Mapping
from typing import Any

NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednar": "FedNAR",
    "fedavgm": "FedAvgM",
    "slowmo": "SlowMo",
    "fednag": "FedNAG",
    "sl": "SL",
    "sfl_v1": "SFL-V1",
    "sfl_v2": "SFL-V2",
    "mergesfl": "MergeSFL",
    "smofi": "SMoFi",
    "hasfl": "HASFL",
    "fsl_sage": "FSL-SAGE",
    "zo_sfl": "ZO-SFL",
    "mu_splitfed": "MU-SplitFed",
    "hosfl": "HO-SFL",
    "splitlora": "SplitLoRA",
}


def method_of(label: str, method: str) -> str:
    """Return the method that a run shows: the one that its label names, else the one that was run.

    Both may differ: fedprox is FedAvg with another optimiser in some recipes. A label such as fedprox+smofi names two.
    """
    named = [word for word in re.findall(r"\w+", label) if word in NAMES]
    return named[0] if len(named) == 1 else method


def printed(label: str) -> str:
    """Return a run's label with the methods in it as they are printed: fedprox+smofi is FedProx+SMoFi."""
    return re.sub(r"\w+", lambda word: NAMES.get(word[0], word[0]), label)


def codecs_of(codecs: Mapping[str, Any]) -> str:
    """Return the codecs of a run: activations int8, gradients topk(0.1)+int8."""
    return ", ".join(f"{kind} {codec_of(codec)}" for kind, codec in codecs.items())


def codec_of(codec: Any) -> str:
    """Return a codec as a run file gives it: a name, a table or a chain; a single option goes without its name."""
    if isinstance(codec, list | tuple):
        return "+".join(map(codec_of, codec))
    if not isinstance(codec, Mapping):
        return str(codec)
    options = {key: codec_of(value) for key, value in codec.items() if key not in ("name", "chain", "error_feedback")}
    words = [f"{key}={value}" for key, value in options.items()] if len(options) > 1 else list(options.values())
    made = codec_of(codec["chain"] if "chain" in codec else codec.get("name", ""))
    feedback = " with error feedback" if codec.get("error_feedback") else ""
    return f"{made}({', '.join(words)}){feedback}" if words else f"{made}{feedback}"
