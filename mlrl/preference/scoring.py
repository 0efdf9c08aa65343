"""From pairs to the margins of one agent: micro-batches of whole pairs whose prefixes are shared, and their scores.

A response that stands in several pairs of a micro-batch, or under one prompt on both sides, is run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlrl.losses.preference import pair_margins, winner_nll
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


def batch_margins(policy: Policy, batch: PairBatch, temperature: float) -> Tensor:
    """log π(winner) − log π(loser) of the agent for each pair of a micro-batch, in the order of its `places`.

    Call inside `policy.use()`, with its backward.
    """
    return batch_scores(policy, batch, temperature)[0]


def batch_scores(policy: Policy, batch: PairBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """The same, and −log π(winner) a token of each pair (see `winner_nll`)."""
    scored, lengths = policy.logprobs(batch.tree, temperature)
    logprobs_L = scored.logprobs_L
    device = logprobs_L.device
    numbers = [number for number, segment in enumerate(batch.tree.segments) if segment.scored]
    rank = {number: place for place, number in enumerate(numbers)}
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    ranks = [rank[number] for number, _, _ in batch.uses]
    tokens = [token for r in ranks for token in range(starts[r], starts[r + 1])]
    uses = (
        logprobs_L[torch.tensor(tokens, device=device)],
        torch.tensor([lengths[r] for r in ranks], device=device),
        torch.tensor([pair for _, pair, _ in batch.uses], device=device),
        torch.tensor([sign for _, _, sign in batch.uses], device=device),
        len(batch.places),
    )
    return pair_margins(*uses), winner_nll(*uses)


def _chains(trajectory: Trajectory, agent: int) -> list[Chain]:
    """For each turn the segments from the agent's first prompt to its response of that turn."""
    chains: list[Chain] = []
    for turn in trajectory.turns:
        prompt, response = turn.prompts[agent], turn.responses[agent]
        own = [(prompt.token_ids[prompt.reused :], None), (response.token_ids, None)]
        chains.append(own if not prompt.reused else chains[-1] + own)
    return chains
