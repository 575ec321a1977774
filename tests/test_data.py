"""Arrays and the readers of the published file formats."""

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from cutlayer.data import Arrays, from_arrays, from_dataset, load, names
from cutlayer.data.arrays import split_off
from cutlayer.errors import ConfigError, DataError, UnknownNameError

# --- arrays -----------------------------------------------------------------------------------------------------------


def small():
    return Arrays(
        x={"a": torch.arange(6.0).reshape(3, 2), "n": torch.arange(3)}, y=torch.tensor([2, 0, 1]), num_classes=3
    )


def test_take_selects_the_same_samples_everywhere():
    taken = small().take([2, 0])
    assert taken.x["a"].tolist() == [[4, 5], [0, 1]]
    assert taken.x["n"].tolist() == [2, 0]
    assert taken.y.tolist() == [1, 2]
    assert taken.num_classes == 3
    assert len(small().take([])) == 0
    assert small().take(np.array([False, True, True])).y.tolist() == [0, 1]


def test_cast_and_to_leave_integers_alone():
    half = small().cast(torch.float16).to("cpu")
    assert (half.x["a"].dtype, half.x["n"].dtype, half.y.dtype) == (torch.float16, torch.int64, torch.int64)
    regression = Arrays(x=torch.ones(2, 1), y=torch.ones(2)).cast(torch.float64)
    assert (regression.x.dtype, regression.y.dtype) == (torch.float64, torch.float64)


def test_a_column_of_labels_is_one_label_a_sample():
    for y in (np.array([[0], [2], [1]]), torch.tensor([[0], [2], [1]])):
        found = from_arrays(np.zeros((3, 2)), y)
        assert (found.y.tolist(), found.num_classes) == ([0, 2, 1], 3)
    assert from_arrays(np.zeros((3, 2)), [[0], [2], [1]], num_classes=4).y.shape == (3,)
    assert from_arrays(np.zeros((3, 2)), [[0.5], [2.0], [1.0]]).y.shape == (3, 1)
    assert from_arrays(np.zeros((3, 2)), [[0, 1], [2, 2], [1, 0]]).y.shape == (3, 2)


def test_from_arrays_types():
    images = from_arrays(np.array([[0, 255], [51, 102]], np.uint8), np.array([0, 4], np.uint8))
    assert images.x.dtype == torch.float32
    assert images.x.tolist() == [[0, 1], [pytest.approx(0.2), pytest.approx(0.4)]]
    assert (images.y.dtype, images.num_classes) == (torch.int64, 5)
    assert from_arrays(torch.tensor([[255]], dtype=torch.uint8), [0]).x.tolist() == [[1]]
    assert from_arrays(np.zeros((2, 3)), [0.5, 1.5]).x.dtype == torch.float32
    assert from_arrays(torch.zeros(2, 3, dtype=torch.float64), [0, 1]).x.dtype == torch.float64
    assert from_arrays({"ids": np.zeros((2, 3), np.int32)}, [0, 1], num_classes=9).x["ids"].dtype == torch.int64
    regression = from_arrays(np.zeros((2, 3)), np.array([0.5, 1.5]))
    assert (regression.y.tolist(), regression.y.dtype, regression.num_classes) == ([0.5, 1.5], torch.float32, None)
    assert from_arrays(np.zeros((2, 3)), np.zeros((2, 3), int)).num_classes is None


def test_groups_follow_the_samples():
    arrays = from_arrays(np.arange(5.0)[:, None], [0, 1, 0, 1, 0], groups=["mia", "ben", "mia", "zoe", "ben"])
    assert (arrays.group_names, arrays.groups.tolist()) == (("ben", "mia", "zoe"), [1, 0, 1, 2, 0])
    taken = arrays.take([3, 0]).to("cpu").cast(torch.float64)
    assert (taken.groups.tolist(), taken.groups.dtype) == ([2, 1], torch.int64)
    assert taken.group_names == ("ben", "mia", "zoe")
    for part in split_off(arrays, 0.4, key=1):
        assert part.groups.tolist() == [arrays.groups[int(i)].item() for i in part.x[:, 0]]
    assert arrays.of_groups(["zoe", "ben"]).x[:, 0].tolist() == [1, 3, 4]
    assert len(arrays.of_groups([])) == 0
    with pytest.raises(UnknownNameError) as caught:
        arrays.of_groups(["ben", "mio"])
    assert str(caught.value) == "unknown group 'mio'; did you mean 'mia'?"
    assert from_arrays(np.zeros((3, 1)), [0, 0, 0], groups=[10, 9, 10]).group_names == ("9", "10")
    assert from_arrays(np.zeros((1, 1)), [0]).groups is None


def test_from_arrays_does_not_share_memory_with_numpy():
    x = np.zeros((1, 2), np.float32)
    arrays = from_arrays(x, [0])
    x[0, 0] = 7
    assert arrays.x.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: from_arrays(np.zeros((4, 1)), [0, 1, 2, 12], num_classes=10),
            "label 12 of sample 3 is out of range: 10 classes have the labels 0 to 9",
        ),
        (
            lambda: from_arrays(np.zeros((2, 1)), [0, -1]),
            "label -1 of sample 1 is out of range: 1 classes have the labels 0 to 0",
        ),
        (
            lambda: from_arrays({"a": np.zeros((4, 1)), "b": np.zeros((3, 1))}, [0, 1, 2, 3]),
            "x['b'] has 3 samples and y has 4; give each sample one input and one target",
        ),
        (
            lambda: from_arrays(np.zeros((2, 1)), [0.0, 1.0], num_classes=2),
            "labels have the type torch.float32; give integers, or no num_classes for a regression",
        ),
        (
            lambda: from_arrays(np.zeros((2, 1)), [0, 1], num_classes=0),
            "num_classes is 0; give at least 1, or None for data that is not a classification",
        ),
        (lambda: from_arrays(np.array(["a", "b"]), [0, 1]), "x has the type <U1; give numbers"),
        (lambda: from_arrays(1.0, [0]), "x is a single number; its first dimension must be the samples"),
        (lambda: from_dataset([]), "the data set has no items; give at least one"),
        (
            lambda: from_dataset([(torch.zeros(2), 0), 5]),
            "item 1 of the data set is a int, not a pair (x, y) or a mapping with labels; return both from it",
        ),
        (
            lambda: from_dataset([(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 8, 8), 0), (torch.zeros(3, 9, 8), 1)]),
            "item 2 of the data set has x of shape (3, 9, 8), item 0 has (3, 8, 8); "
            "bring all items to one shape, for example by resizing, or with pad= for tokens",
        ),
        (
            lambda: from_dataset([({"a": 1.0}, 0), ({"b": 1.0}, 0)]),
            "item 1 of the data set has x['b'], y, item 0 has x['a'], y; give every item the same keys",
        ),
        (
            lambda: Arrays(x=torch.zeros(3, 1), y=torch.zeros(3), groups=torch.zeros(2, dtype=torch.int64)),
            "groups have the type torch.int64 and the shape (2,) for 3 samples; give one int64 a sample",
        ),
        (
            lambda: Arrays(x=torch.zeros(2, 1), y=torch.zeros(2), groups=torch.tensor([0, 2]), group_names=("a", "b")),
            "groups go from 0 to 2, but there are 2 group names; "
            "give each group a name and each sample the index of one",
        ),
        (
            lambda: small().of_groups(["a"]),
            "the samples have no groups to choose from; give each sample its group",
        ),
        (
            lambda: split_off(from_arrays(np.zeros((1, 1)), [0]), 0.5, key=0),
            "cannot split 1 samples in two; give at least 2",
        ),
    ],
)
def test_data_errors_say_what_where_and_what_to_do(make, message):
    with pytest.raises(DataError) as caught:
        make()
    assert str(caught.value) == message


def test_from_dataset_stacks_what_a_torch_data_set_gives():
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 0, 2, 1, 0])
    arrays = from_dataset(torch.utils.data.TensorDataset(x, y))
    assert torch.equal(arrays.x, x)
    assert torch.equal(arrays.y, y)
    assert arrays.num_classes == 3
    named = from_dataset([({"a": torch.ones(2), "b": 1.5}, 0.5), ({"a": torch.zeros(2), "b": 2.5}, 1.5)])
    assert named.x["a"].tolist() == [[1, 1], [0, 0]]
    assert named.x["b"].tolist() == [1.5, 2.5]
    assert (named.y.tolist(), named.num_classes) == ([0.5, 1.5], None)


def test_from_dataset_puts_image_objects_channels_first():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    arrays = from_dataset([(Image.fromarray(pixels), 0)], num_classes=2)
    assert torch.equal(arrays.x, torch.tensor(pixels.transpose(2, 0, 1)[None]).float() / 255)
    assert from_dataset([(Image.fromarray(pixels[:, :, 0]), 0)]).x.shape == (1, 1, 2, 4)
    assert from_dataset([(pixels, 0)]).x.shape == (1, 2, 4, 3)  # an array is taken as it is


def test_split_off_divides_by_the_key():
    arrays = from_arrays(np.arange(50.0)[:, None], np.arange(50) % 2)
    rest, held = split_off(arrays, 0.2, key=3)
    assert (len(rest), len(held)) == (40, 10)
    assert sorted([*rest.x[:, 0].tolist(), *held.x[:, 0].tolist()]) == list(range(50))
    assert torch.equal(held.x, split_off(arrays, 0.2, key=3)[1].x)
    assert not torch.equal(held.x, split_off(arrays, 0.2, key=4)[1].x)
    assert [len(part) for part in split_off(arrays, 0.001, key=0)] == [49, 1]
    with pytest.raises(ConfigError) as caught:
        split_off(arrays, 1, key=0)
    assert str(caught.value) == "cannot hold out a fraction of 1; give a number between 0 and 1"


# --- the built-in digits ----------------------------------------------------------------------------------------------


def test_digits_are_the_published_ones():
    digits = load("digits")
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.x.shape[1:] == (1, 8, 8)
    assert digits.train.x.dtype == torch.float32
    counts = torch.bincount(digits.train.y, minlength=10) + torch.bincount(digits.test.y, minlength=10)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # 1797 in all
    test_counts = torch.bincount(digits.test.y).tolist()
    assert all(count // 5 <= part <= count // 5 + 1 for count, part in zip(counts.tolist(), test_counts, strict=True))
    assert digits.train.x.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert digits.train.x.double().std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_the_first_digit_is_the_zero_of_the_publication():
    digits = load("digits")  # the first image is a zero, so it opens the sorted order and is the first test image
    low, high = digits.train.x.min(), digits.train.x.max()
    pixels = (digits.test.x[0, 0] - low) / (high - low) * 16
    assert digits.test.y[0] == 0
    assert pixels.round().int()[:2].tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]


# --- files ------------------------------------------------------------------------------------------------------------


def images(num, shape, num_classes=10, seed=0):
    random = np.random.default_rng((num, seed))
    return random.integers(0, 256, (num, *shape), dtype=np.uint8), random.integers(0, num_classes, num)


def assert_holds(dataset, train, test):
    """The pixels come back exactly: scaled, and standardised by the training set, channel by channel."""
    scaled = train[0].astype(np.float64) / 255
    mean, std = scaled.mean(axis=(0, 2, 3), keepdims=True), scaled.std(axis=(0, 2, 3), keepdims=True)
    for arrays, (x, y) in ((dataset.train, train), (dataset.test, test)):
        assert arrays.x.dtype == torch.float32
        assert np.rint((arrays.x.double().numpy() * std + mean) * 255).astype(int).tolist() == x.tolist()
        assert arrays.y.tolist() == y.tolist()
    assert dataset.train.x.numpy() == pytest.approx((scaled - mean) / std, abs=1e-6)


def idx_bytes(array):
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_idx(folder, train, test, dot=False, packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    mark, end = "." if dot else "-", ".gz" if packed else ""
    for name, (x, y) in (("train", train), ("t10k", test)):
        for kind, array in (("images{}idx3", x[:, 0]), ("labels{}idx1", y)):
            data = idx_bytes(array)
            path = folder / f"{name}-{kind.format(mark)}-ubyte{end}"
            path.write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", ""),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "fashion_mnist"),
        ("fashion_mnist", "FashionMNIST/raw"),
    ],
)
@pytest.mark.parametrize("spelling", [{}, {"dot": True}, {"packed": True}], ids=["plain", "dot", "gz"])
def test_idx_files(tmp_path, name, folder, spelling):
    train, test = images(7, (1, 28, 28)), images(3, (1, 28, 28))
    write_idx(tmp_path / folder, train, test, **spelling)
    dataset = load(name, tmp_path)
    assert dataset.name == name
    assert_holds(dataset, train, test)


def test_a_named_folder_goes_before_the_root_and_the_other_sets_folder_is_not_read(tmp_path):
    plain, fashion = images(4, (1, 28, 28)), images(5, (1, 28, 28))
    write_idx(tmp_path, plain, plain)
    write_idx(tmp_path / "fashion_mnist", fashion, fashion)
    assert_holds(load("mnist", tmp_path), plain, plain)
    assert_holds(load("fashion_mnist", tmp_path), fashion, fashion)
    assert_holds(load("fashion_mnist", tmp_path / "fashion_mnist"), fashion, fashion)
    with pytest.raises(DataError, match=r"^mnist: no data files under "):
        load("mnist", tmp_path / "fashion_mnist")


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("mnist", (1, 28, 28), lambda x: x[:, 0]),
        ("cifar10", (3, 32, 32), lambda x: x.transpose(0, 2, 3, 1)),
        ("cifar100", (3, 32, 32), lambda x: x),
    ],
)
def test_npz_files(tmp_path, monkeypatch, name, shape, stored):
    train, test = images(5, shape), images(2, shape)
    np.savez(
        tmp_path / f"{name}.npz",
        x_train=stored(train[0]),
        y_train=train[1][:, None],
        x_test=stored(test[0]),
        y_test=test[1],
    )
    monkeypatch.setenv("CUTLAYER_DATA", str(tmp_path))
    assert_holds(load(name), train, test)


BATCHES = [f"data_batch_{i}" for i in range(1, 6)]


def cifar10(write):
    """Write five training batches and a test batch, and return the two sets."""
    batches = [images(2, (3, 32, 32), seed=i) for i in range(6)]
    for name, (x, y) in zip([*BATCHES, "test_batch"], batches, strict=True):
        write(name, x, y)
    return tuple(np.concatenate(part) for part in zip(*batches[:5], strict=True)), batches[5]


def rows(labels, x):
    return np.concatenate([np.stack(labels, axis=1).astype(np.uint8), x.reshape(len(x), -1)], axis=1).tobytes()


def test_cifar10_binary(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    train, test = cifar10(lambda name, x, y: (folder / f"{name}.bin").write_bytes(rows([y], x)))
    assert_holds(load("cifar10", tmp_path), train, test)


def test_cifar100_binary_takes_the_fine_label(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    train, test = images(6, (3, 32, 32), 100), images(3, (3, 32, 32), 100)
    for name, (x, y) in (("train", train), ("test", test)):
        (folder / f"{name}.bin").write_bytes(rows([y // 5, y], x))
    dataset = load("cifar100", tmp_path)
    assert dataset.train.num_classes == 100
    assert_holds(dataset, train, test)


@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar10_python(tmp_path, protocol):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, x, y):
        batch = {
            b"batch_label": b"a batch",
            b"labels": y.tolist(),
            b"data": x.reshape(len(x), -1),
            b"filenames": [b"a.png"],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))

    train, test = cifar10(write)
    assert_holds(load("cifar10", tmp_path), train, test)


def python2_pickle(x, y, label_key):
    """The opcodes that Python 2 and its numpy wrote: byte strings throughout."""

    def short(text):
        return b"U" + bytes([len(text)]) + text

    data = x.reshape(len(x), -1)
    kind = (
        b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R(K\x01"
    array += b"M" + struct.pack("<H", len(data)) + b"M" + struct.pack("<H", data.shape[1]) + b"\x86"
    array += kind + b"K\x00tb\x89T" + struct.pack("<I", data.size) + data.tobytes() + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in y) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(label_key) + labels + b"u."


def test_cifar100_python_as_python_2_wrote_it(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    train, test = images(6, (3, 32, 32), 100), images(3, (3, 32, 32), 100)
    for name, (x, y) in (("train", train), ("test", test)):
        (folder / name).write_bytes(python2_pickle(x, y, b"fine_labels"))
    assert_holds(load("cifar100", tmp_path), train, test)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    trace = tmp_path / "it-ran"
    for name in [*BATCHES, "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({b"data": Evil(trace), b"labels": [0]}, protocol=2))
    with pytest.raises(DataError) as caught:
        load("cifar10", tmp_path)
    assert str(caught.value) == (
        f"cannot read {folder / 'data_batch_1'}: it asks for {os.mkdir.__module__}.mkdir, which no CIFAR batch needs. "
        "Replace the file with a fresh copy."
    )
    assert not trace.exists()


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([1, 2], "it holds a list, not a dict"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "it has no list of numbers under 'labels'"),
        ({"labels": [0], "data": [1]}, "it has no array of unsigned bytes under 'data'"),
        ({"labels": [0], "data": np.zeros((1, 3072), np.int16)}, "it has no array of unsigned bytes under 'data'"),
        ({"labels": [0], "data": np.zeros((2, 3072), np.uint8)}, "it holds data of shape (2, 3072) for 1 labels"),
        ({"labels": [2**70], "data": np.zeros((1, 3072), np.uint8)}, "it has a label of more than 64 bits"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, batch, reason):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*BATCHES, "test_batch"]:
        (folder / name).write_bytes(pickle.dumps(batch, protocol=4))
    with pytest.raises(DataError) as caught:
        load("cifar10", tmp_path)
    assert str(caught.value) == (
        f"cannot read {folder / 'data_batch_1'}: {reason}. Replace the file with a fresh copy."
    )


def test_every_cut_of_a_pickle_is_a_data_error(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    whole = python2_pickle(*images(1, (3, 32, 32)), b"fine_labels")
    (folder / "test").write_bytes(whole)
    for length in [*range(0, 150, 7), len(whole) - 1]:
        (folder / "train").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"cannot read .*train: "):
            load("cifar100", tmp_path)


# --- files that are missing, damaged or wrong -------------------------------------------------------------------------


def refusal(name, root):
    with pytest.raises(DataError) as caught:
        load(name, root)
    return str(caught.value)


def test_missing_files_say_where_and_what(tmp_path, monkeypatch):
    assert refusal("cifar10", tmp_path) == (
        f"cifar10: no data files under {tmp_path}; expected "
        "cifar10.npz, cifar-10-batches-bin/ or cifar-10-batches-py/. "
        "Put them there, or point CUTLAYER_DATA or --data at their folder."
    )
    assert refusal("mnist", tmp_path) == (
        f"mnist: no data files under {tmp_path}/mnist, {tmp_path}/MNIST/raw or {tmp_path}; "
        "expected mnist.npz or train-images-idx3-ubyte and its three companions (or .gz). "
        "Put them there, or point CUTLAYER_DATA or --data at their folder."
    )
    monkeypatch.delenv("CUTLAYER_DATA", raising=False)
    assert refusal("cifar100", None) == (
        "cifar100: no data folder is set; point CUTLAYER_DATA or --data at the folder that holds "
        "cifar100.npz, cifar-100-binary/ or cifar-100-python/."
    )


def test_an_incomplete_folder_names_the_missing_file(tmp_path):
    write_idx(tmp_path, images(2, (1, 28, 28)), images(2, (1, 28, 28)))
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert refusal("mnist", tmp_path) == (
        f"{tmp_path} is incomplete: t10k-labels-idx1-ubyte is missing. Add it, or remove the others."
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train-images-idx3-ubyte", b"<html>", "it is not an IDX file of unsigned bytes"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03\0\0", "its header is cut off"),
        (
            "train-images-idx3-ubyte",
            idx_bytes(np.zeros((2, 28, 28)))[:-1],
            "its header says shape (2, 28, 28), but 1567 bytes follow",
        ),
        (
            "train-images-idx3-ubyte",
            idx_bytes(np.zeros((2, 8, 8))),
            "it holds images of shape (8, 8), expected (28, 28)",
        ),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.zeros(3)), "it holds labels of shape (3,) for 2 images"),
    ],
)
def test_a_damaged_idx_file_is_named_with_the_reason(tmp_path, name, content, reason):
    write_idx(tmp_path, images(2, (1, 28, 28)), images(2, (1, 28, 28)))
    (tmp_path / name).write_bytes(content)
    assert refusal("mnist", tmp_path) == f"cannot read {tmp_path / name}: {reason}. Replace the file with a fresh copy."


def test_a_truncated_gzip_is_named(tmp_path):
    write_idx(tmp_path, images(2, (1, 28, 28)), images(2, (1, 28, 28)), packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    assert refusal("mnist", tmp_path).startswith(f"cannot read {path}: Compressed file ended")


def test_a_truncated_cifar_file_is_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    cifar10(lambda name, x, y: (folder / f"{name}.bin").write_bytes(rows([y], x)[:-1]))
    assert refusal("cifar10", tmp_path) == (
        f"cannot read {folder / 'data_batch_1.bin'}: it has 6145 bytes, not a positive multiple of 3073. "
        "Replace the file with a fresh copy."
    )


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (
            np.zeros((2, 32, 32, 3), np.float32),
            np.zeros(2, int),
            "it holds float32 images of shape (3, 32, 32), expected uint8",
        ),
        (
            np.zeros((2, 28, 28), np.uint8),
            np.zeros(2, int),
            "it holds uint8 images of shape (28, 28), expected uint8 and",
        ),
        (np.zeros((2, 32, 32, 3), np.uint8), np.zeros(3, int), "it holds 3 labels of type int64 for 2 images."),
    ],
)
def test_a_wrong_npz_is_named_with_the_reason(tmp_path, x, y, reason):
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert refusal("cifar10", tmp_path).startswith(f"cannot read {tmp_path / 'cifar10.npz'}: {reason}")


def test_an_npz_that_is_none(tmp_path):
    path = tmp_path / "cifar10.npz"
    path.write_bytes(b"not a zip file")
    assert refusal("cifar10", tmp_path).startswith(f"cannot read {path}: ")
    np.savez(path, x_train=np.zeros(1))
    assert "y_train is not a file in the archive" in refusal("cifar10", tmp_path)
    np.savez(path, x_train=np.array([{}], dtype=object))
    assert "Object arrays cannot be loaded" in refusal("cifar10", tmp_path)


def test_labels_out_of_range_name_the_set_and_the_sample(tmp_path):
    train, (x, _) = images(2, (1, 28, 28)), images(4, (1, 28, 28))
    write_idx(tmp_path, train, (x, np.array([0, 1, 2, 12])))
    assert refusal("mnist", tmp_path) == (
        "mnist, test set: label 12 of sample 3 is out of range: 10 classes have the labels 0 to 9"
    )


def test_names():
    assert names()[:5] == ["digits", "mnist", "fashion_mnist", "cifar10", "cifar100"]
    assert names()[5:9] == ["tiny_imagenet", "ham10000", "shakespeare", "speech_commands"]
    assert names()[9:] == ["sst2", "rte", "wsc", "text"]
    with pytest.raises(UnknownNameError) as caught:
        load("cifar")
    assert str(caught.value) == "unknown data set 'cifar'; did you mean 'cifar10' or 'cifar100'?"
