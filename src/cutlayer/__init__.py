"""Split federated learning for PyTorch: a model is cut at a layer, clients keep their data and the layers below."""

from cutlayer import data, models, schedules
from cutlayer.batches import Batching
from cutlayer.data import Arrays, Partition, dirichlet, from_arrays, from_dataset, iid, load, natural, shards
from cutlayer.errors import CutlayerError, LawError, UsageError
from cutlayer.methods import FedAvg, MergeSFL, Relay, SplitFed, SplitFedV2, fedavg, mergesfl, sfl_v1, sfl_v2, sl
from cutlayer.optim import Optimiser, adam, adamw, sgd
from cutlayer.plan.profile import profile
from cutlayer.split import Split
from cutlayer.training import Result, accuracy, evaluate, train

__version__ = "0.1.0"

__all__ = [
    "Arrays",
    "Batching",
    "CutlayerError",
    "FedAvg",
    "LawError",
    "MergeSFL",
    "Optimiser",
    "Partition",
    "Relay",
    "Result",
    "Split",
    "SplitFed",
    "SplitFedV2",
    "UsageError",
    "accuracy",
    "adam",
    "adamw",
    "data",
    "dirichlet",
    "evaluate",
    "fedavg",
    "from_arrays",
    "from_dataset",
    "iid",
    "load",
    "mergesfl",
    "models",
    "natural",
    "profile",
    "schedules",
    "sfl_v1",
    "sfl_v2",
    "sgd",
    "shards",
    "sl",
    "train",
]
