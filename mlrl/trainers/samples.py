"""From rollout trees to training samples, and from samples to micro-batches that share their prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mlrl.estimators.weights import sample_weight
from mlrl.models.prefix_tree import PrefixTree
from mlrl.rollout.tree import Node, Response, RolloutTree


@dataclass
class Sample:
    """One response of one agent, as its loss sees it.

    Attributes:
        weight: w of the objective (0 where the response is masked).
        old_logprobs: (L,) log-probabilities at the weights it was sampled with, where importance ratios need them.
        kl: its summed log-ratio to the reference policy, in nats, where there is one.
    """

    node: Node
    agent: int
    generation: int
    weight: float
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None
    kl: float | None = None

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


def _chain(node: Node, agent: int, generation: int) -> list[tuple[list[int], object]]:
    """Segments from the first prompt to a response: (tokens, key); a response is told apart by its identity."""
    response = node.responses[agent][generation]
    prompt = node.prompts[agent]
    own = [(prompt.token_ids[prompt.reused :], None), (response.token_ids, id(response))]
    if not prompt.reused:
        return own
    return _chain(node.parent, agent, node.parent.joints[node.path[-1]][agent]) + own
