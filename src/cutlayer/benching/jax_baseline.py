"""The baseline in JAX: a residual network as pure functions, with `vmap` over the clients inside one `jit`."""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from cutlayer.benching.cases import LR, MOMENTUM, WARM_UP, WEIGHT_DECAY, BenchProblem
from cutlayer.benching.contenders import Contender, MemoryUse
from cutlayer.errors import ConfigError
from cutlayer.models.resnet import Basic, ResNet

Array = Any  # of JAX, which is optional
Values = dict[str, Array]
NORM_EPS, NORM_MOMENTUM = 1e-5, 0.1  # of torch's BatchNorm
IMAGES_LAST = ("NHWC", "HWIO", "NHWC")


class JaxState(NamedTuple):
    """The values of all clients, stacked along a first axis."""

    params: Values
    stats: Values  # the running statistics of BatchNorm
    momenta: Values


class JaxVmap(Contender):
    """A step of SMoFi over stacked clients, compiled once; each step reuses the buffers of the last."""

    def __init__(self, problem: BenchProblem) -> None:
        case = problem.case
        place = problem.images.device.type
        jax, blocks = imported(place), blocks_of(problem.net)
        self.device = jax.devices("gpu" if place == "cuda" else place)[0]

        def put(tensor: Tensor) -> Array:
            return jax.device_put(tensor.detach().cpu().numpy(), self.device)

        self.x, self.y = put(problem.images.permute(0, 2, 3, 1)), put(problem.data.y.int())
        self.turns = iter([put(problem.batches(turn).int()) for turn in range(WARM_UP + case.turns)])
        params = {name: put(_in_jax(p)) for name, p in problem.net.named_parameters()}
        _check_names(params, blocks)
        stats = {name: put(b) for name, b in problem.net.named_buffers() if "running" in name}
        self.state = stacked(params, stats, case.clients)
        at_server = frozenset(problem.split.sides[1])
        self.step = jax.jit(smofi_step(forward(blocks, case.precision), at_server), donate_argnums=0)
        self.losses: list[Array] = []

    def turn(self) -> int:
        batches = next(self.turns)
        self.losses = []
        for of_clients in batches:
            self.state, loss = self.step(self.state, self.x, self.y, of_clients)
            self.losses.append(loss)
        for array in self.state.params.values():
            array.block_until_ready()
        return int(batches.shape[0] * batches.shape[1])

    def loss(self) -> float | None:
        return sum(float(loss) for loss in self.losses) / len(self.losses)

    def memory(self) -> MemoryUse | None:
        counted = self.device.memory_stats()
        if counted is None:  # on a CPU
            return None
        return MemoryUse(counted["peak_bytes_in_use"] - self.x.nbytes, counted.get("peak_pool_bytes"))


def imported(place: str) -> Any:
    """Import JAX and check that it can use the device; it must not preallocate memory, since others share the GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
    except ImportError:
        raise ConfigError("jax is not installed") from None
    if place == "cuda" and jax.default_backend() != "gpu":
        raise ConfigError("jax has no GPU here")
    return jax


class BlockPlan(NamedTuple):
    """The path of a residual block in the model, and what it does to the shape."""

    path: str
    stride: int
    projected: bool  # whether the shortcut has a convolution


def blocks_of(net: nn.Module) -> tuple[BlockPlan, ...]:
    """Return the residual blocks of a network; refuse one that has anything else between stem and head."""
    if not isinstance(net, ResNet):
        raise ConfigError("only residual networks are written in JAX; try resnet18")
    blocks = []
    for path, _ in net.units()[1:-1]:
        block = net.get_submodule(path)
        if not isinstance(block, Basic):
            raise ConfigError("only residual networks of basic blocks are written in JAX; try resnet18")
        blocks.append(BlockPlan(path, block.conv1.stride[0], block.downsample is not None))
    return tuple(blocks)


def forward(blocks: tuple[BlockPlan, ...], precision: str) -> Callable[[Values, Values, Array], tuple[Array, Values]]:
    """Return the network in training mode: it gives scores and new running statistics, with torch's names."""
    import jax.numpy as jnp
    from jax import lax
    from jax import nn as jax_nn

    compute = jnp.bfloat16 if precision == "bf16" else jnp.float32
    exactly = lax.Precision.HIGHEST if precision == "fp32" else lax.Precision.DEFAULT

    def network(params: Values, stats: Values, x: Array) -> tuple[Array, Values]:
        moved: Values = {}

        def conv(name: str, x: Array, stride: int = 1) -> Array:
            kernel = params[f"{name}.weight"].astype(compute)
            pad = kernel.shape[0] // 2
            around, strides = [(pad, pad)] * 2, (stride, stride)
            return lax.conv_general_dilated(
                x, kernel, strides, around, dimension_numbers=IMAGES_LAST, precision=exactly
            )

        def norm(name: str, x: Array) -> Array:
            wide, count = x.astype(jnp.float32), x.size // x.shape[-1]
            mean = wide.mean((0, 1, 2))
            variance = jnp.maximum((wide * wide).mean((0, 1, 2)) - mean * mean, 0)  # one pass over the memory
            for kind, value in (("mean", mean), ("var", variance * count / (count - 1))):
                old = stats[f"{name}.running_{kind}"]
                moved[f"{name}.running_{kind}"] = old + NORM_MOMENTUM * (lax.stop_gradient(value) - old)
            scale = params[f"{name}.weight"] * lax.rsqrt(variance + NORM_EPS)
            return ((wide - mean) * scale + params[f"{name}.bias"]).astype(compute)

        def block(plan: BlockPlan, x: Array) -> Array:
            at, shortcut = plan.path, x
            if plan.projected:
                shortcut = norm(f"{at}.downsample.1", conv(f"{at}.downsample.0", x, plan.stride))
            x = jax_nn.relu(norm(f"{at}.bn1", conv(f"{at}.conv1", x, plan.stride)))
            return jax_nn.relu(norm(f"{at}.bn2", conv(f"{at}.conv2", x)) + shortcut)

        x = jax_nn.relu(norm("bn1", conv("conv1", x.astype(compute))))
        for plan in blocks:
            x = block(plan, x)
        features = x.astype(jnp.float32).mean((1, 2)).astype(compute)
        scores = jnp.dot(features, params["fc.weight"].astype(compute), precision=exactly)
        return scores.astype(jnp.float32) + params["fc.bias"], moved

    return network


def smofi_step(
    network: Callable[[Values, Values, Array], tuple[Array, Values]], at_server: frozenset[str]
) -> Callable[[JaxState, Array, Array, Array], tuple[JaxState, Array]]:
    """Return a step: all clients' gradients, momentum SGD with weight decay, and the mean of the server's momenta."""
    import jax
    import jax.numpy as jnp

    def loss(params: Values, stats: Values, x: Array, y: Array) -> tuple[Array, Values]:
        scores, moved = network(params, stats, x)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1)
        return -chosen.mean(), moved

    def step(state: JaxState, x: Array, y: Array, batch: Array) -> tuple[JaxState, Array]:
        gradients = jax.vmap(jax.value_and_grad(loss, has_aux=True))
        (losses, stats), grads = gradients(state.params, state.stats, x[batch], y[batch])
        params, momenta = {}, {}
        for name, old in state.params.items():
            own = MOMENTUM * state.momenta[name] + grads[name] + WEIGHT_DECAY * old
            params[name] = old - LR * own
            momenta[name] = jnp.broadcast_to(own.mean(0), own.shape) if name in at_server else own
        return JaxState(params, stats, momenta), losses.mean()

    return step


def stacked(params: Values, stats: Values, clients: int) -> JaxState:
    """Repeat the values for every client, with zero momenta."""
    import jax.numpy as jnp

    def copies(values: Mapping[str, Array]) -> Values:
        return {name: jnp.repeat(value[None], clients, axis=0) for name, value in values.items()}

    own = copies(params)
    return JaxState(own, copies(stats), {name: jnp.zeros_like(value) for name, value in own.items()})


def _in_jax(value: Tensor) -> Tensor:
    """Permute a kernel to height, width, inputs, outputs, and a matrix to inputs, outputs."""
    return value.permute(2, 3, 1, 0) if value.dim() == 4 else value.t() if value.dim() == 2 else value


def _check_names(params: Values, blocks: tuple[BlockPlan, ...]) -> None:
    """Check that both networks have the same parameters."""
    convs, norms = ["conv1"], ["bn1"]
    for at, _, projected in blocks:
        convs += [f"{at}.conv1", f"{at}.conv2", *([f"{at}.downsample.0"] if projected else [])]
        norms += [f"{at}.bn1", f"{at}.bn2", *([f"{at}.downsample.1"] if projected else [])]
    read = {f"{name}.weight" for name in (*convs, *norms, "fc")} | {f"{name}.bias" for name in (*norms, "fc")}
    if read != params.keys():
        other = ", ".join(sorted(read ^ params.keys())[:3])
        raise ConfigError(f"the network in JAX is another one: {other}")
