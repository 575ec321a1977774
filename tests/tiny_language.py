"""Tiny random decoders of each family, with a tokenizer of whole words, saved as transformers saves them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cutlayer.models.decoders import CausalLM
from cutlayer.models.language import causal_lm

transformers = pytest.importorskip("transformers", reason="needs cutlayer[llm]")
pytest.importorskip("peft", reason="needs cutlayer[llm]")

WORDS = ("a", "It", "was", "bad", "good", "Yes", "No", "fine", "film", "dull", "plot", "?")
VOCABULARY = 64

COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
ROTARY = {**COMMON, "hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1, "initializer_range": 0.3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**ROTARY, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {**ROTARY, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "opt": ("opt", {**COMMON, "hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16, "init_std": 0.3}),
    "opt-350m": (  # projects its words, and normalises behind its layers
        "opt",
        {
            **COMMON,
            "hidden_size": 16,
            "ffn_dim": 32,
            "word_embed_proj_dim": 8,
            "do_layer_norm_before": False,
            "init_std": 0.3,
        },
    ),
    "mistral": ("mistral", {**ROTARY, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("qwen2", ROTARY),
    "qwen3": ("qwen3", {**ROTARY, "head_dim": 8}),
}


def saved(folder: Path, family: str = "llama", kind: str | None = None, **changes: Any) -> str:
    """The folder of a tiny model with its tokenizer; the same weights at every call. Another kind has its sizes."""
    usual, sizes = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = transformers.AutoConfig.for_model(kind or usual, **{**sizes, **changes})
        net = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in net.parameters():
            if parameter.dim() == 1:  # biases and norms, which a fresh model has at 0 and 1
                parameter.data += 0.3 * torch.randn(parameter.shape)
        net.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def model(path: str, seed: int = 0, **options: Any) -> CausalLM:
    """A decoder whose adapters are drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return causal_lm(path, **options)


def tokenizer(bos: bool = False) -> Any:
    """Words by their number, without a token for padding; with `bos`, a text begins with <s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    numbers = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")


def texts(batch: int = 4, places: int = 12) -> Tensor:
    """Random tokens; every text is padded on the left by a different length, the first by none."""
    random = torch.Generator().manual_seed(3)
    x = torch.randint(3, VOCABULARY, (batch, places), generator=random)
    for row in range(batch):
        x[row, : row * (places - 1) // max(batch - 1, 1)] = -1
    return x


def unsplit(base: Any, x: Tensor) -> Tensor:
    """What transformers itself gives for these texts, with its own masks."""
    real = (x >= 0).long()
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = base(input_ids=x.clamp(min=0), attention_mask=real, position_ids=positions, use_cache=False)
    logits: Tensor = out.logits
    return logits
