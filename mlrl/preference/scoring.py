"""From pairs to the margins of one agent: micro-batches of whole pairs whose prefixes are shared, and their scores.

A response that stands in several pairs of a micro-batch, or under one prompt on both sides, is run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlrl.losses.preference import pair_margins
from mlrl.models.base import Policy
from mlrl.models.prefix_tree import PrefixTree
from mlrl.preference.pairs import PreferencePair, Trajectory

Chain = list[tuple[list[int], None]]


@dataclass
class PairBatch:
    """Whole pairs as one agent scores them.

    Attributes:
        places: which of the pairs given to `pair_batches` these are, in order.
        uses: (scored segment, pair of this batch, +1 for winner or −1 for loser), a use each.
    """

    tree: PrefixTree = field(default_factory=PrefixTree)
    places: list[int] = field(default_factory=list)
    uses: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, place: int, chains: Sequence[tuple[int, Chain]]) -> None:
        """Adds a pair: its chains, each with its sign."""
        for sign, chain in chains:
            self.uses.append((self.tree.add_chain(chain), len(self.places), sign))
        self.places.append(place)


def pair_batches(pairs: Sequence[PreferencePair], agent: int, max_tokens: int) -> Iterator[PairBatch]:
    """Packs pairs, those of one item together, into micro-batches of at most `max_tokens` tokens.

    One pair alone may exceed that. Every pair is in exactly one of them.
    """
    batch = PairBatch()
    for place in sorted(range(len(pairs)), key=lambda place: pairs[place].item_key):
        pair = pairs[place]
        chains = [(1, c) for c in _chains(pair.winner, agent)] + [(-1, c) for c in _chains(pair.loser, agent)]
        cost = sum(batch.tree.cost(chain) for _, chain in chains)
        if batch.places and batch.tree.num_tokens + cost > max_tokens:
            yield batch
            batch = PairBatch()
        batch.add(place, chains)
    if batch.places:
        yield batch


def batch_logprobs(policy: Policy, batch: PairBatch, temperature: float) -> tuple[Tensor, list[int]]:
    """log π of the scored tokens of a micro-batch, segment after segment, and the tokens a segment.

    Call inside `policy.use()`; under `torch.no_grad()` for the reference and for the partners' margins.
    """
    scored, lengths = policy.logprobs(batch.tree, temperature)
    return scored.logprobs_L, lengths


def batch_margins(
    batch: PairBatch, logprobs_L: Tensor, lengths: Sequence[int], reference_logprobs_L: Tensor | None = None
) -> Tensor:
    """Δ of the agent for each pair of a micro-batch, in the order of its `places`."""
    scored = [number for number, segment in enumerate(batch.tree.segments) if segment.scored]
    order = {number: place for place, number in enumerate(scored)}
    segments = [order[number] for number, _, _ in batch.uses]
    device = logprobs_L.device
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens = [token for segment in segments for token in range(starts[segment], starts[segment + 1])]
    tokens_T = torch.tensor(tokens, device=device)
    return pair_margins(
        logprobs_L[tokens_T],
        torch.tensor([lengths[segment] for segment in segments], device=device),
        torch.tensor([pair for _, pair, _ in batch.uses], device=device),
        torch.tensor([sign for _, _, sign in batch.uses], device=device),
        len(batch.places),
        None if reference_logprobs_L is None else reference_logprobs_L[tokens_T],
    )


def _chains(trajectory: Trajectory, agent: int) -> list[Chain]:
    """For each turn the segments from the agent's first prompt to its response of that turn."""
    chains: list[Chain] = []
    for turn in trajectory.turns:
        prompt, response = turn.prompts[agent], turn.responses[agent]
        own = [(prompt.token_ids[prompt.reused :], None), (response.token_ids, None)]
        chains.append(own if not prompt.reused else chains[-1] + own)
    return chains
