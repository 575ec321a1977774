"""How methods are called in print."""

import re

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
