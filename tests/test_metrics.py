"""Specifies metrics: a number a sample is averaged, a single number is computed once over the whole set."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutlayer
from cutlayer import Batching, Split, evaluate, from_arrays, iid, sgd
from cutlayer.errors import ConfigError, UnknownNameError
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
        "the metric 'mine' returned 2 numbers for 3 samples; return one for each sample, or a single one"
    )


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
