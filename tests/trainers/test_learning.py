"""Every trainer of the family makes the reward rise, through its public interface alone."""

import json
from pathlib import Path

import pytest

import mlrl.trainers as trainers
from tests.trainers.loops import make_trainer


def early_letters(first: list[str], second: list[str]) -> list[float]:
    """Share of the characters that are in a…m for the first agent, and that are not for the second."""

    def share(text: str, wanted: bool) -> float:
        return sum(("a" <= c <= "m") == wanted for c in text) / len(text) if text else 0.0

    return [(share(a, True) + share(b, False)) / 2 for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize(
    "algorithm, settings",
    [
        ("MAREINFORCE", {}),
        ("MAGRPO", {}),
        ("MAGRPO", {"joint_mode": "cross", "num_generations": 6}),
        ("MAGRPO", {"tuning": "full", "agent_learning_rate": 3e-3}),
        ("MAGRPO", {"clip_range": 0.2, "num_updates_per_rollout": 2, "train_batch_size": 2, "max_steps": 12}),
        ("MARLOO", {}),
        ("MARLOO", {"num_turns": 2, "num_generations": 5}),
        ("MAReMax", {"agent_learning_rate": 2e-2}),
        ("MAReMax", {"advantage_mode": "greedy"}),
    ],
)
def test_the_reward_rises(tiny_llama, tmp_path, algorithm, settings):
    defaults = {"num_generations": 16, "agent_learning_rate": 1e-2, "lora_rank": 4, "max_grad_norm": 1.0}
    trainer = make_trainer(
        tiny_llama,
        conversation=False,
        ends=frozenset(),
        config=getattr(trainers, f"{algorithm}Config"),
        trainer=getattr(trainers, f"{algorithm}Trainer"),
        reward_func=early_letters,
        train_dataset=[{"prompt": f"{word} story"} for word in ("a", "the", "one", "my")],
        spread=0.0,
        num_train_epochs=25,
        completions_steps=0,
        output_dir=str(tmp_path),
        max_new_tokens=2,
        **defaults | settings,
    )
    for engine in trainer.engines:
        engine.settings = trainer._optimizer_settings(trainer.args.agent_learning_rate)
    trainer.train()
    lines = [json.loads(line) for line in Path(trainer.run_folder.metrics).read_text().splitlines()]
    rewards = [line["turn_1/reward_mean"] for line in lines if "turn_1/reward_mean" in line]
    assert len(rewards) == (trainer.args.max_steps or 25)
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.15, (first, last)
