"""Documents of a loader: texts or conversations, by index."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_opd.errors import DataError

TEXT = "text"
MESSAGES = "messages"
TOOLS = "tools"
TEACHER = "teacher"
ANSWER = "answer"
RESPONSE = "response"
DOMAIN = "domain"
"""The columns of a dataset as `sources.load_documents` returns it, whatever the user's names are; answers and
responses are of prompts alone, domains of validation texts.
"""
FIELD = "field."
"""Begins the name of a column that teachers' contexts alone read."""
ROW = "row."
"""Begins the name of a column that rewards alone read."""
OTHER = "other."
"""Begins the name of a column with another record's value of what contexts read."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values of the row that teachers' contexts are made of, by our names of their columns."""


_Content = str | Conversation


@dataclass(frozen=True, slots=True)
class Routed:
    """A document that is for one teacher alone."""

    content: _Content
    teacher: str


Document = _Content | Routed


class Columns(Protocol):
    """A Hugging Face dataset of the columns above, or anything that is read alike."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int], /) -> Mapping[str, list[Any]]: ...


def read_documents(columns: Columns, indices: list[int]) -> Sequence[Document]:
    """Read the documents of these rows. Raises DataError for a conversation that is malformed JSON."""
    rows = columns[indices]
    contents = _read_contents(rows, len(indices))
    if TEACHER not in rows:
        return contents
    return [Routed(content, teacher) for content, teacher in zip(contents, rows[TEACHER], strict=True)]


def _read_contents(rows: Mapping[str, list[Any]], number: int) -> Sequence[_Content]:
    if TEXT in rows:
        return rows[TEXT]
    tools = rows.get(TOOLS, [None] * number)
    read = zip(rows[MESSAGES], tools, fields_of(rows, number), strict=True)
    return [Conversation(parsed(messages), parsed(offered), fields) for messages, offered, fields in read]


def parsed(value: Any) -> Any:
    """Parse a column's value, which may be JSON. Raises DataError where it is malformed.

    Arrow gives every message all keys that any message has; those that are null were not there.
    """
    return _without_nulls(_from_json(value) if isinstance(value, str) else value)


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = error.msg
    except RecursionError:
        reason = "too many lists and objects in each other"
    except UnicodeEncodeError:
        reason = "half of a surrogate pair (\\ud800 to \\udfff), which is no character,"
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
    """Return what contexts read of each of `number` rows, by column."""
    names = [name for name in rows if is_field(name)]
    return [{name: rows[name][i] for name in names} for i in range(number)]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
