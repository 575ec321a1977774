"""Picture folders, Shakespeare's roles and spoken words: small files in the published formats, and real ones."""

import csv
import json
import logging
import math
import os
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cutlayer.data import load, speech
from cutlayer.data.partition import Natural
from cutlayer.data.shakespeare import ALPHABET, STRIDE, encoded, windows
from cutlayer.data.speech import FLOOR, log_mel, mel_filters
from cutlayer.errors import DataError


def refusal(name, root):
    with pytest.raises(DataError) as caught:
        load(name, root)
    return str(caught.value)


def real(name):
    """A real data file, in the folder that CUTLAYER_DATA names."""
    path = Path(os.environ.get("CUTLAYER_DATA", "")) / name
    if not os.environ.get("CUTLAYER_DATA") or not path.is_file():
        pytest.skip(f"needs {name} in CUTLAYER_DATA")
    return path


# --- pictures ---------------------------------------------------------------------------------------------------------

WNIDS = ("n02", "n01", "n03")


def picture(path, seed, size=(64, 64), mode="RGB"):
    """Write a smooth random picture, and return its pixels as they will be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size).convert(mode).save(path, format="JPEG")
    with Image.open(path) as image:
        small = image.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)
    return np.asarray(small).transpose(2, 0, 1)


def write_tiny(root):
    """Two training pictures and one test picture of each class, one of them grey; returns their pixels in order."""
    folder = root / "tiny-imagenet-200"
    train = [
        picture(folder / f"train/{wnid}/images/{wnid}_{i}.JPEG", (k, i), mode="L" if (k, i) == (1, 0) else "RGB")
        for k, wnid in enumerate(WNIDS)
        for i in range(2)
    ]
    test = [picture(folder / f"val/images/val_{i}.JPEG", (9, i)) for i in range(3)]
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    rows = [f"val_{i}.JPEG\t{WNIDS[2 - i]}\t0\t0\t62\t62\n" for i in range(3)]
    (folder / "val/val_annotations.txt").write_text("".join(rows))
    return np.array(train), np.array(test)


def pixels(dataset, train):
    """A data set's images as they were before they were standardised by these training images."""
    scaled = train / 255
    mean, std = scaled.mean(axis=(0, 2, 3), keepdims=True), scaled.std(axis=(0, 2, 3), keepdims=True)
    return [np.rint((part.x.double().numpy() * std + mean) * 255) for part in (dataset.train, dataset.test)]


def test_tiny_imagenet_is_decoded_once(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cutlayer")
    train, test = write_tiny(tmp_path)
    dataset = load("tiny_imagenet", tmp_path)
    assert caplog.messages == ["tiny_imagenet: decoding 9 images, once"]
    found = pixels(dataset, train)
    assert np.array_equal(found[0], train)
    assert np.array_equal(found[1], test)
    assert np.ptp(train[2], axis=0).max() == 0  # the grey one: three equal channels
    assert (dataset.train.y.tolist(), dataset.test.y.tolist()) == ([0, 0, 1, 1, 2, 2], [2, 1, 0])
    assert dataset.train.num_classes == 200
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-imagenet-200", "tiny_imagenet.npz"]
    monkeypatch.setitem(sys.modules, "PIL", None)
    again = load("tiny_imagenet", tmp_path)
    assert torch.equal(again.train.x, dataset.train.x)
    assert torch.equal(again.test.x, dataset.test.x)
    (tmp_path / "tiny_imagenet.npz").unlink()
    assert refusal("tiny_imagenet", tmp_path) == (
        "tiny_imagenet: its images cannot be decoded without pillow; install it with: pip install 'cutlayer[images]'"
    )


def test_a_folder_that_cannot_be_written_is_read_all_the_same(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cutlayer")
    train, _ = write_tiny(tmp_path)
    (tmp_path / f".tiny_imagenet.{os.getpid()}.npz").mkdir()  # in the way of the file
    assert np.array_equal(pixels(load("tiny_imagenet", tmp_path), train)[0], train)
    assert caplog.messages[1].startswith("tiny_imagenet: cannot keep the decoded images (")
    assert caplog.messages[1].endswith("); they will be made again next time")
    assert not (tmp_path / "tiny_imagenet.npz").exists()


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    write_tiny(tmp_path)

    def full(stream, **_):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    load("tiny_imagenet", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny-imagenet-200"]


def test_tiny_imagenet_in_part(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    assert refusal("tiny_imagenet", tmp_path) == (
        f"tiny_imagenet: no data files under {tmp_path}; expected tiny_imagenet.npz or tiny-imagenet-200/. "
        "Put them there, or point CUTLAYER_DATA or --data at their folder."
    )
    write_tiny(tmp_path)
    (folder / "val/images/val_1.JPEG").write_bytes(b"no picture")
    assert refusal("tiny_imagenet", tmp_path).startswith(f"cannot read {folder / 'val/images/val_1.JPEG'}: cannot iden")
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n")
    assert refusal("tiny_imagenet", tmp_path) == (
        f"cannot read {folder / 'val/val_annotations.txt'}: its line 'val_0.JPEG\\tn99\\t0' does not name one of "
        "the 3 classes of wnids.txt. Replace the file with a fresh copy."
    )
    for path in (folder / "train/n01/images").iterdir():
        path.unlink()
    assert refusal("tiny_imagenet", tmp_path) == (
        f"{folder} is incomplete: train/n01/images/*.JPEG is missing. Add it, or remove the others."
    )
    (folder / "wnids.txt").unlink()
    assert refusal("tiny_imagenet", tmp_path) == (
        f"{folder} is incomplete: wnids.txt is missing. Add it, or remove the others."
    )


DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")


def write_ham(folder, split=True, backwards=False):
    """Fifteen pictures of two sizes; returns the pixels and the class of each, in the order of their names."""
    rows, found = [], []
    for i in range(15):
        place = f"HAM10000_images_part_{1 + i % 2}" if split else "images"
        found.append(picture(folder / place / f"ISIC_{i:04d}.jpg", i, size=((80, 60), (100, 75))[i % 2]))
        rows.append([f"HAM_{i // 2:04d}", f"ISIC_{i:04d}", DIAGNOSES[i % 7], "histo"])
    with (folder / "HAM10000_metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["lesion_id", "image_id", "dx", "dx_type"], *(rows[::-1] if backwards else rows)])
    return np.array(found), np.arange(15) % 7


def index_of(image, images):
    return next(i for i, one in enumerate(images) if np.array_equal(one, image))


def test_ham10000_is_resized_and_divided_by_image(tmp_path):
    (tmp_path / "ham10000").mkdir()
    x, y = write_ham(tmp_path / "ham10000")
    dataset = load("ham10000", tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.train.num_classes) == (12, 3, 7)
    with np.load(tmp_path / "ham10000/ham10000.npz") as kept:
        in_train, in_test = ([index_of(one, x) for one in kept[part]] for part in ("x_train", "x_test"))
    assert sorted(in_train + in_test) == list(range(15))
    found = pixels(dataset, x[in_train])
    assert np.array_equal(found[0], x[in_train])
    assert np.array_equal(found[1], x[in_test])
    assert (dataset.train.y.tolist(), dataset.test.y.tolist()) == (y[in_train].tolist(), y[in_test].tolist())
    other = tmp_path / "other"
    other.mkdir()
    write_ham(other, split=False, backwards=True)  # one folder, and rows in another order: the same division
    assert torch.equal(load("ham10000", other).test.x, dataset.test.x)


def test_ham10000_in_part(tmp_path):
    write_ham(tmp_path)
    (tmp_path / "HAM10000_images_part_2/ISIC_0003.jpg").unlink()
    assert refusal("ham10000", tmp_path) == (
        f"{tmp_path} is incomplete: ISIC_0003.jpg (in HAM10000_images_part_1/ or HAM10000_images_part_2/ or images/) "
        "is missing. Add it, or remove the others."
    )
    path = tmp_path / "HAM10000_metadata.csv"
    path.write_text("lesion_id,image_id,dx\nHAM_1,ISIC_0000,flu\n")
    assert refusal("ham10000", tmp_path) == (
        f"cannot read {path}: it has image_id 'ISIC_0000' with dx 'flu'; "
        "known dx: akiec, bcc, bkl, df, mel, nv, vasc. Replace the file with a fresh copy."
    )
    path.write_text("lesion_id,image_id,dx\n")
    assert refusal("ham10000", tmp_path) == (
        f"cannot read {path}: it names no image. Replace the file with a fresh copy."
    )


# --- Shakespeare ------------------------------------------------------------------------------------------------------


def speech_of(num, seed=0):
    """So many characters, no two windows of them alike."""
    return "".join(np.random.default_rng(seed).choice(list(ALPHABET.replace("\n", "").replace(" ", "")), num))


def decoded(indices):
    return "".join(ALPHABET[i] for i in indices)


def texts_of(arrays):
    return ["".join([decoded(x), decoded([y])]) for x, y in zip(arrays.x.tolist(), arrays.y.tolist(), strict=True)]


def test_the_alphabet_has_80_characters_and_others_count_as_a_space():
    assert len(set(ALPHABET)) == 80
    assert decoded(encoded(ALPHABET)) == ALPHABET
    assert decoded(encoded("a{b@é’\U0001f600z")) == "a b    z"
    assert len(encoded("")) == 0


@pytest.mark.parametrize("stride", [1, 4])
def test_windows_are_80_characters_and_the_next(stride):
    text = speech_of(200)
    samples = windows(text, stride)
    assert len(samples.y) == math.ceil(120 / stride)
    for k in range(len(samples.y)):
        assert decoded(samples.x[k]) == text[k * stride : k * stride + 80]
        assert decoded([samples.y[k]]) == text[k * stride + 80]
    assert len(windows(text[:80], stride).y) == 0
    assert windows(text[:80], stride).x.shape == (0, 80)


def script(roles):
    return "\n\n".join(f"{role}:\n{text}" for role, text in roles) + "\n"


def test_a_script_becomes_roles_with_their_last_fifth_held_out(tmp_path):
    first, second, other = speech_of(500, 1), speech_of(700, 2), speech_of(2001, 3)
    path = tmp_path / "tinyshakespeare.txt"
    path.write_text(
        script([("ROMEO", first), ("Nurse", "Ay.  A day."), ("ALL", other), ("ROMEO", ""), ("ROMEO", second)])
    )
    dataset = load("shakespeare", tmp_path)
    assert dataset.train.group_names == dataset.test.group_names == ("ALL", "ROMEO")  # the nurse says too little
    assert (dataset.train.x.dtype, dataset.train.y.dtype, dataset.train.num_classes) == (torch.int64, torch.int64, 80)
    said = {"ALL": other, "ROMEO": f"{first}\n{second}"}
    for number, name in enumerate(dataset.train.group_names):
        text, num = said[name], math.ceil((len(said[name]) - 80) / STRIDE)
        every = [text[k * STRIDE : k * STRIDE + 81] for k in range(num)]
        train, test = (texts_of(part.of_groups([name])) for part in (dataset.train, dataset.test))
        assert train == every[: int(0.8 * num)]
        seen = len(train) * STRIDE - STRIDE + 81  # characters of the training samples
        assert test == [every[k] for k in range(num) if k * STRIDE >= seen]
        assert test[0] == text[seen + -seen % STRIDE :][:81]
        assert (dataset.train.groups == number).sum() == len(train)
        assert 0 < len(test) < num / 5


def test_spaces_are_joined_and_a_block_without_a_speaker_goes_on(tmp_path):
    text = speech_of(1000)
    (tmp_path / "shakespeare").mkdir()
    path = tmp_path / "shakespeare/tinyshakespeare.txt"
    path.write_text(f"A:\none   two\n\n\nthree\n\nA:\n{text}\n")
    assert texts_of(load("shakespeare", tmp_path).train)[0] == f"one two\nthree\n{text}"[:81]
    path.write_text(f"{text}\n\nA:\n{text}\n")
    assert refusal("shakespeare", tmp_path) == (
        f"cannot read {path}: it does not begin with a line 'Speaker:'. Replace the file with a fresh copy."
    )
    path.write_text("A:\nShort.\n")
    assert refusal("shakespeare", tmp_path) == (
        f"cannot read {path}: no role in it says enough for a training and a test sample. "
        "Replace the file with a fresh copy."
    )


def test_a_table_of_plays_has_a_role_for_each_play_and_speaker(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "shakespeare_plays.parquet"
    rows = [("hamlet", "KING", speech_of(600, 1)), ("lear", "KING", speech_of(600, 2)), ("hamlet", "KING", "Go.")]
    parquet.write_table(
        pyarrow.table(dict(zip(("play", "speaker", "text"), zip(*rows, strict=True), strict=True))), path
    )
    dataset = load("shakespeare", tmp_path)
    assert dataset.train.group_names == ("hamlet/KING", "lear/KING")
    assert texts_of(dataset.test.of_groups(["hamlet/KING"]))[-1] == f"{rows[0][2]}\nGo."[520:601]
    parquet.write_table(pyarrow.table({"play": ["hamlet"], "text": ["Go."]}), path)
    assert refusal("shakespeare", tmp_path).startswith(f"cannot read {path}: it has no column 'speaker'.")
    path.write_bytes(b"no table")
    assert refusal("shakespeare", tmp_path).startswith(f"cannot read {path}: ")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal("shakespeare", tmp_path) == (
        f"shakespeare: {path} cannot be read without pyarrow; install it with: pip install 'cutlayer[parquet]'"
    )


def write_leaf(path, roles):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        name: {"x": [text[k : k + 80] for k in range(len(text) - 80)], "y": list(text[80:])}
        for name, text in roles.items()
    }
    sizes = [len(one["y"]) for one in data.values()]
    path.write_text(json.dumps({"users": list(data), "num_samples": sizes, "user_data": data}))


def test_leafs_own_division_is_kept(tmp_path):
    folder = tmp_path / "shakespeare/data"
    a, b = speech_of(90, 1), speech_of(85, 2)
    write_leaf(folder / "train/one.json", {"B": b})
    write_leaf(folder / "train/two.json", {"A": a})
    write_leaf(folder / "test/one.json", {"B": a})
    dataset = load("shakespeare", tmp_path)
    assert dataset.train.group_names == dataset.test.group_names == ("A", "B")
    assert dataset.train.groups.tolist() == [0] * 10 + [1] * 5
    assert dataset.test.groups.tolist() == [1] * 10
    assert texts_of(dataset.train) == [a[k : k + 81] for k in range(10)] + [b[k : k + 81] for k in range(5)]
    assert texts_of(dataset.test) == [a[k : k + 81] for k in range(10)]


def test_leafs_undivided_files_are_divided_in_time(tmp_path):
    text = speech_of(1080)
    write_leaf(tmp_path / "all_data/all.json", {"A": text, "B": text[:300]})
    dataset = load("shakespeare", tmp_path)
    assert dataset.train.group_names == ("A",)
    assert texts_of(dataset.train) == [text[k : k + 81] for k in range(800)]
    assert texts_of(dataset.test) == [text[k : k + 81] for k in range(880, 1000)]


def test_leaf_files_in_part(tmp_path):
    write_leaf(tmp_path / "train/one.json", {"A": speech_of(90)})
    assert refusal("shakespeare", tmp_path) == (
        f"{tmp_path} is incomplete: test/*.json is missing. Add it, or remove the others."
    )
    write_leaf(tmp_path / "test/one.json", {"A": ""})
    path = tmp_path / "test/one.json"
    assert refusal("shakespeare", tmp_path).startswith(f"cannot read {path}: it holds no sample.")
    for broken in ("[]", "{", '{"user_data": {"A": {"x": ["short"], "y": ["a"]}}}', '{"user_data": {"A": {"x": []}}}'):
        path.write_text(broken)
        assert refusal("shakespeare", tmp_path).startswith(
            f"cannot read {path}: it is not a LEAF file of 80 characters and the next one ("
        )
    empty = tmp_path / "empty"
    assert refusal("shakespeare", empty) == (
        f"shakespeare: no data files under {empty}/shakespeare, {empty}/shakespeare/data or {empty}; expected "
        "LEAF's train/*.json and test/*.json (or all_data/*.json), shakespeare_plays.parquet or tinyshakespeare.txt. "
        "Put them there, or point CUTLAYER_DATA or --data at their folder."
    )


@pytest.mark.parametrize(
    ("name", "num_roles", "role", "opening"),
    [
        ("shakespeare_plays.parquet", (700, 900), "romeo_and_juliet/ROMEO", "Is the day so young?"),
        ("tinyshakespeare.txt", (150, 250), "ROMEO", "Is the day so young?"),
    ],
)
def test_real_roles_become_clients(tmp_path, name, num_roles, role, opening):
    (tmp_path / name).symlink_to(real(name))
    dataset = load("shakespeare", tmp_path)
    train, test = dataset.train, dataset.test
    assert num_roles[0] < len(train.group_names) < num_roles[1]
    assert set(train.groups.tolist()) == set(test.groups.tolist()) == set(range(len(train.group_names)))
    assert len(torch.unique(train.y)) > 55
    letters = torch.bincount(train.y, minlength=80).double() / len(train)
    assert ALPHABET[int(letters.argmax())] == " "
    assert 0.07 < letters[ALPHABET.index("e")] < 0.11
    own = train.of_groups([role])
    assert texts_of(own.take([0]))[0].startswith(opening)
    assert torch.equal(own.x[:-1, STRIDE:], own.x[1:, :-STRIDE])  # the next window is one stride on
    assert torch.equal(own.x[20:, 0], own.y[:-20])  # 80 characters on begins the window of what was the label
    assert 0.15 < len(test) / (len(train) + len(test)) < 0.2
    partition = Natural(min_size=500).draw(train, 20, key=1)
    assert partition.sizes.min() >= 500
    for indices, client in zip(partition.clients, partition.names, strict=True):
        assert {train.group_names[int(g)] for g in train.groups[indices]} == {client}


# --- log-mel energies -------------------------------------------------------------------------------------------------


def tone(hertz, amplitude=0.5):
    return amplitude * torch.sin(2 * math.pi * hertz * torch.arange(16_000) / 16_000)[None]


def mel(hertz):
    return 2595 * math.log10(1 + hertz / 700)


def test_mel_filters_are_triangles_that_cover_every_frequency_once():
    filters = mel_filters(32, 1024, 16_000)
    assert filters.shape == (32, 513)
    centres = [700 * (10 ** (mel(8000) * (k + 1) / 33 / 2595) - 1) for k in range(32)]
    frequencies = torch.arange(513) * 16_000 / 1024
    between = (frequencies >= centres[0]) & (frequencies <= centres[-1])
    assert filters.sum(0)[between].numpy() == pytest.approx(1, abs=1e-12)
    assert (filters >= 0).all()
    assert (filters.sum(1) > 0).all()
    for k, centre in enumerate(centres):
        assert abs(frequencies[filters[k].argmax()].item() - centre) <= 16_000 / 1024
        assert (filters[k] > 0).sum() <= (700 + centre) * 0.3 / (16_000 / 1024)  # two steps of 86 mel: 16 % of it


@pytest.mark.parametrize("hertz", [200, 440, 1000, 2500, 6000])
def test_a_tone_lands_in_its_band(hertz):
    energies = log_mel(tone(hertz))[0, 0]
    assert energies.shape == (32, 32)
    assert set(energies.argmax(0).tolist()) == {round(mel(hertz) / mel(8000) * 33) - 1}


def test_a_tone_has_the_energy_of_its_window():
    """At a whole bin the Hann window's spectrum is amplitude * 1024 / 4, and half of that beside it."""
    hertz, amplitude = 64 * 16_000 / 1024, 0.5
    filters = mel_filters(32, 1024, 16_000)
    peak = (amplitude * 1024 / 4) ** 2
    expected = torch.log(peak * (filters[:, 64] + (filters[:, 63] + filters[:, 65]) / 4) + FLOOR)
    band = int(expected.argmax())
    inner = log_mel(tone(hertz, amplitude))[0, 0, :, 2:-2]  # windows that do not reach over the ends
    assert inner[band].numpy() == pytest.approx(expected[band].item(), abs=1e-3)


def test_silence_is_the_floor():
    assert log_mel(torch.zeros(2, 16_000)).numpy() == pytest.approx(math.log(FLOOR), abs=1e-6)


def test_a_click_is_heard_when_it_is_made():
    clip = torch.zeros(1, 16_000)
    clip[0, 12_250] = 1  # the middle of frame 24 of 32
    assert log_mel(clip)[0, 0].sum(0).argmax() == 24


def test_clips_together_are_as_one_by_one():
    clips = torch.randn(5, 16_000, generator=torch.Generator().manual_seed(0)) / 10
    apart = torch.cat([log_mel(clip[None]) for clip in clips])
    assert log_mel(clips).shape == (5, 1, 32, 32)
    assert log_mel(clips).numpy() == pytest.approx(apart.numpy(), abs=1e-5)
    assert log_mel(clips, bands=40, frames=50, window=512).shape == (5, 1, 40, 50)


# --- Speech Commands --------------------------------------------------------------------------------------------------


def write_wav(path, samples, rate=16_000, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, len(samples), "NONE", ""))
        file.writeframes(np.asarray(samples, "<i2").tobytes())


def write_speech(folder):
    """Two words of two speakers, a short and a long recording, and the noise that is no word."""
    noise = np.random.default_rng(0).integers(-9000, 9000, (4, 20_000))
    sounds = {
        "yes/aa_nohash_0.wav": noise[0, :16_000],
        "yes/bb_nohash_0.wav": noise[1, :9000],
        "no/aa_nohash_0.wav": noise[2],
        "no/bb_nohash_0.wav": noise[3, :16_000],
    }
    for name, samples in sounds.items():
        write_wav(folder / name, samples)
    write_wav(folder / "_background_noise_/hum.wav", noise[0])
    (folder / "testing_list.txt").write_text("no/bb_nohash_0.wav\n")
    (folder / "validation_list.txt").write_text("yes/aa_nohash_0.wav\n")
    return sounds


def test_speech_commands(tmp_path):
    sounds = write_speech(tmp_path / "speech_commands")
    dataset = load("speech_commands", tmp_path)
    order = ["no/aa_nohash_0.wav", "yes/aa_nohash_0.wav", "yes/bb_nohash_0.wav"]
    clips = torch.zeros(3, 16_000)
    for clip, name in zip(clips, order, strict=True):
        samples = torch.tensor(sounds[name][:16_000]) / 32768
        clip[: len(samples)] = samples
    features = log_mel(clips)
    mean, std = features.mean(), features.std(correction=0)
    assert dataset.train.x.numpy() == pytest.approx(((features - mean) / std).numpy(), abs=1e-4)
    assert dataset.train.x.shape == (3, 1, 32, 32)
    held_out = log_mel(torch.tensor(sounds["no/bb_nohash_0.wav"]).float()[None] / 32768)
    assert dataset.test.x.numpy() == pytest.approx(((held_out - mean) / std).numpy(), abs=1e-4)
    assert (dataset.train.y.tolist(), dataset.test.y.tolist(), dataset.train.num_classes) == ([0, 1, 1], [0], 2)
    assert dataset.train.group_names == ("aa", "bb")
    assert (dataset.train.groups.tolist(), dataset.test.groups.tolist()) == ([0, 0, 1], [1])


def spoil(folder):
    """Leave every recording by name only."""
    for path in folder.glob("*/*.wav"):
        path.write_bytes(b"")


def assert_equal(one, other):
    for part, same in ((one.train, other.train), (one.test, other.test)):
        assert torch.equal(part.x, same.x)
        assert torch.equal(part.y, same.y)
        assert torch.equal(part.groups, same.groups)
        assert (part.num_classes, part.group_names) == (same.num_classes, same.group_names)


def test_recordings_are_read_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cutlayer")
    folder = tmp_path / "speech_commands"
    write_speech(folder)
    before = {p.name for p in folder.iterdir()}
    dataset = load("speech_commands", tmp_path)
    assert caplog.messages == ["speech_commands: reading 4 recordings, once"]
    assert {p.name for p in folder.iterdir()} == before | {"log_mel.npz"}
    spoil(folder)
    again = load("speech_commands", tmp_path)
    assert_equal(again, dataset)
    assert (again.train.num_classes, again.train.group_names) == (2, ("aa", "bb"))
    assert len(caplog.messages) == 1
    (folder / "testing_list.txt").write_text("yes/aa_nohash_0.wav\n")  # the division is not kept
    assert load("speech_commands", tmp_path).test.y.tolist() == [1]
    (folder / "log_mel.npz").unlink()
    assert refusal("speech_commands", tmp_path).startswith(f"cannot read {folder / 'no/aa_nohash_0.wav'}: ")


def fewer(folder):
    (folder / "yes/bb_nohash_0.wav").unlink()


def renamed(folder):
    (folder / "yes/bb_nohash_0.wav").rename(folder / "yes/cc_nohash_0.wav")


def more(folder):
    write_wav(folder / "up/dd_nohash_0.wav", np.arange(16_000) % 1000)


@pytest.mark.parametrize("change", [fewer, renamed, more])
def test_other_recordings_are_read_anew(tmp_path, caplog, change):
    caplog.set_level(logging.INFO, "cutlayer")
    kept, fresh = tmp_path / "kept/speech_commands", tmp_path / "fresh/speech_commands"
    write_speech(kept)
    write_speech(fresh)
    load("speech_commands", kept.parent)
    change(kept)
    change(fresh)
    caplog.clear()
    dataset = load("speech_commands", kept.parent)
    path = kept / "log_mel.npz"
    assert caplog.messages[0] == f"speech_commands: {path} is made again: it belongs to other files or settings"
    assert_equal(dataset, load("speech_commands", fresh.parent))
    spoil(kept)
    assert_equal(load("speech_commands", kept.parent), dataset)


@pytest.mark.parametrize("setting", ["FRONT_END", "FLOOR", "EDITION"])
def test_another_front_end_reads_anew(tmp_path, monkeypatch, setting):
    folder = tmp_path / "speech_commands"
    write_speech(folder)
    load("speech_commands", tmp_path)
    value = {**speech.FRONT_END, "bands": 40} if setting == "FRONT_END" else 2 * getattr(speech, setting)
    monkeypatch.setattr(speech, setting, value)
    dataset = load("speech_commands", tmp_path)
    assert dataset.train.x.shape == (3, 1, 40 if setting == "FRONT_END" else 32, 32)
    spoil(folder)
    assert_equal(load("speech_commands", tmp_path), dataset)
    monkeypatch.undo()
    assert refusal("speech_commands", tmp_path).startswith(f"cannot read {folder / 'no/aa_nohash_0.wav'}: ")


@pytest.mark.parametrize("broken", ["empty", "cut", "other"])
def test_a_broken_file_of_energies_is_made_again(tmp_path, caplog, broken):
    caplog.set_level(logging.INFO, "cutlayer")
    folder = tmp_path / "speech_commands"
    path = folder / "log_mel.npz"
    write_speech(folder)
    dataset = load("speech_commands", tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "cut": whole[: len(whole) // 2], "other": whole.replace(b"mark.npy", b"mask.npy")}[broken]
    )
    caplog.clear()
    assert_equal(load("speech_commands", tmp_path), dataset)
    assert caplog.messages[0] == f"speech_commands: {path} is made again: it cannot be read"
    assert len(path.read_bytes()) == len(whole)


def test_recordings_of_a_folder_that_cannot_be_written(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cutlayer")
    folder = tmp_path / "speech_commands"
    write_speech(folder)
    in_the_way = folder / f".log_mel.{os.getpid()}.npz"
    in_the_way.mkdir()
    datasets = [load("speech_commands", tmp_path) for _ in range(2)]
    assert_equal(*datasets)
    assert caplog.messages[::2] == ["speech_commands: reading 4 recordings, once"] * 2
    assert caplog.messages[1].startswith("speech_commands: cannot keep the log-mel energies (")
    assert caplog.messages[1].endswith("); they will be made again next time")
    assert not (folder / "log_mel.npz").exists()
    in_the_way.rmdir()
    assert_equal(load("speech_commands", tmp_path), datasets[0])


def test_speech_commands_in_part(tmp_path):
    folder = tmp_path / "speech_commands"
    places = [folder, tmp_path / "speech_commands_v0.02", tmp_path / "SpeechCommands/speech_commands_v0.02"]
    assert refusal("speech_commands", tmp_path) == (
        f"speech_commands: no data files under {places[0]}, {places[1]} or {places[2]}; expected "
        "testing_list.txt, validation_list.txt and a folder of .wav files for each word. "
        "Put them there, or point CUTLAYER_DATA or --data at their folder."
    )
    write_speech(folder)
    path = folder / "yes/bb_nohash_0.wav"
    write_wav(path, np.zeros(8000), rate=8000)
    assert refusal("speech_commands", tmp_path) == (
        f"cannot read {path}: it has 8000 Hz, 1 channels and 16 bits, expected 16000, 1 and 16. "
        "Replace the file with a fresh copy."
    )
    write_wav(path, np.zeros(8000))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert refusal("speech_commands", tmp_path).startswith(
        f"cannot read {path}: its header says 8000 samples, but 1599"
    )
    for broken in (b"", b"no sound at all", whole[:30]):
        path.write_bytes(broken)
        assert refusal("speech_commands", tmp_path).startswith(f"cannot read {path}: ")
    (folder / "testing_list.txt").write_text("no/bb_nohash_0.wav\nyes/cc_nohash_0.wav\n")
    assert refusal("speech_commands", tmp_path) == (
        f"{folder} is incomplete: yes/cc_nohash_0.wav is missing. Add it, or remove the others."
    )
    (folder / "testing_list.txt").write_text("")
    assert refusal("speech_commands", tmp_path) == (
        f"{folder} is incomplete: a recording to train or one to test is missing. Add it, or remove the others."
    )
    (folder / "testing_list.txt").unlink()
    assert refusal("speech_commands", tmp_path) == (
        f"{folder} is incomplete: testing_list.txt is missing. Add it, or remove the others."
    )


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def test_a_linear_model_learns_real_spoken_digits_from_the_energies(tmp_path):
    """Six speakers say each digit twelve times; the last two times are test data."""
    with np.load(real("spoken_digits.npz"), allow_pickle=False) as file:
        x, y, speaker, rep, length = (file[key] for key in ("x", "y", "speaker", "rep", "length"))
    folder, held_out = tmp_path / "speech_commands", []
    for i in np.flatnonzero(rep < 12):
        name = f"{DIGITS[y[i]]}/{speaker[i]}_nohash_{rep[i]}.wav"
        sound = x[i, : length[i]]
        write_wav(folder / name, np.interp(np.arange(2 * len(sound)) / 2, np.arange(len(sound)), sound))  # 8 to 16 kHz
        if rep[i] >= 10:
            held_out.append(name)
    (folder / "testing_list.txt").write_text("\n".join(held_out))
    (folder / "validation_list.txt").write_text("")
    dataset = load("speech_commands", tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.train.num_classes) == (600, 120, 10)
    assert dataset.train.group_names == ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
    assert torch.bincount(dataset.train.groups).tolist() == [100] * 6
    assert accuracy(dataset) > 0.7  # one in ten by chance


def accuracy(dataset):
    """Of logistic regression, trained with all samples at once."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 10)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(dataset.train.x.flatten(1)), dataset.train.y).backward()
        optimiser.step()
    return (model(dataset.test.x.flatten(1)).argmax(1) == dataset.test.y).double().mean().item()
