"""From rollout trees to training samples, and from samples to micro-batches that share their prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mlrl.estimators.weights import sample_weight
from mlrl.models.prefix_tree import PrefixTree
from mlrl.parallel.group import Group, spread
from mlrl.rollout.tree import Node, Response, RolloutTree


@dataclass
class Sample:
    """One response of one agent, as its loss sees it.

    Attributes:
        weight: w of the objective (0 where the response is masked).
        old_logprobs: (L,) log-probabilities at the weights it was sampled with, where importance ratios need them; of a
            response that a server drew, at the trainer's weights before the update.
        token_weights: (L,) fixed weight of each token where a server drew it (`mlrl.estimators.mismatch`).
        kl: its summed log-ratio to the reference policy, in nats, where there is one.
    """

    node: Node
    agent: int
    generation: int
    weight: float
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None
    kl: float | None = None
    token_weights: torch.Tensor | None = None

    @property
    def response(self) -> Response:
        return self.node.responses[self.agent][self.generation]

    @property
    def length(self) -> int:
        return len(self.response.token_ids)


def make_samples(
    trees: Sequence[RolloutTree], agent: int, *, discount: float, turn_weighting: str, mask_truncated: bool
) -> list[Sample]:
    """Every response of an agent, once each, with the weight of the objective."""
    nodes = [node for tree in trees for node in tree.nodes()]
    samples = []
    for node in nodes:
        responses = node.responses[agent]
        weight = sample_weight(
            node.turn,
            num_items=len(trees),
            num_joints=len(node.joints),
            num_generations=len(responses),
            discount=discount,
            turn_weighting=turn_weighting,
            num_nodes=len(nodes),
        )
        for k, response in enumerate(responses):
            samples.append(Sample(node, agent, k, 0.0 if mask_truncated and response.truncated else weight))
    return samples


@dataclass
class MicroBatch:
    """A prefix tree whose scored segments are, in this order, these samples."""

    tree: PrefixTree
    samples: list[Sample]


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[MicroBatch]:
    """Packs samples, in order, into trees of at most `max_tokens` tokens; one sample alone may exceed that.

    Samples of one node follow one another, so they share their prompt; in deeper trees whole levels are shared.
    """
    tree, scored = PrefixTree(), {}
    for sample in sorted(samples, key=lambda s: s.agent):  # agents that share parameters do not share prompts
        chain = _chain(sample.node, sample.agent, sample.generation)
        if scored and tree.num_tokens + tree.cost(chain) > max_tokens:
            yield MicroBatch(tree, [scored[number] for number in sorted(scored)])
            tree, scored = PrefixTree(), {}
        scored[tree.add_chain(chain)] = sample
    if scored:
        yield MicroBatch(tree, [scored[number] for number in sorted(scored)])


def rank_micro_batches(
    samples: Sequence[Sequence[Sample]], group: Group, max_tokens: int, lockstep: bool
) -> list[list[MicroBatch | None]]:
    """This rank's micro-batches of each list of samples, which are spread over the group by their tokens.

    With `lockstep` every rank has equally many of each list, filled up with None; else a rank may have none at all.
    """
    result = []
    for own in samples:
        owners = spread([_tokens(sample) for sample in own], group.size)
        ranks = range(group.size) if lockstep else [group.index]
        shares = {
            rank: list(micro_batches([s for s, owner in zip(own, owners, strict=True) if owner == rank], max_tokens))
            for rank in ranks
        }
        mine = shares[group.index]
        most = max(len(share) for share in shares.values())
        result.append([*mine, *[None] * (most - len(mine))])
    return result


def stand_in() -> PrefixTree:
    """The smallest tree with a scored token: what a rank runs while others have more micro-batches than it."""
    tree = PrefixTree()
    tree.add_chain([([0], None), ([0], None)])
    return tree


def _tokens(sample: Sample) -> float:
    """Tokens that a sample adds to a forward, its prompt shared among its siblings."""
    prompt = sample.node.prompts[sample.agent]
    return sample.length + (len(prompt.token_ids) - prompt.reused) / len(sample.node.responses[sample.agent])


def _chain(node: Node, agent: int, generation: int) -> list[tuple[list[int], object]]:
    """Segments from the first prompt to a response: (tokens, key); a response is told apart by its identity."""
    response = node.responses[agent][generation]
    prompt = node.prompts[agent]
    own = [(prompt.token_ids[prompt.reused :], None), (response.token_ids, id(response))]
    if not prompt.reused:
        return own
    return _chain(node.parent, agent, node.parent.joints[node.path[-1]][agent]) + own
