"""Plain values as lines of JSON, between a program and its tests.

Only data passes: a program's result is compared as a value that the reader builds, so the program's methods do not
decide.
"""

import json
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

sys.set_int_max_str_digits(0)
_LONGEST = 1 << 26
"""Maximum length of a line in bytes."""
_MOST_ITEMS = 1 << 20
"""Maximum number of items read from an iterator."""
_COLLECTIONS: dict[str, Callable[[Iterator[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "iterator": lambda items: iter(list(items)),
}  # fmt: skip


class Line:
    """A socket connection for lines of JSON."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")

    def send(self, message: Any) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next message. Raises EOFError if the other side has ended or sends a line that is too long."""
        line = self._file.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def encoded(value: Any, reference: Callable[[Any], Any]) -> Any:
    """Convert a value to JSON; subclasses become their base type. reference: converts any value that is not plain."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encoded(item, reference) for item in value]
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: list(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key, reference), encoded(item, reference)] for key, item in value.items()]}
    for collection in (tuple, set, frozenset, deque):
        if isinstance(value, collection):
            return {collection.__name__: [encoded(item, reference) for item in value]}
    if hasattr(type(value), "__next__"):
        return {"iterator": [encoded(item, reference) for item in islice(value, _MOST_ITEMS)]}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a NumPy scalar
        return encoded(value.item(), reference)
    return reference(value)


def decoded(data: Any, dereference: Callable[[dict[str, Any]], Any]) -> Any:
    """Convert JSON to a value. dereference: returns the object of a reference. Raises ValueError for other JSON."""
    if isinstance(data, list):
        return [decoded(item, dereference) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("malformed")
    ((kind, items),) = data.items()
    if kind == "dict":
        return {decoded(key, dereference): decoded(value, dereference) for key, value in items}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](decoded(item, dereference) for item in items)
    if kind in ("bytes", "bytearray"):
        return bytes(items) if kind == "bytes" else bytearray(items)
    if kind in ("complex", "range"):
        return complex(*items) if kind == "complex" else range(*items)
    return dereference(data)
