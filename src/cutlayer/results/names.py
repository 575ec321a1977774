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


def printed(label: str) -> str:
    """Return a run's label with the methods in it as they are printed: fedprox+smofi is FedProx+SMoFi."""
    return re.sub(r"\w+", lambda word: NAMES.get(word[0], word[0]), label)
