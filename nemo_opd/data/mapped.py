"""Watch over a dataset's memory-mapped files: reading past the end of a truncated one kills the process."""

import logging
import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

import datasets
from datasets.table import ConcatenationTable, MemoryMappedTable, Table

from nemo_opd.data.documents import Columns
from nemo_opd.data.intact import first_damage
from nemo_opd.errors import DataError

_log = logging.getLogger(__name__)

_State = tuple[int, int, int]
"""Inode, bytes, and time of the last change in ns."""


@dataclass
class MappedFiles:
    """Files of a dataset, with their states when it was loaded.

    A file that is deleted or replaced stays mapped as it was. A file changed in place is the dataset's new content and
    is checked again. A change between the check and the read goes unnoticed.
    """

    tables: list[MemoryMappedTable | None]
    """None for rows in memory."""
    stops: list[int]
    """End of each table's rows."""
    states: dict[str, _State] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Columns) -> Self:
        tables = _tables_of(columns)
        mapped = [table if isinstance(table, MemoryMappedTable) else None for table in tables]
        paths = {table.path for table in mapped if table is not None}
        states = {path: state for path in paths if (state := _state_of(path)) is not None}
        return cls(mapped, list(accumulate(table.num_rows for table in tables)), states)

    def check(self, rows: Iterable[int]) -> None:
        """Check the files of these rows. Raises DataError for one that was truncated or damaged."""
        if not self.states:
            return
        for i in sorted({bisect_right(self.stops, row) for row in rows}):
            table = self.tables[i]
            if table is not None and table.path in self.states:
                self._check(table)

    def _check(self, table: MemoryMappedTable) -> None:
        previous, now = self.states[table.path], _state_of(table.path)
        if now is None or now[0] != previous[0] or now == previous:
            return
        changed = f"{table.path} was changed while the run reads it"
        if now[1] < previous[1]:
            raise DataError(f"{changed}: it has {now[1]} bytes, and had {previous[1]}; restore it and resume the run")
        if damage := first_damage(table.table):
            raise DataError(f"{changed}, and is damaged now: {damage.reason}; restore it and resume the run")
        _log.warning("%s; its new content is used from here on", changed)
        self.states[table.path] = now


def _tables_of(columns: Columns) -> list[Table]:
    """Return the tables with a dataset's rows, in order; none if an index reorders the rows."""
    if not isinstance(columns, datasets.Dataset) or columns._indices is not None:
        return []
    data = columns.data
    return [row[0] for row in data.blocks] if isinstance(data, ConcatenationTable) else [data]


def _state_of(path: str) -> _State | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
