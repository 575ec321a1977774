"""Specifies the names that users import, that each is explained, and what importing them costs."""

import subprocess
import sys

import pytest

import cutlayer

NAMES = [
    "Arrays",
    "Augment",
    "Batching",
    "Bound",
    "CutlayerError",
    "Device",
    "Devices",
    "DivergedError",
    "FedAvg",
    "FslSage",
    "Hasfl",
    "HybridOrder",
    "LawError",
    "MergeSFL",
    "Optimiser",
    "Partition",
    "RandomCut",
    "Relay",
    "Result",
    "SampleTransform",
    "Split",
    "SplitFed",
    "SplitFedV2",
    "StopTraining",
    "UnbalancedZeroth",
    "UsageError",
    "ZerothOrder",
    "accuracy",
    "adam",
    "adamw",
    "available",
    "client_memory",
    "codecs",
    "data",
    "dirichlet",
    "evaluate",
    "fedavg",
    "fedavgm",
    "fednag",
    "fednar",
    "fedprox",
    "from_arrays",
    "from_dataset",
    "fsl_sage",
    "hasfl",
    "hosfl",
    "iid",
    "load",
    "losses",
    "mergesfl",
    "models",
    "mu_splitfed",
    "natural",
    "plan",
    "probe",
    "profile",
    "schedules",
    "sfl_v1",
    "sfl_v2",
    "sgd",
    "shards",
    "sl",
    "slowmo",
    "smofi",
    "splitlora",
    "train",
    "uniform",
    "weighted",
    "zo_sfl",
]


def test_the_public_names_are_these() -> None:
    assert cutlayer.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_explained(name: str) -> None:
    explanation = getattr(cutlayer, name).__doc__
    assert explanation
    assert not explanation.startswith(f"{name}(")  # what a dataclass writes by itself


def imported(code: str) -> str:
    """What the code prints in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_cutlayer_leaves_out_what_only_the_command_line_needs() -> None:
    heavy = {"matplotlib", "typer", "rich", "scipy"}
    assert imported(f"import sys, cutlayer; print({heavy} & sys.modules.keys())") == "set()\n"
