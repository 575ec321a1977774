"""Specifies codecs on a GPU: the CPU's bits, also in recordings, and the numbers of a run on the CPU."""

import math
from typing import Any

import pytest
import torch
from conftest import CODECS
from test_codecs import IDS, SHIPPED, made, normal, same
from test_gpu_graph import DOUBLE, after, cuda, vector
from test_gpu_graph import made as simulated
from torch import Tensor
from torch.func import vmap

from cutlayer.core import tree
from cutlayer.core.codec import FLOATS, Coder
from cutlayer.core.kinds import ACTIVATIONS, MODEL

pytestmark = pytest.mark.gpu
__all__ = ["cuda"]  # a fixture

SHAPES = [(4, 3, 8, 9), (2, 700), (33, 64, 7, 7), (4, 6), (3,), (2, 512), (3, 40_000)]
KEY = torch.tensor(2**63 - 5)


def values(dtype: torch.dtype) -> list[Tensor]:
    """Random numbers, some of them equal, some of them extreme, and some rows not finite."""
    found = [normal(*shape, seed=k, dtype=dtype) for k, shape in enumerate(SHAPES)]
    found += [(a * 2).round() for a in found[:3]]
    most = torch.finfo(dtype).max
    for size in (most, most / 200, float(torch.finfo(dtype).smallest_normal) / 8):
        found.append((found[0].double().clamp(-1, 1) * size).to(dtype))
    for broken in (math.nan, math.inf, -math.inf):
        found.append(normal(4, 3, 8, 9, dtype=dtype))
        found[-1][1, 2, 3, 4] = broken
    return found


def there(value: Any) -> Any:
    return tree.map(lambda a: a.cuda(), value)


def here(value: Any) -> Any:
    return tree.map(lambda a: a.cpu(), value)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_codes_have_the_same_bits_on_both_devices(spec: Any, dtype: torch.dtype) -> None:
    for kind in (ACTIVATIONS, MODEL):
        own = Coder(kind, made(spec))
        for a in values(dtype):
            expected, found = own.encode(a, KEY), own.encode(a.cuda(), KEY.cuda())
            assert all(leaf.is_cuda for leaf in tree.tensors(found))
            assert same(here(found), expected), (kind.name, a.shape)
            own.check(found)
            decoded = own.decode(found).cpu()
            assert torch.allclose(decoded, own.decode(expected), rtol=1e-2, atol=1e-5, equal_nan=True)
            if "lowrank" not in str(spec):  # whose product is added in the order of the device
                assert same(decoded, own.decode(expected))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_a_stack_has_the_same_bits_on_both_devices(spec: Any, dtype: torch.dtype) -> None:
    own, keys = Coder(ACTIVATIONS, made(spec)), torch.arange(3) * 77
    for shape in SHAPES:
        a = normal(3, *shape, dtype=dtype)
        assert same(here(vmap(own.encode)(a.cuda(), keys.cuda())), vmap(own.encode)(a, keys))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spec", SHIPPED, ids=IDS)
def test_recordings_have_the_same_bits(spec: Any, dtype: torch.dtype) -> None:
    own = Coder(ACTIVATIONS, made(spec))
    for shape in ((4, 3, 8, 9), (2, 700)):
        a, key = torch.zeros(shape, dtype=dtype, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            own.decode(own.encode(a, key))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            coded = own.encode(a, key)
            decoded = own.decode(coded)
        for seed in range(3):
            given = normal(*shape, seed=seed, dtype=dtype)
            if seed == 2:
                given[1].view(-1)[3] = math.nan
            a.copy_(given)
            key.fill_(seed * 1000 + 7)
            graph.replay()
            expected = own.encode(given, torch.tensor(seed * 1000 + 7))
            assert same(here(coded), expected)
            assert same(decoded.cpu(), own.decode(there(expected)).cpu())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("case", ["sfl_v1", "fedavg"])
def test_the_engine_graph_gives_the_numbers_of_the_loop_on_the_cpu(case: str, name: str) -> None:
    graph = after(simulated(case, torch.float64, "graph", codecs=CODECS[name]))
    loop = after(simulated(case, torch.float64, "loop", device="cpu", codecs=CODECS[name]))
    plain = after(simulated(case, torch.float64, "loop", device="cpu"))
    trained, expected, uncoded = (vector(state).cpu() for state in (graph, loop, plain))
    assert float((trained - expected).norm() / expected.norm()) <= DOUBLE
    assert float((uncoded - expected).norm() / expected.norm()) > 1e-6  # the codecs are there
