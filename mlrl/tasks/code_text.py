"""Finding Python code in what a model wrote, finished or not, and reading its structure."""

import ast
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
MAX_CHARACTERS = 40_000
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source; None where it has none."""
    tree, _ = _parse(source)
    return tree


def syntax_problem(source: str) -> str | None:
    """Why a source does not parse or compile, with line and column; None where it does."""
    tree, problem = _parse(source)
    return problem or _attempt(lambda: compile(tree, "<program>", "exec", dont_inherit=True))[1]


def _parse(source: str) -> tuple[ast.Module | None, str | None]:
    return _attempt(lambda: ast.parse(source))


def _attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """What was made, or why it could not be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes such as "\\d" are the model's affair
            return make(), None
    except SyntaxError as error:
        return None, f"{error.msg} (line {error.lineno}, column {error.offset})"
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:  # null bytes, absurd nesting
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:100]


def code_of(text: str) -> str:
    """The code in a response: what stands in its fences, an unclosed one included, or else the whole text."""
    text = text[:MAX_CHARACTERS].replace("\r\n", "\n")
    blocks = [body for language, body in _FENCE.findall(text) if language.lower() in ("", "python", "py", "python3")]
    return "\n".join(blocks) if blocks else text


@dataclass(frozen=True)
class Function:
    """A function found in a text.

    Attributes:
        source: its lines with decorators, not indented.
        node: its syntax tree; None where it does not parse.
    """

    name: str
    source: str
    node: _FUNCTION | None

    @property
    def has_return(self) -> bool:
        """Whether it returns a value somewhere, nested functions not counted."""
        if self.node is None:
            return re.search(r"^[ \t]+return\b[ \t]*\S", self.source, re.MULTILINE) is not None
        return any(isinstance(node, ast.Return) and node.value is not None for node in own_nodes(self.node))


def functions_in(code: str, at_any_depth: bool = False) -> list[Function]:
    """The functions of a code, in order: of its top level, or also the methods of classes there.

    Where the code as a whole does not parse, they are cut out by their indentation and parsed one by one.
    """
    tree = parsed(code)
    if tree is None:
        return _cut_functions(code, at_any_depth)
    lines = code.split("\n")
    nodes = [node for node in tree.body if isinstance(node, _FUNCTION)]
    if at_any_depth:
        inner = (node for outer in tree.body if isinstance(outer, ast.ClassDef) for node in outer.body)
        nodes += [node for node in inner if isinstance(node, _FUNCTION)]
    return [Function(node.name, _segment(lines, node), node) for node in nodes]


def _segment(lines: list[str], node: _FUNCTION) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))


def _cut_functions(code: str, at_any_depth: bool) -> list[Function]:
    found, lines = [], code.split("\n")
    for number, line in enumerate(lines):
        match = re.match(r"([ \t]*)(?:async[ \t]+)?def[ \t]+(\w+)", line)
        if not match or (match[1] and not at_any_depth):
            continue
        indent, first, end = match[1], number, number + 1
        while first and lines[first - 1].startswith(f"{indent}@"):
            first -= 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith((f"{indent} ", f"{indent}\t"))):
            end += 1
        source = textwrap.dedent("\n".join(lines[first:end])).rstrip("\n")
        tree = parsed(source)
        node = tree.body[0] if tree and isinstance(tree.body[0], _FUNCTION) else None
        found.append(Function(match[2], source, node))
    return found


def find_function(code: str, name: str, at_any_depth: bool = False) -> Function | None:
    """The function of that name; of several the last that parses, as Python would have it."""
    named = [function for function in functions_in(code, at_any_depth) if function.name == name]
    return next((f for f in reversed(named) if f.node is not None), named[-1] if named else None)


def imports_in(code: str) -> list[str]:
    """The import statements at the top level of a code, one a line each, ``from __future__`` left out."""
    tree = parsed(code)
    if tree is None:
        lines = [line for line in code.split("\n") if re.match(r"(import|from)\s", line)]
        trees = [(line, parsed(line)) for line in lines]
        nodes = [node for _, tree in trees if tree for node in tree.body]
    else:
        nodes = tree.body
    return [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__")
    ]


def own_nodes(function: _FUNCTION) -> Iterator[ast.AST]:
    """The nodes of a function's body, those of functions and classes inside it left out."""
    stack = list(function.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, _FUNCTION | ast.Lambda | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def calls(function: _FUNCTION, name: str) -> bool:
    """Whether a function uses another one of that name which it does not define or assign itself."""
    nodes = list(ast.walk(function))
    own = {node.name for node in nodes if isinstance(node, _FUNCTION | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    loads = any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in nodes)
    return loads and name not in own


def is_thin_wrapper(function: _FUNCTION, name: str) -> bool:
    """Whether all that a function does is to return what `name` returns, at once or by way of a variable."""
    body = [node for node in function.body if not _is_idle(node)]
    if len(body) == 1:
        return isinstance(body[0], ast.Return) and _is_call(body[0].value, name)
    if len(body) == 2 and isinstance(body[0], ast.Assign | ast.AnnAssign) and isinstance(body[1], ast.Return):
        targets, returned = _targets(body[0]), body[1].value
        return _is_call(body[0].value, name) and isinstance(returned, ast.Name) and returned.id in targets
    return False


def ignores_result(function: _FUNCTION, name: str) -> bool:
    """Whether a function calls `name` and never uses what it returns: dropped, or in variables that nothing reads."""
    nodes = list(ast.walk(function))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    dropped, used = set(), False
    for node in nodes:
        if not (isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) and _is_call(node.value, name)):
            continue
        if isinstance(node, ast.Expr) or (_targets(node) and not _targets(node) & read):
            dropped.add(node.value.func)
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == name and node not in dropped:
            used = True
    return bool(dropped) and not used


def _is_idle(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring
    return constant or isinstance(node, ast.Pass | ast.Import | ast.ImportFrom)


def _is_call(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """The plain names that are assigned; empty where something else is assigned too, which may be read elsewhere."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = {name.id for target in targets for name in _flat(target) if isinstance(name, ast.Name)}
    return names if all(isinstance(name, ast.Name) for target in targets for name in _flat(target)) else set()


def _flat(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Starred):
        return _flat(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return [entry for element in target.elts for entry in _flat(element)]
    return [target]
