"""Texts for language models: tasks with a prompt and a choice of answers, and plain text.

A task's prompt ends where the answer begins, so the model's next token is its choice. The tokenizer of a model turns
texts into arrays, padded on the left with -1, so a tokenizer needs no padding token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cutlayer.data.arrays import Arrays
from cutlayer.data.files import FileForm, bad_file, read_bytes
from cutlayer.data.tables import Row, TableFile, Tables, forms
from cutlayer.errors import DataError

PADDING = -1
MAX_LENGTH = 256
TEST = 0.1  # the last part of a plain text
STEM = "a"  # any text, to see which token the tokenizer puts in front

Sets = tuple[Arrays, Arrays]


class Prompts(NamedTuple):
    """Prompts, and the number of the right answer to each."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts, and the answers that a model chooses from."""

    answers: tuple[str, ...]
    train: Prompts
    test: Prompts

    def encode(self, tokenizer: Any, max_length: int = MAX_LENGTH) -> Sets:
        """Return tokens padded to the longest prompt; a prompt longer than max_length keeps its end."""
        first, second = (self._arrays(prompts, tokenizer, max_length) for prompts in (self.train, self.test))
        return first, second

    def _arrays(self, prompts: Prompts, tokenizer: Any, max_length: int) -> Arrays:
        x = padded(tokens_of(prompts.texts, tokenizer, max_length))
        return Arrays(x=x, y=torch.tensor(prompts.labels), num_classes=len(self.answers))


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """A text of which every next token is predicted; its end is the test set."""

    path: Path
    text: str

    def encode(self, tokenizer: Any, max_length: int = MAX_LENGTH) -> Sets:
        """Return consecutive windows of max_length tokens, and the next token at each position."""
        tokens = torch.tensor(tokenizer(self.text, add_special_tokens=False)["input_ids"])
        num_windows = (len(tokens) - 1) // max_length
        if num_windows < 2:
            raise bad_file(self.path, f"its {len(tokens)} tokens do not make two windows of {max_length}")
        used = num_windows * max_length
        x, y = (part.reshape(num_windows, max_length) for part in (tokens[:used], tokens[1 : used + 1]))
        num_test = max(round(TEST * num_windows), 1)
        first, last = slice(None, num_windows - num_test), slice(num_windows - num_test, None)
        return Arrays(x=x[first], y=y[first]), Arrays(x=x[last], y=y[last])


Texts = Task | PlainText  # what a tokenizer turns into a training and a test set


def tokens_of(texts: Sequence[str], tokenizer: Any, max_length: int) -> list[list[int]]:
    """Return the tokens of each text: the start token, if the tokenizer adds one, then as much of its end as fits."""
    begun = tokenizer(STEM)["input_ids"]
    begin = begun[:1] if tokenizer.bos_token_id is not None and begun[:1] == [tokenizer.bos_token_id] else []
    room = max_length - len(begin)
    if room < 1:
        raise DataError(f"max_length is {max_length}; it must leave room for at least one token of a prompt")
    return [begin + tokens[-room:] for tokens in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of tokens as one tensor, padded on the left."""
    width = max(len(row) for row in rows)
    x = np.full((len(rows), width), PADDING, dtype=np.int64)
    for i, row in enumerate(rows):
        x[i, width - len(row) :] = row
    return torch.from_numpy(x)


@dataclass(frozen=True, kw_only=True)
class Definition:
    """How the rows of a table become prompts with an answer."""

    folders: tuple[str, ...]  # below the data folder
    columns: tuple[str, ...]
    prompt: Callable[[Row], str]
    labels: Mapping[str, int]  # by the label in the files
    answers: tuple[str, ...]

    def prompts(self, name: str, tables: list[TableFile]) -> Prompts:
        texts, labels = [], []
        for path, rows in tables:
            for number, row in enumerate(rows):
                for column in self.columns:
                    if not isinstance(row.get(column), str):
                        raise bad_file(path, f"row {number} has no text in the column {column!r}")
                texts.append(self.prompt(row))
                labels.append(self._label(f"{name}: row {number} of {path}", row.get("label")))
        return Prompts(texts, labels)

    def _label(self, where: str, label: Any) -> int:
        if str(label) not in self.labels:
            raise DataError(
                f"{where} has the label {label!r}, for which there is no answer; "
                f"labels are {', '.join(self.labels)} for {' and '.join(repr(a.strip()) for a in self.answers)}. "
                "Correct it or remove the row."
            )
        return self.labels[str(label)]


DEFINITIONS = {
    "sst2": Definition(
        folders=("sst2", "SST-2"),
        columns=("text",),
        prompt=lambda row: f"{row['text'].strip()} It was",
        labels={"0": 0, "1": 1},
        answers=(" bad", " good"),
    ),
    "rte": Definition(
        folders=("rte", "RTE"),
        columns=("premise", "hypothesis"),
        prompt=lambda row: f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?',
        labels={"entailment": 0, "not_entailment": 1, "0": 0, "1": 1},
        answers=(" Yes", " No"),
    ),
    "wsc": Definition(
        folders=("wsc", "WSC"),
        columns=("text", "span1", "span2"),
        prompt=lambda row: f'{row["text"]}\nDoes the pronoun "{row["span2"]}" refer to "{row["span1"]}"? Yes or No?',
        labels={"False": 0, "True": 1, "0": 0, "1": 1},
        answers=(" No", " Yes"),
    ),
}


def defined(name: str, tables: Tables) -> Task:
    """Return the task of this name, made from its rows."""
    definition = DEFINITIONS[name]
    train, test = (definition.prompts(name, part) for part in tables)
    return Task(answers=definition.answers, train=train, test=test)


def _read_text(folder: Path) -> Texts | None:
    found = sorted(folder.glob("*.txt"))
    path = folder / "text.txt" if folder / "text.txt" in found else next(iter(found), None)
    if path is None:
        return None
    if len(found) > 1 and path.name != "text.txt":
        names = ", ".join(one.name for one in found)
        raise DataError(f"text: {folder} has several texts ({names}); name the one to train on text.txt")
    return PlainText(path=path, text=read_bytes(path).decode("utf-8", errors="replace"))


TEXT: FileForm[Texts] = FileForm("text.txt (or one other .txt)", _read_text)
TABLES: Mapping[str, tuple[FileForm[Tables], ...]] = {name: forms(name) for name in DEFINITIONS}
