"""Before a training, the cut model is compared with the module itself."""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutlayer as cl
from cutlayer.errors import CutError
from cutlayer.split import Split

X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1])


class Listed(nn.Module):
    """Lists three layers; its forward may do something else."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.between = between

    def units(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("first", ("a",)), ("second", ("b",)), ("third", ("c",))]

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.between(self.a(x))))


class Noisy(nn.Module):
    """Draws in every way that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Linear(3, 4), nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
        self.rrelu, self.norm, self.out = nn.RReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x)).unsqueeze(1)
        h, _ = self.attention(h, h, h)
        h, _ = self.lstm(h)
        h = F.dropout1d(self.rrelu(h), 0.5)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.5)
        return self.out(self.norm(F.alpha_dropout(h[:, 0], 0.5)) * torch.rand_like(h[:, 0]) + torch.randn_like(h[:, 0]))


def test_units_that_do_all_that_the_forward_does_pass() -> None:
    for cut in range(4):
        Split(Listed(), cut).prove(X, Y)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_difference_names_the_first_unit_that_differs(cut: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(CutError) as error:
        Split(Listed(torch.relu), cut).prove(X, Y)
    text = str(error.value)
    assert text.startswith("Listed does not compute the same when it is cut: outputs differ by ")
    assert ", first in the unit 'second'. Its forward does something that its units do not; " in text


def test_a_difference_of_the_gradients_alone_is_found() -> None:
    torch.manual_seed(0)
    with pytest.raises(CutError, match=r"gradients differ by .* \('a\.\w+'\), first in the unit 'first'\."):
        Split(Listed(torch.detach), 1).prove(X, Y)


class Depth(nn.Module):
    """Stochastic depth as in the code of many papers: drawn in Python for a whole batch."""

    def __init__(self, draw: Callable[[], Any], p: float) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.draw, self.p = draw, p

    def units(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("first", ("a",)), ("second", ("b",)), ("third", ("c",))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if not self.training or self.draw() > self.p:
            x = self.b(x)
        return self.c(x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), random.random, lambda: np.random.rand()])
def test_units_that_do_what_the_forward_does_by_chance_are_found(draw: Callable[[], Any], p: float) -> None:
    models = Depth(draw, p), Depth(draw, -1.0)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CutError, match=r"does not compute the same when it is cut: .* differ by"):
        Split(models[0], 1).prove(X, Y)
    Split(models[1], 1).prove(X, Y)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_a_difference_that_is_not_finite_is_found() -> None:
    with pytest.raises(CutError, match="outputs differ by inf, first in the unit 'second'"):
        Split(Listed(torch.sqrt), 1).prove(X, Y)


def test_a_hook_of_the_whole_model_is_found() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model.register_forward_hook(lambda module, given, out: 2 * out)
    with pytest.raises(CutError, match=r"outputs differ by .*, first in the unit '1'\."):
        Split(model, 1).prove(X, Y)


class Writes(nn.Module):
    """Writes into its own value through a view, which a trace does not show; no module ends there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = h.view(-1, 2, 2)
        k += 1
        return self.c(self.b(h) + h)


def test_units_whose_outputs_cannot_be_compared_are_named_with_the_first_that_differs() -> None:
    torch.manual_seed(0)
    split = Split(Writes(), 1)
    assert split.units == ("a", "add_1", "c")
    with pytest.raises(CutError, match=r"outputs differ by .*, first in one of the units 'add_1' to 'c'\. Its forward"):
        split.prove(X, Y)


def test_a_buffer_that_differs_is_named() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.c = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

        def units(self) -> list[tuple[str, tuple[str, ...]]]:
            return [(name, (name,)) for name in ("a", "norm", "c")]

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.norm(h)
            return self.c(self.norm(h))

    with pytest.raises(CutError) as error:
        Split(Twice(), 1).prove(X, Y)
    found = "buffers differ by 1.0e+00 ('norm.num_batches_tracked'), first in the unit 'norm'. "
    assert found in str(error.value)


def test_a_complex_tensor_cannot_cross() -> None:
    class Waves(Writes):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(torch.fft.irfft(torch.fft.rfft(self.a(x)), n=4)))

    split = Split(Waves(), "a")
    assert split.units == ("a", "fft_rfft", "fft_irfft", "b", "c")
    split.prove(X, Y)
    split.rehearse(X, Y)
    for check in (split.with_cut(2).prove, split.with_cut(2).rehearse):
        with pytest.raises(CutError) as error:
            check(X, Y)
        assert str(error.value) == (
            "a complex tensor cannot cross the cut; cut elsewhere, or let torch.view_as_real cross"
        )


@pytest.mark.parametrize("head", [None, 3])
def test_random_layers_are_switched_off_on_both_sides(head: int | None) -> None:
    torch.manual_seed(0)
    model = Noisy()
    before, values = torch.get_rng_state(), {name: v.clone() for name, v in model.state_dict().items()}
    split = Split(model, 2, head=head)
    assert split.random
    split.prove(X, Y)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, values[name]) for name, v in model.state_dict().items())


def test_a_forward_that_differs_from_itself_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def count(x: Tensor) -> Tensor:
        calls.append(0)
        return x * (1 + len(calls))

    with caplog.at_level(logging.WARNING, "cutlayer"):
        Split(Listed(count), 1).prove(X, Y)
    assert caplog.messages == [
        "the cut model is not compared with the whole: its forward gives something else at each call"
    ]


def test_a_model_without_a_forward_or_with_a_preloaded_base_is_not_compared() -> None:
    nothing = type("Nothing", (Listed,), {"forward": nn.Module.forward})
    Split(nothing(), 1).prove(X, Y)
    base = type("Base", (Listed,), {"preloaded": lambda self: frozenset({"a.weight"})})(torch.relu)
    base.a.requires_grad_(False)
    Split(base, 1).prove(X, Y)


def test_a_run_compares_before_its_first_round() -> None:
    data = cl.from_arrays(torch.randn(20, 3), torch.arange(20) % 2)
    method = cl.sfl_v1(model=Split(Listed(torch.relu), 1), client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
    with pytest.raises(CutError, match="does not compute the same when it is cut"):
        cl.train(method, data, cl.iid(20, 2, key=0), rounds=1, batching=cl.Batching(size=4))
