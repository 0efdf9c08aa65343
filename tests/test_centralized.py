"""One actor for several roles: its prompt, its split answers, and what rewards and evaluation see."""

import numpy as np
import pytest

from mlrl import Task
from mlrl.centralized import CentralizedEnvironment, actors, make_environment
from mlrl.config import EvaluationConfig, MAGRPOConfig
from mlrl.errors import ConfigError
from mlrl.eval_hooks import RolloutSample
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from mlrl.task import Environment

GOOD = "<agent_1> yes </agent_1>\n<agent_2>no</agent_2>"
ITEM = {"prompt": "the sea"}


def environment(per_agent=False, **pieces):
    def reward(a, b, prompts, prompt_history):
        assert prompts == ["1: the sea", "2: the sea"] and prompt_history == [[], []]
        return [[len(x), 2.0 * len(y)] if per_agent else len(x) - len(y) for x, y in zip(a, b, strict=True)]

    formatters = [lambda item: f"1: {item['prompt']}", lambda item: f"2: {item['prompt']}"]
    task = Task(train_dataset=[ITEM], reward_func=reward, formatters=formatters, **pieces)
    args = MAGRPOConfig(collaboration_mode="centralized")
    made = make_environment(task, 2, args, per_agent)
    assert type(made) is CentralizedEnvironment
    return made


def judge(made, *texts):
    return made.rewards(
        item=ITEM, completions=[list(texts)], prompts=["x"], turn=0, prompt_history=[[]], response_history=[[]],
        episode_seed=0, item_index=0,
    )  # fmt: skip


def test_the_actor_sees_all_prompts_in_one():
    [prompt] = environment().initial_prompts(ITEM, 0)
    [message] = prompt
    assert "1: the sea" in message["content"] and "2: the sea" in message["content"]


def test_rewards_see_the_roles_and_a_text_without_form_counts_as_empty():
    # "yes" less "no": 1; nothing less nothing: 0
    assert judge(environment(), GOOD, "yes and no", "<agent_1>a</agent_1>").processed.tolist() == [1, 0, 0]


def test_own_rewards_are_the_actors_mean():
    # (3 + 2 · 2) / 2
    result = judge(environment(per_agent=True), GOOD, "")
    np.testing.assert_allclose(result.processed, [3.5, 0])


def test_evaluation_sees_the_roles():
    rows = []

    def logger(agent_completions_turns):
        rows.append(agent_completions_turns)
        return [{"x": 1}, {"x": 2}]

    samples = []
    made = environment(eval_logger=logger, metrics_callback=lambda given: samples.extend(given))
    made.eval_rows(agent_completions_turns=[[[GOOD], ["?"]]], items=[ITEM, ITEM])
    assert rows == [[[["yes"], [""]], [["no"], [""]]]]
    made.callback_metrics([RolloutSample(0, 0, "p", GOOD, 0.5)])
    assert [(s.agent_idx, s.completion, s.reward) for s in samples] == [(0, "yes", 0.5), (1, "no", 0.5)]


def test_texts_that_cannot_be_split_are_counted():
    texts = [GOOD, "?", GOOD.replace("agent_2", "agent_1")]
    node = Node((), [TokenizedPrompt("p", [1])], responses=[[Response([1], [], text, False) for text in texts]])
    assert environment().response_metrics([RolloutTree(ITEM, 0, node)]) == {"turn_1/unparseable_fraction": (2, 3)}


def test_one_model_for_all_roles():
    args = MAGRPOConfig(collaboration_mode="centralized")
    assert actors(["m", "m", "m"], args) == ["m"] and actors(["m", "n"], MAGRPOConfig()) == ["m", "n"]
    with pytest.raises(ConfigError, match="several models are given"):
        actors(["m", "n"], args)
    assert type(make_environment(Task(train_dataset=[ITEM], reward_func=len), 1, MAGRPOConfig(), False)) is Environment


def test_a_saved_actor_is_one_whatever_the_roles(tmp_path):
    (tmp_path / "agent_0").mkdir()
    where = {"agents_dir": str(tmp_path), "collaboration_mode": "centralized"}
    assert EvaluationConfig(**where, num_agents=3).num_agents == 3
    (tmp_path / "agent_1").mkdir()
    with pytest.raises(ConfigError, match="holds 2 agents"):
        EvaluationConfig(**where)
