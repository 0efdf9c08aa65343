"""Teams of tiny models with trees of made-up responses: what the tests of critics read and learn from."""

from __future__ import annotations

import torch

from mlrl.agents import Team
from mlrl.config import AgentArguments, IACConfig, MAACConfig
from mlrl.critic_inputs import critic_batches
from mlrl.critic_loading import load_critics
from mlrl.critics import Critic
from mlrl.rollout.collect import Collector
from mlrl.rollout.sampler import SamplingParams
from mlrl.rollout.tree import RolloutTree
from mlrl.sources import load_tokenizers, resolve_source
from mlrl.task import Environment, Task
from tests.rollout.fakes import HashedSampler, growth

GO = [{"role": "user", "content": "go"}]


def load_team(models, tokenizer=None, **settings) -> tuple[Team, AgentArguments]:
    """A float32 team on the CPU, and how its adapters are made."""
    sources = [resolve_source(model) for model in models]
    arguments = AgentArguments(**{"lora_rank": 4, "lora_alpha": 8.0} | settings)
    tokenizers = load_tokenizers(sources, tokenizer)
    team = Team.load(arguments, sources, tokenizers, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    return team, arguments


def critics_of(team, arguments, *, centralized, separate=True, models=None, tokenizer=None, **settings) -> list[Critic]:
    """One centralized critic, or one an agent."""
    config = MAACConfig(**settings) if centralized else IACConfig(use_separate_critic=separate, **settings)
    agents = [None] if centralized else list(range(len(team.agents)))
    models = [None] * len(agents) if models is None else models
    return load_critics(
        team, config, arguments, agents=agents, models=models, separate=separate, tokenizer=tokenizer, seed=3
    )


def value_batches(samples, max_tokens):
    """Micro-batches, each with its samples in the order of its values."""
    for batch in critic_batches([sample.input for sample in samples], max_tokens):
        yield batch, [samples[number] for number in batch.numbers]


def continued(prompt_history_per_agent, response_history_per_agent, num_agents, turn):
    """Chats that go on: each agent sees all that it said before."""
    prompts = []
    for agent in range(num_agents):
        said = {"role": "assistant", "content": response_history_per_agent[agent][-1]}
        prompts.append(
            [*prompt_history_per_agent[agent][-1], said, {"role": "user", "content": f"{turn + 1}, agent {agent}"}]
        )
    return prompts


def restarted(num_agents, turn, agent_completions):
    """Prompts that tell each agent the others' last words only."""
    return [f"turn {turn + 1}, told {agent_completions[1 - agent]}" for agent in range(num_agents)]


def lengths(a, b):
    """A shared reward that differs between joints."""
    return [len(x) - 0.5 * len(y) for x, y in zip(a, b, strict=True)]


def grow(team, *, num_turns=2, num_generations=2, items=2, chat=False, reward=lengths, **changes) -> list[RolloutTree]:
    """Trees of two agents' responses of 0 to 4 letters."""
    rows = [{"prompt": f"{'chat' if chat else 'item'} {number}"} for number in range(items)]
    formatters = None
    if chat:
        formatters = [lambda item, external_prompts=None: external_prompts or GO]
        formatters *= len(team.agents)
    task = Task(
        reward_func=reward,
        train_dataset=rows,
        external_transition=continued if chat else restarted,
        formatters=formatters,
    )
    environment = Environment(task, len(team.agents), num_turns)
    collector = Collector(team, HashedSampler(team), environment)
    return collector.collect(
        list(enumerate(rows)), growth(num_turns, num_generations, sampling=SamplingParams(max_new_tokens=4), **changes)
    )
