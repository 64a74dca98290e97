"""Documents of a dataset: texts or conversations, read by index."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from nemo_opd.errors import DataError

TEXT = "text"
MESSAGES = "messages"
TOOLS = "tools"
TEACHER = "teacher"
ANSWER = "answer"
RESPONSE = "response"
DOMAIN = "domain"
"""Our column names in a dataset from `sources.load_documents`, whatever the user's names are. Only prompts have answers
and responses; only validation texts have domains.
"""
FIELD = "field."
"""Prefix of columns that only teachers' contexts read."""
ROW = "row."
"""Prefix of columns that only rewards read."""
OTHER = "other."
"""Prefix of columns with another record's values of the fields that contexts read."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values of the row that teachers' contexts read, keyed by our column names."""


_Content = str | Conversation


@dataclass(frozen=True, slots=True)
class Routed:
    """A document for one teacher alone."""

    content: _Content
    teacher: str


Document = _Content | Routed


class Columns(Protocol):
    """A Hugging Face dataset with the columns above, or anything with the same interface."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int], /) -> Mapping[str, list[Any]]: ...


def read_documents(columns: Columns, indices: list[int]) -> Sequence[Document]:
    """Read the documents of these rows. Raises DataError for a conversation that is malformed JSON."""
    rows = read_rows(columns, indices)
    contents = _read_contents(rows, len(indices))
    if TEACHER not in rows:
        return contents
    return [Routed(content, teacher) for content, teacher in zip(contents, rows[TEACHER], strict=True)]


def _read_contents(rows: Mapping[str, list[Any]], number: int) -> Sequence[_Content]:
    if TEXT in rows:
        return rows[TEXT]
    tools = rows.get(TOOLS, [None] * number)
    conversations = zip(rows[MESSAGES], tools, fields_of(rows, number), strict=True)
    return [Conversation(parsed(messages), parsed(offered), fields) for messages, offered, fields in conversations]


def read_rows(columns: Columns, indices: list[int]) -> dict[str, list[Any]]:
    """Read columns of these rows, with the values that the user wrote as far as Arrow keeps them.

    Arrow gives every object all keys that any row has; null values are dropped from messages, tools and contexts.
    Objects that Arrow stores as JSON keep the user's own nulls.
    """
    if isinstance(columns, _Dataset) and _has_objects(columns.data.schema):
        table = columns.with_format("arrow")[indices]
        return {
            name: [_arrow_value(value, column.type, has_added_nulls=_is_document(name)) for value in column.to_pylist()]
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    rows = columns[indices]
    return {name: [_without_nulls(v) for v in rows[name]] if _is_document(name) else rows[name] for name in rows}


@runtime_checkable
class _Dataset(Protocol):
    """A Hugging Face dataset."""

    @property
    def data(self) -> Any: ...

    def with_format(self, type: str, /) -> Any: ...


def _has_objects(schema: pa.Schema) -> bool:
    return any(pa.types.is_nested(field.type) or isinstance(field.type, pa.JsonType) for field in schema)


def _is_document(column: str) -> bool:
    return column in (MESSAGES, TOOLS) or is_field(column)


def _arrow_value(value: Any, dtype: pa.DataType, has_added_nulls: bool) -> Any:
    """Convert a value returned by `to_pylist` to the value that the user wrote."""
    if value is None:
        return None
    if isinstance(dtype, pa.JsonType):
        return _from_json(value)
    if pa.types.is_struct(dtype):
        present = [field for field in dtype if not has_added_nulls or value[field.name] is not None]
        return {field.name: _arrow_value(value[field.name], field.type, has_added_nulls) for field in present}
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return [_arrow_value(item, dtype.value_type, has_added_nulls) for item in value]
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def parsed(value: Any) -> Any:
    """Parse a column's value if it is JSON text. Raises DataError if it is malformed."""
    return _from_json(value) if isinstance(value, str) else value


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = error.msg
    except RecursionError:
        reason = "too many nested lists and objects"
    except UnicodeEncodeError:
        reason = "half of a surrogate pair (\\ud800 to \\udfff), which is not a character,"
    else:
        return value
    raise DataError(
        f"a conversation is malformed JSON: {reason} in {text[:60]!r}…; repair the column that data.messages_key or "
        "data.tools_key names"
    )


def is_field(column: str) -> bool:
    """Return whether teachers' contexts may read a column."""
    return column.startswith((FIELD, OTHER)) or column in (ANSWER, RESPONSE)


def fields_of(rows: Mapping[str, list[Any]], number: int) -> list[dict[str, Any]]:
    """Return the columns that contexts read, as one mapping for each of `number` rows."""
    names = [name for name in rows if is_field(name)]
    return [{name: rows[name][i] for name in names} for i in range(number)]
