"""A character transformer; a unit is the embedding, a layer or the head."""

import torch
from torch import Tensor, nn

from cutlayer.errors import ConfigError
from cutlayer.models.parts import Init, UnitNetwork, Units, draws_he

SMALL = 0.02  # standard deviation of embeddings


class CharacterEmbedding(nn.Module):
    """A vector for each character plus one for its position."""

    def __init__(self, characters: int, context: int, width: int, init: Init) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.empty(context, width))
        if draws_he(init):
            nn.init.normal_(self.characters.weight, std=SMALL)
            nn.init.normal_(self.places, std=SMALL)
        else:
            nn.init.normal_(self.places)  # as torch draws an embedding

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.characters(x) + self.places[: x.shape[-1]]
        return embedded


class Attention(nn.Module):
    """Causal self-attention: a position attends to itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in self.inputs(x).chunk(3, dim=-1)
        )
        # Plain products instead of a fused kernel: vmap, the FLOP counter and second derivatives support them.
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        mixed: Tensor = self.outputs((weights @ value).transpose(-2, -3).flatten(-2))
        return mixed


class TransformerLayer(nn.Module):
    """Attention and a two-layer perceptron, each with normalisation in front and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        added: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return added


class LastPlace(nn.Module):
    """Selects the last position of the text."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., -1, :]


class CharTransformer(UnitNetwork):
    """A causal transformer that reads `context` characters and predicts the next; the characters are the classes.

    Input: characters (batch, context) as int64; output: scores of the next one (batch, num_classes). The layers are
    pre-norm with learned positions, and the perceptrons are four times as wide as the stream. The sizes are a choice,
    as papers that train six layers on Shakespeare give none: width 128 with 4 heads makes 1.2 million parameters.
    Embeddings are drawn from N(0, 0.02²) with init="he", and from N(0, 1), as torch draws them, with init="torch".
    """

    def __init__(
        self,
        num_classes: int = 80,
        context: int = 80,
        layers: int = 6,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        init: Init = "he",
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width {width} cannot be shared by {heads} heads; make it a multiple of heads")
        self.embedding = CharacterEmbedding(num_classes, context, width, init)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.last = LastPlace()
        self.fc = nn.Linear(width, num_classes)

    def units(self) -> Units:
        return (
            ("embedding", ("embedding",)),
            *((f"layer{i + 1}", (f"layers.{i}",)) for i in range(len(self.layers))),
            ("head", ("last", "norm", "fc")),
        )


char_transformer = CharTransformer
