"""Tiny models of transformers and others that torch.fx or torch.export cut, and texts and pictures for them."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from test_architectures import BERT, TorchvisionResNet, model, texts
from torch import Tensor, nn

from cutlayer.data.arrays import Arrays
from cutlayer.split import Split

SIZES = (8, 5, 4)  # in batches of 3: 2, 1 and 1 steps
BATCH = 3
CLASSES = 2
TWO_LAYERS = {**BERT, "num_hidden_layers": 2, "num_labels": CLASSES}


class Averaged(nn.Module):
    """An encoder of texts, and a classifier of the mean of its states."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.classifier(hidden.mean(1))


class Padded(nn.Module):
    """Torch's own encoder, which makes its mask of padding one of minus infinities that is added."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.words, self.classifier = nn.Embedding(50, 16), nn.Linear(16, CLASSES)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.classifier(hidden.mean(1))


class UNet(nn.Module):
    """A small U-Net: what each stage on the way down gives is needed again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.rise1, self.up1 = nn.ConvTranspose2d(6, 6, 2, stride=2), nn.Conv2d(12, 4, 3, padding=1)
        self.rise2, self.up2 = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(first))
        low = torch.relu(self.bottom(second))
        middle = torch.relu(self.up1(torch.cat([self.rise1(low), second], 1)))
        high = torch.relu(self.up2(torch.cat([self.rise2(middle), first], 1)))
        return self.out(high).mean((2, 3))


def encoder_of_t5() -> nn.Module:
    options = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    encoder = model("T5EncoderModel", "T5Config", **options, dropout_rate=0.1)()
    return Averaged(encoder).double()


def pictures(num: int) -> Tensor:
    return torch.randn(num, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(num))


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return build


class Foreign(NamedTuple):
    """A model, its inputs, two modules to cut after, and whether all that crosses has a row for each sample."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    cuts: tuple[str, str]
    has_rows: bool = True


FOREIGN = {
    "BERT": Foreign(
        model(
            "BertForSequenceClassification",
            "BertConfig",
            **{**TWO_LAYERS, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        ),
        texts,
        ("bert.encoder.layer.0", "bert.encoder.layer.1"),
    ),
    "T5": Foreign(
        seeded(encoder_of_t5),
        texts,
        ("encoder.encoder.block.0", "encoder.encoder.block.1"),
        has_rows=False,
    ),
    "ViT": Foreign(
        model(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        ),
        pictures,
        ("vit.layers.0", "vit.layers.1"),
    ),
    "GPT-2": Foreign(
        model(
            "GPT2ForSequenceClassification",
            "GPT2Config",
            vocab_size=50,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        ),
        texts,
        ("transformer.h.0", "transformer.h.1"),
    ),
    "DeBERTa-v3": Foreign(
        model(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **{**TWO_LAYERS, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
        ),
        texts,
        ("deberta.encoder.layer.0", "deberta.encoder.layer.1"),
        has_rows=False,
    ),
    "Swin": Foreign(
        model(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[1, 2],
            num_heads=[2, 2],
            window_size=4,
            drop_path_rate=0.5,
        ),
        pictures,
        ("swin.encoder.layers.1.blocks.0", "swin.encoder.layers.1.blocks.1"),
    ),
    "TransformerEncoder": Foreign(seeded(Padded), texts, ("encoder.layers.0", "encoder.layers.1")),
    "ResNet": Foreign(seeded(TorchvisionResNet), pictures, ("layer1", "layer2")),
    "U-Net": Foreign(seeded(UNet), pictures, ("down2", "rise1")),
}


@cache
def split_of(name: str) -> Split:
    each = FOREIGN[name]
    with torch.random.fork_rng():
        return Split(each.build(), each.cuts[0], sample=each.inputs(2))


def samples_of(name: str) -> Arrays:
    num = sum(SIZES)
    y = torch.randint(0, CLASSES, (num,), generator=torch.Generator().manual_seed(1))
    return Arrays(x=FOREIGN[name].inputs(num), y=y, num_classes=CLASSES)
