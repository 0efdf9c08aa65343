import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlrl.tasks.code_text import (
    MAX_CHARACTERS,
    calls,
    code_of,
    find_function,
    functions_in,
    ignores_result,
    imports_in,
    is_thin_wrapper,
    syntax_problem,
)

GOOD = "def f(x):\n    return x"
PIECES = st.sampled_from(
    ["```", "```python\n", "def f(", "def f(x):\n", "    return x\n", "class C:\n", "\t", "@d\n", "'" * 3, "\x00", "("]
)
MORE = st.sampled_from(
    ["import os\n", "from a import", "\ud800", "é", "\U0001f600", "\r\n", "\\", "lambda:", "async ", "f'{", "if 1:\n "]
)
HOSTILE = st.one_of(st.text(), st.lists(PIECES | MORE, max_size=40).map("".join))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here it is:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nand\n```py\ny = 2\n```", "x = 1\n\ny = 2\n"),
        ("```python\nx = 1", "x = 1"),  # not finished
        ("```bash\nls\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("x = 1\r\ny = 2", "x = 1\ny = 2"),
        ("", ""),
    ],
)
def test_code_of_a_response(text, code):
    assert code_of(text) == code


def test_a_function_is_found_where_the_rest_does_not_parse():
    code = f"Sure! Here:\n\n@cache\n{GOOD}\n\nThat is all, isn't it"
    found = find_function(code, "f")
    assert found.source == f"@cache\n{GOOD}"
    assert found.has_return
    assert isinstance(found.node, ast.FunctionDef)


def test_half_a_function():
    found = find_function("def f(x):\n    if x:\n        return x\n    y = (1,", "f")
    assert (found.node, found.has_return) == (None, True)
    assert not find_function("def f(x):\n    y = (1,", "f").has_return
    assert find_function("def g(x): return", "f") is None
    assert find_function("x = 'def f(x): return 1'", "f") is None


def test_the_last_of_one_name_counts_and_methods_only_where_asked():
    code = "class C:\n    @staticmethod\n    def f():\n        return 0\ndef g():\n    return 1\ndef g():\n    return 2"
    assert find_function(code, "g").source == "def g():\n    return 2"
    assert find_function(code, "f") is None
    assert find_function(code, "f", at_any_depth=True).source == "@staticmethod\ndef f():\n    return 0"
    assert [f.name for f in functions_in(code + "\n(", at_any_depth=True)] == ["f", "g", "g"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1", True),
        ("return", False),
        ("return None", True),
        ("pass", False),
        ("for x in y:\n        return x", True),
        ("def g():\n        return 1", False),
        ("g = lambda: 1", False),
        ("yield 1", False),
    ],
)
def test_has_return(body, expected):
    assert find_function(f"def f():\n    {body}", "f").has_return is expected


def test_imports():
    code = "import os, sys\nfrom __future__ import annotations\nfrom math import (pi,\n e)\ndef f():\n    import re"
    assert imports_in(code) == ["import os, sys", "from math import pi, e"]
    assert imports_in("import os\nfrom math import\nfrom a import b\n((") == ["import os", "from a import b"]


MAIN = "def main(x, y=0):\n    {}"


@pytest.mark.parametrize(
    ("body", "used", "thin", "ignored"),
    [
        ("return x", False, False, False),
        ("return aux(x)", True, True, False),
        ("'''Words.'''\n    import os\n    return aux(x)", True, True, False),
        ("y = aux(x)\n    return y", True, True, False),
        ("y: int = aux(x)\n    return y", True, True, False),
        ("y = aux(x)\n    return x", True, False, True),
        ("y = aux(x)\n    return y + 1", True, False, False),
        ("aux(x)\n    return x", True, False, True),
        ("aux(x)\n    return aux(x) + 1", True, False, False),
        ("a, b = aux(x)\n    return b + 1", True, False, False),
        ("a, *b = aux(x)\n    return x", True, False, True),
        ("y = [aux(x)]\n    return x", True, False, False),  # in a list: not followed further
        ("self.y = aux(x)\n    return x", True, False, False),
        ("return list(map(aux, x))", True, False, False),
        ("return 1 + aux(x)", True, False, False),
        ("if aux(x):\n        return 1\n    return 2", True, False, False),
        ("def aux(z):\n        return z\n    return aux(x) + 1", False, False, False),
        ("aux = len\n    return aux(x) + 1", False, False, False),
        ("return 'aux(x)'", False, False, False),
        ("return x.aux(x)", False, False, False),
    ],
)
def test_how_a_helper_is_used(body, used, thin, ignored):
    node = find_function(MAIN.format(body), "main").node
    assert calls(node, "aux") is used
    if used:
        assert is_thin_wrapper(node, "aux") is thin
        assert ignores_result(node, "aux") is ignored


ABSURD = [
    *("(" * 30_000, "-" * 30_000 + "1", "a" + ".b" * 15_000, "[" * 90 + "]" * 90, "if 1:\n" * 200, "x\x00"),
    *("return 1", "def f(x, x): return x", "0" * 5000 + "1", "9" * 9000, "lambda:" * 5000, "f(" * 150 + ")" * 150),
    "x = '\ud800'",
]


@pytest.mark.parametrize("source", ABSURD)
def test_absurd_sources_are_judged_and_harm_nothing(source):
    problem = syntax_problem(source)
    assert problem is None or len(problem) > 3
    assert find_function(f"{GOOD}\n{source}", "f") is not None


def test_a_syntax_problem_has_its_place():
    assert syntax_problem("x = 1\ny = = 2") == "invalid syntax (line 2, column 5)"
    assert syntax_problem(GOOD) is None


@settings(max_examples=150, deadline=None)
@given(HOSTILE)
def test_any_text_is_read(text):
    read(text)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(HOSTILE)
def test_many_more_texts_are_read(text):
    read(text)


def read(text):
    code = code_of(text)
    for function in functions_in(code, at_any_depth=True):
        assert function.name
        assert isinstance(function.has_return, bool)
        if function.node is not None:
            assert syntax_problem(function.source) is None or "outside" in syntax_problem(function.source)
    for line in imports_in(code):
        ast.parse(line)


def test_huge_texts_are_cut():
    assert len(code_of("x" * 10**6)) == MAX_CHARACTERS
