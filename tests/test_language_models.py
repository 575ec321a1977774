"""Decoders cut between layers: they are the unsplit model, their base is no state, and adapters go back to peft."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import clients_of, sgd_by_hand, trained, walk
from tiny_language import FAMILIES, VOCABULARY, model, saved, texts, tokenizer, unsplit
from torch import Tensor

from cutlayer import models, optim
from cutlayer.core.batches import Batching
from cutlayer.core.state import Model
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError, CutError
from cutlayer.methods.splitlora import splitlora
from cutlayer.models.adapters import export_pretrained
from cutlayer.models.decoders import CausalLM, attention_mask
from cutlayer.models.language import answer_tokens, load
from cutlayer.runs import build
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.training import Training
from cutlayer.split import Split


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("decoders")
    return {family: saved(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    rows = [(f"{'a ' * (i % 5)}{'fine film' if i % 2 else 'dull plot'}", i % 2) for i in range(30)]
    for name, some in (("train", rows[:24]), ("dev", rows[24:])):
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in some)]
        (folder / f"{name}.tsv").write_text("\n".join(lines))
    return folder


def stirred(net: CausalLM) -> CausalLM:
    """The same model with adapters that do something: they begin as zero."""
    random = torch.Generator().manual_seed(5)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=random)
    return net


def digest(net: torch.nn.Module) -> str:
    """Of all that does not train."""
    values = [p for _, p in net.named_parameters() if not p.requires_grad] + list(net.buffers())
    return hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()


ANSWERS = torch.tensor([0, 1, 1, 0])  # to the four texts


def whole_step(net: CausalLM, x: Tensor) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Scores of the unsplit model, and the loss's gradients at each cut and of the adapters; tokens have none."""
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    rows = [net.embedding(x).requires_grad_()]
    for step in (*net.layers, net.head):
        rows.append(step(rows[-1]))
    found = torch.autograd.grad(F.cross_entropy(rows[-1], ANSWERS), [*rows, *trained.values()])
    return rows[-1], [x, *found[: len(rows)]], dict(zip(trained, found[len(rows) :], strict=True))


def split_step(split: Split, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """What crosses and the scores, the gradient that comes back, and those of the adapters on both sides."""
    client, server = split.initial()
    for value in (*client.params.values(), *server.params.values()):
        value.requires_grad_()
    z, _ = split.lower(client, x)
    crossed = z.detach().requires_grad_(split.cut > 0)  # tokens have no gradient
    out, _ = split.upper(server, crossed)
    F.cross_entropy(out, ANSWERS).backward()
    if client.params:
        z.backward(crossed.grad)
    values = {**client.params, **server.params}
    return z, out, crossed.grad, {name: value.grad for name, value in values.items()}


class TestCuts:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_logits_are_those_of_the_unsplit_model_on_padded_texts(self, folders: dict[str, str], family: str) -> None:
        x = texts()
        ours = model(folders[family])(x).transpose(1, 2)
        theirs = unsplit(load(folders[family]), x)
        assert theirs[x >= 0].std() > 0.3  # numbers that could differ
        torch.testing.assert_close(ours[x >= 0], theirs[x >= 0], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
    def test_client_and_server_are_the_whole_model_bit_for_bit(self, folders: dict[str, str], family: str) -> None:
        net, x = stirred(model(folders[family], answers=(" bad", " good"))), texts()
        whole, at_cuts, gradients = whole_step(net, x)
        assert torch.equal(whole, net(x))
        assert len(gradients) == 12 and all(g.abs().max() > 1e-4 for g in (*gradients.values(), *at_cuts[1:]))
        split = Split(net, 0)
        for cut in range(6):
            z, out, at_cut, found = split_step(split.with_cut(cut), x)
            if 0 < cut < 5:
                assert z.shape == (4, 12, 16)
                assert torch.equal((z == 0).all(-1), x < 0)  # padding crosses as zeros, and nothing else does
            assert torch.equal(out, whole)
            assert cut == 0 or torch.equal(at_cut, at_cuts[cut])
            assert found.keys() == gradients.keys()
            assert all(torch.equal(found[name], gradients[name]) for name in gradients)

    def test_units_are_the_embedding_the_layers_and_the_head(self, folders: dict[str, str]) -> None:
        split = Split(model(folders["llama"]), "layer2")
        assert split.units == ("embedding", "layer1", "layer2", "layer3", "head")
        assert split.cut == 3

    @pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
    def test_more_padding_changes_nothing(self, folders: dict[str, str], family: str) -> None:
        net, x = stirred(model(folders[family], answers=(" bad", " good"))), texts()
        wider = torch.cat([torch.full((4, 5), -1), x], dim=1)
        torch.testing.assert_close(net(wider), net(x), atol=1e-5, rtol=1e-5)

    def test_a_window_hides_what_is_behind_it(self) -> None:
        mask = attention_mask(torch.tensor([[False, True, True, True]]), torch.float32, window=2)
        assert mask.shape == (1, 1, 4, 4)
        seen = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        assert (mask[0, 0] == 0).int().tolist() == seen
        assert mask.min() == torch.finfo(torch.float32).min

    @pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
    def test_stacked_clients_compute_what_each_computes_alone(self, folders: dict[str, str], family: str) -> None:
        split = Split(stirred(model(folders[family], answers=(" bad", " good"))), "layer2")
        params = split.initial()[0].joined(split.initial()[1]).params
        stacked = {name: torch.stack([value, -value, 2 * value]) for name, value in params.items()}
        x, y = torch.stack([texts(), texts().flip(0), texts().roll(1, 0)]), torch.tensor([0, 1, 1, 0])

        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return F.cross_entropy(split.whole(Model(values, {}, {}), x)[0], y)

        together = torch.vmap(torch.func.grad(loss))(stacked, x)
        for i in range(3):
            alone = torch.func.grad(loss)({name: value[i] for name, value in stacked.items()}, x[i])
            assert max(float(g.abs().max()) for g in alone.values()) > 1e-3
            for name, gradient in alone.items():
                torch.testing.assert_close(together[name][i], gradient, atol=1e-6, rtol=1e-4)

    def test_fused_attention_gives_the_same(self, folders: dict[str, str]) -> None:
        x = texts()
        fused = model(folders["llama"], attention="sdpa")(x).transpose(1, 2)[x >= 0]
        torch.testing.assert_close(fused, unsplit(load(folders["llama"]), x)[x >= 0], atol=1e-5, rtol=1e-5)


class TestHead:
    def test_answers_are_scored_at_the_last_place_only(self, folders: dict[str, str]) -> None:
        x = texts()
        net = model(folders["gemma3"], answers=(" bad", " good"))
        bad, good = tokenizer().convert_tokens_to_ids(["bad", "good"])
        every = unsplit(load(folders["gemma3"]), x)[:, -1]
        torch.testing.assert_close(net(x), every[:, [bad, good]], atol=1e-5, rtol=1e-5)

    def test_the_next_token_loss_is_that_of_transformers_and_ignores_padding(self, folders: dict[str, str]) -> None:
        x = texts()
        y = torch.where(x[:, :-1] >= 0, x[:, 1:], -100)
        out = model(folders["llama"])(x[:, :-1])
        assert out.shape == (4, VOCABULARY, 11)
        base = load(folders["llama"])
        labels = torch.cat([torch.full((4, 1), -100), y], dim=1)  # transformers shifts them itself
        real = (x >= 0).long()
        theirs = base(input_ids=x.clamp(min=0), attention_mask=real, labels=labels, use_cache=False).loss
        torch.testing.assert_close(F.cross_entropy(out, y), theirs, atol=1e-5, rtol=1e-5)

    def test_a_bfloat16_base_has_float32_adapters_and_scores(self, folders: dict[str, str]) -> None:
        split = Split(model(folders["llama"], dtype="bfloat16", answers=(3, 4)), "layer1")
        client, server = split.initial()
        assert {p.dtype for p in (*client.params.values(), *server.params.values())} == {torch.float32}
        z, _ = split.lower(client, texts())
        out, _ = split.upper(server, z)
        assert (z.dtype, out.dtype) == (torch.bfloat16, torch.float32)


class TestBase:
    @pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
    def test_fresh_adapters_change_no_bit(self, folders: dict[str, str], family: str) -> None:
        x, base = texts(), load(folders[family])
        assert torch.equal(model(folders[family])(x), CausalLM(base)(x))

    def test_an_adapter_adds_a_product_of_low_rank(self, folders: dict[str, str]) -> None:
        net = stirred(model(folders["llama"], rank=2, alpha=6.0))
        query = net.layers[0].block.self_attn.q_proj
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
        a, b = query.lora_A.default.weight, query.lora_B.default.weight
        assert (a.shape, b.shape) == ((2, 16), (16, 2))
        torch.testing.assert_close(query(x), x @ query.base_layer.weight.T + 6.0 / 2 * (x @ a.T @ b.T))

    def test_only_adapters_are_state(self, folders: dict[str, str]) -> None:
        split = Split(model(folders["llama"]), "layer1")
        client, server = split.initial()
        prefix = "layers.0.block.self_attn."
        assert list(client.params) == [
            f"{prefix}{p}.lora_{m}.default.weight" for p in ("q_proj", "v_proj") for m in "AB"
        ]
        assert len(server.params) == 8
        assert [client.frozen, client.buffers, server.frozen, server.buffers] == [{}, {}, {}, {}]

    def test_the_base_is_held_once_for_training_and_evaluation(self, folders: dict[str, str]) -> None:
        net = model(folders["llama"])
        split = Split(net, "layer1")
        held = {name: p for name, p in net.named_parameters() if not p.requires_grad}
        for body in (split._body, split._evaluated.body):
            inside = dict(body.structure.named_parameters())
            assert all(inside[name] is value for name, value in held.items())
            assert {p.device.type for p in inside.values() if p.requires_grad} == {"meta"}

    def test_the_exported_state_has_the_base_in_it(self, folders: dict[str, str]) -> None:
        split = Split(stirred(model(folders["llama"])), "layer1")
        fresh = model(folders["llama"], seed=9)
        fresh.load_state_dict(split.export(Model.joined(*split.initial())))
        assert torch.equal(fresh(texts()), split.model(texts()))

    def test_trained_parameters_cannot_be_preloaded(
        self, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CausalLM, "preloaded", lambda self: dict(self.named_parameters()))
        with pytest.raises(CutError, match=r"lora_A.default.weight' trains, so it cannot be preloaded at"):
            Split(model(folders["llama"]), 1)

    def test_full_training_unties_with_a_warning(
        self, folders: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, logger="cutlayer"):
            net = model(folders["llama"], rank=0)
        assert caplog.messages == [
            f"{folders['llama']} ties model.embed_tokens.weight to lm_head.weight; trained in full, each is a tensor "
            "of its own"
        ]
        client, server = Split(net, "layer1").initial()
        assert torch.equal(client.params["embedding.tokens.weight"], server.params["head.lm_head.weight"])
        assert (client.buffers, server.buffers) == ({}, {})  # the speeds of rotation are the same everywhere
        assert torch.equal(net(texts()), model(folders["llama"])(texts()))

    def test_with_adapters_both_sides_read_one_tied_tensor(self, folders: dict[str, str]) -> None:
        net = model(folders["llama"])
        assert net.embedding.tokens.weight is net.head.lm_head.weight


SIZES = {"opt-125m": (12, 24_576), "gemma-3-270m": (18, 20_480), "llama-3.2-1b": (16, 53_248)}
WEIGHTS = {"opt-125m": 125_239_296, "gemma-3-270m": 268_098_176, "llama-3.2-1b": 1_235_814_400}


@pytest.mark.parametrize("shape", SIZES)
def test_published_shapes_have_their_published_sizes(shape: str) -> None:
    with torch.device("meta"):
        net = models.build("causal_lm", path=shape, answers=(1, 2))
    layers, size = SIZES[shape]
    assert [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in net.layers] == [size] * layers
    assert sum(p.numel() for p in net.parameters() if not p.requires_grad) == WEIGHTS[shape]


class TestTraining:
    RUN = Run(
        data="sst2",
        clients=3,
        per_round=2,
        partition=Choice("iid"),
        cut="layer1",
        optimiser=Choice("adamw", {"lr": 0.01}),
        batching=Batching(size=4),
        rounds=2,
    )

    def trained(self, path: str, root: Path, **changes: Any) -> Training:
        run = replace(self.RUN, model=Choice("causal_lm", {"path": path}), **changes)
        training = build.training(run, root)
        for _ in range(run.rounds):
            training.round()
        return training

    def test_both_engines_train_the_same_adapters_and_no_base(self, folders: dict[str, str], reviews: Path) -> None:
        loop, stacked = (self.trained(folders["llama"], reviews, engine=engine) for engine in ("loop", "vmap"))
        for name, value in loop.model.params.items():
            torch.testing.assert_close(stacked.model.params[name], value, atol=1e-5, rtol=1e-4)
        net = loop.runner.method.model.model
        start = Model.joined(*loop.runner.method.model.initial()).params
        moved = [float((value - start[name]).abs().max()) for name, value in loop.model.params.items()]
        assert len(moved) == 12 and min(moved) > 1e-3
        assert digest(net) == digest(model(folders["llama"], answers=(" bad", " good")))

    def test_only_adapters_travel(self, folders: dict[str, str], reviews: Path) -> None:
        record = self.trained(folders["llama"], reviews, rounds=1).history[-1]
        adapters = 8 * (16 + 16) + 8 * (16 + 8)  # rank times inputs and outputs, of query and value
        assert record["bytes"]["down_model"] == record["bytes"]["up_model"] == 2 * 4 * adapters
        places = 4 + 2 + 2  # the longest review, and the prompt's end
        assert record["bytes"]["up_activations"] == 2 * 8 * places * 16 * 4

    def test_peft_reads_the_trained_adapters(self, folders: dict[str, str], reviews: Path, tmp_path: Path) -> None:
        from peft import PeftModel

        training = self.trained(folders["gemma3"], reviews)
        split = training.runner.method.model
        export_pretrained(split.model, training.state_dict(), tmp_path / "adapter")
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {
            p.name for p in (tmp_path / "adapter").iterdir()
        }
        base = load(folders["gemma3"])
        before = unsplit(base, texts())
        theirs = unsplit(PeftModel.from_pretrained(base, str(tmp_path / "adapter")), texts())
        ours = model(folders["gemma3"])
        ours.load_state_dict(training.state_dict())
        real = texts() >= 0
        assert not torch.allclose(theirs[real], before[real], atol=1e-2)
        torch.testing.assert_close(ours(texts()).transpose(1, 2)[real], theirs[real], atol=1e-6, rtol=1e-6)
        answers = answer_tokens((" bad", " good"), folders["gemma3"])
        predicted = split.predict(training.model, texts())
        torch.testing.assert_close(predicted, theirs[:, -1, list(answers)], atol=1e-6, rtol=1e-6)

    def test_a_fully_trained_model_is_read_by_transformers(
        self, folders: dict[str, str], reviews: Path, tmp_path: Path
    ) -> None:
        run = replace(self.RUN, model=Choice("causal_lm", {"path": folders["llama"], "rank": 0}), rounds=1)
        training = build.training(run, reviews)
        before = training.state_dict()
        training.round()
        after = training.state_dict()
        for name in ("embedding.tokens.weight", "layers.1.block.mlp.up_proj.weight", "head.lm_head.weight"):
            assert (after[name] - before[name]).abs().max() > 1e-3
        split = training.runner.method.model
        export_pretrained(split.model, after, tmp_path)
        theirs = unsplit(load(str(tmp_path)), texts())
        answers = list(answer_tokens((" bad", " good"), folders["llama"]))
        torch.testing.assert_close(split.predict(training.model, texts()), theirs[:, -1, answers], atol=1e-5, rtol=1e-5)

    def test_half_a_model_is_not_exported(self, folders: dict[str, str], tmp_path: Path) -> None:
        net = model(folders["llama"])
        with pytest.raises(ConfigError, match=r"^the state dict has no 'embedding.tokens.weight': give that of the wh"):
            export_pretrained(net, Split(net, 1).initial()[1].params, tmp_path)


def test_the_mean_of_products_is_not_the_product_of_means(folders: dict[str, str]) -> None:
    """A round of two clients, of 8 and 16 texts; what each held in the end is trained here in plain PyTorch."""

    def fresh() -> CausalLM:
        return stirred(model(folders["llama"], answers=(" bad", " good")))

    data, partition = Arrays(x=texts(24), y=torch.arange(24) % 3 % 2, num_classes=2), clients_of((8, 16))
    opt = optim.sgd(0.5)
    found = trained(
        splitlora(model=Split(fresh(), "layer1"), client_opt=opt, server_opt=opt), data, partition, rounds=1
    )
    batches = walk(partition)
    held = [
        sgd_by_hand(fresh(), data, [batches.samples(j, k) for k in range(batches.per_round(j))], lr=0.5) for j in (0, 1)
    ]
    adapted = [name.removesuffix("lora_A.default.weight") for name in found if "lora_A" in name]
    assert len(adapted) == 6  # query and value of a layer at the clients and two at the server
    for place in adapted:
        a, b = (f"{place}lora_{matrix}.default.weight" for matrix in "AB")
        for name in (a, b):
            torch.testing.assert_close(found[name], held[0][name] / 3 + held[1][name] * 2 / 3, atol=1e-5, rtol=1e-5)
        products = held[0][b] @ held[0][a] / 3 + held[1][b] @ held[1][a] * 2 / 3
        lost = (held[0][b] - held[1][b]) @ (held[0][a] - held[1][a]) * 2 / 9
        torch.testing.assert_close(products - found[b] @ found[a], lost, atol=1e-5, rtol=1e-3)
        assert lost.abs().max() > 1e-3
