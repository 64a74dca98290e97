"""Readings of a file's columns as documents, and the types that such columns have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_MESSAGES = ("messages", "conversations", "conversation")
_COMPLETIONS = ("completion", "output", "response")
_PROMPTS = (("prompt",), ("instruction", "input"))
"""Columns of a prompt. Only the first one is required."""

Reading = Mapping[str, str | tuple[str, ...]]
"""Keys of `data` with the columns that they name."""


def readings(schema: pa.Schema) -> list[Reading]:
    """Return every way in which columns with customary names hold documents."""
    strings = [field.name for field in schema if is_string(field.type)]
    lists = [field.name for field in schema if is_list_of_objects(field.type)]
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
    strings = {field.name for field in schema if is_string(field.type)}
    for first, *more in _PROMPTS:
        if first in strings:
            return [{"text_key": first}, {"prompt_key": (first, *(name for name in more if name in strings))}]
    return []


def described(reading: Reading) -> str:
    """Return a reading as it is written on a command line."""
    written = {key: value if isinstance(value, str) else f"[{','.join(value)}]" for key, value in reading.items()}
    return " ".join(f"data.{key}={value}" for key, value in written.items())


def is_string(dtype: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype)


def is_list_of_objects(dtype: pa.DataType) -> bool:
    """Return whether a type is a list of objects, which `datasets` stores as JSON if their keys or types differ."""
    import pyarrow as pa

    if not (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)):
        return isinstance(dtype, pa.JsonType)
    return pa.types.is_struct(dtype.value_type) or isinstance(dtype.value_type, pa.JsonType)
