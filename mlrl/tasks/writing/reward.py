"""The gated reward of the writing tasks, with all that it is made of: reward, logger and tests read one `Score`.

With the two texts a and b, characters c, whitespace tokens n, different words w and content words (no stop words) s:

    L1  n(a) and n(b) within `tokens`                    → 0.5
    L2  ρ = c(b)/c(a) within `length`                    → 1    inside the inner band, linear to 0 at the outer ends
    L3  u = w(b)/w(a) within `unique`                    → 0.5  likewise
    L4  0.4·T + 0.6·min(J, cap)/cap      J = |s(a) ∩ s(b)| / |s(a) ∪ s(b)|,  T = min(1, 0.4 + min(0.05(C − 1), 0.6))

C counts the transition categories that are seen, T is 0 for none. A level that fails (outside the outer band) stops:
the levels before it are kept, it and those after it give nothing. All 12 categories make T 0.95, the maximum 2.98.
"""

import math
from dataclasses import dataclass

from mlrl.tasks.writing.text_stats import content_words, jaccard, transition_categories, words


@dataclass(frozen=True)
class Band:
    """1 from `low` to `high`, linear to 0 at `outer_low` and `outer_high`, which belong to the band."""

    outer_low: float
    low: float
    high: float
    outer_high: float

    def __call__(self, value: float) -> float | None:
        """A number from 0 to 1; None outside."""
        if not self.outer_low <= value <= self.outer_high:
            return None
        if value < self.low:
            return (value - self.outer_low) / (self.low - self.outer_low)
        if value > self.high:
            return (self.outer_high - value) / (self.outer_high - self.high)
        return 1.0


@dataclass(frozen=True)
class Rule:
    """What a writing task asks of the two texts."""

    tokens: tuple[int, int]
    """Whitespace tokens of each text, least and most"""
    length: Band
    """Characters of the second text over those of the first"""
    unique: Band
    """Different words of the second text over those of the first"""
    jaccard_cap: float
    """Shared share of content words that counts as full"""
    transitions_in_both: bool
    """Transitions count in both texts together, or in the second only"""


TLDR = Rule((8, 256), Band(1.1, 1.6, 3.2, 5.0), Band(1.3, 2.0, math.inf, math.inf), 0.03, False)
ARXIV = Rule((128, 256), Band(0.8, 1.3, 1.6, 2.0), Band(0.5, 0.7, 1.3, 1.7), 0.23, True)


@dataclass(frozen=True)
class Score:
    """Everything that is known of two texts."""

    tokens: tuple[int, int]
    characters: tuple[int, int]
    unique_words: tuple[int, int]
    length_ratio: float
    unique_ratio: float
    jaccard: float
    transitions: int
    levels: tuple[float | None, float | None, float | None, float]
    """What each level gives by itself; None: failed"""

    @property
    def gated(self) -> tuple[float, float, float, float]:
        """What each level gives: nothing from the first failed one on."""
        passed = next((i for i, level in enumerate(self.levels) if level is None), 4)
        return tuple(level if i < passed else 0.0 for i, level in enumerate(self.levels))

    @property
    def total(self) -> float:
        """The reward."""
        return math.fsum(self.gated)

    @property
    def ungated_total(self) -> float:
        """The sum of all levels, failed ones as 0."""
        return math.fsum(level or 0.0 for level in self.levels)

    def metrics(self) -> dict[str, float]:
        """All numbers by name."""
        return {
            **{f"level_{i}": level for i, level in enumerate(self.gated, 1)},
            "gated_total": self.total,
            "ungated_total": self.ungated_total,
            **{f"tokens_{agent}": float(count) for agent, count in enumerate(self.tokens)},
            **{f"characters_{agent}": float(count) for agent, count in enumerate(self.characters)},
            **{f"unique_words_{agent}": float(count) for agent, count in enumerate(self.unique_words)},
            "length_ratio": self.length_ratio,
            "unique_ratio": self.unique_ratio,
            "jaccard": self.jaccard,
            "transition_categories": float(self.transitions),
        }


def score(first: str, second: str, rule: Rule) -> Score:
    """The two texts under a rule. Ratios over nothing are 0, and so fail."""
    texts = (first, second)
    tokens = tuple(len(text.split()) for text in texts)
    unique = tuple(len(set(words(text))) for text in texts)
    length_ratio = len(second) / len(first) if first else 0.0
    unique_ratio = unique[1] / unique[0] if unique[0] else 0.0
    shared = jaccard(content_words(first), content_words(second))
    transitions = len(transition_categories(f"{first}\n{second}" if rule.transitions_in_both else second))
    unique_share = rule.unique(unique_ratio)
    levels = (
        0.5 if all(rule.tokens[0] <= count <= rule.tokens[1] for count in tokens) else None,
        rule.length(length_ratio),
        None if unique_share is None else 0.5 * unique_share,
        0.4 * transition_score(transitions) + 0.6 * min(shared, rule.jaccard_cap) / rule.jaccard_cap,
    )
    return Score(tokens, tuple(map(len, texts)), unique, length_ratio, unique_ratio, shared, transitions, levels)


def transition_score(categories: int) -> float:
    """0 for none, 0.4 for one category, 0.05 more for each further one."""
    return min(1.0, 0.4 + min(0.05 * (categories - 1), 0.6)) if categories else 0.0
