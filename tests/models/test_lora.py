"""N adapters on one base behave as N models."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from mlrl.errors import ConfigError
from mlrl.models.base import Base, Policy
from mlrl.models.prefix_tree import PrefixTree
from tests.tiny import tiny_model

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def tree(offset: int) -> PrefixTree:
    made = PrefixTree()
    root = made.add([3 + offset, 4, 5])
    for k in range(3):
        made.add([10 + k, 11, 12 + offset][: k + 1], root, scored=True, key=k)
    return made


def team(kind: str = "llama") -> Base:
    base = Base(tiny_model(kind), kind)
    for name in ("agent_0", "agent_1"):
        base.add_adapter(name, LoraConfig(**LORA), seed=int(name[-1]))
    with torch.no_grad():  # adapters that do something
        for name in ("agent_0", "agent_1"):
            generator = torch.Generator().manual_seed(7 + int(name[-1]))
            for parameter in base.adapter_parameters(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
                parameter.requires_grad_(True)
    return base


def separate(base: Base, kind: str, adapter: str) -> PeftModel:
    """A model of its own with one adapter's weights, run by PEFT alone."""
    model = get_peft_model(tiny_model(kind), LoraConfig(**LORA))
    mine = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for target, source in zip(mine, base.adapter_parameters(adapter), strict=True):
            target.copy_(source)
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_one_base_have_the_gradients_of_separate_models(kind, checkpointing):
    base = team(kind)
    if checkpointing:
        base.enable_gradient_checkpointing()
    for offset, adapter in enumerate(("agent_0", "agent_1")):  # backward before any switch, one after the other
        policy = Policy(base, adapter)
        with policy.use():
            logprobs = policy.logprobs(tree(offset), 1.0)[0].logprobs_L
            (logprobs * torch.arange(1.0, 7.0)).sum().backward()
        model = separate(base, kind, adapter)
        expected = []
        for k in range(3):
            response = [10 + k, 11, 12 + offset][: k + 1]
            logits = model(torch.tensor([[3 + offset, 4, 5, *response]])).logits[0, 2:-1].log_softmax(-1)
            expected.append(logits.gather(1, torch.tensor(response)[:, None])[:, 0])
        torch.testing.assert_close(logprobs, torch.cat(expected), rtol=1e-5, atol=1e-5)
        (torch.cat(expected) * torch.arange(1.0, 7.0)).sum().backward()
        theirs = [p.grad for p in model.parameters() if p.requires_grad]
        for ours, other in zip(base.adapter_parameters(adapter), theirs, strict=True):
            assert (ours.grad - other).norm() <= 1e-5 * other.norm()
            assert other.norm() > 0
    assert all(p.grad is None for n, p in base.model.named_parameters() if "lora_" not in n)


def test_no_adapter_is_the_frozen_base():
    base = team()
    with Policy(base, None).use():
        ours = Policy(base, None).logprobs(tree(0), 1.0)[0].logprobs_L
    plain = Policy(Base(tiny_model(), "plain"), None)
    torch.testing.assert_close(ours, plain.logprobs(tree(0), 1.0)[0].logprobs_L)
    with Policy(base, "agent_0").use():
        adapted = Policy(base, "agent_0").logprobs(tree(0), 1.0)[0].logprobs_L
    assert (adapted - ours).abs().max() > 0.01


def test_switching_before_backward_is_an_error():
    base = team()
    refused = pytest.raises(RuntimeError, match="backward must be done before")
    with base.router.use("agent_0"), refused, base.router.use("agent_1"):
        pass


def test_outside_of_a_route_the_layers_are_as_peft_made_them():
    base = team()
    base.language_model.release()
    base.peft_model.set_adapter("agent_1")
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(base.model(ids).logits, separate(base, "llama", "agent_1")(ids).logits)


def test_mixed_route_gives_every_token_its_own_adapter():
    base = team()
    x = torch.randn(2, 3, 64)
    layer = base.router.layers[0]
    alone = []
    for adapter in ("agent_0", "agent_1", None):
        with base.router.use(adapter):
            alone.append(layer(x))
    owner = torch.tensor([[0, 1, -1], [1, 1, 0]])
    with torch.no_grad(), base.router.use_mixed(["agent_0", "agent_1"], owner):
        mixed = layer(x)
    for row in range(2):
        for column in range(3):
            torch.testing.assert_close(
                mixed[row, column], alone[int(owner[row, column])][row, column], rtol=1e-5, atol=1e-6
            )


def test_fresh_adapters_depend_on_their_seed_alone():
    first, second = (Base(tiny_model(), "tiny") for _ in range(2))
    for base in (first, second):
        torch.rand(3 if base is first else 50)  # the global stream stands elsewhere
        base.add_adapter("agent_0", LoraConfig(**LORA), seed=5)
    for a, b in zip(first.adapter_parameters("agent_0"), second.adapter_parameters("agent_0"), strict=True):
        assert torch.equal(a, b)


def test_what_routing_does_not_compute_is_refused():
    with pytest.raises(ConfigError, match="DoRA"):
        Base(tiny_model(), "tiny").add_adapter("agent_0", LoraConfig(**{**LORA, "use_dora": True}), 0)
    with pytest.raises(ConfigError, match="lora_target_modules.*nowhere.*q_proj"):
        Base(tiny_model(), "tiny").add_adapter("agent_0", LoraConfig(**{**LORA, "target_modules": ["nowhere"]}), 0)
    with pytest.raises(ConfigError, match="embedding or the head"):
        Base(tiny_model("llama_bos"), "tiny").add_adapter(
            "agent_0", LoraConfig(**{**LORA, "target_modules": ["q_proj", "lm_head"]}), 0
        )
    with pytest.raises(ConfigError, match="embedding or the head"):
        Base(tiny_model(), "tiny").add_adapter("agent_0", LoraConfig(**{**LORA, "target_modules": ["embed_tokens"]}), 0)


def test_a_saved_adapter_loads_with_plain_peft(tmp_path, tiny_llama):
    base = Base(AutoModelForCausalLM.from_pretrained(tiny_llama), tiny_llama)
    base.add_adapter("agent_0", LoraConfig(**LORA), seed=1)
    with torch.no_grad():
        for parameter in base.adapter_parameters("agent_0"):
            parameter.add_(0.05)
    base.peft_model.save_pretrained(tmp_path, selected_adapters=["agent_0"])
    again = Base(AutoModelForCausalLM.from_pretrained(tiny_llama), tiny_llama)
    again.load_adapter("first", str(tmp_path / "agent_0"))
    with base.router.use("agent_0"), again.router.use("first"):
        torch.testing.assert_close(
            Policy(base, "agent_0").logprobs(tree(0), 1.0)[0].logprobs_L,
            Policy(again, "first").logprobs(tree(0), 1.0)[0].logprobs_L,
        )
