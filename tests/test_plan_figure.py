"""The picture of a plan: whose bar ends where, who waits, and how many devices become a readable figure."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from cutlayer.errors import ConfigError
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.planner import Plan, Planned
from cutlayer.planning.problem import Bound, Costs, Fleet, Problem
from cutlayer.results import figures
from cutlayer.results.figures import plan as picture

# A forward pass of 1, 2 and 3 FLOPs, a backward one of 2, 4 and 6; 4, 2 and 1 bits cross; layers of 10 bits each.
COSTS = Costs(
    forward=np.array([1.0, 2.0, 3.0]),
    backward=np.array([2.0, 4.0, 6.0]),
    up=np.array([4.0, 2.0, 1.0]),
    down=np.array([4.0, 2.0, 1.0]),
    model=np.array([10.0, 20.0, 30.0]),
    state=np.zeros(3),
)
BOUND = Bound(beta=1.0, lr=0.1, noise=np.ones(3), slope=np.ones(3), gap=1.0)


def planned(devices: tuple[Device, ...], plan: Plan, before: Plan, numbers: tuple[int, ...] | None = None) -> Planned:
    fleet = Fleet.of(Devices(clients=devices, server=3.0, server_up=10.0, server_down=10.0))
    return Planned(
        problem=Problem(costs=COSTS, fleet=fleet, bound=BOUND, interval=10),
        devices=numbers or tuple(range(len(devices))),
        excluded=(),
        plan=plan,
        before=before,
        notes=(),
    )


TWO = planned(
    (Device(flops=1.0, up=2.0, down=4.0), Device(flops=2.0, up=1.0, down=2.0)),
    Plan(batches=(1, 2), cuts=(1, 2)),
    Plan(batches=(2, 2), cuts=(2, 2)),
    numbers=(0, 3),
)


def fleet_of(count: int) -> Planned:
    """Devices of which the last is the slowest before, and the first the slowest after."""
    clients = tuple(Device(flops=100.0 - 50 * k / count, up=50.0, down=50.0) for k in range(count))
    batches = (16, *(1 + k % 4 for k in range(1, count)))
    return planned(clients, Plan(batches, (1,) * count), Plan((4,) * count, (2,) * count))


def drawn(found: Planned, names: list[str]) -> Figure:
    figure = Figure()
    picture.fill(figure, found, names)
    return figure


def spans(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """From where to where each term goes, device by device."""
    return {
        bars.get_label(): [(round(bar.get_x(), 9), round(bar.get_x() + bar.get_width(), 9)) for bar in bars.patches]
        for bars in axes.containers
    }


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_each_term_lies_on_the_time_line_of_the_round() -> None:
    left, right = drawn(TWO, ["a", "b", "c", "d"]).axes
    # Before, batch 2 and cut 2: there 4/1 + 4/2 = 6 and 4/2 + 4/1 = 6, the server 2 * 2 * (1 + 2) / 3 = 4, and back
    # 4/4 + 8/1 = 9 and 4/2 + 8/2 = 6.
    assert spans(left) == {
        "forward": [(0, 4), (0, 2)],
        "uplink": [(4, 6), (2, 6)],
        "server": [(6, 10), (6, 10)],
        "downlink": [(10, 11), (10, 12)],
        "backward": [(11, 19), (12, 16)],
        "aggregation": [(19, 22), (19, 22)],
        "waiting": [(0, 22), (0, 22)],
    }
    # After, batches 1 and 2, cuts 1 and 2: there 1 + 2 and 2 + 4, the server (1 * 6 + 2 * 3) / 3 = 4.
    assert spans(right) == {
        "forward": [(0, 1), (0, 2)],
        "uplink": [(1, 3), (2, 6)],
        "server": [(6, 10), (6, 10)],
        "downlink": [(10, 11), (10, 12)],
        "backward": [(11, 13), (12, 16)],
        "aggregation": [(16, 19), (16, 19)],
        "waiting": [(0, 19), (0, 19)],
    }


def test_a_thousand_devices_become_their_stragglers_and_groups() -> None:
    found = fleet_of(1000)
    figure = drawn(found, [f"device {k}" for k in range(1000)])
    left, right = figure.axes
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert labels[:4] == ["device 999", "device 0", "1–50", "51–100"] and labels[-1] == "950–998"
    assert len(labels) == 22
    assert left.get_ylabel() == "devices from slow to fast; means of groups"
    # the first group are the devices 998 down to 949: means of their seconds, and their range of batches
    group = np.arange(949, 999)
    assert spans(right)["forward"][2][1] == pytest.approx(found.latency.forward[group].mean(), abs=1e-9)
    assert texts(left)[:3] == ["2", "4", "◀"] and texts(right)[2:5] == ["1", "16", "◀"]
    assert texts(right)[5:7] == ["1", "1–4"]


def test_a_figure_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        figures.draw_plan(TWO, tmp_path, ["a", "b", "c", "d"])
    assert str(told.value).startswith("cannot draw a figure into ")
    (tmp_path / "plan.png").mkdir()
    with pytest.raises(ConfigError) as told:
        figures.draw_plan(TWO, tmp_path / "plan.png", ["a", "b", "c", "d"])
    assert str(told.value) == (
        f"the figure could not be written to {tmp_path / 'plan.png'}: Is a directory; "
        "make room there or choose another --figure, then plan again"
    )
