"""Rows of the function-writing tasks, brought into one form from those of HumanEval and of MBPP."""

import ast
from typing import Any

from mlrl import ConfigError
from mlrl.tasks.code_text import functions_in, imports_in, parsed
from mlrl.tasks.task_data import Row


def function_row(row: dict[str, Any], number: int) -> Row:
    """A row with `task_id`, `prompt`, `entry_point`, `preamble`, `setup` and `tests`.

    Takes rows of HumanEval's form (`prompt` signature and docstring, `test` with ``def check(candidate)``,
    `entry_point`) and of MBPP's (`prompt` or `text` in words, `code`, `test_list`, `test_imports` or
    `test_setup_code`). Each statement of `check` that holds an assert is a test of its own.

    Raises:
        ConfigError: neither form, or without a test.
    """
    if "test_list" in row and "code" in row:
        made = _from_mbpp(row)
    elif {"prompt", "test", "entry_point"} <= row.keys():
        made = _from_humaneval(row)
    else:
        raise ConfigError(
            f"task_args.data_path: row {number} has the fields {', '.join(row)}. Right are prompt, test and "
            f"entry_point, or code, test_list and prompt or text."
        )
    if not made["tests"]:
        raise ConfigError(f"task_args.data_path: row {number} ({row.get('task_id')!r}) has no test with an assert.")
    return {"task_id": str(row.get("task_id", number)), **made}


def _from_humaneval(row: dict[str, Any]) -> Row:
    prompt, name = row["prompt"].replace("\r\n", "\n"), row["entry_point"]
    setup, tests = split_tests(row["test"], name)
    preamble = _before(prompt, name)
    return {
        "prompt": prompt,
        "entry_point": name,
        "preamble": preamble,
        "setup": "\n".join(part for part in (preamble, setup) if part),
        "tests": tests,
    }


def _before(prompt: str, name: str) -> str:
    """What a prompt defines before the function that is asked for: imports and functions for it or for its tests."""
    tree = parsed(prompt) or parsed(f"{prompt.rstrip()}\n    pass\n")
    if tree is None:
        return ""
    kept = [node for node in tree.body if getattr(node, "name", None) != name]
    return "\n".join(ast.unparse(node) for node in kept)


def _from_mbpp(row: dict[str, Any]) -> Row:
    code = row["code"].replace("\r\n", "\n")
    called = {n.id for test in row["test_list"] for n in ast.walk(ast.parse(test)) if isinstance(n, ast.Name)}
    functions = [function for function in functions_in(code) if function.name in called and function.node]
    if not functions:
        raise ConfigError(f"task_args.data_path: no test of task {row.get('task_id')!r} calls a function of its code.")
    name, arguments = functions[-1].name, ast.unparse(functions[-1].node.args)
    words = row["prompt"] if "prompt" in row else row["text"]
    # some tests name a module that only the reference solution imports
    setup = "\n".join([*imports_in(code), *(row.get("test_imports") or []), row.get("test_setup_code") or ""]).strip()
    return {
        "prompt": f'def {name}({arguments}):\n    """{words.strip()}"""\n',
        "entry_point": name,
        "preamble": "",
        "setup": setup,
        "tests": list(row["test_list"]),
    }


def split_tests(source: str, name: str) -> tuple[str, list[str]]:
    """What the tests need, and one source for each statement with an assert, in or outside of ``check``.

    Asserts of a constant, which every program passes, are left out.

    Raises:
        ConfigError: the source does not parse.
    """
    tree = parsed(source)
    if tree is None:
        raise ConfigError(f"task_args.data_path: the tests of {name!r} do not parse.")
    setup, tests = [], []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            tests += _split_body(node)
        elif _asserts(node) and not isinstance(node, ast.FunctionDef):
            tests.append(ast.unparse(node))
        elif not _calls_check(node):
            setup.append(ast.unparse(node))
    return "\n".join(setup), tests


def _split_body(check: ast.FunctionDef) -> list[str]:
    before, tests = [], []
    rename = (
        f"{check.args.args[0].arg} = candidate" if check.args.args and check.args.args[0].arg != "candidate" else ""
    )
    for node in check.body:
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant):
            continue
        if _asserts(node):
            tests.append("\n".join([*filter(None, [rename]), *before, ast.unparse(node)]))
        elif not (isinstance(node, ast.Expr | ast.Pass)):
            before.append(ast.unparse(node))
    return tests


def _asserts(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(node))


def _calls_check(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
