"""Which columns hold the documents, and what they have to be."""

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
        """Raise DataError where a column is missing or of another type."""

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        """Raise DataError where there is nothing to learn from."""


def layout_of(data: Data) -> Layout:
    return TextLayout(data.text_key) if data.messages_key is None else ChatLayout(data.messages_key, data.tools_key)


@dataclass(frozen=True, slots=True)
class TextLayout:
    """A document is a string."""

    text_key: str
    section: str = "data"
    """The settings in which `text_key` is."""

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
        column = whole_column(documents, TEXT, source, origin)
        if not any(pc.any(pc.greater(pc.binary_length(chunk), 0)).as_py() for chunk in column.chunks):
            raise DataError(
                f"{source}: all {len(documents)} documents are empty; check {self.section}.text_key and the source"
            )


@dataclass(frozen=True, slots=True)
class ChatLayout:
    """A document is a list of messages, and perhaps a list of tools; either may be JSON."""

    messages_key: str
    tools_key: str | None
    section: str = "data"
    """The settings in which both are."""

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
                    f"{source}: column {name!r} is of type {type_name(dtype)}, neither a list of objects nor that "
                    f"as JSON; set {setting} to such a column"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        whole_column(documents, MESSAGES, source, origin)


@dataclass(frozen=True, slots=True)
class RoutedLayout:
    """Documents of another layout, each with the name of the teacher that it is for."""

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
                f"{source} has no column {self.key!r}, by which aggregation.type=routed finds the teacher of each row; "
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
        """Raise DataError where there is nothing to learn from, and where a row names an unknown teacher."""
        self.documents.require_content(documents, source, origin)
        names = whole_column(documents, TEACHER, source, origin)
        is_unknown = pc.invert(pc.is_in(names, value_set=pa.array(self.teachers, names.type)))
        row = pc.index(is_unknown, True).as_py()
        if row >= 0:
            raise DataError(
                f"{source}: {origin(row)} has {self.key}={names[row].as_py()!r}, which is "
                f"no teacher of this run; the teachers are {', '.join(self.teachers)}; correct the rows or the names "
                "under teachers"
            )


def type_of(schema: pa.Schema, name: str, setting: str, source: str) -> pa.DataType:
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
    """Return whether a type is a list of objects, also of different keys and types, which `datasets` keeps as JSON."""
    if not (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)):
        return isinstance(dtype, pa.JsonType)
    return pa.types.is_struct(dtype.value_type) or isinstance(dtype.value_type, pa.JsonType)


def whole_column(
    documents: datasets.Dataset, column: str, source: str, origin: Origin, name: str | None = None
) -> pa.ChunkedArray:
    """Return a column; messages call it `name`. Raises DataError where there are no rows, or rows that hold nothing."""
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
