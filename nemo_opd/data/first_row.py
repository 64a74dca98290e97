"""The first value of a column, without reading the whole file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nemo_opd.data.lines import RowError, json_rows


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


READERS: dict[str, Callable[[Path, str], Any]] = {
    "arrow_files": _from_arrow,
    "parquet_files": _from_parquet,
    "jsonl_files": _from_jsonl,
}


def first_value(kind: str, path: Path, column: str) -> Any:
    """Return the first row's value of a column, or None if it cannot be read, which the loader reports."""
    try:
        return READERS[kind](path, column)
    except (RowError, pa.ArrowException, OSError, ValueError, LookupError, TypeError, StopIteration, RecursionError):
        return None
