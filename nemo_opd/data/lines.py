"""Rows of JSONL, JSON and text files: parsing within parsers' limits, types of columns, and places for messages."""

import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa

from nemo_opd.errors import DataError
from nemo_opd.files import MAX_EXPANSION, UNSUSPICIOUS

_MAX_LINE = 2**31 - 1
"""Limit in bytes, as Arrow's parser counts them."""
_MAX_DEPTH = 500
"""Limit of nested lists and objects. Parsers recurse: some kill the process at tens of thousands."""
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
    """A file, or a row of it, that cannot be read. The message begins with the file's name."""

    @classmethod
    def of(cls, file: Path, place: str, reason: object) -> Self:
        """Return the error for a malformed row."""
        return cls(f"{str(file)!r}: {place} is malformed: {reason}; write one JSON object a line, in UTF-8")


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and object of each non-blank line, or of each element if the file is one JSON list.

    Raises RowError.
    """
    place, is_first, lines = "line 1", True, numbered(path)
    try:
        for number, line in lines:
            if not line.removeprefix(_BOM).strip():
                continue
            if is_first and line.removeprefix(_BOM).lstrip().startswith(b"["):
                for i, element in enumerate(_parsed(b"".join((line, *(rest for _, rest in lines)))), start=1):
                    place = f"element {i}"
                    yield place, _require_object(element)
                return
            place, is_first = f"line {number}", False
            yield place, _require_object(_parsed(line))
    except RowError:
        raise
    except ValueError as error:
        raise RowError.of(path, place, error) from error


def _parsed(text: bytes) -> Any:
    """Parse JSON. Raises ValueError with the reason if it is malformed."""
    if reason := _unreadable(text):
        raise ValueError(reason)
    try:
        value = _DECODER.decode(text.removeprefix(_BOM).decode())
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (column {error.pos + 1})") from error
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
    """Yield the lines of a file, unpacked if it is compressed, with their numbers, from 1.

    A line longer than a parser takes comes in pieces. Raises RowError for a damaged file, and for one that unpacks to
    an unreasonable size.
    """
    limit, size = max(UNSUSPICIOUS, MAX_EXPANSION * path.stat().st_size), 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(min(_MAX_LINE, limit) + 1), b""), start=1):
                size += len(line)
                if size > limit:
                    raise RowError(
                        f"{str(path)!r} unpacks to more than {limit / 1e9:.1f} GB, {MAX_EXPANSION} times its size, as "
                        "no text does; unpack it yourself if you trust it"
                    )
                yield number, line
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowInvalid) as error:
        raise RowError(
            f"{str(path)!r} cannot be read: {type(error).__name__}: {error}; check that it is complete and of this "
            "format"
        ) from error


def _opened(path: Path) -> IO[bytes]:
    """Open a file, unpacked if it is compressed with gzip, zstd, bzip2 or xz; its name does not matter."""
    with path.open("rb") as file:
        start = file.read(max(map(len, _OPENERS)))
    opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
    return path.open("rb") if opener is None else opener(path)


def _arrow_stream(compression: str, path: Path) -> io.BufferedReader:
    # Python's bz2 would ignore what follows the streams.
    return io.BufferedReader(pa.input_stream(str(path), compression=compression))


def _xz(path: Path) -> lzma.LZMAFile:
    """Open a file; raises LZMAError if something follows its streams, which `lzma` would ignore."""
    with path.open("rb") as file:
        file.seek(-2, io.SEEK_END)
        if file.read() != b"YZ":
            raise lzma.LZMAError("it does not end with the end of an xz stream")
    return lzma.LZMAFile(path)


_OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"\x28\xb5\x2f\xfd": partial(_arrow_stream, "zstd"),
    b"BZh": partial(_arrow_stream, "bz2"),
    b"\xfd7zXZ\x00": _xz,
}
"""Openers keyed by a compressed file's first bytes."""


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


def of_lines(files: Sequence[Path]) -> Origin:
    """Return a function that names a row's file and line, counted from 1. It reads the files only when it is called."""

    def place(index: int) -> str:
        remaining = index
        for file in files:
            for name, _ in json_rows(file):
                if not remaining:
                    return f"row {index} (counted from 0 over all files: {name} of {str(file)!r})"
                remaining -= 1
        return of_source(index)

    return place
