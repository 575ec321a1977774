"""A split model is the whole model: forward, backward, buffers and random numbers, at every cut."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import agree, trained
from split_models import MODELS, TwoInputs, make, with_dropout
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

import cutlayer as cl
from cutlayer import methods, optim
from cutlayer.core.state import Model
from cutlayer.errors import ConfigError, CutError
from cutlayer.models import build
from cutlayer.split import Split


def parts_of(split: Split) -> tuple[Model, Model]:
    """The initial client and server, with parameters that gradients can be taken of."""
    client, server = split.initial()
    for value in (*client.params.values(), *server.params.values()):
        value.requires_grad_()
    return client, server


def leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def gradients(out: Tensor, params: dict[str, Tensor], of_out: Tensor) -> dict[str, Tensor]:
    if not params:
        return {}
    found = torch.autograd.grad(out, list(params.values()), of_out, allow_unused=True)
    return {name: g for name, g in zip(params, found, strict=True) if g is not None}


def split_step(split: Split, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """One exchange across the cuts: output, gradients and new buffers."""
    client, server = parts_of(split)
    z, below = split.lower(client, x)
    z_up = leaf(z)
    h, between = split.upper(server, z_up)
    h_up = leaf(h)
    out, above = split.top(client, h_up)
    (gh,) = torch.autograd.grad(split.loss(out, y), [h_up], retain_graph=True)
    (gz,) = torch.autograd.grad(h, [z_up], gh, retain_graph=True)
    grads = gradients(h, server.params, gh)
    if split.cut:
        grads |= gradients(z, client.params, gz)
    if split.head is not None and split.head < split.num_units:
        grads |= gradients(split.loss(out, y), client.params, torch.ones((), dtype=out.dtype))
    return out, grads, {**below, **between, **above}


def whole_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The same step of the unsplit module."""
    model = copy.deepcopy(model)
    out = model(x.clone())
    F.cross_entropy(out, y).backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, dict(model.named_buffers())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_is_the_whole_model_bit_for_bit(name: str) -> None:
    model, x, y = make(name)
    untouched = copy.deepcopy(model.state_dict())
    out, grads, buffers = whole_step(model, x, y)
    split, seen = Split(model, 0), x.clone()
    for cut in range(split.num_units + 1):
        split_out, split_grads, split_buffers = split_step(split.with_cut(cut), x, y)
        assert torch.equal(split_out, out)
        assert_same(split_grads, grads)
        assert_same(split_buffers, buffers)
    assert torch.equal(x, seen)
    assert_same(dict(model.state_dict()), untouched)


@pytest.mark.parametrize("name", ["cnn batch", "resnet_tiny", "resnet18 3x3 batch", "traced"])
def test_a_u_shape_is_the_whole_model_bit_for_bit(name: str) -> None:
    model, x, y = make(name)
    out, grads, buffers = whole_step(model, x, y)
    last = Split(model, 0).num_units
    for cut, head in [(0, last - 1), (1, 2), (1, last - 1), (2, 2), (2, last)]:
        split = Split(model, cut, head=head)
        assert split.u_shaped
        split_out, split_grads, split_buffers = split_step(split, x, y)
        assert torch.equal(split_out, out)
        assert_same(split_grads, grads)
        assert_same(split_buffers, buffers)


def test_initial_parts_hold_each_unit_at_its_place() -> None:
    model = build("cnn", norm="batch")
    model.get_submodule("head").requires_grad_(False)
    client, server = Split(model, "conv1").initial()
    assert list(client.params) == ["conv1.0.weight", "conv1.1.weight", "conv1.1.bias"]
    assert list(client.buffers) == [f"conv1.1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(server.frozen) == ["head.weight", "head.bias"]
    assert {*client.params, *server.params, *server.frozen} == set(dict(model.named_parameters()))
    u_client, u_server = Split(model, "conv1", head="head").initial()
    assert list(u_client.frozen) == ["head.weight", "head.bias"]
    assert not u_server.frozen
    client.params["conv1.0.weight"].zero_()
    assert model.get_parameter("conv1.0.weight").any()


def test_the_ends_hold_nothing() -> None:
    model, x, _ = make("cnn")
    split = Split(model, 0)
    client, server = split.initial()
    assert client == Model({}, {}, {})
    z, buffers = split.lower(client, x)
    assert z is x and buffers == {}
    split = split.with_cut(4)
    client, server = split.initial()
    assert server == Model({}, {}, {})
    out, _ = split.lower(client, x)
    assert split.upper(server, out) == (out, {})
    assert split.top(client, out) == (out, {})


def test_two_inputs_come_as_a_dict() -> None:
    torch.manual_seed(0)
    model = TwoInputs()
    split = Split(model, 1)
    assert split.units == ("add", "relu", "out")
    x = {"image": torch.randn(4, 6), "context": torch.randn(4, 2)}
    client, server = split.initial()
    z, _ = split.lower(client, x)
    assert z.shape == (4, 4)
    assert torch.equal(split.upper(server, z)[0], model(**x))
    assert torch.equal(split.predict(client.joined(server), x), model(**x))


def test_recurrent_layers_take_the_values_given() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.cell(x)
            return self.out(hidden[:, -1])

    torch.manual_seed(0)
    given, other, x = Last(), Last(), torch.randn(3, 7, 4)
    split = Split(given, 1)
    assert split.units == ("cell", "cell_1", "out")
    client, server = split.initial()
    theirs = Split(other, 1).initial()
    assert torch.equal(split.whole(client.joined(server), x)[0], given(x))
    assert torch.equal(split.whole(theirs[0].joined(theirs[1]), x)[0], other(x))


@pytest.mark.parametrize("name", ["cnn batch", "resnet18 3x3 batch", "sequential", "traced"])
def test_export_loads_strictly_and_predicts_the_same(name: str) -> None:
    model, x, _ = make(name)
    split = Split(model, 1)
    client, server = split.initial()
    moved = Model(*({n: v + 1 if v.is_floating_point() else v for n, v in t.items()} for t in client.joined(server)))
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(split.export(moved), strict=True)
    assert torch.equal(fresh.eval()(x), split.predict(moved, x))
    assert not torch.equal(split.predict(moved, x), split.predict(client.joined(server), x))
    with pytest.raises(CutError) as error:
        split.export(client)
    missing = next(iter(server.params))
    assert str(error.value) == (f"export needs every unit, but {missing!r} is missing: give it client.joined(server).")


def test_export_has_tied_and_unused_entries_and_no_passing_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    model.register_buffer("unused", torch.ones(1))
    model[0].register_buffer("passing", torch.ones(1), persistent=False)
    split = Split(model, 2)
    client, server = split.initial()
    assert "passing" in next(iter(client.buffers))
    exported = split.export(client.joined(server))
    assert exported.keys() == model.state_dict().keys()
    assert torch.equal(exported["1.weight"], model[0].weight)


def test_a_tied_parameter_stays_on_one_side() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    with pytest.raises(CutError) as error:
        Split(model, 1)
    assert str(error.value) == (
        "Sequential cannot be cut here: '0.weight' is used on both sides of a cut, above it as '1.weight'. "
        "Cut elsewhere, freeze it, or train separate copies with Split(..., untie=True)."
    )
    split, x = Split(model, 2), torch.randn(2, 3)
    client, server = split.initial()
    assert sorted(client.params) == ["0.bias", "0.weight", "1.bias"]
    client.params["0.weight"].mul_(2)
    expected = copy.deepcopy(model)
    expected[0].weight.data.mul_(2)
    assert torch.equal(split.whole(client.joined(server), x)[0], expected(x))
    model[0].weight.requires_grad_(False)
    client, server = Split(model, 1).initial()
    assert list(client.frozen) == list(server.frozen) == ["0.weight"]


def test_dropout_follows_the_key_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(0)
    split, x = Split(with_dropout(), 2, head=4), torch.randn(5, 6)
    client, server = split.initial()
    assert split.needs_key and split.random is None
    before = torch.get_rng_state()
    z, _ = split.lower(client, x, 7)
    h, _ = split.upper(server, z, 7)
    out, _ = split.top(client, h, 7)
    assert torch.equal(split.lower(client, x, 7)[0], z)
    assert not torch.equal(split.lower(client, x, 8)[0], z)
    assert torch.equal(split.whole(client.joined(server), x, 7)[0], out)
    assert (z == 0).any() and (h == 0).any() and not torch.equal((z == 0), (h == 0))
    assert torch.equal(torch.get_rng_state(), before)
    still = split.predict(client.joined(server), x)
    assert torch.equal(still, split.model.eval()(x))
    with pytest.raises(ConfigError) as error:
        split.lower(client, x, None)
    assert str(error.value) == "the model draws random numbers (dropout or the like): give the call a key, not None."


DROPPING_UNITS = 5


def test_the_dropout_of_a_unit_does_not_depend_on_the_cut() -> None:
    torch.manual_seed(0)
    model, x = with_dropout().double(), torch.randn(5, 6, dtype=torch.float64)
    split = Split(model, 0)
    values = Model.joined(*split.initial())
    out, _ = split.whole(values, x, 7)
    assert not torch.equal(split.whole(values, x, 8)[0], out)
    for cut in range(DROPPING_UNITS + 1):
        for head in (None, *range(cut, DROPPING_UNITS + 1)):
            assert torch.equal(split.with_cut(cut, head).whole(values, x, 7)[0], out), (cut, head)


def test_units_drop_each_their_own() -> None:
    """Two units of the same kind do not share a mask."""
    split, x = Split(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 1), torch.ones(1, 64)
    masks = [half(Model({}, {}, {}), x, 7)[0] != 0 for half in (split.lower, split.upper)]
    assert not torch.equal(*masks)


def dropped(name: str, cut: int, head: int | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), *with_dropout(), nn.Linear(3, 10)).double()
    opt = optim.sgd(0.1, momentum=0.9)
    return trained(methods.build(name, Split(net, cut, head=head), opt, opt))


def test_sfl_v1_is_fedavg_at_every_cut_of_a_model_with_dropout() -> None:
    whole = dropped("fedavg", 0)
    for cut in range(3 + DROPPING_UNITS + 1):
        agree(dropped("sfl_v1", cut), whole)
    agree(dropped("sfl_v1", 2, 5), whole)


def test_another_cut_is_made_once() -> None:
    model, x, _ = make("cnn batch")
    split = Split(model, 1, head=3)
    other = split.at(2)
    assert split.at(2) is other
    assert (other.cut, other.head) == (2, 3)
    assert (split.at(1, 2).cut, split.at(1, 2).head) == (1, 2)
    values = Model.joined(*split.initial())
    assert torch.equal(other.whole(values, x)[0], split.whole(values, x)[0])
    lower, upper = (list(half.params) for half in other.initial())
    assert (lower, upper) == tuple(list(half.params) for half in Split(model, 2, head=3).initial())


def test_a_units_parameters_are_the_trained_ones_where_they_come_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    model[4].requires_grad_(False)
    expected = (("0.weight", "0.bias"), (), ("2.bias",), ("3.weight", "3.bias"), ())
    assert Split(model, 0).unit_params == Split(model, 3).unit_params == expected


def test_a_module_in_eval_mode_stays_so_in_training() -> None:
    model, x, _ = make("sequential")
    model[2].eval()
    split = Split(model, 2)
    client, server = split.initial()
    out, buffers = split.whole(client.joined(server), x)
    assert torch.equal(out, model(x))
    assert_same(buffers, server.buffers)


@pytest.mark.parametrize("name", ["cnn", "cnn batch", "resnet_tiny", "traced"])
def test_vmap_over_clients_is_a_loop_over_clients(name: str) -> None:
    torch.manual_seed(1)
    models = [MODELS[name][0]().double() for _ in range(3)]
    x = torch.randn(3, 4, *MODELS[name][1], dtype=torch.float64)
    split = Split(models[0], 2)
    params, buffers = stack_module_state(models)

    def run(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return split.whole(Model(params, {}, buffers), x)

    out, new = vmap(run)(params, buffers, x)
    grads = gradients(out, params, torch.ones_like(out).cumsum(-1))
    for i in range(3):
        own = {n: leaf(p[i]) for n, p in params.items()}
        out_i, new_i = run(own, {n: b[i] for n, b in buffers.items()}, x[i])
        torch.testing.assert_close(out[i], out_i, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close({n: b[i] for n, b in new.items()}, new_i, rtol=1e-11, atol=1e-12)
        grads_i = gradients(out_i, own, torch.ones_like(out_i).cumsum(-1))
        torch.testing.assert_close({n: g[i] for n, g in grads.items()}, grads_i, rtol=1e-9, atol=1e-11)


def test_between_calls_the_structure_holds_no_values() -> None:
    model, x, _ = make("cnn batch")
    split = Split(model, 2)
    client, server = split.initial()
    split.whole(client.joined(server), x)
    with pytest.raises(RuntimeError):
        split.whole(client.joined(server), x[:, :, :2, :2])  # too small to pool twice
    tensors = [*split._body.structure.parameters(), *split._body.structure.buffers()]
    assert {t.device.type for t in tensors} == {"meta"}


def test_a_split_survives_pickling() -> None:
    model, x, _ = make("cnn batch")
    split = Split(model, 1, head=3)
    again = pickle.loads(pickle.dumps(split))
    assert (again.cut, again.head, again.units) == (1, 3, split.units)
    whole = Model.joined(*split.initial())
    assert torch.equal(again.whole(whole, x)[0], split.whole(whole, x)[0])


def test_threads_may_share_a_split() -> None:
    model, x, _ = make("cnn batch")
    split = Split(model, 2)
    whole = Model.joined(*split.initial())
    models = [Model({n: v * scale for n, v in whole.params.items()}, {}, whole.buffers) for scale in (1, 2, 3, 4)]
    alone = [split.whole(m, x)[0] for m in models]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda m: split.whole(m, x)[0], models * 50))
    assert all(torch.equal(out, alone[i % 4]) for i, out in enumerate(together))


def test_a_sample_may_be_a_numpy_array() -> None:
    class Strict(nn.Module):
        """Looks at shapes, so that only torch.export can trace it."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 4:
                raise ValueError
            out: Tensor = self.head(self.stem(x))
            return out

    assert Split(Strict(), "stem", sample=np.zeros((5, 4), dtype=np.float32)).units == ("stem", "head")


# -- names of inputs -----------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Takes tokens, and may be told which of them to read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, keep: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        if keep is not None:
            hidden = hidden * keep[..., None]
        scores: Tensor = self.out(hidden.mean(1))
        return scores


def items_with(*names: str) -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 9, (12, 5), generator=torch.manual_seed(3))
    return [{**dict.fromkeys(names, tokens[i]), "labels": torch.tensor(i % 3)} for i in range(12)]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("name", ["input_ids", "tokens"])
def test_a_single_input_may_have_a_name(name: str, engine: str) -> None:
    """It trains as with the input alone."""

    def state_after(data: cl.Arrays) -> dict[str, Tensor]:
        torch.manual_seed(0)
        method = cl.sfl_v1(model=Split(Tagger(), "embed"), client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
        halves, batching = cl.iid(12, 2, key=0), cl.Batching(size=3)
        return cl.train(method, data, halves, rounds=2, batching=batching, test=data, engine=engine).state_dict

    items = items_with(name)
    named, plain = cl.from_dataset(items), cl.from_dataset(items, inputs=name)
    assert isinstance(named.x, dict) and isinstance(plain.x, Tensor)
    one, other = state_after(named), state_after(plain)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_forward_that_reads_a_dict_gets_it() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.b(self.a(batch["image"]))
            return out

    split, x = Split(Reads(), 1), {"image": torch.randn(3, 4)}
    split.rehearse(x, torch.tensor([0, 1, 0]), 2)
    split.prove(x, torch.tensor([0, 1, 0]))
    with pytest.raises(ConfigError) as caught:
        split.rehearse({"picture": x["image"]}, torch.tensor([0, 1, 0]), 2)
    assert (
        str(caught.value) == "the model reads 'image', and the data have picture; choose with inputs= of from_dataset"
    )


def test_wrong_names_of_inputs_are_told_with_the_right_ones() -> None:
    y, choose = torch.tensor([0, 1, 0]), "choose with inputs= of from_dataset, or give sample= to Split"
    two = Split(TwoInputs(), 1)
    image, context = torch.randn(3, 6), torch.randn(3, 2)
    cases = [
        (two, {"image": image, "contxt": context}, "image, context", "image, contxt"),
        (two, {"image": image, "context": context, "id": context}, "image, context", "image, context, id"),
        (two, image, "image, context", "one input without a name"),
        (Split(Tagger(), 1), {"input_ids": image.long(), "keep": image}, "input_ids", "input_ids, keep"),
    ]
    for split, x, takes, have in cases:
        for see in (lambda s=split, x=x: s.rehearse(x, y, 2), lambda s=split, x=x: s.lower(s.initial()[0], x)):
            with pytest.raises(ConfigError) as caught:
                see()
            assert str(caught.value) == f"the model takes {takes}; the data have {have}; {choose}"


def test_a_sequence_says_that_its_input_has_no_name() -> None:
    split = Split(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)), 1)
    with pytest.raises(ConfigError, match=r"; the model's input may have no name: choose it with inputs='input_ids'$"):
        split.rehearse({"input_ids": torch.zeros(3, 5).long()}, torch.tensor([0, 1, 2]), 3)


def test_what_crosses_is_the_input_itself_until_a_layer_has_weights() -> None:
    net = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4, 3), nn.Linear(3, 2))
    assert [Split(net, cut).passes_raw for cut in range(5)] == [True, True, True, False, False]
    assert Split(net, 0, head=3).passes_raw  # the weights of the head come after what crosses
