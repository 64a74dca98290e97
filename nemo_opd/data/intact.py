"""Checks that the bytes of Arrow columns are what their types promise.

A memory-mapped file is read without any check: an offset beyond its text kills the process with a signal, and invalid
UTF-8 is noticed only when its row is read. Full validation costs about as much as reading the file once.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from nemo_opd.data.origin import Origin
from nemo_opd.errors import DataError

_MAX_THREADS = 8
_CHUNKS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class _Damage:
    row: int
    """Counted from 0."""
    column: str
    reason: str


def require_intact(table: pa.Table, source: str, origin: Origin) -> None:
    """Raise DataError, with the place of the first damaged row, for a column that cannot be read safely."""
    if damage := first_damage(table):
        raise DataError(
            f"{source}: {origin(damage.row)} has a damaged {damage.column!r}: {damage.reason}; write or download the "
            "file again"
        )


def first_damage(table: pa.Table) -> _Damage | None:
    """Return the first damaged row of the first damaged column, or None if all are sound."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return next(_iter_damage(threads, table), None)


def _iter_damage(threads: ThreadPoolExecutor, table: pa.Table) -> Iterator[_Damage]:
    for name, column in zip(table.column_names, table.columns, strict=True):
        chunks = [_storage(chunk) for chunk in column.chunks]
        groups = [chunks[i : i + _CHUNKS_AT_A_TIME] for i in range(0, len(chunks), _CHUNKS_AT_A_TIME)]
        for group, bad in enumerate(threads.map(_first_bad_chunk, groups)):
            if bad is not None:
                i = group * _CHUNKS_AT_A_TIME + bad
                row = _first_bad_row(chunks[i])
                reason = problem(chunks[i].slice(row, 1)) or problem(chunks[i]) or ""
                yield _Damage(sum(map(len, chunks[:i])) + row, name, reason)


def _first_bad_chunk(chunks: list[pa.Array]) -> int | None:
    return next((i for i, chunk in enumerate(chunks) if problem(chunk) is not None), None)


def problem(values: pa.Array) -> str | None:
    """Return why the values are not valid, or None if they are."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        return " ".join(str(error).split())
    return None


def _first_bad_row(values: pa.Array) -> int:
    """Find the first invalid row by bisection."""
    sound, unsound = 0, len(values)
    while unsound - sound > 1:
        middle = (sound + unsound) // 2
        if problem(values.slice(0, middle)) is None:
            sound = middle
        else:
            unsound = middle
    return sound


def _storage(values: pa.Array) -> pa.Array:
    return values.storage if isinstance(values, pa.ExtensionArray) else values
