"""Where a model can be cut, and what is said where it cannot."""

import copy
import pickle
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal_parts import (
    assert_a_stack_is_a_loop,
    assert_evaluation_is_that_of_the_whole,
    assert_every_cut_is_the_whole,
    assert_steps_equal,
    cut_step,
    whole_step,
)
from split_models import Functional, Residual, sequence
from torch import Tensor, nn

from cutlayer.core.state import Model
from cutlayer.errors import ConfigError, CutError, UnknownNameError
from cutlayer.models import build, cnn, mlp, resnet18, resnet_tiny
from cutlayer.planning.profile import profile
from cutlayer.split import Split
from cutlayer.split.generators import without_draws
from cutlayer.split.units import units_of


def test_units_of_the_zoo() -> None:
    assert Split(mlp(), 1).units == ("fc1", "fc2", "head")
    assert Split(cnn(), 1).units == ("conv1", "conv2", "fc1", "head")
    assert Split(resnet_tiny(), 1).units == ("stem", "layer1.0", "layer2.0", "layer3.0", "head")
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert Split(resnet18(width=2), 1).units == ("stem", *blocks, "head")


def test_tracing_finds_the_cuts_where_one_tensor_is_alive() -> None:
    split = Split(Residual(), 0)
    assert split.units == ("fc1", "act", "add", "act_1", "tanh", "mul", "view", "fc2")  # none between act and add
    client, server = split.with_cut("act_1").initial()
    names = ["fc1.weight", "fc1.bias", "block.inner.weight", "block.inner.bias", "block.norm.weight", "block.norm.bias"]
    assert sorted(client.params) == sorted(names)
    assert sorted(server.params) == ["fc2.bias", "fc2.weight", "scale"]


def test_a_module_at_two_places_of_a_sequence_is_two_units() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 16), act, nn.Linear(16, 3))
    split, x = Split(model, cut=2), torch.randn(4, 8)
    assert split.units == ("0", "1", "2", "3", "4")
    client, server = split.initial()
    assert torch.equal(split.whole(client.joined(server), x)[0], model(x))
    twice = nn.Linear(8, 8)
    model = nn.Sequential(twice, act, twice, nn.Linear(8, 3)).double()
    split = Split(model, cut=3)
    assert split.units == ("0", "1", "2", "3")
    assert_steps_equal(cut_step(split, x.double()), whole_step(model, x.double()))


def test_declared_units_may_name_a_module_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.second = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)
            self.again = self.act

        def units(self) -> list[tuple[str, tuple[str, ...]]]:
            return [("first", ("first", "act")), ("second", ("second", "again"))]

    split, x = Split(model := Twice(), 1), torch.randn(4, 2)
    client, server = split.initial()
    expected = model.act(model.second(model.act(model.first(x))))
    assert torch.equal(split.whole(client.joined(server), x)[0], expected)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, track_running_stats=True)])
@pytest.mark.parametrize("affine", [True, False])
def test_a_normalisation_used_on_both_sides_of_a_cut_is_refused(kind: Callable[..., nn.Module], affine: bool) -> None:
    norm = kind(2, affine=affine)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    for cut in (0, 3):
        assert Split(model, cut).units == ("0", "1", "2")
    with pytest.raises(CutError) as error:
        Split(model, 1)
    name = "weight" if affine else "running_mean"
    assert str(error.value) == (
        f"Sequential cannot be cut here: '0.{name}' is used on both sides of a cut, above it as '2.{name}'. "
        "Cut elsewhere, freeze it, or train separate copies with Split(..., untie=True)."
    )
    frozen = nn.Sequential(norm.eval().requires_grad_(False), nn.Linear(2, 2), norm)
    assert Split(frozen, 1).units == ("0", "1", "2")


@pytest.mark.parametrize("value", [torch.tensor([True, False]), torch.tensor([1, 2]), torch.tensor([torch.nan, 1.0])])
def test_a_buffer_that_stays_may_be_on_both_sides(value: Tensor) -> None:
    class Holds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    own = Holds()
    own.register_buffer("value", value)
    Split(nn.Sequential(own, nn.Linear(2, 2), own), 1).rehearse(torch.randn(2, 2), torch.tensor([0, 1]))
    assert "0.value" in dict(nn.Sequential(own).named_buffers())


@pytest.mark.parametrize("moves", [True, False])
def test_a_buffer_that_moves_on_both_sides_of_a_cut_is_refused(moves: bool) -> None:
    class Mean(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            if moves:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    own = Mean()
    model, x, y = nn.Sequential(own, nn.Linear(2, 2), own), torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    Split(model, 3).rehearse(x, y)
    if not moves:
        Split(model, 1).rehearse(x, y)
        return
    with pytest.raises(CutError) as error:
        Split(model, 1).rehearse(x, y)
    assert str(error.value) == (
        "Sequential cannot be cut here: '0.mean' is used on both sides of a cut, above it as '2.mean'. Cut elsewhere, "
        "freeze it, or train separate copies with Split(..., untie=True)."
    )


def test_units_keep_the_names_of_the_whole_model() -> None:
    for model in (resnet_tiny(), Residual(), sequence()):
        named = [name for unit in units_of(model) for name, _ in unit.module.named_parameters()]
        assert sorted(named) == sorted(dict(model.named_parameters()))


def test_a_model_needs_a_key_only_where_something_draws() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.1, self.training)

    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(x)

    def draws(module: nn.Module) -> bool:
        split = Split(nn.Sequential(module), 0)
        assert split.random is None
        return split.needs_key

    assert (
        draws(nn.Dropout2d(0.1)) and draws(nn.RReLU()) and draws(Own()) and draws(nn.Sequential(nn.AlphaDropout(0.1)))
    )
    assert draws(nn.MultiheadAttention(4, 2, dropout=0.1)) and Split(Functional(), 0).needs_key
    assert not draws(nn.Dropout(0.0)) and not draws(nn.Dropout(0.1).eval()) and not draws(Quiet())
    assert not draws(Own().eval()) and not draws(nn.MultiheadAttention(4, 2))
    assert not Split(Functional().eval(), 0).needs_key


class Gumbel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (nn.LSTM(2, 2, 2, dropout=0.1), "the dropout of '0' (LSTM)"),
        (Gumbel(), "gumbel_softmax in Gumbel"),
        (nn.Sequential(nn.Dropout(0.5), Gumbel()), "gumbel_softmax in Gumbel"),
    ],
)
def test_what_only_torchs_generators_can_draw_is_named(module: nn.Module, what: str) -> None:
    split = Split(nn.Sequential(module), 0)
    assert split.random == what and split.needs_key
    assert Split(nn.Sequential(module).eval(), 0).random is None


RESNET = (
    "1 'stem', 2 'layer1.0', 3 'layer1.1', 4 'layer2.0', 5 'layer2.1', 6 'layer3.0', 7 'layer3.1', 8 'layer4.0', "
    "9 'layer4.1', 10 'head'."
)


@pytest.mark.parametrize(
    ("cut", "head", "message"),
    [
        (12, None, f"cut 12 is out of range: ResNet has 10 units, so cuts go from 0 to 10: {RESNET}"),
        (-1, None, f"cut -1 is out of range: ResNet has 10 units, so cuts go from 0 to 10: {RESNET}"),
        ("layer1.2", None, f"ResNet has no unit 'layer1.2' to cut after; did you mean 'layer1.1'? It has {RESNET}"),
        ("?", None, f"ResNet has no unit '?' to cut after. It has {RESNET}"),
        (
            8,
            3,
            "head 3 is out of range: above cut 8 of ResNet, heads start from 8 to 10: 8 'layer4.1', 9 'head'.",
        ),
        (
            "layer4.0",
            "stem",
            "head 0 is out of range: above cut 8 of ResNet, heads start from 8 to 10: 8 'layer4.1', 9 'head'.",
        ),
        (
            8,
            "heat",
            "ResNet has no unit 'heat' to start the head; did you mean 'head'? It may be 8 'layer4.1', 9 'head'.",
        ),
    ],
)
def test_a_wrong_cut_lists_the_right_ones(cut: int | str, head: int | str | None, message: str) -> None:
    with pytest.raises(CutError) as error:
        Split(resnet18(width=2), cut, head=head)
    assert str(error.value) == message


def test_a_name_and_a_number_mean_the_same_cut() -> None:
    split = Split(resnet18(width=2), "layer2.1", head="head")
    assert (split.cut, split.head, split.num_units) == (5, 9, 10)
    assert split.with_cut("stem").cut == 1 and split.with_cut("stem").head is None


def test_a_model_that_cannot_be_traced_is_refused_with_the_reason() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CutError) as error:
        Split(Branching(), 0)
    assert str(error.value) == (
        "Branching cannot be cut because its forward cannot be traced (TraceError: symbolically traced variables "
        "cannot be used as inputs to control flow). Give a batch of inputs, Split(..., sample=x), with which "
        "torch.export can trace more; or write it as nn.Sequential, or give it a units() method."
    )


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([("a", ("fc",))], "'out.weight' is in none of the units of Listed: add its sub-module to one in units()."),
        (
            [("a", ("fc", "gone"))],
            "unit 'a' of Listed names the sub-module 'gone', which the model does not have.",
        ),
    ],
)
def test_declared_units_are_checked(listed: list[tuple[str, tuple[str, ...]]], message: str) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(2, 2), nn.Linear(2, 2)

        def units(self) -> list[tuple[str, tuple[str, ...]]]:
            return listed

    with pytest.raises(CutError) as error:
        Split(Listed(), 0)
    assert str(error.value) == message


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(CutError) as error:
        Split(nn.Sequential(nn.LazyLinear(2)), 0)
    assert str(error.value) == (
        "'0.weight' has no shape yet (a lazy module): run one batch through the model, then cut it."
    )


def test_the_zoo_refuses_unknown_names() -> None:
    with pytest.raises(UnknownNameError) as error:
        build("resnet19")
    assert str(error.value) == "unknown model 'resnet19'; did you mean 'resnet18' or 'resnet50' or 'resnet34'?"
    with pytest.raises(UnknownNameError) as error:
        build("cnn", widht=3)
    assert str(error.value) == "unknown option 'widht' in model 'cnn'; did you mean 'width'?"
    with pytest.raises(UnknownNameError) as error:
        build("cnn", norm="layer")
    assert str(error.value) == "unknown norm 'layer'; known: batch, group, none."
    with pytest.raises(UnknownNameError) as error:
        build("resnet18", stem="5x5")
    assert str(error.value) == "unknown stem '5x5'; known: 3x3, 7x7, imagenet."


def test_a_convolution_before_batch_norm_has_no_bias() -> None:
    biases = [name for name, _ in build("cnn", norm="batch").named_parameters() if name.endswith("0.bias")]
    assert biases == []
    assert "conv1.0.bias" in dict(build("cnn").named_parameters())


class Masked(nn.Module):
    """Blocks that read a mask beside the hidden state; a skip connection goes over all of them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.norm(x + self.inner(x) * mask.unsqueeze(-1))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens > 0
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.out((x + first).mean(1))


def test_blocks_end_units_where_several_tensors_cross() -> None:
    torch.manual_seed(0)
    split, tokens = Split(Masked().double(), "blocks.1"), torch.randint(0, 9, (4, 5))
    assert split.units == ("blocks.0", "blocks.1", "blocks.2", "add_3", "mean", "out")
    z, _ = split.lower(split.initial()[0], tokens)
    assert {name: (tuple(a.shape), a.dtype) for name, a in z.items()} == {
        "gt": ((4, 5), torch.bool),
        "embed": ((4, 5, 6), torch.float64),
        "hidden": ((4, 5, 6), torch.float64),
    }
    assert_every_cut_is_the_whole(split, tokens, 1e-12)  # the embedding has three consumers
    assert_a_stack_is_a_loop(split, tokens)


def test_a_cut_is_the_path_of_any_module() -> None:
    torch.manual_seed(0)
    split, tokens = Split(Masked().double(), "embed"), torch.randint(0, 9, (4, 5))
    assert (split.cut, split.units[:2]) == (1, ("embed", "blocks.0"))
    inside = split.with_cut("blocks.1.inner")
    assert (inside.cut, inside.units[:4]) == (3, ("embed", "blocks.0", "blocks.1.inner", "blocks.1"))
    assert_every_cut_is_the_whole(inside, tokens, 1e-12)
    again = pickle.loads(pickle.dumps(inside))
    assert (again.cut, again.units) == (inside.cut, inside.units)
    for name, number in {"blocks": 3, "blocks.2.norm": 3, "blocks.0": 1, "out": 6}.items():
        assert Split(Masked(), name).cut == number


def test_the_stages_of_a_resnet_are_cuts() -> None:
    assert Split(resnet18(width=2), "layer2").cut == Split(resnet18(width=2), "layer2.1").cut == 5
    assert Split(resnet18(width=2), 1, head="layer4").head == 7


def test_the_layers_of_torchs_transformer_are_cuts() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)
            self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(4), enable_nested_tensor=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.encoder(self.embed(tokens))[:, 0])

    tokens, model = torch.randint(0, 9, (4, 5)), Reader().double()
    assert Split(model, 1).units == ("embed", "encoder", "encoder_1", "out")  # as long as nobody asks for more
    split = Split(model, "encoder.layers.1")
    assert (split.cut, split.units[:3]) == (3, ("embed", "encoder.layers.0", "encoder.layers.1"))
    assert_every_cut_is_the_whole(split, tokens)
    assert_evaluation_is_that_of_the_whole(split, tokens)
    chain = Split(nn.Sequential(model.embed, model.encoder, nn.Flatten(), nn.Linear(20, 3).double()), "1.layers.0")
    assert chain.units == ("0", "1.layers.0", "1", "2", "3")
    assert_every_cut_is_the_whole(chain, tokens)


def test_a_sequence_inside_a_sequence_is_cut_where_asked() -> None:
    def nested() -> nn.Sequential:
        return nn.Sequential(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.Linear(4, 2)
        ).double()

    assert Split(nested(), 1).units == ("0", "1")
    split = Split(nested(), "0.1")
    assert (split.cut, split.units) == (1, ("0.1", "0", "1"))
    assert_every_cut_is_the_whole(split, torch.randn(4, 3, dtype=torch.float64))


def test_tied_parameters_are_untied_on_request() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[3].weight, twice = model[0].weight, nn.Linear(3, 3).double()
    shared = nn.Sequential(twice, nn.ReLU(), twice)
    for given in (model, shared):
        with pytest.raises(CutError, match="untie=True"):
            Split(given, 1)
        split = Split(given, 1, untie=True)
        client, server = split.initial()
        assert len(split.export(client.joined(server))) == len(given.state_dict()) == len(client.params | server.params)
        assert_every_cut_is_the_whole(split, torch.randn(2, 3, dtype=torch.float64))
    assert model[3].weight is model[0].weight and shared[0] is shared[2]


def test_a_layer_that_runs_twice_cannot_be_cut_in_between() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(self.body(x)))

    with pytest.raises(CutError) as error:
        Split(Twice(), 2)
    assert str(error.value) == (
        "Twice cannot be cut here: 'body.0.weight' is used on both sides of a cut, since several layers share it. "
        "Cut elsewhere or freeze it."
    )
    assert Split(Twice(), 4).units == ("body.0", "body.1", "body.0_1", "body.1_1", "out")


def test_a_long_list_of_cuts_is_shortened() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    with pytest.raises(CutError) as error:
        Split(model, "4O")
    assert str(error.value) == (
        "Sequential has no unit '4O' to cut after; did you mean '4'? It has 1 '0', 2 '1', 3 '2', 4 '3', 5 '4', 6 '5', "
        "7 '6', 8 '7', ... (24 more), 33 '32', 34 '33', 35 '34', 36 '35', 37 '36', 38 '37', 39 '38', 40 '39'."
    )


class Branching(nn.Module):
    """Its forward looks at shapes, which torch.fx cannot follow, and gives several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        self.seen.add_(1)
        h = self.norm(self.a(x)) if x.shape[1] == 6 else x
        if scale is not None:
            h = h * scale.unsqueeze(1)
        kept = self.drop(h)
        return {"out": self.b(kept), "inside": h}


def test_a_sample_lets_torch_export_trace() -> None:
    torch.manual_seed(0)
    model = Branching().double()
    model.drop.p = 0.0
    x = {"x": torch.randn(4, 6, dtype=torch.float64), "scale": torch.rand(4, dtype=torch.float64)}
    with pytest.raises(CutError, match=r"cannot be traced \(TraceError.*Split\(\.\.\., sample=x\)"):
        Split(model, 1)
    split = Split(model, "norm", sample=x)
    assert split.units == ("norm", "drop", "b")  # none after `a`, where an input would cross
    assert split.normalises_at("client") and not split.normalises_at("server") and not split.random
    assert_every_cut_is_the_whole(split, x)
    assert_evaluation_is_that_of_the_whole(split, x)
    assert_a_stack_is_a_loop(split, x)
    assert float(model.seen) == 0.0 and int(model.norm.num_batches_tracked) == 0


def test_an_exported_model_draws_follows_the_key_and_has_costs() -> None:
    torch.manual_seed(0)
    x = {"x": torch.randn(4, 6), "scale": torch.rand(4)}
    split = Split(Branching(), "norm", sample=x)
    assert split.needs_key and split.random is None
    client, server = split.initial()
    out, _ = split.upper(server, split.lower(client, x, 3)[0], 3)
    assert torch.equal(split.upper(server, split.lower(client, x, 3)[0], 3)[0]["out"], out["out"])
    assert not torch.equal(split.upper(server, split.lower(client, x, 4)[0], 4)[0]["out"], out["out"])
    rows = profile(split, x).rows
    assert [(row.name, row.macs) for row in rows] == [("norm", 36), ("drop", 0), ("b", 18)]


def test_a_forward_that_torch_export_cannot_trace_is_refused_with_the_line() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CutError) as error:
        Split(Looks(), 0, sample=torch.randn(2, 2))
    assert str(error.value).startswith(
        "Looks cannot be cut because torch.export cannot trace its forward (a branch depends on the values of tensors, "
        "test_units.py line "
    )


def test_torch_export_cuts_where_torch_fx_cannot() -> None:
    class Sized(nn.Module):
        """A size is alive from the beginning to the end."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.shape[0]
            return self.b(self.a(x)).view(rows, 3, 2)

    torch.manual_seed(0)
    model, x = Sized().double(), torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(CutError) as error:
        Split(model, "a")
    assert str(error.value) == (
        "Sized cannot be cut after 'a': something other than a tensor, such as a size, is needed later. "
        "Give a batch of inputs, Split(..., sample=x): torch.export reads sizes anew."
    )
    split = Split(model, "a", sample=x)
    assert split.units == ("a", "b", "view")
    assert_every_cut_is_the_whole(split, x[:3])


def test_the_row_of_the_padding_does_not_train_on_any_engine() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 2)).double()
    split, tokens = Split(model, 1), torch.tensor([[0, 1, 2], [0, 3, 4]])
    assert_every_cut_is_the_whole(split, tokens)
    assert_a_stack_is_a_loop(split, tokens)
    assert not cut_step(split, tokens).grads["0.weight"][0].any()


# -- what a trace does not show --------------------------------------------------------------------------------------


class Three(nn.Module):
    """Three layers; each test has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.calls, self.width = 0, 0


def three(forward: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return type("Three", (Three,), {"forward": forward})().double()


X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("looks", [False, True])
def test_a_forward_that_changes_an_attribute_is_refused(looks: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.c(self.b(self.a(x)) * (1.0 if self.calls < 5 else 0.0))
        return found if not looks or x.shape[1] == 8 else -found

    with pytest.raises(CutError) as error:
        Split(nn.Sequential(nn.Identity(), three(forward)), "1.a", sample=X if looks else None)
    found = re.sub(r"from \d to \d", "from 1 to 2", str(error.value))
    assert found == (
        "Sequential cannot be cut because its forward changes the attribute 'calls' of '1', here from 1 to 2: a traced "
        "forward would read the same value in every step. Keep it in a buffer that is updated in place "
        "(register_buffer, then self.count.add_(1)); or write the model as nn.Sequential or give it a units() method, "
        "whose units run as they are."
    )


@pytest.mark.parametrize("looks", [False, True])
def test_a_forward_may_note_what_its_first_pass_finds(looks: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.width = 8
        return self.c(self.b(self.a(x))) if not looks or x.shape[1] == self.width else x

    model = three(forward)
    split = Split(model, "a", sample=X if looks else None)
    assert_every_cut_is_the_whole(split, X)
    assert model.width == 0


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.a(x)
    return self.c(self.b(h))


def into_a_view(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    v = h[:, :4]
    v += 1
    return self.c(self.b(h))


@pytest.mark.parametrize("forward", [without_gradients, into_a_view])
def test_torch_export_traces_what_torch_fx_traces_wrongly(forward: Callable[[Any, Tensor], Any]) -> None:
    model, y = three(forward), torch.arange(4) % 3
    hint = r"; give Split a batch of inputs, sample=x, with which torch.export sees more; or write it as nn.Sequential"
    with pytest.raises(CutError, match=hint):
        Split(model, "a").prove(X, y)
    split = Split(model, "a", sample=X)
    split.prove(X, y)
    assert_every_cut_is_the_whole(split, X)
    again = copy.copy(split)  # as in another process
    assert again.units == split.units
    assert_steps_equal(cut_step(again, X), whole_step(model, X))


def test_torch_fx_traces_what_nothing_shows_to_differ() -> None:
    calls: list[int] = []

    def varies(self: Any, x: Tensor) -> Tensor:
        calls.append(0)
        return self.c(self.b(self.a(x)) * len(calls))

    for model in (three(lambda self, x: self.c(self.b(self.a(x)))), three(varies)):
        assert all(unit.by_fx for unit in Split(model, "a", sample=X).bare_units())
    normalised = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)))
    split = Split(normalised.double(), "1.0", sample=X[:1])  # one sample is too few for the whole
    assert all(unit.by_fx for unit in split.bare_units())


# -- models that cannot be cut ---------------------------------------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x)
        return self.b(self.last)


def test_a_module_that_keeps_an_activation_is_refused() -> None:
    model, x = nn.Sequential(nn.Identity(), Keeps()), torch.randn(2, 8)
    assert Split(model, 1).units == ("0", "1")
    model(x)
    with pytest.raises(CutError) as error:
        Split(model, 1)
    assert str(error.value) == (
        "'1' (Keeps) keeps a tensor of an earlier forward pass in 'last', which cannot be copied: set it to None "
        "before Split, or let the forward keep a detached copy."
    )
    model[1].last = None
    assert Split(model, 1).units == ("0", "1")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Keeps, "Split takes an nn.Module, not the class Keeps; make a model of it: Keeps(...)"),
        (lambda: None, "Split takes an nn.Module, not None"),
        (lambda: len, "Split takes an nn.Module, not <built-in function len>"),
        (
            lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)),
            "'0' (Embedding) has sparse gradients, which cannot be averaged or sent: make it with sparse=False.",
        ),
        (
            lambda: torch.jit.script(net()),
            "RecursiveScriptModule hides the forward that a cut needs: use the module that it was compiled from "
            "instead.",
        ),
        (
            lambda: nn.DataParallel(net()),
            "DataParallel hides the forward that a cut needs: use the module inside, its .module, instead.",
        ),
        (
            lambda: torch.compile(net()),
            "a model made by torch.compile hides the forward that a cut needs: use the model given to it.",
        ),
    ],
)
def test_what_hides_its_forward_or_is_no_module_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(CutError) as error:
        Split(build(), 1)
    assert str(error.value) == message


def test_a_sample_with_other_names_is_refused() -> None:
    with pytest.raises(CutError) as error:
        Split(three(lambda self, x, keep: self.c(self.a(x) * keep)), 1, sample={"image": X, "mask": X})
    assert str(error.value) == "Three takes the inputs x, keep, but the sample has image, mask: rename those."


def test_inputs_of_another_length_than_the_samples_are_refused() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.out = nn.Parameter(torch.ones(9, 8)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((x + self.places[: x.shape[1]]).mean(1)) if x.shape[1] < 9 else x

    split = Split(Placed(), 1, sample=torch.randn(3, 5, 8))
    split.rehearse(torch.randn(2, 5, 8), torch.tensor([0, 1]))
    with pytest.raises(ConfigError) as error:
        split.rehearse(torch.randn(2, 4, 8), torch.tensor([0, 1]))
    assert str(error.value).startswith(
        "the model does not fit the data: inputs have the shape (4, 8), and the sample given to Split has (5, 8); all "
        "dimensions but the first must be those of the sample ("
    )


def test_a_unit_that_vmap_cannot_run_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x) * self.scale.item()))

    model = three(forward)
    model.register_buffer("scale", torch.ones(()))
    with pytest.raises(RuntimeError, match=r"vmap over calling \.item\(\)"):
        assert_a_stack_is_a_loop(Split(model, "b"), X)
    assert capfd.readouterr() == ("", "")


# -- random numbers drawn while a forward is traced -----------------------------------------------------------------


class Depth(nn.Module):
    """Stochastic depth as in the code of many papers: drawn in Python for a whole batch."""

    def __init__(self, draw: Callable[[], Any], p: float) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.draw, self.p = draw, p

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        if not self.training or self.draw() > self.p:
            x = x + torch.relu(self.b(x))
        return self.c(x)


DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: torch.rand(1).item(), "torch"),
    "tensor": (lambda: torch.rand(1), "torch"),
    "python": (random.random, "Python's random"),
    "numpy": (lambda: np.random.rand(), "numpy.random"),
    "own": (np.random.RandomState(0).rand, "draw"),
}


@pytest.mark.parametrize("sample", [None, torch.randn(3, 8)])
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("name", DRAWS)
def test_a_number_that_tracing_would_draw_once_is_refused(name: str, p: float, sample: Tensor | None) -> None:
    draw, what = DRAWS[name]
    model = Depth(draw, p)
    with pytest.raises(CutError) as error:
        Split(model, "a", sample=sample)
    assert str(error.value) == (
        f"Depth cannot be cut because its forward draws random numbers while it is traced (from {what}): they would be "
        "the same in every step. Draw tensors of torch whose shapes follow the input, without .item() or an `if`, as "
        "nn.Dropout and the stochastic depth of torchvision do; or write the model as nn.Sequential or give it a "
        "units() method, whose units run as they are."
    )
    assert Split(model.eval(), "a", sample=sample).units  # in which nothing is drawn


def test_what_else_draws_can_be_traced() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.rrelu, self.b = nn.Linear(8, 8), nn.Dropout(0.5), nn.RReLU(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.rrelu(self.drop(self.a(x))), 0.5, self.training)
            return self.b(x * torch.rand_like(x))

    class Fixed(Draws):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(3)

    x = torch.ones(4, 8)
    for split in (Split(Draws(), "a"), Split(Draws(), "a", sample=x), Split(Fixed(), "a", sample=x)):
        values = Model.joined(*split.initial())
        assert split.needs_key and split.random is None
        assert not torch.equal(split.whole(values, x, 1)[0], split.whole(values, x, 2)[0])
    with pytest.raises(CutError, match=r"draws random numbers while it is traced \(from torch\)"):
        Split(Fixed(), "a")


def test_another_thread_may_draw_once() -> None:
    drawn: list[float] = []

    def trace() -> int:
        if not drawn:
            drawn.append(random.random())
        return 5

    assert without_draws(nn.Linear(1, 1), trace) == 5


# -- modes in training --------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Keeps its normalisation in eval mode whatever happens, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.other, self.b = (
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        )  # fmt: skip

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.other(self.norm(torch.relu(self.a(x)))))


@pytest.mark.parametrize("in_sequence", [False, True])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("export", [False, True])
def test_a_train_of_ones_own_decides_the_modes(called: bool, export: bool, in_sequence: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 3
    model: nn.Module = Frozen().double()
    if in_sequence:
        model = nn.Sequential(nn.Linear(6, 6), model).double()
    if called:
        model.train()
    modes = [m.training for m in model.modules()]
    torchs = copy.deepcopy(model).train()
    steps = torch.optim.SGD(torchs.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        F.cross_entropy(torchs(x), y).backward()
        steps.step()
    split = Split(model, 1, sample=x if export else None)
    split.prove(x, y)
    values = Model.joined(*split.initial())
    for _ in range(3):
        params = {name: p.detach().requires_grad_() for name, p in values.params.items()}
        out, buffers = split.whole(values._replace(params=params), x)
        found = torch.autograd.grad(F.cross_entropy(out, y), list(params.values()))
        new = {name: (p - 0.1 * g).detach() for (name, p), g in zip(params.items(), found, strict=True)}
        values = values._replace(params=new, buffers=buffers)
    state = split.export(values)
    for name, value in torchs.state_dict().items():
        assert torch.allclose(state[name].double(), value.double(), rtol=0, atol=1e-12), name
    prefix = "1." if in_sequence else ""
    assert not state[f"{prefix}norm.running_mean"].any() and state[f"{prefix}other.running_mean"].any()
    assert [m.training for m in model.modules()] == modes


def test_a_module_in_eval_mode_stays_so_beside_a_train_of_ones_own() -> None:
    model = Frozen()
    model.other.eval()
    assert not Split(model, 1).normalises


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)])
def test_a_model_in_eval_mode_is_warned_of(layer: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 3))
    Split(model, 1)
    model[1].eval()
    Split(model, 1)
    assert caplog.messages == []
    split = Split(model.eval(), 1)
    split.with_cut(2)
    pickle.loads(pickle.dumps(split))
    assert caplog.messages == [
        "Sequential is in eval mode: while it trains, its dropout and BatchNorm stay as in evaluation; call "
        "model.train() before Split if that is not meant"
    ]
    assert not any(m.training for m in model.modules())


def test_a_model_to_which_the_mode_means_nothing_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Split(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.LayerNorm(6), nn.Linear(6, 3)).eval(), 1)
    assert caplog.messages == []
