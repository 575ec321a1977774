"""Models built from configurations are cut at every block and equal the whole; the table of them is in docs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from equal_parts import (
    assert_a_stack_is_a_loop,
    assert_evaluation_is_that_of_the_whole,
    assert_every_cut_is_the_whole,
)
from torch import Tensor, nn

from cutlayer.core import tree
from cutlayer.errors import CutError
from cutlayer.split import Split
from cutlayer.split.graphs import blocks_of

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 50, 7
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IMAGES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def texts(batch: int) -> dict[str, Tensor]:
    """Texts of different lengths, padded on the right."""
    drawn = torch.Generator().manual_seed(batch)
    real = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (batch, 1), generator=drawn)).long()
    tokens = torch.randint(3, VOCABULARY, (batch, LENGTH), generator=drawn)
    return {"input_ids": tokens * real, "attention_mask": real}


def values(*shape: int) -> Callable[[int], Tensor]:
    def batch(size: int) -> Tensor:
        return torch.randn(size, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(size))

    return batch


pictures = values(3, 32, 32)


class Architecture(NamedTuple):
    """A model, its inputs and the last of its blocks; how many tensors cross after the first; or why it is refused."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    block: str
    crossing: int = 1
    refused: str = ""


def model(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, name)(getattr(transformers, config)(**options)).double().train()

    return build


class Block(nn.Module):
    """A residual block with torchvision's names."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.downsample = shortcut if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class TorchvisionResNet(nn.Module):
    """torchvision's ResNet, made small: its names and its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 8, 2), Block(8, 8, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def torchvision_resnet() -> nn.Module:
    torch.manual_seed(0)
    return TorchvisionResNet().double()


LAYERDROP = "a branch depends on the values of tensors"
SPEC_AUGMENT = "its forward draws random numbers while it is traced"
ARCHITECTURES = {
    "BERT": Architecture(
        model("BertForSequenceClassification", "BertConfig", **BERT),
        texts,
        "bert.encoder.layer.2",
        2,
    ),
    "RoBERTa": Architecture(
        model("RobertaForSequenceClassification", "RobertaConfig", **BERT),
        texts,
        "roberta.encoder.layer.2",
        2,
    ),
    "DistilBERT": Architecture(
        model(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=3,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        ),
        texts,
        "distilbert.transformer.layer.2",
        2,
    ),
    "ALBERT": Architecture(
        model("AlbertForSequenceClassification", "AlbertConfig", **BERT, embedding_size=8, classifier_dropout_prob=0.0),
        texts,
        "albert.encoder.albert_layer_groups.0",
        refused="it runs 3 times",
    ),
    "DeBERTa": Architecture(
        model(
            "DebertaForSequenceClassification",
            "DebertaConfig",
            **BERT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        ),
        texts,
        "deberta.encoder.layer.1",
        refused="'deberta.encoder.rel_embeddings.weight' is used on both sides of a cut, since several layers share it",
    ),
    "DeBERTa-v3": Architecture(
        model(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **BERT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pooler_dropout=0.0,
        ),
        texts,
        "deberta.encoder.layer.2",
        4,
    ),
    "GPT-2": Architecture(
        model(
            "GPT2ForSequenceClassification",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=3,
            n_head=2,
            n_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        texts,
        "transformer.h.2",
        3,
    ),
    "LLaMA": Architecture(
        model("LlamaForCausalLM", "LlamaConfig", **DECODER),
        texts,
        "model.layers.2",
        2,
    ),
    "OPT": Architecture(
        model(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=32,
            word_embed_proj_dim=16,
            dropout=0.0,
            pad_token_id=0,
            use_cache=False,
        ),
        texts,
        "model.decoder.layers.2",
        refused=LAYERDROP,
    ),
    "Gemma 3": Architecture(
        model(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **DECODER,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        texts,
        "model.layers.2",
        3,
    ),
    "Qwen 3": Architecture(
        model("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8),
        texts,
        "model.layers.2",
        2,
    ),
    "Mistral": Architecture(
        model("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=4),
        texts,
        "model.layers.2",
        2,
    ),
    "T5 encoder": Architecture(
        model(
            "T5EncoderModel",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=3,
            num_heads=2,
            dropout_rate=0.0,
        ),
        texts,
        "encoder.block.2",
        3,
    ),
    "ViT": Architecture(
        model("ViTForImageClassification", "ViTConfig", **IMAGES),
        pictures,
        "vit.layers.2",
    ),
    "DeiT": Architecture(
        model("DeiTForImageClassification", "DeiTConfig", **IMAGES),
        pictures,
        "deit.layers.2",
    ),
    "Swin": Architecture(
        model(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            drop_path_rate=0.0,
        ),
        pictures,
        "swin.encoder.layers.1.blocks.1",
    ),
    "ConvNeXt": Architecture(
        model("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
        pictures,
        "convnext.encoder.stages.1.layers.1",
    ),
    "ResNet": Architecture(
        model(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[2, 2],
            layer_type="basic",
        ),
        pictures,
        "resnet.encoder.stages.1.layers.1",
    ),
    "Whisper encoder": Architecture(
        lambda: model(
            "WhisperModel",
            "WhisperConfig",
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=2,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_mel_bins=8,
            dropout=0.0,
            max_source_positions=10,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )().get_submodule("encoder"),
        values(8, 20),
        "layers.1",
        refused=LAYERDROP,
    ),
    "Wav2Vec2": Architecture(
        model(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            conv_dim=(8, 8),
            conv_stride=(4, 4),
            conv_kernel=(8, 8),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            vocab_size=30,
        ),
        values(400),
        "wav2vec2.encoder.layers.1",
        refused=SPEC_AUGMENT,
    ),
    "CLIP vision tower": Architecture(
        model("CLIPVisionModel", "CLIPVisionConfig", **IMAGES),
        pictures,
        "encoder.layers.2",
    ),
    "torchvision's ResNet": Architecture(
        torchvision_resnet,
        pictures,
        "layer2.1",
    ),
}
CUT = [name for name, each in ARCHITECTURES.items() if not each.refused]
FAST = ("BERT", "GPT-2", "T5 encoder", "ViT", "torchvision's ResNet")


@pytest.fixture(scope="module", params=[n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CUT])
def cut_model(request: pytest.FixtureRequest) -> tuple[Architecture, Split]:
    architecture = ARCHITECTURES[request.param]
    return architecture, Split(architecture.build(), 0, sample=architecture.inputs(2))


def blocks(architecture: Architecture, split: Split) -> list[Split]:
    """The model cut after each of its blocks."""
    paths = [path for path in sorted(blocks_of(split.model)) if path.count(".") == architecture.block.count(".")]
    assert architecture.block in paths and len(paths) > 2
    return [split.with_cut(path) for path in paths]


def test_every_cut_is_the_whole_model_for_any_batch_size(cut_model: tuple[Architecture, Split]) -> None:
    architecture, split = cut_model
    for size in (2, 5) if split.normalises else (1, 2, 5):
        assert_every_cut_is_the_whole(split, architecture.inputs(size))


def test_every_block_is_a_cut_that_few_tensors_cross(cut_model: tuple[Architecture, Split]) -> None:
    architecture, split = cut_model
    first, *others = blocks(architecture, split)
    assert len({first.cut, *(other.cut for other in others)}) == 1 + len(others)
    assert all(other.units == split.units for other in others)  # without asking for more units
    z, _ = first.lower(first.initial()[0], architecture.inputs(3))
    assert len(tree.tensors(z)) == architecture.crossing


def test_evaluation_is_that_of_the_whole_model(cut_model: tuple[Architecture, Split]) -> None:
    architecture, split = cut_model
    for size in (1, 3):
        for cut in (split, *blocks(architecture, split)):
            assert_evaluation_is_that_of_the_whole(cut, architecture.inputs(size))


def test_clients_stacked_by_vmap_are_clients_one_by_one(cut_model: tuple[Architecture, Split]) -> None:
    architecture, split = cut_model
    for other in blocks(architecture, split):
        assert_a_stack_is_a_loop(other, architecture.inputs(3))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in CUT])
def test_the_others_are_refused_with_the_reason(name: str) -> None:
    architecture = ARCHITECTURES[name]
    with pytest.raises(CutError, match=re.escape(architecture.refused)):
        Split(architecture.build(), architecture.block, sample=architecture.inputs(2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drawing"), [("OPT", "model.decoder"), ("Whisper encoder", "")])
def test_models_that_skip_layers_are_cut_with_that_switched_off(name: str, drawing: str) -> None:
    architecture = ARCHITECTURES[name]
    net = architecture.build()
    net.get_submodule(drawing).training = False
    split = Split(net, architecture.block, sample=architecture.inputs(2), untie=True)
    assert_every_cut_is_the_whole(split, architecture.inputs(3))


def test_at_least_sixteen_of_twenty_are_cut() -> None:
    assert len(ARCHITECTURES) >= 20 and len(CUT) >= 16
    assert {"BERT", "GPT-2", "LLaMA", "T5 encoder", "ViT", "Swin"} <= set(CUT)


def test_the_table_in_the_documentation_lists_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models-and-data.md").read_text(encoding="utf-8")
    for name, architecture in ARCHITECTURES.items():
        kind = type(architecture.build()).__name__
        fact = "no: " + architecture.refused if architecture.refused else str(architecture.crossing)
        assert f"| {name} | `{kind}` | `{architecture.block}` | {fact} |" in page
