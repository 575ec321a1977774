"""Specifies functions that are compiled: the same values and gradients, or the function itself with the reason."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import agree, images, resnet
from test_rows import begun, gradients, laid_out, stepped
from torch import Tensor, nn

from cutlayer import optim
from cutlayer.core import tree
from cutlayer.core.calculus import Pull, vjp
from cutlayer.core.state import Model, Tensors
from cutlayer.engines.graph.compiling import Compiled, compiled, compiling, outliving
from cutlayer.engines.graph.forms import Forms
from cutlayer.engines.graph.lane import with_plain_numbers
from cutlayer.split import Split


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "cutlayer"]


def waves(values: Model, x: Tensor, power: int) -> tuple[Tensor, Tensors]:
    out = torch.sin(x @ values.params["w"]) ** power
    return out, {"seen": values.buffers["seen"] + out.detach().mean()}


def wave_values(seed: int) -> tuple[Model, Tensor]:
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 2, generator=random, dtype=torch.float64)
    x = torch.randn(4, 3, generator=random, dtype=torch.float64)
    return Model({"w": w.requires_grad_()}, {}, {"seen": x.sum()}), x.requires_grad_()


@pytest.mark.slow
def test_a_compiled_function_is_the_function_and_so_are_its_gradients(eager: list[int]) -> None:
    fast = Compiled(waves)
    for seed, power in ((0, 2), (1, 2), (2, 3)):  # values may change, and what is no tensor is compiled anew
        found, expected = [], []
        for fn, results in ((fast, found), (waves, expected)):
            values, x = wave_values(seed)
            out, kept = fn(values, x, power)
            results += [out.detach(), kept, *torch.autograd.grad(out.sum(), (values.params["w"], x))]
        agree(found, expected, 1e-12)
    assert len(eager) == 2


def stubborn(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def test_a_function_that_cannot_be_traced_runs_as_it_is_and_says_why(
    eager: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    fast = Compiled(stubborn)
    assert [fast(torch.tensor([a])).item() for a in (1.0, -1.0, 2.0)] == [2.0, -3.0, 4.0]
    (why,) = said(caplog)
    assert why.startswith(
        "not compiled, and so slower: stubborn (It appears that you're trying to get value out of a tracing tensor"
    )
    assert not eager


def test_a_function_that_the_compiler_fails_on_runs_as_it_is_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(torch, "compile", lambda traced, **_: fails)
    fast = Compiled(waves)
    for seed in (0, 1):
        agree(fast(*wave_values(seed), 2), waves(*wave_values(seed), 2), 0)
    assert said(caplog) == ["not compiled, and so slower: waves (no compiler here)"]


def test_memory_that_is_short_says_nothing_of_a_function(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def tight(when: str) -> None:
        tries.append(when)
        if tries.count(when) == 1:
            raise torch.OutOfMemoryError("out of memory")

    def doubled(x: Tensor) -> Tensor:
        tight("traced")
        return x * 2

    monkeypatch.setattr(torch, "compile", lambda traced, **_: lambda *given: (tight("run"), traced(*given))[1])
    fast = Compiled(doubled)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            fast(torch.ones(3))
    agree(fast(torch.ones(3)), torch.full((3,), 2.0), 0)
    assert tries == ["traced", "traced", "run", "run"] and not said(caplog)


class StraightThrough(torch.autograd.Function):
    """Rounds, and hands the gradient on as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rounded(x: Tensor) -> Tensor:
    made: Tensor = StraightThrough.apply(2 * x)
    return made


def test_a_custom_backward_pass_is_kept(eager: list[int], caplog: pytest.LogCaptureFixture) -> None:
    x = torch.tensor([0.2, 1.6], requires_grad=True)
    (gradient,) = torch.autograd.grad(Compiled(rounded)(x).sum(), x)
    assert gradient.tolist() == [2.0, 2.0] and not eager
    why = "it has a backward pass of its own, which a trace would lose"
    assert said(caplog) == [f"not compiled, and so slower: rounded ({why})"]


def test_a_custom_backward_pass_is_kept_even_if_nothing_was_differentiated_before(eager: list[int]) -> None:
    fast = Compiled(rounded)
    fast(torch.tensor([0.2, 1.6]))
    x = torch.tensor([0.2, 1.6], requires_grad=True)
    (gradient,) = torch.autograd.grad(fast(x).sum(), x)
    assert gradient.tolist() == [2.0, 2.0]


def half_frozen(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean()
    return scale * x


def test_no_gradient_flows_through_what_a_function_does_under_no_grad(eager: list[int]) -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(Compiled(half_frozen)(x).sum(), x)
    assert gradient.tolist() == [2.0, 2.0] and len(eager) == 1


def test_functions_are_not_traced_inside_of_vmap(eager: list[int]) -> None:
    with compiling():
        agree(torch.vmap(lambda x: compiled(torch.sin)(x))(torch.ones(3, 2)), torch.ones(3, 2).sin(), 0)
    assert not eager


def test_a_compiled_pullback_that_lasts_can_be_asked_again_whatever_others_did(eager: list[int]) -> None:
    def run(part: Model, x: Tensor) -> tuple[Tensor, Tensors]:
        return fast(part.params["w"], x), {}

    fast = Compiled(lambda w, x: torch.sin(x @ w))
    (values, x), ask = wave_values(0), torch.ones(4, 2, dtype=torch.float64)
    with compiling():
        once = vjp(run, [values, x.detach()], None)[1](ask)
        with outliving():
            later = vjp(run, [values, x.detach()], None)[1]
        found = [later(ask, again=True) for _ in range(2)]
    assert len(eager) == 2
    for grads in found:
        agree(grads.params, once.params, 0)


def saved_twice(w: Tensor, x: Tensor) -> Tensor:
    """A backward pass that may write over what it saved does so, in torch's own code for a CPU."""
    h = torch.tanh(x @ w)
    h = torch.sin(h * h)
    return torch.tanh(h.sum(0) * h)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compilers_cache_gives_a_pullback_that_lasts_no_code_of_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    random = torch.Generator().manual_seed(0)
    w, x, ask = (torch.randn(rows, 64, generator=random) for rows in (64, 128, 128))

    def pullback() -> Pull:
        fast = Compiled(saved_twice)  # a new one, as in another process that finds the same cache
        return vjp(lambda part, x: (fast(part.params["w"], x), {}), [Model({"w": w}, {}, {}), x], None)[1]

    with compiling():
        once = pullback()(ask)
        with outliving():
            lasting = pullback()
        found = [lasting(ask, again=True) for _ in range(3)]
    torch.compiler.reset()
    assert any(tmp_path.rglob("*"))  # it was compiled in earnest
    for grads in found:
        agree(grads.params, once.params, 1e-6)


def wrong(x: Tensor) -> Tensor:
    return x + torch.ones(5)


def test_a_function_that_fails_by_itself_fails(caplog: pytest.LogCaptureFixture) -> None:
    fast = Compiled(wrong)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            fast(torch.ones(3))
    assert len(said(caplog)) == 1


def test_a_compiled_segment_gives_the_same_outputs_buffers_and_gradients(eager: list[int]) -> None:
    net = resnet()
    whole = Split(net, 0)._body.segment(0, len(Split(net, 0).units))
    state = net.state_dict()
    x = images(6).x

    def results() -> list[Any]:
        params = {name: state[name].clone().requires_grad_() for name in whole.params}
        own = Model(params, {}, {name: state[name].clone() for name in whole.buffers})
        out, kept = whole(own, x, None)
        assert list(kept) == list(whole.buffers)
        return [out.detach(), tree.detach(kept), *torch.autograd.grad(out.square().sum(), list(params.values()))]

    expected = results()
    with compiling():
        found = [results() for _ in range(2)][-1]
    agree(found, expected, 1e-12)
    counts = {name: int(value) for name, value in found[1].items() if name.endswith("num_batches_tracked")}
    assert counts and set(counts.values()) == {1}
    assert len(eager) == 1


class TwiceOrNever(nn.Module):
    """One normalisation that is called twice, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = nn.BatchNorm2d(2), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.twice(self.twice(x))
        return made


def test_counters_of_batches_go_on_as_often_as_their_layers_are_called(eager: list[int]) -> None:
    split = Split(nn.Sequential(TwiceOrNever(), nn.Flatten(), nn.Linear(32, 10)), 1)
    model, _ = split.initial()
    x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    with compiling():
        _, buffers = split.lower(model, x, None)
        _, later = split.lower(model._replace(buffers=buffers), x, None)
    counts = [[int(b[f"0.{name}.num_batches_tracked"]) for name in ("twice", "never")] for b in (buffers, later)]
    assert counts == [[2, 0], [4, 0]] and eager


def test_a_compiled_step_of_an_optimiser_gives_the_plain_numbers(eager: list[int]) -> None:
    opt = optim.adamw(0.02, proximal=0.2, clip=0.4)
    expected = stepped(opt, begun(opt), lambda _, k: gradients(k))
    with compiling():
        found = stepped(opt, laid_out(begun(opt)), lambda _, k: gradients(k))
    agree(with_plain_numbers(Forms().of(expected), found), expected, 1e-12)
    assert len(eager) == 1
