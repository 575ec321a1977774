"""Choose the engine of a run: the one that it names, or one by a rule.

The rule looks at the model, the batch, the number of clients and the device, but not at the method, so all methods of a
comparison run alike. It never measures time: engines agree only to rounding, which training amplifies, so the same
command must choose the same engine. `bench/engine_rule.py` measures how close the rule comes to the faster engine.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cutlayer import registry
from cutlayer.core import tree
from cutlayer.core.checks import reason
from cutlayer.core.engine import Engine
from cutlayer.core.state import Model, Tensors
from cutlayer.core.values import Block, PerClient, shared
from cutlayer.data.arrays import Arrays
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Cuda
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Unstackable, Vmap
from cutlayer.errors import ConfigError
from cutlayer.split import Split

log = logging.getLogger("cutlayer")
MOST_STACKED = 32e6  # FLOPs of a client's forward pass over a batch up to which stacking clients pays off on a CPU


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """The run that an engine is chosen for."""

    split: Split
    like: Arrays  # a few samples that show what all of them look like
    batch: int
    clients: int  # that take part in a round
    chunk: int | None = None  # the most clients that are computed at a time

    @property
    def device(self) -> torch.device:
        return self.like.y.device


@dataclass(frozen=True)
class Elsewhere:
    """Names the backend of clients in other processes, by module and class."""

    module: str
    name: str

    def __call__(self) -> Any:
        """Import the class of the backend."""
        return getattr(importlib.import_module(self.module), self.name)


def chosen(engine: str | Engine, setting: EngineSetting) -> Engine:
    """Return the engine of this name; an engine itself is returned unchanged."""
    if not isinstance(engine, str):
        if isinstance(engine, type) or not isinstance(engine, Engine):
            raise ConfigError(f"engine is {engine!r}; give a name such as 'loop', or an engine such as Loop()")
        return engine
    make = registry.find("engine", ENGINES, engine)
    if isinstance(make, Elsewhere):
        raise ConfigError(f"engine {engine!r} is a way to reach clients; servers compute on loop, vmap or graph")
    return make(setting)


def chosen_for_servers(engine: str | Engine, setting: EngineSetting) -> Engine:
    """Return the engine of servers with remote clients; on a CPU, auto is loop."""
    return Loop() if engine == "auto" and setting.device.type == "cpu" else chosen(engine, setting)


def _made(name: str, setting: EngineSetting) -> Engine:
    """Make the engine of this name, or log why another one takes its place."""
    on_gpu = setting.device.type == "cuda"
    if name != "loop" and (random := setting.split.random):
        why = "graph cannot record" if name == "graph" or (name == "auto" and on_gpu) else "vmap cannot stack"
        log.warning("engine loop: in training, %s draws from torch's random generator, which %s", random, why)
        return Loop()
    if name == "graph" and not on_gpu:
        log.warning("engine graph needs data on a CUDA device, and these are on the CPU: auto is used instead")
        name = "auto"
    if name == "auto":
        name, why = ("graph", "the data are on a GPU") if on_gpu else rule(setting)
        log.info("engine auto: %s; %s", name, why)
    elif name == "vmap" and (why_not := unstackable(setting)):
        log.warning("engine loop: %s", why_not)
        name = "loop"
    if name == "graph":
        return Graph(Cuda(setting.device), min(setting.chunk or setting.clients, setting.clients))
    return Vmap(setting.chunk) if name == "vmap" else Loop()


def rule(setting: EngineSetting) -> tuple[str, str]:
    """Return the engine for a CPU, and why.

    Stacking saves the overhead of calling each layer for each client. But convolutions become grouped, matrix products
    become batched, and every client's copy of the weights passes through the cache. With large layers that costs more
    than the saved overhead.
    """
    if setting.clients == 1:
        return "loop", "there is one client"
    with FlopCounterMode(display=False) as counter:
        setting.split.predict(Model.joined(*setting.split.initial()), setting.like.x)
    work = setting.batch * (counter.get_total_flops() / len(setting.like))
    found = f"the forward pass of a client's batch takes {_mflop(work)}"
    if work > MOST_STACKED:
        return "loop", f"{found}, and stacking clients pays off only up to {_mflop(MOST_STACKED)}"
    if why_not := unstackable(setting):
        return "loop", why_not
    return "vmap", f"{found}, and stacking clients pays off up to {_mflop(MOST_STACKED)}"


def _mflop(work: float) -> str:
    return f"{work / 1e6:,.0f} MFLOP" if work >= 1e7 else f"{work / 1e6:.2g} MFLOP"


def unstackable(setting: EngineSetting) -> str | None:
    """Return why vmap cannot stack this model, found by trying one step of two clients; None if it can."""
    split, like = setting.split, setting.like

    def loss(model: Model, x: Any, y: Tensor, key: Tensor) -> tuple[Tensor, Tensors]:
        out, buffers = split.whole(model, x, key)
        return split.loss(out, y), buffers

    model, ids, vmap = Model.joined(*split.initial()), (0, 1), Vmap()
    twice = tree.map(lambda a: torch.stack([a, a]), (like.x, like.y))
    stacked = [PerClient("clients", [Block(ids, value, stacked=True)]) for value in twice]
    try:
        vmap.grad(loss, [shared("clients", ids, model), *stacked, vmap.keys({j: j for j in ids})], ids, cut=None)
    except (Unstackable, RuntimeError, ValueError) as error:
        return f"vmap cannot run this model ({error.why if isinstance(error, Unstackable) else reason(error)})"
    return None


ENGINES: registry.Table[Callable[[EngineSetting], Engine] | Elsewhere] = registry.table(
    "ENGINES",
    {
        **{name: partial(_made, name) for name in ("auto", "loop", "vmap", "graph")},
        "ray": Elsewhere("cutlayer.remote.ray.backend", "RayBackend"),
    },
)
