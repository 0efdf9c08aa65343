"""Who else may write an agent's responses: another local model, or one over HTTP; each role by itself or all in one.

A writer is given the prompts of whole nodes, as the formatters made them, and returns texts; `WrittenCollector` plays
episodes with it in the place of the team. A text that could not be had, or cannot be split into roles, is a response
without any token: it loses its own candidate only (`pairs.dropped_failures`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlrl.agents import Agent
from mlrl.centralized import centralized_prompt, split_roles
from mlrl.errors import TaskError
from mlrl.models.base import Base
from mlrl.parallel.group import Group
from mlrl.prompts import Prompt
from mlrl.remote import RemoteModel, RemoteRequest
from mlrl.rollout.collect import Collector, Growth
from mlrl.rollout.prompts import tokenize_prompt
from mlrl.rollout.sampler import Request, SamplingParams
from mlrl.rollout.tree import Node, Response, RolloutTree
from mlrl.sources import max_model_length

LOST = Response([], [], "", truncated=False)


@dataclass(frozen=True)
class NodeRequest:
    """Responses that are wanted at one node.

    Attributes:
        prompts: one an agent (or a single one, for a model that writes all roles).
        count: responses of each. draw: names the random stream, (seed, stream, item, path).
    """

    item: dict
    prompts: Sequence[Prompt]
    count: int
    draw: tuple


class Writer(Protocol):
    """Writes the responses of nodes."""

    lost: Counter
    """Responses that could not be had so far, by reason."""
    requests: int
    """Requests that were sent to a server so far."""
    bases: list[Base]
    """The networks here that write."""

    def write(self, requests: Sequence[NodeRequest]) -> list[list[list[str | Response | None]]]:
        """[request][agent][count]: a text, a response of the agent's own tokens, or None. All ranks call it together,
        and get the same."""


class RemoteWriter:
    """Every role by a model over HTTP, which the first of some ranks asks; default: this process alone."""

    def __init__(self, model: RemoteModel, world: Group | None = None):
        self.model, self.world = model, world or Group.alone()

    @property
    def lost(self) -> Counter:
        stats = self.model.stats
        return stats.failures + Counter({"no text": stats.empty})

    @property
    def requests(self) -> int:
        return self.model.stats.attempts

    @property
    def bases(self) -> list[Base]:
        return []

    def write(self, requests: Sequence[NodeRequest]) -> list[list[list[str | Response | None]]]:
        """As `Writer.write`. Raises TaskError where not one of the texts could be had."""
        asked = [
            RemoteRequest(
                prompt, request.count, (*request.draw, agent), {"agent_idx": agent, "batch_item": request.item}
            )
            for request in requests
            for agent, prompt in enumerate(request.prompts)
        ]
        answers = self.world.from_first(lambda: self.model.complete(asked))
        if asked and all(text is None for own in answers for text in own):
            raise TaskError(
                f"comparator_api_url={self.model.settings.url!r}: none of {sum(len(own) for own in answers)} texts "
                f"could be had ({self.model.stats.first_failure or 'no answer had any text'}). Correct comparator_api_*"
            )
        remaining = iter(answers)
        return [[list(next(remaining)) for _ in request.prompts] for request in requests]


class ModelWriter:
    """Every role by a local model of its own.

    Args:
        collector: draws from the models that write, one an agent, or a single one for all roles.
        readers: the agents that learn; where a writer has their tokens, its responses keep them.
    """

    requests = 0

    def __init__(self, collector: Collector, sampling: SamplingParams, readers: Sequence[Agent]):
        self.collector, self.team, self.sampling = collector, collector.team, sampling
        self.lost: Counter = Counter()
        self.bases = self.team.bases
        stops = [_stop_ids(agents, collector.world) for agents in (self.team.agents, readers)]
        self.same_tokens = [
            writer.tokenizer.get_vocab() == reader.tokenizer.get_vocab() and own == theirs
            for writer, reader, own, theirs in zip(self.team.agents, readers, *stops, strict=False)
        ]
        self.rows = [reader.source.config.get_text_config().vocab_size for reader in readers]
        lengths = [max_model_length(agent.source) for agent in self.team.agents]
        self.limits = [None if length is None else length - sampling.max_new_tokens for length in lengths]

    def write(self, requests: Sequence[NodeRequest]) -> list[list[list[str | Response | None]]]:
        """As `Writer.write`."""
        asked = [
            Request(
                agent,
                self._tokens(agent, prompt, request),
                [(*request.draw, agent, k) for k in range(request.count)],
            )
            for request in requests
            for agent, prompt in enumerate(request.prompts)
        ]
        sampled = iter(self.collector.draw(asked, self.sampling))
        return [
            [
                [response if self._keeps(agent, response) else response.text for response in next(sampled)]
                for agent in range(len(request.prompts))
            ]
            for request in requests
        ]

    def _keeps(self, agent: int, response: Response) -> bool:
        """Whether these tokens are the reader's too; a network may have rows beyond its tokenizer's, and draw them."""
        return self.same_tokens[agent] and max(response.token_ids, default=0) < self.rows[agent]

    def _tokens(self, agent: int, prompt: Prompt, request: NodeRequest) -> list[int]:
        """A prompt through the writer's own chat template. Raises TaskError where its model cannot hold it."""
        where = f"comparator, item {request.draw[2]}, turn {len(request.draw[3])}, agent {agent}"
        tokenizer = self.team.agents[agent].tokenizer
        return tokenize_prompt(tokenizer, prompt, limit=self.limits[agent], where=where).token_ids


class CentralizedWriter:
    """All roles by one writer, in tagged sections of one text."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self._unparseable = 0

    @property
    def lost(self) -> Counter:
        return self.writer.lost + Counter({"unparseable": self._unparseable})

    @property
    def requests(self) -> int:
        return self.writer.requests

    @property
    def bases(self) -> list[Base]:
        return self.writer.bases

    def write(self, requests: Sequence[NodeRequest]) -> list[list[list[str | Response | None]]]:
        """As `Writer.write`; a text that is not of the form loses the candidate and is counted."""
        joined = [NodeRequest(r.item, [centralized_prompt(r.prompts)], r.count, r.draw) for r in requests]
        answers = []
        for request, [texts] in zip(requests, self.writer.write(joined), strict=True):
            roles = [self._split(text, len(request.prompts)) for text in texts]
            answers.append([[own[agent] for own in roles] for agent in range(len(request.prompts))])
        return answers

    def _split(self, text: str | Response | None, num_agents: int) -> Sequence[str | None]:
        if text is None:
            return [None] * num_agents
        roles = split_roles(text.text if isinstance(text, Response) else text, num_agents)
        self._unparseable += roles is None
        return [None] * num_agents if roles is None else roles


@dataclass
class WrittenCollector(Collector):
    """Grows trees whose responses a writer writes; `team` are the agents that will learn from them."""

    writer: Writer = field(kw_only=True)

    def _sample(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
        alive = [(tree, node) for tree, node in frontier if not _is_lost(node)]
        requests = [
            NodeRequest(
                tree.item,
                [prompt.content for prompt in node.prompts],
                growth.generations[node.turn],
                (growth.seed, growth.stream, tree.ordinal, node.path),
            )
            for tree, node in alive
        ]
        texts = self.writer.write(requests)
        written = {id(node): own for (_, node), own in zip(alive, texts, strict=True)}
        for _, node in frontier:
            lost = [[None] * growth.generations[node.turn]] * len(self.team.agents)
            node.responses = [
                [as_response(text, agent, growth.sampling.max_new_tokens) for text in own]
                for agent, own in zip(self.team.agents, written.get(id(node), lost), strict=True)
            ]
            self.cost.generated_tokens += sum(len(r.token_ids) for own in node.responses for r in own)


def as_response(text: str | Response | None, agent: Agent, max_new_tokens: int) -> Response:
    """A text as the agent would have written it: its own tokens and its end token, cut at `max_new_tokens`.

    Special tokens that a text spells out are taken for plain text. There are no log-probabilities.
    """
    if text is None:
        return LOST
    if isinstance(text, Response):
        return text
    encoded = agent.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    token_ids = list(encoded["input_ids"])
    truncated = len(token_ids) >= max_new_tokens
    token_ids = token_ids[:max_new_tokens] if truncated else [*token_ids, agent.tokenizer.eos_token_id]
    return Response(token_ids, [], agent.decode(token_ids), truncated)


def _stop_ids(agents: Sequence[Agent], world: Group) -> list[frozenset[int]]:
    """End tokens of every agent, which the ranks that hold it know."""
    here = {number: agent.stop_ids for number, agent in enumerate(agents) if agent.is_here}
    return world.collect(here, len(agents))


def _is_lost(node: Node) -> bool:
    """Whether a response on the way to this node could not be had."""
    while node.parent is not None:
        joint, node = node.path[-1], node.parent
        if any(not node.responses[agent][k].token_ids for agent, k in enumerate(node.joints[joint])):
            return True
    return False
