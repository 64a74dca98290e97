"""Columns that teachers' contexts are made of (methods.md §13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nemo_opd.data.documents import FIELD
from nemo_opd.data.layout import Layout, is_list_of_objects, is_string, type_name, type_of, whole_column
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets

    from nemo_opd.data.origin import Origin


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Documents of another layout, with the fields that contexts name."""

    documents: Layout
    named: tuple[tuple[str, str], ...]
    """The user's name of a column, and a setting that names it. A column may be there with several."""

    @property
    def columns(self) -> Mapping[str, str]:
        own = self.documents.columns
        return {**own, **{name: FIELD + name for name, _ in self.named if name not in own}}

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)
        for name, setting in self.named:
            if name not in schema.names:
                raise DataError(
                    f"{source} has no column {name!r}, which {setting} names; write one of its columns there: "
                    f"{', '.join(schema.names)}"
                )
            dtype = type_of(schema, name, setting, source)
            if not (is_string(dtype) or (is_list_of_objects if setting.endswith(".key") else _is_written)(dtype)):
                kinds = "texts or messages" if setting.endswith(".key") else "texts, lists of texts or numbers"
                raise DataError(
                    f"{source}: column {name!r} is of type {type_name(dtype)}, which {setting} cannot write; name "
                    f"one of {kinds}"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        """Raise DataError where there is nothing to learn from, and where a row lacks a field."""
        self.documents.require_content(documents, source, origin)
        for name in dict.fromkeys(name for name, _ in self.named):
            whole_column(documents, self.columns[name], source, origin, name=repr(name))


def _is_written(dtype: pa.DataType) -> bool:
    """Return whether a template can write values of the type."""
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return is_string(dtype.value_type)
    return pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)
