"""The two rewards of the tool tasks with all that they are made of; reward, metrics and tests read one `Score`.

Calls of N agents against g gold calls. Exact repetitions are merged: within an agent (n_i calls are left), over the
team (p are left, in the order of the agents) and in the gold list.

    unordered (bfcl)            .05 parse + .25 functions + .35 arguments + .10 count + .15 balance + .20 exact
                                − .20 overlap − .15 lazy − .05 extra − .05 repeated                    at most 1.10
    ordered (bfcl_multiturn)    .05 parse + .15 functions + .20 arguments + .25 order + .10 prefix + .10 count
                                + .15 balance + .20 exact
                                − .15 overlap − .25 lazy − .15 extra − .05 repeated                    at most 1.20

Both are clamped to [−0.4, 1.2]. With s(c, q) the similarity of a call and a gold call (`mlrl.tasks.tool_use.calls`):

    parse      share of agents whose answer could be read
    functions  F1 of the two multisets of function names
    arguments  Σ s / g over pairs that are matched greedily, the most similar first
    order      the largest Σ s / g over pairs that keep both orders
    prefix     calls from the start that are right, one by one / g
    count      max(0, 1 − |p − g| / g)
    balance    1 − (Σ_i |n_i − g/N| − m) / g within [0, 1], m the least that N whole numbers with the sum g can have; 0
               without any call
    exact      1 where the calls are the gold calls (ordered: in their order), else 0
    overlap    share of the p calls that more than one agent made
    lazy       1 where more agents made no call than have to (N − g where that is above 0), else 0
    extra      min(1, max(0, p − g) / g)
    repeated   share of all written calls that repeat one of the same agent
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from mlrl.tasks.tool_use.calls import Call, GoldCall, similarity

LOWEST, HIGHEST = -0.4, 1.2

UNORDERED = {
    "parse": 0.05,
    "functions": 0.25,
    "arguments": 0.35,
    "count": 0.10,
    "balance": 0.15,
    "exact": 0.20,
    "overlap": -0.20,
    "lazy": -0.15,
    "extra": -0.05,
    "repeated": -0.05,
}
ORDERED = {
    "parse": 0.05,
    "functions": 0.15,
    "arguments": 0.20,
    "order": 0.25,
    "prefix": 0.10,
    "count": 0.10,
    "balance": 0.15,
    "exact": 0.20,
    "overlap": -0.15,
    "lazy": -0.25,
    "extra": -0.15,
    "repeated": -0.05,
}


@dataclass(frozen=True)
class Score:
    """The terms of the rewards, each between 0 and 1."""

    parse: float
    functions: float
    arguments: float
    order: float
    prefix: float
    count: float
    balance: float
    exact: float
    overlap: float
    lazy: float
    extra: float
    repeated: float
    ordered: bool

    @property
    def total(self) -> float:
        """The reward."""
        weights = ORDERED if self.ordered else UNORDERED
        value = math.fsum(weight * getattr(self, name) for name, weight in weights.items())
        return min(HIGHEST, max(LOWEST, value))

    def metrics(self) -> dict[str, float]:
        """All numbers by name."""
        names = {"functions": "f1", "arguments": "argument_match", "exact": "exact_match"}
        terms = [field.name for field in fields(self) if field.name != "ordered"]
        return {names.get(name, name): float(getattr(self, name)) for name in terms} | {"reward": self.total}


def score(by_agent: Sequence[list[Call] | None], gold: Sequence[GoldCall], ordered: bool) -> Score:
    """Scores what each agent called (None: an answer that could not be read) against the gold calls, of which there is
    at least one and each only once."""
    written = [calls or [] for calls in by_agent]
    own = [_merged(calls) for calls in written]
    team = _merged([call for calls in own for call in calls])
    g, p = len(gold), len(team)
    table = [[similarity(call, right) for right in gold] for call in team]
    if ordered:
        exact = p == g and all(table[i][i] == 1.0 for i in range(g))
    else:
        exact = p == g and _can_pair_all(table)
    makers = Counter(call.text for calls in own for call in calls)
    idle = sum(not calls for calls in own)
    repeated = sum(map(len, written)) - sum(map(len, own))
    return Score(
        parse=sum(calls is not None for calls in by_agent) / len(by_agent),
        functions=_f1(Counter(call.name for call in team), Counter(right.name for right in gold)),
        arguments=1.0 if exact else _greedy(table) / g,
        order=_in_order(table, g) / g,
        prefix=_prefix(table, g) / g,
        count=max(0.0, 1.0 - abs(p - g) / g),
        balance=_balance([len(calls) for calls in own], g),
        exact=float(exact),
        overlap=sum(count > 1 for count in makers.values()) / p if p else 0.0,
        lazy=float(idle > max(0, len(own) - g)),
        extra=min(1.0, max(0, p - g) / g),
        repeated=repeated / sum(map(len, written)) if repeated else 0.0,
        ordered=ordered,
    )


def _merged(calls: Sequence[Call]) -> list[Call]:
    """Each call once, where it stands first."""
    return list({call.text: call for call in reversed(calls)}.values())[::-1]


def _f1(first: Counter, second: Counter) -> float:
    size = first.total() + second.total()
    return 2 * (first & second).total() / size if size else 0.0


def _greedy(table: Sequence[Sequence[float]]) -> float:
    """The sum over pairs, the most similar first, earlier calls before later ones."""
    pairs = sorted(((-s, i, j) for i, row in enumerate(table) for j, s in enumerate(row) if s > 0))
    used_calls, used_gold, total = set(), set(), 0.0
    for negative, i, j in pairs:
        if i not in used_calls and j not in used_gold:
            used_calls.add(i)
            used_gold.add(j)
            total -= negative
    return total


def _can_pair_all(table: Sequence[Sequence[float]]) -> bool:
    """Whether every call can have a gold call of its own that it equals (augmenting paths)."""
    partner: dict[int, int] = {}

    def find(call: int, tried: set[int]) -> bool:
        for j, value in enumerate(table[call]):
            if value == 1.0 and j not in tried:
                tried.add(j)
                if j not in partner or find(partner[j], tried):
                    partner[j] = call
                    return True
        return False

    return all(find(call, set()) for call in range(len(table)))


def _in_order(table: Sequence[Sequence[float]], g: int) -> float:
    """The largest sum over pairs of which no two cross (dynamic programming over both orders)."""
    best = [0.0] * (g + 1)
    for row in table:
        before = best
        best = [0.0] * (g + 1)
        for j, value in enumerate(row, 1):
            best[j] = max(before[j], best[j - 1], before[j - 1] + value)
    return best[g]


def _prefix(table: Sequence[Sequence[float]], g: int) -> int:
    for i in range(min(len(table), g)):
        if table[i][i] < 1.0:
            return i
    return min(len(table), g)


def _balance(counts: Sequence[int], g: int) -> float:
    if not any(counts):
        return 0.0
    n = len(counts)
    rest = g % n
    least = 2 * rest * (n - rest)  # rest agents with one call more than the others; all times n, to stay whole
    spread = sum(abs(n * count - g) for count in counts)
    return min(1.0, max(0.0, 1.0 - (spread - least) / (n * g)))
