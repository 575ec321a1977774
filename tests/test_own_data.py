"""Specifies runs on one's own data: the forms of files, target and test set, the loss, and the digest on resume."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import mistake, say  # noqa: F401
from test_plugins import restored  # noqa: F401

import cutlayer as cl
from cutlayer.data.columns import Columns
from cutlayer.data.digest import digest
from cutlayer.data.local import local
from cutlayer.data.own import OwnData, read
from cutlayer.errors import ConfigError, DataError, UnknownNameError
from cutlayer.pieces.losses import LOSSES
from cutlayer.remote.joining.join import DeviceSettings
from cutlayer.runs import build, config
from cutlayer.runs.config import Run

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SMALL = 'clients = 4\nrounds = 2\nengine = "loop"\npartition = "iid"\n'
MLP = 'model = { name = "mlp", hidden = [8] }\ncut = 1\nbatching = { size = 8 }\n'


def patients(num: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Three features, and a target that is linear in them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, 3))
    return x, x @ np.array([1.0, -2.0, 0.5]) + 3


def write_csv(path: Path, columns: dict[str, Any]) -> Path:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_saved(folder: Path, columns: dict[str, Any], **state: Any) -> Path:
    """What `save_to_disk` of the package datasets leaves, in two files."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    halves = [table.slice(0, len(table) // 2), table.slice(len(table) // 2)]
    names = [f"data-{k:05d}-of-00002.arrow" for k in range(2)]
    for name, half in zip(names, halves, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, half.schema) as stream:
            stream.write_table(half)
    known = {"_data_files": [{"filename": name} for name in names], "_format_columns": None, **state}
    (folder / "state.json").write_text(json.dumps(known))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def lines_of(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{run}/seed-0/metrics.jsonl").read_text().splitlines()]


# -- the forms ---------------------------------------------------------------------------------------------------------


def test_the_same_samples_come_from_every_form(tmp_path: Path) -> None:
    x, labels = patients(20)[0].astype(np.float32), np.arange(20) % 3
    table = {**{f"f{k}": x[:, k].tolist() for k in range(3)}, "label": labels.tolist()}
    np.savez(tmp_path / "a.npz", x=x, y=labels)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", labels)
    write_csv(tmp_path / "a.csv", {k: [repr(v) for v in column] for k, column in table.items()})
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    write_saved(tmp_path / "saved", table)
    wanted = digest(read(OwnData(path=str(tmp_path / "a.npz"))).train)
    for name in ("x.npy", "a.csv", "a.parquet", "saved"):
        found = read(OwnData(path=str(tmp_path / name)))
        assert (len(found.train), len(found.test), found.train.num_classes) == (16, 4, 3)
        assert digest(found.train) == wanted, name


def test_a_pair_of_npy_files_belongs_together(tmp_path: Path) -> None:
    np.save(tmp_path / "images_train.npy", np.zeros((4, 1, 2, 2), dtype=np.uint8))
    with pytest.raises(DataError) as caught:
        local(tmp_path / "images_train.npy")
    wanted = tmp_path / "labels_train.npy"
    assert str(caught.value) == (
        f"{tmp_path / 'images_train.npy'} has inputs only, and {wanted} is missing; put the targets there, or name "
        "their file"
    )
    np.save(wanted, np.arange(4) % 2)
    assert local(tmp_path / "images_train.npy").y.tolist() == [0, 1, 0, 1]
    assert local(tmp_path).y.tolist() == [0, 1, 0, 1]  # a folder with the pair
    np.save(tmp_path / "other.npy", np.array([0.5, 1, 2, 3]))
    named = OwnData(path=str(tmp_path / "images_train.npy"), target="other.npy")
    assert sorted([*read(named).train.y.tolist(), *read(named).test.y.tolist()]) == [0.5, 1, 2, 3]


def test_pictures_in_class_folders_keep_their_names_in_both_sets(tmp_path: Path) -> None:
    for part, classes in (("train", ("bee", "cat", "dog")), ("test", ("dog",))):
        for k, name in enumerate(classes):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (3, 2), 10 * k).save(tmp_path / part / name / "a.png")
    found = read(OwnData(path=str(tmp_path)))
    assert (found.train.y.tolist(), found.test.y.tolist()) == ([0, 1, 2], [2])
    assert tuple(found.train.x.shape) == (3, 1, 2, 3) and found.test.num_classes == 3


def test_pictures_in_a_saved_data_set_are_decoded(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    Image.new("RGB", (3, 2), (255, 0, 51)).save(file)
    images = [{"bytes": file.read_bytes(), "path": None}] * 5
    found = local(write_saved(tmp_path / "saved", {"image": images, "label": [0, 1, 0, 1, 1]}))
    assert tuple(found.x.shape) == (5, 3, 2, 3)
    np.testing.assert_allclose(found.x[4, :, 1, 2], [1, 0, 0.2], rtol=1e-6)


def test_a_saved_data_set_of_tokens_keeps_its_columns(tmp_path: Path) -> None:
    columns = {
        "text": ["a b", "c d"] * 5,
        "input_ids": [[1, 2], [3, 4]] * 5,
        "attention_mask": [[1, 1], [1, 0]] * 5,
        "label": [0, 1] * 5,
    }
    saved = write_saved(tmp_path / "all" / "train", columns)
    with pytest.raises(DataError) as caught:
        local(saved)
    assert str(caught.value) == (
        f"{saved}: the column 'text' has the type string; give numbers, or list the numeric columns in features = [...]"
    )
    found = local(saved, columns=Columns(features=("input_ids", "attention_mask")))
    assert isinstance(found.x, dict) and list(found.x) == ["input_ids", "attention_mask"]
    assert found.x["input_ids"][:2].tolist() == [[1, 2], [3, 4]] and found.x["input_ids"].dtype == torch.int64
    shown = write_saved(tmp_path / "all" / "test", columns, _format_columns=["input_ids", "label"])
    assert local(shown).x[:2].tolist() == [[1, 2], [3, 4]]  # type: ignore[index]  # its format leaves the others out
    both = read(OwnData(path=str(tmp_path / "all"), features=("input_ids",)))  # as a DatasetDict is saved
    assert (len(both.train), len(both.test)) == (10, 10)
    ragged = write_saved(tmp_path / "ragged", {"input_ids": [[1, 2], [3]], "label": [0, 1]})
    with pytest.raises(DataError) as caught:
        local(ragged)
    assert str(caught.value) == (
        f"{ragged}: the lists in the column 'input_ids' have from 1 to 2 entries; bring them to one length, for "
        "example with padding='max_length' of the tokenizer"
    )


def test_a_parquet_file_with_a_gap_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": [1.0, None], "label": [0, 1]}), path)
    with pytest.raises(DataError) as caught:
        local(path)
    assert str(caught.value) == f"{path} has nothing in the column 'a' of row 1; fill it in or remove the row"


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,a,label\n1,2,0\n3,4,1\n")
    with pytest.raises(DataError) as caught:
        local(path)
    assert str(caught.value) == f"{path} has more than one column 'a'; give each column a name of its own"


def test_a_broken_npz_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=f"cannot read {path}: File is not a zip file"):
        read(OwnData(path=str(path)))


def test_files_of_other_folders_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    with pytest.raises(DataError, match="give the name of a file in the same folder"):
        read(OwnData(path=str(tmp_path / "x.npy"), target="../y.npy"))
    saved = write_saved(tmp_path / "saved", {"a": [1.0, 2.0], "label": [0, 1]})
    for name in ("../other.arrow", str(tmp_path / "other.arrow")):
        (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(DataError, match="it lists files of another folder"):
            local(saved)


# -- the options -------------------------------------------------------------------------------------------------------


def test_the_target_the_features_the_groups_and_the_task_are_named(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "a.csv",
        {"ward": ["b", "a", "b", "a"], "days": [3, 1, 2, 1], "age": [50, 60, 70, 80], "dose": [1, 2, 3, 4]},
    )
    own = OwnData(path=str(path), target="days", features=("age",), group="ward", task="regression", test=0.25)
    found = read(own)
    assert found.train.num_classes is None and found.train.y.dtype == torch.float32
    assert tuple(found.train.x.shape) == (3, 1) and found.train.group_names == ("a", "b") == found.test.group_names
    assert read(OwnData(path=str(path), target="days", features=("age",))).train.num_classes == 4
    with pytest.raises(DataError, match=r"has 'b' in the column 'ward'; give each category a number, or list"):
        read(OwnData(path=str(path)))
    with pytest.raises(UnknownNameError, match=r"unknown column 'day' in .*a\.csv; did you mean 'days'\?$"):
        read(OwnData(path=str(path), target="day"))


def test_the_classes_are_told_once_for_all_seeds(say: Any, tmp_path: Path) -> None:  # noqa: F811
    write_csv(tmp_path / "mine.csv", {"a": range(40), "label": ["cat", "bee", "ant", "dog"] * 10})
    (tmp_path / "run.toml").write_text(SMALL + MLP + 'data = "mine.csv"\n')
    told = say("run", "run.toml", "--seeds", "2").err.splitlines()
    assert [line for line in told if line.startswith("mine.csv")] == [
        "mine.csv: the classes are 0 ant, 1 bee, 2 cat, 3 dog"
    ]


def test_classes_may_be_words_in_a_run_but_not_on_a_device(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "train.csv", {"a": [1, 2, 3], "kind": ["ill", "well", "ill"]})
    test = write_csv(tmp_path / "test.csv", {"a": [1], "kind": ["well"]})
    found = read(OwnData(path=str(train), test=str(test), target="kind"))
    assert (found.train.y.tolist(), found.test.y.tolist(), found.test.num_classes) == ([0, 1, 0], [1], 2)
    assert read(OwnData(path=str(tmp_path), target="kind")).test.y.tolist() == [1]  # a folder with both files
    with pytest.raises(DataError, match="the label 'ill'; number the classes from 0, the same on every device"):
        local(train, columns=Columns(target="kind"))
    write_csv(test, {"a": [1], "kind": ["cured"]})
    with pytest.raises(DataError, match="the test set has the class 'cured', which the training set has not"):
        read(OwnData(path=str(train), test=str(test), target="kind"))


def test_the_training_set_standardises_both(tmp_path: Path) -> None:
    x_train, x_test = np.array([[1.0, 7], [3, 7]], dtype=np.float32), np.array([[5.0, 8]], dtype=np.float32)
    np.savez(tmp_path / "a.npz", x_train=x_train, y_train=np.array([0, 1]), x_test=x_test, y_test=np.array([1]))
    found = read(OwnData(path=str(tmp_path / "a.npz"), standardise=True))
    assert (found.train.x.tolist(), found.test.x.tolist()) == ([[-1, 0], [1, 0]], [[3, 1]])
    assert read(OwnData(path=str(tmp_path / "a.npz"))).test.x.tolist() == [[5, 8]]
    assert len(read(OwnData(path=str(tmp_path / "a.npz"), test=0.5)).train) == 1  # its own test set is left alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\ntest = 0.1", "data needs path; add it in my.toml, [data]"),
        ("data = { path = 'a.csv', test = 1.5 }", "my.toml, [data]: test is 1.5, but it must be a fraction between 0"),
        ("data = { path = 'a.csv', tset = 0.1 }", "unknown key 'tset' in my.toml, [data]; did you mean 'test'"),
        ("data = { path = 'a.csv', task = 'classs' }", "unknown task 'classs' in my.toml, [data]; did you mean 'cla"),
        ("loss = 'msee'", "unknown loss 'msee' in my.toml; did you mean 'mse' or 'mae'?"),
    ],
)
def test_mistakes_are_refused_before_anything_is_read(text: str, message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError)) as caught:
        config.changed(Run(), tomllib.loads(text), "my.toml")
    assert str(caught.value).startswith(message)


def test_a_path_is_written_and_read_again() -> None:
    run = config.changed(Run(), {"data": {"path": "a.csv", "features": ["a", "b"], "test": 0.3}}, "my.toml")
    assert run.data == OwnData(path="a.csv", features=("a", "b"), test=0.3)
    assert config.changed(Run(), tomllib.loads(config.dumps(run)), "x") == run
    assert config.changed(Run(), {"data": "mine.npz"}, "x").data == OwnData(path="mine.npz")
    assert config.changed(run, {"data": {"target": "y"}}, "--set").data.features == ("a", "b")  # type: ignore[union-attr]
    assert config.changed(run, {"data": "digits"}, "--set").data == "digits"


def test_python_loads_a_path_like_a_name(tmp_path: Path) -> None:
    x, y = patients(10)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    found = cl.load(str(tmp_path / "mine.npz"), test=0.5)
    assert (len(found.train), len(found.test), found.train.num_classes) == (5, 5, None)
    assert len(cl.load("mine.npz", tmp_path).train) == 8  # in the data folder
    with pytest.raises(UnknownNameError, match="did you mean 'digits'"):
        cl.load("digts")
    with pytest.raises(ConfigError, match="the data set 'digits' takes no options; leave out test"):
        cl.load("digits", test=0.5)
    with pytest.raises(UnknownNameError) as caught:
        cl.load("mine.npz", tmp_path, tset=1)
    assert (
        str(caught.value) == "unknown option 'tset' in the data 'mine.npz'; did you mean 'test' or 'target' or 'task'?"
    )


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_regression_from_a_csv_learns(say: Any) -> None:  # noqa: F811
    x, y = patients()
    write_csv(Path("stay.csv"), {"age": x[:, 0], "dose": x[:, 1], "score": x[:, 2], "days": y})
    Path("stay.toml").write_text(
        f'data = {{ path = "stay.csv", target = "days", standardise = true }}\n{SMALL}{MLP}rounds = 20\n'.replace(
            "rounds = 2\n", "", 1
        )
    )
    said = say("run", "stay.toml", "--quiet")
    assert said.code == 0
    first, *_, last = lines_of("stay")
    assert last["test_loss"] < 0.2 * first["test_loss"]
    assert last["test_mae"] < last["test_rmse"] < 1 and last["test_r2"] > 0.8 and "test_accuracy" not in last


def test_a_regression_that_diverges_is_told_to_standardise(say: Any) -> None:  # noqa: F811
    x, y = patients()
    write_csv(Path("stay.csv"), {"age": 1e9 * x[:, 0], "dose": x[:, 1], "days": y})
    Path("stay.toml").write_text(f'data = {{ path = "stay.csv", target = "days" }}\n{SMALL}{MLP}')
    said = say("run", "stay.toml", "--quiet")
    assert said.code == 3 and said.err.splitlines()[-1] == (
        "error: stay: nobody could train in round 2: no client had a batch with a finite loss and finite gradients; "
        "lower the learning rate, clip the gradients, set standardise = true in [data], or look for values in the data "
        "that are not finite"
    )
    again = say("run", "stay.toml", "--quiet", "--overwrite", "--set", "data.standardise=true")
    assert (again.code, again.err) == (0, "")


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "bce"])
def test_a_column_of_outputs_is_no_matrix_of_pairs(loss: str) -> None:
    out, y = torch.tensor([[0.5], [2.0], [-1.0]]), torch.tensor([0.0, 1.0, 1.0])
    assert torch.equal(LOSSES[loss](out, y), LOSSES[loss](out[:, 0], y))
    with pytest.raises(ConfigError, match=r"the outputs have the shape \(2,\) and the targets \(\); give the model"):
        LOSSES[loss](torch.zeros(3, 2), y)


def test_the_loss_follows_the_targets_or_the_run() -> None:
    floats, classes = cl.from_arrays(np.zeros((4, 3)), np.ones(4)), cl.from_arrays(np.zeros((4, 3)), [0, 1, 1, 0])
    base = config.changed(Run(), {"model": {"name": "mlp", "hidden": [4]}}, "x")
    assert build.model_of(base, floats).loss is LOSSES["mse"]
    assert build.model_of(base, floats).model.head.out_features == 1
    assert build.model_of(base, classes).loss is LOSSES["cross_entropy"]
    binary = build.model_of(config.changed(base, {"loss": "bce"}, "x"), classes)
    assert binary.model.head.out_features == 1
    loss = binary.loss(torch.zeros(4, 1), classes.y)
    assert math.isclose(float(loss), math.log(2), rel_tol=1e-6)


def test_binary_scores_have_an_accuracy(say: Any) -> None:  # noqa: F811
    x, y = patients()
    np.savez("mine.npz", x=x.astype(np.float32), y=(y > 3).astype(np.int64))
    Path("two.toml").write_text(f'data = "mine.npz"\nloss = "bce"\n{SMALL}{MLP}'.replace("rounds = 2", "rounds = 15"))
    assert say("run", "two.toml", "--quiet").code == 0
    assert lines_of("two")[-1]["test_accuracy"] >= 0.8


def test_a_resumed_run_notices_other_data(say: Any) -> None:  # noqa: F811
    x, y = patients()
    np.savez("mine.npz", x=x, y=y)
    Path("a.toml").write_text(f'data = "mine.npz"\n{SMALL}{MLP}')
    assert say("run", "a.toml", "--quiet").code == 0
    kept = json.loads(Path("runs/a/seed-0/environment.json").read_text())["inputs"]["the data mine.npz"]
    assert kept == digest(*(getattr(cl.load("mine.npz"), part) for part in ("train", "test")))
    assert say("run", "a.toml", "--quiet", "--resume", "--rounds", "3").code == 0
    before = Path("runs/a/seed-0/metrics.jsonl").read_text()
    x[0, 0] += 1
    np.savez("mine.npz", x=x, y=y)
    assert mistake(say("run", "a.toml", "--quiet", "--resume", "--rounds", "4")) == (
        "runs/a/seed-0 began with other content: the data mine.npz changed since; give what it began with, start over "
        "with --overwrite, or choose another --out"
    )
    assert Path("runs/a/seed-0/metrics.jsonl").read_text() == before


def test_hospitals_are_clients(say: Any) -> None:  # noqa: F811
    x, y = patients(60)
    wards = [f"ward-{k % 3}" for k in range(60)]
    write_csv(Path("a.csv"), {"ward": wards, "a": x[:, 0], "b": x[:, 1], "y": y})
    Path("a.toml").write_text(
        'data = { path = "a.csv", group = "ward" }\nclients = 3\nrounds = 1\nper_client = true\n'
        f'partition = {{ name = "natural" }}\n{MLP}'
    )
    assert say("run", "a.toml", "--quiet").code == 0
    assert list(lines_of("a")[0]["clients"]) == ["ward-0", "ward-1", "ward-2"]


def test_data_of_a_plugin_are_compared_as_well(say: Any) -> None:  # noqa: F811
    Path("mine.py").write_text(
        "import cutlayer as cl, numpy as np\nfrom cutlayer.data import Dataset\n"
        "def load(root):\n    x = np.loadtxt('x.txt')\n    data = cl.from_arrays(x, x.sum(1))\n"
        "    return Dataset('mine', data, data)\nDATA = {'plugged': load}\n"
    )
    np.savetxt("x.txt", patients(40)[0])
    Path("a.toml").write_text(f'data = "plugged"\n{SMALL}{MLP}')
    words = ("run", "a.toml", "--quiet", "--plugin", "mine.py")
    assert say(*words).code == 0
    assert say(*words, "--resume", "--rounds", "3").code == 0
    np.savetxt("x.txt", patients(40)[0] + 1)
    assert mistake(say(*words, "--resume", "--rounds", "4")).startswith(
        "runs/a/seed-0 began with other content: the data plugged changed since; give what it began with"
    )


def test_a_device_reads_its_file_with_the_columns_of_the_run(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"age": [1, 2], "days": [3, 4], "note": ["x", "y"]})
    table = {"path": "all.csv", "target": "days", "features": ["age"], "task": "regression"}
    run = config.changed(Run(), {"data": table}, "x")
    device = DeviceSettings(data=str(path))
    found = device._data(run, 0)
    assert (found.x.tolist(), found.y.tolist(), found.num_classes) == ([[1], [2]], [3, 4], None)
    standardised = config.changed(run, {"data": {"standardise": True}}, "x")
    with pytest.raises(DataError, match=r"which no device has; give the run a \[sample\] with mean and std"):
        device._data(standardised, 0)


@pytest.mark.parametrize("task", ["auto", "classes"])
def test_whole_floats_are_a_regression_unless_told_otherwise(
    task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, _ = patients()
    np.savez(tmp_path / "floats.npz", x=x, y=np.arange(len(x)) % 3 + 0.0)
    with caplog.at_level("INFO", "cutlayer"):
        found = cl.load(str(tmp_path / "floats.npz"), task=task)
    said = 'the targets are floats, so this is a regression; task = "classes" makes them classes'
    assert (found.train.num_classes, said in caplog.text) == ((None, True) if task == "auto" else (3, False))


def test_pictures_with_channels_last_are_found_before_training(say: Any) -> None:  # noqa: F811
    x = np.random.default_rng(0).normal(size=(60, 8, 8, 3)).astype(np.float32)
    np.savez("mine.npz", x=x, y=np.arange(60) % 2)
    Path("mine.toml").write_text(f'data = "mine.npz"\n{SMALL}batching = {{ size = 4 }}\n')
    assert mistake(say("run", "mine.toml", "--quiet")) == (
        "mine.npz: inputs have the shape (8, 8, 3), and the model 'cnn' reads channels first; put the channels first: "
        "x.transpose(0, 3, 1, 2)"
    )
    np.savez("mine.npz", x=x.transpose(0, 3, 1, 2), y=np.arange(60) % 2)
    assert say("run", "mine.toml", "--quiet").code == 0


def test_a_path_on_the_command_line_may_have_options(say: Any) -> None:  # noqa: F811
    write_csv(Path("x.csv"), {"a": np.arange(40) / 7, "label": [f"{k % 2}.0" for k in range(40)]})
    words = ["--set", "data=x.csv", "--set", "data.task=classes", "--set", "model=mlp", "--set", "cut=1"]
    (run,) = say("run", "digits", "--only", "sl", *words, "--dry-run", "--json").json["runs"]
    assert run["data"] == {"path": "x.csv", "task": "classes", "standardise": False}
