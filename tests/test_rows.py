"""Specifies tensors that lie side by side in rows, and optimisers that work on the rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import agree

from cutlayer import optim
from cutlayer.core import tree
from cutlayer.core.state import Grads, Model, Part, Tensors
from cutlayer.engines.graph import rows
from cutlayer.engines.graph.forms import Forms, Layout, copy_into
from cutlayer.engines.graph.in_place import step_in_place
from cutlayer.engines.graph.lane import with_plain_numbers
from cutlayer.engines.graph.rows import Rows
from cutlayer.optim.rules import squared_norm

CPU = torch.device("cpu")
SHAPES = {"weight": (3, 2, 2, 2), "bias": (3,), "scale": (), "matrix": (5, 2)}


def some(seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Named tensors none of which fills a whole number of 16 bytes, except for the matrix."""
    random = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for k, s in SHAPES.items()}


def laid_out(value: Any) -> Any:
    """The value in rows of memory; its numbers are tensors."""
    layout = Layout(tree.shapes(value))
    home = layout.of(layout.empty(CPU))
    copy_into(home, value)
    return home


def must_be(found: Any, expected: Any) -> None:
    agree(tree.map(torch.Tensor.contiguous, found), expected, 0)


def test_tensors_lie_side_by_side_each_at_a_multiple_of_16_bytes() -> None:
    values = {**some(0, torch.float32), "count": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    home = laid_out(values)
    assert isinstance(home, Rows)
    starts = {name: place.start for name, place in home.positions.items()}
    assert starts == {"weight": 0, "bias": 24, "scale": 28, "matrix": 32, "count": 0, "half": 0}
    sizes = {dtype: len(row) for dtype, row in home.rows.items()}
    assert sizes == {torch.float32: 44, torch.int64: 2, torch.bfloat16: 8}
    must_be(dict(home), values)
    gaps = torch.cat([home.rows[torch.float32][27:28], home.rows[torch.float32][29:32]])
    assert gaps.tolist() == [0.0] * 4


def test_weights_of_convolutions_lie_channels_last() -> None:
    home = laid_out(some(0))
    assert home["weight"].is_contiguous(memory_format=torch.channels_last)
    assert not home["weight"].is_contiguous() and home["matrix"].is_contiguous()
    agree(home.rows[torch.float64][:24], some(0)["weight"].permute(0, 2, 3, 1).reshape(-1), 0)


def test_values_that_lie_in_such_rows_are_packed_without_a_copy() -> None:
    home = laid_out(some(0))
    assert home.packed(home) is home.rows
    gathered = home.gathered(some(1))
    by_name = dict(gathered.items())  # no longer known as rows
    (row,) = home.packed(by_name).values()
    assert row.data_ptr() == gathered["weight"].data_ptr() and row.shape == home.rows[torch.float64].shape
    row.zero_()
    assert all(not value.any() for value in by_name.values())


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_other_values_are_packed_as_a_copy_with_zeros_between_them(dtype: torch.dtype) -> None:
    values = some(1, dtype)
    home = laid_out(some(0))
    (row,) = home.packed(values).values()
    agree(row, laid_out(tree.map(torch.Tensor.double, values)).rows[torch.float64], 0)
    row.zero_()
    agree(values, some(1, dtype), 0)


def test_values_in_the_rows_of_a_larger_value_are_packed_as_a_copy() -> None:
    both = laid_out((some(0), some(1)))
    (row,) = both[0].packed(dict(both[1])).values()
    agree(row, both[1].rows[torch.float64], 0)
    assert row.data_ptr() != both[1].rows[torch.float64].data_ptr()


def test_values_that_lie_in_such_rows_but_elsewhere_are_packed_as_a_copy() -> None:
    home = laid_out({"a": torch.ones(2), "b": torch.zeros(2)})
    found = home.gathered({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})
    (row,) = home.packed({"a": found["b"], "b": found["a"]}).values()
    assert row.tolist() == [3.0, 4.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0]


def test_values_of_mixed_types_are_gathered_in_the_types_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda a: torch.full_like(a, torch.nan))  # as new memory may well be
    home = laid_out(some(0, torch.float32))
    wide = some(1, torch.float32)
    values = {name: value.bfloat16() if value.dim() > 1 else value for name, value in wide.items()}
    found = home.gathered(values)
    must_be(dict(found), tree.map(torch.Tensor.float, values))
    (row,) = found.rows.values()
    assert (row.dtype, row[27].item(), row[29:32].tolist()) == (torch.float32, 0.0, [0.0] * 3)
    assert found.positions == home.positions


def test_leaves_of_rows_share_no_history_and_only_kernels_are_converted() -> None:
    home = laid_out(some(0, torch.float32))
    leaves = home.leaves(torch.bfloat16)
    kinds = {name: (value.dtype, value.requires_grad, value.is_leaf) for name, value in leaves.items()}
    half, single = (torch.bfloat16, True, True), (torch.float32, True, True)
    assert kinds == {"weight": half, "bias": single, "scale": single, "matrix": single}
    must_be({k: v.detach() for k, v in leaves.items()}, {k: home[k].to(v.dtype).clone() for k, v in leaves.items()})
    assert {value.dtype for value in home.leaves(None).values()} == {torch.float32}


def test_scales_and_positions_of_all_samples_are_no_kernels() -> None:
    home = laid_out(
        {"scale": torch.ones(1, 3, 1, 1), "place": torch.ones(1, 1, 4, 4), "kernel": torch.ones(2, 3, 1, 1)}
    )
    kinds = {name: value.dtype for name, value in home.leaves(torch.bfloat16).items()}
    assert kinds == {"scale": torch.float32, "place": torch.float32, "kernel": torch.bfloat16}


# -- optimisers on rows ------------------------------------------------------------------------------------------------

OPTIMISERS = {
    "sgd": optim.sgd(0.1),
    "momentum, decay": optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov, clip": optim.sgd(0.1, momentum=0.9, nesterov=True, clip=0.5),
    "clip with decay": optim.sgd(0.1, weight_decay=0.1, clip=0.5, clip_decay=True),
    "clip jointly": optim.sgd(0.1, clip=0.5, clip_scope="joint"),
    "proximal": optim.sgd(0.1, momentum=0.9, proximal=0.3),
    "adam": optim.adam(0.01, weight_decay=0.1, clip=0.5),
    "adamw": optim.adamw(0.01, weight_decay=0.1, proximal=0.3),
}


def buffers(seed: int) -> Tensors:
    return {"mean": some(seed)["bias"], "var": some(seed + 1)["bias"], "count": torch.tensor(seed)}


def gradients(seed: int) -> Grads:
    params = some(100 + seed)
    loss = params["scale"].abs()
    return Grads(params, buffers(seed), loss=loss, norm2=2 * squared_norm(params))


def begun(opt: optim.Optimiser) -> Part:
    return opt.begin(Model(some(0), {"frozen": some(9)["bias"]}, buffers(0)), 0)


def stepped(opt: optim.Optimiser, part: Part, grads: Callable[[Part, int], Grads]) -> Part:
    for k in range(3):
        part = opt.step(part, grads(part, k))
    return part


@pytest.mark.parametrize("gathered", (True, False), ids=("gradients in rows", "gradients apart"))
@pytest.mark.parametrize("opt", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_step_on_rows_gives_the_numbers_of_the_plain_step(opt: optim.Optimiser, gathered: bool) -> None:
    def own(part: Part, k: int) -> Grads:
        given = gradients(k)
        found = given._replace(params=part.params.gathered(given.params)) if gathered else given  # type: ignore[attr-defined]
        assert rows.fits(part, found)
        return found

    start = begun(opt)
    expected = stepped(opt, start, lambda _, k: gradients(k))
    found = stepped(opt, laid_out(start), own)
    assert all(isinstance(a, Rows) for a in (found.params, found.buffers, *found.moments.values()))
    agree(with_plain_numbers(Forms().of(start), found), expected, 1e-12)
    assert int(found.count) == 3 and int(found.buffers["count"]) == 2  # type: ignore[call-overload]


def test_a_part_in_rows_stands_still_from_a_gradient_on_that_is_not_finite() -> None:
    def broken(part: Part, k: int) -> Grads:
        given = gradients(k)
        return given._replace(params={**given.params, "bias": given.params["bias"] / (0.0 if k == 1 else 1.0)})

    opt = OPTIMISERS["adam"]
    found = stepped(opt, laid_out(begun(opt)), broken)
    once = opt.step(begun(opt), gradients(0))
    agree(dict(found.params), once.params, 1e-12)
    assert (int(found.progress.steps), bool(found.progress.ok)) == (1, False)


def test_a_missing_gradient_keeps_a_part_out_of_rows() -> None:
    opt = OPTIMISERS["momentum, decay"]
    fewer = gradients(0)._replace(params={k: v for k, v in gradients(0).params.items() if k != "bias"})
    part = laid_out(begun(opt))
    assert not rows.fits(part, fewer)
    agree(opt.step(part, fewer).params, opt.step(begun(opt), fewer).params, 1e-12)


def test_moments_in_another_order_keep_a_part_out_of_rows() -> None:
    opt = OPTIMISERS["momentum, decay"]
    part = begun(opt)
    turned = part._replace(moments={"momentum": dict(reversed(part.moments["momentum"].items()))})
    assert rows.fits(laid_out(part), gradients(0)) and not rows.fits(laid_out(turned), gradients(0))
    home = laid_out(turned)
    found = step_in_place(opt, home, gradients(0), home)
    agree(found.moments["momentum"], opt.step(part, gradients(0)).moments["momentum"], 1e-12)
