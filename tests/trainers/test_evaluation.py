"""Evaluation: its numbers by hand, its hooks, and that it moves no training number."""

import json
import math

import pytest

from mlrl.config import EvaluationConfig, MAGRPOConfig
from mlrl.errors import ConfigError
from mlrl.trainers import MAGRPOTrainer
from mlrl.trainers.evaluation import episodes, evaluate, evaluation_growth
from tests.rollout.fakes import scripted

ITEMS = [(0, {"prompt": "first"}), (1, {"prompt": "second"})]
REWARDS = {  # by item and path: what each of the episodes there earns
    (0, ()): "1.0 0.5",
    (0, (1,)): "0.25",
    (1, ()): "0.0 0.25",
    (1, (0,)): "1.0",
    (1, (1,)): "0.5",
}


def script(ordinal, path, agent, k):
    return REWARDS[ordinal, path].split()[k] if agent == 0 else f"by {agent}"


def by_first_agent(*completions):
    return [float(text) for text in completions[0]]


def settings(**changes):
    given = {"agent_model": "unused", "num_turns": 2, "eval_num_generations": 2, "max_new_tokens": 8}
    return EvaluationConfig(**given | {"early_termination_threshold": 0.9, "discount": 0.5} | changes)


def run(items=ITEMS, batch_size=None, num_agents=2, args=None, task=None):
    args = args or settings()
    collector = scripted(num_agents, args.num_turns, script, by_first_agent, **(task or {}))
    metrics, trees = evaluate(collector, items, evaluation_growth(args, ()), batch_size)
    return metrics, trees, collector


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5])
def test_metrics_by_hand(batch_size):
    metrics, trees, _ = run(batch_size=batch_size)
    assert [tree.ordinal for tree in trees] == [0, 1]
    # the first episode of item 0 ends with 1.0 > 0.9; three of four reach turn 2
    assert metrics == pytest.approx(
        {
            "eval/turn_1/reward_mean": (1.0 + 0.5 + 0.0 + 0.25) / 4,
            # item means 0.75 and 0.125: deviations ±0.3125, std 0.3125 · √2, over √2 items
            "eval/turn_1/reward_stderr": 0.3125,
            # returns 1.0, 0.5 + 0.5 · 0.25, 0.0 + 0.5 · 1.0, 0.25 + 0.5 · 0.5
            "eval/turn_1/expected_return": (1.0 + 0.625 + 0.5 + 0.5) / 4,
            "eval/turn_2/reward_mean": (0.25 + 1.0 + 0.5) / 3,
            "eval/turn_2/reward_stderr": 0.25,  # item means 0.25 and 0.75
            "eval/turn_2/expected_return": (0.25 + 1.0 + 0.5) / 3,
            "eval/turn_2/reached_fraction": 3 / 4,
            "eval/return_best@2": (1.0 + 0.5) / 2,
        }
    )


def test_one_item_has_no_standard_error():
    metrics, _, _ = run(ITEMS[:1])
    assert math.isnan(metrics["eval/turn_1/reward_stderr"])
    assert metrics["eval/turn_1/reward_mean"] == 0.75


def test_one_episode_an_item_and_one_turn():
    metrics, _, _ = run(args=settings(num_turns=1, eval_num_generations=1, early_termination_threshold=None))
    assert set(metrics) == {f"eval/turn_1/{name}" for name in ("reward_mean", "reward_stderr", "expected_return")}
    assert metrics["eval/turn_1/reward_mean"] == 0.5  # 1.0 and 0.0: the first episodes of before
    assert metrics["eval/turn_1/reward_stderr"] == 0.5


def test_a_turn_that_nobody_reaches():
    metrics, _, _ = run(args=settings(early_termination_threshold=-1.0))
    assert metrics["eval/turn_2/reached_fraction"] == 0
    assert "eval/turn_2/reward_mean" not in metrics


def test_rewards_before_their_processor():
    metrics, _, _ = run(task={"reward_processor": lambda r: 2 * r - 1}, args=settings(early_termination_threshold=None,
                        num_turns=1))  # fmt: skip
    assert metrics["eval/turn_1/raw_reward_mean"] == pytest.approx(0.4375)
    assert metrics["eval/turn_1/reward_mean"] == pytest.approx(2 * 0.4375 - 1)


def test_episodes_are_paths_in_order():
    _, trees, _ = run()
    paths = [[(node.path, joint) for node, joint in path] for path in episodes(trees[1])]
    assert paths == [[((), 0), ((0,), 0)], [((), 1), ((1,), 0)]]
    assert [[(node.path, joint) for node, joint in path] for path in episodes(trees[0])] == [
        [((), 0)],
        [((), 1), ((1,), 0)],
    ]


def test_hooks_see_every_episode():
    seen = {}

    def eval_logger(agent_completions_turns, batch_items, prompts):
        seen.update(turns=agent_completions_turns, items=batch_items, prompts=prompts)
        return [{"turns": len(turns), "last": float(turns[-1])} for turns in agent_completions_turns[0]]

    def eval_aggregator(rows, num_turns):
        return {"most_turns": max(row["turns"] for row in rows), "of": num_turns, "sum": sum(r["last"] for r in rows)}

    def metrics_callback(rollouts):
        seen["rollouts"] = rollouts
        return {"samples": len(rollouts)}

    hooks = {"eval_logger": eval_logger, "eval_aggregator": eval_aggregator, "metrics_callback": metrics_callback}
    metrics, _, _ = run(task=hooks)
    assert seen["turns"][0] == [["1.0"], ["0.5", "0.25"], ["0.0", "1.0"], ["0.25", "0.5"]]
    assert seen["turns"][1] == [["by 1"], ["by 1"] * 2, ["by 1"] * 2, ["by 1"] * 2]
    assert seen["prompts"] == ["first", "first", "second", "second"]
    assert (metrics["eval/most_turns"], metrics["eval/of"]) == (2, 2)
    assert metrics["eval/sum"] == 1.0 + 0.25 + 1.0 + 0.5
    assert metrics["eval/samples"] == 14  # 7 joint responses of two agents
    sample = seen["rollouts"][2]
    assert (sample.agent_idx, sample.turn_idx, sample.prompt, sample.completion) == (0, 0, "first", "0.5")
    assert sample.reward == 0.5 and sample.metadata["item"] == {"prompt": "first"}


def test_how_evaluation_plays():
    how = evaluation_growth(settings(eval_temperature=0.0, seed=3, temperature=1.3), (None, 9))
    assert (how.generations, how.stream, how.scope, how.joint_mode) == ((2, 1), "eval", "joint", "aligned")
    assert how.sampling.temperature == 0.0 and how.prompt_limits == (None, 9) and not how.greedy_baseline
    assert evaluation_growth(settings(temperature=1.3), ()).sampling.temperature == 1.3


def test_nothing_to_evaluate():
    with pytest.raises(ConfigError, match="eval_dataset: it has no rows"):
        run(items=[])


# In a trainer --------------------------------------------------------------------------------------------------------


def lengths(a, b):
    return [abs(len(x) - len(y)) / 50 for x, y in zip(a, b, strict=True)]


def again(prompt, agent_completions):
    return [f"{prompt} again {said}" for said in agent_completions]


def trainer(model, folder, eval_dataset=3, **changes):
    given = {"num_turns": 2, "num_generations": 2, "rollout_batch_size": 2, "max_steps": 3, "max_new_tokens": 6}
    given |= {"agent_learning_rate": 1e-2, "lora_rank": 2, "output_dir": str(folder), "run_name": "run"}
    return MAGRPOTrainer(
        agent_model=model,
        num_agents=2,
        reward_func=lengths,
        external_transition=again,
        train_dataset=[{"prompt": f"tell {i}"} for i in range(6)],
        eval_dataset=[{"prompt": f"ask {i}"} for i in range(eval_dataset)] if eval_dataset else None,
        args=MAGRPOConfig(**given | changes),
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def training_numbers(folder):
    machine = ("time/", "throughput/", "memory/")
    return [
        {name: value for name, value in line.items() if not name.startswith(machine)}
        for line in lines(folder)
        if not any(name.startswith("eval/") for name in line)
    ]


def test_evaluation_moves_no_training_number(tiny_llama, tmp_path):
    runs = {
        "never": {"eval_interval": 0},
        "often": {"eval_interval": 2, "eval_num_generations": 3, "eval_batch_size": 1},
    }
    for name, changes in runs.items():
        made = trainer(tiny_llama, tmp_path / name, **changes)
        if name == "often":
            made.evaluate()
        made.train()
    assert len(training_numbers(tmp_path / "never")) == 3
    assert training_numbers(tmp_path / "often") == training_numbers(tmp_path / "never")
    evaluated = [line for line in lines(tmp_path / "often") if "eval/turn_1/reward_mean" in line]
    assert [line["step"] for line in evaluated] == [0, 1, 2, 3]  # before every second item, and after the last update
    assert not [line for line in lines(tmp_path / "never") if "eval/turn_1/reward_mean" in line]
    for name in ("agent_0", "agent_1"):
        weights = [tmp_path / run / "run" / "agents" / name / "adapter_model.safetensors" for run in runs]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_evaluate_is_repeatable_and_whatever_the_batch(tiny_llama, tmp_path):
    made = trainer(tiny_llama, tmp_path, eval_num_generations=2)
    first = made.evaluate()
    assert made.evaluate() == first and first["eval/turn_1/reward_mean"] > 0
    assert "eval/return_best@2" in first and first["eval/turn_2/reached_fraction"] == 1
    other = trainer(tiny_llama, tmp_path, eval_num_generations=2, eval_batch_size=1, seed=42)
    assert other.evaluate() == pytest.approx(first)
    assert made.evaluate(num_eval_samples=1) != first
    assert made.evaluate(num_eval_samples=0) == {}
    assert not tmp_path.joinpath("run").exists()  # evaluating writes nothing
    assert trainer(tiny_llama, tmp_path, eval_dataset=0).evaluate() == {}


def test_without_an_evaluation_set_training_goes_on(tiny_llama, tmp_path):
    trainer(tiny_llama, tmp_path, eval_dataset=0, max_steps=1).train()
    assert not [line for line in lines(tmp_path) if any(name.startswith("eval/") for name in line)]
