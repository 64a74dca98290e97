"""Checks of a source's columns by a layout, and readings of columns with customary names as documents."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from nemo_opd.data.columns import DATA_SETTINGS, Column, Layout, Use
from nemo_opd.data.lines import Origin
from nemo_opd.data.row_types import parsed
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets

_MESSAGES = ("messages", "conversations", "conversation")
_COMPLETIONS = ("completion", "output", "response")
_PROMPTS = (("prompt",), ("instruction", "input"))
"""Columns of a prompt. Only the first one is required."""

Reading = Mapping[str, str | tuple[str, ...]]
"""Keys of `data` with the columns that they name."""


def readings(schema: pa.Schema) -> list[Reading]:
    """Return every way in which columns with customary names hold documents."""
    strings = [field.name for field in schema if _is_string(field.type)]
    lists = [field.name for field in schema if _is_list_of_objects(field.type)]
    usable = {*strings, *lists}
    ways: list[Reading] = [{"text_key": "text"}] if "text" in strings else []
    ways += [{"messages_key": name} for name in _MESSAGES if name in usable]
    for first, *more in _PROMPTS:
        prompt = (first, *(name for name in more if name in usable))
        answers = [name for name in _COMPLETIONS if name in usable]
        if first in usable:
            ways += [{"prompt_key": prompt, "completion_key": name} for name in answers]
        if first in lists and not answers:
            ways.append({"prompt_key": prompt})
    if not ways and {"question", "answer"} <= usable:
        ways.append({"prompt_key": ("question",), "completion_key": "answer"})
    return ways


def prompt_readings(schema: pa.Schema) -> list[Reading]:
    """Return the ways in which a column of prompts without answers holds them: texts to continue, or messages."""
    strings = {field.name for field in schema if _is_string(field.type)}
    for first, *more in _PROMPTS:
        if first in strings:
            return [{"text_key": first}, {"prompt_key": (first, *(name for name in more if name in strings))}]
    return []


def described(reading: Reading, settings: Mapping[str, str] = DATA_SETTINGS) -> str:
    """Return a reading as it is written on a command line. settings: as in `Layout`."""
    written = {key: value if isinstance(value, str) else f"[{','.join(value)}]" for key, value in reading.items()}
    return " ".join(f"{settings[key]}={value}" for key, value in written.items())


def restricted_to(ways: Iterable[Reading], keys: Container[str]) -> list[Reading]:
    """Drop the keys of readings that are not in `keys`, then duplicates."""
    restricted = ({key: names for key, names in way.items() if key in keys} for way in ways)
    return [*{described(way): way for way in restricted if way}.values()]


def require_columns(layout: Layout, schema: pa.Schema, source: str, *, is_first: bool = True) -> None:
    """Raise DataError if a column is missing, occurs more than once or has a wrong type.

    source: name in messages. is_first: whether the settings may name this file's columns, or another file's come first.
    """
    for column in layout.named:
        if column.name not in schema.names:
            raise DataError(
                f"{source} has no column {column.name!r}{_remedy(layout, column, schema, source, is_first=is_first)}"
            )
        if (count := schema.names.count(column.name)) > 1:
            raise DataError(
                f"{source} has {count} columns {column.name!r}; write the file with one, or set {column.setting} to "
                "another"
            )
        dtype = schema.field(column.name).type
        accepts, remedy = _TYPES[column.use]
        if not accepts(dtype):
            way_out = remedy.format(column.setting)
            if column.use == "text" and "messages_key" in layout.settings and _is_list_of_objects(dtype):
                way_out = f"; for conversations, write {layout.settings['messages_key']}={column.name} instead"
            kind = "JSON (objects, or values of several types)" if isinstance(dtype, pa.JsonType) else str(dtype)
            raise DataError(f"{source}: column {column.name!r} is of type {kind}{way_out}")


def _remedy(layout: Layout, column: Column, schema: pa.Schema, source: str, *, is_first: bool) -> str:
    """Complete the message on a missing column."""
    names = ", ".join(schema.names) or "none"
    if source.startswith("evaluation.data.") and column.setting.startswith("data."):
        kind, name = source.removeprefix("evaluation.data.").partition("=")[0], column.setting.removeprefix("data.")
        return (
            f" (only {names}), and questions in evaluation.data have the training files' columns; for others write "
            f"a set in its place: evaluation.sets.NAME.data.{kind}=… evaluation.sets.NAME.data.{name}=COLUMN"
        )
    if not is_first and column.use != "domain" and not column.setting.startswith("data.validation."):
        texts = (
            ", or, unless the run samples, set data.validation.text_key to the column of validation texts, or write "
            "data.validation=null"
        )
        way_out = f"convert it{texts if source.startswith('data.validation.') else ''}"
        return f" (only {names}), and all training and validation files need the same columns; {way_out}"
    if column.use == "teacher":
        return (
            ", in which aggregation.type=routed looks up each row's teacher; add it, set aggregation.key to one of its "
            f"columns ({names}), or use another aggregation"
        )
    if column.use in ("prompt", "field"):
        return f", which {column.setting} names; write one of its columns there: {names}"
    accepts, _ = _TYPES[column.use]
    fitting = [field.name for field in schema if accepts(field.type)]
    names = ", ".join(fitting) or names
    settings = layout.settings
    key = next((key for key, setting in settings.items() if setting == column.setting), None)
    ways = readings(schema) if key not in (None, "tools_key") else []
    if key == "messages_key":
        ways = ways or prompt_readings(schema)
        names += f"; for texts, set {settings['text_key']}"
        names += f"; for questions, set {settings['prompt_key']}" if "prompt_key" in settings else ""
    ways = [way for way in restricted_to(ways, settings) if key not in way]
    advice = "".join(f", or write {described(reading, settings)}" for reading in ways)
    if key == "text_key" and not ways:
        chat = next((field.name for field in schema if _is_list_of_objects(field.type)), None)
        if chat is not None and "messages_key" in settings:
            if not fitting:
                return f"; for conversations, write {settings['messages_key']}={chat}"
            advice += f", or for conversations {settings['messages_key']}={chat}"
        if "completion_key" in settings and len(fitting) > 1:
            advice += f"; for prompts with answers, set {settings['prompt_key']} and {settings['completion_key']}"
    return f"; set {column.setting} to one of its columns: {names}{advice}"


def require_content(layout: Layout, documents: datasets.Dataset, source: str, origin: Origin) -> None:
    """Raise DataError if there is nothing to learn from, a required value is null, or a row names an unknown teacher.

    documents: with our names of columns. source: name in messages.
    """
    import pyarrow.compute as pc  # takes as long to import as the rest of pyarrow

    if not len(documents):
        raise DataError(f"{source}: no documents; the source has no rows")
    for column in (column for column in layout.named if column.is_required):
        values = documents.data.column(layout.columns[column.name])
        if values.null_count:
            first = pc.index(pc.is_null(values), True).as_py()
            name = repr(column.name) if column.use in ("turn", "prompt", "field") else column.ours
            raise DataError(
                f"{source}: {values.null_count} of {len(documents)} documents have no {name} (null), the first in "
                f"{origin(first)}; leave those rows out"
            )
        if column.use == "text" and not any(
            pc.any(pc.greater(pc.binary_length(chunk), 0)).as_py() for chunk in values.chunks
        ):
            raise DataError(
                f"{source}: all {len(documents)} documents are empty; check {column.setting} and the source"
            )
        if column.use == "messages" and not _may_be_messages(first := values[0].as_py()):
            raise DataError(
                f"{source}: column {column.name!r} holds no conversations; its first row is {first[:60]!r}…, not a "
                f"list of objects or its JSON text; set {column.setting} to such a column, or write "
                f"{layout.settings['text_key']}={column.name} in its place to read texts"
            )
        if column.use == "teacher":
            is_unknown = pc.invert(pc.is_in(values, value_set=pa.array(layout.teachers, values.type)))
            if (row := pc.index(is_unknown, True).as_py()) >= 0:
                raise DataError(
                    f"{source}: {origin(row)} has {column.name}={values[row].as_py()!r}, which is not a teacher of "
                    f"this run; the teachers are {', '.join(layout.teachers)}; correct the rows or the names under "
                    "teachers"
                )


def _may_be_messages(value: object) -> bool:
    """Return whether a value is not a string, or the JSON text of a list."""
    try:
        return not isinstance(value, str) or isinstance(parsed(value), list)
    except DataError:
        return False


def _is_string(dtype: pa.DataType) -> bool:
    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype)


def _is_list(dtype: pa.DataType) -> bool:
    return pa.types.is_list(dtype) or pa.types.is_large_list(dtype)


def _is_list_of_objects(dtype: pa.DataType) -> bool:
    """Return whether a type is a list of objects, which `datasets` stores as JSON if their keys or types differ."""
    if not _is_list(dtype):
        return isinstance(dtype, pa.JsonType)
    return pa.types.is_struct(dtype.value_type) or isinstance(dtype.value_type, pa.JsonType)


def _is_text_or_messages(dtype: pa.DataType) -> bool:
    return _is_string(dtype) or _is_list_of_objects(dtype)


def _is_answer(dtype: pa.DataType) -> bool:
    if _is_list(dtype):
        return _is_string(dtype.value_type)
    return _is_string(dtype) or pa.types.is_integer(dtype) or pa.types.is_floating(dtype)


_TYPES: Mapping[Use, tuple[Callable[[pa.DataType], bool], str]] = {
    "text": (_is_string, ", not string; set {} to a column of strings"),
    "messages": (_is_text_or_messages, ", not a list of objects or its JSON text; set {} to such a column"),
    "turn": (_is_text_or_messages, ", not a list of objects or a text; set {} to such a column"),
    "teacher": (_is_string, ", not string; set {} to a column with the names of teachers"),
    "domain": (lambda dtype: _is_string(dtype) or pa.types.is_integer(dtype), "; set {} to a column of names"),
    "prompt": (_is_text_or_messages, ", which {} cannot write; name one of texts or messages"),
    "field": (
        lambda dtype: pa.types.is_boolean(dtype) or _is_answer(dtype),
        ", which {} cannot write; name one of texts, lists of texts or numbers",
    ),
    "answer": (_is_answer, "; set {} to a column of strings, numbers or lists of strings"),
    "response": (_is_string, "; set {} to a column of strings"),
}
"""Check of a column's type, and the end of the message on another type, in which {} is the setting."""
