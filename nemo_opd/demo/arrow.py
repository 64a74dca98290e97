"""Atomic writing of Arrow files."""

import uuid
from pathlib import Path

import pyarrow as pa


def write_stream(path: Path, table: pa.Table, rows_per_batch: int | None = None) -> None:
    """Write an Arrow stream. Safe in concurrent processes: each writes under its own name, then renames the file."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_per_batch)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
