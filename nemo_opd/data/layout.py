"""Layouts: which columns hold the documents, and which types they must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from nemo_opd.config.data import Data
from nemo_opd.data.documents import MESSAGES, TEACHER, TEXT, TOOLS
from nemo_opd.data.origin import Origin
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets


class Layout(Protocol):
    @property
    def columns(self) -> Mapping[str, str]:
        """The user's name of a column → ours."""
        ...

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        """Raise DataError if a column is missing or has a wrong type."""

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        """Raise DataError if there is nothing to learn from."""


def layout_of(data: Data) -> Layout:
    return TextLayout(data.text_key) if data.messages_key is None else ChatLayout(data.messages_key, data.tools_key)


@dataclass(frozen=True, slots=True)
class TextLayout:
    """A layout whose documents are strings."""

    text_key: str
    section: str = "data"
    """Section of the settings that contains `text_key`."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.text_key: TEXT}

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        setting = f"{self.section}.text_key"
        dtype = type_of(schema, self.text_key, setting, source)
        if not is_string(dtype):
            raise DataError(
                f"{source}: column {self.text_key!r} is of type {type_name(dtype)}, not string; set {setting} to a "
                "column of strings"
            )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        column = column_without_nulls(documents, TEXT, source, origin)
        if not any(pc.any(pc.greater(pc.binary_length(chunk), 0)).as_py() for chunk in column.chunks):
            raise DataError(
                f"{source}: all {len(documents)} documents are empty; check {self.section}.text_key and the source"
            )


@dataclass(frozen=True, slots=True)
class ChatLayout:
    """A layout whose documents are lists of messages, with an optional list of tools; either may be JSON text."""

    messages_key: str
    tools_key: str | None
    section: str = "data"
    """Section of the settings that contains both keys."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.messages_key: MESSAGES} | ({} if self.tools_key is None else {self.tools_key: TOOLS})

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        for key, name in (("messages_key", self.messages_key), ("tools_key", self.tools_key)):
            if name is None:
                continue
            setting = f"{self.section}.{key}"
            dtype = type_of(schema, name, setting, source)
            if not is_string(dtype) and not is_list_of_objects(dtype):
                raise DataError(
                    f"{source}: column {name!r} is of type {type_name(dtype)}, not a list of objects or its "
                    f"JSON text; set {setting} to such a column"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        column_without_nulls(documents, MESSAGES, source, origin)


@dataclass(frozen=True, slots=True)
class RoutedLayout:
    """Another layout's documents, plus a column that names the teacher of each."""

    documents: Layout
    key: str
    teachers: tuple[str, ...]

    @property
    def columns(self) -> Mapping[str, str]:
        return {**self.documents.columns, self.key: TEACHER}

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)
        if self.key not in schema.names:
            raise DataError(
                f"{source} has no column {self.key!r}, in which aggregation.type=routed looks up each row's teacher; "
                f"add it, set aggregation.key to one of its columns ({', '.join(schema.names)}), or use another "
                "aggregation"
            )
        dtype = schema.field(self.key).type
        if not is_string(dtype):
            raise DataError(
                f"{source}: column {self.key!r} is of type {type_name(dtype)}, not string; set aggregation.key to a "
                "column with the names of teachers"
            )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        """Raise DataError if there is nothing to learn from, or a row names an unknown teacher."""
        self.documents.require_content(documents, source, origin)
        names = column_without_nulls(documents, TEACHER, source, origin)
        is_unknown = pc.invert(pc.is_in(names, value_set=pa.array(self.teachers, names.type)))
        row = pc.index(is_unknown, True).as_py()
        if row >= 0:
            raise DataError(
                f"{source}: {origin(row)} has {self.key}={names[row].as_py()!r}, which is "
                f"not a teacher of this run; the teachers are {', '.join(self.teachers)}; correct the rows or the "
                "names under teachers"
            )


def type_of(schema: pa.Schema, name: str, setting: str, source: str) -> pa.DataType:
    """Return a column's type. Raises DataError if the column is missing or occurs more than once."""
    if name not in schema.names:
        columns = ", ".join(schema.names) or "none"
        raise DataError(f"{source} has no column {name!r}; set {setting} to one of its columns: {columns}")
    if (count := schema.names.count(name)) > 1:
        raise DataError(f"{source} has {count} columns {name!r}; write the file with one, or set {setting} to another")
    return schema.field(name).type


def type_name(dtype: pa.DataType) -> str:
    """Return the name of a column's type for messages."""
    return "JSON (objects, or values of several types)" if isinstance(dtype, pa.JsonType) else str(dtype)


def is_string(dtype: pa.DataType) -> bool:
    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype)


def is_list_of_objects(dtype: pa.DataType) -> bool:
    """Return whether a type is a list of objects, which `datasets` stores as JSON if their keys or types differ."""
    if not (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)):
        return isinstance(dtype, pa.JsonType)
    return pa.types.is_struct(dtype.value_type) or isinstance(dtype.value_type, pa.JsonType)


def column_without_nulls(
    documents: datasets.Dataset, column: str, source: str, origin: Origin, name: str | None = None
) -> pa.ChunkedArray:
    """Return a column, called `name` in messages. Raises DataError if it is empty or has a null."""
    if not len(documents):
        raise DataError(f"{source}: no documents; the source has no rows")
    values = documents.data.column(column)
    if values.null_count:
        first = pc.index(pc.is_null(values), True).as_py()
        raise DataError(
            f"{source}: {values.null_count} of {len(documents)} documents have no {name or column} (null), the first "
            f"in {origin(first)}; leave those rows out"
        )
    return values
