"""A BERT from a configuration, with a tokenizer of its own, learns the sentiment of phrases (SST-2) across a cut.

    CUTLAYER_DATA=DATA python bert.py        # DATA holds sst2.parquet, with the columns split, text and label

Nothing is downloaded: the tokenizer is trained on the phrases, and the weights are drawn. The client holds the
embeddings and the first layer; dropout is active on both sides. Needs `pip install 'cutlayer[llm]'`.
"""

import argparse
import os
from pathlib import Path

import pyarrow.parquet as parquet
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification

import cutlayer as cl

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=os.environ.get("CUTLAYER_DATA") or ".")
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--samples", type=int, default=6000)
given = parser.parse_args()
if not (given.data / "sst2.parquet").exists():
    raise SystemExit(f"no sst2.parquet in {given.data.absolute()}; point CUTLAYER_DATA or --data at its folder")

rows = parquet.read_table(given.data / "sst2.parquet").to_pylist()
train_rows = [row for row in rows if row["split"] == "train" and len(row["text"]) > 30][: given.samples]
test_rows = [row for row in rows if row["split"] == "test"]
tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))  # training WordPiece gives other tokens in every process
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["[PAD]", "[UNK]", "[CLS]"], show_progress=False)
tokenizer.train_from_iterator((row["text"] for row in train_rows), trainer)
tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
tokenizer.enable_truncation(24)
tokenizer.enable_padding(length=24)


def items(rows: list[dict]) -> list[dict]:
    """Return what `transformers.Trainer` would be given."""
    return [
        {"input_ids": text.ids, "attention_mask": text.attention_mask, "labels": row["label"]}
        for row, text in zip(rows, tokenizer.encode_batch([row["text"] for row in rows]), strict=True)
    ]


train, test = cl.from_dataset(items(train_rows)), cl.from_dataset(items(test_rows))
torch.manual_seed(0)
shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
bert = BertForSequenceClassification(BertConfig(vocab_size=tokenizer.get_vocab_size(), num_labels=2, **shape))
split = cl.Split(bert, cut="bert.encoder.layer.0", sample=train.x)
print(f"{len(train)} phrases; at the client: {', '.join(split.units[: split.cut])}")

opt = cl.adamw(2e-3)
result = cl.train(
    cl.sfl_v2(model=split, client_opt=opt, server_opt=opt),
    train,
    cl.iid(len(train), 5, key=0),
    rounds=given.rounds,
    test=test,
    batching=cl.Batching(size=32),
    on_round=lambda r: print(f"round {r['round']}: loss {r['loss']:.3f}, test accuracy {r['test_accuracy']:.3f}"),
)
bert.load_state_dict(result.state_dict)  # the whole model, for transformers
