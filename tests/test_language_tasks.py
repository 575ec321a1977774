"""Tasks as a prompt and a choice of answers: the files they come from, the texts, and the tokens they become."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language import saved, tokenizer

from cutlayer.core.batches import Batching
from cutlayer.data import sources
from cutlayer.data.language import Prompts, Task
from cutlayer.errors import ConfigError, DataError, UnknownNameError
from cutlayer.runs import build, config
from cutlayer.runs.config import Choice, Run

Rows = Sequence[Mapping[str, Any]]

SST2 = [{"text": " a fine film ", "label": 1}, {"text": "dull plot", "label": 0}]
RTE = [
    {"premise": "It was a film.", "hypothesis": "It was.", "label": "entailment"},
    {"premise": "It was dull.", "hypothesis": "It was fine.", "label": "not_entailment"},
]
WSC = [{"text": "Ann told Bea. She ran.", "span1": "Ann", "span2": "She", "label": label} for label in (True, False)]


def parquet(path: Path, rows: Rows) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs cutlayer[llm]")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)


def tsv(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["\t".join(rows[0]), *("\t".join(str(v) for v in row.values()) for row in rows)]))


def jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def one_file(root: Path, name: str, rows: Rows, held_out: str = "test") -> None:
    parquet(root / f"{name}.parquet", [{"split": s, **row} for s in ("train", held_out) for row in rows])


class TestPrompts:
    def test_sst2(self, tmp_path: Path) -> None:
        one_file(tmp_path, "sst2", SST2)
        task = sources.task("sst2", tmp_path)
        assert isinstance(task, Task)
        assert task.train == Prompts(["a fine film It was", "dull plot It was"], [1, 0]) == task.test
        assert task.answers == (" bad", " good")

    def test_rte(self, tmp_path: Path) -> None:
        one_file(tmp_path, "rte", RTE, "val")
        task = sources.task("rte", tmp_path)
        assert isinstance(task, Task)
        assert task.test.texts[0] == 'It was a film.\nDoes this mean that "It was." is true? Yes or No?'
        assert (task.test.labels, task.answers) == ([0, 1], (" Yes", " No"))

    def test_wsc(self, tmp_path: Path) -> None:
        one_file(tmp_path, "wsc", WSC, "val")
        task = sources.task("wsc", tmp_path)
        assert isinstance(task, Task)
        assert task.train.texts[0] == 'Ann told Bea. She ran.\nDoes the pronoun "She" refer to "Ann"? Yes or No?'
        assert (task.train.labels, task.answers) == ([1, 0], (" No", " Yes"))


Layout = Callable[[Path], None]


def _glue(root: Path) -> None:
    rows = [{"sentence": row["text"], "label": row["label"]} for row in SST2]
    tsv(root / "SST-2/train.tsv", rows)
    tsv(root / "SST-2/dev.tsv", rows[:1])


def _hub(root: Path) -> None:
    rows = [{"sentence": row["text"], "label": row["label"], "idx": i} for i, row in enumerate(SST2)]
    parquet(root / "sst2/train-00000-of-00002.parquet", rows[:1])
    parquet(root / "sst2/train-00001-of-00002.parquet", rows[1:])
    parquet(root / "sst2/validation-00000-of-00001.parquet", rows[:1])
    parquet(root / "sst2/test-00000-of-00001.parquet", [{**rows[0], "label": -1}])  # published without labels


def _development_set_joined(root: Path) -> None:
    splits = zip(("train", "dev", "test"), (*SST2, SST2[0]), strict=True)
    parquet(root / "sst2.parquet", [{"split": split, **row} for split, row in splits])


class TestFiles:
    @pytest.mark.parametrize("layout", [_glue, _hub, _development_set_joined])
    def test_sst2_in_its_public_forms(self, tmp_path: Path, layout: Layout) -> None:
        layout(tmp_path)
        task = sources.task("sst2", tmp_path)
        assert isinstance(task, Task)
        assert task.train == Prompts(["a fine film It was", "dull plot It was"], [1, 0])
        assert task.test == Prompts(["a fine film It was"], [1])

    def test_super_glue_as_it_is_distributed(self, tmp_path: Path) -> None:
        target = {"span1_index": 0, "span2_index": 3, "span1_text": "Ann", "span2_text": "She"}
        rows = [{"text": r["text"], "target": target, "idx": i, "label": r["label"]} for i, r in enumerate(WSC)]
        for name in ("train", "val"):
            jsonl(tmp_path / "WSC" / f"{name}.jsonl", rows)
            jsonl(tmp_path / "RTE" / f"{name}.jsonl", RTE)
        wsc, rte = sources.task("wsc", tmp_path), sources.task("rte", tmp_path)
        assert isinstance(wsc, Task) and isinstance(rte, Task)
        assert wsc.test.texts[1] == 'Ann told Bea. She ran.\nDoes the pronoun "She" refer to "Ann"? Yes or No?'
        assert (wsc.test.labels, rte.train.labels) == ([1, 0], [0, 1])

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError) as error:
            sources.task("rte", tmp_path)
        assert str(error.value) == (
            f"rte: no data files under {tmp_path}/rte, {tmp_path}/RTE or {tmp_path}; expected rte.parquet or "
            "train.jsonl and val.jsonl (or .tsv, .parquet; dev, validation). Put them there, or point CUTLAYER_DATA "
            "or --data at their folder."
        )

    def test_half_of_it_there(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "RTE/train.jsonl", RTE)
        with pytest.raises(DataError, match=r"RTE is incomplete: val.jsonl \(or dev.tsv\) is missing"):
            sources.task("rte", tmp_path)

    def test_a_label_without_an_answer(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "RTE/train.jsonl", [*RTE, {**RTE[0], "label": "neutral"}])
        jsonl(tmp_path / "RTE/val.jsonl", RTE)
        with pytest.raises(DataError) as error:
            sources.task("rte", tmp_path)
        assert str(error.value) == (
            f"rte: row 2 of {tmp_path}/RTE/train.jsonl has the label 'neutral', for which there is no answer; labels "
            "are entailment, not_entailment, 0, 1 for 'Yes' and 'No'. Correct it or remove the row."
        )

    def test_a_column_that_is_missing(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "WSC/train.jsonl", RTE)
        jsonl(tmp_path / "WSC/val.jsonl", RTE)
        with pytest.raises(DataError, match=r"WSC/train.jsonl: row 0 has no text in the column 'text'"):
            sources.task("wsc", tmp_path)

    def test_splits_that_are_not_known(self, tmp_path: Path) -> None:
        parquet(tmp_path / "sst2.parquet", [{"split": "all", **row} for row in SST2])
        with pytest.raises(DataError, match="its column 'split' needs train and one of test, val, validation, dev"):
            sources.task("sst2", tmp_path)

    def test_a_file_that_is_damaged(self, tmp_path: Path) -> None:
        (tmp_path / "sst2.parquet").write_bytes(b"no parquet")
        with pytest.raises(DataError, match=r"^cannot read .*sst2.parquet: .* Replace the file with a fresh copy"):
            sources.task("sst2", tmp_path)


class TestTokens:
    TASK = Task(
        answers=(" bad", " good"),
        train=Prompts(["a fine film It was", "dull It was"], [1, 0]),
        test=Prompts(["dull It was"], [0]),
    )

    def words(self, text: str) -> list[int]:
        numbers: list[int] = tokenizer().convert_tokens_to_ids(text.split())
        return numbers

    def test_prompts_are_padded_on_the_left_without_a_token_for_it(self) -> None:
        assert tokenizer().pad_token is None
        train, test = self.TASK.encode(tokenizer())
        assert isinstance(train.x, torch.Tensor) and train.x.dtype == torch.int64
        assert train.x.tolist() == [self.words("a fine film It was"), [-1, -1, *self.words("dull It was")]]
        assert isinstance(test.x, torch.Tensor) and test.x.tolist() == [self.words("dull It was")]
        assert (train.y.tolist(), train.num_classes) == ([1, 0], 2)

    def test_the_end_of_a_long_prompt_is_kept_behind_its_beginning_token(self) -> None:
        train, _ = self.TASK.encode(tokenizer(bos=True), max_length=4)
        assert isinstance(train.x, torch.Tensor)
        assert train.x.tolist() == [[0, *self.words("film It was")], [0, *self.words("dull It was")]]

    def test_no_room(self) -> None:
        with pytest.raises(DataError, match=r"^max_length is 1; it must leave room for at least one token"):
            self.TASK.encode(tokenizer(bos=True), max_length=1)


class TestPlainText:
    def test_windows_and_what_follows_them(self, tmp_path: Path) -> None:
        (tmp_path / "book.txt").write_text("a It was bad good Yes No fine film dull plot ? a")
        train, test = sources.task("text", tmp_path).encode(tokenizer(), max_length=3)
        ids = tokenizer()("a It was bad good Yes No fine film dull plot ? a")["input_ids"]
        assert isinstance(train.x, torch.Tensor) and isinstance(test.x, torch.Tensor)
        assert train.x.tolist() == [ids[0:3], ids[3:6], ids[6:9]] and test.x.tolist() == [ids[9:12]]
        assert train.y.tolist() == [ids[1:4], ids[4:7], ids[7:10]] and test.y.tolist() == [ids[10:13]]
        assert train.num_classes is None

    def test_several_texts(self, tmp_path: Path) -> None:
        for name in ("one.txt", "two.txt"):
            (tmp_path / name).write_text("a film")
        with pytest.raises(DataError, match=r"has several texts \(one.txt, two.txt\); name the one to train on text"):
            sources.task("text", tmp_path)

    def test_too_short(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("a film")
        with pytest.raises(DataError, match=r"text.txt: its 2 tokens do not make two windows of 256"):
            sources.task("text", tmp_path).encode(tokenizer())

    def test_a_text_task_trains(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("a fine film It was good ? " * 40)
        options = {"path": saved(tmp_path / "model"), "max_length": 6}
        run = Run(
            data="text",
            model=Choice("causal_lm", options),
            cut="layer1",
            clients=2,
            partition=Choice("iid"),
            batching=Batching(size=4),
        )
        training = build.training(run, tmp_path)
        first, second = training.round(), training.round()
        assert second["test_loss"] < first["test_loss"]
        assert "test_accuracy" not in first


class TestRuns:
    def test_names(self) -> None:
        assert sources.names()[-4:] == ["sst2", "rte", "wsc", "text"]
        assert config.changed(Run(), {"data": "sst2"}, "here").data == "sst2"
        with pytest.raises(UnknownNameError, match="unknown data set 'sst3'; did you mean 'sst2'"):
            sources.load("sst3")
        with pytest.raises(UnknownNameError, match="unknown task 'digits'; known: rte, sst2, text, wsc"):
            sources.task("digits")

    def test_texts_need_a_model_that_reads(self) -> None:
        with pytest.raises(ConfigError) as error:
            build.dataset(Run(data="sst2"))
        assert str(error.value) == "the data 'sst2' are text, which the model 'cnn' cannot read: use causal_lm"
        with pytest.raises(
            DataError, match=r"^sst2 is text: use it with the model causal_lm, or task\('sst2'\).encode"
        ):
            sources.load("sst2")

    def test_a_run_asks_the_tokenizer_of_its_model(self, tmp_path: Path) -> None:
        one_file(tmp_path, "sst2", SST2)
        saved(tmp_path / "tiny")
        run = Run(data="sst2", model=Choice("causal_lm", {"path": "tiny", "max_length": 4}), cut="layer2")
        data = build.dataset(run, tmp_path).train
        assert isinstance(data.x, torch.Tensor) and data.x.shape == (2, 4)
        split = build.model_of(run, data, tmp_path)
        answers = tokenizer().convert_tokens_to_ids(["bad", "good"])
        assert split.model.head.answers.tolist() == answers  # type: ignore[union-attr]


PUBLISHED = {
    "sst2": (67_349, 872, "when are bears bears and It was", 1),
    "rte": (
        2_490,
        277,
        "No Weapons of Mass Destruction Found in Iraq Yet.\n"
        'Does this mean that "Weapons of Mass Destruction Found in Iraq." is true? Yes or No?',
        1,
    ),
    "wsc": (
        554,
        104,
        "Mark told Pete many lies about himself, which Pete included in his book. He should have been more "
        'skeptical.\nDoes the pronoun "He" refer to "Mark"? Yes or No?',
        0,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_sets(name: str) -> None:
    root = Path(os.environ.get("CUTLAYER_DATA") or ".")
    if not (root / f"{name}.parquet").is_file():
        pytest.skip(f"needs {name}.parquet in CUTLAYER_DATA")
    task = sources.task(name, root)
    assert isinstance(task, Task)
    num_train, num_test, prompt, label = PUBLISHED[name]
    assert (len(task.train.texts), len(task.test.texts)) == (num_train, num_test)
    assert (task.train.texts[0], task.train.labels[0]) == (prompt, label)
    assert set(Counter(task.test.labels)) == {0, 1}
