"""The zoo against what is known of its models: sizes, names, cuts, and files of weights that fit them."""

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from cutlayer.core.state import Model
from cutlayer.errors import ConfigError, DataError, UnknownNameError
from cutlayer.models import (
    MODELS,
    build,
    char_transformer,
    default_init,
    densenet121,
    load_weights,
    mobilenet_v2,
    resnet18,
    resnet50,
    resnet_tiny,
    vgg16,
)
from cutlayer.models.densenet import DenseNet
from cutlayer.planning.profile import profile
from cutlayer.split import Split

LARGE: dict[str, Any] = {"num_classes": 1000, "stem": "imagenet"}
LARGE_VGG: dict[str, Any] = {"num_classes": 1000, "image_size": 224, "classifier": (4096, 4096)}

# Model, options, parameters, entries of the state dict, multiply-adds in millions for an image of 224x224
IMAGENET = [
    ("resnet18", LARGE, 11_689_512, 122, 1814),
    ("resnet34", LARGE, 21_797_672, 218, 3664),
    ("resnet50", LARGE, 25_557_032, 320, 4089),
    ("vgg11", LARGE_VGG, 132_863_336, 22, 7609),
    ("vgg11", {**LARGE_VGG, "norm": "batch"}, 132_868_840, 62, 7609),
    ("vgg16", LARGE_VGG, 138_357_544, 32, 15470),
    ("vgg16", {**LARGE_VGG, "norm": "batch"}, 138_365_992, 97, 15470),
    ("mobilenet_v2", LARGE, 3_504_872, 314, 301),
    ("densenet121", LARGE, 7_978_856, 727, 2834),
    ("densenet169", LARGE, 14_149_480, 1015, 3360),
]

NAMES = {
    "resnet50": {
        "layer1.0.downsample.1.running_var": (256,),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer4.2.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
    },
    "vgg16": {
        "features.0.bias": (64,),
        "features.28.weight": (512, 512, 3, 3),
        "classifier.0.weight": (4096, 25088),
        "classifier.6.weight": (1000, 4096),
    },
    "vgg16 batch": {
        "features.1.running_mean": (64,),
        "features.40.bias": (512,),
        "features.41.weight": (512,),
        "classifier.3.bias": (4096,),
    },
    "mobilenet_v2": {
        "features.0.1.running_mean": (32,),
        "features.1.conv.0.0.weight": (32, 1, 3, 3),
        "features.2.conv.1.0.weight": (96, 1, 3, 3),
        "features.17.conv.3.weight": (320,),
        "features.18.0.weight": (1280, 320, 1, 1),
        "classifier.1.weight": (1000, 1280),
    },
    "densenet121": {
        "features.conv0.weight": (64, 3, 7, 7),
        "features.denseblock1.denselayer1.norm1.running_var": (64,),
        "features.denseblock4.denselayer16.conv2.weight": (32, 128, 3, 3),
        "features.transition3.conv.weight": (512, 1024, 1, 1),
        "features.norm5.weight": (1024,),
        "classifier.bias": (1000,),
    },
}

# Every architecture at a size that a test can afford, the shape of its input, and the cut that experiments use
TINY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "resnet18": (lambda: resnet18(width=2, strides=(2, 2, 2, 2), head=(6, 5)), (3, 16, 16), "layer1.1"),
    "resnet34": (lambda: build("resnet34", width=2), (3, 8, 8), "layer1.2"),
    "resnet50": (lambda: resnet50(width=1, stem="7x7", head=(6, 5)), (3, 16, 16), "layer2.3"),
    "resnet50 group": (lambda: resnet50(width=1, norm="group", head=(6,)), (3, 8, 8), "layer1.2"),
    "vgg11": (lambda: build("vgg11", width=2, image_size=64, classifier=(6, 5)), (3, 64, 64), "conv2_1"),
    "vgg16": (lambda: vgg16(width=2, norm="batch", classifier=(6, 5)), (3, 32, 32), "conv2_2"),
    "vgg16 group": (lambda: vgg16(width=2, norm="group", classifier=()), (3, 32, 32), "conv2_2"),
    "mobilenet_v2": (lambda: mobilenet_v2(width=0.1), (3, 16, 16), "block4"),
    "mobilenet_v2 group": (lambda: mobilenet_v2(width=0.1, stem="imagenet", norm="group"), (3, 32, 32), "block4"),
    "densenet121": (lambda: densenet121(growth=2), (3, 8, 8), "transition1"),
    "densenet group": (lambda: DenseNet((2, 3), growth=3, norm="group", stem="imagenet"), (3, 16, 16), "transition1"),
    "char_transformer": (lambda: char_transformer(11, 12, heads=2, width=8), (12,), "layer2"),
}


def make(name: str, batch: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    model, shape = TINY[name][0](), TINY[name][1]
    if name == "char_transformer":
        return model, torch.randint(0, 11, (batch, *shape))
    return model, torch.randn(batch, *shape)


def units(model: nn.Module) -> tuple[str, ...]:
    return Split(model, 0).units


# -- initial weights -----------------------------------------------------------------------------------

INITIALISED = ("char_transformer", "densenet121", "densenet169", "mobilenet_v2", "resnet18", "resnet34", "resnet50",
               "resnet_tiny", "vgg11", "vgg16")  # fmt: skip
SMALL_OPTIONS: dict[str, dict[str, Any]] = {
    "char_transformer": {"num_classes": 60, "width": 64},
    "densenet121": {"growth": 8},
    "densenet169": {"growth": 8},
    "mobilenet_v2": {"width": 0.5},
}


def seeded(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    return build(name, **{**SMALL_OPTIONS.get(name, {"width": 16}), **options})


def test_which_models_choose_their_initial_weights() -> None:
    assert tuple(name for name in MODELS if default_init(name)) == INITIALISED


@pytest.mark.parametrize("name", INITIALISED)
def test_he_is_the_default(name: str) -> None:
    given, default = (seeded(name, **options).state_dict() for options in ({"init": "he"}, {}))
    assert all(torch.equal(given[key], default[key]) for key in default)


@pytest.mark.parametrize("name", [name for name in INITIALISED if name != "char_transformer"])
def test_initial_weights_of_convolutions(name: str) -> None:
    """He: N(0, 2 / fan), fan in for DenseNet, else out, biases 0. torch: U(-b, b) for both, b = 1 / sqrt(fan in)."""
    for init in ("he", "torch"):
        modules = seeded(name, init=init).modules()
        layers = [m for m in modules if isinstance(m, nn.Conv2d) and m.weight.numel() >= 2000]
        assert layers
        for conv in layers:
            kernel = conv.weight[0, 0].numel()
            bound = (conv.weight.shape[1] * kernel) ** -0.5
            fan = kernel * (conv.weight.shape[1] if name.startswith("densenet") else conv.out_channels)
            expected = (2 / fan) ** 0.5 if init == "he" else bound / 3**0.5
            assert float(conv.weight.detach().std()) == pytest.approx(expected, rel=0.1)
            if init == "torch":
                assert float(conv.weight.detach().abs().max()) <= bound
            if conv.bias is not None:
                assert bool((conv.bias == 0).all()) == (init == "he")


def test_torchs_own_weights_are_the_bits_that_torch_draws() -> None:
    net = seeded("resnet18", init="torch")
    torch.manual_seed(5)
    assert torch.equal(net.get_parameter("conv1.weight"), nn.Conv2d(3, 16, 3, padding=1, bias=False).weight)
    embedding = seeded("char_transformer", init="torch").get_parameter("embedding.characters.weight")
    torch.manual_seed(5)
    assert torch.equal(embedding, nn.Embedding(60, 64).weight)


def test_initial_embeddings_of_the_transformer() -> None:
    for init, deviation in (("he", 0.02), ("torch", 1.0)):
        net = seeded("char_transformer", init=init)
        for path in ("embedding.characters.weight", "embedding.places"):
            assert float(net.get_parameter(path).detach().std()) == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("name", ["causal_lm", "cnn", "mlp"])
def test_models_that_draw_nothing_of_their_own_refuse_init(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(name, init="torch")
    able = ", ".join(INITIALISED)
    assert str(error.value) == (
        f"the model {name!r} has no init; leave it out. Models that choose their weights: {able}"
    )


def test_unknown_initial_weights_are_refused() -> None:
    for name in INITIALISED:
        with pytest.raises(UnknownNameError, match=r"^unknown init 'xavier'; known: he, torch\.$"):
            seeded(name, init="xavier")


# -- sizes and names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options", "params", "entries", "macs"), IMAGENET)
def test_sizes_of_the_imagenet_models(name: str, options: dict[str, Any], params: int, entries: int, macs: int) -> None:
    with torch.device("meta"):
        model = build(name, **options)
    costs = profile(model, (3, 224, 224))
    assert (costs.params, len(model.state_dict()), round(costs.macs / 1e6)) == (params, entries, macs)


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_have_torchvisions_names(name: str) -> None:
    architecture, *norm = name.split()
    options = LARGE_VGG if architecture == "vgg16" else LARGE
    with torch.device("meta"):
        entries = build(architecture, **options, **({"norm": norm[0]} if norm else {})).state_dict()
    assert {entry: tuple(entries[entry].shape) for entry in NAMES[name]} == NAMES[name]


def test_units_by_name() -> None:
    with torch.device("meta"):
        assert units(build("resnet34"))[:5] == ("stem", "layer1.0", "layer1.1", "layer1.2", "layer2.0")
        assert units(resnet50())[-2:] == ("layer4.2", "head")
        convolutions = [f"conv{i}_{j}" for i, count in enumerate((2, 2, 3, 3, 3), 1) for j in range(1, count + 1)]
        assert units(vgg16()) == (*convolutions, "fc1", "fc2", "head")
        assert units(build("vgg11"))[:3] == ("conv1_1", "conv2_1", "conv3_1")
        assert units(mobilenet_v2()) == ("stem", *(f"block{i}" for i in range(1, 18)), "head")
        layers = [f"denseblock1.denselayer{i}" for i in range(1, 7)]
        assert units(densenet121())[:9] == ("stem", *layers, "transition1", "denseblock2.denselayer1")
        assert units(densenet121())[-2:] == ("denseblock4.denselayer16", "head")
        assert units(char_transformer()) == ("embedding", *(f"layer{i}" for i in range(1, 7)), "head")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("causal_lm", "char_transformer", "mlp")])
def test_group_normalisation_replaces_every_batch_normalisation(name: str) -> None:
    with torch.device("meta"):
        model = build(name, norm="group", **({"head": (8,)} if name == "resnet18" else {}))
    kinds = [type(module).__name__ for module in model.modules()]
    assert "GroupNorm" in kinds
    assert not [kind for kind in kinds if kind.startswith("BatchNorm")]
    assert not list(model.buffers())


# -- options -------------------------------------------------------------------------------------------


def test_bottleneck_blocks_stride_in_the_middle() -> None:
    block = resnet50(width=2).get_submodule("layer2.0")
    assert [block.get_submodule(f"conv{i}").stride for i in (1, 2, 3)] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(("stem", "size"), [("3x3", 32), ("7x7", 16), ("imagenet", 8)])
def test_stems_shrink_the_image(stem: str, size: int) -> None:
    for name in ("resnet18", "densenet121"):
        with torch.device("meta"):
            split = Split(build(name, stem=stem), "stem")
            z, _ = split.lower(split.initial()[0], torch.empty(2, 3, 32, 32))
        assert z.shape == (2, 64, size, size)


def test_strides_and_hidden_layers_of_a_residual_network() -> None:
    model = resnet18(num_classes=7, width=4, strides=(2, 2, 2, 2), head=(6, 5))
    head = [f"{type(m).__name__}{tuple(m.weight.shape)}" for m in model.fc if len(list(m.parameters()))]
    assert head == ["Linear(6, 32)", "BatchNorm1d(6,)", "Linear(5, 6)", "BatchNorm1d(5,)", "Linear(7, 5)"]
    assert [name for name, _ in model.fc.named_parameters() if name.endswith("bias")] == ["1.bias", "4.bias", "6.bias"]
    assert profile(model, (3, 32, 32)).activations[2] == 4 * 16**2
    with pytest.raises(ConfigError) as error:
        resnet18(strides=(1, 2))
    assert str(error.value) == "strides has 2 numbers; give one for each of the 4 stages"


def test_vgg_pools_to_what_the_image_leaves() -> None:
    def inputs(image_size: int) -> int:
        with torch.device("meta"):
            return vgg16(image_size=image_size).classifier[0].in_features  # type: ignore[union-attr]

    assert [inputs(size) for size in (32, 63, 64, 224, 256)] == [512, 512, 512 * 4, 512 * 49, 512 * 49]
    with pytest.raises(ConfigError) as error:
        vgg16(image_size=28)
    assert str(error.value) == (
        "image_size is 28, but VGG halves an image 5 times; pad or resize the images to 32 or more"
    )


def test_dropout_draws_only_where_asked_for() -> None:
    small: dict[str, dict[str, Any]] = {
        "vgg16": {"width": 1},
        "mobilenet_v2": {"width": 0.1},
        "char_transformer": {"width": 4},
    }
    for name, options in small.items():
        assert not Split(build(name, **options), 0).needs_key
        drops = Split(build(name, **options, dropout=0.5), 0)
        assert drops.needs_key and drops.random is None


def test_mobilenet_rounds_channels_to_multiples_of_eight() -> None:
    def stem(width: float) -> int:
        with torch.device("meta"):
            return mobilenet_v2(width=width).features[0][0].out_channels  # type: ignore[index, union-attr]

    assert [stem(width) for width in (0.1, 0.35, 0.5, 0.6, 1.0, 1.4)] == [8, 16, 16, 24, 32, 48]


def test_options_of_the_zoo_are_checked() -> None:
    with pytest.raises(UnknownNameError) as error:
        build("densenet121", stem="5x5")
    assert str(error.value) == "unknown stem '5x5'; known: 3x3, 7x7, imagenet."
    with pytest.raises(UnknownNameError) as error:
        build("mobilenet_v2", stem="7x7")
    assert str(error.value) == "unknown stem '7x7'; known: 3x3, imagenet."
    with pytest.raises(UnknownNameError) as error:
        build("vgg16", norm="layer")
    assert str(error.value) == "unknown norm 'layer'; known: batch, group, none."
    with pytest.raises(ConfigError) as error:
        build("char_transformer", width=130)
    assert str(error.value) == "width 130 cannot be shared by 4 heads; make it a multiple of heads"


# -- cuts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_every_cut_is_the_whole_model_bit_for_bit(name: str) -> None:
    model, x = make(name)
    trained = copy.deepcopy(model)
    expected = trained(x)
    split = Split(model, 0)
    for cut in range(split.num_units + 1):
        placed = split.with_cut(cut)
        client, server = placed.initial()
        z, below = placed.lower(client, x)
        out, above = placed.upper(server, z)
        assert torch.equal(out, expected)
        buffers = {**below, **above}
        assert buffers.keys() == dict(trained.named_buffers()).keys()
        assert all(torch.equal(buffers[n], b) for n, b in trained.named_buffers())


@pytest.mark.parametrize("name", TINY)
def test_gradients_through_the_cut_are_those_of_the_whole_model(name: str) -> None:
    model, x = make(name)
    y = torch.tensor([0, 1, 2])
    split = Split(model, TINY[name][2])
    client, server = split.initial()
    for parameter in (*client.params.values(), *server.params.values()):
        parameter.requires_grad_()
    z, _ = split.lower(client, x)
    received = z.detach().requires_grad_()
    F.cross_entropy(split.upper(server, received)[0], y).backward()
    z.backward(received.grad)
    F.cross_entropy(model(x), y).backward()
    found = {**client.params, **server.params}
    assert found.keys() == dict(model.named_parameters()).keys()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(found[parameter_name].grad, parameter.grad), parameter_name


@pytest.mark.parametrize("name", TINY)
def test_stacked_models_are_a_loop_over_models(name: str) -> None:
    models = [TINY[name][0]().double() for _ in range(2)]
    x = torch.stack([make(name)[1], make(name)[1].flip(0)])
    x = x if name == "char_transformer" else x.double()
    split = Split(models[0], TINY[name][2])
    params, buffers = stack_module_state(models)

    def run(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return split.whole(Model(params, {}, buffers), x)[0]

    out = vmap(run)(params, buffers, x)
    out.square().sum().backward()
    for i, model in enumerate(models):
        alone = model(x[i])
        torch.testing.assert_close(out[i], alone, rtol=1e-10, atol=1e-12)
        alone.square().sum().backward()
        for parameter_name, parameter in model.named_parameters():
            # normalisation divides by small deviations, which enlarges rounding errors in the gradient
            torch.testing.assert_close(params[parameter_name].grad[i], parameter.grad, rtol=1e-7, atol=1e-7)


# -- the transformer -----------------------------------------------------------------------------------


def test_the_transformer_does_not_look_ahead() -> None:
    model, x = make("char_transformer", batch=1)
    changed = x.clone()
    changed[0, 7] = (x[0, 7] + 1) % 11
    split = Split(model, 0)
    for cut in range(1, 8):
        placed = split.with_cut(cut)
        client, _ = placed.initial()
        before, after = (placed.lower(client, text)[0][0] for text in (x, changed))
        assert torch.equal(before[:7], after[:7])
        changed_places = (before != after).any(-1).nonzero().flatten().tolist()
        assert changed_places == ([7] if cut == 1 else [7, 8, 9, 10, 11])


def test_a_layer_is_pytorchs_pre_norm_encoder_layer() -> None:
    torch.manual_seed(2)
    ours = char_transformer(width=12, heads=3, layers=1).double().layers[0]
    theirs = nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", batch_first=True, norm_first=True).double()
    renamed = {
        "attention.inputs.": "self_attn.in_proj_",
        "attention.outputs.": "self_attn.out_proj.",
        "mlp.0.": "linear1.",
        "mlp.2.": "linear2.",
    }
    pattern = re.compile("|".join(map(re.escape, renamed)))
    theirs.load_state_dict({pattern.sub(lambda m: renamed[m[0]], k): v for k, v in ours.state_dict().items()})
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask, is_causal=True), rtol=1e-12, atol=1e-12)


def test_the_transformer_reads_shorter_texts_but_not_longer_ones() -> None:
    model, x = make("char_transformer")
    assert model(x[:, :5]).shape == (3, 11)
    with pytest.raises(RuntimeError, match="must match"):
        model(torch.cat([x, x], dim=1))


# -- files of weights ----------------------------------------------------------------------------------


def saved(entries: dict[str, Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(entries, path)
    else:
        torch.save(entries, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_weights_come_back_from_a_file(suffix: str, tmp_path: Path) -> None:
    original, model = resnet_tiny(), resnet_tiny()
    original(torch.randn(4, 1, 8, 8))  # moves the running statistics
    load_weights(model, saved(original.state_dict(), tmp_path / f"weights{suffix}"))
    expected = original.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("in_file", [True, False])
def test_fresh_sub_modules_keep_their_values(in_file: bool, tmp_path: Path) -> None:
    original, model = resnet_tiny(num_classes=100), resnet_tiny(num_classes=3)
    head = model.fc.weight.clone()
    entries = {name: value for name, value in original.state_dict().items() if in_file or not name.startswith("fc.")}
    load_weights(model, saved(entries, tmp_path / "weights.pt"), fresh=("fc",))
    assert torch.equal(model.fc.weight, head)
    assert torch.equal(model.get_parameter("layer3.0.conv1.weight"), original.get_parameter("layer3.0.conv1.weight"))


def test_old_files_may_lack_the_count_of_batches(tmp_path: Path) -> None:
    original, model = resnet_tiny(), resnet_tiny()
    entries = {name: value for name, value in original.state_dict().items() if "num_batches" not in name}
    load_weights(model, saved(entries, tmp_path / "weights.pt"))
    assert torch.equal(model.conv1.weight, original.conv1.weight)


ADVICE = "build the model with the options that the file was made with"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: e.pop("layer1.0.conv1.weight"),
            f"{{path}} has no 'layer1.0.conv1.weight', which ResNet needs; {ADVICE}, or name the sub-module in fresh",
        ),
        (
            lambda e: e.update({"layer4.0.conv1.weight": torch.ones(1)}),
            f"{{path}} has 'layer4.0.conv1.weight', which ResNet does not have; {ADVICE}",
        ),
        (
            lambda e: e.update({"fc.weight": torch.ones(1000, 16)}),
            f"'fc.weight' is (1000, 16) in {{path}} but (10, 16) in ResNet; {ADVICE}, or name the sub-module in fresh",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Tensor]], Any], message: str, suffix: str, tmp_path: Path
) -> None:
    entries, model = resnet_tiny().state_dict(), resnet_tiny()
    before = copy.deepcopy(model.state_dict())
    change(entries)
    path = saved(entries, tmp_path / f"weights{suffix}")
    with pytest.raises(DataError) as error:
        load_weights(model, path)
    assert str(error.value) == message.format(path=path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_old_names_of_densenet_are_told_of(tmp_path: Path) -> None:
    model = DenseNet((1, 1), growth=2)
    old = {re.sub(r"(norm|conv)([12])\.(?=\w+$)", r"\1.\2.", k): v for k, v in model.state_dict().items()}
    path = saved(old, tmp_path / "densenet.pth")
    with pytest.raises(DataError) as error:
        load_weights(model, path)
    assert str(error.value) == (
        f"{path} has no 'features.denseblock1.denselayer1.norm1.weight' "
        "(but 'features.denseblock1.denselayer1.norm.1.weight': rename it), "
        f"which DenseNet needs; {ADVICE}, or name the sub-module in fresh"
    )


def test_files_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(DataError) as error:
            load_weights(resnet_tiny(), path)
        return str(error.value)

    damaged, other, nested = tmp_path / "damaged.safetensors", tmp_path / "weights.npz", tmp_path / "run.pt"
    damaged.write_bytes(b"12345678901234567890")
    torch.save({"state_dict": resnet_tiny().state_dict(), "epoch": 3}, nested)
    assert refusal(other) == f"{other} is no file of weights; give a .safetensors, .pth or .pt file"
    assert refusal(tmp_path / "x.pth") == f"there is no file of weights {tmp_path / 'x.pth'}; check the path"
    assert refusal(nested) == f"{nested} does not hold tensors by name; save model.state_dict() alone"
    assert refusal(damaged).startswith(f"{damaged} cannot be read: ")
    assert refusal(damaged).endswith("; fetch or save it again")


def test_only_sub_modules_can_be_fresh(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as error:
        load_weights(resnet_tiny(), tmp_path / "weights.pt", fresh=("fcs",))
    assert str(error.value) == "unknown sub-module 'fcs' in fresh; did you mean 'fc'?"


def test_the_published_mobilenet_can_be_cut_anywhere() -> None:
    path = Path(os.environ.get("CUTLAYER_DATA", "")) / "mobilenet_v2.safetensors"
    if not path.is_file():
        pytest.skip("needs mobilenet_v2.safetensors in CUTLAYER_DATA")
    model = mobilenet_v2(num_classes=1000, stem="imagenet")
    load_weights(model, path)
    model.eval()
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    split = Split(model, 0)
    with torch.no_grad():
        expected = model(x)
        for cut in range(split.num_units + 1):
            placed = split.with_cut(cut)
            client, server = placed.initial()
            assert torch.equal(placed.upper(server, placed.lower(client, x)[0])[0], expected)
