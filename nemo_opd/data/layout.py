"""Layouts: which columns hold the documents, and which types they must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nemo_opd.config.data import Data
from nemo_opd.config.reward import FunctionReward, Reward, RewardBase
from nemo_opd.data.columns import described, is_list_of_objects, is_string, readings
from nemo_opd.data.record import (
    ANSWER,
    COMPLETION,
    DOMAIN,
    FIELD,
    MESSAGES,
    PROMPT,
    RESPONSE,
    ROW,
    TEACHER,
    TEXT,
    TOOLS,
)
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from nemo_opd.data.lines import Origin


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
    if not data.is_chat:
        return TextLayout(data.text_key)
    return ChatLayout(data.messages_key, data.tools_key, prompt_key=data.prompt_key, completion_key=data.completion_key)


def columns_in(layout: Layout, schemas: Sequence[pa.Schema]) -> Mapping[str, str]:
    """Return the columns to read, as the user's name → ours.

    A RowLayout adds each column that all schemas have with the same type.
    """
    layout_columns = layout.columns
    if not isinstance(layout, RowLayout):
        return layout_columns
    first, *other_schemas = schemas
    extra = [
        field
        for field in first
        if field.name not in layout_columns
        and first.names.count(field.name) == 1
        and _is_known(field)
        and all(field.name in schema.names and schema.field(field.name).type == field.type for schema in other_schemas)
    ]
    return {**layout_columns, **{field.name: ROW + field.name for field in extra}}


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
        dtype = _type_of(schema, self.text_key, setting, source)
        if not is_string(dtype):
            raise DataError(
                f"{source}: column {self.text_key!r} is of type {_type_name(dtype)}, not string; set {setting} to a "
                "column of strings"
            )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        import pyarrow.compute as pc

        column = _column_without_nulls(documents, TEXT, source, origin)
        if not any(pc.any(pc.greater(pc.binary_length(chunk), 0)).as_py() for chunk in column.chunks):
            raise DataError(
                f"{source}: all {len(documents)} documents are empty; check {self.section}.text_key and the source"
            )


@dataclass(frozen=True, slots=True)
class ChatLayout:
    """A layout whose documents are lists of messages, or prompts with completions, with an optional list of tools.

    Messages and tools in one column may be JSON text.
    """

    messages_key: str | None
    """None if `prompt_key` names columns."""
    tools_key: str | None
    section: str = "data"
    """Section of the settings that contains all keys."""
    prompt_key: tuple[str, ...] = ()
    completion_key: str | None = None

    @property
    def columns(self) -> Mapping[str, str]:
        return {name: ours for _, name, ours in self._named}

    @property
    def _named(self) -> list[tuple[str, str, str]]:
        """Setting, user's name and our name of each column."""
        named = [
            ("messages_key", self.messages_key, MESSAGES),
            *(("prompt_key", name, f"{PROMPT}{i}") for i, name in enumerate(self.prompt_key)),
            ("completion_key", self.completion_key, COMPLETION),
            ("tools_key", self.tools_key, TOOLS),
        ]
        return [(setting, name, ours) for setting, name, ours in named if name is not None]

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        for key, name, ours in self._named:
            setting = f"{self.section}.{key}"
            dtype = _type_of(schema, name, setting, source)
            if not is_string(dtype) and not is_list_of_objects(dtype):
                text = "its JSON text" if ours in (MESSAGES, TOOLS) else "a text"
                raise DataError(
                    f"{source}: column {name!r} is of type {_type_name(dtype)}, not a list of objects or {text}; set "
                    f"{setting} to such a column"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        for _, name, ours in self._named:
            if ours in (MESSAGES, f"{PROMPT}0", COMPLETION):
                _column_without_nulls(documents, ours, source, origin, name=None if ours == MESSAGES else repr(name))


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
                f"{source}: column {self.key!r} is of type {_type_name(dtype)}, not string; set aggregation.key to a "
                "column with the names of teachers"
            )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        """Raise DataError if there is nothing to learn from, or a row names an unknown teacher."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.documents.require_content(documents, source, origin)
        names = _column_without_nulls(documents, TEACHER, source, origin)
        is_unknown = pc.invert(pc.is_in(names, value_set=pa.array(self.teachers, names.type)))
        row = pc.index(is_unknown, True).as_py()
        if row >= 0:
            raise DataError(
                f"{source}: {origin(row)} has {self.key}={names[row].as_py()!r}, which is "
                f"not a teacher of this run; the teachers are {', '.join(self.teachers)}; correct the rows or the "
                "names under teachers"
            )


@dataclass(frozen=True, slots=True)
class DomainLayout:
    """Another layout's documents, plus a column with their domains."""

    documents: Layout
    key: str

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.key: DOMAIN, **self.documents.columns}

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        import pyarrow as pa

        self.documents.require_columns(schema, source)
        dtype = _type_of(schema, self.key, "data.domain_key", source)
        if not is_string(dtype) and not pa.types.is_integer(dtype):
            raise DataError(
                f"{source}: column {self.key!r} is of type {_type_name(dtype)}; set data.domain_key to a column of "
                "names"
            )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        self.documents.require_content(documents, source, origin)


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
            dtype = _type_of(schema, name, setting, source)
            if not (is_string(dtype) or (is_list_of_objects if setting.endswith(".key") else _is_printable)(dtype)):
                kinds = "texts or messages" if setting.endswith(".key") else "texts, lists of texts or numbers"
                raise DataError(
                    f"{source}: column {name!r} is of type {_type_name(dtype)}, which {setting} cannot write; name "
                    f"one of {kinds}"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        """Raise DataError if there is nothing to learn from, or a row lacks a field."""
        self.documents.require_content(documents, source, origin)
        for name in dict.fromkeys(name for name, _ in self.named):
            _column_without_nulls(documents, self.columns[name], source, origin, name=repr(name))


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Another layout's prompts, plus a verifiable reward's answers and the responses, if their columns are named."""

    documents: Layout
    answer_key: str | None = None
    """None if no reward reads an answer."""
    response_key: str | None = None
    reward: str = "reward"
    """Section of the settings that contains `answer_key`."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The user's name of a column → ours. Raises DataError if one column has two uses."""
        columns = dict(self.documents.columns)
        for setting, name, ours in self._extra_columns:
            if name in columns:
                raise DataError(
                    f"{setting}={name}: that column already holds the prompts' {columns[name]}; name another"
                )
            columns[name] = ours
        return columns

    @property
    def _extra_columns(self) -> list[tuple[str, str, str]]:
        """Setting, user's name and our name of each column beyond the prompts."""
        named = (
            (f"{self.reward}.answer_key", self.answer_key, ANSWER),
            ("data.response_key", self.response_key, RESPONSE),
        )
        return [(setting, name, ours) for setting, name, ours in named if name is not None]

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)
        for setting, name, ours in self._extra_columns:
            dtype = _type_of(schema, name, setting, source)
            if not (is_string(dtype) or (ours == ANSWER and _is_answer(dtype))):
                kinds = "strings, numbers or lists of strings" if ours == ANSWER else "strings"
                raise DataError(
                    f"{source}: column {name!r} is of type {_type_name(dtype)}; set {setting} to a column of {kinds}"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        self.documents.require_content(documents, source, origin)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Another layout's documents, plus all other columns of their rows."""

    documents: Layout

    @property
    def columns(self) -> Mapping[str, str]:
        return self.documents.columns

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        self.documents.require_content(documents, source, origin)


def with_columns(
    layout: Layout, named: Sequence[tuple[str, str]], reward: Reward | None, domain_key: str | None = None
) -> Layout:
    """Add the columns that settings name to a layout, and entire rows if the reward may read any column."""
    layout = ContextLayout(layout, tuple(named)) if named else layout
    layout = layout if domain_key is None else DomainLayout(layout, domain_key)
    return RowLayout(layout) if _reads_rows(reward) else layout


def _reads_rows(reward: RewardBase | None) -> bool:
    """Return whether a reward may read any column of a row."""
    return reward is not None and any(isinstance(part, FunctionReward) for part in reward.parts)


def _type_of(schema: pa.Schema, name: str, setting: str, source: str) -> pa.DataType:
    """Return a column's type. Raises DataError if the column is missing or occurs more than once."""
    if name not in schema.names:
        columns = ", ".join(schema.names) or "none"
        advice = "".join(f", or write {described(reading)}" for reading in readings(schema))
        raise DataError(f"{source} has no column {name!r}; set {setting} to one of its columns: {columns}{advice}")
    if (count := schema.names.count(name)) > 1:
        raise DataError(f"{source} has {count} columns {name!r}; write the file with one, or set {setting} to another")
    return schema.field(name).type


def _type_name(dtype: pa.DataType) -> str:
    """Return the name of a column's type for messages."""
    import pyarrow as pa

    return "JSON (objects, or values of several types)" if isinstance(dtype, pa.JsonType) else str(dtype)


def _column_without_nulls(
    documents: datasets.Dataset, column: str, source: str, origin: Origin, name: str | None = None
) -> pa.ChunkedArray:
    """Return a column, called `name` in messages. Raises DataError if it is empty or has a null."""
    import pyarrow.compute as pc

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


def _is_printable(dtype: pa.DataType) -> bool:
    """Return whether a template can print values of this type, which is not a string."""
    import pyarrow as pa

    return pa.types.is_boolean(dtype) or _is_answer(dtype)


def _is_answer(dtype: pa.DataType) -> bool:
    """Return whether a type, which is not a string, is a number or a list of strings."""
    import pyarrow as pa

    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return is_string(dtype.value_type)
    return pa.types.is_integer(dtype) or pa.types.is_floating(dtype)


def _is_known(field: pa.Field) -> bool:
    """Return whether `datasets` has a type for a column."""
    import datasets
    import pyarrow as pa

    try:
        datasets.Features.from_arrow_schema(pa.schema([field]))
    except Exception:  # `datasets` raises various errors for unknown types
        return False
    return True
