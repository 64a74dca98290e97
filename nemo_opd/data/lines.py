"""Lines of JSONL and text files: whether a parser can take them, and what is wrong with them."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

_MAX_LINE = 2**31 - 1
"""Bytes, as Arrow's parser counts them."""
_MAX_DEPTH = 500
"""Lists and objects in each other. Parsers recurse: some end the process at tens of thousands."""
BOM = b"\xef\xbb\xbf"

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, counted from 1, without more of any than can be parsed."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE + 1):
            number += 1
            yield number, line


def unreadable(line: bytes) -> str | None:
    """Return why a parser cannot be given a line; None where it can, which says nothing of the JSON in it."""
    if len(line) > _MAX_LINE:
        return f"it has more than {_MAX_LINE} bytes"
    if reason := no_utf8(line):
        return reason
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and depth(line) > _MAX_DEPTH:
        return f"it has more than {_MAX_DEPTH} lists and objects in each other"
    return None


def no_utf8(line: bytes) -> str | None:
    if line.isascii():
        return None
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} (0x{line[error.start]:02x}) is no UTF-8 ({error.reason})"
    return None


def depth(line: bytes) -> int:
    """Return how many lists and objects are in each other, outside strings."""
    steps = _STEP[np.frombuffer(_STRING.sub(b"", line), np.uint8)]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def malformation(line: bytes) -> str | None:
    """Return why Arrow cannot read a line as a JSON object; None for one that is, and for a blank one."""
    if reason := unreadable(line):
        return reason
    line = line.removeprefix(BOM)
    try:
        value = json.loads(line, object_pairs_hook=_without_repetition) if line.strip() else {}
    except json.JSONDecodeError as error:
        return f"{error.msg} (column {error.colno})"
    except (ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(value, dict):
        return "it is no JSON object"
    with suppress(UnicodeEncodeError):
        json.dumps(value, ensure_ascii=False).encode()
        return None
    return "a string has half of a surrogate pair (\\ud800 to \\udfff), which is no character"


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return values
