"""Critics: what they share, values and gradients against loops, and that a saved critic comes back with its head."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mlrl.critic_inputs import action_inputs, state_inputs
from mlrl.critic_samples import critic_loss, estimate_critic
from mlrl.critics import ValueHead, save_critics
from mlrl.errors import ConfigError
from mlrl.losses.value import ValueLossSettings
from tests.critic_trees import critics_of, grow, load_team, value_batches
from tests.tiny import tiny_model, tiny_tokenizer


def settle(critics, seed=5):
    """Heads and adapters with weights of some size, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for critic in critics:
            for parameter in [*critic.head.parameters(), *critic.policy.parameters()]:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return critics


def inputs_of(critic, trees):
    return state_inputs(critic.reader, trees) if critic.critic_type == "v" else action_inputs(critic.reader, trees)


def looped_value(critic, given):
    """The value of one input alone, without packing: the last of a model's own hidden states."""
    language_model = critic.policy.base.language_model
    language_model.release()
    with critic.policy.use():
        hidden = language_model.backbone(input_ids=torch.tensor([given.token_ids])).last_hidden_state[0, -1]
    language_model.claim()
    if critic.head.hidden is not None:
        hidden = torch.tanh(critic.head.hidden.weight @ hidden + critic.head.hidden.bias)
    return critic.head.value.weight[0] @ hidden + critic.head.value.bias[0]


# What is shared ------------------------------------------------------------------------------------------------------


def test_critics_of_the_agents_model_are_adapters_on_its_one_base(tiny_llama):
    team, arguments = load_team([tiny_llama] * 2)
    before = sum(p.numel() for p in team.bases[0].model.parameters())
    adapter = sum(p.numel() for p in team.agents[0].parameters)
    critics = critics_of(team, arguments, centralized=False)
    assert [critic.policy.base for critic in critics] == [team.bases[0]] * 2
    after = sum(p.numel() for p in team.bases[0].model.parameters())
    assert after - before == 2 * adapter  # and no second copy of anything
    own = {id(p) for critic in critics for p in critic.parameters}
    agents = {id(p) for agent in team.agents for p in agent.parameters}
    assert not own & agents
    head = sum(p.numel() for p in critics[0].head.parameters())
    assert sum(p.numel() for p in critics[0].parameters) == adapter + head == adapter + 64 + 1
    trained = own | agents
    assert all(p.requires_grad == (id(p) in trained) for p in team.bases[0].model.parameters())
    assert all(p.requires_grad for critic in critics for p in critic.parameters)


def test_another_model_is_loaded_once_for_all_critics(tiny_llama, tiny_qwen2):
    team, arguments = load_team([tiny_llama] * 2)
    critics = critics_of(team, arguments, centralized=False, models=[tiny_qwen2] * 2)
    assert critics[0].policy.base is critics[1].policy.base is not team.bases[0]
    assert critics[0].reader.tokenizer.pad_token == "<|endoftext|>"
    trained = {id(p) for critic in critics for p in critic.parameters}
    assert all(p.requires_grad == (id(p) in trained) for p in critics[0].policy.base.model.parameters())


def test_full_tuning_copies_the_network(tiny_llama, tiny_llama_other):
    team, arguments = load_team([tiny_llama] * 2, tuning="full")
    [critic] = critics_of(team, arguments, centralized=True)
    assert critic.policy.base.model is not team.agents[0].base.model and critic.policy.adapter is None
    pairs = zip(critic.policy.base.model.parameters(), team.agents[0].base.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) and ours is not theirs for ours, theirs in pairs)
    critics = critics_of(team, arguments, centralized=False, models=[tiny_llama_other] * 2)
    assert critics[0].policy.base.model is not critics[1].policy.base.model


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_head_on_the_actor_adds_the_head_alone(tiny_llama, tuning):
    team, arguments = load_team([tiny_llama] * 2, tuning=tuning)
    critics = critics_of(team, arguments, centralized=False, separate=False, value_head_hidden_dim=7)
    for agent, critic in zip(team.agents, critics, strict=True):
        assert critic.policy is agent.policy and critic.on_actor
        assert sum(p.numel() for p in critic.parameters) == 64 * 7 + 7 + 7 + 1


def test_critics_change_no_agent(tiny_llama):
    team, arguments = load_team([tiny_llama] * 2)
    [critic] = critics_of(team, arguments, centralized=True)
    settle([critic])
    trees = grow(team)
    before = [[p.clone() for p in agent.parameters] for agent in team.agents]
    estimate = estimate_critic(critic, trees, discount=1.0, gae_lambda=1.0, num_turns=2, max_tokens=10_000)
    for batch, samples in value_batches(estimate.samples, 10_000):
        with critic.policy.use():
            critic_loss(critic, batch, samples, ValueLossSettings()).loss.backward()
    assert all(p.grad is not None for p in critic.parameters)
    for agent, old in zip(team.agents, before, strict=True):
        assert all(p.grad is None and torch.equal(p, q) for p, q in zip(agent.parameters, old, strict=True))


# Values --------------------------------------------------------------------------------------------------------------


def test_a_value_starts_at_0_and_is_the_same_for_the_same_seed():
    hidden = torch.randn(3, 8)
    assert ValueHead(8)(hidden).tolist() == ValueHead(8, 4)(hidden).tolist() == [0.0] * 3
    assert ValueHead(8)(hidden.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "llama_bos"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_values_in_shared_forwards_equal_those_one_by_one(request, kind, critic_type):
    for centralized in (True, False) if kind == "llama" else (critic_type == "v",):
        team, arguments = load_team([request.getfixturevalue(f"tiny_{kind}")] * 2)
        critics = critics_of(team, arguments, centralized=centralized, critic_type=critic_type, value_head_hidden_dim=5)
        critic = settle(critics)[-1]
        inputs = inputs_of(critic, grow(team, items=1, chat=kind != "gpt2"))
        with torch.no_grad():
            expected = torch.stack([looped_value(critic, given) for given in inputs]).double()
        assert expected.std() > 1e-3
        for max_tokens in (300, 100_000):
            torch.testing.assert_close(critic.values(inputs, max_tokens), expected, rtol=1e-4, atol=1e-5)


def test_no_logits_are_computed(tiny_llama, monkeypatch):
    team, arguments = load_team([tiny_llama] * 2)
    [critic] = critics_of(team, arguments, centralized=True)
    trees = grow(team)
    calls = []
    critic.policy.base.language_model.head.register_forward_pre_hook(lambda *_: calls.append(1))
    for name in ("mlrl.models.base.completion_logprobs", "mlrl.models.language_model.LanguageModel.logits"):
        monkeypatch.setattr(name, lambda *a, **k: calls.append(1))
    critic.values(state_inputs(critic.reader, trees), 10_000)
    assert not calls


def test_common_histories_are_run_once(tiny_llama):
    team, arguments = load_team([tiny_llama] * 2)
    [critic] = critics_of(team, arguments, centralized=True)
    inputs = state_inputs(critic.reader, grow(team, num_generations=4, chat=True))
    run = []
    critic.policy.base.language_model.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: run.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    critic.values(inputs, 100_000)
    beginnings = {given.segments[: n + 1] for given in inputs for n in range(len(given.segments))}
    whole = sum(len(beginning[-1]) for beginning in beginnings)  # what segments that begin alike share comes off that
    texts = [sum(map(tuple, given.segments), ()) for given in inputs]
    fewest = len({text[: n + 1] for text in texts for n in range(len(text))})
    assert fewest <= run[0] < whole and len(run) == 1
    assert run[0] - fewest < 0.1 * whole
    assert run[0] < 0.75 * sum(len(given.token_ids) for given in inputs)


# Gradients -----------------------------------------------------------------------------------------------------------


def looped_gradients(critic, samples, clip, coefficient=1.0):
    """Gradients of the value loss, one input a forward, one target a term."""
    total = 0.0
    for sample in samples:
        value = looped_value(critic, sample.input)
        for target in sample.targets:
            error = (value - target) ** 2
            if clip is not None:
                bounded = sample.old_value + torch.clamp(value - sample.old_value, -clip, clip)
                error = torch.max(error, (bounded - target) ** 2)
            total = total + coefficient * sample.weight * error
    return grads(total, critic)


def trained(critic):
    own = critic.policy.parameters() if critic.on_actor else []
    return [p for p in [*own, *critic.parameters] if p.requires_grad]


def grads(loss, critic):
    found = torch.autograd.grad(loss, trained(critic), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained(critic), found, strict=True)]


@pytest.mark.parametrize("kind", ["maac", "separate", "on_actor"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("clip", [None, 0.15])
def test_gradients_equal_the_loop_whatever_the_micro_batches(tiny_llama, kind, critic_type, clip):
    joint_mode = "cross" if (kind, critic_type) == ("maac", "v") else "aligned"
    team, arguments = load_team([tiny_llama] * 2)
    critics = settle(
        critics_of(team, arguments, centralized=kind == "maac", separate=kind != "on_actor", critic_type=critic_type)
    )
    critic = critics[-1]
    trees = grow(team, items=1, joint_mode=joint_mode)
    estimate = estimate_critic(critic, trees, discount=0.9, gae_lambda=0.5, num_turns=2, max_tokens=500)
    for number, sample in enumerate(estimate.samples):  # as in a later pass: some moved to their targets, some away
        away = 1.0 if sample.old_value > sum(sample.targets) / len(sample.targets) else -1.0
        sample.old_value += away * (0.4 if number % 2 == 0 else -0.4)
    expected = looped_gradients(critic, estimate.samples, clip, coefficient=0.5)
    assert sum(float(g.abs().sum()) for g in expected) > 1e-3
    for max_tokens in (120, 100_000):
        sums = [torch.zeros_like(p) for p in trained(critic)]
        clipped = 0.0
        for batch, samples in value_batches(estimate.samples, max_tokens):
            with critic.policy.use():
                outputs = critic_loss(critic, batch, samples, ValueLossSettings(clip), scale=0.5)
                sums = [a + b for a, b in zip(sums, grads(outputs.loss, critic), strict=True)]
            clipped += 0.0 if outputs.clipped_S is None else float(outputs.clipped_S.sum())
        assert (clipped > 0) == (clip is not None)
        for ours, theirs in zip(sums, expected, strict=True):
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6


def test_a_head_on_the_actor_trains_the_actors_weights_too(tiny_llama):
    team, arguments = load_team([tiny_llama] * 2)
    critics = settle(critics_of(team, arguments, centralized=False, separate=False))
    estimate = estimate_critic(critics[0], grow(team), discount=1.0, gae_lambda=1.0, num_turns=2, max_tokens=10_000)
    [(batch, samples)] = value_batches(estimate.samples, 10_000)
    with critics[0].policy.use():
        critic_loss(critics[0], batch, samples, ValueLossSettings()).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in team.agents[0].parameters)
    assert all(p.grad is None for p in team.agents[1].parameters)


def test_gradient_checkpointing_changes_nothing(tiny_llama):
    found = []
    for checkpointing in (False, True):
        team, arguments = load_team([tiny_llama] * 2, gradient_checkpointing=checkpointing)
        [critic] = settle(critics_of(team, arguments, centralized=True))
        layers = []
        critic.policy.base.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=layers: seen.append(1))
        estimate = estimate_critic(critic, grow(team), discount=1.0, gae_lambda=1.0, num_turns=2, max_tokens=10_000)
        layers.clear()
        [(batch, samples)] = value_batches(estimate.samples, 10_000)
        with critic.policy.use():
            found.append(grads(critic_loss(critic, batch, samples, ValueLossSettings()).loss, critic))
        assert len(layers) == 1 + checkpointing
    for plain, checked in zip(*found, strict=True):
        torch.testing.assert_close(plain, checked)


def test_a_critic_learns_its_targets(tiny_llama):
    team, arguments = load_team([tiny_llama] * 2)
    critic = critics_of(team, arguments, centralized=False)[0]
    trees = grow(team, num_turns=1, items=3)
    optimizer = torch.optim.AdamW(trained(critic), lr=1e-2)
    losses = []
    for _ in range(40):
        estimate = estimate_critic(critic, trees, discount=1.0, gae_lambda=1.0, num_turns=1, max_tokens=10_000)
        [(batch, samples)] = value_batches(estimate.samples, 10_000)
        with critic.policy.use():
            losses.append(critic_loss(critic, batch, samples, ValueLossSettings()).loss)
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    means = torch.tensor([sum(s.targets) / len(s.targets) for s in samples], dtype=torch.float64)
    assert (estimate.values_MA[:, 0] - means).square().mean().sqrt() < 0.05 * (means.max() - means.min())
    assert estimate.explained_variance[0].value > 0.99
    assert losses[-1] < losses[0]


# Saving --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("critic_type", "centralized", "tuning"),
    [("v", True, "lora"), ("q", True, "full"), ("q", False, "lora"), ("v", False, "full")],
)
def test_a_saved_critic_comes_back_with_its_head(tiny_llama, tmp_path, critic_type, centralized, tuning):
    settings = {"centralized": centralized, "critic_type": critic_type}
    team, arguments = load_team([tiny_llama] * 2, tuning=tuning)
    critics = settle(critics_of(team, arguments, value_head_hidden_dim=6, **settings))
    trees = grow(team)
    expected = [critic.values(inputs_of(critic, trees), 10_000) for critic in critics]
    save_critics(critics, tmp_path)
    team, arguments = load_team([tiny_llama] * 2, tuning=tuning)
    models = [str(tmp_path / f"critic_{number}") for number in range(len(critics))]
    loaded = critics_of(team, arguments, models=models, **settings)
    if tuning == "lora":
        assert all(critic.policy.base is team.bases[0] for critic in loaded)
    for critic, values in zip(loaded, expected, strict=True):
        assert values.std() > 1e-3
        torch.testing.assert_close(critic.values(inputs_of(critic, trees), 10_000), values)
        assert all(p.requires_grad for p in critic.parameters)


def test_what_is_beside_the_head_loads_with_plain_libraries(tiny_llama, tmp_path):
    team, arguments = load_team([tiny_llama] * 2)
    save_critics(settle(critics_of(team, arguments, centralized=True)), tmp_path)
    files = {path.name for path in (tmp_path / "critic_0").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "value_head.safetensors", "tokenizer.json"} <= files
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), tmp_path / "critic_0")


def test_a_head_on_an_actor_is_saved_alone_and_comes_back(tiny_llama, tmp_path):
    settings = {"centralized": False, "separate": False}
    team, arguments = load_team([tiny_llama] * 2)
    critics = settle(critics_of(team, arguments, **settings))
    trees = grow(team)
    expected = critics[1].values(inputs_of(critics[1], trees), 10_000)
    save_critics(critics, tmp_path / "critics")
    team.save(tmp_path / "agents")
    assert [path.name for path in (tmp_path / "critics" / "critic_1").iterdir()] == ["value_head.safetensors"]
    team, arguments = load_team([str(tmp_path / "agents" / f"agent_{i}") for i in range(2)])
    models = [str(tmp_path / "critics" / f"critic_{i}") for i in range(2)]
    loaded = critics_of(team, arguments, models=models, **settings)
    torch.testing.assert_close(loaded[1].values(inputs_of(loaded[1], trees), 10_000), expected)


def test_a_head_for_something_else_is_refused(tiny_llama, tiny_qwen2, tmp_path):
    team, arguments = load_team([tiny_llama] * 2)
    save_critics(settle(critics_of(team, arguments, centralized=True, value_head_hidden_dim=6)), tmp_path)
    saved = str(tmp_path / "critic_0")
    team, arguments = load_team([tiny_llama] * 2)
    for settings, message in [
        ({"centralized": True, "critic_type": "q"}, "critic_type='v', and here it is 'q'"),
        ({"centralized": False, "models": [saved] * 2}, "reads='joint history'"),
        ({"centralized": False, "separate": False, "models": [saved] * 2}, "reads='joint history'"),
        ({"centralized": False, "separate": False, "models": [tiny_llama] * 2}, "this folder holds none"),
        ({"centralized": True, "models": ["/no/such/folder"]}, "critic_model='/no/such/folder': there is no such"),
        ({"centralized": True, "models": [7]}, "critic_model=int"),
        ({"centralized": True, "value_head_hidden_dim": 5}, "value_head_hidden_dim=5.*has 6"),
    ]:
        with pytest.raises(ConfigError, match=message):
            critics_of(team, arguments, **{"models": [saved]} | settings)


def test_full_critics_need_networks_of_their_own(tiny_llama, tmp_path):
    team, arguments = load_team([tiny_llama] * 2, tuning="full")
    with pytest.raises(ConfigError, match="one loaded model was given to several critics"):
        critics_of(team, arguments, centralized=False, models=[tiny_model()] * 2, tokenizer=tiny_tokenizer())


def test_a_critic_of_another_model_reads_with_its_own_tokenizer(tiny_llama, tiny_llama_bos):
    team, arguments = load_team([tiny_llama] * 2)
    [critic] = settle(critics_of(team, arguments, centralized=True, models=[tiny_llama_bos]))
    given = state_inputs(critic.reader, grow(team, items=1))[0]
    assert given.token_ids[0] == 0  # its start token, which the agents' model does not have
    with torch.no_grad():
        assert float(critic.values([given], 100)[0]) == pytest.approx(float(looped_value(critic, given)), abs=1e-5)


def test_the_longest_input_is_what_the_model_holds_or_less(tiny_llama):
    team, arguments = load_team([tiny_llama] * 2)
    [critic] = critics_of(team, arguments, centralized=True)
    assert critic.reader.max_length == 256
    team, arguments = load_team([tiny_llama] * 2)
    [critic] = critics_of(team, arguments, centralized=True, critic_max_length=64)
    inputs = state_inputs(critic.reader, grow(team))
    assert max(len(given.token_ids) for given in inputs) == 64 and critic.reader.inputs_cut > 0
