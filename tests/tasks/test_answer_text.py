import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlrl.tasks.answer_text import json_object, two_sections, without_fences
from tests.texts import HOSTILE, THOUSAND, pairs, pieces


@pytest.mark.parametrize(
    ("text", "value", "around"),
    [
        ('{"a": 1}', {"a": 1}, ""),
        ('Here: {"a": {"b": "}"}} done', {"a": {"b": "}"}}, "Here:  done"),
        ('{"a": "\\"}"} {"b": 2}', {"a": '"}'}, ' {"b": 2}'),  # the first one; an escaped quote ends no string
        ('{no json} {"b": 2}', {"b": 2}, "{no json} "),
        ('[{"a": 1}]', {"a": 1}, "[]"),
        ('{"a": 1', None, '{"a": 1'),
        ("", None, ""),
        ("[1, 2]", None, "[1, 2]"),
    ],
)
def test_the_first_balanced_object(text, value, around):
    assert json_object(text) == (value, around)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3), st.text(alphabet="abc \n", max_size=9))
def test_any_object_is_found_in_any_text(value, around):
    assert json_object(f"{around}{json.dumps(value)}{around}")[0] == value


@THOUSAND
@given(pairs(HOSTILE | pieces("{", "}", '"', "\\", '{"a": 1}', ":", "x")))
def test_no_text_is_too_much(drawn):
    for text in map("".join, drawn):
        value, around = json_object(text)
        assert value is None or isinstance(value, dict)
        assert len(around) <= len(text)
        assert isinstance(without_fences(text), str)
        assert all(isinstance(part, str) for part in two_sections(text, "[SPLIT]"))


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("f()", "f()"),
        ("```python\nf()\n```", "f()\n"),
        ("Sure:\n```\na\n```\nand\n```\nb\n```", "a\n\nb\n"),
        ("```python\nf()", "f()"),  # never closed
    ],
)
def test_inside_of_fences(text, inside):
    assert without_fences(text) == inside


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one [SPLIT] two", ("one", "two")),
        ("one [SPLIT] two [SPLIT] three", ("one", "two [SPLIT] three")),
        ("Paragraph 1: one\n\nParagraph 2: two", ("one", "two")),
        ("**Paragraph 1**\none\n**Paragraph 2**\ntwo", ("one", "two")),
        ("abcdefghi", ("abc", "defghi")),  # neither: a third of nine characters
        ("", ("", "")),
    ],
)
def test_two_sections(text, parts):
    assert two_sections(text, "[SPLIT]") == parts
