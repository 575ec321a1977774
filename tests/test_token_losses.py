"""Specifies losses with a class at each position: of tokens themselves, and of the token that comes next."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutlayer as cl
from cutlayer.errors import ConfigError
from cutlayer.pieces.losses import LOSSES
from cutlayer.runs.metrics import accuracy, f1

transformers = pytest.importorskip("transformers", reason="needs cutlayer[llm]")

LENGTH, TOKENS = 7, 50
BERT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}


def texts(num: int = 12) -> Tensor:
    return torch.randint(0, TOKENS, (num, LENGTH), generator=torch.manual_seed(0))


def gpt2() -> Any:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=TOKENS, tie_word_embeddings=False, **GPT2, **drops)
    )


def tagger() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=TOKENS, num_labels=3, **BERT)
    return transformers.BertForTokenClassification(config)


def trained(net: nn.Module, cut: str, items: Any, **options: Any) -> tuple[cl.Split, cl.Result]:
    split = cl.Split(net, cut, sample=items, **options)
    method = cl.sfl_v1(model=split, client_opt=cl.sgd(0.5), server_opt=cl.sgd(0.5))
    parts = cl.iid(len(items), 2, key=0)
    return split, cl.train(method, items, parts, rounds=2, test=items, batching=cl.Batching(size=3), engine="loop")


def test_items_of_a_trainer_train_a_causal_model_with_the_loss_of_transformers() -> None:
    ids = texts()
    labels = [[-100] * (k % 4) + row.tolist()[k % 4 :] for k, row in enumerate(ids)]  # a prompt does not count
    items = [{"input_ids": row.tolist(), "labels": label} for row, label in zip(ids, labels, strict=True)]
    split, result = trained(gpt2(), "transformer.h.0", items, loss=cl.losses.next_token)
    net = gpt2()
    net.load_state_dict(result.state_dict)
    with torch.no_grad():
        expected = float(net.eval()(input_ids=ids, labels=torch.tensor(labels)).loss)
    assert result.history[-1]["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert result.history[-1]["test_loss"] < result.history[0]["test_loss"]
    model = split.initial()[0].joined(split.initial()[1])  # batches in which other shares count
    alone, together = (cl.evaluate(split, model, cl.from_dataset(items), {}, size)["loss"] for size in (LENGTH, 512))
    assert alone == pytest.approx(together)


def test_tokens_as_their_own_targets_are_told_which_loss_to_take() -> None:
    net = nn.Sequential(nn.Embedding(TOKENS, 4), nn.Linear(4, TOKENS))
    ids = texts()
    for labels in (ids, ids.masked_fill(torch.arange(LENGTH) < 3, -100)):
        with pytest.raises(ConfigError) as caught:
            trained(net, "0", [(x, y) for x, y in zip(ids, labels, strict=True)])
        assert str(caught.value) == (
            "the targets are the tokens of the inputs, so a model would learn to copy them; to predict the next token, "
            "give loss=cutlayer.losses.next_token, or loss = 'next_token' in a run file"
        )
    others = [(x, y) for x, y in zip(ids, ids.roll(1, 1), strict=True)]
    assert len(trained(net, "0", others)[1].history) == 2


def test_a_class_for_each_token_trains_as_it_is() -> None:
    ids = texts()
    labels = (ids % 3).masked_fill(torch.arange(LENGTH) > 4, -100)
    items = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    _, result = trained(tagger(), "bert.encoder.layer.0", items)
    net = tagger()
    net.load_state_dict(result.state_dict)
    with torch.no_grad():
        found = net.eval()(input_ids=ids, labels=labels)
    assert result.history[-1]["test_loss"] == pytest.approx(float(found.loss), rel=1e-5)
    hits = (found.logits.argmax(-1) == labels)[labels >= 0].double().mean()
    assert float(accuracy(found.logits, labels).nanmean()) == pytest.approx(float(hits))
    assert float(f1(found.logits, labels)) == float(f1(found.logits.transpose(1, 2), labels))


def test_classes_may_be_on_either_axis() -> None:
    out, y = torch.randn(4, 5, 3, generator=torch.manual_seed(0)), texts(4)[:, :5] % 3
    expected = nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1)
    for scores in (out, out.transpose(1, 2)):
        torch.testing.assert_close(cl.losses.cross_entropy(scores, y, label_smoothing=0.1), expected)
        following = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten())
        torch.testing.assert_close(cl.losses.next_token(scores, y), following)
    with pytest.raises(ConfigError) as caught:
        cl.losses.cross_entropy(torch.zeros(4, 5, 5), y)
    assert str(caught.value) == (
        "there are as many scores as positions, 5, so either axis may be that of the classes; if it is the second, "
        "give loss=torch.nn.functional.cross_entropy; if it is the last, pad the samples to another length"
    )
    assert list(LOSSES)[:2] == ["cross_entropy", "next_token"]
