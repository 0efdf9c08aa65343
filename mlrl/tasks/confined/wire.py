"""Messages between processes of the sandbox, and values as plain data.

A frame is 8 bytes of length and a JSON text. Values that cross are rebuilt from plain data, so no object of the program
(with an ``__eq__`` that says yes to everything, say) ever reaches the process that checks its answers.
"""

import itertools
import json
import os
import select
import struct

MAX_FRAME = 32 << 20
MAX_ITEMS = 100_000  # of an iterator, which may be endless
_HEADER = struct.Struct(">Q")


class Broken(Exception):
    """The other side is gone, or what it sent is no message."""


def send(fd, message, wait=None):
    """Writes one frame; with `wait` the descriptor does not block, and `wait(fd)` is called while it takes no more."""
    payload = json.dumps(message).encode()
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a message of {len(payload)} bytes")
    data = memoryview(_HEADER.pack(len(payload)) + payload)
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            wait(fd)


def receive(fd, wait=None):
    """Reads one frame; `wait(fd)` is called before each read and may raise.

    Raises:
        Broken: end of stream, an absurd length, or no JSON.
    """
    (length,) = _HEADER.unpack(_read(fd, _HEADER.size, wait))
    if length > MAX_FRAME:
        raise Broken(f"a message of {length} bytes")
    try:
        return json.loads(_read(fd, length, wait))
    except (ValueError, RecursionError) as error:
        raise Broken(f"no JSON: {error}") from None


def _read(fd, count, wait):
    parts = []
    while count:
        if wait is not None:
            wait(fd)
        part = os.read(fd, min(count, 1 << 16))
        if not part:
            raise Broken("the other side is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def ready(fd, seconds, to_write=False):
    """Whether `fd` can be read, or written, within `seconds`."""
    read, write, _ = select.select([] if to_write else [fd], [fd] if to_write else [], [], seconds)
    return bool(read or write)


class Values:
    """Python values as JSON and back.

    Numbers, texts, bytes, None, lists, tuples, sets, dicts and ranges cross by value, subclasses of them as their base,
    iterators and views as lists. Anything else stays on the side where it lives and crosses as a `Reference`.
    """

    def __init__(self):
        self.kept = []

    def pack(self, value):
        """A JSON-able form of `value`."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            return {"int": int.__repr__(value + 0)} if abs(value) >= 1 << 53 else int(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return {"float": float.__repr__(value)}
        if isinstance(value, complex):
            return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
        if isinstance(value, bytes | bytearray):
            return {type(value).__mro__[-2].__name__: bytes(value).hex()}
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.pack(entry) for entry in kind.__iter__(value)]}
        if isinstance(value, dict):
            return {"dict": [[self.pack(key), self.pack(entry)] for key, entry in dict.items(value)]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, Reference):
            return {"own": value.number}
        if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())) or (
            hasattr(type(value), "__next__") and iter(value) is value
        ):
            return {"list": [self.pack(entry) for entry in itertools.islice(value, MAX_ITEMS)]}
        if type(value).__module__ == "numpy":
            return self.pack(value.tolist())
        self.kept.append(value)
        return {"object": len(self.kept) - 1}

    def unpack(self, packed):
        """The value of what `pack` gave on the other side.

        Raises:
            Broken: it is not such a thing.
        """
        if packed is None or isinstance(packed, bool | int | str):
            return packed
        try:
            ((kind, content),) = packed.items()
            return self._unpack(kind, content)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise Broken(f"no value: {error}") from None

    def _unpack(self, kind, content):
        if kind == "int":
            return int(content)
        if kind == "float":
            return float(content)
        if kind == "complex":
            return complex(*map(float, content))
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(content)
        if kind == "dict":
            return {self.unpack(key): self.unpack(entry) for key, entry in content}
        if kind == "range":
            return range(*content)
        if kind == "object":
            return Reference(int(content))
        if kind == "own":
            return self.kept[content]
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.unpack, content))


class Reference:
    """An object that stays on the other side; equal only to itself."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Reference) and other.number == self.number

    def __hash__(self):
        return hash(self.number)

    def __repr__(self):
        return f"<object {self.number}>"


def described(error, length=300):
    """An exception as one short line."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # a program's own exception whose __str__ fails
        text = type(error).__name__
    return " ".join(text.split())[:length]
