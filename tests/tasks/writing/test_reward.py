import math

import pytest
from hypothesis import given

from mlrl.tasks.writing.reward import ARXIV, TLDR, score, transition_score
from mlrl.tasks.writing.text_stats import STOP_WORDS, TRANSITIONS, content_words, jaccard, transition_categories, words
from tests.texts import HOSTILE, THOUSAND, pairs, pieces

ALL_TRANSITIONS = " ".join(texts[0] for texts in TRANSITIONS.values())


def numbered(count, start=0):
    """So many different words."""
    return " ".join(f"w{i}" for i in range(start, start + count))


@pytest.mark.parametrize("rule", [TLDR, ARXIV])
def test_level_1_counts_whitespace_tokens_of_both(rule):
    least, most = rule.tokens
    for first, second, level in [
        (least, most, 0.5),
        (most, least, 0.5),
        (least - 1, most, None),
        (least, most + 1, None),
        (0, 0, None),
    ]:
        assert score("a " * first, "b, " * second, rule).levels[0] == level
    assert (TLDR.tokens, ARXIV.tokens) == ((8, 256), (128, 256))


@pytest.mark.parametrize(
    ("rule", "characters", "level"),
    [
        (TLDR, 109, None),
        (TLDR, 110, 0.0),  # ρ 1.1 belongs to the band
        (TLDR, 135, 0.5),  # (1.35 − 1.1)/0.5
        (TLDR, 160, 1.0),
        (TLDR, 320, 1.0),
        (TLDR, 410, 0.5),  # 1 − (4.1 − 3.2)/1.8
        (TLDR, 500, 0.0),
        (TLDR, 501, None),
        (ARXIV, 79, None),
        (ARXIV, 80, 0.0),
        (ARXIV, 105, 0.5),  # (1.05 − 0.8)/0.5
        (ARXIV, 130, 1.0),
        (ARXIV, 160, 1.0),
        (ARXIV, 190, 0.25),  # (2.0 − 1.9)/0.4
        (ARXIV, 200, 0.0),
        (ARXIV, 201, None),
    ],
)
def test_level_2_is_the_ratio_of_characters(rule, characters, level):
    found = score("é" * 100, "y" * characters, rule).levels[1]
    assert found == (None if level is None else pytest.approx(level, abs=1e-9))


@pytest.mark.parametrize(
    ("rule", "count", "level"),
    [
        (TLDR, 12, None),
        (TLDR, 13, 0.0),
        (TLDR, 16, 0.5 * 0.3 / 0.7),
        (TLDR, 20, 0.5),
        (TLDR, 900, 0.5),  # no upper end
        (ARXIV, 4, None),
        (ARXIV, 5, 0.0),
        (ARXIV, 6, 0.25),  # 0.5·(0.6 − 0.5)/0.2
        (ARXIV, 7, 0.5),
        (ARXIV, 13, 0.5),
        (ARXIV, 15, 0.25),  # 0.5·(1.7 − 1.5)/0.4
        (ARXIV, 17, 0.0),
        (ARXIV, 18, None),
    ],
)
def test_level_3_is_the_ratio_of_different_words(rule, count, level):
    found = score(f"{numbered(10)} w0 w1", numbered(count), rule)
    assert found.unique_words == (10, count)
    assert found.levels[2] == (None if level is None else pytest.approx(level, abs=1e-9))


def test_stop_words_count_as_different_words():
    assert score("the of and to", "the of and to", ARXIV).unique_words == (4, 4)


@pytest.mark.parametrize(
    ("categories", "value"), [(0, 0.0), (1, 0.4), (2, 0.45), (11, 0.9), (12, 0.95), (13, 1.0), (40, 1.0)]
)
def test_transition_score(categories, value):
    assert transition_score(categories) == pytest.approx(value)


@pytest.mark.parametrize(
    ("rule", "first", "second", "level"),
    [
        (TLDR, "boat", "harbour", 0.0),
        (TLDR, "boat", "boat harbour, however", 0.4 * 0.4 + 0.6),  # J 1/3 is above the cap
        (TLDR, "boat, however", "boat harbour", 0.6),  # transitions of the second text only
        (ARXIV, "boat, however", "boat harbour", 0.4 * 0.4 + 0.6),  # of both; J 1/3 is above 0.23 too
        (TLDR, numbered(50), numbered(51, 49), 0.6 * 0.01 / 0.03),  # one of 100 words is shared
        (ARXIV, numbered(55), numbered(55, 45), 0.6 * 0.1 / 0.23),  # ten of 100
        (TLDR, "the of", "the of", 0.0),  # stop words do not count as shared
    ],
)
def test_level_4_is_transitions_and_shared_words(rule, first, second, level):
    assert score(first, second, rule).levels[3] == pytest.approx(level)


def test_each_category_is_seen_by_each_of_its_texts():
    assert len(TRANSITIONS) == 12
    for name, texts in TRANSITIONS.items():
        for text in texts:
            assert name in transition_categories(f"It is so. {text.upper()}, it is.")
    assert transition_categories("A plain line of text.") == set()


def test_words_are_lower_case_runs_of_letters_and_digits():
    assert words("Don't stop! 3 cafés, snake_case — Ünder.") == [
        "don't",
        "stop",
        "3",
        "cafés",
        "snake",
        "case",
        "ünder",
    ]
    assert content_words("The cat and THE hat") == {"cat", "hat"}
    assert "the" in STOP_WORDS
    assert jaccard(set(), set()) == 0.0
    assert jaccard({"a", "b"}, {"b", "c"}) == 1 / 3


@pytest.mark.parametrize(
    ("first", "second", "gated"),
    [
        ("a", "b", (0, 0, 0, 0)),  # too short
        ("a " * 10, "b " * 10, (0.5, 0, 0, 0)),  # 20 characters each: ρ 1
        ("a " * 10, "b " * 20, (0.5, 1, 0, 0)),  # ρ 2, u 1
        # 29 characters of ten words, 59 of twenty (ρ 2.03, u 2); no word shared, no transition
        (numbered(10), numbered(20, 70), (0.5, 1, 0.5, 0)),
        # u 2; one word of 29 is shared, 1/29 is above 0.03: 0.6
        (numbered(10), numbered(20, 9), (0.5, 1, 0.5, 0.6)),
    ],
)
def test_a_failed_level_stops_tldr(first, second, gated):
    found = score(first, second, TLDR)
    assert found.gated == pytest.approx(gated)
    assert found.total == pytest.approx(sum(gated))


def test_what_stands_behind_a_failed_level_is_in_the_ungated_total():
    found = score("boat " * 10, "boat, however " * 5, TLDR)  # 50 characters against 70: ρ 1.4 → 0.6; u 2 → 0.5
    assert found.gated == pytest.approx((0.5, 0.6, 0.5, 0.76))
    found = score("boat", "boat, however", TLDR)  # L1 fails; ρ 13/4 = 3.25 → 1 − 0.05/1.8; u 2; J 1/1
    assert found.total == 0.0
    assert found.ungated_total == pytest.approx(1 - 0.05 / 1.8 + 0.5 + 0.4 * 0.4 + 0.6)


def test_best_answers_reach_the_maximum():
    # 0.5 + 1 + 0.5 + 0.4·0.95 + 0.6 = 2.98
    brief = "Boats leave the harbour. " + "Boats leave. " * 6
    assert score(brief, f"Boats leave the harbour, {ALL_TRANSITIONS}. {'Boats. ' * 8}", TLDR).total == pytest.approx(
        2.98
    )
    base = f"boats leave the harbour {ALL_TRANSITIONS}"
    assert score(base + " boat" * 120, base + " boat" * 200, ARXIV).total == pytest.approx(2.98)


TEXT = HOSTILE | pieces("boat ", "harbour ", "however ", "because ", "the ", "w1 ", "w2 " * 40, "\n", "x" * 9)


@THOUSAND
@given(pairs(TEXT))
def test_any_two_texts_are_rewarded_within_the_range(drawn):
    levels = {}
    for rule in (TLDR, ARXIV):
        for first, second in drawn:
            found = score(first, second, rule)
            metrics = found.metrics()
            assert 0.0 <= found.total <= found.ungated_total <= 2.98 + 1e-9
            assert all(map(math.isfinite, metrics.values()))
            assert metrics["gated_total"] == found.total
            if found.total > 0:
                assert all(rule.tokens[0] <= count <= rule.tokens[1] for count in found.tokens)
            levels[first, second] = found.levels
    for first, second in drawn:  # of the last rule: what is symmetric
        assert levels[first, second][0] == levels[second, first][0]
        assert levels[first, second][3] == levels[second, first][3]
