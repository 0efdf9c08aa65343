"""Packed prefix trees give the log-probabilities and gradients of sequences run one by one."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mlrl.errors import ConfigError
from mlrl.models.base import Base, Policy
from mlrl.models.language_model import LanguageModel
from mlrl.models.prefix_tree import PrefixTree
from tests.tiny import tiny_model

PROMPT, OTHER = list(range(3, 14)), [40, 41, 42]


def looped(model, sequences, temperature=1.0):
    """Log-probs of each (prompt, response), one sequence a forward through the untouched model."""
    out = []
    for prompt, response in sequences:
        logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
        steps = logits[len(prompt) - 1 : -1].log_softmax(-1)
        out.append(steps.gather(1, torch.tensor(response)[:, None])[:, 0])
    return out


def two_turns():
    """A tree of two turns with ragged responses, and its sequences in the order of the scored segments."""
    tree, sequences = PrefixTree(), []
    root, other = tree.add(PROMPT), tree.add(OTHER)
    for k, response in enumerate(([5, 6, 7, 8], [9], [10, 11])):
        node = tree.add(response, root, scored=True, key=("r", k))
        sequences.append((PROMPT, response))
        if k < 2:
            prompt = tree.add([60, 61 + k], node)
            for j, deeper in enumerate(([70, 71, 72], [73])):
                tree.add(deeper, prompt, scored=True, key=("d", k, j))
                sequences.append((PROMPT + response + [60, 61 + k], deeper))
    for k, response in enumerate(([20, 21, 22, 23, 24, 25], [9])):
        tree.add(response, other, scored=True, key=("o", k))
        sequences.append((OTHER, response))
    return tree, sequences


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "llama_bos"])
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_values_and_gradients_equal_the_loop(kind, attn_implementation):
    reference, shared = tiny_model(kind), tiny_model(kind)
    tree, sequences = two_turns()
    expected = looped(reference, sequences, temperature=0.7)
    policy = Policy(Base(shared, kind, attn_implementation), None)
    with policy.use():
        scored, lengths = policy.logprobs(tree, temperature=0.7)
    assert lengths == [len(response) for _, response in sequences]
    torch.testing.assert_close(scored.logprobs_L, torch.cat(expected), rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, len(scored.logprobs_L))
    (scored.logprobs_L * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    for (name, ours), (_, theirs) in zip(shared.named_parameters(), reference.named_parameters(), strict=True):
        scale = theirs.grad.norm()
        assert scale > 0 or name == "transformer.wpe.weight", name
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * scale + 1e-7, name


def test_gradient_checkpointing_changes_nothing_but_runs_layers_again():
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = tiny_model("llama")
        base = Base(model, "llama")
        if checkpointing:
            base.enable_gradient_checkpointing()
        forwards = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))
        policy = Policy(base, None)
        with policy.use():
            policy.logprobs(two_turns()[0], temperature=1.0)[0].logprobs_L.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        calls.append(len(forwards))
    torch.testing.assert_close(*gradients)
    assert calls == [1, 2]


def test_shared_prompt_is_run_once():
    tree = PrefixTree()
    for k in range(4):
        tree.add([5, 6, 7], tree.add(PROMPT), scored=True, key=k)
    assert tree.num_tokens == len(PROMPT) + 4 * 2  # nothing is predicted from a response's last token
    assert tree.pack().input_ids.shape == (1, tree.num_tokens)


def test_cost_is_what_a_chain_adds():
    tree = PrefixTree()
    tree.add_chain([(PROMPT, None), ([5, 6], "a")])
    assert tree.cost([(PROMPT, None), ([5, 6], "b")]) == 2
    assert tree.cost([(PROMPT, None), ([5, 6], "a"), ([7, 8, 9], None), ([1], "c")]) == 4
    assert tree.cost([(OTHER, None), ([5, 6], "a")]) == 5


def test_two_answers_that_differ_in_the_last_token_differ():
    policy = Policy(Base(tiny_model(), "tiny"), None)
    tree = PrefixTree()
    root = tree.add(PROMPT)
    tree.add([5, 6, 7], root, scored=True, key=0)
    tree.add([5, 6, 2], root, scored=True, key=1)  # 2 is the end token, and pad
    logprobs = policy.logprobs(tree, 1.0)[0].logprobs_L
    assert torch.allclose(logprobs[:2], logprobs[3:5])
    assert logprobs[2] != logprobs[5]


@pytest.mark.parametrize("length", [1, 2])
def test_one_token_answer_has_a_gradient(length):
    model = tiny_model()
    policy = Policy(Base(model, "tiny"), None)
    tree = PrefixTree()
    tree.add([2] * length, tree.add(PROMPT), scored=True)
    policy.logprobs(tree, 1.0)[0].logprobs_L.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.norm() > 0


def test_other_architectures():
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    tree, sequences = two_turns()
    for config_class, model_class, extra in (
        (Qwen3Config, Qwen3ForCausalLM, {}),
        (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 32, "query_pre_attn_scalar": 16}),
    ):
        torch.manual_seed(0)
        config = config_class(**sizes, num_key_value_heads=2, head_dim=16, initializer_range=0.15, **extra)
        model = model_class._from_config(config, attn_implementation="eager").eval()
        expected = looped(model, sequences)
        base = Base(model, "other")
        logprobs = Policy(base, None).logprobs(tree, 1.0)[0].logprobs_L
        torch.testing.assert_close(logprobs, torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert base.language_model.max_length == 32  # Gemma 2 looks back over a window


def test_a_model_that_cannot_share_prefixes_is_refused(tiny_llama):
    with pytest.raises(ConfigError, match="attn_implementation='flash_attention_2'.*sdpa and eager"):
        Base(tiny_model(), "tiny", "flash_attention_2")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    with pytest.raises(ConfigError, match="other logits when its prefixes are shared"):
        LanguageModel(model, "odd")


def test_a_model_that_cannot_be_decoded_is_refused():
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = DiffLlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match="DiffLlamaForCausalLM gives other logits token by token"):
        LanguageModel(model, "odd")
