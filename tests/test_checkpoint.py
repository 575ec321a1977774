"""Checkpoints survive exactly, or fail with their reason; an earlier one is never lost."""

import errno
import json
import logging
import math
import os
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cutlayer import optim
from cutlayer.core.state import Grads, Model, Part, State
from cutlayer.core.tree import storable
from cutlayer.errors import CheckpointError
from cutlayer.runs.checkpoint import Store, pack, read, unpack


def raw(tensor: Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a: Any, b: Any) -> None:
    """Equal in type, structure and every bit."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert raw(a) == raw(b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float):
        assert a.hex() == b.hex()
    else:
        assert a == b


def some_state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    params = {
        "conv.weight": torch.randn(4, 3, generator=generator),
        "head/bias": torch.randn(2, generator=generator, dtype=torch.float64),
        "half": torch.randn(3, generator=generator).bfloat16(),
    }
    model = Model(params, {"embedding": torch.arange(6.0).view(2, 3)}, {"num_batches": torch.tensor(7)})
    optimiser = optim.adam(0.1)
    part = optimiser.step(optimiser.begin(model, 3), Grads({"half": torch.ones(3).bfloat16()}, {}, torch.tensor(0.5)))
    memory = {"log": [(1, 0.1), (2, -0.2)], "seen": torch.tensor([True, False]), "nothing": None, "empty": {}}
    return State(round=seed, client=model, server=part, memory=memory)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0b100
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store that holds rounds 1 and 2."""
    store = Store(tmp_path / "checkpoints")
    for round in (1, 2):
        store.save(round, some_state(round), {"seed": round})
    return store


def test_a_state_survives_bit_for_bit(store: Store) -> None:
    content, manifest = store.load()
    assert_same(content, some_state(2))
    assert isinstance(content.server, Part)
    assert content.server.count == 1
    assert manifest == {"seed": 2}
    assert_same(read(store.path(1))[0], some_state(1))


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": {"c": 1}, "a": {"b.c": 2, "b/c": torch.ones(1), "b": {"c": torch.zeros(1)}}, "~1": {"": torch.ones(2)}},
        {"a/b": torch.tensor(1), "a~1b": torch.tensor(2), "a": {"b": torch.tensor(3)}},
        [math.inf, -math.inf, math.nan, -0.0, 0.1, 5e-324, 1.7976931348623157e308],
        (1, True, False, None, "text", "", 2**80, -3, 1.0, (), [], {}),
        {"float": "tensor", "dict": {"tuple": [1]}, "__metadata__": torch.ones(1)},
        {1: torch.zeros(1), "1": torch.ones(1), "~21": torch.ones(2), -1: torch.ones(3), "-1": {0: "text", 2: None}},
        torch.tensor(2.5),
        torch.empty(0, 3),
        {"nan": torch.tensor([math.nan, -0.0, math.inf]), "byte": torch.tensor([255], dtype=torch.uint8)},
        {"complex": torch.tensor([1 + 2j]).conj(), "half": torch.tensor([1.5], dtype=torch.float16)},
        "ünï\ud800",
        None,
    ],
)
def test_pack_and_unpack(tree: Any, tmp_path: Path) -> None:
    tensors, skeleton = pack(tree)
    assert_same(unpack(tensors, json.loads(json.dumps(skeleton))), tree)
    Store(tmp_path).save(0, tree, {})
    assert_same(Store(tmp_path).load()[0], tree)


def test_tensors_lie_under_their_paths() -> None:
    assert list(pack(some_state())[0])[:3] == [
        "/client/params/conv.weight",
        "/client/params/head~1bias",
        "/client/params/half",
    ]


def test_views_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tree = {"all": base, "again": base, "column": base[:, 1], "turned": base.T, "wide": torch.ones(1).expand(5)}
    Store(tmp_path).save(0, tree, {})
    content, _ = Store(tmp_path).load()
    assert_same(content, tree)
    content["all"].zero_()
    assert content["again"][2, 3].item() == 11.0


def test_loaded_tensors_outlive_the_file(store: Store) -> None:
    content, _ = read(store.path(1))
    path = store.path(1)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert_same(content, some_state(1))


class Couple(NamedTuple):
    left: Any
    right: Any


def test_further_classes_must_be_registered(tmp_path: Path) -> None:
    class Wrapper(NamedTuple):
        value: Any

    with pytest.raises(CheckpointError) as caught:
        pack({"memory": [Wrapper(1)]})
    assert str(caught.value) == (
        "a checkpoint cannot hold the Wrapper at /memory/0; "
        "use tensors, plain numbers, strings, lists, tuples, dicts or a registered class."
    )
    assert storable(Couple) is Couple
    storable(Couple)
    Store(tmp_path).save(0, Couple(torch.ones(2), Couple(1, None)), {})
    assert_same(Store(tmp_path).load()[0], Couple(torch.ones(2), Couple(1, None)))

    with pytest.raises(CheckpointError) as caught:
        storable(namedtuple("Couple", ["left"]))
    assert str(caught.value) == "two classes named 'Couple' cannot both be stored; rename one of them."


def test_a_class_that_has_changed_is_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        unpack({}, {"structure": ["Model", ["params", "extra"], [["dict", [], []], None]], "leaves": []})
    assert str(caught.value) == "it holds a Model(params, extra), which this version of cutlayer does not know"


@pytest.mark.parametrize(
    ("content", "manifest", "message"),
    [
        ({1.5: 2}, {}, "a checkpoint cannot hold the key 1.5 at /; use strings or whole numbers as keys."),
        ({"a": {True: 2}}, {}, "a checkpoint cannot hold the key True at /a; use strings or whole numbers as keys."),
        (
            torch.zeros(1, dtype=torch.complex128),
            {},
            "a checkpoint cannot hold tensors of type torch.complex128; convert them first.",
        ),
        (
            None,
            {"when": {1, 2}},
            "the manifest of a checkpoint must be plain JSON values: Object of type set is not JSON serializable.",
        ),
    ],
)
def test_values_that_cannot_be_stored_are_refused(
    tmp_path: Path, content: Any, manifest: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        Store(tmp_path).save(0, content, manifest)
    assert str(caught.value) == message
    assert names(tmp_path) == []


def test_pruning_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutlayer.runs.checkpoint.KEEP", 3)
    store = Store(tmp_path)
    for round in (1, 5, 10, 1_000_000, 2_000_000):
        store.save(round, round, {})
    assert store.rounds() == [10, 1_000_000, 2_000_000]
    assert names(tmp_path)[-1] == "round-2000000.safetensors"


def test_a_run_that_went_back_leaves_no_later_checkpoint(store: Store) -> None:
    store.save(3, 3, {})
    assert store.rounds() == [2, 3]
    store.save(2, "again", {})
    assert store.rounds() == [2]
    assert store.load() == ("again", {})


@pytest.mark.parametrize("failing", ["fsync", "replace", "write"])
def test_a_full_disk_leaves_the_earlier_checkpoint(store: Store, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half_written(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        full()

    with monkeypatch.context() as patch:
        if failing == "write":
            patch.setattr("cutlayer.runs.checkpoint.write_to_disk", half_written)
        else:
            patch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), full)
        with pytest.raises(CheckpointError) as caught:
            store.save(3, some_state(3), {})
    assert str(caught.value) == (
        f"the checkpoint of round 3 could not be written to {store.folder}: No space left on device; "
        "round-000002.safetensors is still good. Make room there or choose another folder, then resume the run."
    )
    assert names(store.folder) == ["round-000001.safetensors", "round-000002.safetensors"]
    assert_same(store.load()[0], some_state(2))


def test_a_first_checkpoint_that_fails_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(CheckpointError) as caught:
        Store(blocked).save(0, None, {})
    assert str(caught.value) == (
        f"the checkpoint of round 0 could not be written to {blocked}: File exists; "
        "there is no earlier checkpoint. Make room there or choose another folder, then resume the run."
    )


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1000, -1])
def test_a_truncated_file_falls_back(store: Store, length: int, caplog: pytest.LogCaptureFixture) -> None:
    newest = store.path(2)
    newest.write_bytes(newest.read_bytes()[:length])
    with caplog.at_level(logging.WARNING, logger="cutlayer"):
        content, manifest = store.load()
    assert_same(content, some_state(1))
    assert manifest == {"seed": 1}
    (warning,) = caplog.messages
    assert warning.startswith(f"{newest} is damaged or no checkpoint: ")
    assert warning.endswith("; resuming from round 1 instead")


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Harmless are only the spaces that pad the header."""
    store = Store(tmp_path)
    content = Model({"w": torch.tensor([1.5, -2.0])}, {}, {"n": torch.tensor(3), "b": torch.tensor(True)})
    store.save(0, content, {"lr": 0.1})
    path = store.path(0)
    sound = path.read_bytes()
    num_noticed = 0
    for position in range(len(sound)):
        flip(path, position)
        try:
            loaded, manifest = read(store.path(0))
            assert_same(loaded, content)
            assert manifest == {"lr": 0.1}
        except CheckpointError:
            num_noticed += 1
        path.write_bytes(sound)
    assert num_noticed >= len(sound) - 8


def test_a_flipped_byte_in_the_tensors_is_named(store: Store) -> None:
    newest = store.path(2)
    flip(newest, newest.stat().st_size - 3)
    with pytest.raises(CheckpointError) as caught:
        read(store.path(2))
    assert str(caught.value) == (f"{newest} cannot be used: its content does not match its digest")
    assert_same(store.load()[0], some_state(1))


def test_no_sound_checkpoint_at_all(store: Store) -> None:
    for round in (1, 2):
        flip(store.path(round), store.path(round).stat().st_size - 1)
    with pytest.raises(CheckpointError) as caught:
        store.load()
    assert str(caught.value) == (
        f"no usable checkpoint in {store.folder}: "
        f"{store.path(2)} cannot be used: its content does not match its digest; "
        f"{store.path(1)} cannot be used: its content does not match its digest. "
        "Restore one from a backup, or start the run anew in another folder."
    )


def test_missing_checkpoints(tmp_path: Path) -> None:
    nowhere = Store(tmp_path / "nowhere")
    assert nowhere.rounds() == []
    with pytest.raises(CheckpointError) as caught:
        nowhere.load()
    assert str(caught.value) == (
        f"no usable checkpoint in {nowhere.folder}: it has none. "
        "Restore one from a backup, or start the run anew in another folder."
    )


def test_a_leftover_partial_file_is_ignored_and_cleaned(store: Store) -> None:
    leftover = store.folder / "round-000003.safetensors.partial"
    leftover.write_bytes(b"half")
    assert store.rounds() == [1, 2]
    assert_same(store.load()[0], some_state(2))
    store.save(4, 4, {})
    assert names(store.folder) == ["round-000002.safetensors", "round-000004.safetensors"]


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    store = Store(tmp_path)
    save_file({"w": torch.ones(1)}, store.path(0))
    with pytest.raises(CheckpointError, match="is damaged or no checkpoint: 'skeleton'"):
        read(store.path(0))


def test_a_file_of_another_format_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutlayer.runs.checkpoint.FORMAT", "3")
    with pytest.raises(CheckpointError) as caught:
        read(store.path(2))
    assert str(caught.value) == (
        f"{store.path(2)} cannot be used: it has the format 2 of another version of cutlayer, and this one reads 3; "
        "go on with the version that wrote it"
    )
