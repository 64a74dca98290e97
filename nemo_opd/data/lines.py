"""Lines of JSONL and text files, and checks that a parser can take them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nemo_opd.errors import DataError

_MAX_LINE = 2**31 - 1
"""Limit in bytes, as Arrow's parser counts them."""
_MAX_DEPTH = 500
"""Limit of nested lists and objects. Parsers recurse: some kill the process at tens of thousands."""
_START = 4096
"""Bytes read to find a file's first character."""
BOM = b"\xef\xbb\xbf"

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1


class RowError(DataError):
    """A row of a JSON file that cannot be read."""

    def __init__(self, file: Path, place: str, reason: str) -> None:
        super().__init__(f"{place} is malformed: {reason}; write one JSON object a line, in UTF-8")
        self.file = file


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1. A line longer than a parser takes comes in pieces."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE + 1):
            number += 1
            yield number, line


def unreadable(line: bytes) -> str | None:
    """Return why a parser cannot take a line, or None if it can; whether it is valid JSON is not checked."""
    if len(line) > _MAX_LINE:
        return f"it has more than {_MAX_LINE} bytes"
    if reason := no_utf8(line):
        return reason
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and depth(line) > _MAX_DEPTH:
        return f"it has more than {_MAX_DEPTH} nested lists and objects"
    return None


def no_utf8(line: bytes) -> str | None:
    if line.isascii():
        return None
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8 ({error.reason})"
    return None


def depth(line: bytes) -> int:
    """Return how deeply lists and objects are nested, ignoring brackets in strings."""
    steps = _STEP[np.frombuffer(_STRING.sub(b"", line), np.uint8)]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and object of each non-blank line, or of each element if the file is one JSON list.

    Raises RowError.
    """
    place = "line 1"
    try:
        if is_json_list(path):
            for i, element in enumerate(_parsed(path.read_bytes()), start=1):
                place = f"element {i}"
                yield place, _require_object(element)
            return
        for number, line in numbered(path):
            place = f"line {number}"
            if line.strip():
                yield place, _require_object(_parsed(line))
    except ValueError as error:
        raise RowError(path, place, str(error)) from error


def is_json_list(path: Path) -> bool:
    """Return whether a file is one JSON list instead of one object per line."""
    with path.open("rb") as file:
        start = file.read(_START).removeprefix(BOM).lstrip()
    return start.startswith(b"[")


def _parsed(text: bytes) -> Any:
    """Parse JSON. Raises ValueError with the reason if it is malformed."""
    if reason := unreadable(text):
        raise ValueError(reason)
    try:
        value = _DECODER.decode(text.removeprefix(BOM).decode())
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (column {error.colno})") from error
    except UnicodeEncodeError as error:
        reason = "a string has half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        raise ValueError(reason) from error
    return value


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repetition)
