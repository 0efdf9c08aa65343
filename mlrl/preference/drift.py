"""How rewards and pairs change from round to round, as numbers and as histograms."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from mlrl.preference.collection import Collected
from mlrl.preference.pairs import PreferencePair, Trajectory

NUM_BINS = 20


def collection_metrics(
    collected: Collected, previous_rewards: Sequence[float], earlier_pairs: Collection[str]
) -> dict[str, float]:
    """All metrics of one collection; see `drift_metrics` for the arguments."""
    pairs, theirs = collected.pairs, collected.comparator_rewards
    metrics = {
        "preference/num_pairs": len(pairs),
        "preference/lost_candidates": collected.num_lost,
        "time/rollout_s": collected.cost.rollout_s,
        "time/reward_s": collected.cost.reward_s,
    }
    if pairs:
        metrics["preference/gap_mean"] = float(np.mean([pair.gap for pair in pairs]))
    if theirs:
        metrics["preference/comparator_reward_mean"] = float(np.mean(theirs))
    return metrics | drift_metrics(collected.policy_rewards, previous_rewards, pairs, earlier_pairs)


def drift_metrics(
    rewards: Sequence[float],
    previous_rewards: Sequence[float],
    pairs: Sequence[PreferencePair],
    earlier_pairs: Collection[str] = (),
) -> dict[str, float]:
    """The metrics `preference/drift/…` of one round.

    Args:
        rewards: of the policy's candidates. previous_rewards: those of the round before; empty in the first.
        earlier_pairs: `pair_digest` of the pairs of all earlier rounds.
    """
    metrics = {}
    if len(rewards):
        metrics["preference/drift/reward_mean"] = float(np.mean(rewards))
        metrics["preference/drift/reward_std"] = float(np.std(rewards))
    if len(rewards) and len(previous_rewards):
        metrics["preference/drift/ks_distance"] = ks_distance(rewards, previous_rewards)
    if pairs:
        repeated = sum(pair_digest(pair) in earlier_pairs for pair in pairs)
        metrics["preference/drift/repeated_pairs_fraction"] = repeated / len(pairs)
    return metrics


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest difference of two empirical distribution functions (Kolmogorov–Smirnov): 0 for the same, 1 for apart."""
    points = np.sort(np.concatenate([first, second]))
    shares = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())


def pair_digest(pair: PreferencePair) -> str:
    """Names a pair by its item and the tokens of both sides."""
    sides = [_tokens(pair.winner), _tokens(pair.loser)]
    return hashlib.blake2b(repr((pair.item_key, sides)).encode(), digest_size=12).hexdigest()


def reward_histograms(rewards_by_name: dict[str, Sequence[float]]) -> dict[str, list]:
    """Counts of each set of rewards over the same bins: {"bin_edges": [21], name: [20] …}; {} without any reward."""
    known = [reward for rewards in rewards_by_name.values() for reward in rewards]
    if not known:
        return {}
    edges = np.histogram_bin_edges(known, bins=NUM_BINS)
    counts = {name: np.histogram(rewards, bins=edges)[0].tolist() for name, rewards in rewards_by_name.items()}
    return {"bin_edges": edges.tolist(), **counts}


def _tokens(trajectory: Trajectory) -> list:
    return [[response.token_ids for response in turn.responses] for turn in trajectory.turns]
