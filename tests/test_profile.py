"""The profile equals the numbers that are counted by hand."""

import pytest
import torch
from torch import Tensor, nn

from cutlayer.models import build, char_transformer, cnn, mlp, resnet18, resnet34, vgg16
from cutlayer.planning.profile import profile
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

# VGG-16 without normalisation, 32x32: unit, A(L), cumulative multiply-adds (millions), cumulative parameters
VGG16 = [
    ("conv1_1", 65536, 1.769, 1_792),
    ("conv1_2", 16384, 39.518, 38_720),
    ("conv2_1", 32768, 58.393, 112_576),
    ("conv2_2", 8192, 96.141, 260_160),
    ("conv3_1", 16384, 115.016, 555_328),
    ("conv3_2", 16384, 152.764, 1_145_408),
    ("conv3_3", 4096, 190.513, 1_735_488),
    ("conv4_1", 8192, 209.388, 2_915_648),
    ("conv4_2", 8192, 247.136, 5_275_456),
    ("conv4_3", 2048, 284.885, 7_635_264),
    ("conv5_1", 2048, 294.322, 9_995_072),
    ("conv5_2", 2048, 303.759, 12_354_880),
    ("conv5_3", 512, 313.197, 14_714_688),
    ("fc1", 512, 313.459, 14_977_344),
    ("fc2", 512, 313.721, 15_240_000),
    ("head", 10, 313.726, 15_245_130),
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


def test_vgg16_for_small_images() -> None:
    table = profile(vgg16(), (3, 32, 32))
    found = [
        (
            row.name,
            table.activations[cut],
            round(table.cumulative_forward_flops[cut] / 2e6, 3),
            table.cumulative_params[cut],
        )
        for cut, row in enumerate(table.rows, start=1)
    ]
    assert found == VGG16


def test_resnet34_for_larger_images() -> None:
    table = profile(resnet34(num_classes=200), (3, 64, 64))
    assert (round(table.macs / 1e6, 2), table.params) == (4637.69, 21_379_592)
    assert (table.rows[2].name, round(table.share(3), 4)) == ("layer1.1", 0.1318)
    assert (table.activations[3], table.cumulative_params[3]) == (262_144, 149_824)


def test_a_transformer_on_tokens_counted_by_hand() -> None:
    table = profile(char_transformer(), torch.zeros(3, 80, dtype=torch.int64))
    embedding, *layers, head = table.rows
    assert (embedding.macs, embedding.params, embedding.activation) == (0, (80 + 80) * 128, 80 * 128)
    for layer in layers:
        assert layer.macs == 80 * 12 * 128**2 + 2 * 80**2 * 128  # four projections, the perceptron; scores and mixing
        assert layer.params == 12 * 128**2 + (4 + 5 + 4) * 128  # weights; biases of both halves, normalisation
        assert (layer.backward_flops, layer.activation) == (2 * layer.forward_flops, 80 * 128)
    assert (head.macs, head.params, head.activation) == (128 * 80, 129 * 80 + 2 * 128, 80)
    assert (len(layers), table.params, table.activations[0]) == (6, 1_220_688, 80)


def test_backward_is_twice_forward_but_for_the_first_unit() -> None:
    table = profile(resnet18(), (3, 32, 32))
    assert table.rows[0].backward_flops == table.rows[0].forward_flops  # no gradient for the input
    assert all(row.backward_flops == 2 * row.forward_flops for row in table.rows[1:])
    total = sum(row.backward_flops for row in table.rows)
    assert sum(row.backward_flops for row in table.rows) == total


def test_a_model_counted_by_hand() -> None:
    table = profile(mlp(in_features=6, hidden=(5,), num_classes=3), torch.randn(7, 6), optimiser_slots=2)
    first, head = table.rows
    assert (first.macs, first.forward_flops, first.backward_flops) == (30, 60, 60)
    assert (head.macs, head.forward_flops, head.backward_flops) == (15, 30, 60)
    assert (first.params, head.params, first.activation, head.activation) == (35, 18, 5, 3)
    assert table.cumulative_optimiser_state == (0, 70, 106)
    assert table.activations[0] == 6


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
    assert table.activations[0] == 7


@pytest.mark.parametrize("sample", [(1, 8, 8), torch.zeros(5, 1, 8, 8)])
def test_a_shape_and_a_batch_give_the_same_profile(sample: Tensor | tuple[int, ...]) -> None:
    assert profile(cnn(), sample) == profile(cnn(), torch.ones(1, 1, 8, 8))


def test_profiling_leaves_the_model_alone() -> None:
    model = cnn(norm="batch").train()
    profile(model, (1, 8, 8))
    assert model.training
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_depthwise_convolutions_take_twice_their_forward_pass_backward() -> None:
    """The FLOP counter itself takes the weight gradient of a grouped convolution for that of a full one."""
    table = profile(build("mobilenet_v2"), (3, 32, 32))
    assert all(row.backward_flops == 2 * row.forward_flops for row in table.rows[1:])
