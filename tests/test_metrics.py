"""Specifies metrics: a number a sample is averaged, a single number is computed once over the whole set."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutlayer
from cutlayer import Batching, Split, evaluate, from_arrays, iid, sgd
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.pieces.losses import bce
from cutlayer.runs.metrics import METRICS, accuracy, auc, f1, mae, mse, r2, rmse

SCORES = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.55, 0.54, 0.53, 0.52, 0.51, 0.505])
TRUTH = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1, 0])


def found(
    metric: Any, out: Tensor = SCORES[:, None], y: Tensor = TRUTH, batch: int = 3, num_classes: int | None = 2
) -> float:
    """The value of a metric on these outputs, by a model that passes them on."""
    split = Split(nn.Sequential(nn.Identity(), nn.Identity()), 1, loss=lambda out, y: out.sum())
    model = split.initial()[0].joined(split.initial()[1])
    return evaluate(split, model, from_arrays(out, y, num_classes), {"mine": metric}, batch)["mine"]


# -- over the whole set ------------------------------------------------------------------------------------------


def sick_f1(out: Tensor, y: Tensor) -> Tensor:
    """F1 of the class 1."""
    guess = out[:, 0] > 0.6
    return 2 * (guess & (y == 1)).sum() / (guess.sum() + y.sum())


def test_a_metric_of_one_number_is_computed_once_over_the_whole_set() -> None:
    """Of the three that are guessed two are right, of six: 4/9. A mean over batches of four would be 0.27."""
    for batch in (1, 3, 4, 10, 512):
        assert found(sick_f1, batch=batch) == pytest.approx(4 / 9)
    parts = [float(sick_f1(SCORES[k : k + 4, None], TRUTH[k : k + 4])) for k in (0, 4, 8)]
    assert sum(n * v for n, v in zip((4, 4, 2), parts, strict=True)) / 10 == pytest.approx(4 / 15)


def test_a_metric_may_be_undefined_on_a_part_and_return_a_plain_number() -> None:
    """As those of scikit-learn are; what they warn of on a part is nobody's business."""

    def area(out: Tensor, y: Tensor) -> float:
        if y.min() == y.max():
            raise ValueError("only one class in y_true")
        if len(y) < 10:
            warnings.warn("few samples", stacklevel=1)
        return float(auc(out, y))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(area, batch=2) == pytest.approx(18 / 24)


def test_a_metric_that_fails_on_the_whole_set_fails() -> None:
    def broken(out: Tensor, y: Tensor) -> float:
        raise ValueError(f"with {len(y)}")

    with pytest.raises(ValueError, match="with 10"):
        found(broken)


def test_a_number_for_each_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        found(lambda out, y: torch.ones(2))
    assert str(caught.value) == (
        "the metric 'mine' returned the shape (2,) for outputs of (3, 1) and targets of (3,); return a number for each "
        "sample or each target, or a single one for all"
    )


@pytest.mark.parametrize(
    ("metric", "out", "shape"),
    [
        (lambda out, y: (out - y).abs(), SCORES[:, None], "(3, 3) for outputs of (3, 1)"),
        (lambda out, y: out, torch.ones(10, 4), "(3, 4) for outputs of (3, 4)"),
    ],
)
def test_more_than_a_number_for_each_sample_is_refused(metric: Any, out: Tensor, shape: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(metric, out)
    assert str(caught.value) == (
        f"the metric 'mine' returned the shape {shape} and targets of (3,); return a number for each sample or each "
        "target, or a single one for all"
    )


def test_a_number_for_each_target_is_averaged() -> None:
    out, y = torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.0, 0.0]]), torch.zeros(3, 2)
    for metric in (lambda out, y: out - y, lambda out, y: (out - y).mean(1), lambda out, y: (out - y).mean(1)[:, None]):
        assert found(metric, out, y, batch=2, num_classes=None) == pytest.approx(11 / 6)


def test_a_single_number_of_all_pairs_is_refused() -> None:
    y = TRUTH.float()
    with pytest.raises(ConfigError) as caught:
        found(lambda out, y: (out - y).abs().mean(), y=y, num_classes=None)
    assert str(caught.value) == (
        "the metric 'mine' would broadcast outputs of the shape (3, 1) and targets of the shape (3,); make them equal, "
        "such as lambda out, y: F.mse_loss(out.squeeze(1), y)"
    )
    wanted = float((SCORES - y).abs().mean())
    assert found(lambda out, y: (out.squeeze(1) - y).abs().mean(), y=y, num_classes=None) == pytest.approx(wanted)


def test_a_metric_per_sample_is_averaged_over_samples() -> None:
    assert found(lambda out, y: (out[:, 0] > 0.6) == (y == 1)) == pytest.approx(0.5)


# -- objects that accumulate -------------------------------------------------------------------------------------


class MeanOfTop:
    """Has the interface of a torchmetrics object: state, reset, update, compute, to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen: list[Tensor] = [torch.tensor(1e9)]  # left from before

    def to(self, device: torch.device) -> "MeanOfTop":
        self.calls.append(f"to {device}")
        return self

    def reset(self) -> None:
        self.seen = []

    def update(self, out: Tensor, y: Tensor) -> None:
        self.seen.append(out.max())
        self.calls.append(f"update {len(y)}")

    def compute(self) -> Tensor:
        return torch.stack(self.seen).max()

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("torchmetrics would keep a second state")


def test_objects_of_torchmetrics_are_fed_batch_by_batch_and_start_over() -> None:
    metric = MeanOfTop()
    assert found(metric, batch=4) == pytest.approx(0.9)
    assert metric.calls == ["to cpu", "update 4", "update 4", "update 2"]
    assert found(metric, out=SCORES[:, None] / 2, batch=4) == pytest.approx(0.45)


def test_a_collection_of_numbers_is_refused() -> None:
    class Collection(MeanOfTop):
        def compute(self) -> Any:
            return {"a": 1.0}

    with pytest.raises(ConfigError) as caught:
        found(Collection())
    assert str(caught.value) == "over the whole set the metric 'mine' is a dict; return a single number"


# -- by name -----------------------------------------------------------------------------------------------------


def test_macro_f1_by_hand() -> None:
    """Guesses 0, 0, 1, 1, 2 of classes 0, 1, 1, 1, 0: F1 of 1/2, 4/5 and, never true, 0; the fourth does not occur."""
    out = torch.eye(4)[torch.tensor([0, 0, 1, 1, 2])]
    assert float(f1(out, torch.tensor([0, 1, 1, 1, 0]))) == pytest.approx((1 / 2 + 4 / 5 + 0) / 3)


def test_areas_by_hand() -> None:
    """Of 6 positives and 4 negatives 18 of 24 pairs are in order; equal scores count half."""
    assert float(auc(SCORES[:, None], TRUTH)) == pytest.approx(18 / 24)
    assert float(auc(torch.stack([-SCORES, SCORES], 1), TRUTH)) == pytest.approx(18 / 24)
    assert float(auc(torch.zeros(10, 1), TRUTH)) == 0.5
    # Probabilities of class 0: 0.91 and 0.58 of its own, 0.05 and 0.67 of others. Classes 1 and 2 are told apart.
    three = torch.tensor([[3.0, 0, 0], [1, 0, 0], [0, 3, 0], [2, 0, 1]])
    assert float(auc(three, torch.tensor([0, 0, 1, 2]))) == pytest.approx((3 / 4 + 1 + 1) / 3)
    assert auc(torch.zeros(3, 2), torch.ones(3, dtype=torch.int64)).isnan()


def test_regressions_by_hand() -> None:
    out, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 3.0, 2.0])
    assert mae(out, y).tolist() == [[0], [1], [2]]
    assert mse(out, y).tolist() == [[0], [1], [4]]
    assert float(rmse(out, y)) == pytest.approx((5 / 3) ** 0.5)
    assert float(r2(out, y)) == pytest.approx(1 - 5 / 2)
    for metric, value in ((mae, 1.0), (rmse, (5 / 3) ** 0.5), (r2, -1.5)):
        assert found(metric, out, y, batch=2, num_classes=None) == pytest.approx(value)
    with pytest.raises(ConfigError) as caught:
        mae(torch.zeros(3, 2), y)
    assert str(caught.value) == (
        "the outputs have the shape (3, 2) and the targets (3,); a regression needs an output for each target"
    )


def test_metrics_have_names() -> None:
    assert list(METRICS) == ["accuracy", "f1", "auc", "mae", "mse", "rmse", "r2"]
    data = cutlayer.load("digits").train.take(range(60))
    method = cutlayer.fedavg(model=Split(cutlayer.models.build("mlp", in_features=64), 1), client_opt=sgd(0.1))
    options: dict[str, Any] = {"rounds": 1, "batching": Batching(size=8), "test": data}
    result = cutlayer.train(method, data, iid(60, 3, key=0), metrics=["f1", "auc"], **options)
    assert [key for key in result.history[0] if key.startswith("test")] == ["test_loss", "test_f1", "test_auc"]
    model = cutlayer.models.build("mlp", in_features=64)
    model.load_state_dict(result.state_dict)
    assert result.history[0]["test_f1"] == pytest.approx(float(f1(model(data.x), data.y)))
    with pytest.raises(UnknownNameError, match=r"^unknown metric 'acuracy'; did you mean 'accuracy' or 'auc'\?$"):
        cutlayer.train(method, data, iid(60, 3, key=0), metrics=["acuracy"], **options)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("f1", "metrics is 'f1'; give names, such as ['accuracy', 'f1'], or a dict of functions"),
        (3, "metrics is 3; give names, such as ['accuracy', 'f1'], or a dict of functions"),
        ({"a": MeanOfTop}, "the metric 'a' is the class MeanOfTop; give an object of it, such as MeanOfTop(...)"),
        ({"a": 3}, "the metric 'a' is 3; give a function of (outputs, targets)"),
        ({"loss": f1}, "a metric cannot be called 'loss', which is the loss of the split; rename it"),
    ],
)
def test_other_metrics_are_refused(metrics: Any, message: str) -> None:
    data = cutlayer.load("digits").train.take(range(60))
    method = cutlayer.fedavg(model=Split(cutlayer.models.build("mlp", in_features=64), 1), client_opt=sgd(0.1))
    with pytest.raises(ConfigError) as caught:
        cutlayer.train(method, data, iid(60, 3, key=0), rounds=1, batching=Batching(size=8), metrics=metrics)
    assert str(caught.value) == message


def test_the_accuracy_of_binary_scores_goes_by_their_sign() -> None:
    y = torch.tensor([0, 1, 1, 0])
    scores = torch.tensor([[-1.0], [2.0], [-3.0], [0.5]])
    assert accuracy(scores, y).tolist() == accuracy(scores[:, 0], y).tolist() == [1, 1, 0, 0]
    several = accuracy(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert several.tolist() == [1, 0.5]


# -- binary scores -----------------------------------------------------------------------------------------------


def test_binary_scores_and_two_columns_give_the_same_f1() -> None:
    """Signs guess 1, 1, 0, 0, 1 of 1, 0, 0, 1, 1: two of three right either way for class 1, one of two for class 0.

    F1 of class 1 is 2·2/(3 + 3), of class 0 it is 2·1/(2 + 2); their mean is 7/12.
    """
    y = torch.tensor([1, 0, 0, 1, 1])
    scores = torch.tensor([0.3, 2.0, -1.0, -0.5, 4.0])
    two = torch.stack([torch.zeros(5), scores], 1)
    for out, truth in ((scores, y), (scores[:, None], y), (scores[:, None], y[:, None].float()), (two, y)):
        assert float(f1(out, truth)) == pytest.approx(7 / 12)
        assert float(auc(out, truth)) == pytest.approx(4 / 6)
    # Nobody is, or is taken for, class 1: only class 0 counts.
    assert float(f1(torch.tensor([-1.0, -2.0]), torch.tensor([0, 0]))) == 1.0


def test_a_run_with_bce_reports_the_f1_of_its_signs() -> None:
    y = (torch.arange(40) % 3 == 0).long()
    data = from_arrays(torch.randn(40, 4, generator=torch.manual_seed(0)) + 2 * y[:, None], y)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    method = cutlayer.fedavg(model=Split(net, 1, loss=bce), client_opt=sgd(0.5))
    result = cutlayer.train(
        method, data, iid(40, 2, key=0), rounds=3, batching=Batching(size=8), test=data, metrics=["accuracy", "f1"]
    )
    net.load_state_dict(result.state_dict)
    guess = net(data.x)[:, 0] > 0
    hits = [((guess == k) & (y == k)).sum() for k in (0, 1)]
    by_hand = sum(2 * float(hits[k]) / float((guess == k).sum() + (y == k).sum()) for k in (0, 1)) / 2
    assert result.history[-1]["test_f1"] == pytest.approx(by_hand)
    assert result.history[-1]["test_accuracy"] > 0.8 and by_hand > 0.7


@pytest.mark.parametrize(("metric", "other"), [(f1, "MultilabelF1Score"), (auc, "MultilabelAUROC")])
def test_several_labels_a_sample_are_refused(metric: Any, other: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(metric, torch.randn(6, 3), torch.ones(6, 3), num_classes=None)
    assert str(caught.value) == (
        f"{metric.__name__} is for one class a sample, and the targets are 3 labels a sample; take accuracy, or give a "
        f"metric of your own, such as metrics={{{metric.__name__!r}: torchmetrics.classification.{other}"
        "(num_labels=3)}"
    )


# -- ignored targets ---------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[0, 1, 2, -100], [1, -100, -100, -100], [2, 2, 0, 1], [0, -100, -100, -100]])


def scores_of(guesses: Tensor, classes: int = 3) -> Tensor:
    """Scores (samples, classes, positions) whose largest is the guess."""
    return 3 * torch.nn.functional.one_hot(guesses, classes).movedim(2, 1).float()


def by_token(out: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(out, y)


def test_ignored_targets_count_in_no_metric() -> None:
    guesses = TOKENS.clamp(min=0)
    guesses[2, 0] = 0  # one of nine is wrong
    out = scores_of(guesses)
    y, guess = TOKENS[TOKENS >= 0], guesses[TOKENS >= 0]
    assert float(f1(out, TOKENS)) == pytest.approx(float(f1(torch.eye(3)[guess], y)))
    assert float(auc(out, TOKENS)) == pytest.approx(float(auc(3 * torch.eye(3)[guess], y)))
    split = Split(nn.Sequential(nn.Identity(), nn.Identity()), 1, loss=by_token)
    model = split.initial()[0].joined(split.initial()[1])
    data = from_arrays(out, TOKENS, num_classes=3)
    for batch in (4, 8, 12, 512):
        values = evaluate(split, model, data, {"accuracy": accuracy, "f1": f1}, batch)
        assert values["accuracy"] == pytest.approx(8 / 9)
        assert values["loss"] == pytest.approx(float(by_token(out, TOKENS)))
        assert values["f1"] == pytest.approx(float(f1(out, TOKENS)))


def test_a_batch_of_ignored_targets_alone_counts_for_nothing() -> None:
    y = torch.tensor([1, -100, -100, 0])
    out = torch.tensor([[0.0, 2.0], [9.0, 0.0], [0.0, 9.0], [0.0, 1.0]])
    split = Split(nn.Sequential(nn.Identity(), nn.Identity()), 1)
    model = split.initial()[0].joined(split.initial()[1])
    found = evaluate(split, model, from_arrays(out, y), {"accuracy": accuracy}, 1)
    assert found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(out, y)))


def test_what_is_ignored_is_ignored_with_binary_scores_as_well() -> None:
    y, scores = torch.tensor([1, 0, -100]), torch.tensor([2.0, -1.0, -1.0])
    assert found(accuracy, scores[:, None], y, batch=2) == 1.0
    assert found(accuracy, scores[:, None], y[:, None], batch=3) == 1.0
    assert float(f1(scores, y)) == float(auc(scores, y)) == 1.0


def test_a_real_number_is_never_ignored() -> None:
    y = torch.tensor([[-100.0], [3.0]])
    assert found(mae, torch.zeros(2, 1), y, batch=1, num_classes=None) == pytest.approx(51.5)


def test_without_ignored_targets_the_numbers_are_the_same_bits() -> None:
    """The mean of batch means, weighted by samples, as without any masks."""
    y = torch.randint(0, 3, (7, 3), generator=torch.manual_seed(1))
    out = torch.randn(7, 3, 3, generator=torch.manual_seed(2))
    split = Split(nn.Sequential(nn.Identity(), nn.Identity()), 1, loss=by_token)
    model = split.initial()[0].joined(split.initial()[1])
    values = evaluate(split, model, from_arrays(out, y, 3), {"accuracy": accuracy}, 9)
    for name, fn in (("loss", by_token), ("accuracy", lambda out, y: (out.argmax(1) == y).double())):
        total: Any = 0
        for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):
            part = len(y[rows]) * fn(out[rows], y[rows]).double().mean()
            total = part if rows.start == 0 else total + part
        assert values[name] == float(total / 7)


def test_a_dict_of_outputs_needs_a_metric_of_its_own() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x, "aux": x}

    split = Split(nn.Sequential(nn.Identity(), Two()), 1, loss=lambda out, y: out["logits"].sum())
    model = split.initial()[0].joined(split.initial()[1])
    for metric in (accuracy, f1, auc, mae, r2):
        with pytest.raises(ConfigError) as caught:
            evaluate(split, model, from_arrays(torch.randn(4, 2), torch.arange(4) % 2), {"accuracy": metric})
        assert str(caught.value) == (
            "the model's output is a dict, and this metric reads one tensor; say which, such as "
            "metrics={'accuracy': lambda out, y: cutlayer.accuracy(out['logits'], y)}"
        )
