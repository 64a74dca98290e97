"""Rows of JSONL, JSON and text files: parsing within parsers' limits, types of columns, and places for messages."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_opd.errors import DataError

_MAX_LINE = 2**31 - 1
"""Limit in bytes, as Arrow's parser counts them."""
_MAX_DEPTH = 500
"""Limit of nested lists and objects. Parsers recurse: some kill the process at tens of thousands."""
_START = 4096
"""Bytes read to find a file's first character."""
_BOM = b"\xef\xbb\xbf"

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1

_AS_JSON = pa.json_()
_LARGE = 2**63
"""Smallest integer that is too large for int64."""
_COLUMN_TYPES: Mapping[frozenset[str], pa.DataType] = {
    frozenset(): pa.null(),
    frozenset({"string"}): pa.string(),
    frozenset({"bool"}): pa.bool_(),
    frozenset({"integer"}): pa.int64(),
    frozenset({"float"}): pa.float64(),
    frozenset({"integer", "float"}): pa.float64(),
    frozenset({"strings"}): pa.list_(pa.string()),
}
"""Column types keyed by the kinds of their values; other mixtures are kept as JSON."""
_NUMBERS = {"integer", "large integer", "float"}

Origin = Callable[[int], str]
"""Index of a row, counted from 0 over all files → its place."""


class RowError(DataError):
    """A row of a JSON file that cannot be read."""

    def __init__(self, file: Path, place: str, reason: str) -> None:
        super().__init__(f"{place} is malformed: {reason}; write one JSON object a line, in UTF-8")
        self.file = file


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and object of each non-blank line, or of each element if the file is one JSON list.

    Raises RowError.
    """
    place = "line 1"
    try:
        if _is_json_list(path):
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


def _is_json_list(path: Path) -> bool:
    """Return whether a file is one JSON list instead of one object per line."""
    with path.open("rb") as file:
        start = file.read(_START).removeprefix(_BOM).lstrip()
    return start.startswith(b"[")


def _parsed(text: bytes) -> Any:
    """Parse JSON. Raises ValueError with the reason if it is malformed."""
    if reason := _unreadable(text):
        raise ValueError(reason)
    try:
        value = _DECODER.decode(text.removeprefix(_BOM).decode())
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (column {error.colno})") from error
    except UnicodeEncodeError as error:
        reason = "a string has half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        raise ValueError(reason) from error
    return value


def _unreadable(line: bytes) -> str | None:
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


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1. A line longer than a parser takes comes in pieces."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE + 1):
            number += 1
            yield number, line


def column_types(
    rows: Iterable[Mapping[str, Any]], *, strings_among_others: pa.DataType = _AS_JSON
) -> dict[str, pa.DataType]:
    """Return the type of each column that a row has, in order of first occurrence.

    Numbers become strings if some are too large for int64. Objects, lists with values other than strings, and columns
    with several kinds of values become `pa.json_()`. strings_among_others: type of a column with strings and other
    values.
    """
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            column = kinds.setdefault(name, set())
            if value is not None:
                column.add(_kind(value))
    return {name: _column_type(column, strings_among_others) for name, column in kinds.items()}


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "integer" if -_LARGE <= value < _LARGE else "large integer"
    if isinstance(value, float):
        return "float"
    is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return "strings" if is_texts else "json"


def _column_type(kinds: set[str], strings_among_others: pa.DataType) -> pa.DataType:
    if "large integer" in kinds and kinds <= _NUMBERS:
        return pa.string()
    return _COLUMN_TYPES.get(frozenset(kinds), strings_among_others if "string" in kinds else _AS_JSON)


def first_value(kind: str, path: Path, column: str) -> Any:
    """Return the first row's value of a column, or None if it cannot be read, which the loader reports."""
    try:
        return _FIRST_VALUE_READERS[kind](path, column)
    except (RowError, pa.ArrowException, OSError, ValueError, LookupError, TypeError, StopIteration, RecursionError):
        return None


def _from_arrow(path: Path, column: str) -> Any:
    with pa.memory_map(str(path)) as file:
        try:
            batch = pa.ipc.open_file(file).get_batch(0)
        except pa.ArrowInvalid:
            batch = pa.ipc.open_stream(file).read_next_batch()
        value = batch.column(column).slice(0, 1)
        value.validate(full=True)
        return value.to_pylist()[0]


def _from_parquet(path: Path, column: str) -> Any:
    with pq.ParquetFile(path) as file:
        return next(file.iter_batches(1, columns=[column])).column(0).to_pylist()[0]


def _from_jsonl(path: Path, column: str) -> Any:
    return next(json_rows(path))[1][column]


_FIRST_VALUE_READERS: dict[str, Callable[[Path, str], Any]] = {
    "arrow_files": _from_arrow,
    "parquet_files": _from_parquet,
    "jsonl_files": _from_jsonl,
}


def of_source(index: int) -> str:
    """Describe a row of a source without files."""
    return f"row {index} (counted from 0)"


def of_rows(files: Sequence[Path], counts: Sequence[int]) -> Origin:
    """Return a function that names a row's file and the row in it. counts: number of rows of each file."""

    def place(index: int) -> str:
        remaining = index
        for file, count in zip(files, counts, strict=True):
            if remaining < count:
                return f"row {index} (counted from 0 over all files: row {remaining} of {str(file)!r})"
            remaining -= count
        return of_source(index)

    return place


def of_lines(files: Sequence[Path], plain: Sequence[Path]) -> Origin:
    """Return a function that names a row's file and line, counted from 1. plain: uncompressed copy of each file.

    It reads the files only when it is called.
    """

    def place(index: int) -> str:
        remaining = index
        for file, readable in zip(files, plain, strict=True):
            places = (place for place, _ in json_rows(readable)) if _is_json_list(readable) else _line_places(readable)
            for name in places:
                if not remaining:
                    return f"row {index} (counted from 0 over all files: {name} of {str(file)!r})"
                remaining -= 1
        return of_source(index)

    return place


def _line_places(path: Path) -> Iterator[str]:
    return (f"line {number}" for number, line in numbered(path) if line.strip())
