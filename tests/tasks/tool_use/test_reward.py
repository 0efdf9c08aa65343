import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlrl.tasks.tool_use.calls import GoldCall, read_calls
from mlrl.tasks.tool_use.reward import HIGHEST, LOWEST, score
from tests.texts import HOSTILE, THOUSAND, pairs, pieces

GOLD = [GoldCall("f", {"x": [1]}), GoldCall("f", {"x": [2]}), GoldCall("g", {"y": ["a"], "z": ["b"]})]
FOUR = [GoldCall("f", {"x": [i]}) for i in range(4)]


def scored(*answers, gold=GOLD, ordered=False):
    return score([read_calls(answer) for answer in answers], gold, ordered)


def test_the_gold_calls_reach_the_maximum():
    # .05 + .25 + .35 + .10 + .15 + .20 = 1.10; .05 + .15 + .20 + .25 + .10 + .10 + .15 + .20 = 1.20
    answers = ("f(x=1)\nf(x=2)", "g(y='a', z='b')")
    assert scored(*answers).total == pytest.approx(1.10)
    assert scored(*answers, ordered=True).total == pytest.approx(1.20)
    assert scored(*answers[::-1]).total == pytest.approx(1.10)
    # The same calls in the order g, f, f. functions and arguments 1; order: the two f in their order, 2/3; prefix 0;
    # exact 0: .05 + .15 + .20 + .25·2/3 + .10 + .15
    assert scored(*answers[::-1], ordered=True).total == pytest.approx(0.65 + 0.25 * 2 / 3)


@pytest.mark.parametrize(
    ("counts", "g", "value"),
    [
        ((2, 2), 4, 1.0),
        ((3, 1), 4, 0.5),  # |3 − 2| + |1 − 2| = 2 of 4
        ((4, 0), 4, 0.0),
        ((2, 1), 3, 1.0),  # |2 − 1.5| + |1 − 1.5| = 1, and no split is below 1
        ((3, 0), 3, 1 / 3),  # 3 − 1 = 2 of 3
        ((1, 0), 1, 1.0),
        ((1, 1), 1, 1.0),  # |.5| + |.5| = 1 as well; that there is a call too many, count and extra say
        ((2, 2), 1, 0.0),  # 3 − 1 = 2 of 1, clamped
        ((0, 0), 1, 0.0),  # no call is no balance
        ((1, 1, 2), 4, 1.0),  # 2·1·2/3 = 4/3 is the least of three agents
        ((4, 0, 0), 4, 0.0),  # 8/3 + 4/3 + 4/3 − 4/3 = 4 of 4
        ((3,), 3, 1.0),
    ],
)
def test_balance(counts, g, value):
    answers, start = [], 0
    for count in counts:
        answers.append("\n".join(f"f(x={i})" for i in range(start, start + count)) or "[]")
        start += count
    gold = [GoldCall("f", {"x": [i]}) for i in range(g)]
    assert scored(*answers, gold=gold).balance == pytest.approx(value)


@pytest.mark.parametrize(
    ("answers", "gold", "lazy"),
    [
        (("f(x=0)\nf(x=1)", "[]"), FOUR, 1),
        (("f(x=0)", "[]"), FOUR[:1], 0),  # one call for two agents: one has to idle
        (("[]", "[]"), FOUR[:1], 1),  # but not both
        (("f(x=0)", "no call"), FOUR, 1),
        (("f(x=0)", "f(x=1)", "[]"), FOUR[:2], 0),
        (("f(x=0)\nf(x=1)", "[]", "[]"), FOUR[:2], 1),
        (("f(x=0)",), FOUR, 0),
    ],
)
def test_lazy(answers, gold, lazy):
    assert scored(*answers, gold=gold).lazy == lazy


def test_an_unordered_score_by_hand():
    # Agent 0: f(1), f(1) again, h(); agent 1: f(1), g(y right, z wrong).
    found = scored("f(x=1)\nf(x=1)\nh()", "f(x=1)\ng(y='a', z='c')")
    # Merged: f(1), h(), g: p = 3 of g = 3. Names {f, h, g} against {f, f, g}: 2·2/6.
    assert found.functions == pytest.approx(2 / 3)
    assert found.arguments == pytest.approx((1 + 0.5) / 3)  # f(1) fully, g half
    assert (found.parse, found.count, found.exact, found.extra, found.lazy) == (1, 1, 0, 0, 0)
    assert found.overlap == pytest.approx(1 / 3)  # f(1) of three calls
    assert found.repeated == pytest.approx(1 / 5)  # one of five written calls
    assert found.balance == pytest.approx(1.0)  # n = 2, 2: |2 − 1.5|·2 = 1, the least
    # .05 + .25·2/3 + .35·.5 + .10 + .15 − .20/3 − .05/5
    assert found.total == pytest.approx(0.05 + 0.5 / 3 + 0.175 + 0.1 + 0.15 - 0.2 / 3 - 0.01)


def test_an_ordered_score_by_hand():
    # Agent 0: f(1), g half right; agent 1: f(2), f(9). Team: f(1), g, f(2), f(9) against f(1), f(2), g.
    found = scored("f(x=1)\ng(y='a')", "f(x=2)\nf(x=9)", ordered=True)
    assert found.functions == pytest.approx(2 * 3 / 7)
    assert found.arguments == pytest.approx((1 + 1 + 0.5) / 3)
    assert found.order == pytest.approx(2 / 3)  # f(1), f(2) in order 2; f(1), g 1.5
    assert found.prefix == pytest.approx(1 / 3)
    assert found.count == pytest.approx(2 / 3)
    assert found.extra == pytest.approx(1 / 3)
    assert found.balance == pytest.approx(1.0)
    value = 0.05 + 0.15 * 6 / 7 + 0.20 * 2.5 / 3 + 0.25 * 2 / 3 + 0.10 / 3 + 0.10 * 2 / 3 + 0.15 - 0.15 / 3
    assert found.total == pytest.approx(value)


def test_nothing_that_can_be_read():
    found = scored("no", "calls")
    assert found.total == pytest.approx(-0.15)  # lazy alone
    assert scored("no", "calls", ordered=True).total == pytest.approx(-0.25)
    assert scored("[]", "[]").total == pytest.approx(0.05 - 0.15)


def test_a_flood_of_wrong_calls():
    # parse .05; count 0 (|20 − 1| of 1), balance 0, extra 1, overlap 1 − .20, repeated 0
    flood = "\n".join(f"h(x={i})" for i in range(20))
    assert scored(flood, flood, gold=GOLD[:1]).total == pytest.approx(0.05 - 0.20 - 0.05)
    # ordered, and every call written five times: − .15 overlap − .15 extra − .05·(4/5) repeated
    assert scored(f"{flood}\n" * 5, f"{flood}\n" * 5, gold=GOLD[:1], ordered=True).total == pytest.approx(
        0.05 - 0.15 - 0.15 - 0.04
    )


def test_greedy_pairs_do_not_hide_an_exact_answer():
    # Taken greedily, f(1) could go to the second gold call, which leaves none for the first.
    gold = [GoldCall("f", {"x": [1, 2]}), GoldCall("f", {"x": [1]})]
    found = scored("f(x=1)", "f(x=2)", gold=gold)
    assert (found.exact, found.arguments) == (1.0, 1.0)
    assert scored("f(x=2)", "f(x=1)", gold=gold, ordered=True).exact == 1.0
    assert scored("f(x=1)", "f(x=2)", gold=gold, ordered=True).exact == 0.0  # f(2) is not the second


def best_in_order(table, i=0, j=0):
    """The same by trying all pairs."""
    if i == len(table) or j == len(table[0]):
        return 0.0
    options = (best_in_order(table, i + 1, j), best_in_order(table, i, j + 1))
    return max(*options, table[i][j] + best_in_order(table, i + 1, j + 1))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), max_size=4))
def test_order_is_the_best_of_all_alignments(table):
    from mlrl.tasks.tool_use.reward import _in_order

    assert _in_order(table, 3) == pytest.approx(best_in_order(table))


ANSWER = HOSTILE | pieces(
    "f(x=1)\n", "f(x=2)\n", "g(y='a', z='b')\n", "g(y='a')\n", "h()\n", "[]", "f(", "```\n", most=12
)


@THOUSAND
@given(pairs(ANSWER), st.booleans())
def test_any_answers_are_rewarded_within_the_range(drawn, ordered):
    for first, second in drawn:
        found = scored(first, second, ordered=ordered)
        assert LOWEST <= found.total <= (HIGHEST if ordered else 1.10) + 1e-9
        metrics = found.metrics()
        assert all(0.0 <= value <= 1.0 for name, value in metrics.items() if name != "reward")
        if not ordered:
            assert scored(second, first).total == pytest.approx(found.total)  # agents are alike
