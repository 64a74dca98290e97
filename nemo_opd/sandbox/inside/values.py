"""Plain values as lines of JSON, between a program and what tests it.

Only data pass: what a program returns is compared as a value that the reader made, so no method of the program's
decides.
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
"""Bytes of a line."""
_MOST_ITEMS = 1 << 20
"""Items that are read of an iterator."""
_COLLECTIONS: dict[str, Callable[[Iterator[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "iterator": lambda items: iter(list(items)),
}  # fmt: skip


class Line:
    """A connection that carries lines of JSON."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")

    def send(self, message: Any) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next message. Raises EOFError where the other side has ended, or sends too much."""
        line = self._file.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def encoded(value: Any, reference: Callable[[Any], Any]) -> Any:
    """Return the JSON of a value, subclasses as what they extend. reference: makes JSON of what is no plain value."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encoded(each, reference) for each in value]
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: list(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key, reference), encoded(each, reference)] for key, each in value.items()]}
    for collection in (tuple, set, frozenset, deque):
        if isinstance(value, collection):
            return {collection.__name__: [encoded(each, reference) for each in value]}
    if hasattr(type(value), "__next__"):
        return {"iterator": [encoded(each, reference) for each in islice(value, _MOST_ITEMS)]}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy's
        return encoded(value.item(), reference)
    return reference(value)


def decoded(data: Any, referred: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value of JSON. referred: returns what a reference stands for. Raises ValueError for other JSON."""
    if isinstance(data, list):
        return [decoded(each, referred) for each in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("malformed")
    ((kind, items),) = data.items()
    if kind == "dict":
        return {decoded(key, referred): decoded(value, referred) for key, value in items}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](decoded(each, referred) for each in items)
    if kind in ("bytes", "bytearray"):
        return bytes(items) if kind == "bytes" else bytearray(items)
    if kind in ("complex", "range"):
        return complex(*items) if kind == "complex" else range(*items)
    return referred(data)
