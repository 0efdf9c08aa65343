"""One text of what all agents were asked and answered at a turn: what the joint reward model reads.

    [agent 1, prompt] …  [agent 2, prompt] …  [agent 1, response] …  [agent 2, response] …  [score]

Prompts come first, so that the candidates of a node share them as a prefix, and the last token is the same for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from mlrl.centralized import prompt_text
from mlrl.errors import ConfigError
from mlrl.models.prefix_tree import PrefixTree
from mlrl.preference.pairs import PreferencePair, Trajectory
from mlrl.prompts import Prompt


@dataclass(frozen=True)
class JointInput:
    """Tokens of a joint text: up to the responses, and from there on; `cut` tokens did not fit.

    Attributes:
        sections: how many tokens of `responses` each agent has, its tag among them; the closing tag follows.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    sections: tuple[int, ...]
    cut: int = 0

    def __len__(self) -> int:
        return len(self.prompts) + len(self.responses)


@dataclass
class JointReader:
    """Makes joint texts that fit a token budget.

    A text that is too long is cut within the agents' shares of the budget: they are equal, and what one agent does not
    need the others may have. Inside its share an agent's response comes first and loses its end where it must; its
    prompt has the rest and loses its beginning. So no agent's response disappears.

    Attributes:
        tokenizer: the reward model's own. max_length: longest text in tokens, None for no limit.
        inputs: texts made so far. inputs_cut: those that were cut.

    Raises:
        ConfigError: the budget does not hold the tags and some tokens of every agent.
    """

    tokenizer: PreTrainedTokenizerBase
    num_agents: int
    max_length: int | None = None
    inputs: int = field(default=0, init=False)
    inputs_cut: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        agents = range(1, self.num_agents + 1)
        self._start = self.tokenizer("", verbose=False)["input_ids"]  # the start token, where there is one
        self._prompt_tags = [self._encode(f"\n[agent {agent}, prompt]\n") for agent in agents]
        self._response_tags = [self._encode(f"\n[agent {agent}, response]\n") for agent in agents]
        self._closing = self._encode("\n[score]")
        tags = [self._start, *self._prompt_tags, *self._response_tags, self._closing]
        self._fixed = sum(map(len, tags))
        least = self._fixed + 4 * self.num_agents
        if self.max_length is not None and self.max_length < least:
            raise ConfigError(
                f"reward_max_length={self.max_length!r}: the tags of {self.num_agents} agents take {self._fixed} "
                f"tokens. Give {least} or more."
            )

    def read(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> JointInput:
        """The joint text of one joint response."""
        asked = [self._encode(prompt_text(prompt)) for prompt in prompts]
        said = [self._encode(response) for response in responses]
        needs = [len(a) + len(s) for a, s in zip(asked, said, strict=True)]
        shares = needs if self.max_length is None else fair_shares(needs, self.max_length - self._fixed)
        self.inputs += 1
        self.inputs_cut += shares != needs
        said = [ids[:share] for ids, share in zip(said, shares, strict=True)]
        rooms = [share - len(ids) for ids, share in zip(said, shares, strict=True)]
        asked = [ids[len(ids) - min(room, len(ids)) :] for ids, room in zip(asked, rooms, strict=True)]
        before = [*self._start]
        for tag, ids in zip(self._prompt_tags, asked, strict=True):
            before += [*tag, *ids]
        after = [[*tag, *ids] for tag, ids in zip(self._response_tags, said, strict=True)]
        responses = (*itertools.chain(*after), *self._closing)
        return JointInput(tuple(before), responses, tuple(map(len, after)), sum(needs) - sum(shares))

    def read_turns(self, trajectory: Trajectory) -> list[JointInput]:
        """The joint text of every turn, each with what the agents saw at it."""
        return [
            self.read([prompt.content for prompt in turn.prompts], [response.text for response in turn.responses])
            for turn in trajectory.turns
        ]

    def _encode(self, text: str) -> list[int]:
        # special tokens that a text spells out are text
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def fair_shares(needs: Sequence[int], total: int) -> list[int]:
    """What each gets of `total`: as much as it needs, or an equal part of what those that need less leave.

    The smallest needs are met first; tokens that cannot be split evenly go to the first.
    """
    shares = [0] * len(needs)
    left = min(total, sum(needs))
    for remaining, place in zip(
        range(len(needs), 0, -1), sorted(range(len(needs)), key=lambda i: needs[i]), strict=True
    ):
        shares[place] = min(needs[place], left // remaining)
        left -= shares[place]
    for place in range(len(needs)):
        extra = min(left, needs[place] - shares[place])
        shares[place] += extra
        left -= extra
    return shares


@dataclass
class JointBatch:
    """A prefix tree that holds these texts; `ends[n]` is the segment at whose last token text n is scored.

    Attributes:
        sections: of each text, as in its `JointInput`.
    """

    tree: PrefixTree = field(default_factory=PrefixTree)
    places: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sections: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, place: int, inputs: Sequence[JointInput]) -> None:
        """Adds the texts of one thing that is to be scored as a whole."""
        self.places.append(place)
        for given in inputs:
            self.ends.append(self.tree.add(given.responses, self.tree.add(given.prompts)))
            self.sections.append(given.sections)


def joint_batches(wholes: Sequence[Sequence[JointInput]], max_tokens: int) -> Iterator[JointBatch]:
    """Packs things of one or several texts each, in order, into trees of at most `max_tokens` tokens.

    One thing alone may exceed that.
    """
    batch = JointBatch()
    for place, inputs in enumerate(wholes):
        cost = sum(batch.tree.cost([(given.prompts, None), (given.responses, None)]) for given in inputs)
        if batch.places and batch.tree.num_tokens + cost > max_tokens:
            yield batch
            batch = JointBatch()
        batch.add(place, inputs)
    if batch.places:
        yield batch


def stand_in_batch(num_agents: int) -> JointBatch:
    """The smallest batch: what a rank runs while others have more of them than it."""
    batch = JointBatch()
    batch.add(0, [JointInput((0,), (0,), (0,) * num_agents)])
    return batch


def read_pair(reader: JointReader, pair: PreferencePair) -> tuple[list[JointInput], list[JointInput]]:
    """Texts of the winner's turns and of the loser's."""
    return reader.read_turns(pair.winner), reader.read_turns(pair.loser)
