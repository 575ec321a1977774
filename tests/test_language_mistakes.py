"""Language models that cannot be had: each is told of in a user's words."""

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language import FAMILIES, model, saved, texts, tokenizer, transformers, unsplit

from cutlayer.errors import ConfigError, CutError, DataError, UnknownNameError
from cutlayer.models import language
from cutlayer.models.language import answer_tokens, causal_lm, load
from cutlayer.runs import build
from cutlayer.runs.config import Choice, Run
from cutlayer.split import Split


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("decoders")
    return {family: saved(root / family, family) for family in ("llama", "opt")}


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that are asked for, none of which is found."""
    asked: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def test_a_family_without_a_known_list_of_layers(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as error:
        causal_lm(str(tmp_path))
    assert str(error.value) == (
        "GPT2LMHeadModel has no list of layers that is known here (its model_type is 'gpt2'); use a model of one "
        "of the families llama, mistral, qwen2, qwen3, gemma3_text, opt."
    )


def test_a_decoder_that_is_built_like_a_known_one(tmp_path: Path) -> None:
    olmo = saved(tmp_path / "olmo", "llama", kind="olmo2")
    theirs = unsplit(load(olmo), texts())[texts() >= 0]
    torch.testing.assert_close(model(olmo)(texts()).transpose(1, 2)[texts() >= 0], theirs, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError) as error:
        causal_lm(saved(tmp_path / "granite", "llama", kind="granite", logits_scaling=3.0))
    assert str(error.value) == (
        "GraniteForCausalLM has layers as they are known here, but computes more than they do (its model_type is "
        "'granite'); use a model of one of the families llama, mistral, qwen2, qwen3, gemma3_text, opt."
    )


def test_a_cut_beyond_the_layers(folders: dict[str, str]) -> None:
    with pytest.raises(CutError) as error:
        Split(model(folders["llama"]), 9)
    assert str(error.value) == (
        "cut 9 is out of range: CausalLM has 5 units, so cuts go from 0 to 5: 1 'embedding', 2 'layer1', "
        "3 'layer2', 4 'layer3', 5 'head'."
    )
    with pytest.raises(CutError, match=r"^CausalLM has no unit 'layer4' to cut after; did you mean 'layer3'\? It has"):
        Split(model(folders["llama"]), "layer4")


def test_a_target_that_matches_nothing(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        causal_lm(folders["opt"], targets=("v_proj", "query"))
    assert str(error.value) == (
        "the adapter target 'query' matches no linear layer of OPTForCausalLM; its layers have k_proj, v_proj, "
        "q_proj, out_proj, fc1, fc2."
    )


def test_other_targets_are_adapted(folders: dict[str, str]) -> None:
    split = Split(model(folders["llama"], targets=("mlp.up_proj",), rank=2), "layer1")
    assert list(split.initial()[0].params) == [f"layers.0.block.mlp.up_proj.lora_{m}.default.weight" for m in "AB"]


def test_answers_that_begin_alike(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        answer_tokens((" good", " good film"), folders["llama"])
    token = tokenizer().convert_tokens_to_ids("good")
    assert str(error.value) == (
        f"the answers ' good' and ' good film' begin with the same token {token} of {folders['llama']}; "
        "give answers that differ from their first token on"
    )


def test_an_empty_answer(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^the answer ' ' has no token of its own behind a word; begin it"):
        answer_tokens((" ", " good"), folders["llama"])


@pytest.mark.parametrize("token", (64, -1))
def test_a_token_outside_the_vocabulary(folders: dict[str, str], token: int) -> None:
    with pytest.raises(ConfigError) as error:
        causal_lm(folders["llama"], answers=(3, token))
    assert str(error.value) == (
        f"the answer {token} is no token of {folders['llama']}, whose vocabulary has 64; give words, or tokens from 0 "
        "to 63"
    )


def test_data_that_are_no_texts(folders: dict[str, str]) -> None:
    run = Run(data="digits", model=Choice("causal_lm", {"path": folders["llama"]}), cut="layer1")
    with pytest.raises(ConfigError) as error:
        build.training(run)
    assert str(error.value) == (
        "the data 'digits' are no texts, which the model 'causal_lm' reads: use sst2, rte, wsc, text, or another model"
    )
    with pytest.raises(UnknownNameError, match=r"^unknown data set 'digit'; did you mean 'digits'\?$"):
        build.training(replace(run, data="digit"))


@pytest.mark.parametrize(("what", "read"), [("model", causal_lm), ("tokenizer", language.tokenizer)])
@pytest.mark.parametrize("path", ("nowhere/at-all", "nowhere/at/all"))
def test_a_folder_that_is_not_there(what: str, read: Callable[[str], Any], path: str, lookups: list[str]) -> None:
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value) == (
        f"there is no {what} {path!r} that can be read: no such folder with a config.json, and none in the hub's "
        "cache. Give a folder with its files (config.json, *.safetensors, tokenizer.json), one below CUTLAYER_DATA, or "
        "a model in the hub's cache; nothing is downloaded. Shapes known by name: llama-3.2-1b, gemma-3-270m, opt-125m."
    )
    assert lookups == []


def test_a_folder_without_weights(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("llama", **FAMILIES["llama"][1]).save_pretrained(tmp_path)
    with pytest.raises(DataError) as error:
        causal_lm(str(tmp_path))
    assert str(error.value) == (f"the folder {tmp_path} has no weights; add them, or set random = true to draw them")
    first, second = (model(str(tmp_path), seed=seed, random=True)(texts()) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_a_folder_below_the_data_folder_is_found(folders: dict[str, str], monkeypatch: Any) -> None:
    monkeypatch.setenv("CUTLAYER_DATA", str(Path(folders["opt"]).parent))
    assert type(load("opt")).__name__ == "OPTForCausalLM"


def test_a_model_in_the_hubs_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookups: list[str]
) -> None:
    repository, revision = tmp_path / "models--me--tiny", "0123456789" * 4
    folder = saved(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))  # the variable is read at import
    found, direct = (model(path, answers=(" bad", " good"))(texts()) for path in ("me/tiny", folder))
    assert torch.equal(found, direct)
    assert language.tokenizer("me/tiny").tokenize("It was good") == ["It", "was", "good"]
    assert lookups == []


def test_texts_longer_than_learned_positions(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^texts of 65 tokens do not fit the model's 64 places; set max_length$"):
        model(folders["opt"])(torch.full((1, 65), 5))
    assert model(folders["opt"], answers=(3, 4))(torch.full((1, 64), 5)).shape == (1, 2)


def test_a_shape_has_no_tokenizer() -> None:
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match=r"^'opt-125m' is only a shape, without a tokenizer"),
    ):
        causal_lm("opt-125m", answers=(" bad", " good"))


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as error:
        causal_lm("opt-125m")
    assert str(error.value) == (
        "language models need transformers, which is missing; install it with: pip install 'cutlayer[llm]'"
    )
