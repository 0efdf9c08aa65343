"""Decoding in few operations gives what the own forward of a model gives; one that is built otherwise keeps its own."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig, MistralConfig, Qwen3Config, SmolLM3Config

from mlrl.models import decoding, products, projections
from mlrl.models.base import Base
from mlrl.models.decode_attention import DecodeAttention
from mlrl.models.decoding import DecodeStep
from mlrl.models.packing import PackedLinear
from mlrl.models.prefix_tree import PrefixTree
from tests.models.test_packing import needs_mkl
from tests.tiny import tiny_model

SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.15,
    "pad_token_id": 0,
}  # fmt: skip
OTHERS = {
    "qwen3": Qwen3Config, "mistral": MistralConfig, "gemma": GemmaConfig, "gemma2": Gemma2Config,
    "smollm3": SmolLM3Config,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16], [17, 18, 19], [20, 21], [22]]


def base_of(kind: str, adapters: bool = True, target_modules="all-linear", attn_implementation=None) -> Base:
    if kind in OTHERS:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(OTHERS[kind](**SIZES)).eval()
    else:
        model = tiny_model(kind)
    base = Base(model, kind, attn_implementation)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for norm in (m for n, m in model.named_modules() if n.endswith("norm") and hasattr(m, "weight")):
            norm.weight.add_(0.3 * torch.randn(norm.weight.shape, generator=generator))
        for name in ("agent_0", "agent_1") if adapters else ():
            base.add_adapter(name, LoraConfig(r=4, lora_alpha=8, target_modules=target_modules), seed=0)
            for parameter in base.adapter_parameters(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return base


@torch.no_grad()
def decode(base: Base, steps: int = 4, lean: bool = True) -> list[torch.Tensor]:
    """Logits of some steps, of rows of two adapters and of none, one of which leaves half-way."""
    model = base.language_model
    owner = torch.tensor([0, 1, -1, 0, 1, -1])
    with base.mixed_adapters(["agent_0", "agent_1"], owner) as route:
        tree = PrefixTree()
        segments = [tree.add(ids, weights=int(own)) for ids, own in zip(PROMPTS, owner, strict=True)]
        packed = tree.pack("cpu")
        packed.attention.captured = []
        if route is not None:
            tokens = torch.empty(packed.input_ids.shape[1], dtype=torch.long)
            for segment, path in zip(tree.segments, packed.paths, strict=True):
                tokens[path] = segment.weights
            route.set_owner(tokens)
        model.hidden_states(packed.input_ids, packed.position_ids, packed.attention)
        paths = [packed.paths[segment] for segment in segments]
        lengths = torch.tensor([len(path) for path in paths])
        store = DecodeAttention(torch.arange(6), lengths, steps)
        store.prefill(torch.tensor([path + path[-1:] * (6 - len(path)) for path in paths]), packed.attention.captured)
        step = DecodeStep(model, route, 6, steps)
        order, seen = torch.arange(6), []
        for number in range(steps):
            if number == 2:
                order = store.keep(torch.arange(6) != 1)
                assert order.tolist() == [0, 5, 2, 3, 4]
            if route is not None:
                route.set_owner(owner[order])
            ids, positions = 30 + order + 7 * number, lengths[order] + number
            if lean:
                seen.append(step(ids, positions, store))
            else:
                seen.append(model.logits(model.hidden_states(ids[:, None], positions[:, None], store)[:, 0]))
            store.advance()
        return seen


def count_packed(monkeypatch) -> list[int]:
    """Takes note of every packing, by the width of what is packed."""
    made = []

    class Counted(PackedLinear):
        def __init__(self, weight, bias):
            super().__init__(weight, bias)
            made.append(len(weight))

    monkeypatch.setattr(decoding, "PackedLinear", Counted)
    monkeypatch.setattr(projections, "PackedLinear", Counted)
    return made


def agree(base: Base) -> None:
    for ours, own in zip(decode(base), decode(base, lean=False), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["rows", "columns", pytest.param("packed", marks=needs_mkl)])
def layout(request, monkeypatch):
    """How products of few rows are laid out."""
    monkeypatch.setattr(products, "columns_pay", lambda: request.param == "columns")
    packs = request.param == "packed"
    monkeypatch.setattr(decoding, "packing_pays", lambda *_: packs)
    made = count_packed(monkeypatch)
    yield request.param
    assert len(made) == (2 * 9 if packs else 0)  # of each decoding: four in each of two layers, and the head


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_are_those_of_the_model(kind, adapters, layout):
    base = base_of(kind, adapters)
    agree(base)
    assert base.language_model.lean_decoding is True


@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj"], ["up_proj"], ["down_proj", "k_proj", "o_proj"]])
def test_layers_without_an_adapter(target_modules, layout):
    base = base_of("qwen2", target_modules=target_modules)
    agree(base)
    assert base.language_model.lean_decoding is True


def test_attention_spelled_out():
    base = base_of("llama", attn_implementation="eager")
    agree(base)
    assert base.language_model.lean_decoding is True


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gpt2", "smollm3"])
def test_other_models_decode_by_themselves(kind):
    base = base_of(kind)
    for ours, own in zip(decode(base), decode(base, lean=False), strict=True):
        assert torch.equal(ours, own)
    assert base.language_model.lean_decoding is None  # not even tried


@needs_mkl
@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gpt2"])  # embeddings scaled, logits capped
def test_other_models_have_their_head_packed(kind, monkeypatch):
    monkeypatch.setattr(decoding, "packing_pays", lambda *_: True)
    freed, made = [], count_packed(monkeypatch)
    monkeypatch.setattr(decoding, "give_back_memory", lambda: freed.append(True))
    agree(base_of(kind))
    assert len(made) == len(freed) == 2  # the head alone, for each of two decodings


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_half_precision_is_as_near_as_the_model(kind):
    base = base_of(kind)
    base.model.to(torch.bfloat16)
    exact = base_of(kind)
    distances = []
    for lean in (True, False):
        states = zip(decode(base, lean=lean), decode(exact, lean=False), strict=True)
        distances.append(sum(float((ours.float() - other).norm() / other.norm()) for ours, other in states))
    assert base.language_model.lean_decoding is True
    assert 0 < distances[0] < 1.5 * distances[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_computes_otherwise_is_found_out(dtype, monkeypatch):
    base = base_of("llama")
    base.model.to(dtype)
    normed = decoding.normed
    monkeypatch.setattr(decoding, "normed", lambda x, norm: normed(x, norm) * 1.2)
    for ours, own in zip(decode(base), decode(base, lean=False), strict=True):
        assert torch.equal(ours, own)  # what the trial has stored is overwritten
    assert base.language_model.lean_decoding is False


def test_hooks_and_wrapped_forwards_are_run():
    base = base_of("llama")
    agree(base)
    layer = base.language_model.backbone.layers[1]
    handle = layer.mlp.register_forward_hook(lambda module, args, out: out * 1.05)
    agree(base)
    handle.remove()
    forward = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **kwargs: (forward(*args, **kwargs)[0] * 1.05, None)
    agree(base)


def test_it_is_tried_once(monkeypatch):
    base = base_of("llama")
    decode(base)
    monkeypatch.setattr(decoding, "_agree", lambda *_: pytest.fail("tried again"))
    agree(base)
