"""`cutlayer plan`: its numbers, its files, and what it says to mistakes."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from test_cli import mistake, say  # noqa: F401

from cutlayer.cli import plan as planning
from cutlayer.planning.profile import profile
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder

THREE = """name,tflops,mbit_per_s_up,mbit_per_s_down,memory_gb
watch,0.0001,2,4,0.1
phone,0.001,10,40,1
laptop,0.01,80,160,8
"""
PLAN = ["plan", "--model", "cnn", "--devices", "devices.csv"]
UNITS = 4  # of the cnn


@pytest.fixture
def told(say: Any) -> Any:  # noqa: F811
    """`cutlayer` in a folder with a list of three devices."""
    Path("devices.csv").write_text(THREE)
    return say


def left(folder: str, *records: dict[str, Any], run: Run | None = None) -> None:
    """The folder of a run with these records."""
    path = Path(folder)
    path.mkdir(parents=True)
    chosen = run or Run(model=Choice("cnn"), clients=3, devices=Choice("file", {"path": "devices.csv"}))
    (path / "config.toml").write_text(config.dumps(chosen))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def bound(beta: float = 2.0, units: int = UNITS) -> dict[str, Any]:
    return {"beta": beta, "lr": 0.01, "noise": [1.0] * units, "slope": [0.5] * units, "gap": 1.5}


def test_numbers_of_a_plan(told: Any) -> None:
    found = told(*PLAN, "--json").json
    assert (found["model"], found["interval"], found["mode"], found["samples"]) == ("cnn", 15, "joint", None)
    assert found["bound"]["from"] == (
        "one batch of 32 random samples (name a data set with --data), at the initial weights"
    )
    assert found["bound"]["lr"] == 5e-4 and len(found["bound"]["noise"]) == UNITS
    assert [d["name"] for d in found["devices"]] == ["watch", "phone", "laptop"]
    assert [d["tflops"] for d in found["devices"]] == pytest.approx([1e-4, 1e-3, 1e-2])
    assert [d["memory_gb"] for d in found["devices"]] == pytest.approx([0.1, 1, 8])
    costs = profile(planning.build.model("cnn", {"image_size": 8}), (1, 8, 8), 0)
    for device in found["devices"]:
        cut, batch, seconds = device["cut"], device["batch"], device["seconds"]
        forward = batch * costs.cumulative_forward_flops[cut] / (1e12 * device["tflops"])
        assert seconds["forward"] == pytest.approx(forward) and seconds["backward"] == pytest.approx(2 * forward)
        bits = 32 * batch * costs.activations[cut]
        assert seconds["up"] == pytest.approx(bits / (1e6 * device["mbit_per_s_up"]))
        assert seconds["down"] == pytest.approx(bits / (1e6 * device["mbit_per_s_down"]))
        assert device["unit"] == costs.rows[cut - 1].name
        assert (device["before"]["cut"], device["before"]["batch"]) == (2, 16)
    after, before = found["plan"], found["before"]
    there = max(d["seconds"]["forward"] + d["seconds"]["up"] for d in found["devices"])
    back = max(d["seconds"]["backward"] + d["seconds"]["down"] for d in found["devices"])
    assert after["split"] == pytest.approx(there + after["server"] + back)
    assert after["seconds_per_mini_batch"] == pytest.approx(after["split"] + after["aggregation"] / 15)
    assert after["seconds"] == pytest.approx(after["mini_batches"] * after["seconds_per_mini_batch"])
    own = [sum(d["seconds"].values()) for d in found["devices"]]
    assert own[after["straggler"]] == max(own)
    assert after["seconds"] < before["seconds"] and before["straggler"] == 0
    assert (found["excluded"], found["out"], found["figure"]) == ([], None, None)


def test_a_plan_as_tables(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = told(*PLAN, "--json").json
    said = told(*PLAN)
    assert (said.code, said.err) == (0, "")
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert lines[0] == "cnn on 3 devices, aggregated every 15 mini-batches"
    phone = found["devices"][1]
    seconds = phone["seconds"]
    row = (
        f"1 phone {phone['cut']} {phone['unit']} {phone['batch']} {phone['limit']} "
        f"{seconds['forward'] + seconds['backward']:.3g} {seconds['up'] + seconds['down']:.3g} 0.001 10"
    )
    assert row in [line.replace(" ◀", "") for line in lines]
    assert sum(" ◀ " in line for line in lines) == 1
    before, after = found["before"], found["plan"]
    names = [device["name"] for device in found["devices"]]
    for name, worth in (("before: cut 2, batch 16", before), ("the plan", after)):
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        each = f"{math.ceil(worth['mini_batches']):,} {worth['seconds_per_mini_batch']:.4g}"
        shares = f"{worth['split']:.4g} {worth['aggregation'] / 15:.3g}"
        assert line.endswith(f" {each} {names[worth['straggler']]} {shares}")
    assert f"{before['seconds'] / after['seconds']:.2f} times as fast to the target as before" in lines
    assert f"estimated from {found['bound']['from']}" in lines


def test_the_same_seed_gives_the_same_plan(told: Any) -> None:
    words = ["plan", "--model", "cnn", "--devices", "pool", "--clients", "4", "--json"]
    assert told(*words).out == told(*words).out != told(*words, "--seed", "1").out


def test_a_plan_file_is_a_run_of_it(told: Any) -> None:
    said = told(*PLAN, "--out", "new/mine.toml", "--interval", "5", "--lr", "0.1", "--mode", "paper", "--seed", "3")
    assert said.out.splitlines()[-2:] == [
        "plan: new/mine.toml, for digits: 20 rounds of 5 mini-batches with lr 0.1",
        "train it with: cutlayer run new/mine.toml",
    ]
    assert tomllib.loads(Path("new/mine.toml").read_text())["partition"] == {"name": "iid"}  # as many samples for all
    found = told(*PLAN, "--interval", "5", "--lr", "0.1", "--mode", "paper", "--seed", "3", "--json").json
    spelled = tomllib.loads(Path("new/mine.toml").read_text())
    assert (spelled["name"], spelled["data"], spelled["clients"], spelled["seed"]) == ("mine", "digits", 3, 3)
    assert spelled["model"] == {"name": "cnn"}
    assert spelled["cut"] == max(device["cut"] for device in found["devices"])  # so nothing moves in the first round
    assert spelled["optimiser"] == {"name": "sgd", "lr": 0.1}
    # the clock of the run is then the planner's: one server for all, and models take time
    assert spelled["devices"] == {"name": "file", "path": "devices.csv", "lanes": "shared", "model_sync": True}
    assert spelled["method"] == {
        "name": "hasfl",
        "interval": 5,
        "mode": "paper",
        "batches": [device["batch"] for device in found["devices"]],
        "cuts": [device["cut"] for device in found["devices"]],
    }


@pytest.mark.parametrize(("devices", "clients"), [("devices.csv", "3"), ("table1", "6")])
def test_a_run_of_the_plan_takes_the_predicted_time(told: Any, devices: str, clients: str) -> None:
    words = ["plan", "--model", "cnn", "--data", "digits", "--devices", devices, "--clients", clients]
    found = told(*words, "--interval", "3", "--samples", "20", "--set", "partition=iid", "--out", "mine.toml", "--json")
    predicted = found.json["plan"]
    said = told("run", "mine.toml", "--rounds", "2", "--engine", "loop", "--quiet", "--json")
    assert (said.code, [row["name"] for row in said.json["runs"]]) == (0, ["mine"])
    seconds = [record["simulated_seconds"] for record in Folder(Path("runs/mine/seed-0")).history()]
    one_round = 3 * predicted["split"] + predicted["aggregation"]
    assert seconds == pytest.approx([one_round, 2 * one_round], rel=1e-9)


def test_settings_reach_the_model_the_devices_and_the_file(told: Any) -> None:
    settings = ["--set", "model.width=4", "--set", "devices.server_tflops=0.5", "--set", "rounds=7"]
    assert told(*PLAN, *settings, "--clients", "2", "--out", "mine.toml", "--optimiser", "momentum").code == 0
    spelled = tomllib.loads(Path("mine.toml").read_text())
    assert spelled["model"] == {"name": "cnn", "width": 4}
    assert (spelled["clients"], spelled["rounds"], spelled["devices"]["server_tflops"]) == (2, 7, 0.5)
    assert spelled["optimiser"] == {"name": "sgd", "lr": 5e-4, "momentum": 0.9}
    slow, fast = (
        told(*PLAN, "--set", f"devices.server_tflops={speed}", "--json").json["before"]["server"] for speed in (0.5, 1)
    )
    assert slow == pytest.approx(2 * fast)


def test_real_data_tell_the_samples_and_the_estimates(told: Any) -> None:
    found = told(*PLAN, "--data", "digits", "--json").json
    assert found["bound"]["from"] == "one batch of 32 samples of digits, at the initial weights"
    assert found["samples"] == 1437 // 3
    assert found["bound"]["noise"] != told(*PLAN, "--json").json["bound"]["noise"]
    few = told(*PLAN, "--samples", "2", "--target", "0.01", "--json").json
    assert few["samples"] == 2 and max(device["batch"] for device in few["devices"]) <= 2
    assert few["bound"]["target"] == 0.01


def test_no_planned_batch_is_smaller_than_the_least(told: Any) -> None:
    def batches(*words: str) -> list[int]:
        return [device["batch"] for device in told(*PLAN, *words, "--json").json["devices"]]

    assert batches() == batches("--least-batch", "1") and min(batches()) < 8
    assert min(batches("--least-batch", "8", "--out", "mine.toml")) == 8
    assert "least_batch" not in tomllib.loads(Path("mine.toml").read_text())["method"]  # nothing is planned there
    assert set(batches("--samples", "7", "--least-batch", "8")) == {7}  # all that there are


def test_a_run_tells_the_model_the_devices_and_the_estimates(told: Any) -> None:
    left("old", {"round": 1, "bound": bound(beta=9.0)}, {"round": 2, "bound": bound()}, {"round": 3})
    found = told("plan", "--run", "old", "--json").json
    assert (found["model"], len(found["devices"]), found["samples"]) == ("cnn", 3, 479)
    assert found["bound"] | {"target": None} == {"from": "old, round 2", "target": None, **bound()}
    again = told("plan", "--run", "old", "--lr", "0.002", "--devices", "sample", "--json").json
    assert (again["bound"]["lr"], len(again["devices"])) == (0.002, 20)


def test_the_picture_and_many_devices(told: Any) -> None:
    said = told("plan", "--model", "cnn", "--devices", "pool", "--clients", "60", "--figure", "there/plan.png")
    assert said.out.splitlines()[-1] == "figure: there/plan.png"
    assert matplotlib.image.imread("there/plan.png").shape[1] == 1360
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert sum(line.split(" ")[0].isdecimal() for line in lines if line) == 2 * 40  # above and below: 80 columns
    assert any(line.startswith("and 20 more devices, which --json tells of. All of them: cut ") for line in lines)
    found = told("plan", "--model", "cnn", "--devices", "pool", "--clients", "60", "--json").json
    assert len(found["devices"]) == 60


def test_a_target_that_is_reached_already(told: Any) -> None:
    found = told(*PLAN, "--target", "100", "--json").json
    assert found["reached"] and not told(*PLAN, "--json").json["reached"]
    each = [found[which]["seconds_per_mini_batch"] for which in ("before", "plan")]
    words = " ".join(told(*PLAN, "--target", "100").out.split())
    assert f"a mini-batch takes {each[0] / each[1]:.2f} times less than before" in words
    assert (
        f"the squared gradient norm is {sum(found['bound']['slope']):.3g} already, below the target 100, so a number "
        "of mini-batches would mean nothing, and batches are as small as they may be; give a smaller --target, --lr or "
        "--interval, or a --least-batch"
    ) in words
    assert "times as fast" not in words


def test_a_learning_rate_that_is_set_is_the_one_that_is_planned_for(told: Any) -> None:
    found = told(*PLAN, "--set", "optimiser.lr=0.1", "--out", "mine.toml", "--json").json
    assert found["bound"]["lr"] == 0.1 == tomllib.loads(Path("mine.toml").read_text())["optimiser"]["lr"]


def test_a_u_shape_is_not_planned_for(told: Any) -> None:
    said = told(*PLAN, "--set", "head=head")
    assert (said.code, said.err.strip()) == (
        2,
        "error: a plan has one cut for each device, but a head makes the model U-shaped; leave head out",
    )


def test_random_devices_are_twenty(told: Any) -> None:
    assert len(told("plan", "--model", "cnn", "--json").json["devices"]) == 20


def test_a_model_that_reads_characters(told: Any) -> None:
    words = ["plan", "--model", "char_transformer", "--devices", "devices.csv", "--set", "model.width=16", "--json"]
    said = told(*words, "--set", "model.layers=1", "--out", "mine.toml")
    assert said.code == 0, said.err
    assert tomllib.loads(Path("mine.toml").read_text())["data"] == "shakespeare"


def test_a_device_without_memory_is_left_out(told: Any) -> None:
    Path("devices.csv").write_text(THREE.replace("2,4,0.1", "2,4,0.000001"))
    said = told(*PLAN, "--out", "mine.toml")
    assert (
        said.code == 2 and "left out: watch" in said.out and "note: infeasible_memory: device 0 is left out" in said.out
    )
    assert said.err == (
        "error: mine.toml is not written: the plan leaves out watch, but a run needs all of its devices; "
        "give them more memory, or take them off the list and plan again\n"
    )
    assert not Path("mine.toml").exists()
    found = told(*PLAN, "--json").json
    assert found["excluded"] == [{"device": 0, "name": "watch"}]
    assert [device["device"] for device in found["devices"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan", "there is no model to plan for; give --model, or --run with the folder of a run"),
        (
            "plan --model vgg61",
            "unknown model 'vgg61' in the command line, [model]; did you mean 'vgg16' or 'vgg11'?",
        ),
        ("plan --model cnn --lr -0.1", "--lr is -0.1, but it must be a number above 0."),
        ("plan --model cnn --target 0", "--target is 0.0, but it must be a number above 0."),
        ("plan --model cnn --mode jont", "unknown mode 'jont' in --mode; did you mean 'joint'?"),
        ("plan --model cnn --optimiser adm", "unknown optimiser 'adm' in --optimiser; did you mean 'adam'?"),
        ("plan --model cnn --input 8by8", "--input '8by8' is no shape; write for example --input 3x32x32"),
        ("plan --model cnn --data digit", "unknown data set 'digit' in the command line; did you mean 'digits'?"),
        (
            "plan --model cnn --data digits --classes 3",
            "the data tell the shape of a sample and the classes; leave out --input and --classes",
        ),
        (
            "plan --model cnn --data digits --run old",
            "--run brings its own estimates, so there is nothing to probe on --data; give one of them",
        ),
        ("plan --model cnn --devices tabel1", "unknown devices 'tabel1' in --devices; did you mean 'table1'?"),
        (
            "plan --model cnn --devices no.csv",
            "there is no device file no.csv; check the path, which is relative to the working directory",
        ),
        (
            "plan --model cnn --devices empty.csv",
            "the device file empty.csv holds no devices; give one for each client",
        ),
        (
            "plan --model cnn --devices devices.csv --clients 5",
            "the device file devices.csv holds 3 devices, but the run has 5 clients; "
            "add devices, or use at most 3 clients",
        ),
        (
            "plan --run nowhere",
            "there is no run in nowhere; give the folder with its config.toml, such as runs/mine/seed-0",
        ),
        (
            "plan --run plain",
            "plain/metrics.jsonl has no estimates of the bound; the method hasfl records them where its batches or "
            "cuts are planned in training; give such a run, or leave out --run to probe the model",
        ),
        (
            "plan --run broken",
            "broken/metrics.jsonl: the bound of round 1 is damaged: Object missing required field slope; run it again",
        ),
        (
            "plan --run other",
            "the bound has noise for 7 layers, but the model has 4; estimate it with this model",
        ),
        (
            "plan --model cnn --devices devices.csv --target 1e-5 --samples 1",
            "no batch sizes reach the target 1e-05 with these cuts; raise the target, lower the learning rate or the "
            "interval, or give the devices more memory or samples",
        ),
        ("plan --model cnn --out plan.txt", "cannot write a plan into plan.txt; use a name that ends in .toml"),
        (
            "plan --model cnn --figure plan.gif",
            "cannot draw a figure into plan.gif; use a name that ends in .png, .pdf or .svg",
        ),
        ("plan --model cnn --set model.widht=3", "unknown key 'widht' in --set, [model]; did you mean 'width'?"),
        (
            "plan --model cnn --set devices.tflop=[1.0,2.0]",
            "unknown key 'tflop' in --set, [devices]; did you mean 'tflops' or 'server_tflops'?",
        ),
        (
            "plan --model cnn --devices pool --set devices.kapa=3",
            "unknown key 'kapa' in --set, [devices]; did you mean 'kappa'?",
        ),
        (
            "plan --model vgg16 --input 3x8x8",
            "image_size is 8, but VGG halves an image 5 times; pad or resize the images to 32 or more",
        ),
    ],
)
def test_mistakes(told: Any, words: str, message: str) -> None:
    Path("empty.csv").write_text("tflops,mbit_per_s\n")
    left("plain", {"round": 1})
    left("broken", {"round": 1, "bound": {"beta": 1.0, "lr": 0.1, "gap": 1.0, "noise": [1.0]}})
    left("other", {"round": 1, "bound": bound(units=7)})
    assert mistake(told(*words.split())) == message


def test_no_device_holds_the_first_layer(told: Any) -> None:
    Path("devices.csv").write_text("tflops,mbit_per_s,memory_gb\n1,10,0.000001\n")
    assert mistake(told(*PLAN)) == (
        "no device holds one sample and the first layer; give the devices more memory or samples, "
        "or cut a smaller model"
    )


def test_a_plan_for_samples_that_no_data_set_has(told: Any) -> None:
    words = [*PLAN, "--input", "2x16x16"]
    said = told(*words, "--out", "mine.toml")
    assert (said.code, said.err) == (
        2,
        "error: mine.toml is not written: no data set is known to have such samples; name one with --data, "
        "or with --set data=NAME\n",
    )
    assert told(*words, "--set", "data=cifar10", "--out", "mine.toml").code == 0
    assert tomllib.loads(Path("mine.toml").read_text())["data"] == "cifar10"


def test_a_plan_file_that_cannot_be_written(told: Any) -> None:
    Path("mine.toml").mkdir()
    said = told(*PLAN, "--out", "mine.toml")
    assert said.out.startswith("cnn on 3 devices")
    assert said.err == "error: the plan could not be written to mine.toml: Is a directory; choose another --out\n"
