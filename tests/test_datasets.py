"""Specifies `from_dataset`: items with names, padding, and random transforms, which are drawn anew at each step."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cutlayer as cl
from cutlayer.data.seeding import drawing_from
from cutlayer.errors import ConfigError, DataError, UnknownNameError


class Columns:
    """What `datasets.Dataset` offers of its interface: columns, items as dicts, formats."""

    def __init__(self, columns: dict[str, list[Any]], form: str | None = None, shown: list[str] | None = None) -> None:
        self.columns, self.form, self.shown = columns, form, shown or list(columns)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def with_format(self, form: str | None, columns: list[str] | None = None) -> "Columns":
        return Columns(self.columns, form, columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict[str, Any]:
        make = {None: lambda v: v, "torch": torch.tensor, "numpy": np.array}[self.form]
        return {name: make(self.columns[name][i]) for name in self.shown}


TOKENS = {
    "input_ids": [[5, 6, 7], [8, 9, 1]] * 3,
    "attention_mask": [[1, 1, 1], [1, 1, 0]] * 3,
    "label": [0, 1] * 3,
    "text": ["a b c", "d e"] * 3,
}


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_items_with_names_are_taken_as_they_are(form: str) -> None:
    found = cl.from_dataset(Columns(TOKENS).with_format(form, ["input_ids", "attention_mask", "label"]))
    assert isinstance(found.x, dict) and list(found.x) == ["input_ids", "attention_mask"]
    assert found.x["input_ids"][:2].tolist() == [[5, 6, 7], [8, 9, 1]] and found.x["input_ids"].dtype == torch.int64
    assert (found.y.tolist(), found.num_classes) == ([0, 1] * 3, 2)


def test_a_trainers_items_are_taken_as_they_are() -> None:
    items = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([2, -100])} for _ in range(3)]
    found = cl.from_dataset(items)
    assert isinstance(found.x, dict) and found.x["input_ids"].tolist() == [[1, 2]] * 3
    assert (found.y.tolist(), found.num_classes) == ([[2, -100]] * 3, None)


def test_columns_are_chosen_by_name() -> None:
    plain = Columns(TOKENS)
    alone = cl.from_dataset(plain, inputs="input_ids")
    assert isinstance(alone.x, Tensor) and alone.x.shape == (6, 3)
    both = cl.from_dataset(plain, inputs=("attention_mask", "input_ids"), target="label")
    assert isinstance(both.x, dict) and list(both.x) == ["attention_mask", "input_ids"]
    with pytest.raises(DataError) as caught:
        cl.from_dataset(plain)
    assert str(caught.value) == (
        "item 0 of the data set has x['text'] of the type str; give numbers, or leave it out with inputs="
    )
    with pytest.raises(UnknownNameError) as unknown:
        cl.from_dataset(plain, inputs="input_id")
    assert str(unknown.value) == "unknown column 'input_id' in item 0 of the data set; did you mean 'input_ids'?"
    with pytest.raises(DataError) as caught:
        cl.from_dataset([{"a": 1.0, "b": 2.0}])
    assert str(caught.value) == "item 0 of the data set has a, b and no labels; name the target with target="


def test_tokens_of_different_lengths_are_padded_on_request() -> None:
    items = [
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, 6, 7]},
        {"input_ids": [8], "attention_mask": [1], "labels": [8]},
    ]
    with pytest.raises(DataError) as caught:
        cl.from_dataset(items)
    assert str(caught.value) == (
        "item 1 of the data set has x['input_ids'] of shape (1,), item 0 has (3,); bring all items to one shape, for "
        "example by resizing, or with pad= for tokens"
    )
    found = cl.from_dataset(items, pad=50)
    assert {name: value.tolist() for name, value in found.x.items()} == {  # type: ignore[union-attr]
        "input_ids": [[5, 6, 7], [8, 50, 50]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert found.y.tolist() == [[5, 6, 7], [8, -100, -100]]
    told = cl.from_dataset(items, pad=50, num_classes=9)
    assert (told.num_classes, told.y.tolist()) == (9, found.y.tolist())
    with pytest.raises(DataError, match=r"^label 8 of sample 1 is out of range: 8 classes have the labels 0 to 7$"):
        cl.from_dataset(items, pad=50, num_classes=8)


def test_a_data_set_without_a_length_is_refused() -> None:
    def endless() -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(2), 0

    with pytest.raises(DataError, match="the data set has no length; collect its items in a list first"):
        cl.from_dataset(endless())


# -- random transforms -------------------------------------------------------------------------------------------------


class Flipping:
    """Images whose transform draws from one of the global generators."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = torch.arange(16.0).reshape(1, 4, 4) + i
        return (image.flip(2) if self.draw() < 0.5 else image), i % 2


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), np.random.random, random.random])
def test_a_random_transform_is_not_frozen(draw: Any) -> None:
    with pytest.raises(DataError) as caught:
        cl.from_dataset(Flipping(draw))
    assert str(caught.value) == (
        "item 0 of the data set is another one each time it is read, so it has a random transform, of which every "
        "epoch would see the same draw; take the transform out and give it to train, as "
        "augment=cl.SampleTransform(...), or use cl.Augment"
    )
    assert len(cl.from_dataset(Flipping(lambda: 1.0))) == 12


def test_looking_for_random_transforms_changes_no_generator() -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    cl.from_dataset(Flipping(lambda: 1.0))
    with drawing_from(3):
        torch.rand(2), np.random.random(2), random.random()
    assert states() == before


def noisy(sample: Tensor) -> Tensor:
    return sample + torch.rand(()) + float(np.random.random()) + random.random()


def test_a_transform_draws_by_key_sample_and_client() -> None:
    change = cl.SampleTransform(noisy)
    x = torch.zeros(2, 3, 4)
    first = change(x, [7, 8])
    assert torch.equal(first, change(x, [7, 8])) and torch.equal(first[1:], change(x[1:], [8]))
    assert len(set(first[:, :, 0].flatten().tolist())) == 6
    named = cl.SampleTransform(lambda s: {**s, "a": noisy(s["a"])})({"a": x, "b": x}, [7, 8])
    assert torch.equal(named["a"], first) and torch.equal(named["b"], x)
    assert torch.equal(x, torch.zeros(2, 3, 4))
    with pytest.raises(DataError) as caught:
        cl.SampleTransform(lambda s: s[:2].double())(x, [7, 8])
    assert str(caught.value) == (
        "the transform turns torch.float32 (4,) into torch.float64 (2,); it must keep the shape and the type of a "
        "sample"
    )


def trained(engine: str, rounds: int, augment: Any) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    data = cl.from_arrays(x, (x[:, 0] > 0).astype(np.int64))
    method = cl.sfl_v1(model=cl.Split(net, cut=1), client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
    result = cl.train(
        method,
        data,
        cl.iid(40, 4, key=0),
        rounds=rounds,
        engine=engine,
        augment=augment,
        batching=cl.Batching(size=5),
    )
    return [record["loss"] for record in result.history]


def test_engines_see_the_same_draws_and_every_epoch_others() -> None:
    loop, vmap = (trained(engine, 3, cl.SampleTransform(noisy)) for engine in ("loop", "vmap"))
    np.testing.assert_allclose(loop, vmap, rtol=1e-5)
    assert loop != trained("loop", 3, None)
    seen = []
    trained("loop", 2, cl.SampleTransform(lambda s: seen.append(float(noisy(s * 0)[0])) or s))
    assert len(seen) > 80 and len(set(seen)) == len(seen)


def test_a_transform_that_fails_is_found_before_training() -> None:
    with pytest.raises(DataError, match="it must keep the shape and the type of a sample"):
        trained("loop", 1, cl.SampleTransform(lambda s: s[:2]))
    with pytest.raises(
        ConfigError, match="augment changes images, but the inputs of these data are none; leave it out"
    ):
        trained("loop", 1, cl.Augment(flip=True))


# -- data sets where samples are expected ------------------------------------------------------------------------------


class Reader(nn.Module):
    """Reads tokens, and those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(60, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scores: Tensor = self.out((self.embed(input_ids) * attention_mask[..., None]).mean(1))
        return scores


class Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.linspace(0, 1, 4) * i, i % 2


def trained_on(module: Any, data: Any, test: Any, **options: Any) -> cl.Result:
    torch.manual_seed(0)
    method = cl.sfl_v1(model=cl.Split(module(), 1), client_opt=cl.sgd(0.1), server_opt=cl.sgd(0.1))
    halves, batching = cl.iid(len(data), 2, key=0), cl.Batching(size=2)
    return cl.train(method, data, halves, rounds=2, batching=batching, test=test, **options)


def test_train_takes_data_sets_and_items(tmp_path: Any) -> None:
    tokens = Columns(TOKENS, shown=["input_ids", "attention_mask", "label"])
    items = [tokens[i] for i in range(len(tokens))]
    pairs, mlp = Pairs(8), lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for module, data in ((Reader, tokens), (Reader, items), (mlp, pairs), (mlp, [pairs[i] for i in range(8)])):
        own = cl.from_dataset(data)
        one, other = trained_on(module, data, data, validation=data), trained_on(module, own, own, validation=own)
        assert one.history == other.history and one.history[-1]["test_accuracy"] is not None
    folder = tmp_path / "mine" / "x"
    trained_on(mlp, pairs, pairs, out=folder)
    again = trained_on(mlp, pairs, pairs, out=folder, resume=True)
    assert again.history == trained_on(mlp, pairs, pairs).history


def test_what_is_wrong_with_items_is_told() -> None:
    with pytest.raises(DataError, match=r"^item 0 of the data set is a Tensor, not a pair"):
        trained_on(Reader, [torch.zeros(2)] * 4, None)
    with pytest.raises(ConfigError, match=r"^data is a dict; give an Arrays, as cutlayer.from_arrays"):
        trained_on(Reader, {"train": Pairs(4), "test": Pairs(4)}, None)


class Picky(nn.Module):
    """Looks at values, so that only torch.export can trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Embedding(60, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if input_ids.shape[1] > 512:
            raise ValueError
        hidden = self.stem(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        scores: Tensor = self.head(hidden.mean(1))
        return scores


def test_a_sample_may_be_samples_a_data_set_or_items() -> None:
    tokens = Columns(TOKENS, shown=["input_ids", "attention_mask", "label"])
    items = [tokens[i] for i in range(len(tokens))]
    x = cl.from_dataset(items).x
    ragged = [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}, {"input_ids": [4], "attention_mask": [1]}]
    for sample in (cl.from_dataset(items), tokens, items, ragged, [(item, 0) for item in ragged], x):
        split = cl.Split(Picky(), "stem", sample=sample)
        assert isinstance(split.sample, dict) and list(split.sample) == ["input_ids", "attention_mask"]
        assert split.sample["input_ids"].shape[1] == 3 and split.units[-1] == "head"
        split.rehearse(x, torch.arange(6) % 2, 2)
    plain = cl.Split(Picky(), "stem", sample=[(torch.arange(3), 1)] * 4)
    assert isinstance(plain.sample, Tensor) and plain.sample.tolist() == [[0, 1, 2]] * 3
    image = cl.Split(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), 1, sample=[(np.full((1, 2, 2), 255, np.uint8), 1)])
    assert isinstance(image.sample, Tensor) and image.sample.tolist() == [[[[1, 1], [1, 1]]]]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (7, "sample is an int"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), "sample is a tuple"),
        ({"input_ids": [[1, 2]]}, "sample['input_ids'] is a list"),
    ],
)
def test_another_sample_is_refused(sample: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cl.Split(Picky(), "stem", sample=sample)
    assert str(caught.value) == (
        f"{message}; give a Tensor, a dict of them by name, an Arrays, or a data set or list of items"
    )
