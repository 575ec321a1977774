"""The command line: what it offers, what it leaves, and what it says to mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import typer.main
from test_profile import RESNET18

import cutlayer
from cutlayer import cli, recipes
from cutlayer.cli import catalogue, choose, launch
from cutlayer.data import sources
from cutlayer.methods import METHODS
from cutlayer.recipes.recipe import Recipe
from cutlayer.recipes.scale import scaled
from cutlayer.runs import simulation
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.stopping import Record
from cutlayer.runs.training import Training

RUN_OPTIONS = {
    "what",
    "--rounds",
    "--seed",
    "--seeds",
    "--engine",
    "--device",
    "--precision",
    "--data",
    "--out",
    "--scale",
    "--set",
    "--resume",
    "--overwrite",
    "--quiet",
    "--json",
}
FROZEN = {
    "run": RUN_OPTIONS | {"--only", "--dry-run", "--plugin"},
    "keys init": {"folder", "--passphrase-file", "--no-passphrase"},
    "keys request": {"name", "--role", "--out", "--renew"},
    "keys sign": {"folder", "requests", "--role", "--name", "--renew", "--server", "--days", "--passphrase-file"},
    "keys revoke": {"folder", "names"},
    "keys list": {"folder", "--json"},
    "keys trial": {"folder", "--clients", "--server", "--days"},
    "serve": {
        "what",
        "--engine",
        "--keys",
        "--listen",
        "--insecure",
        "--role",
        "--train",
        "--deadline",
        "--quorum",
        "--round-seconds",
        "--patience",
        "--least",
        "--most-steps",
        "--connections",
        "--handshake",
        "--per-address",
        "--packing",
        "--test",
        "--plugin",
        "--data",
        "--out",
        "--set",
        "--overwrite",
        "--metrics-port",
        "--log-file",
        "--quiet",
    },
    "join": {
        "address",
        "--data",
        "--test",
        "--train",
        "--fed",
        "--keys",
        "--insecure",
        "--name",
        "--config",
        "--any-run",
        "--never",
        "--allow-raw",
        "--private-seed",
        "--attempts",
        "--packing",
        "--round-seconds",
        "--day-seconds",
        "--memory",
        "--audit",
        "--dry-run",
        "--state",
        "--device",
        "--give-up",
        "--plugin",
        "--data-root",
        "--quiet",
    },
    "compare": {
        "paths",
        "--metric",
        "--mode",
        "--target",
        "--together",
        "--figure",
        "--width",
        "--format",
        "--per-seed",
        "--bold-best",
        "--traffic",
        "--samples",
        "--paper-convention",
    },
    "cuts": RUN_OPTIONS | {"--method", "--cut", "--alpha", "--codecs", "--figure", "--plugin"},
    "profile": {
        "model",
        "--input",
        "--classes",
        "--set",
        "--optimiser",
        "--cut",
        "--memory",
        "--batch",
        "--perturbations",
        "--overlap",
        "--device",
        "--json",
        "--plugin",
    },
    "plan": {
        "--model",
        "--devices",
        "--clients",
        "--out",
        "--figure",
        "--interval",
        "--lr",
        "--mode",
        "--target",
        "--samples",
        "--least-batch",
        "--input",
        "--classes",
        "--optimiser",
        "--data",
        "--run",
        "--seed",
        "--set",
        "--json",
    },
    "overlap": {
        "--layers",
        "--layer-params",
        "--head-params",
        "--hidden",
        "--batch",
        "--tokens",
        "--value-bytes",
        "--uplink",
        "--downlink",
        "--rtt",
        "--client-tflops",
        "--server-tflops",
        "--noise",
        "--draws",
        "--seed",
        "--figure",
        "--json",
    },
    "bench": {
        "--clients",
        "--batch",
        "--model",
        "--cut",
        "--precision",
        "--device",
        "--steps",
        "--turns",
        "--engines",
        "--baselines",
        "--end-to-end",
        "--seed",
        "--output",
        "--json",
    },
    "list": {"kind", "--plugin", "--json"},
}

SHORT = ["--rounds", "2", "--engine", "loop"]
WHOLE = {"fedavg", "fedprox", "fednar", "fedavgm", "slowmo", "fednag"}  # train the whole model at the client
WITH_A_CUT = ", ".join(name for name in METHODS if name not in WHOLE)


class Said:
    """Exit code, stdout and stderr of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUTLAYER_DATA", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # whatever terminal the tests are run from

    def call(*words: str) -> Said:
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        captured = capsys.readouterr()
        return Said(int(left.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def wide(say: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in a terminal that is wide enough for whole tables."""
    monkeypatch.setenv("COLUMNS", "160")
    return say


def mistake(said: Said) -> str:
    """The text of an error: one line on stderr, nothing on stdout, exit code 2."""
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err.removeprefix("error: ").strip()


def test_commands_and_options_are_frozen() -> None:
    commands = dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    commands |= {f"keys {name}": command for name, command in commands.pop("keys").commands.items()}
    found = {name: {p.opts[0] for p in command.params if p.name != "help"} for name, command in commands.items()}
    assert found == FROZEN


@pytest.mark.parametrize("command", FROZEN)
def test_every_command_has_help_with_examples(say: Any, command: str) -> None:
    said = say(*command.split(), "--help")
    assert said.code == 0
    assert "Examples:" in said.out and f"cutlayer {command}" in said.out.split("Examples:")[1]


def test_the_help_of_a_command_is_broken_by_the_terminal_alone(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    lines = [line.strip() for line in say("bench", "--help").out.splitlines()]
    assert any(line.endswith("CIFAR-10. Takes about a minute; a row that cannot be timed tells why.") for line in lines)


def test_version_and_help(say: Any) -> None:
    assert say("--version").out == f"cutlayer {cutlayer.__version__}\n"
    alone = say()
    assert (alone.code, "Usage: cutlayer" in alone.out) == (0, True)
    assert say("run").code == 2
    assert say("train", "digits").code == 2


def test_imports_stay_light() -> None:
    code = (
        "import sys\n"
        "def heavy(): return [m for m in ('typer', 'rich', 'matplotlib', 'scipy', 'grpc', 'ray', 'cryptography')"
        " if m in sys.modules]\n"
        "import cutlayer; print(heavy()); import cutlayer.cli; print(heavy())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['typer', 'rich']"]


def test_a_recipe_leaves_folders_a_table_and_a_picture(say: Any, wide: Any) -> None:
    said = wide("run", "digits", "--only", "fedavg", "--only", "sfl_v1", *SHORT)
    assert said.code == 0
    for method in ("fedavg", "sfl_v1"):
        folder = Folder(Path(f"runs/digits/{method}/seed-0"))
        assert [record["round"] for record in folder.history()] == [1, 2]
        assert folder.run().method.name == method and folder.model.exists()
    assert matplotlib.image.imread("runs/digits/figure.png").shape == (580, 1360, 4)
    lines = [line.split() for line in said.out.splitlines()]
    (fedavg,) = (line for line in lines if line[:1] == ["fedavg"] and len(line) > 6)
    assert fedavg[-5:-3] == ["1", "2"]  # one seed, two rounds
    assert "figure: runs/digits/figure.png" in said.out
    assert "fedavg: round 1/2, accuracy " in said.err and "sfl_v1: round 2/2, accuracy " in said.err
    # SFL-V1 is FedAvg, whatever the cut
    compared = say("compare", "runs", "--format", "json").json["runs"]
    assert compared[0]["final_accuracy"] == compared[1]["final_accuracy"]


def test_json_is_alone_on_stdout(say: Any) -> None:
    said = say("run", "digits", "--only", "sl", "--seeds", "2", "--seed", "5", "--out", "there", "--json", *SHORT)
    (row,) = said.json["runs"]
    assert (row["name"], row["seeds"], row["rounds"]) == ("digits/sl", [5, 6], [2, 2])
    assert row["folders"] == ["there/digits/sl/seed-5", "there/digits/sl/seed-6"]
    assert said.json["figure"] == "there/digits/figure.png"
    assert "sl seed 6: round 2/2" in said.err


def test_quiet_says_nothing_on_the_way(say: Any) -> None:
    assert say("run", "digits", "--only", "sl", "--quiet", *SHORT).err == ""


def test_auto_says_which_engine_and_why(say: Any) -> None:
    said = say("run", "digits", "--only", "fedavg", "--rounds", "1")
    assert said.err.startswith("engine auto: ") and " MFLOP, and stacking clients pays off up to 32 MFLOP\n" in said.err


def test_a_file_spells_a_run(say: Any) -> None:
    Path("mine.toml").write_text(
        'rounds = 9\nengine = "loop"\nmethod = "fedavg"\n[optimiser]\nname = "sgd"\nlr = 0.2\n'
    )
    changes = ["--rounds", "1", "--set", "optimiser.momentum=0.5", "--set", "model=mlp", "--set", "model.hidden=[8, 4]"]
    assert say("run", "mine.toml", *changes).code == 0
    run = Folder(Path("runs/mine/seed-0")).run()
    assert (run.name, run.rounds, run.method.name) == ("mine", 1, "fedavg")
    assert run.optimiser.options == {"lr": 0.2, "momentum": 0.5}
    assert (run.model.name, run.model.options) == ("mlp", {"hidden": (8, 4)})


def test_a_file_changes_a_recipe(say: Any) -> None:
    Path("mine.toml").write_text('recipe = "digits"\nrounds = 1\nengine = "loop"\n')
    assert say("run", "mine.toml", "--only", "fedavg", "--only", "sl").code == 0
    assert sorted(str(p) for p in Path("runs").glob("*/*/seed-0")) == ["runs/mine/fedavg/seed-0", "runs/mine/sl/seed-0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('metod = "sl"', "unknown key 'metod' in mine.toml; did you mean 'method' or 'mode' or 'model'?"),
        (
            'method = "fedavgg"',
            "unknown method 'fedavgg' in mine.toml, [method]; did you mean 'fedavg' or 'fedavgm' or 'fednag'?",
        ),
        ('[method]\nname = "sfl_v1"\nsyn = "step"', "unknown key 'syn' in mine.toml, [method]; did you mean 'sync'?"),
        ('recipe = "digit"', "unknown recipe 'digit' in mine.toml; did you mean 'digits'?"),
        ("recipe = 1", 'mine.toml: recipe = 1 is no name; write for example recipe = "digits"'),
        (
            'recipe = "digits"\nmethod = "sl"',
            "with these changes mine/fedavg and mine/sl are the same run; keep one of them with --only",
        ),
        (
            "cut = 9",
            "cut 9 is out of range: Sequential has 4 units, so cuts go from 0 to 4: "
            "1 'conv1', 2 'conv2', 3 'fc1', 4 'head'.",
        ),
    ],
)
def test_mistakes_in_a_file(say: Any, text: str, message: str) -> None:
    Path("mine.toml").write_text(text)
    assert mistake(say("run", "mine.toml")) == message
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run digit", "unknown recipe 'digit'; did you mean 'digits'?"),
        ("run no.toml", "there is no configuration file no.toml; check the path"),
        ("run digits --only fedavgg", "unknown run 'fedavgg' in digits (--only); did you mean 'fedavg'?"),
        ("run digits --engine lop", "unknown engine 'lop' in the command line; did you mean 'loop'?"),
        (
            "run digits --set optimiser.lr",
            "--set 'optimiser.lr' is not key=value; write for example --set optimiser.lr=0.1",
        ),
        ("run digits --set rouds=3", "unknown key 'rouds' in --set; did you mean 'rounds' or 'per_round' or 'codecs'?"),
        ("run digits --set rounds=few", 'rounds = "few" in --set does not fit: rounds must be a whole number'),
        (
            "run digits --set model.width=8 --set model=mlp",
            "--set 'model=mlp' would replace what another --set says about model; give it first",
        ),
        ("run digits --resume --overwrite", "--resume and --overwrite contradict each other; give one of them"),
        (
            "run cifar10",
            "cifar10: no data folder is set; point CUTLAYER_DATA or --data at the folder that holds "
            "cifar10.npz, cifar-10-batches-bin/ or cifar-10-batches-py/.",
        ),
        ("compare --figure a.gif .", "cannot draw a figure into a.gif; use a name that ends in .png, .pdf or .svg"),
        ("profile resnet", "unknown model 'resnet'; did you mean 'resnet50' or 'resnet34' or 'resnet18'?"),
        ("profile cnn --input 8by8", "--input '8by8' is no shape; write for example --input 3x32x32"),
        ("profile cnn --optimiser adm", "unknown optimiser 'adm'; did you mean 'adam' or 'adamw'?"),
        ("profile cnn --set widht=3", "unknown key 'widht' in --set, [model]; did you mean 'width'?"),
        (
            "profile cnn --cut [conv]",
            "Sequential has no unit '[conv]' to cut after; did you mean 'conv2'? "
            "It has 1 'conv1', 2 'conv2', 3 'fc1', 4 'head'.",
        ),
        ("profile cnn --set width=x", 'width = "x" in --set, [model] does not fit: width must be a whole number'),
        (
            "profile cnn --set width=-3",
            "the model 'cnn' cannot be built with num_classes = 10, in_channels = 1, image_size = 8, width = -3: "
            "Trying to create tensor with negative dimension -3: [-3, 1, 3, 3]",
        ),
        ("run digits --scale 2", "the scale is 2; it must be above 0 and at most 1"),
        (
            "run smofi_table2 --only cifar10 --only fedavgm",
            "unknown run 'fedavgm' in smofi_table2 (--only); did you mean 'fedavg'?",
        ),
        ("cuts digit", "unknown recipe 'digit'; did you mean 'digits'?"),
        ("cuts --method slf_v1", "unknown method 'slf_v1' in --method; did you mean 'sfl_v1' or 'sfl_v2' or 'sl'?"),
        (
            "cuts --method sfl_v1 --method fednag",
            f"fednag trains the whole model at the client, so it has no cut to study; use some of {WITH_A_CUT}",
        ),
        (
            "cuts --method sfl_v1 --set method=fedprox",
            f"fedprox trains the whole model at the client, so it has no cut to study; use some of {WITH_A_CUT}",
        ),
        ("list method", "unknown kind 'method'; did you mean 'methods' or 'models' or 'meters'?"),
    ],
)
def test_mistakes_on_the_command_line(say: Any, words: str, message: str) -> None:
    assert mistake(say(*words.split())) == message


def test_a_batch_that_no_client_can_fill(say: Any) -> None:
    text = mistake(say("run", "digits", "--only", "sl", "--set", "batching.size=5000"))
    assert text.startswith("batch size 5000 is larger than every client's data (the largest client holds ")


def test_a_debugger_may_see_the_traceback(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLAYER_DEBUG", "1")
    said = say("run", "digit")
    assert said.code == 2
    assert said.err.startswith("Traceback") and "error: unknown recipe 'digit'; did you mean 'digits'?" in said.err


def test_earlier_runs_are_kept_unless_told_otherwise(say: Any) -> None:
    one = ["run", "digits", "--only", "sl", "--quiet", *SHORT]
    assert say(*one).code == 0
    refused = (
        "runs/digits/sl/seed-0 already holds a run (2 rounds done); "
        "go on with --resume, start over with --overwrite, or choose another --out"
    )
    assert mistake(say(*one)) == refused
    assert mistake(say("run", "digits")) == refused
    assert not Path("runs/digits/fedavg").exists()  # refused before the first of the five runs
    before = Path("runs/digits/sl/seed-0/metrics.jsonl").read_text()
    assert say(*one, "--overwrite").code == 0
    assert Path("runs/digits/sl/seed-0/metrics.jsonl").read_text() == before


@pytest.mark.parametrize("as_json", [False, True])
def test_a_figure_that_cannot_be_written_costs_no_numbers(say: Any, as_json: bool) -> None:
    words = ["--json"] if as_json else []
    Path("runs/digits/figure.png").mkdir(parents=True)  # in the way
    ran = say("run", "digits", "--only", "sl", "--quiet", *SHORT, *words)
    Path("file").write_text("")
    compared = say("compare", "runs", "--figure", "file/a.png", *(["--format", "json"] if as_json else []))
    for said, path, reason in (
        (ran, "runs/digits/figure.png", "Is a directory"),
        (compared, "file/a.png", "File exists"),
    ):
        assert said.code == 2
        assert said.err == (
            f"error: the figure could not be written to {path}: {reason}; the runs themselves are saved. "
            "Make room there or choose another file, then draw it with `cutlayer compare --figure`.\n"
        )
        if as_json:
            assert said.json["runs"][0]["name"] == "digits/sl"
        else:
            assert "sl" in said.out.split() and "figure: " not in said.out
    assert Folder(Path("runs/digits/sl/seed-0")).model.exists()


def test_an_interrupted_run_says_how_to_go_on(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "digits", "--only", "sfl_v2", "--rounds", "3", "--engine", "loop"]
    assert say(*words, "--out", "whole").code == 0
    real = Training.round

    def interrupted(self: Training) -> Record:
        if self.state.round == 2:
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "round", interrupted)
        said = say(*words, "--overwrite", "--out", "my runs")
    assert said.code == 130
    assert said.err.splitlines()[-2:] == [
        "stopped; my runs/digits/sfl_v2/seed-0 is saved up to round 2 of 3",
        "go on with: cutlayer run digits --only sfl_v2 --rounds 3 --engine loop --out 'my runs' --resume",
    ]
    assert say(*words, "--out", "my runs", "--resume").code == 0
    files = [Path(out) / "digits/sfl_v2/seed-0/metrics.jsonl" for out in ("whole", "my runs")]
    assert files[0].read_text() == files[1].read_text()


def test_stopped_clients_are_mentioned(say: Any) -> None:
    said = say("run", "digits", "--only", "fedavg", "--set", "optimiser.lr=1e30", *SHORT)
    assert said.code == 0
    stopped = [record["stopped"] for record in Folder(Path("runs/digits/fedavg/seed-0")).history()]
    assert sum(stopped) > 0
    assert f", {sum(stopped)} stopped, " in said.err.splitlines()[-1]
    assert "stopped" in said.out


def test_profile_of_resnet18(say: Any) -> None:
    costs = say("profile", "resnet18", "--cut", "layer1.1", "--optimiser", "adam", "--json").json
    units = [
        (u["unit"], round(u["cumulative_macs"] / 1e6, 3), round(u["share"], 4), u["activation"], u["cumulative_params"])
        for u in costs["units"]
    ]
    assert units == RESNET18
    cut = costs["cut"]
    assert (cut["number"], cut["bytes_up"], cut["bytes_down"]) == (3, 4 * 65536 + 8, 4 * 65536)  # 2097.152 kbit
    assert (cut["client"]["params"], cut["server"]["params"]) == (149_824, 11_173_962 - 149_824)
    assert (cut["client"]["optimiser_state"], cut["server"]["optimiser_state"]) == (2 * 149_824, 2 * 11_024_138)
    assert round(cut["client"]["share"], 4) == 0.2750


def test_profile_as_a_table(say: Any) -> None:
    out = say("profile", "resnet18", "--cut", "3").out
    assert out.startswith("resnet18, one sample of 3x32x32: 555.42 M multiply-adds, 11,173,962 parameters")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "3 layer1.1 150.995 301.990 65,536 256.0 73,984 73,984 27.5" in lines
    assert "client stem, layer1.0, layer1.1 149,824 585.2 KiB 149,824 27.5 %" in lines


def test_profile_names_many_units_as_a_range(wide: Any) -> None:
    lines = [" ".join(line.split()) for line in wide("profile", "densenet121", "--cut", "transition1").out.splitlines()]
    assert "client stem … transition1 (8 units) 370,176 1.4 MiB 370,176 42.2 %" in lines
    assert any(line.startswith("server denseblock2.denselayer1 … head (55 units) 6,586,250 ") for line in lines)


@pytest.mark.parametrize(
    ("words", "shape"),
    [("resnet_tiny", [1, 32, 32]), ("vgg16", [3, 32, 32]), ("vgg16 --set in_channels=2", [2, 32, 32])],
)
def test_profile_takes_the_models_own_channels(say: Any, words: str, shape: list[int]) -> None:
    costs = say("profile", *words.split(), "--json").json
    assert (costs["input"], costs["options"]["in_channels"]) == (shape, shape[0])


def test_profile_fits_the_input(say: Any) -> None:
    costs = say("profile", "cnn", "--input", "3x16x16", "--classes", "7", "--set", "width=4", "--json").json
    assert costs["options"] == {"num_classes": 7, "in_channels": 3, "image_size": 16, "width": 4}
    # 4 channels of 8x8, then 8 of 4x4, then 16 values, then 7 classes
    assert [u["activation"] for u in costs["units"]] == [256, 128, 16, 7]


def test_profile_of_a_model_that_reads_characters(say: Any) -> None:
    costs = say("profile", "char_transformer", "--json").json
    assert (costs["input"], costs["options"]) == ([80], {"num_classes": 80, "context": 80, "init": "he"})
    # an embedding looks up, it computes nothing; it gives 128 numbers for each of the 80 places
    assert [costs["units"][0][key] for key in ("unit", "forward_flops", "activation")] == ["embedding", 0, 80 * 128]
    assert costs["units"][0]["params"] == 80 * 128 + 80 * 128


def test_list_names_everything(say: Any) -> None:
    found = say("list", "--json").json
    assert list(found) == [
        *("recipes", "methods", "models", "data", "engines", "partitions", "optimisers", "schedules", "devices"),
        *("meters", "codecs", "samplers", "losses", "metrics"),
    ]
    assert {e["name"] for e in found["methods"]} >= {"fedavg", "sl", "sfl_v1", "sfl_v2", "mergesfl"}
    assert all(e["about"] for entries in found.values() for e in entries)
    sgd = next(e for e in found["optimisers"] if e["name"] == "sgd")
    assert (sgd["needs"], sgd["options"]["momentum"]) == (["lr"], 0.0)
    assert {e["source"] for e in found["recipes"]} >= {"", "SMoFi, Table 1"}
    assert list(catalogue.DATA) == sources.names() and set(catalogue.ENGINES) == set(simulation.ENGINES)


def test_list_of_one_kind_as_a_table(wide: Any) -> None:
    lines = [" ".join(line.split()) for line in wide("list", "partitions").out.splitlines()]
    assert lines[0] == "partitions"
    assert "shards A few labels per client, equal sizes. per_client=2" in lines


def test_a_run_is_named_after_the_method_that_it_trains(say: Any, tmp_path: Path) -> None:
    given = ["run", "digits", "--only", "sfl_v1", "--set", "method.name=sl", *SHORT, "--out", str(tmp_path), "--quiet"]
    assert say(*given).code == 0
    assert (tmp_path / "digits" / "sl" / "seed-0" / "metrics.jsonl").exists()
    assert not (tmp_path / "digits" / "sfl_v1").exists()


# -- which runs, how large, and what they would be ---------------------------------------------------------------------


def names(*words: str) -> set[str]:
    """The runs of Table 2 that these words leave, without the experiment's name."""
    runs = choose.chosen(recipes.runs("smofi_table2"), words, "smofi_table2")
    return {run.name.partition("/")[2] for run in runs}


def test_words_at_the_same_place_are_alternatives_and_others_must_both_fit() -> None:
    assert len(names()) == len(recipes.runs("smofi_table2"))
    assert names("smofi", "sfl_v2") == {
        f"{data}/{m}" for data in ("cifar10", "cifar100", "tiny") for m in ("smofi", "sfl_v2")
    }
    assert names("cifar10", "tiny", "smofi") == {"cifar10/smofi", "tiny/smofi"}
    assert names("tiny", "sfl_v1") == {"tiny/sfl_v1-step", "tiny/sfl_v1-epoch"}  # a method, and no name
    assert names("smofi_table2", "tiny", "sfl_v1-step") == {"tiny/sfl_v1-step"}


def test_words_that_leave_nothing(say: Any) -> None:
    words = ["run", "smofi_table2", "--only", "sfl_v1", "--only", "smofi"]
    assert mistake(say(*words)) == (
        "no run of smofi_table2 has all of the words sfl_v1, smofi (--only); see --dry-run for the names"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run digits --bogus", "no such option: --bogus"),
        ("run digits --seeds 0", "invalid value for '--seeds': "),
        ("rum", "no such command 'rum'"),
    ],
)
def test_a_mistake_in_the_options_is_told_as_any_other(say: Any, words: str, message: str) -> None:
    told = mistake(say(*words.split()))
    assert told.startswith(message) and told.endswith(f"; see `cutlayer{' run' if 'run ' in words else ''} --help`")


def test_the_list_begins_with_an_index_and_recipes_take_few_lines(say: Any) -> None:
    everything = " ".join(say("list").out.split())
    assert everything.startswith("Kinds of names: recipes, methods, models, data, engines, ")
    lines = say("list", "recipes").out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80 and len(lines) < 2 * len(recipes.RECIPES) + 6
    assert "`sample`" in say("list", "devices").out


def test_a_dry_run_shows_what_would_be_trained(wide: Any) -> None:
    said = wide("run", "smofi_table2", "--dry-run", "--only", "cifar10", "--only", "smofi", "--only", "mergesfl")
    assert said.code == 0 and not Path("runs").exists()
    shown = [" ".join(line.split()) for line in said.out.splitlines() if line.strip()]
    assert shown[:2] == ["smofi_table2/cifar10", "run method batches"]
    assert shown[3:5] == [
        "mergesfl mergesfl(regulate=True) of 32, 75 steps",
        "smofi smofi(alpha=-0.1, beta=0.3) of 32, 5 epochs",
    ]
    assert shown[5].startswith(
        "all runs: data cifar10, partition dirichlet(alpha=0.2, min_size=32), model resnet18(init=torch), "
    )
    settings = "rounds 1000, clients 20 of 100, devices pool(kappa=100.0), device cpu, engine auto, precision fp32"
    assert " ".join(shown[5:-1]).endswith(settings) and shown[-1] == "source: SMoFi, Table 2"


def test_a_dry_run_of_one_run_has_a_whole_title(say: Any) -> None:
    said = say("run", "digits", "--scale", "0.2", "--only", "fedavg", "--dry-run")
    assert said.out.splitlines()[0] == "digits@0.2"
    text = " ".join(said.out.split())
    assert "all runs: data digits, subset 0.2, partition dirichlet" in text
    assert not any(word in text for word in ("devices", "augment", "weights", "server optimiser"))


def test_a_dry_run_has_a_row_for_each_run_with_its_seeds(say: Any) -> None:
    Path("mine.toml").write_text('[grid]\nmethod = ["fedavg", "sl"]\nseed = [0, 1, 2]\n')
    lines = say("run", "mine.toml", "--dry-run").out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith((" fedavg", " sl"))] == ["fedavg", "sl"]
    assert " ".join(" ".join(lines).split()).endswith("precision fp32, seeds 0, 1, 2")


def test_a_dry_run_shows_settings_that_few_runs_have(say: Any) -> None:
    Path("mine.toml").write_text(
        'weights = "some.pth"\ndevices = "pool"\nserver_optimiser = { name = "sgd", lr = 0.2 }\n'
        "[augment]\ncrop = 2\nflip = true\n"
    )
    text = " ".join(say("run", "mine.toml", "--dry-run").out.split())
    assert text.startswith("run ─")  # no empty title
    assert "all runs: data digits, augment (crop=2, flip), partition dirichlet(alpha=0.3), model cnn, " in text
    assert "model cnn, weights some.pth, cut 1, " in text
    assert "server optimiser sgd(lr=0.2), " in text and "clients 20 of 20, devices pool, device cpu, " in text


UNFIT: dict[str, tuple[str, str]] = {
    "a cut that is not there": ('cut = "conv9"', "Sequential has no unit 'conv9' to cut after; did you mean 'conv2'?"),
    "a file that is not there": ('[data]\npath = "nothere.csv"', "there is no file or folder nothere.csv; give "),
    "more clients a round than there are": (
        "clients = 3\nper_round = 5",
        "per_round is 5; it must be from 1 to the 3 clients that hold data",
    ),
    "more clients than samples": (
        "clients = 5000",
        "cannot deal 1437 samples to 5000 clients; use at most 1437 clients",
    ),
    "a batch that nobody fills": ("batching = { size = 2000 }", "batch size 2000 is larger than every client's data"),
    "words among the features": (
        'model = "mlp"\npartition = "iid"\nclients = 2\n[data]\npath = "words.csv"',
        "line 2 of words.csv has 'red' in the column 'colour'; ",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_dry_run_finds_what_the_run_would_find_before_its_first_round(say: Any, name: str) -> None:
    Path("words.csv").write_text("age,colour,label\n3,red,0\n4,blue,1\n")
    settings, message = UNFIT[name]
    Path("mine.toml").write_text(settings + "\n")
    there = {path.name for path in Path().iterdir()}
    said = say("run", "mine.toml", "--dry-run")
    assert said.code == 2 and said.err.startswith(f"error: {message}")
    assert mistake(say("run", "mine.toml")) == said.err.removeprefix("error: ").strip()
    assert say("run", "mine.toml", "--dry-run").out.lstrip().startswith("run")  # the settings are shown all the same
    assert {path.name for path in Path().iterdir()} - {"runs"} == there


def test_a_dry_run_names_each_run_that_cannot_be_trained(say: Any) -> None:
    Path("mine.toml").write_text('[[run]]\nmethod = "sl"\n[[run]]\nname = "none"\ncut = "conv9"\n')
    said = say("run", "mine.toml", "--dry-run")
    assert said.code == 2 and not Path("runs").exists()
    first, second = said.err.splitlines()
    assert first == "error: 1 of 2 runs cannot be trained:"
    assert second.startswith("mine/none: Sequential has no unit 'conv9' to cut after")


def test_a_recipe_can_be_read_without_its_data(say: Any) -> None:
    said = say("run", "smofi_fashion_mnist", "--only", "smofi", "--only", "fedavg", "--dry-run")
    assert said.code == 0 and said.err.startswith(
        "warning: 2 of 2 runs were only read, not checked: fashion_mnist: no data folder is set; "
    )
    Path("mine.toml").write_text('data = "fashion_mnist"\n')
    assert say("run", "mine.toml", "--dry-run").err.startswith("error: fashion_mnist: no data folder is set; ")


def test_device_and_precision_from_the_command_line(say: Any) -> None:
    words = ("run", "digits", "--only", "sl", "--device", "cuda:7", "--precision", "bf16")
    (run,) = say(*words, "--dry-run", "--json").json["runs"]
    assert (run["device"], run["precision"]) == ("cuda:7", "bf16")
    assert mistake(say(*words)).startswith("device 'cuda:7' cannot be used here: ")
    assert " ".join(say(*words, "--dry-run").out.split()).endswith("device cuda:7, engine auto, precision bf16")
    for command in ("run", "cuts"):
        assert mistake(say(command, "digits", "--precision", "bf17")) == (
            "unknown precision 'bf17' in the command line; did you mean 'bf16'?"
        )
    assert mistake(say("run", "digits", "--device", "gpu", "--dry-run")) == (
        "the command line: unknown device 'gpu'; known: cpu, cuda"
    )
    assert mistake(say("run", "digits", "--set", "device=mps", "--dry-run")) == (
        "--set: unknown device 'mps'; known: cpu, cuda"
    )


def test_a_dry_run_for_machines_spells_configurations(say: Any) -> None:
    found = say("run", "digits", "--dry-run", "--only", "sl", "--set", "optimiser.lr=0.5", "--json").json
    (run,) = found["runs"]
    assert (run["name"], run["optimiser"], found["source"]) == ("digits/sl", {"name": "sgd", "lr": 0.5}, None)


def test_a_scaled_run_says_so_and_lies_apart(say: Any) -> None:
    said = say("run", "digits", "--scale", "0.1", "--only", "fedavg", "--engine", "loop")
    assert said.code == 0
    assert said.err.splitlines()[0] == "scale 0.1: 2 of 20 clients, 4 of 40 rounds, 10 % of the samples"
    run = Folder(Path("runs/digits@0.1/fedavg/seed-0")).run()
    assert (run.clients, run.per_round, run.rounds, run.subset) == (2, 2, 4, 0.1)
    assert Path("runs/digits@0.1/figure.png").exists()
    (panel,) = say("compare", "runs", "--format", "json").json["panels"]
    assert panel["departures"] == [
        "subset 0.1 instead of 1",
        "clients 2 instead of 20",
        "per_round 2 instead of 10",
        "rounds 4 instead of 40",
    ]


@pytest.mark.parametrize("scale", ["0.01", "0.05"])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_can_be_tried_small(say: Any, name: str, scale: str) -> None:
    found = say("run", name, "--scale", scale, "--dry-run", "--json").json["runs"]
    assert [run["name"] for run in found] == [
        run.name.replace(name, f"{name}@{scale}", 1) for run in recipes.runs(name)
    ]


def test_runs_that_only_the_scale_makes_alike_are_kept_apart_by_name(say: Any) -> None:
    table4 = ["run", "smofi_table4", "--dry-run", "--only", "fedavg", "--json"]
    found = say(*table4, "--scale", "0.02").json["runs"]
    assert {run.pop("name") for run in found} == {f"smofi_table4@0.02/tiny-j{j}/fedavg" for j in (10, 20, 30)}
    assert found[0] == found[1] == found[2]
    assert mistake(say(*table4, "--scale", "0.02", "--set", "per_round=2")) == (
        "with these changes smofi_table4/tiny-j10/fedavg and smofi_table4/tiny-j20/fedavg are the same run; "
        "keep one of them with --only"
    )


def test_a_file_can_be_scaled_and_keys_go_before_the_scale(say: Any) -> None:
    Path("mine.toml").write_text('rounds = 40\nclients = 10\nengine = "loop"\n')
    assert say("run", "mine.toml", "--scale", "0.2", "--rounds", "3", "--quiet").code == 0
    run = Folder(Path("runs/mine@0.2/seed-0")).run()
    assert (run.clients, run.rounds, run.subset) == (2, 3, 0.2)


def test_a_papers_scale_line_names_the_panels_that_differ() -> None:
    runs = choose.chosen(recipes.runs("smofi_table1"), ["cifar10", "cifar100", "fedavg"], "smofi_table1")
    assert launch.scale_lines(runs, [scaled(run, 0.1) for run in runs], 0.1) == [
        "scale 0.1: 10 of 100 clients, 100 of 1000 rounds, 10 % of the samples; not the paper's setting "
        "(smofi_table1/cifar10)",
        "scale 0.1: 10 of 100 clients, 60 of 600 rounds, 10 % of the samples; not the paper's setting "
        "(smofi_table1/cifar100)",
    ]


def test_a_scale_line_of_no_paper() -> None:
    runs = recipes.runs("smofi_fashion_mnist")
    assert launch.scale_lines(runs, [scaled(run, 0.1) for run in runs], 0.1) == [
        "scale 0.1: 5 of 50 clients, 6 of 60 rounds, 10 % of the samples; not the recipe's setting"
    ]


def test_a_scale_line_tells_of_the_rounds_that_are_run(say: Any) -> None:
    said = say("run", "digits", "--scale", "0.1", "--only", "fedavg", *SHORT)
    assert said.err.splitlines()[0] == "scale 0.1: 2 of 20 clients, 2 of 40 rounds, 10 % of the samples"


def test_a_recipes_run_keeps_its_name_though_it_is_that_of_another_method(say: Any) -> None:
    words = ["run", "smofi_table1", "--dry-run", "--only", "cifar10", "--only", "fedprox", "--json"]
    (run,) = say(*words).json["runs"]
    assert (run["name"], run["method"]["name"]) == ("smofi_table1/cifar10/fedprox", "fedavg")


def test_runs_of_different_names_in_one_table(say: Any) -> None:
    Path("mine.toml").write_text('recipe = "digits"\n')
    for what in ("digits", "mine.toml"):
        assert say("run", what, "--only", "sl", "--quiet", *SHORT, "--set", f"optimiser.lr={len(what) / 100}").code == 0
    assert [p["panel"] for p in say("compare", "runs", "--format", "json").json["panels"]] == ["digits", "mine"]
    together = say("compare", "runs", "--together", "--format", "json").json
    assert [row["label"] for row in together["runs"]] == ["digits/sl", "mine/sl"]


# -- the study of the cut ----------------------------------------------------------------------------------------------


def test_a_study_of_the_cut(say: Any, wide: Any) -> None:
    words = ["cuts", "--cut", "1", "--cut", "fc1", "--set", "per_round=3", "--quiet", *SHORT]
    said = wide(*words)
    assert said.code == 0
    folders = sorted(str(p.parent.relative_to("runs")) for p in Path("runs").glob("*/*/*/seed-0"))
    assert folders == [
        f"digits_cuts/{partition}/{method}-cut{cut}"
        for partition in ("dirichlet", "iid")
        for method in ("sfl_v1", "sfl_v2")
        for cut in (1, 3)
    ]
    assert matplotlib.image.imread("runs/digits_cuts/cuts.png").shape[1] == 1360
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[:2] for row in rows if row[1:2] in (["conv1"], ["fc1"])] == [["1", "conv1"], ["3", "fc1"]]
    # SFL-V1 is FedAvg, whatever the cut
    assert said.out.count("% at every cut") == 2
    again = say(*words, "--resume", "--json").json
    first, second = again["cuts"]
    assert (first["unit"], first["client_params"], second["client_params"]) == ("conv1", 160, 160 + 4640 + 8256)
    # one convolution of 9 values on 8x8 pixels to 16 channels: forward, and the gradient of its weights
    assert first["client_flops_per_sample"] == 3 * 2 * 9 * 64 * 16
    v1 = [
        a for cut in again["cuts"] for a in cut["best_accuracy"] if (a["method"], a["partition"]) == ("sfl_v1", "iid")
    ]
    assert v1[0]["mean"] == pytest.approx(v1[1]["mean"]) and set(first["simulated_seconds_per_round"]) == {
        "sfl_v1",
        "sfl_v2",
    }
    assert again["conclusions"] == [
        line for line in said.out.splitlines() if ", iid: " in line or ", dirichlet: " in line
    ]


def test_a_study_of_a_files_model_with_one_method(say: Any) -> None:
    Path("mine.toml").write_text('engine = "loop"\n[model]\nname = "mlp"\nhidden = [8, 4]\n')
    given = ["--method", "sfl_v2", "--alpha", "0.5", "--rounds", "1", "--scale", "0.5", "--quiet", "--json"]
    found = say("cuts", "mine.toml", *given).json
    assert [cut["unit"] for cut in found["cuts"]] == ["fc1", "fc2"]
    run = Folder(Path("runs/mine_cuts@0.5/dirichlet/sfl_v2-cut1/seed-0")).run()
    assert (run.partition.options["alpha"], run.clients, run.subset) == (0.5, 10, 0.5)
    assert found["figure"] == "runs/mine_cuts@0.5/cuts.png"


def test_data_that_is_missing_is_told_of_before_the_first_run(
    say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded digits are there, MNIST is not."""
    runs = (Run(name="mixed/there", rounds=1), Run(name="mixed/missing", data="mnist", rounds=1))
    monkeypatch.setitem(recipes.RECIPES, "mixed", lambda: Recipe(runs=runs))
    assert mistake(say("run", "mixed", "--data", str(tmp_path))).startswith("mnist: no data files")
    assert not (tmp_path / "runs").exists()


def test_one_run_alone_tells_its_simulated_time(say: Any) -> None:
    said = say("run", "digits", "--only", "sfl_v1", "--rounds", "1", "--set", "devices=pool", "--quiet")
    record = json.loads(Path("runs/digits/sfl_v1/seed-0/metrics.jsonl").read_text())
    assert f"simulated time of all rounds: {record['simulated_seconds']:,.1f} s" in said.out
