"""Teams without a network: a sampler that plays a script, and one whose responses depend on prompt and stream alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext

from mlrl.agents import Agent, Team
from mlrl.parallel.mesh import Mesh
from mlrl.rollout.collect import Collector, Growth
from mlrl.rollout.sampler import Request, SamplingParams
from mlrl.rollout.streams import StreamKey
from mlrl.rollout.tree import Response
from mlrl.task import Environment, Task
from tests.tiny import tiny_tokenizer

END = 2  # <|im_end|>


def fake_team(num_agents: int, kind: str = "llama") -> Team:
    """Agents that have a tokenizer and nothing else."""
    tokenizer = tiny_tokenizer(kind)
    agents = [Agent(i, tokenizer, None, stop_ids=frozenset({END})) for i in range(num_agents)]
    return Team(agents, [], False, None, Mesh.alone(num_agents))


def respond(agent: Agent, text: str, truncated: bool = False) -> Response:
    """A response of this text, with its end token unless it was truncated."""
    ids = agent.tokenizer(text, add_special_tokens=False)["input_ids"] + [END] * (not truncated)
    return Response(ids, [-0.5] * len(ids), text, truncated)


class ScriptedSampler:
    """Plays `script(ordinal, path, agent, k)`, a text; a text that ends in … was cut there by the token budget.

    `greedy` is the script of temperature 0. Requests are kept in `calls`.
    """

    def __init__(self, team: Team, script: Callable[..., str], greedy: Callable[..., str] | None = None):
        self.team, self.script, self.greedy, self.calls = team, script, greedy, []

    def steady_weights(self):
        return nullcontext()

    def sample(self, requests: list[Request], params: SamplingParams, on_tokens=None) -> list[list[Response]]:
        self.calls.append((list(requests), params))
        script = self.greedy if params.temperature == 0 else self.script
        return [[self._play(script, r.agent, *key[2:4], key[5]) for key in r.keys] for r in requests]

    def _play(self, script: Callable[..., str], agent: int, ordinal: int, path: tuple, k: int) -> Response:
        text = script(ordinal, path, agent, k)
        return respond(self.team.agents[agent], text.removesuffix("…"), truncated=text.endswith("…"))


def hashed_response(agent: Agent, prompt: list[int], key: StreamKey, params: SamplingParams) -> Response:
    """What a model would be to a tree: a pure function of the prompt's tokens and the sequence's stream."""
    source = (agent.index, prompt, None if params.temperature == 0 else key)
    digest = hashlib.blake2b(repr(source).encode()).digest()
    length = digest[0] % (params.max_new_tokens + 1)
    text = "".join(chr(97 + byte % 26) for byte in digest[1 : length + 1])
    ids = agent.tokenizer.convert_tokens_to_ids(list(text))  # a token a letter, which encoding the text would not give
    truncated = length == params.max_new_tokens
    ids = ids if truncated else [*ids, END]
    return Response(ids, [-0.5] * len(ids), text, truncated)


class HashedSampler:
    """Samples `hashed_response`."""

    def __init__(self, team: Team):
        self.team, self.calls = team, []

    def steady_weights(self):
        return nullcontext()

    def sample(self, requests: list[Request], params: SamplingParams, on_tokens=None) -> list[list[Response]]:
        self.calls.append(list(requests))
        return [[hashed_response(self.team.agents[r.agent], r.prompt, key, params) for key in r.keys] for r in requests]


def scripted(
    num_agents: int, num_turns: int, script: Callable[..., str], reward_func: Callable, greedy=None, **task
) -> Collector:
    """A collector of scripted agents, on a task whose next prompts count the turns."""
    team = fake_team(num_agents)
    task = {"train_dataset": [{"prompt": "go"}], "external_transition": next_turn} | task
    environment = Environment(Task(reward_func=reward_func, **task), num_agents, num_turns)
    return Collector(team, ScriptedSampler(team, script, greedy), environment)


def next_turn(num_agents, turn):
    """Next prompts that tell nothing but the turn."""
    return [f"turn {turn + 1}"] * num_agents


def growth(num_turns: int, num_generations: int, **changes) -> Growth:
    """Growth with K generations a turn."""
    settings = {"sampling": SamplingParams(max_new_tokens=8), "seed": 5} | changes
    return Growth(generations=(num_generations,) * num_turns, **settings)
