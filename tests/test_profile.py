"""The profile equals the numbers that are counted by hand."""

import pytest
import torch
from torch import Tensor, nn

from cutlayer.models import cnn, mlp, resnet18
from cutlayer.plan.profile import profile
from cutlayer.split import Split

# ResNet-18, 3x3 stem, 32x32: unit, cumulative multiply-adds (millions), O(L), A(L), cumulative parameters
RESNET18 = [
    ("stem", 1.769, 0.0032, 65536, 1_856),
    ("layer1.0", 77.267, 0.1391, 65536, 75_840),
    ("layer1.1", 152.764, 0.2750, 65536, 149_824),
    ("layer2.0", 211.485, 0.3808, 32768, 379_968),
    ("layer2.1", 286.982, 0.5167, 32768, 675_392),
    ("layer3.0", 345.702, 0.6224, 16384, 1_594_432),
    ("layer3.1", 421.200, 0.7583, 16384, 2_775_104),
    ("layer4.0", 479.920, 0.8641, 8192, 6_448_192),
    ("layer4.1", 555.418, 1.0000, 8192, 11_168_832),
    ("head", 555.423, 1.0000, 10, 11_173_962),
]


def test_resnet18_for_small_images() -> None:
    table = profile(resnet18(), (3, 32, 32))
    cuts = range(1, 11)
    found = [
        (
            table.rows[cut - 1].name,
            round(table.cumulative_forward_flops[cut] / 2e6, 3),
            round(table.share(cut), 4),
            table.activations[cut],
            table.cumulative_params[cut],
        )
        for cut in cuts
    ]
    assert found == RESNET18
    assert round(table.macs / 1e6, 2) == 555.42
    assert table.share(0) == 0.0 and table.activations[0] == 3 * 32 * 32


def test_resnet18_with_the_imagenet_stem() -> None:
    table = profile(resnet18(stem="imagenet"), (3, 32, 32))
    assert (round(table.macs / 1e6, 2), table.params) == (37.02, 11_181_642)
    assert (table.activations[5], table.cumulative_params[5], round(table.share(5), 4)) == (2048, 683_072, 0.5466)


def test_backward_is_twice_forward_but_for_the_first_unit() -> None:
    table = profile(resnet18(), (3, 32, 32))
    assert table.rows[0].backward_flops == table.rows[0].forward_flops  # no gradient for the input
    assert all(row.backward_flops == 2 * row.forward_flops for row in table.rows[1:])
    total = sum(row.backward_flops for row in table.rows)
    assert table.cumulative_backward_flops[-1] == total


def test_a_model_counted_by_hand() -> None:
    table = profile(mlp(in_features=6, hidden=(5,), num_classes=3), torch.randn(7, 6), optimiser_slots=2)
    first, head = table.rows
    assert (first.macs, first.forward_flops, first.backward_flops) == (30, 60, 60)
    assert (head.macs, head.forward_flops, head.backward_flops) == (15, 30, 60)
    assert (first.params, head.params, first.activation, head.activation) == (35, 18, 5, 3)
    assert table.cumulative_optimiser_state == (0, 70, 106)
    assert table.input == 6


def test_frozen_parameters_have_neither_gradient_nor_optimiser_state() -> None:
    model = cnn()
    model[0].requires_grad_(False)
    table = profile(Split(model, 2), (1, 8, 8))
    assert (table.rows[0].backward_flops, table.rows[0].optimiser_state, table.rows[0].params) == (0, 0, 160)
    assert table.rows[1].backward_flops == table.rows[1].forward_flops  # nothing below asks for a gradient
    assert table.rows[2].backward_flops == 2 * table.rows[2].forward_flops


def test_a_tied_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert profile(model, (3,)).cumulative_params == (0, 9, 9)


def test_several_inputs_and_constants() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.out = nn.Linear(6, 4), nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, image: Tensor, word: Tensor) -> Tensor:
            return self.out(self.left(image) + self.right(word) + torch.ones(4))

    table = profile(TwoInputs(), {"image": torch.randn(5, 6), "word": torch.zeros(5, dtype=torch.int64)})
    assert [(row.name, row.macs, row.params) for row in table.rows] == [
        ("add", 24, 64),
        ("add_1", 0, 0),
        ("out", 12, 15),
    ]
    assert table.input == 7


@pytest.mark.parametrize("sample", [(1, 8, 8), torch.zeros(5, 1, 8, 8)])
def test_a_shape_and_a_batch_give_the_same_profile(sample: Tensor | tuple[int, ...]) -> None:
    assert profile(cnn(), sample) == profile(cnn(), torch.ones(1, 1, 8, 8))


def test_profiling_leaves_the_model_alone() -> None:
    model = cnn(norm="batch").train()
    profile(model, (1, 8, 8))
    assert model.training
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
