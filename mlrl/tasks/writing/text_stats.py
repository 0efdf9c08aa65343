"""Counts of words: what the rewards of the writing tasks and their metrics are made of."""

import re
from collections.abc import Set

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")

_STOP_WORDS = """
a about above after again against all also am an and any are as at be because been before being below between
both but by can could did do does doing down during each few for from further had has have having he her here
hers him his how i if in into is it its itself just may me might more most must my no nor not now of off on once
only or other our ours out over own same shall she should so some such than that the their theirs them then
there these they this those through to too under until up us very was we were what when where which while who
whom why will with would you your yours
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

TRANSITIONS: dict[str, tuple[str, ...]] = {
    "elaboration": ("in addition", "furthermore", "moreover", "additionally", "besides"),
    "examples": ("for example", "for instance", "such as", "to illustrate"),
    "explanation": ("in other words", "that is to say", "namely", "to clarify"),
    "cause": ("because", "therefore", "as a result", "consequently", "thus", "hence"),
    "contrast": ("however", "on the other hand", "in contrast", "whereas", "conversely"),
    "sequence": ("first", "second", "next", "then", "finally", "subsequently"),
    "emphasis": ("indeed", "in fact", "above all", "notably", "especially"),
    "summary": ("in summary", "in conclusion", "to sum up", "overall", "in short"),
    "comparison": ("similarly", "likewise", "in the same way", "compared to"),
    "concession": ("although", "even though", "despite", "nevertheless", "nonetheless"),
    "condition": ("provided that", "unless", "as long as", "in case", "otherwise"),
    "time": ("meanwhile", "afterwards", "before", "after", "during", "while"),
}
"""Twelve categories of transitions and the pieces of lower-case text that show one."""


def words(text: str) -> list[str]:
    """Lower-case words: runs of letters and digits, apostrophes inside kept."""
    return _WORD.findall(text.lower())


def content_words(text: str) -> set[str]:
    """The words that are no stop words."""
    return set(words(text)) - STOP_WORDS


def jaccard(first: Set[str], second: Set[str]) -> float:
    """Shared over all elements; 0 where both sets are empty."""
    union = len(first | second)
    return len(first & second) / union if union else 0.0


def transition_categories(text: str) -> set[str]:
    """The categories of `TRANSITIONS` with a piece that stands anywhere in the lower-case text."""
    lower = text.lower()
    return {name for name, pieces in TRANSITIONS.items() if any(piece in lower for piece in pieces)}
