"""What a critic reads of a rollout tree, as chains of token segments whose common beginnings are run once.

The critic of one agent reads exactly what that agent read, and for Q what it answered. The centralized critic reads
the joint history of all agents, every text under the tag of its turn, agent and role:

    [turn 1, agent_0, prompt] … [turn 1, agent_1, prompt] … [turn 1, agent_0, response] … [turn 2, agent_0, prompt] …

A prompt that continues an earlier one is not told twice: only its new part follows. For Q the joint response comes
last. Token ids are kept where the critic has the agent's tokenizer, else the text is encoded anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from mlrl.errors import ConfigError
from mlrl.models.prefix_tree import PrefixTree
from mlrl.parallel.group import Group, spread
from mlrl.rollout.tree import Node, RolloutTree

CLOSING = "\n[value]"  # one last token for all inputs of a centralized critic, whatever was said before it
_QUIET = {"verbose": False}


@dataclass(frozen=True)
class CriticInput:
    """One input of a critic.

    Attributes:
        segments: its tokens, in pieces that other inputs may begin with too.
        cut: tokens that were cut off on the left because the input was too long.
    """

    segments: tuple[tuple[int, ...], ...]
    cut: int = 0

    @property
    def token_ids(self) -> list[int]:
        """All tokens in order."""
        return [token for segment in self.segments for token in segment]


@dataclass
class _Role:
    """What one agent saw or said at one turn: a tag that says so, and the text."""

    tag: tuple[int, ...]
    body: tuple[int, ...]


@dataclass
class CriticReader:
    """Makes a critic's inputs from nodes.

    Attributes:
        tokenizer: the critic's own.
        agent_tokenizers: one an agent.
        agent: the one agent that the critic serves; None: all of them.
        max_length: longest input, in tokens; None: no limit is known.
        inputs: how many were made; inputs_cut: how many of them were cut.
    """

    tokenizer: PreTrainedTokenizerBase
    agent_tokenizers: Sequence[PreTrainedTokenizerBase]
    agent: int | None = None
    max_length: int | None = None
    inputs: int = 0
    inputs_cut: int = 0
    _tags: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        own = self.tokenizer.get_vocab().items()
        self._keeps_ids = [t is self.tokenizer or t.get_vocab().items() <= own for t in self.agent_tokenizers]
        # the start token, where there is one; an agent's own ids have it already
        as_agent = self.agent is not None and self._keeps_ids[self.agent]
        self._start = () if as_agent else tuple(self.tokenizer("", **_QUIET)["input_ids"])
        self._closing = self._tag(CLOSING) if self.agent is None else ()
        room = len(self._start) + len(self._closing) + 1
        if self.max_length is not None and self.max_length < room:
            raise ConfigError(f"critic_max_length={self.max_length!r}: nothing could be read. Give {room} or more.")

    def state(self, node: Node) -> CriticInput:
        """What V reads: the history up to the prompts of a node."""
        return self._fitted(self._history(node))

    def action(self, node: Node, choice: Sequence[int]) -> CriticInput:
        """What Q reads: the history and a response, one generation index an agent (those of others are not read by the
        critic of one agent)."""
        if self.agent is not None:
            said = self._body(self.agent, node.responses[self.agent][choice[self.agent]].token_ids)
            return self._fitted([*self._history(node), _Role((), said)])
        return self._fitted([*self._history(node), *self._responses(node, choice)])

    def take_counts(self) -> tuple[int, int]:
        """(inputs that were cut, inputs) since the last call: sum and count of a metric."""
        counts = (self.inputs_cut, self.inputs)
        self.inputs = self.inputs_cut = 0
        return counts

    def _history(self, node: Node) -> list[_Role]:
        if self.agent is not None:
            return self._own_history(node)
        roles = []
        if node.parent is not None:
            choice = node.parent.joints[node.path[-1]]
            roles = [*self._history(node.parent), *self._responses(node.parent, choice)]
        for agent, prompt in enumerate(node.prompts):
            tag = self._tag(f"\n[turn {node.turn + 1}, agent_{agent}, prompt]\n")
            roles.append(_Role(tag, self._body(agent, prompt.token_ids[prompt.reused :])))
        return roles

    def _responses(self, node: Node, choice: Sequence[int]) -> list[_Role]:
        roles = []
        for agent, k in enumerate(choice):
            tag = self._tag(f"\n[turn {node.turn + 1}, agent_{agent}, response]\n")
            roles.append(_Role(tag, self._body(agent, node.responses[agent][k].token_ids)))
        return roles

    def _own_history(self, node: Node) -> list[_Role]:
        """The agent's prompt, in the segments that it shares with earlier turns."""
        prompt = node.prompts[self.agent]
        new = _Role((), self._body(self.agent, prompt.token_ids[prompt.reused :]))
        if not prompt.reused:
            return [new]
        k = node.parent.joints[node.path[-1]][self.agent]
        said = _Role((), self._body(self.agent, node.parent.responses[self.agent][k].token_ids))
        return [*self._own_history(node.parent), said, new]

    def _tag(self, text: str) -> tuple[int, ...]:
        if text not in self._tags:
            self._tags[text] = tuple(self.tokenizer(text, add_special_tokens=False, **_QUIET)["input_ids"])
        return self._tags[text]

    def _body(self, agent: int, token_ids: Sequence[int]) -> tuple[int, ...]:
        if not self._keeps_ids[agent]:
            text = self.agent_tokenizers[agent].decode(token_ids, skip_special_tokens=True)
            return tuple(self.tokenizer(text, add_special_tokens=False, **_QUIET)["input_ids"])
        start = len(self._start)
        begins = bool(start) and tuple(token_ids[:start]) == self._start  # the input has one start token, its own
        return tuple(token_ids[start:] if begins else token_ids)

    def _fitted(self, roles: list[_Role]) -> CriticInput:
        """The roles within the limit. The oldest loses its text from the left, then its tag, then comes the next."""
        length = len(self._start) + sum(len(role.tag) + len(role.body) for role in roles) + len(self._closing)
        excess = 0 if self.max_length is None else max(0, length - self.max_length)
        self.inputs += 1
        self.inputs_cut += excess > 0
        kept = []
        for place, role in enumerate(roles):
            if place == len(roles) - 1:
                kept.append((role.tag + role.body)[excess:])  # the last one keeps its end, whatever else goes
            elif excess and excess >= len(role.body):
                excess = max(0, excess - len(role.body) - len(role.tag))
            else:
                kept.append(role.tag + role.body[excess:])
                excess = 0
        kept[0] = self._start + kept[0]
        segments = tuple(segment for segment in (*kept, self._closing) if segment)
        if not segments:
            raise ValueError("a critic's input has no token: its tokenizer makes nothing of the text")
        return CriticInput(segments, length - sum(map(len, segments)))


def state_inputs(reader: CriticReader, trees: Sequence[RolloutTree]) -> list[CriticInput]:
    """The input of V at every node: [M]."""
    return [reader.state(node) for tree in trees for node in tree.nodes()]


def action_inputs(reader: CriticReader, trees: Sequence[RolloutTree]) -> list[CriticInput]:
    """The inputs of Q, node after node: its J joints, or the K responses of the agent that the critic serves."""
    return [
        reader.action(node, choice)
        for tree in trees
        for node in tree.nodes()
        for choice in _choices(node, reader.agent)
    ]


def counterfactual_inputs(reader: CriticReader, trees: Sequence[RolloutTree], agent: int) -> list[CriticInput]:
    """For aligned Q: [M, K, K] inputs flat, the partners' k-th responses with the agent's own k'-th."""
    inputs = []
    for tree in trees:
        for node in tree.nodes():
            own = range(len(node.responses[agent]))
            inputs += [
                reader.action(node, [other if a == agent else k for a in range(len(node.responses))])
                for k in own
                for other in own
            ]
    return inputs


def _choices(node: Node, agent: int | None) -> Sequence[Sequence[int]]:
    return node.joints if agent is None else [(k,) * len(node.responses) for k in range(len(node.responses[agent]))]


@dataclass
class CriticBatch:
    """A prefix tree with a mark after each of these inputs, in this order; `numbers` are their places in the list.

    One without numbers stands in: a rank runs it while others have more than it.
    """

    tree: PrefixTree
    numbers: list[int]


def critic_batches(inputs: Sequence[CriticInput], max_tokens: int) -> Iterator[CriticBatch]:
    """Packs inputs, in order, into trees of at most `max_tokens` tokens; one input alone may exceed that."""
    tree, numbers = PrefixTree(), []
    for number, given in enumerate(inputs):
        if numbers and tree.num_tokens + tree.cost([(segment, None) for segment in given.segments]) > max_tokens:
            yield CriticBatch(tree, numbers)
            tree, numbers = PrefixTree(), []
        parent = None
        for segment in given.segments:
            parent = tree.add(segment, parent)
        # A scored token that ends a branch is never run: what the tree keeps of it is the position just before.
        tree.add([0], parent, scored=True, key=("value", number))
        numbers.append(number)
    if numbers:
        yield CriticBatch(tree, numbers)


def rank_critic_batches(
    inputs: Sequence[CriticInput], group: Group, max_tokens: int, lockstep: bool
) -> list[CriticBatch]:
    """This rank's batches of inputs, which are spread over the group by their tokens.

    With `lockstep` every rank has equally many, filled up with stand-ins; else a rank may have none at all.
    """
    owners = spread([float(sum(map(len, given.segments))) for given in inputs], group.size)
    shares = {}
    for rank in range(group.size) if lockstep else [group.index]:
        own = [number for number, owner in enumerate(owners) if owner == rank]
        batches = critic_batches([inputs[number] for number in own], max_tokens)
        shares[rank] = [CriticBatch(b.tree, [own[number] for number in b.numbers]) for b in batches]
    missing = max(map(len, shares.values())) - len(shares[group.index])
    return shares[group.index] + [_stand_in() for _ in range(missing)]


def _stand_in() -> CriticBatch:
    tree = PrefixTree()
    tree.add_chain([([0], None), ([0], None)])
    return CriticBatch(tree, [])
