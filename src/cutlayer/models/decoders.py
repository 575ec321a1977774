"""The layers of a Hugging Face decoder as units that pass on one tensor.

Units pass on (batch, positions, width) and nothing else. Texts are padded on the left, and padding is a row of exact
zeros, from which every unit derives the real positions, their numbers and the attention mask. So only this tensor
crosses a cut, no cache is kept, and the control flow does not depend on the data.
"""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutlayer.data.language import PADDING
from cutlayer.errors import ConfigError
from cutlayer.models.parts import UnitNetwork, Units


class Anatomy(NamedTuple):
    """The parts of a decoder."""

    tokens: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module
    lm_head: nn.Module
    project_in: nn.Module = nn.Identity()  # between the tokens and the first layer
    places: nn.Module | None = None  # learned positions, added before the first layer
    rotary: nn.Module | None = None  # rotary position embedding of every layer
    project_out: nn.Module = nn.Identity()  # between the norm and the head


def _llama(base: Any) -> Anatomy:
    body = base.model
    return Anatomy(body.embed_tokens, body.layers, body.norm, base.lm_head, rotary=body.rotary_emb)


def _opt(base: Any) -> Anatomy:
    body = base.model.decoder
    return Anatomy(
        body.embed_tokens,
        body.layers,
        body.final_layer_norm or nn.Identity(),
        base.lm_head,
        project_in=body.project_in or nn.Identity(),
        places=body.embed_positions,
        project_out=body.project_out or nn.Identity(),
    )


FAMILIES = {**dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma3_text"), _llama), "opt": _opt}


def anatomy_of(base: Any) -> Anatomy:
    """Return the parts of a decoder; one of an unknown family is taken to be built like LLaMA."""
    try:
        return FAMILIES.get(base.config.model_type, _llama)(base)
    except AttributeError:
        raise _unknown(base, "has no list of layers that is known here") from None


def check_alike(base: Any) -> None:
    """Refuse a decoder of an unknown family that computes more than its layers do."""
    if base.config.model_type in FAMILIES or base.device.type == "meta":
        return
    x = torch.arange(12).reshape(2, 6) % base.config.vocab_size
    x[0, :2] = PADDING
    real = x != PADDING
    with torch.no_grad():
        theirs = base(input_ids=x.clamp(min=0), attention_mask=real.long(), use_cache=False).logits.float()
        try:
            ours = CausalLM(base)(x).transpose(-1, -2)
        except (TypeError, RuntimeError, AttributeError):
            ours = torch.full_like(theirs, torch.nan)
    if not torch.allclose(ours[real], theirs[real], atol=1e-2 * float(theirs[real].std())):
        raise _unknown(base, "has layers as they are known here, but computes more than they do")


def _unknown(base: Any, what: str) -> ConfigError:
    return ConfigError(
        f"{type(base).__name__} {what} (its model_type is {base.config.model_type!r}); "
        f"use a model of one of the families {', '.join(FAMILIES)}."
    )


class TokenEmbedding(nn.Module):
    """Embeds tokens (batch, positions); padding becomes zeros."""

    def __init__(self, parts: Anatomy, room: int) -> None:
        super().__init__()
        self.tokens, self.project_in, self.places = parts.tokens, parts.project_in, parts.places
        self.room = None if parts.places is None else room  # learned positions are limited

    def forward(self, x: Tensor) -> Tensor:
        if self.room is not None and x.shape[-1] > self.room:
            raise ConfigError(
                f"texts of {x.shape[-1]} tokens do not fit the model's {self.room} places; set max_length"
            )
        real = x != PADDING
        h: Tensor = self.project_in(self.tokens(x.clamp(min=0)))
        if self.places is not None:
            h = h + self.places(real.long())
        return h * real.unsqueeze(-1)


class DecoderLayer(nn.Module):
    """One layer, which derives positions and attention mask from its input."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None, kind: str | None, window: int | None) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary
        self.kind = kind  # of the layer, if the rotary embedding depends on it
        self.window = window  # positions that a position attends to, itself included; all before it by default

    def forward(self, h: Tensor) -> Tensor:
        real = (h != 0).any(-1)
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        inputs: dict[str, Any] = {"attention_mask": attention_mask(real, h.dtype, self.window)}
        if self.rotary is not None:
            kind = () if self.kind is None else (self.kind,)
            inputs["position_embeddings"] = self.rotary(h, positions, *kind)
        out = self.block(h, position_ids=positions, **inputs)
        rows: Tensor = out[0] if isinstance(out, tuple) else out
        return rows * real.unsqueeze(-1)


def attention_mask(real: Tensor, dtype: torch.dtype, window: int | None) -> Tensor:
    """Return what is added to the scores (batch, 1, positions, positions): 0 for allowed pairs, else the minimum.

    A position attends to the real ones up to itself; padding attends to itself, as a softmax over nothing is NaN.
    """
    at = torch.arange(real.shape[-1], device=real.device)
    behind = at.unsqueeze(-1) - at
    near = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    seen = (near & real.unsqueeze(-2)) | (behind == 0)
    least = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=real.device)
    return torch.where(seen, torch.zeros_like(least), least).unsqueeze(-3)


class Head(nn.Module):
    """Scores of tokens in float32: of the answers at the last position, or of the whole vocabulary at every position.

    The shape is (batch, answers) or (batch, vocabulary, positions): the second axis is always that of the classes.
    """

    answers: Tensor | None

    def __init__(self, parts: Anatomy, answers: tuple[int, ...], softcap: float | None) -> None:
        super().__init__()
        self.norm, self.project_out, self.lm_head = parts.norm, parts.project_out, parts.lm_head
        self.softcap = softcap
        self.register_buffer("answers", torch.tensor(answers) if answers else None, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        if self.answers is not None:
            h = h[..., -1, :]
        scores = self._scores(self.project_out(self.norm(h))).float()
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores if self.answers is not None else scores.transpose(-1, -2)

    def _scores(self, h: Tensor) -> Tensor:
        if self.answers is None:
            every: Tensor = self.lm_head(h)
            return every
        weight: Tensor = self.lm_head.weight  # type: ignore[assignment]
        bias: Tensor | None = self.lm_head.bias  # type: ignore[assignment]
        return F.linear(h, weight[self.answers], None if bias is None else bias[self.answers])


class CausalLM(UnitNetwork):
    """A decoder cut into its embedding, its layers and its head.

    Input: tokens (batch, positions) as int64, padded on the left with -1. With answers, the output is their scores as
    the next token (batch, answers); without, the scores of every next token (batch, vocabulary, positions). The model
    stays in eval mode: no dropout, so two passes differ only in their parameters. A token whose embedding is all zeros
    counts as padding.
    """

    def __init__(self, base: Any, answers: tuple[int, ...] = ()) -> None:
        super().__init__()
        config = base.config
        parts = anatomy_of(base.get_base_model() if hasattr(base, "get_base_model") else base)
        kinds = getattr(config, "layer_types", None) or [None] * len(parts.blocks)
        per_kind = parts.rotary is not None and "layer_type" in inspect.signature(parts.rotary.forward).parameters
        self.embedding = TokenEmbedding(parts, config.max_position_embeddings)
        self.layers = nn.ModuleList(
            DecoderLayer(block, parts.rotary, kind if per_kind else None, _window(config, kind))
            for block, kind in zip(parts.blocks, kinds, strict=True)
        )
        self.head = Head(parts, answers, getattr(config, "final_logit_softcapping", None))
        self._base = (base,)  # in a tuple: as a sub-module it would give every value a second name
        self.eval()

    @property
    def base(self) -> Any:
        """The unsplit model, which shares its values with this one."""
        return self._base[0]

    def units(self) -> Units:
        layers = ((f"layer{i + 1}", (f"layers.{i}",)) for i in range(len(self.layers)))
        return ("embedding", ("embedding",)), *layers, ("head", ("head",))

    def preloaded(self) -> frozenset[str]:
        """Return the names of the frozen base values, which every client and server loads itself; the rest is state."""
        frozen = (name for name, p in self.named_parameters() if not p.requires_grad)
        return frozenset((*frozen, *(name for name, _ in self.named_buffers())))


def _window(config: Any, kind: str | None) -> int | None:
    size: int | None = getattr(config, "sliding_window", None)
    return size if kind in (None, "sliding_attention") else None
