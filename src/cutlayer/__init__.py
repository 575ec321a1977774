"""Split federated learning for PyTorch: a model is cut at a layer; clients keep their data and the layers below it."""

from cutlayer import codecs, data, models
from cutlayer.core.batches import Batching
from cutlayer.data import (
    Arrays,
    Augment,
    Partition,
    SampleTransform,
    dirichlet,
    from_arrays,
    from_dataset,
    iid,
    load,
    natural,
    shards,
)
from cutlayer.errors import CutlayerError, DivergedError, LawError, UsageError
from cutlayer.methods.fedavg import FedAvg, fedavg
from cutlayer.methods.fsl_sage import FslSage, fsl_sage
from cutlayer.methods.hasfl import Hasfl, hasfl
from cutlayer.methods.hosfl import HybridOrder, hosfl
from cutlayer.methods.mergesfl import MergeSFL, mergesfl
from cutlayer.methods.momentum import fedavgm, fednag, fednar, fedprox, slowmo
from cutlayer.methods.mu_splitfed import UnbalancedZeroth, mu_splitfed
from cutlayer.methods.random_cut import RandomCut
from cutlayer.methods.relay import Relay, sl
from cutlayer.methods.smofi import smofi
from cutlayer.methods.splitfed import SplitFed, sfl_v1
from cutlayer.methods.splitfed_v2 import SplitFedV2, sfl_v2
from cutlayer.methods.splitlora import splitlora
from cutlayer.methods.zo_sfl import ZerothOrder, zo_sfl
from cutlayer.optim import schedules
from cutlayer.optim.optimiser import Optimiser, adam, adamw, sgd
from cutlayer.pieces import losses
from cutlayer.pieces.sampler import Available as available
from cutlayer.pieces.sampler import uniform, weighted
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.planner import plan
from cutlayer.planning.probe import probe
from cutlayer.planning.problem import Bound
from cutlayer.planning.profile import profile
from cutlayer.runs.evaluation import evaluate
from cutlayer.runs.metrics import accuracy
from cutlayer.runs.stopping import StopTraining
from cutlayer.runs.train import Result, train
from cutlayer.split import Split
from cutlayer.studies.client_memory import client_memory
from cutlayer.version import __version__ as __version__

__all__ = [
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
