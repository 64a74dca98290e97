"""Rows of local files, each with its place for messages."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nemo_opd.errors import DataError

JSON_LINES = frozenset({".jsonl", ".json", ".ndjson"})
PARQUET = frozenset({".parquet"})


@dataclass(frozen=True, slots=True)
class Row:
    file: Path
    place: str
    """`row 3` or `line 4`."""
    values: dict[str, Any]

    def error(self, what: str) -> DataError:
        return DataError(f"{self.file}, {self.place}: {what}")

    def text(self, *columns: str) -> str:
        """What is in the first of these columns that there is, a number as it is written.

        Raises DataError where there is none, or where it holds nothing or something else.
        """
        column = self.named(*columns)
        value = self.values[column]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            shown = "null" if value is None else f"{value!r} ({type(value).__name__})"
            raise self.error(f"column {column!r} is {shown}, where text or a number is expected")
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        if not text.strip():
            raise self.error(f"column {column!r} is empty, where text or a number is expected")
        return text

    def named(self, *columns: str) -> str:
        """The first of these columns that there is. Raises DataError where there is none."""
        for column in columns:
            if column in self.values:
                return column
        wanted = " or ".join(map(repr, columns))
        raise self.error(f"there is no column {wanted}; the columns are {', '.join(self.values) or 'none'}")

    def optional(self, *columns: str) -> str | None:
        """As `text`; None where there is no such column, or nothing in it."""
        return next((self.text(column) for column in columns if self.values.get(column) not in (None, "")), None)


def read_rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[Row]:
    """Of Parquet and JSON-lines files, in order. Of Parquet only these columns are read, as far as they are there.

    Raises DataError for a file that is missing, of another kind, or damaged.
    """
    for file in files:
        if not file.is_file():
            raise DataError(f"--input {file}: there is no such file")
        if file.suffix in PARQUET:
            yield from _parquet_rows(file, columns)
        elif file.suffix in JSON_LINES:
            yield from _json_rows(file)
        else:
            known = ", ".join(sorted(PARQUET | JSON_LINES))
            raise DataError(f"--input {file}: of an unknown kind; give a file that ends in one of {known}")


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    try:
        with pq.ParquetFile(file) as parquet:
            there = parquet.schema_arrow.names
            known = [column for column in columns if column in there]
            number = 0
            for batch in parquet.iter_batches(columns=known):
                # The others by name alone, for a message that lists what is there.
                others = dict.fromkeys(column for column in there if column not in known)
                for values in batch.to_pylist():
                    yield Row(file, f"row {number}", values | others)
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"--input {file}: cannot be read as Parquet ({error}); copy it there again") from error


def _json_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: no JSON ({error}); give one object a line") from error
            if not isinstance(values, dict):
                raise DataError(f"{file}, line {number}: no JSON object; give one object a line")
            yield Row(file, f"line {number}", values)
