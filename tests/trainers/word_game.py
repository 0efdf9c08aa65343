"""A team of language models over six words that answer with one word: every joint response can be enumerated."""

from __future__ import annotations

import hashlib
import itertools

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mlrl.config import MAGRPOConfig
from mlrl.rollout.tree import RolloutTree
from mlrl.trainers.reinforce import MAGRPOTrainer
from tests.trainers.loops import perturb

WORDS = ["end", "a", "b", "c", "d", "start"]  # ids 0 … 5; "end" ends a response, and is an action like the others
DISCOUNT = 0.9


def word(text: str) -> str:
    """The word of a response: its end token alone decodes to nothing."""
    return text or "end"


def number(*words: str) -> float:
    """A fixed reward in [0, 1] of a sequence of words, with no pattern."""
    return hashlib.blake2b(" ".join(words).encode()).digest()[0] / 255


def reward(first: list[str], second: list[str], prompts: list[str]) -> list[float]:
    """Depends on both responses, and in the second turn on what came before."""
    return [number(prompts[0].split()[-1], word(a), word(b)) for a, b in zip(first, second, strict=True)]


def transition(agent_completions: list[str]) -> list[str]:
    """Each agent sees its own word and, in its last place, the partner's."""
    a, b = map(word, agent_completions)
    return [f"start {a} {b}", f"start {b} {a}"]


def make_team(num_turns: int, num_generations: int, joint_mode: str, seed: int = 1, **settings) -> MAGRPOTrainer:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="start"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end", pad_token="end")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, initializer_range=0.5, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    trainer = MAGRPOTrainer(
        agent_model=LlamaForCausalLM(config),
        num_agents=2,
        tokenizer=fast,
        reward_func=reward,
        external_transition=transition,
        train_dataset=[{"prompt": "start"}],
        args=MAGRPOConfig(
            num_turns=num_turns, num_generations=num_generations, joint_mode=joint_mode, discount=DISCOUNT,
            max_new_tokens=1, lora_rank=2, lora_target_modules=["q_proj", "down_proj"], max_grad_norm=None,
            advantage_normalization="none", eval_interval=0, max_rollout_rows=4096, **settings,
        ),
    )  # fmt: skip
    for agent in trainer.team.agents:
        perturb(agent, seed=agent.index, spread=0.5)
    return trainer


def collect(trainer: MAGRPOTrainer, first: int, count: int) -> list[RolloutTree]:
    """Trees of `count` items, which differ in their random streams alone."""
    return trainer.collector.collect([(first + n, {"prompt": "start"}) for n in range(count)], trainer.growth())


def exact_gradients(trainer: MAGRPOTrainer, num_turns: int) -> list[torch.Tensor]:
    """∇_i of E[r_0 + γ·r_1], from the probabilities of all words after all prompts."""

    def probabilities(agent: int, prompt: str) -> torch.Tensor:
        ids = torch.tensor([[WORDS.index(w) for w in prompt.split()]])
        policy = trainer.team.agents[agent].policy
        with policy.use():
            policy.base.language_model.release()
            logits = policy.base.model(input_ids=ids, use_cache=False).logits[0, -1]
            policy.base.language_model.claim()
        return torch.softmax(logits, -1)

    pairs = list(itertools.product(WORDS, WORDS))
    start = [probabilities(i, "start") for i in (0, 1)]
    value = torch.zeros(())
    for a, b in pairs:
        after = torch.tensor(number("start", a, b))
        if num_turns == 2:
            prompts = transition([a, b])
            second = [probabilities(i, prompts[i]) for i in (0, 1)]
            later = torch.tensor([[number(prompts[0].split()[-1], c, d) for d in WORDS] for c in WORDS])
            after = after + DISCOUNT * (second[0] @ later @ second[1])
        value = value + start[0][WORDS.index(a)] * start[1][WORDS.index(b)] * after
    parameters = [agent.parameters for agent in trainer.team.agents]
    gradients = torch.autograd.grad(value, [p for own in parameters for p in own])
    vectors = torch.cat([g.flatten() for g in gradients])
    return list(vectors.split([sum(p.numel() for p in own) for own in parameters]))
