"""How many perturbed passes of HO-SFL fit into the wait for the gradient (Figure 5 and Appendix C.1 of the paper)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutlayer.core.checks import check, check_positive, is_number

FORWARD, BACKWARD = 2, 4  # FLOPs for each parameter and token
BAND = (5, 95)  # percentiles


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A decoder cut between layers, its batch, the links and the speeds of client and server; by default the paper's.

    LLaMA-3.2-1B has 16 layers of 60.8 million parameters and a head of 128,256 words × 2048. Embeddings are looked up,
    which takes no FLOPs; the head is at the server wherever the cut is.
    """

    layers: int = 16
    layer_params: float = 60.8e6
    head_params: float = 262.7e6
    hidden: int = 2048  # values of a token at the cut
    batch: int = 32
    tokens: int = 256  # of a sample
    value_bytes: int = 2  # fp16
    uplink: float = 30.0  # Mbit/s
    downlink: float = 200.0
    rtt: float = 30.0  # ms
    client_tflops: float = 2.0
    server_tflops: float = 312.0
    noise: float = 0.1  # each speed is drawn uniformly within ± this share of itself
    draws: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in POSITIVE:
            check_positive(name, getattr(self, name))
        for name in ("head_params", "rtt"):
            value = getattr(self, name)
            check(is_number(value) and value >= 0, name, value, "a number from 0 up")
        check(is_number(self.noise) and 0 <= self.noise < 1, "noise", self.noise, "a share from 0 up to below 1")
        check(self.seed >= 0, "seed", self.seed, "a whole number from 0 up")

    @property
    def batch_tokens(self) -> int:
        return self.batch * self.tokens

    @property
    def cut_bits(self) -> int:
        """The bits of a batch's activations, and of their gradient."""
        return 8 * self.value_bytes * self.hidden * self.batch_tokens

    def client_flops(self, layers: int) -> float:
        """Return the FLOPs of one forward pass with this many layers at the client."""
        return FORWARD * layers * self.layer_params * self.batch_tokens

    def server_flops(self, layers: int) -> float:
        """Return the FLOPs of a forward and backward pass through the other layers and the head."""
        params = (self.layers - layers) * self.layer_params + self.head_params
        return (FORWARD + BACKWARD) * params * self.batch_tokens


POSITIVE = (
    "layers", "layer_params", "hidden", "batch", "tokens", "value_bytes", "uplink", "downlink", "client_tflops",
    "server_tflops", "draws",
)  # fmt: skip


class Speeds(NamedTuple):
    """Bits and FLOPs per second: a number each, or an array with a value for each draw."""

    uplink: Any
    downlink: Any
    client: Any
    server: Any

    @classmethod
    def of(cls, pipeline: Pipeline) -> "Speeds":
        return cls(
            1e6 * pipeline.uplink, 1e6 * pipeline.downlink, 1e12 * pipeline.client_tflops, 1e12 * pipeline.server_tflops
        )

    @classmethod
    def noisy(cls, pipeline: Pipeline) -> "Speeds":
        """Draw each speed many times, independently of the others."""
        generator = np.random.default_rng(pipeline.seed)
        factors = 1 + pipeline.noise * generator.uniform(-1, 1, (len(cls._fields), pipeline.draws))
        return cls(*(speed * factor for speed, factor in zip(cls.of(pipeline), factors, strict=True)))


def client_pass(pipeline: Pipeline, layers: int, speeds: Speeds) -> Any:
    """Return the seconds of one forward pass at the client."""
    return pipeline.client_flops(layers) / speeds.client


def idle_window(pipeline: Pipeline, layers: int, speeds: Speeds) -> Any:
    """Return the seconds from activations to their gradient: up, forward and backward at the server, down, and RTT."""
    sending = pipeline.cut_bits / speeds.uplink + pipeline.cut_bits / speeds.downlink
    return sending + pipeline.rtt / 1e3 + pipeline.server_flops(layers) / speeds.server


class Band(NamedTuple):
    """A value without noise, and the range of nine in ten draws."""

    value: float
    low: float
    high: float


class Fit(NamedTuple):
    """The passes that fit with this many layers at the client."""

    layers: int
    client_pass: float  # seconds
    idle_window: float
    passes: Band  # P_max: perturbed passes that hide in the window
    passes_after_first: Band  # one less: the unperturbed pass is charged to the window too


def fits(pipeline: Pipeline) -> list[Fit]:
    """Return a fit for each number of layers at the client, from one to all."""
    exact, noisy = Speeds.of(pipeline), Speeds.noisy(pipeline)
    return [_fit(pipeline, layers, exact, noisy) for layers in range(1, pipeline.layers + 1)]


def _fit(pipeline: Pipeline, layers: int, exact: Speeds, noisy: Speeds) -> Fit:
    one, window = client_pass(pipeline, layers, exact), idle_window(pipeline, layers, exact)
    drawn = idle_window(pipeline, layers, noisy) / client_pass(pipeline, layers, noisy)
    return Fit(layers, one, window, _band(window / one, drawn), _band(max(0.0, window / one - 1), drawn - 1))


def _band(value: float, drawn: NDArray[np.float64]) -> Band:
    low, high = (max(0.0, float(edge)) for edge in np.percentile(drawn, BAND))
    return Band(value, low, high)
