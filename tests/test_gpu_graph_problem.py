"""Specifies that the engine `graph` is tested on training that hardly enlarges what rounding changes."""

import pytest
import torch
from test_engines_agree import CASES
from test_gpu_graph import BOUNDS, after, apart, made, smooth
from torch import nn

from cutlayer.runs.simulation import Simulation

pytestmark = pytest.mark.slow

MARGIN = 10  # what is left of a bound for the rounding of all steps
LEAST_MOVED = 0.01  # of the parameters' length: engines that train nothing would agree as well


def on_cpu(case: str, dtype: torch.dtype, net: nn.Module) -> Simulation:
    return made(case, dtype, "loop", net=net, device="cpu")


def off_by_a_bit(net: nn.Module) -> nn.Module:
    """The network, each of its parameters the next number above or below."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            up = torch.rand(p.shape, generator=random) < 0.5
            p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p)))
    return net


@pytest.mark.parametrize("dtype", BOUNDS, ids=("float64", "float32"))
@pytest.mark.parametrize("case", CASES)
def test_a_start_that_is_off_by_a_bit_ends_well_within_the_bounds(case: str, dtype: torch.dtype) -> None:
    sim = on_cpu(case, dtype, smooth(dtype))
    end = after(sim)
    assert apart(sim.start(), end) > LEAST_MOVED
    found = apart(after(on_cpu(case, dtype, off_by_a_bit(smooth(dtype)))), end)
    print(f"{case}: {dtype} {found:.1e}")
    assert 0 < found < BOUNDS[dtype] / MARGIN
