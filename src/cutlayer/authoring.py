"""Everything for writing a method in one import: places and verbs, kinds, values, and the pieces that methods share."""

from cutlayer.core.kinds import (
    ACTIVATIONS,
    AUXILIARY,
    GRADIENTS,
    LABELS,
    MODEL,
    SCALARS,
    SETTINGS,
    SETUP,
    SLOPES,
    STATISTICS,
    SYNC,
)
from cutlayer.core.method import Method, Needs, global_model, method
from cutlayer.core.places import Clients, Step
from cutlayer.core.program import at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Grads, Model, Part, Progress, State, Tensors
from cutlayer.core.values import Held, PerClient
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.carry import AverageMoments, Carry, Reset
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.exchange import Crossing, Exchange, by_shape, through_server
from cutlayer.pieces.fuse import AverageEachEpoch, AverageEachStep, Fuse, FuseMomenta, Keep
from cutlayer.pieces.norms import Side, joint_norms, refuse_joint_norm
from cutlayer.pieces.outer import HeavyBall, Outer, Replace, SlowMo
from cutlayer.pieces.report import Report, nothing, report
from cutlayer.pieces.sampler import shuffled
from cutlayer.pieces.start import with_one_server
from cutlayer.pieces.weights import weights
from cutlayer.split import Split

__all__ = [
    "ACTIVATIONS",
    "AUXILIARY",
    "GRADIENTS",
    "LABELS",
    "MODEL",
    "SCALARS",
    "SETTINGS",
    "SETUP",
    "SLOPES",
    "STATISTICS",
    "SYNC",
    "AverageEachEpoch",
    "AverageEachStep",
    "AverageMoments",
    "Carry",
    "Clients",
    "Crossing",
    "Exchange",
    "Fed",
    "Fuse",
    "FuseMomenta",
    "Grads",
    "HeavyBall",
    "Held",
    "Keep",
    "Method",
    "Model",
    "Needs",
    "Outer",
    "Part",
    "PerClient",
    "Progress",
    "Replace",
    "Report",
    "Reset",
    "Server",
    "Side",
    "SlowMo",
    "Split",
    "SplitClient",
    "State",
    "Step",
    "Tensors",
    "Transform",
    "at_client",
    "by_shape",
    "global_model",
    "joint_norms",
    "method",
    "nothing",
    "refuse_joint_norm",
    "report",
    "shuffled",
    "through_server",
    "weights",
    "with_one_server",
]
