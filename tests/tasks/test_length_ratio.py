import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.length_ratio import BRIEF, DETAILED, length_feedback, ratio_reward

HOSTILE = st.one_of(
    st.text(),
    st.text(alphabet="\x00\ud800\u202e\U0001f600é\n ", max_size=30),
    st.integers(0, 200_000).map(lambda n: "x" * n),
    st.sampled_from(["", "```", "<|im_end|>", "{'a': [", "\\", "%s %d", "{}"]),
)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0, 0, 0.0),  # no first answer
        (0, 10, 0.0),
        (10, 0, math.exp(-2)),  # ρ 0: 2 − 0
        (10, 10, math.exp(-1)),  # ρ 1: 2 − 1
        (10, 19, math.exp(-0.1)),  # ρ 1.9
        (10, 20, 1.0),  # both ends of the band belong to it
        (10, 25, 1.0),
        (10, 30, 1.0),
        (10, 31, math.exp(-0.1)),  # ρ 3.1
        (10, 50, math.exp(-2)),  # ρ 5: 5 − 3
        (1, 2000, 0.0),  # exp(−1997) is below the smallest float
    ],
)
def test_every_level(first, second, expected):
    assert ratio_reward("x" * first, "y" * second) == pytest.approx(expected, abs=1e-12)


def test_characters_are_counted_not_bytes():
    assert ratio_reward("é", "éé") == 1.0
    assert ratio_reward("\U0001f600", "ab") == 1.0
    assert ratio_reward(" ", "  ") == 1.0


@given(HOSTILE, HOSTILE)
def test_any_text_is_rewarded_within_zero_and_one(first, second):
    value = ratio_reward(first, second)
    assert 0.0 <= value <= 1.0
    if first and 2 <= len(second) / len(first) <= 3:
        assert value == 1.0


@given(st.integers(1, 50), st.integers(0, 300))
def test_only_the_ratio_counts(first, second):
    assert ratio_reward("x" * first, "x" * second) == pytest.approx(ratio_reward("x" * 3 * first, "x" * 3 * second))


def environment(num_agents=2, num_turns=1, **task_args):
    return Environment(load_task("length_ratio", task_args), num_agents, num_turns)


def rewards(environment, *completions):
    place = {"prompts": [], "turn": 0, "prompt_history": [], "response_history": [], "episode_seed": 0}
    return environment.rewards(item={"prompt": "p"}, completions=completions, **place).processed.tolist()


def test_one_reward_a_joint_response():
    assert rewards(environment(), ["xx", "", "x"], ["x" * 5, "x", "x"]) == pytest.approx([1.0, 0.0, math.exp(-1)])


def test_more_agents_are_averaged():
    # ρ 2 and ρ 1: (1 + e⁻¹)/2
    assert rewards(environment(3), ["x"], ["xx"], ["x"]) == pytest.approx([(1 + math.exp(-1)) / 2])


def test_one_agent_is_refused():
    with pytest.raises(ConfigError, match="num_agents=1"):
        environment(1)


def test_the_band_can_be_set():
    assert rewards(environment(low="4", high=5), ["x"], ["xxx"]) == pytest.approx([math.exp(-1)])


@pytest.mark.parametrize("band", [{"low": 3, "high": 2}, {"low": -1}, {"high": math.inf}, {"low": math.nan}])
def test_a_band_that_is_none(band):
    with pytest.raises(ConfigError, match="low="):
        load_task("length_ratio", band)


def test_rows_are_ours_and_apart():
    task = load_task("length_ratio")
    train, held_out = ([row["prompt"] for row in rows] for rows in (task.train_dataset, task.eval_dataset))
    assert len(train) >= 24
    assert len(held_out) == 8
    assert len({*train, *held_out}) == len(train) + len(held_out)


def test_roles_stand_in_front_of_the_same_task():
    brief, *detailed = environment(3).initial_prompts({"prompt": "Why?"})
    assert brief == [{"role": "user", "content": f"{BRIEF}\n\nWhy?"}]
    assert detailed == [[{"role": "user", "content": f"{DETAILED}\n\nWhy?"}]] * 2


def test_the_second_turn_continues_each_chat_with_its_own_answer():
    team = environment(2, 2)
    item = {"prompt": "Why?"}
    first = team.initial_prompts(item)
    following = team.next_prompts(
        item=item,
        turn=0,
        completions=["xxxx", "y"],
        reward=0.2,
        prompt_history=[[prompt] for prompt in first],
        response_history=[["xxxx"], ["y"]],
        episode_seed=0,
    )
    for agent, (before, after, answer) in enumerate(zip(first, following, ["xxxx", "y"], strict=True)):
        assert after[:-1] == [*before, {"role": "assistant", "content": answer}]
        assert after[-1] == {"role": "user", "content": length_feedback(agent, ["xxxx", "y"], 2.0, 3.0)}


@pytest.mark.parametrize(
    ("answers", "ratio", "brief", "detailed"),
    [
        (["xxxx", "xx"], "0.5 times", "yours shorter", "yours longer"),
        (["x", "x" * 9], "9.0 times", "yours longer", "yours shorter"),
        (["xx", "x" * 5], "2.5 times", "Keep the length", "Keep the length"),
        (["", "xx"], "was empty", "Write an answer", "Keep yours"),
    ],
)
def test_feedback_says_which_way(answers, ratio, brief, detailed):
    for agent, advice in enumerate([brief, detailed]):
        text = length_feedback(agent, answers, 2.0, 3.0)
        assert ratio in text
        assert advice in text
        assert f"{len(answers[agent])} characters" in text


def test_evaluation_logs_the_last_turn():
    team = environment(2, 2)
    rows = team.eval_rows(agent_completions_turns=[[["x", "xx"], ["x"]], [["x", "x" * 5], ["x"]]], items=[{}, {}])
    assert rows[0] == {"in_band": 1.0, "characters_agent_0": 2.0, "characters_agent_1": 5.0}
    assert team.aggregate(rows) == {"in_band": 0.5, "characters_agent_0": 1.5, "characters_agent_1": 3.0}
