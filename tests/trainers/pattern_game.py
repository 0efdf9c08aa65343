"""A team game with a known optimum: over three turns two agents say one word each, and only then learn how often they
said the pair that the pattern asks for. Each sees its own words alone, so the values of all policies can be enumerated.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mlrl.trainers as trainers
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.trainers.reinforce import ReinforceTrainer

WORDS = ["end", "a", "b", "start"]  # ids 0 … 3; "end" ends a response, and is an action like the others
TAGS = ["[turn", "1,", "2,", "3,", "agent_0,", "agent_1,", "prompt]", "response]", "[value]"]  # what a critic reads
PATTERN = [("a", "b"), ("b", "b"), ("b", "a")]
STEPS = 40
OPTIMUM = 1.0  # and the worst is 0, so that errors of values are in units of the range


def right(first: list[str], second: list[str]) -> float:
    """Share of the pattern that two agents' words so far make up."""
    return sum(pair == wanted for pair, wanted in zip(zip(first, second, strict=True), PATTERN, strict=False)) / 3


def reward(first: list[str], second: list[str], turn: int, response_history: list[list[str]]) -> list[float]:
    """Nothing before the last turn."""
    if turn < 2:
        return [0.0] * len(first)
    before = [list(map(word, said)) for said in response_history]
    return [right([*before[0], word(a)], [*before[1], word(b)]) for a, b in zip(first, second, strict=True)]


def transition(response_history_per_agent: list[list[str]]) -> list[str]:
    """Each agent is told what it said itself."""
    return [" ".join(["start", *map(word, said)]) for said in response_history_per_agent]


def word(text: str) -> str:
    """The word of a response: its end token alone decodes to nothing."""
    return text or "end"


def save_models(folder: Path, seed: int) -> tuple[str, str]:
    """A model of agents, and one of a centralized critic, which knows its tags too."""
    places = []
    for name, words in (("agent", WORDS), ("critic", WORDS + TAGS)):
        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="start"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end", pad_token="end")
        config = LlamaConfig(
            vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, initializer_range=0.15, tie_word_embeddings=True, eos_token_id=0,
            pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
        places.append(str(folder / name))
    return places[0], places[1]


def make_team(algorithm: str, folder: Path, seed: int = 0, **settings) -> ReinforceTrainer:
    """A trainer of two agents with networks of their own (full tuning)."""
    agent, critic = save_models(folder / "models", seed)
    own = {"MAGRPO": {}, "IAC": {"critic_learning_rate": 3e-3}}
    own["MAAC"] = {**own["IAC"], "critic_model": critic}
    return getattr(trainers, f"{algorithm}Trainer")(
        agent_model=agent,
        num_agents=2,
        reward_func=reward,
        external_transition=transition,
        train_dataset=[{"prompt": "start"}] * 256,
        wandb_config={"config_sections": {"output": {"verbose": False}}},
        args=getattr(trainers, f"{algorithm}Config")(
            **{"num_turns": 3, "num_generations": 3, "rollout_batch_size": 8, "max_new_tokens": 1, "tuning": "full"}
            # four passes, for critics that keep up with policies; less and less, or policies near the optimum, where
            # advantages are divided by almost nothing, are shaken out of it
            | {"num_updates_per_rollout": 4, "clip_range": 0.2, "agent_learning_rate": 1e-3, "lr_scheduler": "linear"}
            | {"entropy_coef": 0.1, "max_steps": STEPS, "num_train_epochs": 1000, "seed": seed}
            | {"output_dir": str(folder / "runs"), "eval_interval": 0, "completions_steps": 0, "save_steps": 0}
            | own[algorithm]
            | settings
        ),
    )


@dataclass
class Enumerated:
    """Everything that the present policies can do.

    Attributes:
        words: [agent][turn], [V^turn, V]: probabilities of the next word after each own history.
        future: [turn], [V^turn, V^turn]: expected share of the pattern from that turn on, by the two own histories.
    """

    words: list[list[Tensor]]
    future: list[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, trainer: ReinforceTrainer) -> Enumerated:
        words = [[_probabilities(agent.policy, turn) for turn in range(3)] for agent in trainer.team.agents]
        future: list[Tensor] = []
        for turn in (2, 1, 0):
            (a, b), (wanted_a, wanted_b) = (own[turn] for own in words), map(WORDS.index, PATTERN[turn])
            value = torch.outer(a[:, wanted_a], b[:, wanted_b]) / 3
            if future:
                after = future[0].view(len(a), len(WORDS), len(b), len(WORDS))
                value = value + torch.einsum("hv,gw,hvgw->hg", a, b, after)
            future.insert(0, value)
        return cls(words, future)

    @property
    def expected(self) -> float:
        """Expected reward of an episode."""
        return float(self.future[0])

    def value(self, node: Node, agent: int | None) -> float:
        """V of a node: of its joint history, or of one agent's own."""
        said = _said(node)
        places = [_place(own) for own in said]
        if agent is None:
            return right(*said) + float(self.future[node.turn][places[0], places[1]])
        partner = 1 - agent
        reached = torch.ones(1, dtype=torch.float64)
        for turn in range(node.turn):
            reached = (reached[:, None] * self.words[partner][turn]).flatten()
        future = self.future[node.turn] if agent == 0 else self.future[node.turn].T
        past = 0.0
        for turn in range(node.turn):
            if said[agent][turn] == PATTERN[turn][agent]:
                wanted = WORDS.index(PATTERN[turn][partner])
                past += float(reached.view(len(WORDS) ** turn, len(WORDS), -1)[:, wanted].sum()) / 3
        return past + float(future[places[agent]] @ reached)


@dataclass
class Record:
    """A run as it really was, before each of its updates.

    Attributes:
        env_steps: joint rewards so far. expected: reward of an episode of the policies as they are.
        errors: RMS of V − its enumerated value over the batch's nodes and all critics.
        spreads: std of those values, which is the error of the best constant. Both stay empty without critics.
    """

    env_steps: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)


def run(trainer: ReinforceTrainer, every: int = 1) -> Record:
    """Trains to the end and records every so many steps."""
    record, update, kept = Record(), trainer.update, {}

    def estimate(trees: list[RolloutTree]):
        kept["trees"] = trees
        return estimated(trees)

    def watched(samples) -> None:
        if trainer.step_number % every == 0:
            exact = Enumerated.of(trainer)
            record.env_steps.append(trainer.env_step)
            record.expected.append(exact.expected)
            if hasattr(trainer, "critics"):
                error, spread = value_errors(trainer, exact, kept["trees"])
                record.errors.append(error)
                record.spreads.append(spread)
        update(samples)

    estimated, trainer.estimate, trainer.update = trainer.estimate, estimate, watched
    trainer.train()
    record.env_steps.append(trainer.env_step)
    record.expected.append(Enumerated.of(trainer).expected)
    return record


def value_errors(trainer: ReinforceTrainer, exact: Enumerated, trees: list[RolloutTree]) -> tuple[float, float]:
    """RMS over the nodes of a batch of a critic's V − the enumerated value, and of a constant's, over all critics."""
    nodes = [node for tree in trees for node in tree.nodes()]
    errors, spreads = [], []
    for critic, estimate in zip(trainer.critics, trainer.estimates, strict=True):
        wanted_M = torch.tensor([exact.value(node, critic.reader.agent) for node in nodes], dtype=torch.float64)
        errors.append((estimate.values_MA[:, 0] - wanted_M).square().mean())
        spreads.append(wanted_M.var(correction=0))
    return float(torch.stack(errors).mean().sqrt()), float(torch.stack(spreads).mean().sqrt())


def _probabilities(policy, turn: int) -> Tensor:
    """[V^turn, V], after each sequence of own words, the last word fastest."""
    histories = itertools.product(range(len(WORDS)), repeat=turn)
    ids = torch.tensor([[WORDS.index("start"), *history] for history in histories])
    with policy.use():
        policy.base.language_model.release()
        logits = policy.base.model(input_ids=ids, use_cache=False).logits[:, -1]
        policy.base.language_model.claim()
    return torch.softmax(logits.double(), -1)


def _said(node: Node) -> list[list[str]]:
    """Each agent's words before a node."""
    return [[WORDS[token] for token in prompt.token_ids[1:]] for prompt in node.prompts]


def _place(said: list[str]) -> int:
    place = 0
    for own in said:
        place = place * len(WORDS) + WORDS.index(own)
    return place
