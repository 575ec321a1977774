"""Specifies runs of models that torch.fx and torch.export cut: dicts cross, and random layers draw by key."""

from typing import Any

import pytest
import torch
from conftest import SEED, TOLD, agree, clients_of, distance, run, simulation
from foreign_models import BATCH, CLASSES, FOREIGN, SIZES, TWO_LAYERS, samples_of, split_of
from in_process import deployment
from test_architectures import model as built
from test_architectures import texts
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.calculus import vjp
from cutlayer.core.method import global_model
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.errors import ConfigError
from cutlayer.runs.rounds import Rounds
from cutlayer.split import Split

OPT = optim.sgd(0.05, momentum=0.9)
METHODS = ("sfl_v1", "sfl_v2", "smofi", "mergesfl", "hasfl", "hosfl")
BATCHING = Batching(size=BATCH)
STEPS = 8  # of two rounds: the clients take 2, 1 and 1 steps in each
FAST = ("BERT", "T5", "TransformerEncoder", "ResNet", "U-Net")


def method(name: str, split: Split) -> methods.Method:
    return methods.build(name, split, OPT, OPT, **TOLD.get(name, {}))


def cut_at(model: str, cut: str | None = None) -> Split:
    return split_of(model).with_cut(cut or FOREIGN[model].cuts[0])


def rounds(name: str, model: str, cut: str | None = None, engine: str = "loop", **options: Any) -> Rounds:
    """Rounds on this engine; another that takes its place is a failure."""
    given = {"partition": clients_of(SIZES), "batching": BATCHING, **options}
    first = "loop" if engine == "graph" else engine
    sim = simulation(method(name, cut_at(model, cut)), samples_of(model), engine=first, **given)
    if engine == "graph":
        sim.backend.engine = Graph(Again(torch.device("cpu")), len(SIZES))
    assert sim.backend.engine.name == engine
    return sim


def trained(sim: Rounds, num: int = 2) -> dict[str, Tensor]:
    return sim.method.model.export(global_model(run(sim, num)))


def some(*fast: Any, others: list[Any]) -> list[Any]:
    return [*fast, *(pytest.param(*each, marks=pytest.mark.slow) for each in others if each not in fast)]


@pytest.mark.parametrize("model", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in FOREIGN])
def test_sfl_v1_trains_what_fedavg_does_at_every_cut(model: str) -> None:
    """With random layers, too: their masks do not depend on the cut."""
    expected = trained(rounds("fedavg", model))
    assert distance(expected, split_of(model).model.state_dict()) > 1e-4
    for cut in FOREIGN[model].cuts:
        agree(trained(rounds("sfl_v1", model, cut)), expected, 1e-9)


def can_train(name: str, model: str) -> bool:
    """MergeSFL needs rows; HO-SFL needs frozen normalisation, and a ResNet normalises with batch statistics."""
    return not (name == "mergesfl" and not FOREIGN[model].has_rows) and (name, model) != ("hosfl", "ResNet")


@pytest.mark.parametrize(
    ("name", "model"),
    some(
        *((name, "BERT") for name in METHODS if name != "sfl_v2"),
        ("sfl_v1", "T5"),
        ("smofi", "TransformerEncoder"),
        ("mergesfl", "TransformerEncoder"),
        ("sfl_v1", "U-Net"),
        others=[(name, model) for name in METHODS for model in FOREIGN if can_train(name, model)],
    ),
)
def test_vmap_and_graph_give_the_loop_engines_numbers(name: str, model: str) -> None:
    loop = rounds(name, model)
    expected = trained(loop)
    for engine in ("vmap", "graph"):
        sim = rounds(name, model, engine=engine)
        agree(trained(sim), expected, 1e-9)
        assert sim.ledger.totals == loop.ledger.totals
    assert sim.backend.engine.num_recordings and not sim.backend.engine.refused


@pytest.mark.parametrize(("name", "model"), [("sfl_v1", "BERT"), ("mergesfl", "TransformerEncoder"), ("sfl_v2", "T5")])
def test_devices_give_the_loop_engines_numbers(name: str, model: str) -> None:
    made = method(name, cut_at(model))
    devices = deployment(made, samples_of(model), clients_of(SIZES), batching=BATCHING, seed=SEED)
    agree(trained(devices), trained(rounds(name, model)), 1e-12)


@pytest.mark.parametrize(
    ("model", "gradients"),
    [
        ("BERT", {"hidden"}),
        ("T5", {"position bias", "hidden"}),
        ("TransformerEncoder", {"hidden"}),
        ("U-Net", {"relu", "hidden"}),
        pytest.param("GPT-2", {"hidden"}, marks=pytest.mark.slow),
        pytest.param("DeBERTa-v3", {"position bias", "hidden"}, marks=pytest.mark.slow),
    ],
)
def test_the_ledger_counts_the_tensors_that_cross_and_the_gradients_that_there_are(
    model: str, gradients: set[str]
) -> None:
    sim = rounds("sfl_v1", model)
    run(sim)
    split = cut_at(model)
    client, server = split.initial()
    z, _ = split.lower(client, FOREIGN[model].inputs(BATCH), 0)
    out, pull = vjp(split.upper, [server, z, 0], 1)
    down = pull(torch.ones_like(out)).cut
    without_rows = split.without_rows(FOREIGN[model].inputs(BATCH))
    assert {"position bias" if name in without_rows else name for name in down} == gradients
    assert sim.ledger.totals["up_activations"] == STEPS * tree.num_bytes(z)
    assert sim.ledger.totals["down_gradients"] == STEPS * tree.num_bytes(down)


# -- MergeSFL ---------------------------------------------------------------------------------------------------------


def plain_bert() -> Split:
    """Without dropout, whose masks differ in a merged batch."""
    with torch.random.fork_rng():
        net = built("BertForSequenceClassification", "BertConfig", **TWO_LAYERS)()
        return Split(net, "bert.encoder.layer.0", sample=texts(2))


def test_mergesfl_trains_the_server_on_the_merged_batch() -> None:
    """One step of three clients is one step of one client that holds all samples; masks stay booleans."""
    split, data, batching = plain_bert(), samples_of("BERT").take(range(9)), Batching(size=3, steps=1)
    merged = run(simulation(method("mergesfl", split), data, clients_of((3, 3, 3)), batching=batching), 1)
    alone = simulation(method("sfl_v1", split), data, clients_of((9,)), batching=Batching(size=9, steps=1))
    agree(merged.server.tree.model.params, run(alone, 1).server.tree.model.params, 1e-12)


@pytest.mark.parametrize("model", ["T5", pytest.param("DeBERTa-v3", marks=pytest.mark.slow)])
def test_mergesfl_refuses_what_has_no_row_for_each_sample(model: str) -> None:
    expected = r"merges the clients' batches, but 'unsqueeze\w*', which crosses the cut, has no row for each sample"
    with pytest.raises(ConfigError, match=expected):
        rounds("mergesfl", model)


@pytest.mark.slow
def test_a_batch_as_large_as_a_table_does_not_make_its_rows_samples() -> None:
    """DeBERTa's embeddings of distances are a table of 16 rows."""
    split, x = cut_at("DeBERTa-v3"), texts(16)
    table, *_ = (name for name, a in split.lower(split.initial()[0], x, 0)[0].items() if a.shape == (16, 16))
    assert table in split.without_rows(x)


@pytest.mark.parametrize("name", ("sfl_v2", "mergesfl"))
def test_one_client_alone_trains_as_in_sfl_v1(name: str) -> None:
    model = "T5" if name == "sfl_v2" else "U-Net"
    given = {"partition": clients_of((9,))}
    agree(trained(rounds(name, model, **given), 1), trained(rounds("sfl_v1", model, **given), 1), 1e-9)


# -- masks ------------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Has a mask of real numbers, and a table into which trained values are written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = torch.zeros_like(x).masked_fill(keep, -torch.inf)
        table = torch.zeros_like(x)
        table.select(1, 0).copy_(self.first(x)[:, 0])
        hidden = torch.tanh(self.first(x))
        return self.out(torch.softmax(self.second(hidden) + mask, 1) + table)


def test_masks_cross_as_finite_numbers_and_get_no_gradient() -> None:
    torch.manual_seed(0)
    net, x = Masked().double(), torch.randn(3, 4, dtype=torch.float64)
    given = {"x": x, "keep": x > 0.5}
    split = Split(net, "second", sample=given)
    client, server = split.initial()
    z, pull_z = vjp(split.lower, [client, given], None)
    assert all(a.isfinite().all() for a in z.values()) and len(z) == 3
    out, pull = vjp(split.upper, [server, z], 1)
    assert torch.equal(out, net(**given))
    grads = pull(torch.ones_like(out))
    (mask,) = (name for name, a in z.items() if bool((a < -1e30).any()))
    assert grads.cut.keys() == z.keys() - {mask}
    net(**given).sum().backward()
    expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    agree({**pull_z(grads.cut).params, **grads.params}, expected, 1e-12)
