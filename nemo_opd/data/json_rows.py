"""Exact reading of JSON rows as a dataset: the reader of `datasets` takes strings for dates and integers for floats."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from nemo_opd.data.documents import MESSAGES, RESPONSE, TEACHER, TEXT, TOOLS
from nemo_opd.data.json_types import column_types
from nemo_opd.data.lines import RowError, json_rows
from nemo_opd.data.record import written

_STRINGS = (TEXT, TEACHER, RESPONSE)
_AS_JSON = (MESSAGES, TOOLS)
"""Columns kept as JSON text, which preserves values, nulls and the order of keys."""
_ROWS_AT_A_TIME = 1000


@dataclass
class _Config(datasets.BuilderConfig):
    columns: Mapping[str, str] = field(default_factory=dict)
    """The user's name of a column → ours."""
    whole_rows: bool = False
    """Whether to read all other columns, too."""


class JsonRows(datasets.ArrowBasedBuilder):
    """A builder of datasets from JSON files. Raises RowError for a row that cannot be read."""

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = _Config

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: object) -> list[datasets.SplitGenerator]:
        files = [Path(file) for file in self.config.data_files["train"]]
        fixed = {name: pa.string() for name, ours in self.config.columns.items() if ours in (*_STRINGS, *_AS_JSON)}
        types = fixed
        if self.config.whole_rows or len(fixed) < len(self.config.columns):
            types = self._read_types(files) | fixed
        self.info.features = datasets.Features.from_arrow_schema(pa.schema(types.items()))
        return [datasets.SplitGenerator("train", gen_kwargs={"files": files})]

    def _read_types(self, files: list[Path]) -> dict[str, pa.DataType]:
        """Infer, from all rows, the types of the columns without a fixed type."""
        rows = (row for _, row in chain.from_iterable(map(json_rows, files)))
        types = column_types(rows)
        names = types if self.config.whole_rows else self.config.columns
        return {name: pa.string() if pa.types.is_null(types[name]) else types[name] for name in names if name in types}

    def _generate_tables(self, files: list[Path]) -> Iterator[tuple[int, pa.Table]]:
        schema = self.info.features.arrow_schema
        strings = [name for name, ours in self.config.columns.items() if ours in _STRINGS]
        key, rows = 0, []
        for file in files:
            for place, row in json_rows(file):
                for name in strings:
                    if not isinstance(row.get(name), str | None):
                        raise RowError(file, place, f"{name!r} is not a string but {repr(row[name])[:60]}")
                rows.append(row)
                if len(rows) == _ROWS_AT_A_TIME:
                    yield key, self._table(rows, schema)
                    key, rows = key + 1, []
        if rows:
            yield key, self._table(rows, schema)

    def _table(self, rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
        return pa.table([self._array([row.get(column.name) for row in rows], column) for column in schema], schema)

    def _array(self, values: list[Any], column: pa.Field) -> pa.Array:
        if isinstance(column.type, pa.JsonType):
            texts = [None if value is None else _json(value) for value in values]
            return pa.ExtensionArray.from_storage(column.type, pa.array(texts, column.type.storage_type))
        if column.type == pa.string():
            write = _json if self.config.columns.get(column.name) in _AS_JSON else written
            values = [value if isinstance(value, str | None) else write(value) for value in values]
        return pa.array(values, column.type)


_json = partial(json.dumps, ensure_ascii=False)
