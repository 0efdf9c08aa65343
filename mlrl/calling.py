"""How a user's function is called: read once from its signature, never found out by trying.

Arguments come in two kinds. *Values* fill, in order, the positional parameters that have no default, then ``*args``.
*Named* arguments have names of their own and are never a value, wherever they stand: they are passed where the function
names them or, unless said otherwise, where it takes ``**kwargs``. Every other parameter keeps its own default.
"""

import asyncio
import functools
import inspect
import os
import reprlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlrl.errors import ConfigError
from mlrl.wording import counted

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class BoundCall:
    """A user's function with the decision of what it is given; call it as ``bound(values, named)``.

    `positional` and `keyword` hold ``("value", i)``, ``("named", name)`` or ``("default", object)`` entries.
    """

    func: Callable
    positional: tuple[tuple[str, Any], ...]
    keyword: dict[str, tuple[str, Any]]

    def __call__(self, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Calls the function; an exception of its own passes through untouched, an awaitable result is awaited."""

        def argument(kind: str, key: Any) -> Any:
            return values[key] if kind == "value" else named[key] if kind == "named" else key

        args = [argument(kind, key) for kind, key in self.positional]
        kwargs = {name: argument(kind, key) for name, (kind, key) in self.keyword.items()}
        try:
            result = self.func(*args, **kwargs)
            return wait_for(result) if inspect.isawaitable(result) else result
        except SystemExit as error:  # would end one process in silence, while the others wait for it
            raise RuntimeError(f"called sys.exit({error.code!r}), which would end one process of the run") from error

    @property
    def names(self) -> frozenset[str]:
        """The named arguments that the function is given."""
        entries = (*self.positional, *self.keyword.values())
        return frozenset(key for kind, key in entries if kind == "named")


def bind_call(
    func: Any,
    *,
    field: str,
    num_values: int,
    values_are: str,
    named: Sequence[str] = (),
    named_only: Sequence[str] = (),
) -> BoundCall:
    """Binds `func` to `num_values` values and to the named arguments it takes.

    Args:
        func: function, method, `functools.partial`, object with ``__call__``; may be async.
        field: the name of the setting that holds it, for messages.
        values_are: what the values are in words, for messages, such as "one list an agent (num_agents=2)".
        named: passed where named or through ``**kwargs``.
        named_only: passed only where named.

    Raises:
        ConfigError: not callable, without a readable signature, or with other parameters than these.
    """
    parameters, text = _read_signature(func, field)
    known = (*named, *named_only)
    slots: list[tuple[str, Any]] = []
    count, takes_rest = 0, False
    keyword: dict[str, tuple[str, Any]] = {}
    positional_only = {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY}
    for p in (p for p in parameters if p.kind in _POSITIONAL):
        if p.name in known:
            slots.append(("named", p.name))
        elif p.default is p.empty:
            slots.append(("value", count))
            count += 1
        else:
            slots.append(("default", p.default))
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            takes_rest = True
        elif p.kind is p.VAR_KEYWORD:
            taken = {q.name for q in parameters}
            keyword |= {name: ("named", name) for name in named if name not in taken}
        elif p.kind is p.KEYWORD_ONLY and p.name in known:
            keyword[p.name] = ("named", p.name)
        elif p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            if p.name not in _positional_before_partial(func):
                raise ConfigError(
                    f"{field}={text}: the keyword-only parameter {p.name!r} has no default and nothing is passed under "
                    f"that name. Give it a default, bind it with functools.partial, or use {_listed(known)}."
                )
            keyword[p.name] = ("value", count)
            count += 1
    if count > num_values or (count < num_values and not takes_rest):
        at_least = "at least " if takes_rest else ""
        raise ConfigError(
            f"{field}={text}: {at_least}{counted(count, 'parameter')} without default for "
            f"{counted(num_values, 'value')} ({values_are}). Only parameters without default and *args take these; "
            "extras of your own need a default" + (f", and {_listed(known)} are passed by name." if known else ".")
        )
    if count < num_values:
        slots += [("value", i) for i in range(count, num_values)]
    # What follows the last value goes by keyword or stays at its default; what stands before it is filled in place.
    in_place = [kind == "value" or (kind == "named" and key in positional_only) for kind, key in slots]
    last = max((i for i, needed in enumerate(in_place) if needed), default=-1)
    keyword |= {key: ("named", key) for kind, key in slots[last + 1 :] if kind == "named"}
    return BoundCall(func=func, positional=tuple(slots[: last + 1]), keyword=keyword)


def _read_signature(func: Any, field: str) -> tuple[list[inspect.Parameter], str]:
    if not callable(func):
        raise ConfigError(f"{field}={shown(func)}: a {type(func).__name__} cannot be called. Give a function.")
    if isinstance(func, type):
        raise ConfigError(f"{field}={func.__name__}: a class, not a function. Give an instance of it or a function.")
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{field}={shown(func)}: its parameters cannot be read (built-in code). Wrap it: "
            f"def {field}(...): return the call."
        ) from None
    bare = signature.replace(return_annotation=signature.empty)
    return list(signature.parameters.values()), f"{function_name(func)}{shown(bare, 300)}"


def function_name(func: Any) -> str:
    """What a user calls a function, or the type of an object that is called, for messages."""
    inner = func.func if isinstance(func, functools.partial) else func
    return getattr(inner, "__name__", type(inner).__name__)


def _positional_before_partial(func: Any) -> set[str]:
    """The parameters that only `functools.partial` made keyword-only, by binding one that stands before them."""
    if not isinstance(func, functools.partial):
        return set()
    return {p.name for p in inspect.signature(func.func).parameters.values() if p.kind in _POSITIONAL}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "no other name"


def shown(value: Any, length: int = 120) -> str:
    """`repr` of a value, cut in the middle to about `length` characters, for messages."""
    if isinstance(value, str | bytes | inspect.Signature):
        text = str(value) if isinstance(value, inspect.Signature) else repr(value[: 2 * length])
    else:
        short = reprlib.Repr()
        short.maxstring = short.maxother = length
        text = short.repr(value)
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-length // 3 :]}"


def copied(value: Any) -> Any:
    """A copy in which every dict, list, tuple and set is new, so that a user's change to it stays the user's."""
    if isinstance(value, Mapping):
        return {key: copied(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copied(entry) for entry in value)
    return value


def add_context(error: Exception, text: str) -> None:
    """Adds a line under a user's own exception where Python can (3.11), leaving type, message and traceback alone."""
    if hasattr(error, "add_note"):
        error.add_note(text)


_loop: asyncio.AbstractEventLoop | None = None
_loop_process = 0
_loop_lock = threading.Lock()


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Runs an awaitable to its end on one event loop in a thread of its own, and returns its result.

    The same loop serves every call, so a client that the user keeps between calls stays usable, and a loop that
    already runs in the calling thread (a notebook) is no obstacle.
    """
    global _loop, _loop_process
    with _loop_lock:
        if _loop is None or _loop_process != os.getpid():  # a fork has the loop but not its thread
            _loop, _loop_process = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="mlrl-async-callables", daemon=True).start()

    async def awaited() -> Any:
        return await awaitable

    future = asyncio.run_coroutine_threadsafe(awaited(), _loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
