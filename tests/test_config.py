"""Specifies how a run is spelled in TOML, what is refused before anything is loaded, and in which words."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cutlayer import optim
from cutlayer.core.batches import Batching
from cutlayer.core.precision import PRECISIONS
from cutlayer.errors import ConfigError, CutlayerError, UnknownNameError
from cutlayer.models import MODELS
from cutlayer.models.parts import Init
from cutlayer.optim.schedules import constant, cosine, warmup
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run


def from_toml(tmp_path: Path, text: str, base: Run | None = None) -> Run:
    """The run that a file of this text spells; messages speak of my.toml."""
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return config.changed(base or Run(), config.read(path), "my.toml")


REFUSED = {
    "roundz = 3": "unknown key 'roundz' in my.toml; did you mean 'rounds' or 'per_round'?",
    "xyzzy = 3": "unknown key 'xyzzy' in my.toml; known: augment, batching, checkpoint_every, chunk, clients, codecs, "
    "cpu_threads, cut, data, device, devices, engine, eval_every, freeze_norms, fresh, guard, head, hold_out, loss, "
    "meters, method, metrics, min_delta, mode, model, monitor, most_weight, name, optimiser, partition, patience, "
    "per_client, per_round, precision, rounds, sample, sampler, "
    "seed, server_engine, server_optimiser, subset, until_accuracy, until_converged, until_samples, validation, "
    "weights.",
    "alpha = 0.3": "unknown key 'alpha' in my.toml; alpha is an option of the partition: partition = "
    '{ name = "dirichlet", alpha = 0.3 }',
    "momentum = 0.9": "unknown key 'momentum' in my.toml; momentum is an option of the optimiser: optimiser = "
    '{ name = "sgd", momentum = 0.9 }',
    "hidden = [8]": "unknown key 'hidden' in my.toml; hidden is an option of the model: model = "
    '{ name = "mlp", hidden = [8] }',
    "size = 8": "unknown key 'size' in my.toml; size is an option of the batching: batching = { size = 8 }",
    "target = 'days'": "unknown key 'target' in my.toml; target is an option of the data: data = "
    '{ path = "mine.csv", target = "days" }',
    "[optimiser]\nmomentun = 0.9": "unknown key 'momentun' in my.toml, [optimiser]; did you mean 'momentum'?",
    "[model]\nwidht = 8": "unknown key 'widht' in my.toml, [model]; did you mean 'width'?",
    "[method]\nsink = 'step'": "unknown key 'sink' in my.toml, [method]; did you mean 'sync'?",
    "[method]\nmodel = 'cnn'": "unknown key 'model' in my.toml, [method]; known: agg, sync.",
    "[partition]\nalfa = 1.0": "unknown key 'alfa' in my.toml, [partition]; did you mean 'alpha'?",
    "[batching]\nsiz = 4": "unknown key 'siz' in my.toml, [batching]; did you mean 'size'?",
    "method = 'sfl_v3'": "unknown method 'sfl_v3' in my.toml, [method]; did you mean 'sfl_v2' or 'sfl_v1' or 'hosfl'?",
    "data = 'digts'": "unknown data set 'digts' in my.toml; did you mean 'digits'?",
    "engine = 'lop'": "unknown engine 'lop' in my.toml; did you mean 'loop'?",
    "precision = 'bf61'": "unknown precision 'bf61' in my.toml; did you mean 'bf16'?",
    "precision = 16": "precision = 16 in my.toml does not fit: precision must be a text",
    "[method]\nsync = 'stp'": "unknown sync 'stp' in my.toml, [method]; did you mean 'step'?",
    "[optimiser]\nlr = { schedule = 'cosin', lr = 0.1 }": "unknown schedule 'cosin' in my.toml, [optimiser], lr; "
    "did you mean 'cosine'?",
    "[optimiser]\nlr = { schedule = 'cosine', lr = 0.1, round = 5 }": "unknown key 'round' in my.toml, [optimiser], "
    "lr; did you mean 'rounds'?",
    "[optimiser]\nlr = { schedule = 'cosine', lr = 0.1 }": "schedule 'cosine' needs rounds; "
    "add it in my.toml, [optimiser], lr",
    "[optimiser]\nlr = { schedule = 'cosine', lr = 'x', rounds = 5 }": 'lr = "x" in my.toml, [optimiser], lr does not '
    "fit: lr must be a number",
    "[optimiser]\nlr = { schedule = 'cosine', lr = -0.1, rounds = 5 }": "my.toml, [optimiser]: lr is -0.1, "
    "but it must be a number above 0.",
    "[optimiser]\nlr = { lr = 0.1, warmup = 2.5 }": "warmup = 2.5 in my.toml, [optimiser], lr does not fit: "
    "warmup must be a whole number",
    "[optimiser]\nlr = { lr = 0.1, warmup = 0 }": "my.toml, [optimiser]: warmup is 0, "
    "but it must be a whole number of rounds above 0.",
    "[optimiser]\nlr = { lr = 0.1, warmpu = 2 }": "unknown key 'warmpu' in my.toml, [optimiser], lr; "
    "did you mean 'warmup'?",
    "[device]\nname = 'pool'": "unknown table 'device' in my.toml; did you mean 'devices' or 'codecs'?",
    "[partition]\nalpha = -1.0": "my.toml, [partition]: alpha is -1.0, but it must be a number above 0.",
    "[devices]\nname = 'pool'\nkappa = 0.0": "my.toml, [devices]: kappa is 0.0, but it must be a number above 0.",
    "[augment]\ncrop = -1": "my.toml, [augment]: crop is -1, but it must be a whole number from 0 up.",
    "subset = 0.0": "my.toml: subset is 0.0; it must be a fraction above 0 and up to 1",
    "cpu_threads = 5000": "my.toml: cpu_threads is 5000; it must be at most 4096",
    "optimiser = 'adam'": "optimiser 'adam' needs lr; add it in my.toml, [optimiser]",
    "[server_optimiser]\nlr = 0.1": 'my.toml, [server_optimiser] needs a name, such as name = "adam"',
    "method = 3": 'my.toml, [method] needs a name, such as name = "fedavg"',
    "rounds = 'ten'": 'rounds = "ten" in my.toml does not fit: rounds must be a whole number',
    "rounds = true": "rounds = true in my.toml does not fit: rounds must be a whole number",
    "cut = 1.5": "cut = 1.5 in my.toml does not fit: cut must be a whole number or a text",
    "data = 3": "data = 3 in my.toml does not fit: data must be a text",
    "[model]\nname = 'mlp'\nhidden = [32, 'x']": 'hidden = [32, "x"] in my.toml, [model] does not fit: '
    "hidden[1] must be a whole number",
    "[optimiser]\nlr = [0.1]": "lr = [0.1] in my.toml, [optimiser] does not fit: lr must be a number",
    "[optimiser]\nmomentum = 1.5": "my.toml, [optimiser]: momentum is 1.5, "
    "but it must be a number from 0 up to below 1.",
    "[batching]\nsize = 'x'": 'size = "x" in my.toml, [batching] does not fit: size must be a whole number',
    "[batching]\nsize = 0": "my.toml, [batching]: batching: size is 0; it must be at least 1",
    "batching = 8": "my.toml, [batching] must be a table with size, epochs, steps, drop_last",
    "rounds = 0": "my.toml: rounds is 0; it must be at least 1",
    "per_round = 0": "my.toml: per_round is 0; it must be at least 1",
    "until_samples = 0": "my.toml: until_samples is 0; it must be at least 1",
    "until_samples = 1e5": "until_samples = 100000.0 in my.toml does not fit: until_samples must be a whole number",
    "validation = 1": "my.toml: validation is 1.0; it must be a fraction from 0 up to below 1",
    "name = '../up'": "my.toml: the name '../up' cannot be a folder below --out; use words, with / between them",
    "name = ''": "my.toml: the name '' cannot be a folder below --out; use words, with / between them",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_mistake_is_refused_with_its_place_and_the_nearest_name(tmp_path: Path, text: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError)) as error:
        from_toml(tmp_path, text)
    assert str(error.value) == REFUSED[text]


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    with pytest.raises(ConfigError, match=r"^there is no configuration file .*my\.toml; check the path$"):
        config.read(path)
    path.write_text("rounds = ")
    with pytest.raises(ConfigError, match=r"my\.toml is not valid TOML: Invalid value \(at end of document\)$"):
        config.read(path)
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"my\.toml is not valid TOML: 'utf-8' codec can't decode byte 0xff"):
        config.read(path)
    with pytest.raises(ConfigError, match=r"^the configuration file .* cannot be read: Is a directory$"):
        config.read(tmp_path)


def test_a_table_keeps_the_options_that_it_does_not_name(tmp_path: Path) -> None:
    base = Run(optimiser=Choice("sgd", {"lr": 0.1, "momentum": 0.5}), batching=Batching(size=8, epochs=3))
    run = from_toml(tmp_path, "[optimiser]\nmomentum = 0.9\n[batching]\nsize = 16", base)
    assert run.optimiser == Choice("sgd", {"lr": 0.1, "momentum": 0.9})
    assert run.batching == Batching(size=16, epochs=3)


def test_another_name_starts_from_no_options(tmp_path: Path) -> None:
    run = from_toml(tmp_path, "partition = 'iid'\n[optimiser]\nname = 'adam'\nlr = 1")
    assert run.optimiser == Choice("adam", {"lr": 1.0})
    assert run.partition == Choice("iid")


def test_any_schedule_may_have_a_warmup(tmp_path: Path) -> None:
    run = from_toml(tmp_path, "[optimiser]\nlr = { schedule = 'cosine', lr = 0.1, rounds = 40, warmup = 5 }")
    assert from_toml(tmp_path, config.dumps(run)) == run
    opt = optim.build(run.optimiser.name, **run.optimiser.options)
    assert opt.lr == warmup(cosine(0.1, 40), 5)
    assert optim.build("sgd", lr={"lr": 0.1, "warmup": 2}).lr == warmup(constant(0.1), 2)
    with pytest.raises(ConfigError, match=r"^warmup is 2.5, but it must be a whole number of rounds above 0\.$"):
        optim.build("sgd", lr={"lr": 0.1, "warmup": 2.5})


def test_lists_and_tuples_are_the_same_option_and_none_is_no_option() -> None:
    schedule = {"schedule": "steps", "lr": 0.1, "milestones": [3, 5]}
    assert Choice("sgd", {"lr": schedule, "clip": None}) == Choice("sgd", {"lr": {**schedule, "milestones": (3, 5)}})


def test_the_written_form_is_this() -> None:
    run = Run(
        name="digits/first",
        optimiser=Choice("sgd", {"lr": {"schedule": "cosine", "lr": 1e-05, "rounds": 9}, "nesterov": False}),
        batching=Batching(size=8),
    )
    assert config.dumps(run) == (
        'name = "digits/first"\ndata = "digits"\nsubset = 1.0\nvalidation = 0.0\nclients = 20\n'
        "cut = 1\n"
        "freeze_norms = false\nrounds = 20\nuntil_converged = false\nmin_delta = 0.0\nhold_out = 0.0\n"
        'seed = 0\nengine = "auto"\nserver_engine = "auto"\ndevice = "cpu"\nprecision = "fp32"\n'
        "eval_every = 1\nper_client = false\nguard = true\n"
        "checkpoint_every = 1\n\n"
        '[sampler]\nname = "uniform"\n\n'
        '[partition]\nname = "dirichlet"\nalpha = 0.3\n\n[model]\nname = "cnn"\n\n[method]\nname = "sfl_v1"\n\n'
        '[optimiser]\nname = "sgd"\nlr = { schedule = "cosine", lr = 1e-05, rounds = 9 }\nnesterov = false\n\n'
        "[batching]\nsize = 8\nepochs = 1\ndrop_last = true\n"
    )


# -- initial weights ---------------------------------------------------------------------------------------------------


def test_a_run_always_says_which_initial_weights_its_model_draws(tmp_path: Path) -> None:
    run = from_toml(tmp_path, 'model = "resnet18"')  # as in folders from before there was a choice
    assert run.model == Choice("resnet18", {"init": "he"})
    assert '[model]\nname = "resnet18"\ninit = "he"\n' in config.dumps(run)
    chosen = from_toml(tmp_path, '[model]\nname = "resnet18"\ninit = "torch"')
    assert '[model]\nname = "resnet18"\ninit = "torch"\n' in config.dumps(chosen)
    assert from_toml(tmp_path, config.dumps(chosen)) == chosen != run
    assert Run(model=Choice("cnn")).model.options == {}  # it draws none of its own


def test_a_file_of_weights_takes_the_place_of_init(tmp_path: Path) -> None:
    from_file = from_toml(tmp_path, 'weights = "a.pth"\n[model]\nname = "resnet18"\nstem = "imagenet"')
    assert from_file.model == Choice("resnet18", {"stem": "imagenet"})
    drawn = Run(model=Choice("resnet18", {"init": "torch", "width": 8}))
    assert from_toml(tmp_path, 'weights = "a.pth"', drawn).model == Choice("resnet18", {"width": 8})
    assert from_toml(tmp_path, 'weights = "a.pth"\nmodel = { width = 4 }', drawn).model.options == {"width": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'weights = "a.pth"\nmodel = { name = "resnet18", init = "he" }',
            "my.toml: the weights come from a.pth, so model.init chooses nothing; leave it out",
        ),
        (
            'model = { name = "causal_lm", path = "tiny", init = "torch" }',
            "my.toml, [model]: the model 'causal_lm' has no init; leave it out. Models that choose their weights: "
            "char_transformer, densenet121, ",
        ),
        (
            'model = { name = "cnn", init = "torch" }',
            "my.toml, [model]: the model 'cnn' has no init; leave it out. ",
        ),
        (
            'model = { name = "vgg11", init = "xavier" }',
            "unknown init 'xavier' in my.toml, [model]; known: he, torch.",
        ),
    ],
)
def test_init_is_refused_where_it_chooses_nothing(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CutlayerError) as error:
        from_toml(tmp_path, text)
    assert str(error.value).startswith(message)


def test_a_models_own_init_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plug-in: another option of that name stays, and another default is kept."""

    def spread(init: float = 0.1) -> nn.Module:
        return nn.Linear(1, 1)

    def drawn(init: Init = "torch") -> nn.Module:
        return nn.Linear(1, 1)

    monkeypatch.setitem(MODELS, "spread", spread)
    monkeypatch.setitem(MODELS, "drawn", drawn)
    run = from_toml(tmp_path, 'weights = "a.pth"\nmodel = { name = "spread", init = 0.5 }')
    assert run.model == from_toml(tmp_path, 'weights = "b.pth"', run).model == Choice("spread", {"init": 0.5})
    assert from_toml(tmp_path, 'model = "drawn"').model == Choice("drawn", {"init": "torch"})


def positive(**limits: Any) -> st.SearchStrategy[float]:
    return st.floats(min_value=0, exclude_min=True, allow_infinity=False, **limits)


counts = st.integers(1, 10**30)  # TOML sets no limit of 64 bits for us
words = st.text(st.characters(exclude_categories=["Cs"]))  # quotes, new lines, controls, all of Unicode
some_cut = st.integers(0, 9) | words
schedules = st.one_of(
    st.builds(lambda lr, rounds: {"schedule": "cosine", "lr": lr, "rounds": rounds}, positive(), counts),
    st.builds(lambda lr, at: {"schedule": "steps", "lr": lr, "milestones": at}, positive(), st.lists(counts)),
)
sgds = st.builds(
    lambda lr, momentum, clip: Choice("sgd", {"lr": lr, "momentum": momentum, "clip": clip}),
    positive() | schedules,
    st.floats(0, 1, exclude_max=True),
    st.none() | positive(),
)
adams = st.builds(
    lambda lr, betas: Choice("adam", {"lr": lr, "betas": betas}),
    positive(),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
)
runs = st.builds(
    Run,
    name=words.filter(lambda w: not set(w) & set("\\/.\0") and bool(w)),
    validation=st.floats(0, 1, exclude_max=True),
    clients=counts,
    per_round=st.none() | counts,
    partition=st.builds(lambda a: Choice("dirichlet", {"alpha": a}), positive()),
    model=st.builds(lambda h: Choice("mlp", {"hidden": h}), st.lists(counts)),
    cut=some_cut,
    head=st.none() | some_cut,
    method=st.builds(
        lambda s, i: Choice("mergesfl", {"seconds_per_sample": s, "ingress": i, "agg": "uniform"}),
        st.lists(st.floats(allow_nan=False)),
        st.none() | counts,
    ),
    optimiser=sgds | adams,
    server_optimiser=st.none() | sgds,
    batching=st.builds(Batching, size=counts, epochs=counts, steps=st.none() | counts, drop_last=st.booleans()),
    rounds=counts,
    until_converged=st.booleans(),
    until_accuracy=st.none() | st.floats(0.01, 1),
    until_samples=st.none() | counts,
    seed=st.integers(),
    device=st.sampled_from(("cpu", "cuda", "cuda:1")),
    precision=st.sampled_from(PRECISIONS),
    cpu_threads=st.none() | st.integers(1, 4096),
    per_client=st.booleans(),
    guard=st.booleans(),
    most_weight=st.none() | st.floats(1, 1e9),
)


@settings(deadline=None, derandomize=True)
@given(runs)
def test_a_run_that_is_written_and_read_again_is_the_same(run: Run) -> None:
    assert config.changed(Run(), tomllib.loads(config.dumps(run)), "my.toml") == run


def test_keys_of_inline_tables_may_be_any_words() -> None:
    assert tomllib.loads(f"a = {config.literal({'two words': {'ä': 1}, 'b-1': 2})}") == {
        "a": {"two words": {"ä": 1}, "b-1": 2}
    }


def test_a_file_round_trip_keeps_the_run(tmp_path: Path) -> None:
    run = Run(name="ключ\r\n\"'\x7f", cut="a\\b", optimiser=Choice("sgd", {"lr": 5e-324}))
    path = tmp_path / "config.toml"
    path.write_bytes(config.dumps(run).encode())
    assert config.changed(Run(), config.read(path), str(path)) == run


def test_the_documented_keys_and_their_defaults_are_the_real_ones() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    spelled, *_ = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert config.changed(Run(), tomllib.loads(spelled), "the page") == Run()
    commented = re.sub(r"^# (?=\w+ = )", "", spelled, flags=re.MULTILINE)
    named = {*tomllib.loads(commented), "server_optimiser", "codecs"}
    assert "# [codecs] " in spelled
    assert named == {field.name for field in fields(Run)} - {"python"}  # which no file may have
