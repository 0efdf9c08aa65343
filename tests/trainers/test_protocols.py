"""The baselines of evaluation: what each agent sees, what is counted, and which tasks they are for."""

import json

import pytest

from mlrl.config import EvaluationConfig
from mlrl.errors import ConfigError
from mlrl.rollout.collect import Collector
from mlrl.task import Environment, Task, load_task
from mlrl.trainers import evaluate_team
from mlrl.trainers.evaluation import evaluate_with_intervals, evaluation_growth
from mlrl.trainers.intervals import jackknife_intervals
from mlrl.trainers.protocols import DRAFTS, SequentialCollector, after_others, as_protocol, discuss, protocol_models
from tests.rollout.fakes import ScriptedSampler, fake_team

ROLE = [{"role": "user", "content": "Your part."}]


def settings(protocol, **changes):
    return EvaluationConfig(**{"agent_model": "unused", "protocol": protocol, "eval_num_generations": 2} | changes)


def played(task, args, script, items, num_agents=2):
    task, args = as_protocol(task, args)
    team = fake_team(num_agents)
    kind = SequentialCollector if args.protocol == "sequential" else Collector
    sampler = ScriptedSampler(team, script)
    environment = Environment(task, num_agents, args.num_turns, args.external_prompt_passthrough)
    collector = kind(team, sampler, environment)
    metrics, intervals, trees = evaluate_with_intervals(
        collector,
        list(enumerate(items)),
        evaluation_growth(args, ()),
        args.eval_batch_size,
        drafts=DRAFTS.get(args.protocol, 0),
    )
    return metrics, intervals, trees, sampler


def by_length(*completions):
    return [float(sum(map(len, answers))) for answers in zip(*completions, strict=True)]


def simple_task(**parts):
    def formatter(item, agent_idx):
        return [{"role": "user", "content": f"part {agent_idx} of {item['prompt']}"}]

    def never(num_agents):
        raise AssertionError("the task's own feedback")

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    parts = {"train_dataset": rows, "eval_dataset": rows, "external_transition": never, "formatters": formatter} | parts
    return Task(reward_func=by_length, **parts)


# -------------------------------------------------------------------------------------------------------------- prompts


def test_what_is_added_to_prompts():
    text = "Agents of your team have answered before you:\n\nAgent 1:\none\n\nAgent 2:\n(nothing)\n\nWith these in mind"
    chat = after_others(ROLE, {0: " one ", 1: " "})
    assert len(chat) == 1 and chat[0]["content"].startswith(f"Your part.\n\n{text}")
    assert after_others("Go.", {0: "one", 1: ""}).startswith(f"Go.\n\n{text}")
    assert after_others([*ROLE, {"role": "assistant", "content": "x"}], {0: "one"})[2]["role"] == "user"
    assert ROLE == [{"role": "user", "content": "Your part."}]
    first, second, third = discuss(["one", "two", "three"], [[ROLE], [ROLE], ["Go: "]], 3)
    assert first[:2] == [*ROLE, {"role": "assistant", "content": "one"}]
    assert "Agent 2:\ntwo\n\nAgent 3:\nthree" in first[2]["content"] and "one" not in first[2]["content"]
    assert "Agent 1:\none\n\nAgent 3:\nthree" in second[2]["content"]
    assert third.startswith("Go: three\n\nThe other agents of your team answered:\n\nAgent 1:\none")


# ------------------------------------------------------------------------------------------------------------- episodes


def test_one_after_the_other():
    def script(ordinal, path, agent, k):
        return f"{'ab'[ordinal]}{agent}{'!' * k}"

    args = settings("sequential", num_turns=3, early_termination_threshold=-9.0)
    metrics, intervals, trees, sampler = played(simple_task(), args, script, [{"prompt": "a"}, {"prompt": "b"}])
    assert [[r.agent for r in requests] for requests, _ in sampler.calls] == [[0] * 4, [1] * 4]
    keys = [key for requests, _ in sampler.calls for r in requests for key in r.keys]
    assert len(set(keys)) == 8 and {key[5] for key in keys} == {0, 1}
    assert [tree.ordinal for tree in trees] == [0, 0, 1, 1]
    first, second = ([node.content[0]["content"] for node in tree.root.prompts] for tree in trees[2:])
    assert first[0] == second[0] == "part 0 of b"
    assert first[1].startswith("part 1 of b\n\nAgents of your team have answered before you:\n\nAgent 1:\nb0\n\n")
    assert "Agent 1:\nb0!\n\n" in second[1]
    assert [tree.root.rewards for tree in trees] == [[4.0], [6.0], [4.0], [6.0]]
    assert metrics["eval/turn_1/reward_mean"] == 5 and metrics["eval/turn_1/reward_stderr"] == 0  # both items: 4 and 6
    assert metrics["eval/return_best@2"] == 6
    assert "eval/turn_1/reward_mean" not in intervals  # the items agree
    assert not any(name.startswith("eval/turn_2") for name in metrics)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_all_at_once_and_a_discussion(batch_size):
    def script(ordinal, path, agent, k):
        return "x" * (1 + ordinal + 2 * len(path))

    threshold = {"early_termination_threshold": -9.0, "num_turns": 3, "eval_batch_size": batch_size}
    items = [{"prompt": "a"}, {"prompt": "b"}]
    metrics, _, trees, _ = played(simple_task(), settings("parallel", **threshold), script, items)
    assert [tree.root.rewards for tree in trees] == [[2.0] * 2, [4.0] * 2]
    assert not trees[0].root.children
    metrics, intervals, trees, _ = played(simple_task(), settings("discussion", **threshold), script, items)
    assert [metrics[f"eval/turn_{turn}/reward_mean"] for turn in (1, 2)] == [3.0, 7.0]
    assert metrics["eval/turn_2/reached_fraction"] == 1 and "eval/turn_3/reward_mean" not in metrics
    # item means 6 and 8: standard error 1, t of one degree 12.706
    assert intervals["eval/turn_2/reward_mean"] == pytest.approx((7 - 12.7062, 7 + 12.7062), abs=1e-3)
    child = trees[1].root.children[0]
    assert [p.content[2]["content"][:56] for p in child.prompts] == [
        f"The other agents of your team answered:\n\nAgent {other}:\nxx\n\nWi" for other in (2, 1)
    ]
    assert child.prompts[0].reused > 0  # the chat goes on


def test_drafts_of_a_discussion_are_no_results():
    def script(ordinal, path, agent, k):
        lengths = {(): [9, 1], (0,): [2], (1,): [5]}[path]  # the best draft leads to the worst answer
        return "x" * (lengths[k] + ordinal)

    args = settings("discussion", discount=0.5)
    metrics, intervals, _, _ = played(simple_task(), args, script, [{"prompt": "a"}, {"prompt": "b"}])
    # two agents: drafts 18 and 2, answers 4 and 10; of the second item 20, 4 and 6, 12
    assert metrics["eval/turn_1/reward_mean"] == (18 + 2 + 20 + 4) / 4
    assert metrics["eval/turn_2/reward_mean"] == 8
    assert metrics["eval/turn_1/expected_return"] == metrics["eval/turn_2/expected_return"] == (4 + 10 + 6 + 12) / 4
    assert metrics["eval/return_best@2"] == (10 + 12) / 2
    assert sum(intervals["eval/return_best@2"]) / 2 == pytest.approx(11)


def test_the_intervals_of_what_the_task_logs():
    def script(ordinal, path, agent, k):
        return ["x", "xx"][ordinal] if k == 0 else "x"

    def log(agent_completions_turns):
        return [{"long": float(len(turns[-1]) > 1)} for turns in agent_completions_turns[0]]

    _, intervals, _, _ = played(
        simple_task(eval_logger=log), settings("parallel"), script, [{"prompt": "a"}, {"prompt": "b"}]
    )
    # item means 0 and 0.5: mean 0.25, standard error 0.25
    assert intervals["eval/long"] == pytest.approx((0.25 - 12.7062 * 0.25, 0.25 + 12.7062 * 0.25), abs=1e-3)


def test_an_aggregator_that_needs_every_item_costs_its_own_intervals_alone():
    def log(agent_completions_turns):
        return [{"first": float(place == 0)} for place in range(len(agent_completions_turns[0]))]

    def aggregate(metrics_list):
        return {"share": 1 / sum(row["first"] for row in metrics_list)}  # without the first item: nothing to divide by

    items = [{"prompt": "a"}, {"prompt": "b"}]
    task = simple_task(eval_logger=log, eval_aggregator=aggregate)
    metrics, intervals, _, _ = played(task, settings("parallel"), lambda item, *key: "x" * (1 + item), items)
    assert metrics["eval/share"] == 1 and "eval/share" not in intervals
    assert "eval/turn_1/reward_mean" in intervals


def test_training_rows_are_no_matter_of_an_evaluation(tiny_llama):
    task = simple_task(train_dataset=[{"prompt": "long " * 5000}])
    few = {"agent_model": tiny_llama, "num_agents": 2, "max_new_tokens": 2}
    assert evaluate_team(task, EvaluationConfig(**few)).metrics["eval/turn_1/reward_mean"] >= 0


SHIPPED = {
    "length_ratio": {},
    "tldr": {},
    "arxiv": {},
    "humaneval": {},
    "mbpp": {},
    "coophumaneval": {},
    "classeval": {},
    "travel": {},
    "bfcl": {"dataset": "sample"},
    "bfcl_multiturn": {"dataset": "sample"},
    "strbuild": {},
    "housebuild": {},
}
NOT_ALONE = {"length_ratio"}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("protocol", ["single", "parallel", "sequential", "discussion"])
def test_every_shipped_task_by_every_protocol(name, protocol, monkeypatch):
    monkeypatch.setattr("mlrl.tasks.humaneval.packaged_file", lambda: None)
    without_an_item = set()

    def spy(statistic, num_items, confidence):
        without_an_item.update(statistic([1]))
        return jackknife_intervals(statistic, num_items, confidence)

    monkeypatch.setattr("mlrl.trainers.evaluation.jackknife_intervals", spy)
    task = load_task(name, SHIPPED[name])
    num_agents = 1 if protocol == "single" else 2
    if protocol == "single" and name in NOT_ALONE:
        with pytest.raises(ConfigError, match="num_agents=1"):
            Environment(task, 1)
        return
    turns = {"num_turns": 2} if protocol == "single" and task.external_transition else {}
    args = settings(protocol, **turns)
    items = [dict(task.eval_dataset[number]) for number in range(2)]
    metrics, _, trees, _ = played(task, args, lambda ordinal, path, agent, k: "no", items, num_agents)
    last = 2 if turns or protocol == "discussion" else 1
    assert f"eval/turn_{last}/reward_mean" in metrics and f"eval/turn_{last + 1}/reward_mean" not in metrics
    own = [key for key in metrics if not key.startswith("eval/return_") and "reward_" not in key]
    assert set(own) & without_an_item
    texts = [prompt.content[-1]["content"] for tree in trees for node in tree.nodes() for prompt in node.prompts]
    told = sum("of your team" in text and ":\nno" in text for text in texts)
    # 2 items × 2 episodes: the second agent of each; both agents' second prompts
    assert told == {"sequential": 4, "discussion": 8}.get(protocol, 0)


# --------------------------------------------------------------------------------------------------------------- models


def test_what_a_protocol_fixes():
    for protocol, name, value, right in [
        ("parallel", "num_turns", 4, 1),
        ("discussion", "num_turns", 1, 2),
        ("discussion", "early_termination_threshold", 0.5, None),
        ("single", "num_agents", 2, 1),
    ]:
        args = settings(protocol, **{name: value})
        task, own = as_protocol(simple_task(), args)
        assert getattr(own, name) == right and getattr(args, name) == value
        args.sources[name] = "flag"
        with pytest.raises(ConfigError, match=f"{name}={value}: protocol {protocol} plays with {right}"):
            as_protocol(task, args)
    task = simple_task()
    assert as_protocol(task, settings("team", num_turns=3))[0] is task


def test_who_plays(tmp_path):
    assert protocol_models(["x", "x"], settings("single")) == ["x"]
    assert protocol_models(["x", "y"], settings("team")) == ["x", "y"]
    with pytest.raises(ConfigError, match="protocol='single': 2 models are given"):
        protocol_models(["x", "y"], settings("single"))
    (tmp_path / "agent_0").mkdir()
    (tmp_path / "agent_1").mkdir()
    saved = settings("single", agent_model=None, agents_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path} holds 2 agents.* --agents {tmp_path}/agent_0"):
        protocol_models([f"{tmp_path}/agent_0", f"{tmp_path}/agent_1"], saved)
    for protocol in ("parallel", "sequential", "discussion"):
        with pytest.raises(ConfigError, match=f"protocol='{protocol}': num_agents is 1"):
            protocol_models(["x"], settings(protocol))
    with pytest.raises(ConfigError, match="collaboration_mode='centralized': .* protocol single .*Leave one of"):
        settings("single", collaboration_mode="centralized")
    with pytest.raises(ConfigError, match="protocol='debate'"):
        settings("debate")


def test_through_evaluate_team(tiny_llama, tmp_path):
    few = {"eval_num_samples": 2, "eval_num_generations": 2, "max_new_tokens": 4, "max_prompt_tokens": 200}
    few |= {"agent_model": tiny_llama, "num_agents": 3}
    results = {}
    for protocol in ("single", "parallel", "sequential", "discussion"):
        results[protocol] = evaluate_team(simple_task(), EvaluationConfig(protocol=protocol, **few))
        assert results[protocol].args.protocol == protocol
        assert results[protocol].describe()["task"].endswith("2 items × 2 episodes")
        turns = "2 turns" if protocol == "discussion" else "1 turn"
        assert results[protocol].describe()["sampling"].startswith(f"{turns} of up to 4 tokens")
    assert [len(e.trees) for e in results.values()] == [2, 2, 4, 2]
    assert [len(e.trees[0].root.prompts) for e in results.values()] == [1, 3, 3, 3]
    assert results["discussion"].trees[0].root.rewards == results["parallel"].trees[0].root.rewards
    results["discussion"].write(tmp_path / "discussion.json")
    for episode in json.loads((tmp_path / "discussion.json").read_text())["episodes"]:
        assert episode["return"] == episode["turns"][1]["reward"]  # of the answer, not of the draft


def test_tasks_that_are_not_for_one_agent():
    def brief(item):
        return "a"

    def detailed(item):
        return "b"

    alone = EvaluationConfig(protocol="single", agent_model="unused")
    # what the message names is a way that is open: the protocol left out, and no word of how a function prints
    open_way = "leave the protocol out and give --collaboration_mode centralized"
    with pytest.raises(ConfigError, match=rf"has 2 formatters \(brief, detailed\), one an agent\. .*{open_way}"):
        evaluate_team(simple_task(formatters=[brief, detailed]), alone)
    with pytest.raises(ConfigError, match=rf"task length_ratio, which has a reward_func \(reward\) .*{open_way}"):
        evaluate_team(load_task("length_ratio"), alone)
    with pytest.raises(ConfigError, match=r"^formatters=\[brief, detailed\]: 2 formatters for num_agents=3\."):
        Environment(simple_task(formatters=[brief, detailed]), 3)


def test_what_is_no_fault_of_the_protocol_is_not_laid_on_it():
    with pytest.raises(ConfigError, match="^agent_model='./absent': there is no folder"):
        evaluate_team(simple_task(), EvaluationConfig(protocol="single", agent_model="./absent"))
