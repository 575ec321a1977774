"""Language models: Hugging Face decoders from a folder or the hub's cache, ready to be cut between layers."""

import logging
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from cutlayer.core.checks import check, check_positive, reason
from cutlayer.data.language import MAX_LENGTH
from cutlayer.data.sources import ROOT_VARIABLE, data_folder
from cutlayer.errors import ConfigError, DataError
from cutlayer.models.adapters import adapted, needs
from cutlayer.models.decoders import CausalLM, anatomy_of, check_alike

log = logging.getLogger("cutlayer")

# Published decoders, for studies that need no weights: costs, memory, traffic.
SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"))
WEIGHTS = ("*.safetensors", "*.bin")
STEM = "a"  # answers are tokenised as continuations of another word

Answer = str | int


def causal_lm(
    path: str,
    rank: int = 8,
    alpha: float = 16.0,
    targets: tuple[str, ...] = (),
    answers: tuple[Answer, ...] = (),
    dtype: Literal["float32", "bfloat16"] = "float32",
    attention: Literal["eager", "sdpa"] = "eager",
    random: bool = False,
    max_length: int = MAX_LENGTH,
    root: str | None = None,
) -> CausalLM:
    """A decoder with low-rank adapters; with rank 0 all of it trains.

    The path is a folder, one below the data folder, a model in the hub's cache or a shape that is known by name;
    nothing is downloaded. Answers are the words that a task chooses from, by default those of the data set, or their
    tokens; without them the model predicts every next token. Adapters are float32 whatever the base is. A prompt that
    is longer than max_length tokens keeps its end.
    """
    check(isinstance(rank, int) and rank >= 0, "rank", rank, "0 (train the whole model) or more")
    check_positive("alpha", alpha)
    check(isinstance(max_length, int) and max_length > 0, "max_length", max_length, "a number of tokens")
    base = load(path, dtype=dtype, attention=attention, random=random, root=root)
    check_alike(base)
    tokens = answer_tokens(answers, path, root)
    size = base.config.vocab_size
    for token in tokens:
        if not 0 <= token < size:
            raise ConfigError(
                f"the answer {token} is no token of {path}, whose vocabulary has {size}; give words, or tokens from 0 "
                f"to {size - 1}"
            )
    if rank:
        base = adapted(base, rank=rank, alpha=alpha, targets=targets)
    else:
        _untie(base, path)
    return CausalLM(base, tokens)


def load(
    path: str,
    *,
    dtype: str = "float32",
    attention: str = "eager",
    random: bool = False,
    root: str | Path | None = None,
) -> Any:
    """Load a decoder with transformers; random weights are drawn from torch's generator."""
    transformers = needs("transformers")
    where = located(path, root)
    settings = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    if where is None and path in SHAPES:
        config = transformers.AutoConfig.for_model(**SHAPES[path])
        return transformers.AutoModelForCausalLM.from_config(config, **settings)
    folder = (where or _incomplete("model", path)).resolve()  # exported adapters contain this path
    if not random and not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise DataError(f"the folder {folder} has no weights; add them, or set random = true to draw them")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if random or torch.get_default_device().type == "meta":
            return transformers.AutoModelForCausalLM.from_config(config, **settings)
        with _quietly(transformers.utils.logging):
            return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **settings)
    except (OSError, ValueError) as error:
        raise _unread("model", path, error) from error


def tokenizer(path: str, root: str | Path | None = None) -> Any:
    """Load the tokenizer of a model."""
    transformers = needs("transformers")
    where = located(path, root)
    if where is None and path in SHAPES:
        raise ConfigError(f"{path!r} is only a shape, without a tokenizer; give the folder of a model, or tokens")
    folder = where or _incomplete("tokenizer", path)
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unread("tokenizer", path, error) from error


def located(path: str, root: str | Path | None = None) -> Path | None:
    """Return the model folder at this path, below the data folder or in the hub's cache; None if there is none."""
    below = data_folder(None if root is None else Path(root))
    roots = [Path()] if below is None else [Path(), below]
    found = (folder / path for folder in roots if (folder / path / "config.json").is_file())
    return next(found, None) or _cached(path)


def _cached(path: str) -> Path | None:
    """Return the folder of a model in the hub's cache; given only its name, transformers would use the network."""
    try:
        config = needs("huggingface_hub").try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a valid name on the hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def _incomplete(what: str, path: str) -> Path:
    """Return a folder without a config.json, for which transformers says what is missing; refuse other paths."""
    if not Path(path).is_dir():
        raise _unread(what, path, FileNotFoundError("no such folder with a config.json, and none in the hub's cache"))
    return Path(path)


def answer_tokens(answers: tuple[Answer, ...], path: str, root: str | Path | None = None) -> tuple[int, ...]:
    """Return the first token of each answer when it follows another word."""
    if all(isinstance(answer, int) for answer in answers):
        found = [int(answer) for answer in answers]
    else:
        reads = tokenizer(path, root)
        found = [a if isinstance(a, int) else _first_token(a, reads) for a in answers]
    for i, token in enumerate(found):
        if token in found[:i]:
            same = answers[found.index(token)]
            raise ConfigError(
                f"the answers {same!r} and {answers[i]!r} begin with the same token {token} of {path}; "
                "give answers that differ from their first token on"
            )
    return tuple(found)


def _first_token(answer: str, reads: Any) -> int:
    start = reads(STEM, add_special_tokens=False)["input_ids"]
    tokens = reads(STEM + answer, add_special_tokens=False)["input_ids"]
    if tokens[: len(start)] != start or len(tokens) == len(start):
        raise ConfigError(f"the answer {answer!r} has no token of its own behind a word; begin it with a space")
    return int(tokens[len(start)])


@contextmanager
def _quietly(bars: Any) -> Iterator[None]:
    """Hide the progress bars of transformers."""
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _untie(base: Any, path: str) -> None:
    """Give embedding and head separate tensors: trained on both sides of a cut, a tied one would diverge."""
    parts = anatomy_of(base)
    tokens, head = (module.get_parameter("weight") for module in (parts.tokens, parts.lm_head))
    if tokens is not head:
        return
    names = [name for name, p in base.named_parameters(remove_duplicate=False) if p is head]
    parts.lm_head.weight = nn.Parameter(head.detach().clone())
    base.config.tie_word_embeddings = False
    log.warning("%s ties %s; trained in full, each is a tensor of its own", path, " to ".join(names))


def _unread(what: str, path: str, error: Exception) -> DataError:
    return DataError(
        f"there is no {what} {path!r} that can be read: {reason(error).rstrip('.')}. Give a folder with its files "
        f"(config.json, *.safetensors, tokenizer.json), one below {ROOT_VARIABLE}, or a model in the hub's cache; "
        f"nothing is downloaded. Shapes known by name: {', '.join(SHAPES)}."
    )
