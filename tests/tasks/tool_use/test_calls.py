import pytest
from hypothesis import given

from mlrl.tasks.tool_use.calls import GoldCall, make_call, read_calls, similarity
from tests.texts import HOSTILE, THOUSAND, pairs, pieces

PARAMETERS = {"f": ["x", "y"], "a.b": ["z"]}


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("[]", []),
        ("f(x=1)", ["f(x=1)"]),
        ("f(x=1)\na.b(z='q')", ["f(x=1)", "a.b(z='q')"]),
        ("[f(x=1), a.b(z='q')]", ["f(x=1)", "a.b(z='q')"]),
        ("f(x=1), f(x=2)", ["f(x=1)", "f(x=2)"]),
        ("```python\nf(y=2, x=1)\n```", ["f(x=1, y=2)"]),  # the order of arguments is of no account
        ("f(1, y=-2.5)", ["f(x=1, y=-2.5)"]),
        ("f(1, 2, 3)", ["f(_2=3, x=1, y=2)"]),
        ("g()", ["g()"]),
        ("f(x=[1, (2, 3)], y={'k': true, 'm': null})", ["f(x=[1, [2, 3]], y={'k': True, 'm': None})"]),
    ],
)
def test_calls_that_can_be_read(answer, texts):
    assert [call.text for call in read_calls(answer, PARAMETERS)] == texts


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I would call f(x=1).",
        "f(x=1",
        "f(x=y)",
        "f(x=1)()",
        "x = f(x=1)",
        "f(**{'x': 1})",
        "f(1, x=2)",
        "f(x=1, x=2)",
        "f",
        "import os",
        "f(x=open('a'))",
        "[f(x=1), 3]",
        "f(x=1)\n" * 9000,  # longer than what is read
    ],
)
def test_answers_that_are_none(answer):
    assert read_calls(answer, PARAMETERS) is None


GOLD = GoldCall("f", {"x": [1, "one"], "y": ["New York", ""]})


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("f(x=1, y='New York')", 1.0),
        ("f(x='one')", 1.0),  # y may be left out
        ("f(x=1.0, y='new-york')", 1.0),  # 1.0 is 1; case, spaces and punctuation do not count
        ("f(x=True)", 0.5),  # True is not 1, y is right: 1 of 2
        ("f(x=2)", 0.5),
        ("f(y='Rome')", 0.0),
        ("f(x=1, y='New York', z=3)", 2 / 3),  # 2/2 · 2/(2 + 1)
        ("f(x=2, z=3, w=4)", 1 / 4),  # 1/2 · 2/(2 + 2)
        ("g(x=1)", 0.0),
    ],
)
def test_similarity(call, value):
    assert similarity(read_calls(call)[0], GOLD) == pytest.approx(value)


@pytest.mark.parametrize(("call", "value"), [("f()", 1.0), ("f(x=1)", 0.7), ("g()", 0.0)])
def test_a_gold_call_without_arguments(call, value):
    assert similarity(read_calls(call)[0], GoldCall("f", {})) == value


@pytest.mark.parametrize(
    ("allowed", "value", "right"),
    [
        ([[1, 2]], [1, 2], True),
        ([[1, 2]], [2, 1], False),
        ([["A b"]], ["ab"], True),
        ([None], None, True),
        ([None], 0, False),
        ([{"k": ["v", "w"], "m": [1, ""]}], {"k": "w"}, True),
        ([{"k": ["v"], "m": [1]}], {"k": "v"}, False),  # m has to be there
        ([{"k": ["v"]}], {"k": "v", "n": 1}, False),  # n has not
        ([[{"k": [1]}, {"k": [2]}]], [{"k": 1}, {"k": 2}], True),
        ([5], "5", False),
        (["5"], 5, False),
    ],
)
def test_values_within_values(allowed, value, right):
    assert similarity(make_call("f", {"x": value}), GoldCall("f", {"x": allowed})) == float(right)


def test_an_example_is_right():
    gold = GoldCall("f", {"x": ["", 3], "y": [{"k": ["v"], "m": [""]}], "z": [""]})
    assert gold.example().text == "f(x=3, y={'k': 'v'})"
    assert similarity(gold.example(), gold) == 1.0


@THOUSAND
@given(pairs(HOSTILE | pieces("f(", "x=", "1", "'", ", ", ")", "\n", "[", "]", "{", "}", "a.b(z=2)", "lambda: 0")))
def test_any_text_is_read_or_not(drawn):
    for text in map("".join, drawn):
        calls = read_calls(text, PARAMETERS)
        for call in calls or []:
            assert 0.0 <= similarity(call, GOLD) <= 1.0
            assert [again.text for again in read_calls(call.text)] == [call.text] or "set" in call.text
