"""MADPO and MARLHF on tiny models."""

import json
import math

import pytest
import torch

from mlrl.config import field_names
from mlrl.config_preference_trainers import MADPOConfig, MADPOIterConfig, MARLHFConfig, MARLHFIterConfig
from mlrl.console import Console
from mlrl.errors import ConfigError, TaskError
from mlrl.losses.preference import PreferenceLossSettings
from mlrl.preference.collection import CollectionSettings, collect_pairs
from mlrl.preference.reward_model import LearnedReward
from mlrl.trainers import (
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MADPOIterTrainer,
    MADPOTrainer,
    MARLHFIterTrainer,
    MARLHFTrainer,
)
from mlrl.trainers.data import Batch
from mlrl.trainers.pair_update import PairUpdate, team_margins
from tests.trainers.loops import RecordingEngine, as_messages, extend, flat, perturb, plain_model, reward

ROWS = [{"prompt": p} for p in ("the sea", "one short story about a river", "why", "a city")]
DEFAULTS = {
    **{"max_new_tokens": 6, "lora_rank": 2, "eval_interval": 0, "completions_steps": 0, "agent_learning_rate": 3e-3},
    **{"preference_num_candidates": 3, "preference_pairs_per_sample": 2, "max_grad_norm": None},
}


def make(trainer, config, folder, tmp_path, reward_func=reward, **settings):
    return trainer(
        agent_model=folder,
        num_agents=2,
        reward_func=reward_func,
        formatters=as_messages,
        external_transition=extend,
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        wandb_config={"config_sections": {"output": {"verbose": False}}},
        args=config(
            **{"output_dir": str(tmp_path), "run_name": "run"}
            | {name: value for name, value in DEFAULTS.items() if name in field_names(config)}
            | settings
        ),
    )


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


def some_pairs(trainer):
    settings = CollectionSettings(3, 3, "reward_gap", 2, 4)
    return collect_pairs(trainer.collector, list(enumerate(ROWS)), trainer.growth(), settings).pairs


def loop_logprob(model, side, agent):
    """Σ over turns and tokens of log π of one side of a pair, one sequence at a time."""
    total = 0.0
    for turn in side.turns:
        prompt, answer = turn.prompts[agent].token_ids, turn.responses[agent].token_ids
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].log_softmax(-1)
        total = total + sum(logits[len(prompt) - 1 + i, token] for i, token in enumerate(answer))
    return total


def loop_margin(model, pair, agent):
    return loop_logprob(model, pair.winner, agent) - loop_logprob(model, pair.loser, agent)


def loop_nll(model, pair, agent):
    """−log π of the winner a token."""
    tokens = sum(len(turn.responses[agent].token_ids) for turn in pair.winner.turns)
    return -loop_logprob(model, pair.winner, agent) / tokens


@pytest.mark.parametrize(("turns", "alpha"), [(1, 0.0), (2, 0.0), (2, 0.7)])
def test_an_update_is_the_gradient_of_the_joint_loss(tiny_llama, tmp_path, turns, alpha):
    trainer = make(MADPOTrainer, MADPOConfig, tiny_llama, tmp_path, num_turns=turns)
    team, beta = trainer.team, 0.3
    for agent in team.agents:
        perturb(agent, seed=agent.index, spread=0.05)
    pairs = some_pairs(trainer)
    assert len(pairs) >= 4
    engines = [RecordingEngine(a.parameters, trainer._optimizer_settings(1e-3), moves=False) for a in team.agents]
    update = PairUpdate(
        team,
        engines,
        PreferenceLossSettings(beta, rpo_alpha=alpha),
        temperature=1.0,
        micro_batch_tokens=70,
        max_grad_norm=None,
    )
    reference = team_margins([a.reference for a in team.agents], team.mesh.agents, team.mesh.world, pairs, 1.0, 70)
    outcome = update.run(pairs, reference)

    with torch.no_grad():
        relative = []
        for agent in team.agents:
            own = []
            for policy in (agent.policy, agent.reference):
                with plain_model(policy) as model:
                    own.append([float(loop_margin(model, pair, agent.index)) for pair in pairs])
            relative.append([now - then for now, then in zip(*own, strict=True)])
    joint = [sum(own) for own in zip(*relative, strict=True)]
    loss = sum(-math.log(1 / (1 + math.exp(-beta * m))) for m in joint) / len(pairs)
    total, count = outcome.metrics["preference/loss"]
    assert count == len(pairs) and total / count == pytest.approx(loss, abs=1e-4)
    assert outcome.metrics["preference/agent_1/margin"][0] == pytest.approx(sum(relative[1]), abs=1e-3)
    for agent, engine in zip(team.agents, engines, strict=True):
        expected, nll = 0.0, 0.0
        with plain_model(agent.policy) as model:
            for pair, m in zip(pairs, joint, strict=True):
                own = loop_nll(model, pair, agent.index)
                nll += float(own.detach()) / len(pairs)
                expected += alpha / len(pairs) * flat(torch.autograd.grad(own, agent.parameters), agent.parameters)
                gradients = torch.autograd.grad(loop_margin(model, pair, agent.index), agent.parameters)
                # d/dθ −log σ(β m) = −β σ(−β m) dΔ_i/dθ
                expected -= beta / (1 + math.exp(beta * m)) / len(pairs) * flat(gradients, agent.parameters)
        assert torch.allclose(engine.recorded[0].double(), expected.double(), atol=2e-5)
        assert expected.norm() > 1e-3
        total, count = outcome.metrics[f"preference/agent_{agent.index}/winner_nll"]
        assert count == len(pairs) and total / count == pytest.approx(nll, abs=1e-4)


def test_another_model_may_be_the_reference(tiny_llama, tiny_llama_other, tmp_path):
    trainer = make(MADPOTrainer, MADPOConfig, tiny_llama, tmp_path, reference_model=tiny_llama_other)
    pairs = some_pairs(trainer)[:3]
    with torch.no_grad(), plain_model(trainer.team.agents[1].reference) as model:
        expected = [float(loop_margin(model, pair, 1)) for pair in pairs]
    assert trainer._reference_margins(pairs)[1].tolist() == pytest.approx(expected, abs=1e-3)


def test_margins_are_zero_at_the_start_and_rise(tiny_llama, tmp_path):
    trainer = make(
        MADPOTrainer, MADPOConfig, tiny_llama, tmp_path, num_train_epochs=6, train_batch_size=None, lora_dropout=0.1
    )
    trainer.train()
    steps = [row for row in metrics(tmp_path) if "preference/margin" in row]
    assert steps[0]["preference/agent_0/margin"] == pytest.approx(0, abs=1e-4)
    assert steps[-1]["preference/agent_0/margin"] > 0.2 and steps[-1]["preference/agent_1/margin"] > 0.2
    assert steps[-1]["preference/loss"] < math.log(2) - 0.02
    assert {row["env_step"] for row in steps} == {4 * 3}  # items × candidates, judged once each
    lines = (tmp_path / "run/preferences/iteration_0001.jsonl").read_text().splitlines()
    assert [len(lines)] == [row["preference/num_pairs"] for row in metrics(tmp_path) if "preference/num_pairs" in row]


@pytest.mark.parametrize("comparator", ["current", "current_copy", "history"])
def test_rounds_are_on_disk_and_replayed(tiny_llama, tmp_path, comparator):
    trainer = make(
        MADPOIterTrainer, MADPOIterConfig, tiny_llama, tmp_path, comparator_policy=comparator, num_iterations=3,
        preference_replay_mode="nearest_k", preference_replay_k=2, preference_replay_sample_size=5,
        train_batch_size=3, preference_num_candidates=2,
    )  # fmt: skip
    trainer.train()
    folder = tmp_path / "run/preferences"
    assert sorted(p.name for p in folder.glob("iteration_*")) == [f"iteration_000{r}.jsonl" for r in (1, 2, 3)]
    sides = [json.loads(line) for line in (folder / "iteration_0003.jsonl").read_text().splitlines()]
    assert {pair["round"] for pair in sides} == {3}
    words = {pair[side]["sampling"]["policy"] for pair in sides for side in ("winner", "loser")}
    assert words == ({"agents at round 3", "agents at round 2"} if comparator == "history" else {"agents at round 3"})
    rows = metrics(tmp_path)
    assert [r["preference/num_learned_pairs"] for r in rows if "preference/num_learned_pairs" in r] == [5, 5, 5]
    assert sum("preference/drift/ks_distance" in row for row in rows) == 2
    histograms = [json.loads(line) for line in (folder / "histograms.jsonl").read_text().splitlines()]
    assert [sum(h["policy"]) for h in histograms] == [8, 8, 8] == [sum(h["comparator"]) for h in histograms]
    assert all(row["agent_0/grad_norm"] > 0 < row["agent_1/grad_norm"] for row in rows if "agent_0/grad_norm" in row)


@pytest.mark.parametrize(("rate", "advice"), [(1e-7, "a higher"), (3e-3, None), (1.0, "a lower")])
def test_a_reward_model_that_knows_nothing_is_told_of(tiny_llama, tmp_path, capsys, rate, advice):
    settings = {"reward_learning_rate": rate, "reward_train_batch_size": 1, "reward_num_train_epochs": 8}
    make(MARLHFTrainer, MARLHFConfig, tiny_llama, tmp_path, **settings).train()
    printed = capsys.readouterr().out
    assert ("warning: the reward model does not know its own pairs" in printed) is (advice is not None)
    assert advice is None or f"{advice} --reward_learning_rate" in printed


@pytest.mark.parametrize("algorithm", ["magrpo", "maac", "iac"])
def test_marlhf_follows_the_learned_reward_and_logs_both(tiny_llama, tmp_path, algorithm):
    trainer = make(
        MARLHFTrainer, MARLHFConfig, tiny_llama, tmp_path, rl_algorithm=algorithm, num_train_epochs=2, num_generations=3
    )
    before = [[p.detach().clone() for p in agent.parameters] for agent in trainer.team.agents]
    trainer.train()
    rows = metrics(tmp_path)
    fitted = next(row for row in rows if "preference/reward_model/train_loss" in row)
    assert 0 <= fitted["preference/reward_model/train_accuracy"] <= 1
    steps = [row for row in rows if "turn_1/reward_mean" in row]
    assert len(steps) == 2
    assert all(0 <= row["turn_1/task_reward_mean"] < 1 for row in steps)  # that of the task lies there
    assert all(row["turn_1/reward_mean"] != row["turn_1/task_reward_mean"] for row in steps)
    for row in steps:
        assert -1 <= row["turn_1/task_reward_correlation"] <= 1
        parts = [row[f"time/{part}_s"] for part in ("rollout", "reward_model", "reference", "update")]
        assert min(parts) > 0 and sum(parts) <= row["time/step_s"]
    assert steps[-1]["env_step"] == 4 * 3 + 2 * 4 * 3  # candidates, and two steps of 4 items × 3 joints
    for agent, old in zip(trainer.team.agents, before, strict=True):
        assert any(not torch.equal(p, o) for p, o in zip(agent.parameters, old, strict=True))
    critics = {"magrpo": 0, "maac": 1, "iac": 2}[algorithm]
    assert len(list((tmp_path / "run").glob("critics/critic_*/value_head.safetensors"))) == critics
    assert (tmp_path / "run/reward_model/head.safetensors").is_file()
    assert trainer.evaluate()["eval/turn_1/reward_mean"] < 1


def test_iterative_marlhf_refits_and_never_repeats_a_stream(tiny_llama, tmp_path):
    trainer = make(MARLHFIterTrainer, MARLHFIterConfig, tiny_llama, tmp_path, num_iterations=2, num_generations=2)
    ordinals = []
    step = trainer.step
    trainer.step = lambda batch: (ordinals.extend(n for n, _ in batch.items), step(batch))
    trainer.train()
    assert ordinals == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sum("preference/reward_model/train_loss" in row for row in metrics(tmp_path)) == 2


def test_the_policy_phase_is_the_trainer_of_the_algorithm(tiny_llama, tmp_path):
    """Its step on learned rewards is that of MAAC on a reward function that says the same."""
    settings = {"num_generations": 2, "num_turns": 2, "reference_kl_coef": 0.1, "critic_learning_rate": 1e-2}
    ours = make(MARLHFTrainer, MARLHFConfig, tiny_llama, tmp_path, rl_algorithm="maac", **settings)
    assert isinstance(ours, MARLHFTrainer) and isinstance(ours, MAACTrainer) and not isinstance(ours, IACTrainer)
    learned = LearnedReward(ours.reward_model)
    plain = make(
        MAACTrainer, MAACConfig, tiny_llama, tmp_path, **settings,
        reward_func=lambda a, b, prompts: learned(a, b, prompts=prompts),
    )  # fmt: skip
    batch = Batch(list(enumerate(ROWS)), 0, 0, 4)
    for trainer in (ours, plain):
        trainer.record = lambda trees: None
        for _ in range(2):
            trainer.step(batch)
    for one, other in zip(ours.team.agents, plain.team.agents, strict=True):
        for p, q in zip(one.parameters, other.parameters, strict=True):
            assert torch.allclose(p, q, atol=1e-5)
    for p, q in zip(ours.critics[0].parameters, plain.critics[0].parameters, strict=True):
        assert torch.allclose(p, q, atol=1e-5)


@pytest.mark.parametrize(
    "trainer, config, a_round", [(MADPOIterTrainer, MADPOIterConfig, 2), (MARLHFIterTrainer, MARLHFIterConfig, 2)]
)
def test_max_steps_bounds_the_run(tiny_llama, tmp_path, monkeypatch, trainer, config, a_round):
    """Rounds of two steps each, of which three may be taken: the second round stays open for a longer run."""
    size = {"train_batch_size": 4} if config is MADPOIterConfig else {"rollout_batch_size": 2, "num_generations": 2}
    made = make(
        trainer, config, tiny_llama, tmp_path, num_iterations=3, max_steps=3, preference_pairs_per_sample=2,
        preference_replay_mode="all_history", preference_replay_sample_size=8, **size,
    )  # fmt: skip
    notes = []
    monkeypatch.setattr(Console, "note", lambda console, text: notes.append(text))
    made.train()
    assert (made.step_number, made.round_state.round) == (3, 2)
    assert notes[-1] == "max_steps=3 was reached in round 2 of 3; the others were not played"
    assert len(list((tmp_path / "run/preferences").glob("iteration_*"))) == 2


def test_label_smoothing_reaches_the_reward_model(tiny_llama, tmp_path):
    losses = []
    for number, smoothing in enumerate((0.0, 0.4)):
        made = make(
            MARLHFTrainer, MARLHFConfig, tiny_llama, tmp_path / str(number), label_smoothing=smoothing,
            reward_num_train_epochs=8, reward_learning_rate=1e-2, max_steps=1, num_generations=2,
        )  # fmt: skip
        made.train()
        name = "preference/reward_model/train_loss"
        losses += [row[name] for row in metrics(tmp_path / str(number)) if name in row]
    assert losses[1] > losses[0] + 0.05  # which learns to be less sure


def test_one_actor_plays_all_roles(tiny_llama, tmp_path):
    seen = []

    def judge(a, b, prompts):
        seen.append((a, b, prompts))
        return [len(x) - len(y) + n / 9 for n, (x, y) in enumerate(zip(a, b, strict=True))]

    made = make(
        MADPOTrainer, MADPOConfig, tiny_llama, tmp_path, judge, collaboration_mode="centralized", max_steps=2,
        train_batch_size=4, lora_rank=2, eval_interval=8, max_new_tokens=3,
    )  # fmt: skip
    assert made.num_agents == len(made.team.agents) == 1
    made.train()
    answers = {text for a, b, _ in seen for text in (*a, *b)}
    assert answers == {""}  # a tiny model never writes the tags: counted, and judged as empty answers
    assert all(len(prompts) == 2 for _, _, prompts in seen)  # the roles' own
    rows = metrics(tmp_path)
    assert [row["turn_1/unparseable_fraction"] for row in rows if "turn_1/unparseable_fraction" in row] == [1.0]
    assert rows[0]["eval/turn_1/unparseable_fraction"] == 1.0
    [line, *_] = (tmp_path / "run/preferences/iteration_0001.jsonl").read_text().splitlines()
    assert len(json.loads(line)["winner"]["turns"][0]) == 1  # one text is learned on
    assert [p.name for p in (tmp_path / "run/agents").iterdir()] == ["agent_0"]


def test_equal_rewards_are_a_clear_error(tiny_llama, tmp_path):
    trainer = make(MADPOTrainer, MADPOConfig, tiny_llama, tmp_path, reward_func=lambda a, b: [0.5] * len(a))
    with pytest.raises(TaskError, match="no two candidates of any of the 4 items"):
        trainer.train()


def test_what_cannot_be_is_said_before_models_load(tmp_path):
    for config, settings, words in (
        (MARLHFConfig, {"rl_algorithm": "maac", "advantage_mode": "rloo"}, "advantage_mode='rloo': with a critic"),
        (MARLHFConfig, {"advantage_mode": "greedy"}, "unknown word 'greedy'"),
        (MADPOConfig, {"reference_ranks": 1, "dpo_reference": False}, "reference_ranks=1: .* dpo_reference is False"),
        (MADPOConfig, {"num_generations": 4}, "num_generations: there is no such setting"),
        (MADPOConfig, {"comparator_ranks": 1}, "comparator_ranks=1: only another model"),
        (MARLHFConfig, {"critic_ranks": 1}, "critic_ranks=1: rl_algorithm='magrpo' has no critics"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**settings)
    assert MARLHFConfig(rl_algorithm="marloo").advantage_mode == "rloo"
    assert MARLHFConfig(rl_algorithm="maac", advantage_normalization=True).advantage_normalization == "batch"
    with pytest.warns(UserWarning, match="gae_lambda=0.5 has no effect with rl_algorithm='magrpo'"):
        MARLHFConfig(gae_lambda=0.5)


def test_iterations_need_the_iterative_trainer(tiny_llama, tmp_path):
    with pytest.raises(ConfigError, match="num_iterations=2"):
        make(MADPOTrainer, MADPOConfig, tiny_llama, tmp_path, num_iterations=2)
    with pytest.raises(ConfigError, match="num_iterations=0"):
        make(MADPOIterTrainer, MADPOIterConfig, tiny_llama, tmp_path, num_iterations=0)
