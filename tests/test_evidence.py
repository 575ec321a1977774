"""Specifies the queue of runs for the papers' tables: what is trained next, what is recorded, how runs are packed."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import evidence
import headline
import packing
import pytest

from cutlayer import recipes
from cutlayer.errors import ConfigError, CutlayerError
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder

SMALL = 'set = { engine = "loop", clients = 4, per_round = 2 }\n'
TWO = SMALL + '[[run]]\nnames = ["digits/fedavg", "digits/sl"]\nrounds = 4\nseeds = [0]\n'
ONE = TWO.replace(', "digits/sl"', "")


def next_of(root: Path, queue: str, *words: str, runs: str = "runs") -> int:
    """Run `headline.py --next` on a queue with this text; return its exit code."""
    (root / "queue.toml").write_text(queue)
    files = ["--queue", str(root / "queue.toml"), "--results", str(root / "results"), "--runs", str(root / runs)]
    return int(headline.main([*files, "--next", *words]))


def record(root: Path) -> int:
    """Run `headline.py --record` on the packed runs; return its exit code."""
    return int(headline.main(["--record", str(root / "out"), "--results", str(root / "results")]))


def in_time_for(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Let the time limit pass so that a run gets this number of further rounds."""
    told = headline.Watch.round

    def watched(self: object, training: object, record: dict[str, int]) -> None:
        self.deadline = float("inf") if record["round"] - self.begun < rounds - 1 else 0.0  # type: ignore[attr-defined]
        told(self, training, record)

    monkeypatch.setattr(headline.Watch, "round", watched)


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_list_in_the_repository_can_be_trained() -> None:
    runs = evidence.wanted(evidence.read(), {}, "the list")
    assert {(run.device, run.engine) for run in runs} == {("cuda", "graph")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SMALL + '[[run]]\nnames = ["digits"]\nseed = [0]',
            "{file}: Object contains unknown field seed - at $.run[0]",
        ),
        (
            SMALL + '[[run]]\nnames = ["digits/fedavk"]\nseeds = [0]',
            "unknown run 'digits/fedavk' in {file}; did you mean 'digits/fedavg' or ",
        ),
        (SMALL + '[[run]]\nnames = ["digits"]\nrounds = 0\nseeds = [0]', "{file}: rounds is 0; it must be at least 1"),
        (
            SMALL + '[[run]]\nnames = ["digits"]\nseeds = [0]\nset = { rounds = 3 }',
            "{file}: set cannot change rounds; give it beside the names of an entry",
        ),
    ],
)
def test_a_mistake_in_the_list_is_one_line_before_anything_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert next_of(tmp_path, text) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("error: " + message.format(file=tmp_path / "queue.toml"))
    assert [path.name for path in tmp_path.iterdir()] == ["queue.toml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digits", "queue.toml says what --next and --list take: give no names, --rounds or --seed; see --help\n"),
        ("--engine foo", "unknown engine 'foo' in the command line; "),
        ("--list", "--next trains and --list only shows: give one of them; see --help\n"),
        ("--record here", "--record does nothing else: give it without names, "),
    ],
)
def test_mistakes_of_the_command_line_are_not_blamed_on_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert next_of(tmp_path, TWO, *words.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


# -- content -----------------------------------------------------------------------------------------------------------


def test_of_equal_runs_the_one_with_a_clock_and_the_longest_serve_all() -> None:
    plain = Run(name="a", rounds=3)
    timed = replace(plain, name="b", rounds=2, devices=Choice("pool"))
    other = replace(plain, name="c", devices=Choice("pool", {"kappa": 3.0}))
    second = replace(plain, name="d", seed=1, checkpoint_every=9)
    assert evidence.distinct([plain, timed]) == evidence.distinct([timed, plain]) == [replace(timed, rounds=3)]
    assert evidence.distinct([timed, other]) == [timed, other]  # two clocks
    brief = replace(plain, name="e", until_samples=5)
    assert evidence.distinct([plain, brief]) == [plain, brief]  # two ends
    assert evidence.distinct([plain, second]) == [plain, second]
    assert evidence.serves(timed, plain) and not evidence.serves(plain, timed)


@pytest.mark.parametrize(
    "method",
    [Choice("hasfl", {"interval": 3, "batches": "planned", "cuts": "planned"}), Choice("mergesfl", {"regulate": True})],
)
def test_devices_that_steer_a_method_are_part_of_its_content(method: Choice) -> None:
    timed = Run(method=method, devices=Choice("pool"))
    assert not evidence.serves(timed, replace(timed, devices=None))
    assert not evidence.serves(timed, replace(timed, devices=Choice("pool", {"kappa": 3.0})))


def test_an_equal_run_goes_on_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = (run for run in recipes.runs("digits") if run.name == "digits/fedavg")
    small = replace(run, clients=4, per_round=2, rounds=3)
    twin = replace(small, name="other/panel/run", rounds=5)
    known = {"a": (small,), "b": (twin,)}
    monkeypatch.setattr(headline, "named", lambda name: known[name])
    assert headline.main(["--runs", str(tmp_path), "--engine", "loop", "a"]) == 0
    assert headline.main(["--runs", str(tmp_path), "--engine", "loop", "b", "a"]) == 0
    said = capsys.readouterr().out
    assert "digits/fedavg: from round 4 to 5\n" in said and "digits/fedavg: 5 of 5 rounds, " in said
    assert headline.main(["--runs", str(tmp_path), "--engine", "loop", "b"]) == 0
    assert "; finished before, and serves other/panel/run\n" in capsys.readouterr().out
    assert not (tmp_path / "other").exists()


def test_a_folder_holds_a_run_whose_engine_was_chosen_there(tmp_path: Path) -> None:
    asked, trained, folder = Run(), Run(engine="vmap", server_engine="loop"), Folder(tmp_path)
    assert evidence.holding(asked, [(folder, trained)]) == [folder]
    assert evidence.holding(replace(asked, engine="loop"), [(folder, trained)]) == []
    assert evidence.distinct([asked, trained]) == [asked, trained]  # where nothing is trained yet


# -- the next run ------------------------------------------------------------------------------------------------------


def test_next_takes_what_is_not_finished_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        in_time_for(patched, rounds=3)
        assert next_of(tmp_path, TWO, "--seconds", "1000") == 0
    said = capsys.readouterr().out
    assert said.startswith("queue.toml: 0 of 2 runs finished\ndigits/fedavg: from round 1 to 4\n")
    assert Folder(tmp_path / "runs/digits/fedavg/seed-0").store.rounds()[-1] == 3
    assert next_of(tmp_path, TWO) == 0
    said = capsys.readouterr().out
    assert "digits/fedavg: from round 4 to 4\n" in said and "digits/sl: 4 of 4 rounds" in said
    assert next_of(tmp_path, TWO) == 0
    assert capsys.readouterr().out.startswith("queue.toml: 2 of 2 runs finished\n")
    longer = TWO + '[[run]]\nnames = ["digits/fedavg"]\nrounds = 5\nseeds = [0, 1]\n'
    assert next_of(tmp_path, longer) == 0
    said = capsys.readouterr().out
    assert said.startswith("queue.toml: 2 of 4 runs finished\ndigits/fedavg: from round 5 to 5\n")
    assert "digits/fedavg, seed 1: from round 1 to 5\n" in said


def test_what_is_recorded_in_the_results_is_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert next_of(tmp_path, TWO, "--collect", str(tmp_path / "out")) == 0
    assert record(tmp_path) == 0
    shutil.rmtree(tmp_path / "runs")
    assert capsys.readouterr().out.endswith(
        f"{tmp_path}/results/digits/fedavg/seed-0: 4 rounds\n{tmp_path}/results/digits/sl/seed-0: 4 rounds\n"
    )
    assert next_of(tmp_path, TWO) == 0
    assert capsys.readouterr().out.startswith("queue.toml: 2 of 2 runs finished\n")
    assert not (tmp_path / "runs").exists()
    words = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"), "--list"]
    assert headline.main([*words, "--queue", str(tmp_path / "queue.toml")]) == 0
    assert capsys.readouterr().out.endswith("queue.toml: 2 of 2 runs finished\nnothing is left\n")
    assert next_of(tmp_path, TWO.replace("loop", "vmap")) == 0  # another run
    assert "queue.toml: 0 of 2 runs finished\n" in capsys.readouterr().out


def test_a_record_replaces_an_old_one_whole_unless_that_is_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = ONE.replace("rounds = 4", "rounds = 2")
    home = tmp_path / "results/digits/fedavg/seed-0"
    assert next_of(tmp_path, ONE, "--collect", str(tmp_path / "out")) == 0
    assert record(tmp_path) == 0
    (home / "remarks.txt").write_text("of the old record\n")
    assert next_of(tmp_path, shorter, "--results", "none", "--collect", str(tmp_path / "out"), runs="shorter") == 0
    assert record(tmp_path) == 0
    assert capsys.readouterr().out.endswith(f"{home} stays: it has 4 rounds, more than {tmp_path / 'out'}\n")
    assert (len(Folder(home).history()), (home / "remarks.txt").exists()) == (4, True)
    other = shorter.replace("loop", "vmap")  # another run of that name
    assert next_of(tmp_path, other, "--collect", str(tmp_path / "out"), runs="other") == 0
    assert record(tmp_path) == 0
    assert (len(Folder(home).history()), (home / "remarks.txt").exists()) == (2, False)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["digits"]


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_a_record_without_runs_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "headline.tar.gz").write_bytes(content)
    assert headline.main(["--record", str(tmp_path), "--results", str(tmp_path / "results")]) == 2
    assert not (tmp_path / "results").exists() or not list((tmp_path / "results").iterdir())


def test_a_damaged_archive_changes_no_record(tmp_path: Path) -> None:
    assert next_of(tmp_path, TWO, "--collect", str(tmp_path / "out")) == 0
    assert record(tmp_path) == 0
    archive = tmp_path / "out" / "headline.tar.gz"
    sound = archive.read_bytes()
    known = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()}
    for place in range(20, len(sound), len(sound) // 25):
        damaged = bytearray(sound)
        damaged[place] ^= 1
        archive.write_bytes(damaged)
        assert record(tmp_path) == 2, place
    assert {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()} == known


def test_a_run_that_is_being_trained_is_not_unpacked_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert next_of(tmp_path, TWO, "--collect", str(tmp_path / "out")) == 0

    def unpacking(*_: object) -> None:
        with pytest.raises(CutlayerError, match="is in use: another process trains this run"):
            packing.unpack_whole(tmp_path / "out", tmp_path / "other")

    monkeypatch.setattr(headline.Watch, "round", unpacking)
    assert next_of(tmp_path, ONE.replace("fedavg", "sl"), runs="other") == 0


def test_a_run_that_ends_by_samples_or_by_convergence_is_finished_then(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    records = [{"round": n, "samples": 100 * n, "bytes": {}, "test_accuracy": 0.5} for n in range(1, 8)]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evidence.finished(folder, Run(rounds=7)) and not evidence.finished(folder, Run(rounds=8))
    assert evidence.finished(folder, Run(rounds=99, until_samples=700))
    assert not evidence.finished(folder, Run(rounds=99, until_samples=701))
    assert evidence.finished(folder, Run(rounds=99, until_converged=True))
    assert evidence.finished(folder, Run(rounds=99, until_accuracy=0.5))
    assert not evidence.finished(folder, Run(rounds=99, until_accuracy=0.6))
    folder.store.save(6, {}, {})  # the seventh round was not committed
    assert evidence.finished(folder, Run(rounds=6)) and not evidence.finished(folder, Run(rounds=7))
    assert not evidence.finished(Folder(tmp_path / "none"), Run(rounds=1))


# -- from machine to machine -------------------------------------------------------------------------------------------


def test_a_run_that_is_split_over_machines_is_the_same_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = SMALL + '[[run]]\nnames = ["digits/fedavg"]\nrounds = 5\nseeds = [0]\nset = { devices = "pool" }\n'
    assert next_of(tmp_path, queue, runs="straight") == 0
    for number in (1, 2):
        with monkeypatch.context() as patched:
            in_time_for(patched, rounds=2)
            before = [] if number == 1 else ["--from", str(tmp_path / "out1")]
            words = ["--seconds", "1000", *before, "--collect", str(tmp_path / f"out{number}")]
            assert next_of(tmp_path, queue, *words, runs=f"machine{number}") == 0
    assert next_of(tmp_path, queue, "--from", str(tmp_path / "out2"), runs="machine3") == 0
    straight, split = (Folder(tmp_path / name / "digits/fedavg/seed-0") for name in ("straight", "machine3"))
    for name in ("metrics.jsonl", "ledger.json", "model.safetensors", "config.toml"):
        assert (straight.path / name).read_bytes() == (split.path / name).read_bytes(), name
    lines = [json.loads(line) for line in (split.path / "sessions.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 3, 5]
    assert all({"torch", "machine", "python"} <= line.keys() for line in lines)
    said = capsys.readouterr().out
    assert f"{tmp_path}/machine3/digits/fedavg/seed-0: unpacked from {tmp_path}/out2\n" in said


def test_pieces_are_small_and_what_is_too_large_must_end_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(packing, "PIECE_SIZE", 2**15)
    assert next_of(tmp_path, TWO, "--collect", str(out)) == 0
    pieces = packing.pieces(out)
    assert len(pieces) > 2 and max(piece.stat().st_size for piece in pieces) == 2**15
    assert "in one go" not in capsys.readouterr().out
    folder, _ = packing.unpack_whole(out, tmp_path / "there")  # the pieces are one archive
    assert folder.history() == Folder(tmp_path / "runs/digits/sl/seed-0").history()
    monkeypatch.setattr(packing, "MOST", 2**10)
    monkeypatch.setattr(headline, "MOST", 2**20 + 2**10)  # of which the small files may have all but a little
    assert next_of(tmp_path, TWO, "--collect", str(out), runs="again") == 0
    said = capsys.readouterr().out
    assert (
        "digits/sl: a checkpoint has 0 MiB, too large to be packed (1 at most): it must end in one go, in the" in said
    )
    assert "digits/sl/seed-0 is not packed: it has more than 1 MiB\n" in said
    assert packing.pieces(out) == []  # none of an earlier run either


def test_pieces_that_are_damaged_or_missing_are_refused_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PIECE_SIZE", 2**14)
    assert next_of(tmp_path, TWO, "--collect", str(tmp_path / "out")) == 0
    _, second, *_, last = packing.pieces(tmp_path / "out")

    def refused(match: str) -> None:
        with pytest.raises(CutlayerError, match=match):
            packing.unpack_whole(tmp_path / "out", tmp_path / "there")
        assert not (tmp_path / "there").exists()

    whole = second.read_bytes()
    for damaged in (second.rename(tmp_path / "aside"), last):
        kept = damaged.read_bytes()
        damaged.unlink()
        refused("damaged or incomplete: ")
        (second if damaged.name == "aside" else damaged).write_bytes(kept)
    bits = bytearray(whole)
    bits[len(bits) // 2] ^= 1
    second.write_bytes(bits)
    refused("its content does not match its digest|damaged or incomplete")
    second.write_bytes(whole)
    folder, put = packing.unpack_whole(tmp_path / "out", tmp_path / "there")
    assert (folder.store.rounds(), put) == ([4], True)
    for piece in packing.pieces(tmp_path / "out"):
        piece.unlink()
    with pytest.raises(CutlayerError, match=r"^there is no run packed in .*; its pieces are called run\.tar\.00, "):
        packing.unpack_whole(tmp_path / "out", tmp_path / "there")


def test_a_run_that_is_further_than_its_pieces_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        in_time_for(patched, rounds=2)
        assert next_of(tmp_path, TWO, "--seconds", "1000", "--collect", str(tmp_path / "out")) == 0
    assert next_of(tmp_path, TWO) == 0
    folder, put = packing.unpack_whole(tmp_path / "out", tmp_path / "runs")
    assert (folder.store.rounds()[-1], len(folder.history()), put) == (4, 4, False)


def test_pieces_of_another_run_are_refused(tmp_path: Path) -> None:
    assert next_of(tmp_path, ONE, "--collect", str(tmp_path / "out")) == 0
    assert next_of(tmp_path, ONE.replace("clients = 4", "clients = 5"), runs="others") == 0
    with pytest.raises(ConfigError, match=r"holds another run than .*out; choose another --runs$"):
        packing.unpack_whole(tmp_path / "out", tmp_path / "others")
    assert Folder(tmp_path / "others/digits/fedavg/seed-0").run().clients == 5


def test_a_folder_that_was_being_unpacked_is_no_run(tmp_path: Path) -> None:
    for name in ("seed-0", "seed-0.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("rounds = 3\n")
        (tmp_path / name / "metrics.jsonl").touch()
    assert [folder.path.name for folder, _ in evidence.begun(tmp_path)] == ["seed-0"]


# -- before the device is touched --------------------------------------------------------------------------------------


def test_a_full_disk_or_missing_data_are_told_of_before_the_device_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    touched: list[str] = []
    monkeypatch.setattr(headline, "check_device", touched.append)
    usage = namedtuple("usage", "free")
    free = {"runs": 2**10, "out": 2**10}
    monkeypatch.setattr(headline.shutil, "disk_usage", lambda path: usage(free[Path(path).name]))
    for name in free:
        (tmp_path / name).mkdir()
    words = ["--collect", str(tmp_path / "out")]
    assert next_of(tmp_path, TWO, *words) == 2
    out, err = capsys.readouterr()
    assert out == "queue.toml: 0 of 2 runs finished\n"
    assert err.startswith(f"error: digits/fedavg needs 0.4 MiB at {tmp_path / 'runs'}, where 0.0 are free; ")
    assert err.endswith("make room there, or choose another --runs\n")
    free["runs"] = 2**40
    assert next_of(tmp_path, TWO, *words) == 2
    assert capsys.readouterr().err.endswith(
        f"needs 60.0 MiB at {tmp_path / 'out'}, where 0.0 are free; make room there, or choose another --collect\n"
    )
    cifar = '[[run]]\nnames = ["smofi_table2/cifar10/smofi"]\nseeds = [0]\n'
    assert next_of(tmp_path, 'set = { device = "cuda" }\n' + cifar, "--data", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith(f"error: cifar10: no data files under {tmp_path}; expected ")
    assert touched == []
    assert next_of(tmp_path, TWO) == 0 and set(touched) == {"cpu"}


def test_a_folder_of_another_run_is_refused_before_the_device_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert next_of(tmp_path, TWO) == 0
    touched: list[str] = []
    monkeypatch.setattr(headline, "check_device", touched.append)
    assert next_of(tmp_path, TWO.replace("clients = 4", "clients = 5")) == 2
    assert "holds another run: clients is 4 there and 5 here; " in capsys.readouterr().err
    assert touched == []


def test_a_run_that_is_only_recorded_begins_again_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert next_of(tmp_path, TWO, "--collect", str(tmp_path / "out")) == 0
    assert record(tmp_path) == 0
    longer = TWO.replace("rounds = 4", "rounds = 5")
    assert next_of(tmp_path, longer, runs="empty") == 0
    told = f"begins again, as 4 rounds are recorded but no checkpoint is in {tmp_path / 'empty'}"
    assert f"digits/fedavg: {told}\ndigits/fedavg: from round 1 to 5\n" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError("a bug"), 1), (KeyboardInterrupt(), 130)])
def test_a_run_that_fails_or_is_interrupted_is_packed_as_far_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    def broken(self: object, training: object, record: dict[str, int]) -> None:
        if record["round"] == 3:
            raise error

    monkeypatch.setattr(headline.Watch, "round", broken)
    words = ["--checkpoint-every", "2", "--collect", str(tmp_path / "out")]
    assert next_of(tmp_path, ONE, *words) == status
    folder, _ = packing.unpack_whole(tmp_path / "out", tmp_path / "there")
    assert folder.store.rounds() == [2] and folder.path.parent.name == "fedavg"


def test_the_run_trained_last_can_be_packed_later(tmp_path: Path) -> None:
    assert next_of(tmp_path, TWO) == 0
    assert headline.main(["--runs", str(tmp_path / "runs"), "--collect", str(tmp_path / "out")]) == 0
    assert packing.unpack_whole(tmp_path / "out", tmp_path / "there")[0].path.parent.name == "sl"
