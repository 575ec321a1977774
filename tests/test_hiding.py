"""How many perturbed passes hide in the wait for the gradient: the HO-SFL paper's numbers, and what may be asked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from test_cli import mistake, say

from cutlayer.errors import ConfigError
from cutlayer.studies import overlap_figure as picture
from cutlayer.studies.overlap import Pipeline, Speeds, client_pass, fits, idle_window
from cutlayer.studies.overlap_figure import draw_overlap

__all__ = ["say"]  # a fixture

LLAMA = Pipeline()
EXACT = Speeds.of(LLAMA)


def test_the_papers_numbers_with_four_layers_at_the_client() -> None:
    # 8,192 tokens x 2048 values x 16 bits; 2 x 4 x 60.8 M x 8,192 FLOPs / 2 TFLOPS
    assert LLAMA.cut_bits == 2**28
    assert client_pass(LLAMA, 4, EXACT) == pytest.approx(1.9923, abs=5e-5)
    # up 8.948 s, down 1.342 s, 0.030 s, and 6 x (12 x 60.8 M + 262.7 M) x 8,192 FLOPs / 312 TFLOPS = 0.156 s
    assert idle_window(LLAMA, 4, EXACT) == pytest.approx(8.9478 + 1.3422 + 0.030 + 0.1563, abs=2e-4)
    four = fits(LLAMA)[3]
    assert (f"{four.client_pass:.2f}", f"{four.idle_window:.1f}") == ("1.99", "10.5")
    # the paper says about 4 on average, which is one less
    assert (f"{four.passes.value:.1f}", f"{four.passes_after_first.value:.1f}") == ("5.3", "4.3")
    assert f"{four.passes.value:.2f}" == "5.26"


def test_more_layers_hide_less() -> None:
    found = fits(LLAMA)
    assert [fit.layers for fit in found] == list(range(1, 17))
    values = [fit.passes.value for fit in found]
    assert values == sorted(values, reverse=True)
    assert all(fit.passes.value == fit.idle_window / fit.client_pass for fit in found)
    assert all(fit.passes_after_first.value == pytest.approx(fit.passes.value - 1) for fit in found)


def test_bands_come_from_the_seed_and_hold_the_middle() -> None:
    (first, again), other = ([fits(LLAMA)[3].passes for _ in range(2)], fits(replace(LLAMA, seed=1))[3].passes)
    assert first == again != other
    assert first.low < first.value < first.high
    # no more than all speeds at their worst or best: the window by 1 / 1.1 to 1 / 0.9, the pass by as much
    assert 0.9 / 1.1 * first.value < first.low and first.high < 1.1 / 0.9 * first.value
    still = fits(replace(LLAMA, noise=0.0))[3].passes
    assert still.low == still.high == pytest.approx(still.value)


def test_a_pass_that_does_not_fit_is_none_and_not_less() -> None:
    slow = fits(replace(LLAMA, client_tflops=0.1))[15]
    assert slow.passes.value < 1
    assert slow.passes_after_first == (0, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0, but it must be a number above 0."),
        ({"uplink": -1.0}, "uplink is -1.0, but it must be a number above 0."),
        ({"server_tflops": float("nan")}, "server_tflops is nan, but it must be a number above 0."),
        ({"rtt": -1.0}, "rtt is -1.0, but it must be a number from 0 up."),
        ({"noise": 1.0}, "noise is 1.0, but it must be a share from 0 up to below 1."),
        ({"draws": 0}, "draws is 0, but it must be a number above 0."),
        ({"seed": -1}, "seed is -1, but it must be a whole number from 0 up."),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        replace(LLAMA, **change)
    assert str(error.value) == message


def test_the_command_is_by_default_the_papers(say: Any) -> None:
    said = say("overlap")
    rows = [line.split() for line in said.out.splitlines()]
    (four,) = [row for row in rows if row[:1] == ["4"]]
    assert [four[i] for i in (1, 2, 3, 5)] == ["1.99", "10.5", "5.3", "4.3"]
    assert len([row for row in rows if row and row[0].isdecimal()]) == 16
    assert "band: nine in ten of 1000 draws of every speed within ±10 %" in said.out


def test_the_command_takes_every_number(say: Any) -> None:
    words = (
        "--layers 2 --layer-params 1 --head-params 3 --hidden 10 --batch 4 --tokens 5 --value-bytes 4 --uplink 1 "
        "--downlink 2 --rtt 100 --client-tflops 0.001 --server-tflops 0.002 --noise 0.2 --draws 7 --seed 3"
    )
    found = say("overlap", *words.split(), "--figure", "a.svg", "--json").json
    given = {"layers": 2, "layer_params": 1e6, "head_params": 3e6, "hidden": 10, "batch": 4, "tokens": 5}
    given |= {"value_bytes": 4, "uplink": 1, "downlink": 2, "rtt": 100, "client_tflops": 0.001, "server_tflops": 0.002}
    assert found["pipeline"] == given | {"noise": 0.2, "draws": 7, "seed": 3}
    one, two = found["fits"]
    # 20 tokens: 6,400 bits at 1 and 2 Mbit/s, 0.1 s, and 6 x 4 M x 20 FLOPs at 2 GFLOPS; 2 x 1 M x 20 at 1 GFLOPS
    assert one["window_seconds"] == pytest.approx(0.0064 + 0.0032 + 0.1 + 0.24)
    assert one["pass_seconds"] == pytest.approx(0.04)
    assert one["passes"]["value"] == pytest.approx(0.3496 / 0.04)
    assert two["window_seconds"] == pytest.approx(0.1096 + 0.18)  # the head alone is left to the server
    assert (found["figure"], Path("a.svg").exists()) == ("a.svg", True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--uplink 0", "uplink is 0.0, but it must be a number above 0."),
        ("--noise 2", "noise is 2.0, but it must be a share from 0 up to below 1."),
        ("--figure a.gif", "cannot draw a figure into a.gif; use a name that ends in .png, .pdf or .svg"),
    ],
)
def test_mistakes_on_the_command_line(say: Any, words: str, message: str) -> None:
    assert mistake(say("overlap", *words.split())) == message


def test_the_picture_has_both_lines_and_their_bands() -> None:
    figure, found = Figure(), fits(LLAMA)
    picture.fill(figure, found)
    (axes,) = figure.axes
    passes, one_less = axes.lines
    assert list(passes.get_ydata()) == [fit.passes.value for fit in found]
    assert list(one_less.get_ydata()) == [fit.passes_after_first.value for fit in found]
    edges = [{round(float(y), 6) for _, y in band.get_paths()[0].vertices} for band in axes.collections]
    assert {round(fit.passes.low, 6) for fit in found} <= edges[0]
    assert {round(fit.passes_after_first.high, 6) for fit in found} <= edges[1]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layers at the client", "perturbed passes that hide")


def test_a_figure_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"File exists; make room there or choose another --figure$"):
        draw_overlap(fits(LLAMA), tmp_path / "file" / "a.png")
