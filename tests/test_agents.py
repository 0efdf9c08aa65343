"""Teams: what they share, what trains, and that what is saved loads with plain transformers and PEFT."""

import json
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from mlrl.agents import Team
from mlrl.config import AgentArguments
from mlrl.errors import ConfigError
from mlrl.models.base import Policy
from mlrl.models.prefix_tree import PrefixTree
from mlrl.rollout.sampler import Request, Sampler, SamplingParams
from mlrl.sources import check_source, load_tokenizers, max_model_length, resolve_source
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

PROMPT, RESPONSE = [1, 20, 21, 22], [30, 31, 2]


def load(models, tokenizer=None, dtype=torch.float32, seed=1, dtype_asked=None, **settings) -> Team:
    sources = [resolve_source(model) for model in models]
    tokenizers = load_tokenizers(sources, tokenizer)
    arguments = AgentArguments(**{"lora_rank": 4, "lora_alpha": 8.0, "dtype": dtype_asked} | settings)
    return Team.load(arguments, sources, tokenizers, device=torch.device("cpu"), dtype=dtype, seed=seed)


def scores(policy: Policy) -> torch.Tensor:
    """Log-probabilities of one fixed response."""
    tree = PrefixTree()
    tree.add(RESPONSE, tree.add(PROMPT), scored=True)
    return policy.logprobs(tree, 1.0)[0].logprobs_L


def scored(policy: Policy) -> torch.Tensor:
    with torch.no_grad(), policy.use():
        return scores(policy)


@torch.no_grad()
def plain_scores(model) -> torch.Tensor:
    """The same by a model's own forward."""
    logits = model.eval()(torch.tensor([PROMPT + RESPONSE])).logits[0].float()
    return logits.log_softmax(-1)[len(PROMPT) - 1 : -1].gather(-1, torch.tensor(RESPONSE)[:, None])[:, 0]


def train(team: Team, learning_rate: float = 0.5) -> None:
    """A step of plain gradient descent of every agent, each with another response's weight."""
    for number, agent in enumerate({id(a.parameters[0]): a for a in team.agents}.values()):
        with agent.policy.use():
            scores(agent.policy).mul(number + 1.0).sum().neg().backward()
        with torch.no_grad():
            for parameter in agent.parameters:
                parameter -= learning_rate * parameter.grad
                parameter.grad = None


def moved(team: Team) -> Team:
    for _ in range(3):
        train(team)
    return team


def base_weights(team: Team) -> dict[int, torch.Tensor]:
    """Every weight that no agent trains, by storage."""
    trained = {id(p) for agent in team.agents for p in agent.parameters}
    return {p.data_ptr(): p for b in team.bases for p in b.model.parameters() if id(p) not in trained}


# What is shared ------------------------------------------------------------------------------------------------------


def test_agents_of_one_model_share_one_frozen_base(tiny_llama):
    team = load([tiny_llama] * 3)
    assert len(team.bases) == 1 and all(agent.base is team.bases[0] for agent in team.agents)
    assert [agent.adapter for agent in team.agents] == ["agent_0", "agent_1", "agent_2"]
    one_copy = sum(p.numel() for p in tiny_model().parameters())
    assert sum(p.numel() for p in base_weights(team).values()) == one_copy
    trained, every = team.num_parameters()
    own = sum(p.numel() for p in team.agents[0].parameters)
    assert (trained, every) == (3 * own, 3 * own + one_copy)
    ids = [{id(p) for p in agent.parameters} for agent in team.agents]
    assert not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])


def test_agents_of_different_models_have_bases_of_their_own(tiny_llama, tiny_qwen2):
    team = load([tiny_llama, tiny_qwen2, tiny_llama])
    assert len(team.bases) == 2
    assert team.agents[0].base is team.agents[2].base is not team.agents[1].base
    assert [agent.tokenizer.pad_token for agent in team.agents] == ["<|im_end|>", "<|endoftext|>", "<|im_end|>"]
    assert team.agents[0].tokenizer is team.agents[2].tokenizer


def test_full_tuning_is_a_network_an_agent(tiny_llama):
    team = load([tiny_llama] * 2, tuning="full")
    assert len(team.bases) == 2 and [agent.adapter for agent in team.agents] == [None, None]
    before = scored(team.agents[1].policy)
    train(team, 1e-2)
    assert not torch.equal(scored(team.agents[0].policy), scored(team.agents[1].policy))
    assert not torch.equal(scored(team.agents[1].policy), before)
    assert team.num_parameters() == (2 * sum(p.numel() for p in tiny_model().parameters()),) * 2


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_shared_parameters_are_one_set_saved_under_every_agent(tiny_llama, tmp_path, tuning):
    team = load([tiny_llama] * 2, share_parameters=True, tuning=tuning)
    assert len(team.trainable) == 1 and team.agents[0].policy is team.agents[1].policy
    assert [id(p) for p in team.agents[0].parameters] == [id(p) for p in team.agents[1].parameters]
    own = sum(p.numel() for p in team.agents[0].parameters)
    assert team.num_parameters()[0] == own
    train(team, 1e-2)
    team.save(tmp_path)
    again = load([tmp_path / "agent_0", tmp_path / "agent_1"], tuning=tuning)
    assert len(again.trainable) == 2
    for agent in again.agents:
        torch.testing.assert_close(scored(agent.policy), scored(team.agents[0].policy))


def test_fresh_adapters_start_at_the_base_and_depend_on_seed_and_agent_alone(tiny_llama):
    torch.manual_seed(0)
    first = load([tiny_llama] * 2)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    second, other = load([tiny_llama] * 2), load([tiny_llama] * 2, seed=2)
    torch.testing.assert_close(scored(first.agents[0].policy), plain_scores(tiny_model()))
    for a, b, c in zip(first.agents, second.agents, other.agents, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters, b.parameters, strict=True))
        assert not all(torch.equal(p, q) for p, q in zip(a.parameters, c.parameters, strict=True))
    ours, theirs = (agent.parameters for agent in first.agents)
    assert not all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)  # loading draws nothing from the global generator


# What trains ---------------------------------------------------------------------------------------------------------


def assert_only_agents_train(team: Team) -> None:
    trained = {id(p) for agent in team.agents for p in agent.parameters}
    for base in team.bases:
        assert all(p.requires_grad == (id(p) in trained) for p in base.model.parameters())


@pytest.mark.parametrize("references", [False, True])
def test_only_adapters_train_and_all_of_them_do(tiny_llama, tmp_path, references):
    moved(load([tiny_llama] * 2)).save(tmp_path)
    loaded_peft = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter in loaded_peft.parameters():
        parameter.requires_grad_(True)  # as a user may leave it
    models = [tiny_llama, str(tmp_path / "agent_0"), tiny_llama, str(tmp_path / "agent_1"), loaded_peft]
    team = load(models, tiny_tokenizer())
    assert len(team.bases) == 2
    if references:
        team.add_references()
    assert_only_agents_train(team)
    before = {pointer: weight.clone() for pointer, weight in base_weights(team).items()}
    adapters = [[p.clone() for p in agent.parameters] for agent in team.agents]
    train(team)
    assert all(torch.equal(weight, before[pointer]) for pointer, weight in base_weights(team).items())
    for agent, old in zip(team.agents, adapters, strict=True):
        assert any(not torch.equal(p, q) for p, q in zip(agent.parameters, old, strict=True))


def test_an_agents_step_moves_no_other_agent(tiny_llama):
    team = moved(load([tiny_llama] * 2))
    before = [scored(agent.policy) for agent in team.agents]
    agent = team.agents[0]
    with agent.policy.use():
        scores(agent.policy).sum().backward()
    assert all(p.grad is not None for p in agent.parameters)
    assert all(p.grad is None for p in team.agents[1].parameters)
    with torch.no_grad():
        for parameter in agent.parameters:
            parameter += parameter.grad
    after = [scored(agent.policy) for agent in team.agents]
    assert not torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])


@pytest.mark.parametrize("source", ["fresh", "saved"])
def test_gradient_checkpointing_is_on_for_every_kind_of_agent(tiny_llama, tmp_path, source):
    models = [tiny_llama] * 2
    if source == "saved":
        load(models).save(tmp_path)
        models = [str(tmp_path / "agent_0"), str(tmp_path / "agent_1")]
    team = load(models, gradient_checkpointing=True)
    team.add_references()
    layers = [m for m in team.bases[0].model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert layers and all(layer.training for layer in layers)
    assert not any(isinstance(m, torch.nn.Dropout) and m.training for m in team.bases[0].model.modules())
    train(team)


# Saving and loading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "llama_bos"])
def test_saved_adapters_load_with_plain_peft_and_again_here(tmp_path, kind):
    folder = save_tiny(tmp_path / "base", kind)
    team = moved(load([folder] * 2))
    assert not torch.equal(scored(team.agents[0].policy), scored(team.agents[1].policy))
    team.save(tmp_path / "agents")
    for agent in team.agents:
        saved = tmp_path / "agents" / f"agent_{agent.index}"
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), saved)
        torch.testing.assert_close(plain_scores(model), scored(agent.policy), rtol=1e-4, atol=1e-5)
        automatic = AutoModelForCausalLM.from_pretrained(saved)  # transformers finds base and adapter
        torch.testing.assert_close(plain_scores(automatic), scored(agent.policy), rtol=1e-4, atol=1e-5)
        tokenizer = AutoTokenizer.from_pretrained(saved)
        text = "The sea is deep <|im_end|> again"
        assert tokenizer(text)["input_ids"] == agent.tokenizer(text)["input_ids"]
        assert tokenizer.chat_template == agent.tokenizer.chat_template
        assert tokenizer.eos_token_id == agent.tokenizer.eos_token_id
    again = load([str(tmp_path / "agents" / "agent_0"), tmp_path / "agents" / "agent_1", folder])
    assert len(again.bases) == 1  # adapters that name one base share it, with whom starts from it afresh
    for ours, theirs in zip(again.agents, team.agents, strict=False):
        torch.testing.assert_close(scored(ours.policy), scored(theirs.policy))
    torch.testing.assert_close(scored(again.agents[2].policy), plain_scores(tiny_model(kind)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "llama_bos"])
def test_saved_full_models_load_with_plain_transformers_and_again_here(tmp_path, kind):
    folder = save_tiny(tmp_path / "base", kind)
    team = load([folder] * 2, tuning="full")
    train(team, 1e-3)
    team.save(tmp_path / "agents")
    for agent in team.agents:
        saved = tmp_path / "agents" / f"agent_{agent.index}"
        assert "mlrl" not in (saved / "config.json").read_text()  # nothing of ours in it
        model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(info.values())  # no key too many or too few
        torch.testing.assert_close(plain_scores(model), scored(agent.policy), rtol=1e-4, atol=1e-5)
        ids = torch.tensor([PROMPT])
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > len(PROMPT)
        assert AutoTokenizer.from_pretrained(saved).get_vocab() == agent.tokenizer.get_vocab()
    again = load([str(tmp_path / "agents" / f"agent_{i}") for i in range(2)], tuning="full")
    for ours, theirs in zip(again.agents, team.agents, strict=True):
        torch.testing.assert_close(scored(ours.policy), scored(theirs.policy))
    train(team, 1e-3)  # saving ends nothing


def test_the_trainers_base_gives_saved_adapters_their_scores_after_more_training(tiny_llama, tmp_path):
    team = moved(load([tiny_llama] * 2))
    team.save(tmp_path / "before")
    expected = [scored(agent.policy) for agent in team.agents]
    moved(team).save(tmp_path / "after")
    for i in range(2):
        early = load([tmp_path / "before" / f"agent_{i}"])
        torch.testing.assert_close(scored(early.agents[0].policy), expected[i])


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_after_loading_each_agent_samples_from_its_own_weights(tiny_llama, tmp_path, tuning):
    first = load([tiny_llama] * 2, tuning=tuning)
    for _ in range(3):
        train(first, 0.5 if tuning == "lora" else 1e-2)
    first.save(tmp_path)
    team = load([tmp_path / "agent_0", tmp_path / "agent_1"], tuning=tuning)
    requests = [Request(agent, PROMPT, [(0, "train", 0, (), agent, k) for k in range(3)]) for agent in range(2)]
    for _ in range(2):  # as loaded, and after a further update
        sampled = Sampler(team).sample(requests, SamplingParams(0.8, max_new_tokens=8))
        for agent, responses in zip(team.agents, sampled, strict=True):
            tree = PrefixTree()
            for k, response in enumerate(responses):
                tree.add(response.token_ids, tree.add(PROMPT), scored=True, key=k)
            with torch.no_grad(), agent.policy.use():
                scored_L = agent.policy.logprobs(tree, 0.8)[0].logprobs_L
            torch.testing.assert_close(
                torch.tensor([p for r in responses for p in r.logprobs]), scored_L, rtol=1e-4, atol=1e-4
            )
        assert sampled[0] != sampled[1]
        train(team, 1e-2)


# Loaded objects ------------------------------------------------------------------------------------------------------


def test_a_loaded_model_given_twice_is_one_base(tmp_path):
    model = tiny_model()
    team = moved(load([model, model], tiny_tokenizer()))
    assert len(team.bases) == 1 and team.bases[0].model is model
    team.save(tmp_path)
    for agent in team.agents:
        saved = tmp_path / f"agent_{agent.index}"
        # it came from nowhere, so no base is named; PEFT takes the one it is given
        assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] is None
        restored = PeftModel.from_pretrained(tiny_model(), saved)
        torch.testing.assert_close(plain_scores(restored), scored(agent.policy), rtol=1e-4, atol=1e-5)
        with pytest.raises(ConfigError, match="names no base_model_name_or_path"):
            resolve_source(str(saved))


def test_a_loaded_model_from_a_folder_names_it(tiny_llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    team = moved(load([model, model]))  # and its tokenizer is found there
    team.save(tmp_path)
    again = load([tmp_path / "agent_0", tmp_path / "agent_1"])
    for ours, theirs in zip(again.agents, team.agents, strict=True):
        torch.testing.assert_close(scored(ours.policy), scored(theirs.policy))


def test_two_loaded_models_are_two_bases():
    team = load([tiny_model(), tiny_model(seed=1)], tiny_tokenizer())
    assert len(team.bases) == 2
    torch.testing.assert_close(scored(team.agents[1].policy), plain_scores(tiny_model(seed=1)))


def test_a_loaded_peft_model_trains_its_own_adapter(tmp_path):
    def loaded() -> PeftModel:
        config = LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = get_peft_model(tiny_model(), config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.3)
        return model.train()

    expected = plain_scores(loaded())
    team = load([loaded(), loaded()], tiny_tokenizer())
    torch.testing.assert_close(scored(team.agents[0].policy), expected, rtol=1e-4, atol=1e-5)  # dropout is off
    assert len(team.agents[0].parameters) == 2 * 2 * 2  # two layers, q and v, A and B
    moved(team).save(tmp_path)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path / "agent_1")
    torch.testing.assert_close(plain_scores(model), scored(team.agents[1].policy), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scored(team.agents[1].policy), expected)
    one = loaded()
    with pytest.raises(ConfigError, match="one PeftModel was given to several agents"):
        load([one, one], tiny_tokenizer())
    assert len(load([one, one], tiny_tokenizer(), share_parameters=True).trainable) == 1


def test_a_loaded_model_with_full_tuning_serves_one_team_after_another():
    model = tiny_model()
    train(load([model], tiny_tokenizer(), tuning="full"), 1e-2)
    again = load([model], tiny_tokenizer(), tuning="full")
    assert not torch.allclose(scored(again.agents[0].policy), plain_scores(tiny_model()))
    with pytest.raises(ConfigError, match="one loaded model was given to several agents with tuning='full'"):
        load([model, model], tiny_tokenizer(), tuning="full")


def test_a_loaded_model_that_carries_adapters_is_refused():
    model = tiny_model()
    load([model], tiny_tokenizer())
    with pytest.raises(ConfigError, match="carries LoRA adapters already"):
        load([model], tiny_tokenizer())


# References ----------------------------------------------------------------------------------------------------------


def test_reference_of_a_fresh_adapter_is_the_base_without_a_copy(tiny_llama):
    team = load([tiny_llama] * 2)
    weights = len(base_weights(team))
    team.add_references()
    assert len(base_weights(team)) == weights
    assert [agent.reference for agent in team.agents] == [Policy(team.bases[0], None)] * 2
    before = scored(team.agents[0].reference)
    torch.testing.assert_close(before, scored(team.agents[0].policy))
    moved(team)
    assert torch.equal(scored(team.agents[0].reference), before)
    assert not torch.allclose(scored(team.agents[0].policy), before)


def test_reference_of_a_saved_adapter_is_that_adapter(tiny_llama, tmp_path):
    moved(load([tiny_llama] * 2)).save(tmp_path)
    team = load([str(tmp_path / "agent_0"), str(tmp_path / "agent_1"), tiny_llama])
    team.add_references()
    before = [scored(agent.reference) for agent in team.agents]
    for agent, reference in zip(team.agents, before, strict=True):
        torch.testing.assert_close(reference, scored(agent.policy))
    assert not torch.allclose(before[0], before[1])
    moved(team)
    for agent, reference in zip(team.agents, before, strict=True):
        assert torch.equal(scored(agent.reference), reference)
        assert not torch.allclose(scored(agent.policy), reference)
    team.save(tmp_path / "again")  # references are not saved
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == ["agent_0", "agent_1", "agent_2"]
    assert not [p for p in (tmp_path / "again").rglob("*") if "reference" in p.name]


def test_reference_of_a_loaded_peft_model_is_a_copy_of_its_adapter():
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    team = moved(load([model], tiny_tokenizer()))
    team.add_references()
    before = scored(team.agents[0].reference)
    torch.testing.assert_close(before, scored(team.agents[0].policy))
    moved(team)
    assert torch.equal(scored(team.agents[0].reference), before)


def test_full_tuning_has_one_frozen_copy_for_agents_that_started_alike(tiny_llama, tiny_llama_other):
    team = load([tiny_llama, tiny_llama, tiny_llama_other], tuning="full")
    team.add_references()
    first, second, third = (agent.reference for agent in team.agents)
    assert first is second and third is not first
    before = scored(first)
    assert not any(p.requires_grad for p in first.base.model.parameters())
    train(team, 1e-2)
    assert torch.equal(scored(first), before)
    torch.testing.assert_close(before, plain_scores(tiny_model()))
    torch.testing.assert_close(scored(third), plain_scores(tiny_model(seed=1)))
    assert not torch.allclose(scored(team.agents[0].policy), before)


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_another_reference_can_be_named(tiny_llama, tiny_llama_other, tmp_path, tuning):
    team = load([tiny_llama] * 2, tuning=tuning)
    team.add_references(tiny_llama_other)
    assert team.agents[0].reference is team.agents[1].reference
    torch.testing.assert_close(scored(team.agents[0].reference), plain_scores(tiny_model(seed=1)))
    load([tiny_llama]).save(tmp_path)
    with pytest.raises(ConfigError, match="reference_model=.*is an adapter"):
        team.add_references(str(tmp_path / "agent_0"))


def test_a_reference_has_to_know_the_tokens(tiny_qwen2, tiny_llama):
    tokenizer = tiny_tokenizer("qwen2")
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(20)])  # 404 of qwen2's 448 rows; llama has 384
    team = load([tiny_qwen2], tokenizer)
    with pytest.raises(ConfigError, match="reference_model=.*404 tokens, but it embeds 384"):
        team.add_references(tiny_llama)


# Types and ends ------------------------------------------------------------------------------------------------------


def test_bfloat16_bases_keep_adapters_in_float32(tiny_llama, tmp_path):
    team = load([tiny_llama] * 2, dtype=torch.bfloat16)
    assert {p.dtype for p in base_weights(team).values()} == {torch.bfloat16}
    assert {p.dtype for agent in team.agents for p in agent.parameters} == {torch.float32}
    moved(team).save(tmp_path)
    again = load([tmp_path / "agent_0"], dtype=torch.bfloat16)
    assert {p.dtype for p in again.agents[0].parameters} == {torch.float32}
    torch.testing.assert_close(scored(again.agents[0].policy), scored(team.agents[0].policy))


def test_what_ends_a_response(tiny_llama, tmp_path):
    assert load([tiny_llama]).agents[0].stop_ids == {2}
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = [2, 0]  # as instruction-tuned models name several
    model.save_pretrained(tmp_path)
    tiny_tokenizer("qwen2").save_pretrained(tmp_path)
    assert load([str(tmp_path)]).agents[0].stop_ids == {0, 2}


def test_longest_sequence_from_the_config_alone(tiny_llama, tiny_gpt2):
    assert max_model_length(resolve_source(tiny_llama)) == max_model_length(resolve_source(tiny_gpt2)) == 256


# Errors --------------------------------------------------------------------------------------------------------------


def no_weights(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


def test_errors_before_any_weights_are_read(monkeypatch, tmp_path, tiny_llama, tiny_gpt2):
    no_weights(monkeypatch)
    folder, other = str(tmp_path / "absent"), str(tmp_path / "no-tokenizer")
    with pytest.raises(ConfigError, match=rf"agent_model='{folder}': there is no such folder"):
        load([folder])
    with pytest.raises(ConfigError, match="agent_model='nobody/nothing': no tokenizer can be loaded from there"):
        load(["nobody/nothing"])
    with pytest.raises(ConfigError, match="agent_model='nobody/nothing': no model can be loaded from there"):
        load(["nobody/nothing"], tiny_tokenizer())
    with pytest.raises(ConfigError, match="reward_model_name='nobody/nothing': no model can be loaded from there"):
        check_source(resolve_source("nobody/nothing", "reward_model_name"))
    with pytest.raises(ConfigError, match="agent_model=int object: not a model"):
        load([3])
    tiny_model().save_pretrained(other)
    nothing_there = rf"agent_model='{other}': no tokenizer can be loaded from there.*pass tokenizer="
    with pytest.raises(ConfigError, match=nothing_there):
        load([other])
    with pytest.raises(ConfigError, match="tokenizer=None: agent_model=loaded LlamaForCausalLM.*Pass tokenizer="):
        load([tiny_model()])
    with pytest.raises(ConfigError, match="2 tokenizers for 3 agents"):
        load([tiny_llama] * 3, [tiny_tokenizer()] * 2)
    with pytest.raises(ConfigError, match="tokenizer='gpt2': not a tokenizer"):
        load([tiny_llama], "gpt2")
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match="tokenizer of agent 0 .*no end token"):
        load([tiny_llama], endless)
    large = tiny_tokenizer()
    large.add_tokens(["<new>"])
    with pytest.raises(ConfigError, match=r"tokenizer of agent 1: 385 tokens, but .* embeds 384.*resize"):
        load([tiny_llama] * 2, [tiny_tokenizer(), large])
    with pytest.raises(ConfigError, match="share_parameters=True: .* are different models"):
        load([tiny_model(), tiny_model(seed=1)], tiny_tokenizer(), share_parameters=True)
    with pytest.raises(ConfigError, match=r"its weights are torch.float16.*float32 or bfloat16"):
        load([tiny_model().half()], tiny_tokenizer())


def test_a_loaded_model_of_another_type_than_asked():
    with pytest.raises(ConfigError, match="dtype='bfloat16': loaded LlamaForCausalLM was loaded as torch.float32"):
        load([tiny_model()], tiny_tokenizer(), torch.bfloat16, dtype_asked="bfloat16")
    team = load([tiny_model()], tiny_tokenizer(), torch.bfloat16)  # not asked: it stays what it is
    assert team.bases[0].language_model.dtype == torch.float32


def test_errors_of_adapters(tiny_llama, tiny_gpt2, tmp_path):
    with pytest.raises(ConfigError, match="lora_target_modules=.*no_such_layer.*q_proj"):
        load([tiny_llama], lora_target_modules=["no_such_layer"])
    with pytest.raises(ConfigError, match="the embedding or the head of"):
        load([tiny_llama], lora_target_modules=["embed_tokens"])
    load([tiny_llama]).save(tmp_path)
    saved = tmp_path / "agent_0"
    with pytest.raises(ConfigError, match="tuning='full': .* is a LoRA adapter"):
        load([str(saved)], tuning="full")
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": tiny_gpt2}))
    with pytest.raises(ConfigError, match="the adapter does not load on"):
        load([str(saved)], tiny_tokenizer())


@pytest.mark.parametrize("how", ["loaded", "saved"])
def test_adapters_that_are_not_plain_lora_are_refused(tiny_llama, tmp_path, how):
    def given(config):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config)
        if how == "loaded":
            return model
        folder = tmp_path / type(config).__name__
        model.save_pretrained(folder)
        return str(folder)

    with pytest.raises(ConfigError, match="its adapter is not LoRA"):
        load([given(IA3Config(task_type="CAUSAL_LM"))], tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"trains .*norm.* \(modules_to_save\)"):
        load([given(LoraConfig(modules_to_save=["norm"], task_type="CAUSAL_LM"))], tiny_tokenizer())


def test_broken_weights(tmp_path, tiny_llama):
    folder = Path(save_tiny(tmp_path / "broken"))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="broken': its weights cannot be loaded"):
        load([str(folder)])
    state = tiny_model().state_dict()
    del state["model.norm.weight"], state["lm_head.weight"]  # the head is tied to the embedding
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="broken': its weights lack model.norm.weight"):
        load([str(folder)])
    load([tiny_llama]).save(tmp_path)
    (tmp_path / "agent_0" / "adapter_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="agent_0': the adapter does not load on"):
        load([str(tmp_path / "agent_0")])
