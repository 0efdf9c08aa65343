"""One agent answers briefly, the others in detail: the reward is in how long the answers are beside each other.

The smallest task that needs a team: an answer is neither short nor long by itself. With ρ the ratio of characters,
second answer over first, the reward is exp(−max(low − ρ, ρ − high, 0)): 1 inside the band, less the further outside.
With more than two agents it is the mean over the answers after the first. In a second turn each agent reads how long
its answer was and in which direction to go.

    accelerate launch train/magrpo.py --task length_ratio
    accelerate launch train/magrpo.py --task length_ratio --num_turns 2 --joint_mode aligned --task_args low=3 high=4
"""

import math
from collections.abc import Sequence
from typing import Any

from mlrl import ConfigError, Task

BRIEF = "Give a short answer."
DETAILED = "Give a detailed answer."

# cross: a reward costs nothing here, and an answer judged beside all 8 of the other agent has a far steadier advantage
RECOMMENDED = {
    "num_generations": 8,
    "joint_mode": "cross",
    "micro_batch_tokens": 512,
    "rollout_batch_size": 2,
    "max_new_tokens": 48,
    "agent_learning_rate": 3e-3,
    "lr_scheduler": "linear",  # at a constant rate so large a run may end in a trough
    "num_train_epochs": 1,
    "max_steps": 14,
    "eval_interval": 40,
    "eval_num_samples": 8,
    "eval_num_generations": 4,
    # Rounds: the first pairs only ever say "briefer", and on them alone the brief answers pass through the band and out
    # at its other end. Of an item's two pairs the one of the wider gap: reading costs far more than drawing.
    "madpo": {
        "num_iterations": 4,
        "preference_num_candidates": 2,
        "preference_pairs_per_sample": 1,
        "train_batch_size": 20,
        "agent_learning_rate": 1e-3,
        "rpo_alpha": 3.0,
        "adam_beta1": 0.5,  # at 0.9 the second round still follows the first one's direction
        "max_steps": None,
    },
    # The reward counts characters: what of that shows in tokens shows in each agent's sum over its own. Of 32 tokens
    # the briefer first answer mostly wins; of more, some lose for being too brief, which few pairs do not teach.
    "marlhf": {
        "max_new_tokens": 32,
        "preference_num_candidates": 8,
        "preference_pairs_per_sample": 3,
        "reward_pooling": "agents",
        "reward_train_batch_size": 8,
        "reward_num_train_epochs": 2,
        "reward_learning_rate": 6e-4,
        "reward_validation_fraction": 0.25,
        # The first round's pairs say "briefer", the second's "not as brief": a model of both knows the band between.
        "preference_replay_mode": "all_history",
        "num_generations": 4,
        "joint_mode": "aligned",
        "rollout_batch_size": 10,
        "num_train_epochs": 2,  # a round's pairs cost more than its steps, and four steps go half as far as eight
        "agent_learning_rate": 3e-4,
        "lr_scheduler": "constant",  # the second round, whose reward model knows more, goes as far as the first
        "adam_beta1": 0.5,
        "reference_kl_coef": 0.1,
        "max_steps": None,
    },
}


def task(low: float = 2.0, high: float = 3.0) -> Task:
    """The task with the band [low, high] of full reward for the ratio of characters.

    Raises:
        ConfigError: not 0 <= low <= high.
    """
    if not 0 <= low <= high < math.inf:
        raise ConfigError(f"task_args.low={low!r}, high={high!r}: no band of ratios. Right is 0 <= low <= high.")

    def reward(first: list[str], second: list[str], *more: list[str]) -> list[float]:
        return [
            sum(ratio_reward(answers[0], answer, low, high) for answer in answers[1:]) / (len(answers) - 1)
            for answers in zip(first, second, *more, strict=True)
        ]

    def feedback(
        agent_completions: Sequence[str], prompt_history_per_agent: Sequence[Sequence[list[dict[str, str]]]]
    ) -> list[list[dict[str, str]]]:
        """Each agent's chat so far, its own answer, and what the lengths say."""
        return [
            [
                *prompts[-1],
                {"role": "assistant", "content": agent_completions[agent]},
                {"role": "user", "content": length_feedback(agent, agent_completions, low, high)},
            ]
            for agent, prompts in enumerate(prompt_history_per_agent)
        ]

    def log_lengths(agent_completions_turns: list[list[list[str]]]) -> list[dict[str, float]]:
        """Lengths and success of each item's last turn."""
        rows = []
        for turns_by_agent in zip(*agent_completions_turns, strict=True):
            answers = [turns[-1] for turns in turns_by_agent]
            in_band = [ratio_reward(answers[0], answer, low, high) == 1.0 for answer in answers[1:]]
            lengths = {f"characters_agent_{agent}": float(len(answer)) for agent, answer in enumerate(answers)}
            rows.append({"in_band": sum(in_band) / len(in_band), **lengths})
        return rows

    return Task(
        train_dataset=[{"prompt": prompt} for prompt in TRAIN_PROMPTS],
        eval_dataset=[{"prompt": prompt} for prompt in EVAL_PROMPTS],
        formatters=with_role,
        reward_func=reward,
        external_transition=feedback,
        eval_logger=log_lengths,
        recommended=dict(RECOMMENDED),
    )


def ratio_reward(first: str, second: str, low: float = 2.0, high: float = 3.0) -> float:
    """exp(−max(low − ρ, ρ − high, 0)), ρ the characters of `second` over those of `first`; 0 for an empty first."""
    if not first:
        return 0.0
    ratio = len(second) / len(first)
    return math.exp(-max(low - ratio, ratio - high, 0.0))


def with_role(item: dict[str, Any], agent_idx: int) -> list[dict[str, str]]:
    """The role in front of the task as one user message; a chat of an earlier turn already opens with it."""
    if not isinstance(item["prompt"], str):
        return item["prompt"]
    role = BRIEF if agent_idx == 0 else DETAILED
    return [{"role": "user", "content": f"{role}\n\n{item['prompt']}"}]


def length_feedback(agent: int, answers: Sequence[str], low: float, high: float) -> str:
    """What an agent reads before its next answer. The first agent is told of the mean of the others."""
    brief = len(answers[0])
    detailed = len(answers[agent]) if agent else sum(map(len, answers[1:])) / (len(answers) - 1)
    if not brief:
        found, advice = "The brief answer was empty.", "Write an answer." if agent == 0 else "Keep yours detailed."
    else:
        ratio = detailed / brief
        found = f"The detailed answer was {ratio:.1f} times as long as the brief one."
        if low <= ratio <= high:
            advice = "Keep the length of yours."
        else:
            advice = "Make yours longer." if (ratio < low) == (agent > 0) else "Make yours shorter."
    return (
        f"{found} It should be {low:g} to {high:g} times as long. Your answer had {len(answers[agent])} characters. "
        f"{advice} Answer the same task again."
    )


TRAIN_PROMPTS = (
    "Why does bread rise in the oven?",
    "What makes a good neighbour?",
    "How does a bicycle stay upright?",
    "Describe a rainy morning in a harbour town.",
    "What is the use of a library today?",
    "Explain how a vaccine protects a person.",
    "How do you prepare for a long walk in the mountains?",
    "Why do leaves change their colour in autumn?",
    "Tell what happens inside a volcano before it erupts.",
    "What should someone know before adopting a dog?",
    "How is glass made?",
    "Why do people enjoy sad songs?",
    "Give advice for a first day at a new job.",
    "How does a refrigerator keep food cold?",
    "What is a computer program?",
    "Describe the taste of a ripe mango.",
    "Why is sleep important?",
    "How can a small shop win back its customers?",
    "What did the invention of printing change?",
    "Explain the rules of hide and seek.",
    "Why is the sea salty?",
    "How do bees find their way home?",
    "What makes a joke funny?",
    "How would you save water at home?",
    "Describe a market square at noon.",
    "Why do cats purr?",
    "What is inflation?",
    "How does a sailing boat move against the wind?",
    "Tell how to make a simple vegetable soup.",
    "What can we learn from failure?",
    "Why do we have leap years?",
    "How does a telescope work?",
    "What are the advantages of travelling by train?",
    "Describe an old clock in a quiet room.",
    "How do plants drink?",
    "Why do friends sometimes drift apart?",
    "What is the purpose of a museum?",
    "How do you teach a child to swim?",
    "Explain why ice floats.",
    "What would life be like without electricity?",
)

EVAL_PROMPTS = (
    "Why is the sky blue?",
    "How does a lighthouse help ships?",
    "Describe a forest after the first snow.",
    "What makes a team work well together?",
    "How is cheese made?",
    "Why do we dream?",
    "Give advice on keeping a garden in a dry summer.",
    "What is a black hole?",
)
