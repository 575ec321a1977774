"""The data of one device: every form gives the same samples, and what is not a sample of the run is refused."""

import logging
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from cutlayer.data import Arrays, from_arrays
from cutlayer.data.local import local
from cutlayer.data.sample import Sample
from cutlayer.errors import ConfigError, DataError

EXPECTED = (
    "an .npz, .npy, .safetensors, .csv, .tsv or .parquet file, a folder with one of them, one that datasets saved, or "
    "a folder with one sub-folder of images for each class"
)
FOUR = Sample(shape=(4,), classes=3)
GREY = Sample(shape=(1, 2, 3), classes=3)
COLOUR = Sample(shape=(3, 2, 4), classes=3)


def features(num=6):
    rng = np.random.default_rng(0)
    return rng.normal(size=(num, 4)), np.arange(num) % 3


def pixels(shape, num=6):
    return np.random.default_rng(1).integers(0, 256, (num, *shape), dtype=np.uint8), np.arange(num) // 2


def write_table(path, x, y, label="label"):
    """The label is the first column."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    names = [label, *(f"f{k}" for k in range(x.shape[1]))]
    rows = [names, *([str(target), *map(repr, row)] for target, row in zip(y.tolist(), x.tolist(), strict=True))]
    path.write_text("".join(delimiter.join(row) + "\n" for row in rows))


def write_pictures(root, x, y):
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        folder = root / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(folder / f"{i}.png")


def write(path, x, y):
    if path.suffix == ".npz":
        np.savez(path, x=x, y=y)
    elif path.suffix == ".safetensors":
        save_file({"x": torch.tensor(x), "y": torch.tensor(y)}, path)
    elif path.suffix:
        write_table(path, x, y)
    else:
        write_pictures(path, x, y)
    return path


def refusal(path, sample=None):
    """What is said of this data, with the folder of the test left out."""
    with pytest.raises(DataError) as caught:
        local(path, sample=sample)
    return str(caught.value).replace(f"{path.parent}/", "")


def equal(a, b):
    return (
        a.x.dtype == b.x.dtype
        and a.y.dtype == b.y.dtype
        and torch.equal(a.x, b.x)
        and torch.equal(a.y, b.y)
        and a.num_classes == b.num_classes
    )


# --- a sample ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": ()}, "shape is (), but it must be whole numbers above 0, at least one."),
        ({"shape": (3, 0)}, "shape is (3, 0), but it must be whole numbers above 0, at least one."),
        ({"classes": 0}, "classes is 0, but it must be a whole number above 0."),
        ({"dtype": "float16"}, "dtype is 'float16', but it must be float32, float64 or int64."),
        (
            {"mean": (0.5,), "std": (0.5,)},
            "mean is (0.5,), but it must be 3 numbers, one a channel of the shape (3, 2, 4), or empty.",
        ),
        (
            {"mean": (0.0, 0.0, float("nan"))},
            "mean is (0.0, 0.0, nan), but it must be 3 numbers, one a channel of the shape (3, 2, 4), or empty.",
        ),
        (
            {"mean": (0.0, 0.0, 0.0), "std": (1.0, 0.0, 1.0)},
            "std is (1.0, 0.0, 1.0), but it must be numbers above 0.",
        ),
        ({"mean": (0.0, 0.0, 0.0)}, "mean and std belong together; give both of them or neither."),
        (
            {"dtype": "int64", "mean": (0.0,) * 3, "std": (1.0,) * 3},
            "mean and std need inputs of a float type, but dtype is 'int64'; leave them out.",
        ),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        Sample(**{"shape": (3, 2, 4)} | options)
    assert str(caught.value) == message


def checked(x, y, sample):
    with pytest.raises(DataError) as caught:
        sample.checked(Arrays(x=x, y=y))
    return str(caught.value)


def test_checked_data_gets_its_type_and_its_classes():
    arrays = from_arrays(np.eye(4), np.array([0, 0, 1, 1]), groups=["a", "b", "a", "b"])
    found = Sample(shape=(4,), classes=7, dtype="float64").checked(arrays)
    assert (found.x.dtype, found.y.dtype, found.num_classes) == (torch.float64, torch.int64, 7)
    assert found.group_names == ("a", "b")
    regression = Sample(shape=(4,), dtype="float64").checked(from_arrays(np.eye(4), np.ones(4)))
    assert (regression.y.dtype, regression.num_classes) == (torch.float64, None)
    tokens = Sample(shape=(2,), dtype="int64").checked(Arrays(x=torch.tensor([[1, 2]]), y=torch.tensor([[2, 3]])))
    assert (tokens.x.dtype, tokens.num_classes) == (torch.int64, None)


def test_checked_data_has_one_input_per_sample():
    x, y = torch.zeros(2, 4), torch.zeros(2).long()
    both = checked({"a": x, "b": x}, y, FOUR)
    assert both == "a sample has the inputs a, b; give one input of the shape (4,)"
    assert checked(x[:0], y[:0], FOUR) == "there are no samples; give at least one"


def test_labels_are_counted_and_the_first_wrong_one_is_named():
    x = torch.zeros(5, 4)
    assert checked(x, torch.tensor([0, 2, 3, 1, -1]), FOUR) == (
        "2 of 5 labels are out of range: 3 classes have the labels 0 to 2, and sample 2 has 3; correct or remove them"
    )
    assert checked(x, torch.zeros(5), FOUR) == (
        "labels have the type torch.float32, but there are 3 classes; give whole numbers from 0"
    )
    assert checked(x, torch.zeros(5, 1).long(), FOUR) == "labels have the shape (5, 1); give one number a sample"


def test_the_shape_is_never_guessed():
    y = torch.zeros(2).long()
    assert checked(torch.zeros(2, 2, 4, 3), y, COLOUR) == (
        "inputs have the shape (2, 4, 3), but a sample here has (3, 2, 4); "
        "put the channels first: x.transpose(0, 3, 1, 2)"
    )
    assert checked(torch.zeros(2, 2, 3), y, GREY) == (
        "inputs have the shape (2, 3), but a sample here has (1, 2, 3); give them their one channel: x[:, None]"
    )
    assert checked(torch.zeros(2, 24), y, COLOUR) == (
        "inputs have the shape (24,), but a sample here has (3, 2, 4); bring them to that shape"
    )


def test_the_transpose_that_is_told_is_the_right_one(tmp_path):
    x, y = pixels((3, 2, 4))
    last = np.moveaxis(x, 1, -1)
    told = refusal(write(tmp_path / "a.npz", last, y), COLOUR).rsplit("x.transpose", 1)[1]
    order = [int(number) for number in told.strip("()").split(",")]
    np.testing.assert_array_equal(last.transpose(order), x)


def test_numbers_must_be_finite_in_the_type_of_the_run():
    x, y = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5).long()
    x[1, 2], x[3, 0], x[3, 1] = float("nan"), float("inf"), float("nan")
    message = (
        "{} of 5 samples have inputs that are NaN or infinite in torch.float32, the first of them sample {}; "
        "correct or remove them"
    )
    assert checked(x, y, FOUR) == message.format(2, 1)
    huge = torch.zeros(5, 4, dtype=torch.float64)
    huge[4] = 1e300
    assert checked(huge, y, FOUR) == message.format(1, 4)
    assert torch.equal(Sample(shape=(4,), dtype="float64").checked(Arrays(x=huge, y=y)).x, huge)
    targets = torch.tensor([0.0, 1.0, float("nan"), 0.0, 0.0])
    assert checked(torch.zeros(5, 4), targets, Sample(shape=(4,))) == (
        "1 of 5 samples have targets that are NaN or infinite in torch.float32, the first of them sample 2; "
        "correct or remove them"
    )


# --- the forms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_features_are_the_same_through_every_form(tmp_path, num, dtype):
    x, y = features(num)
    wanted = Arrays(x=torch.tensor(x).to(getattr(torch, dtype)), y=torch.tensor(y), num_classes=3)
    sample = Sample(shape=(4,), classes=3, dtype=dtype)
    for suffix in (".npz", ".safetensors", ".csv", ".tsv"):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        path = write(folder / f"a{suffix}", x, y)
        assert equal(local(path, sample=sample), wanted), suffix
        assert equal(local(folder, sample=sample), wanted), suffix
        assert equal(local(path), from_arrays(x, y)), suffix


@pytest.mark.parametrize("shape", [(1, 2, 3), (3, 2, 4)])
@pytest.mark.parametrize("num", [1, 6])
def test_pictures_are_the_same_through_every_form(tmp_path, shape, num):
    x, y = pixels(shape, num)
    wanted = from_arrays(x, y, 3)
    assert float(wanted.x.max()) <= 1
    for name in ("a.npz", "a.safetensors", "a"):
        path = write(tmp_path / name, x, y)
        assert equal(local(path, sample=Sample(shape=shape, classes=3)), wanted), name
        assert equal(local(path), from_arrays(x, y)), name


def test_every_device_standardises_alike(tmp_path):
    x, y = pixels((3, 2, 4))
    path = write(tmp_path / "a.npz", x, y)
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 2.0)
    found = local(path, sample=Sample(shape=(3, 2, 4), classes=3, dtype="float64", mean=mean, std=std))
    scaled = (x.astype(np.float32) / np.float32(255)).astype(np.float64)
    wanted = (scaled - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_array_equal(found.x.numpy(), wanted)
    table = write(tmp_path / "a.csv", *features())
    by_feature = local(table, sample=Sample(shape=(4,), classes=3, mean=(1.0, 0, 0, 0), std=(2.0, 1, 1, 1)))
    plain = local(table, sample=FOUR)
    assert torch.equal(by_feature.x[:, 0], (plain.x[:, 0] - 1) / 2)
    assert torch.equal(by_feature.x[:, 1:], plain.x[:, 1:])


def test_bytes_are_tokens_where_inputs_are_integers(tmp_path):
    path = write(tmp_path / "a.npz", np.array([[3, 79], [0, 200]], dtype=np.uint8), np.array([1, 0]))
    assert local(path, sample=Sample(shape=(2,), classes=2, dtype="int64")).x.tolist() == [[3, 79], [0, 200]]
    path = write(tmp_path / "b.npz", np.zeros((2, 2)), np.array([1, 0]))
    assert refusal(path, Sample(shape=(2,), classes=2, dtype="int64")) == (
        "b.npz: the inputs have the type torch.float64, but they must be int64; give integers"
    )


@pytest.mark.parametrize("dtype", ["uint16", "int32", ">i2", ">f4", "bool", "float16"])
def test_other_types_of_numbers_are_read(tmp_path, dtype):
    x = np.array([[0, 1, 1, 0], [1, 0, 0, 0]]).astype(dtype)
    labels = np.array([0, 1]).astype("uint16" if dtype == "uint16" else "int8")
    assert local(write(tmp_path / "a.npz", x, labels), sample=FOUR).x.tolist() == x.tolist()
    assert local(tmp_path / "a.npz").x.tolist() == x.tolist()


# --- .npz and .safetensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("images", "labels"), ("data", "targets")])
def test_other_names_of_the_two_arrays(tmp_path, names):
    x, y = features()
    np.savez(tmp_path / "a.npz", **dict(zip(names, (x, y), strict=True)))
    save_file(dict(zip(names, (torch.tensor(x), torch.tensor(y)), strict=True)), tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        assert equal(local(tmp_path / name), from_arrays(x, y))


def test_arrays_of_unknown_names_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros(2), labels=np.zeros(2))
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "none.npz")
    mend = "name the inputs x and the targets y (or images, labels; data, targets)"
    assert refusal(tmp_path / "a.npz") == f"a.npz has the arrays labels, x_train; {mend}"
    assert refusal(tmp_path / "a.safetensors") == f"a.safetensors has the tensors x; {mend}"
    assert refusal(tmp_path / "none.npz") == f"none.npz has no arrays; {mend}"


def test_arrays_that_do_not_belong_together(tmp_path):
    x, y = features()
    assert refusal(write(tmp_path / "a.npz", x, y[1:]), FOUR) == (
        "a.npz: x has 6 samples and y has 5; give each sample one input and one target"
    )
    assert refusal(write(tmp_path / "b.npz", x[:0], y[:0]), FOUR) == "b.npz: there are no samples; give at least one"
    assert refusal(tmp_path / "b.npz") == "b.npz: there are no samples; give at least one"
    assert refusal(write(tmp_path / "c.npz", x, np.array(1))) == (
        "c.npz: y is a single number; its first dimension must be the samples"
    )


def test_arrays_that_are_no_numbers(tmp_path):
    x, y = features()
    assert refusal(write(tmp_path / "a.npz", x, y.astype(str))) == "a.npz: y has the type <U21; give numbers"
    message = "x has the type torch.complex64; give real numbers"
    for name in ("b.npz", "b.safetensors"):
        assert refusal(write(tmp_path / name, x.astype(np.complex64), y), FOUR) == f"{name}: {message}"
    np.savez(tmp_path / "c.npz", x=np.array([{}]), y=y)
    assert refusal(tmp_path / "c.npz") == (
        "cannot read c.npz: Object arrays cannot be loaded when allow_pickle=False. Replace the file with a fresh copy."
    )


def test_files_say_what_is_wrong_with_their_samples(tmp_path):
    x, y = features()
    y[4] = 3
    label = (
        "1 of 6 labels are out of range: 3 classes have the labels 0 to 2, and sample 4 has {}; correct or remove them"
    )
    for name in ("a.npz", "a.safetensors", "a.csv"):
        assert refusal(write(tmp_path / name, x, y), FOUR) == f"{name}: {label.format(3)}"
    y[4] = -1
    for name in ("a.npz", "a.safetensors", "a.csv"):
        assert refusal(write(tmp_path / name, x, y), FOUR) == f"{name}: {label.format(-1)}"
    y[4], x[2, 1] = 0, np.nan
    nan = "1 of 6 samples have inputs that are NaN or infinite in torch.float32, the first of them sample 2; "
    for name in ("a.npz", "a.safetensors", "a.csv"):
        assert refusal(write(tmp_path / name, x, y), FOUR) == f"{name}: {nan}correct or remove them"
        assert refusal(tmp_path / name) == f"{name}: {nan}correct or remove them"
    for name in ("a.npz", "a.safetensors", "a.csv"):
        assert refusal(write(tmp_path / name, x[:, :3], y), FOUR) == (
            f"{name}: inputs have the shape (3,), but a sample here has (4,); bring them to that shape"
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.npz", "cannot read a.npz: File is not a zip file. Replace the file with a fresh copy."),
        (
            "a.safetensors",
            "cannot read a.safetensors: Error while deserializing header: header too small. "
            "Replace the file with a fresh copy.",
        ),
        ("a.csv", "a.csv is empty; name the columns in its first line, and give a sample a line"),
        ("a.tsv", "a.tsv is empty; name the columns in its first line, and give a sample a line"),
    ],
)
def test_an_empty_file_is_refused(tmp_path, name, reason):
    (tmp_path / name).write_bytes(b"")
    assert refusal(tmp_path / name, FOUR) == reason


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_file_that_is_cut_off_is_refused(tmp_path, name):
    path = write(tmp_path / name, *features())
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        assert refusal(path, FOUR).startswith(f"cannot read {name}: ")


def test_a_file_that_is_packed_in_an_unknown_way_is_refused(tmp_path):
    path = write(tmp_path / "a.npz", *features())
    data = path.read_bytes()
    directory = data.index(b"PK\x01\x02")
    path.write_bytes(data[: directory + 10] + b"\x63" + data[directory + 11 :])  # the method of compression
    assert refusal(path, FOUR) == (
        "cannot read a.npz: That compression method is not supported. Replace the file with a fresh copy."
    )


def test_a_file_in_a_folder_is_named(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.npz").write_bytes(b"")
    assert refusal(tmp_path / "d").startswith("cannot read d/a.npz: ")


# --- tables -----------------------------------------------------------------------------------------------------------


def table(tmp_path, text, name="a.csv"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize("label", ["label", "Y", " target "])
def test_the_column_of_the_label_goes_by_its_name(tmp_path, caplog, label):
    caplog.set_level(logging.INFO, "cutlayer")
    found = local(table(tmp_path, f"a,{label},b\n1,2,3\n4,5,6\n"))
    assert (found.x.tolist(), found.y.tolist()) == ([[1, 3], [4, 6]], [2, 5])
    assert caplog.messages == []


def test_a_label_goes_before_a_coordinate_y(tmp_path):
    found = local(table(tmp_path, "x,y,label\n1,2,0\n"))
    assert (found.x.tolist(), found.y.tolist()) == ([[1, 2]], [0])


def test_the_last_column_is_the_label_where_none_is_named_so(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cutlayer")
    path = table(tmp_path, "a,b,kind\n1,2,0\n")
    assert local(path).y.tolist() == [0]
    assert caplog.messages == [f"{path}: no column is named label, y or target, so the last one, kind, is the label"]


def test_labels_of_a_table_are_classes_or_a_regression(tmp_path):
    whole, fraction = "a,y\n1,0\n2,-3\n", "a,y\n1,0\n2,0.5\n"
    regression = Sample(shape=(1,))
    for text in (whole, fraction):  # also where all targets of this device happen to be whole
        found = local(table(tmp_path, text), sample=regression)
        assert (found.y.dtype, found.num_classes) == (torch.float32, None)
    assert local(table(tmp_path, fraction)).y.tolist() == [0, 0.5]
    assert local(table(tmp_path, "a,y\n1,0\n2,4\n")).num_classes == 5
    assert local(table(tmp_path, "a,y\n1,0.0\n2,4.0\n")).num_classes is None
    assert local(table(tmp_path, "a,y\n1,1.0\n"), sample=Sample(shape=(1,), classes=2)).y.tolist() == [1]
    for label in ("0.5", "1e300", "nan"):
        assert refusal(table(tmp_path, f"a,y\n1,0\n2,{label}\n"), Sample(shape=(1,), classes=2)) == (
            f"line 3 of a.csv has the label {label!r}, but there are 2 classes; give a whole number"
        )


def test_tables_as_office_programs_leave_them(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"label","a"\r\n1, 2.5 \r\n\r\n0,"3"\r\n')
    found = local(tmp_path / "a.csv")
    assert (found.x.tolist(), found.y.tolist()) == ([[2.5], [3.0]], [1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,label\n", "a.csv: there are no samples; give at least one"),
        ("label\n1\n", "a.csv has one column; give at least a feature and the label, with commas between"),
        (
            "a\tlabel\n1\t1\n",
            "a.csv has one column; it seems to be separated by tabs; give at least a feature and the label, with "
            "commas between",
        ),
        (
            "a;label\n1,5;1\n",
            "a.csv has one column; it seems to be separated by ';'; give at least a feature and the label, with "
            "commas between",
        ),
        (
            "1,2\n3,4\n",
            "a.csv: the first line seems to hold data, not names; put a line with the names of the columns above it",
        ),
        ("a,y,Y\n1,2,3\n", "a.csv has more than one column 'y'; keep the one with the labels"),
        ("a,y\n1,2\n\n1,2,3\n", "line 4 of a.csv has 3 cells, but the header has 2; give every column one"),
        ("a,y\n1,2\n,3\n", "line 3 of a.csv has nothing in the column 'a'; fill it in or remove the line"),
        ("a,y\n1,2\n1, \n", "line 3 of a.csv has nothing in the column 'y'; fill it in or remove the line"),
        (
            "a,y\nred,2\n",
            "line 2 of a.csv has 'red' in the column 'a'; give each category a number, or list the numeric columns in "
            "features = [...]",
        ),
        (
            "a,y\n1,cat\n",
            "line 2 of a.csv has the label 'cat'; number the classes from 0, the same on every device",
        ),
    ],
)
def test_tables_that_are_refused(tmp_path, text, message):
    assert refusal(table(tmp_path, text), Sample(shape=(1,), classes=3)) == message


def test_a_table_in_another_encoding(tmp_path):
    (tmp_path / "a.csv").write_bytes("a,y\n1,M\u00e4use\n".encode("latin-1"))
    assert refusal(tmp_path / "a.csv") == "a.csv is not in UTF-8: see line 2; save it as UTF-8"


# --- pictures ---------------------------------------------------------------------------------------------------------


def picture(path, size=(3, 2), mode="L", value=128):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_folders_by_number_keep_their_numbers(tmp_path):
    for name in ("2", "10"):
        picture(tmp_path / "d" / name / "a.png")
    found = local(tmp_path / "d", sample=Sample(shape=(1, 2, 3), classes=11))
    assert (found.y.tolist(), found.num_classes) == ([10, 2], 11)
    assert refusal(tmp_path / "d", GREY) == (
        "d: 1 of 2 labels are out of range: 3 classes have the labels 0 to 2, and sample 0 has 10; "
        "correct or remove them"
    )


def test_folders_by_name_are_numbered_where_all_are_there(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cutlayer")
    for name in ("dog", "cat"):
        picture(tmp_path / "d" / name / "a.png")
    assert local(tmp_path / "d").y.tolist() == [0, 1]
    assert refusal(tmp_path / "d", GREY) == (
        "d has 2 sub-folders for 3 classes, so numbers by the order of their names would differ from those of other "
        "devices; name each sub-folder by the number of its class"
    )
    caplog.clear()
    (tmp_path / "d" / "bee").mkdir()  # a class without a picture keeps the numbers of the others
    assert local(tmp_path / "d", sample=GREY).y.tolist() == [1, 2]
    assert caplog.messages == [f"{tmp_path / 'd'}: the classes are 0 bee, 1 cat, 2 dog"]


def test_pictures_get_the_channels_of_a_sample(tmp_path):
    picture(tmp_path / "d" / "0" / "grey.png", value=51)
    picture(tmp_path / "d" / "1" / "red.PNG", mode="RGB", value=(255, 0, 0))
    grey = local(tmp_path / "d", sample=GREY)
    np.testing.assert_allclose(grey.x[:, 0, 0, 0], [0.2, 76 / 255], rtol=1e-6)
    colour = local(tmp_path / "d", sample=Sample(shape=(3, 2, 3), classes=2))
    np.testing.assert_allclose(colour.x[:, :, 1, 2], [[0.2, 0.2, 0.2], [1, 0, 0]], rtol=1e-6)


def test_pictures_that_are_refused(tmp_path):
    good, bad = tmp_path / "d" / "0" / "a.png", tmp_path / "d" / "1" / "b.png"
    picture(good)
    picture(bad, size=(2, 3))
    assert refusal(tmp_path / "d", GREY) == (
        "d/1/b.png has 2 x 3 pixels (width x height), but a sample here has 3 x 2; "
        "resize the pictures, on every device in the same way"
    )
    picture(bad, mode="I;16", value=40000)
    assert refusal(tmp_path / "d", GREY) == "d/1/b.png has pixels of more than 8 bits; save it with 8"
    bad.write_bytes(good.read_bytes()[:-30])
    assert refusal(tmp_path / "d", GREY).startswith("cannot read d/1/b.png: ")
    bad.write_bytes(b"no picture")
    assert refusal(tmp_path / "d", GREY).startswith("cannot read d/1/b.png: cannot identify image file")
    assert refusal(tmp_path / "d", FOUR) == (
        "d/0/a.png is a picture, but a sample here has the shape (4,); pictures are (1, height, width) "
        "or (3, height, width): give the samples as an .npz file"
    )


def test_files_that_are_no_pictures_are_skipped_with_a_warning(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cutlayer")
    picture(tmp_path / "d" / "0" / "a.png")
    (tmp_path / "d" / "0" / "notes.txt").write_text("")
    (tmp_path / "d" / "0" / ".hidden").write_text("")
    assert len(local(tmp_path / "d", sample=GREY)) == 1
    assert caplog.messages == [f"{tmp_path / 'd' / '0'}: left out, as no pictures: notes.txt"]
    (tmp_path / "d" / "0" / "a.png").unlink()
    assert refusal(tmp_path / "d", GREY).startswith("the sub-folders of d hold no pictures; put .png, .jpg, ")


def test_pictures_need_pillow(tmp_path, monkeypatch):
    picture(tmp_path / "d" / "0" / "a.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert refusal(tmp_path / "d", GREY) == (
        "d: its images cannot be decoded without pillow; install it with: pip install 'cutlayer[images]'"
    )


# --- paths ------------------------------------------------------------------------------------------------------------


def test_paths_that_are_refused(tmp_path):
    assert refusal(tmp_path / "none") == f"there is no file or folder none; give {EXPECTED}"
    assert refusal(table(tmp_path, "", "a.txt")) == f"a.txt is of a form that is not read here; give {EXPECTED}"
    assert refusal(table(tmp_path, "", "a.parquet")).startswith("cannot read a.parquet: ")


def test_a_folder_holds_one_set_of_data(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "README.md").write_text("")
    (folder / ".cache").mkdir()
    assert refusal(folder) == f"d holds no data; give {EXPECTED}"
    x, y = features()
    write(folder / "b.npz", x, y)
    assert equal(local(folder), from_arrays(x, y))
    write(folder / "a.csv", x, y)
    assert refusal(folder) == "d holds more than one set of data (a.csv, b.npz); give the path of one of them"
    (folder / "a.csv").unlink()
    picture(folder / "0" / "a.png")
    assert refusal(folder) == "d holds more than one set of data (b.npz, 0/); give the path of one of them"
