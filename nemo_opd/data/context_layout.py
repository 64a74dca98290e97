"""Columns that teachers' contexts read (methods.md §13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nemo_opd.data.documents import FIELD
from nemo_opd.data.layout import Layout, column_without_nulls, is_list_of_objects, is_string, type_name, type_of
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets

    from nemo_opd.data.origin import Origin


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Another layout's documents, plus the fields that contexts name."""

    documents: Layout
    named: tuple[tuple[str, str], ...]
    """Pairs of the user's column name and a setting that names it; several settings may name one column."""

    @property
    def columns(self) -> Mapping[str, str]:
        document_columns = self.documents.columns
        return {**document_columns, **{name: FIELD + name for name, _ in self.named if name not in document_columns}}

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)
        for name, setting in self.named:
            if name not in schema.names:
                raise DataError(
                    f"{source} has no column {name!r}, which {setting} names; write one of its columns there: "
                    f"{', '.join(schema.names)}"
                )
            dtype = type_of(schema, name, setting, source)
            if not (is_string(dtype) or (is_list_of_objects if setting.endswith(".key") else _is_printable)(dtype)):
                kinds = "texts or messages" if setting.endswith(".key") else "texts, lists of texts or numbers"
                raise DataError(
                    f"{source}: column {name!r} is of type {type_name(dtype)}, which {setting} cannot write; name "
                    f"one of {kinds}"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        """Raise DataError if there is nothing to learn from, or a row lacks a field."""
        self.documents.require_content(documents, source, origin)
        for name in dict.fromkeys(name for name, _ in self.named):
            column_without_nulls(documents, self.columns[name], source, origin, name=repr(name))


def _is_printable(dtype: pa.DataType) -> bool:
    """Return whether a template can print values of this type."""
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return is_string(dtype.value_type)
    return pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)
