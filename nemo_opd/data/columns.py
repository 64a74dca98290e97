"""Layouts: the columns that settings name, their uses and checks, and readings of columns with customary names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from nemo_opd.config.data import Data
from nemo_opd.config.reward import FunctionReward, Reward
from nemo_opd.config.run import RunConfig
from nemo_opd.data.lines import Origin
from nemo_opd.data.record import (
    ANSWER,
    COMPLETION,
    DOMAIN,
    FIELD,
    MESSAGES,
    PROMPT,
    RESPONSE,
    TEACHER,
    TEXT,
    TOOLS,
    parsed,
)
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets

_MESSAGES = ("messages", "conversations", "conversation")
_COMPLETIONS = ("completion", "output", "response")
_PROMPTS = (("prompt",), ("instruction", "input"))
"""Columns of a prompt. Only the first one is required."""

Use = Literal["text", "messages", "turn", "teacher", "domain", "prompt", "field", "answer", "response"]
"""Use of a column, which determines its types. turn: one side of a prompt and its completion, texts or messages.
prompt, field: a teacher's whole prompt, or a value in it.
"""
Reading = Mapping[str, str | tuple[str, ...]]
"""Keys of `data` with the columns that they name."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a setting names."""

    setting: str
    name: str
    """The user's name."""
    ours: str
    """Our name."""
    use: Use
    is_required: bool = False
    """Whether it may have no nulls."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns to read. Several settings may name one column."""

    named: tuple[Column, ...]
    teachers: tuple[str, ...] = ()
    """Teachers that a column may name, if one is for the routed aggregation."""
    whole_rows: bool = False
    """Whether to read all other columns, too."""

    @property
    def columns(self) -> dict[str, str]:
        """The user's name of a column → ours, by the first setting that names it."""
        columns: dict[str, str] = {}
        for column in self.named:
            columns.setdefault(column.name, column.ours)
        return columns

    def with_prompts(
        self, answer_key: str | None = None, response_key: str | None = None, *, reward: str = "reward"
    ) -> Layout:
        """Add a verifiable reward's answers and the responses, if their columns are named.

        reward: section of the settings that contains `answer_key`. Raises DataError if one column has two uses.
        """
        named = list(self.named)
        for setting, name, ours in (
            (f"{reward}.answer_key", answer_key, ANSWER),
            ("data.response_key", response_key, RESPONSE),
        ):
            if name is None:
                continue
            if used := next((column.ours for column in named if column.name == name), None):
                raise DataError(f"{setting}={name}: that column already holds the prompts' {used}; name another")
            named.append(Column(setting, name, ours, "answer" if ours == ANSWER else "response"))
        return replace(self, named=tuple(named))

    def with_routes(self, key: str, teachers: tuple[str, ...]) -> Layout:
        """Add a column that names the teacher of each document."""
        column = Column("aggregation.key", key, TEACHER, "teacher", is_required=True)
        return replace(self, named=(*self.named, column), teachers=teachers)

    def with_fields(self, named: Sequence[tuple[str, str]]) -> Layout:
        """Add the columns that contexts and rewards read. named: pairs of a column and a setting that names it."""
        columns = self.columns
        fields = (
            Column(
                setting,
                name,
                columns.get(name, FIELD + name),
                "prompt" if setting.endswith(".key") else "field",
                is_required=True,
            )
            for name, setting in named
        )
        return replace(self, named=(*self.named, *fields))

    def with_domains(self, key: str) -> Layout:
        """Add a column with the documents' domains."""
        return replace(self, named=(*self.named, Column("data.domain_key", key, DOMAIN, "domain")))

    def for_reward(self, reward: Reward | None) -> Layout:
        """Read entire rows if the reward may read any column."""
        reads_rows = reward is not None and any(isinstance(part, FunctionReward) for part in reward.parts)
        return replace(self, whole_rows=reads_rows)


def text_layout(text_key: str, section: str = "data") -> Layout:
    """Return the layout of documents that are strings. section: section of the settings that contains `text_key`."""
    return Layout((Column(f"{section}.text_key", text_key, TEXT, "text", is_required=True),))


def chat_layout(
    messages_key: str | None,
    tools_key: str | None,
    section: str = "data",
    prompt_key: Sequence[str] = (),
    completion_key: str | None = None,
) -> Layout:
    """Return the layout of conversations: lists of messages, or prompts with completions, and optional lists of tools.

    Messages and tools may be JSON text. section: section of the settings that contains all keys.
    """
    named: list[tuple[str, str | None, str, Use]] = [
        ("messages_key", messages_key, MESSAGES, "messages"),
        *(("prompt_key", name, f"{PROMPT}{i}", "turn") for i, name in enumerate(prompt_key)),
        ("completion_key", completion_key, COMPLETION, "turn"),
        ("tools_key", tools_key, TOOLS, "messages"),
    ]
    required = (MESSAGES, f"{PROMPT}0", COMPLETION)
    return Layout(
        tuple(
            Column(f"{section}.{key}", name, ours, use, is_required=ours in required)
            for key, name, ours, use in named
            if name is not None
        )
    )


def document_layout(data: Data) -> Layout:
    """Return the layout of a run's documents."""
    if not data.is_chat:
        return text_layout(data.text_key)
    return chat_layout(data.messages_key, data.tools_key, "data", data.prompt_key, data.completion_key)


def run_layout(config: RunConfig, *, is_validation: bool = False) -> Layout:
    """Return the columns of documents, or of prompts for a run that samples, including teacher context columns.

    is_validation: also include the domain column.
    """
    layout = document_layout(config.data)
    if is_validation and config.data.is_chat and not config.data.has_chat_validation:
        layout = text_layout(config.data.validation.text_key or TEXT, "data.validation")
    reward = config.reward if config.rollout is not None else None
    if config.rollout is not None:
        layout = layout.with_prompts(reward.answer_column if reward else None, config.data.response_key)
    if config.routing is not None:
        layout = layout.with_routes(config.routing.key, config.active_names)
    fields = [] if reward is None else [(name, f"reward.{setting}") for name, setting in reward.named_columns.items()]
    layout = layout.with_fields([*fields, *_context_fields(config)]).for_reward(reward)
    domain_key = config.data.domain_key if is_validation else None
    return layout if domain_key is None else layout.with_domains(domain_key)


def domain_column(config: RunConfig) -> str | None:
    """Return our name of the domain column of validation texts, or None without one."""
    key = config.data.domain_key
    return None if key is None else run_layout(config, is_validation=True).columns[key]


def has_contrast(config: RunConfig) -> bool:
    """Return whether a teacher also reads another record's context."""
    contexts = (teacher.context for teacher in config.active_teachers)
    return any(context is not None and context.contrast for context in contexts)


def _context_fields(config: RunConfig) -> list[tuple[str, str]]:
    """Return the columns that active teachers' contexts read, paired with the settings that name them."""
    return [
        (name, f"teachers.{i}.context.{teacher.context.named_in(name)}")
        for i, teacher in enumerate(config.active_teachers)
        if teacher.context is not None
        for name in teacher.context.fields
    ]


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


def described(reading: Reading) -> str:
    """Return a reading as it is written on a command line."""
    written = {key: value if isinstance(value, str) else f"[{','.join(value)}]" for key, value in reading.items()}
    return " ".join(f"data.{key}={value}" for key, value in written.items())


def require_columns(layout: Layout, schema: pa.Schema, source: str, *, is_first: bool = True) -> None:
    """Raise DataError if a column is missing, occurs more than once or has a wrong type.

    source: name in messages. is_first: whether the settings may name this file's columns, or another file's come first.
    """
    for column in layout.named:
        if column.name not in schema.names:
            raise DataError(f"{source} has no column {column.name!r}{_remedy(column, schema, is_first=is_first)}")
        if (count := schema.names.count(column.name)) > 1:
            raise DataError(
                f"{source} has {count} columns {column.name!r}; write the file with one, or set {column.setting} to "
                "another"
            )
        dtype = schema.field(column.name).type
        accepts, remedy = _TYPES[column.use]
        if not accepts(dtype):
            kind = "JSON (objects, or values of several types)" if isinstance(dtype, pa.JsonType) else str(dtype)
            raise DataError(f"{source}: column {column.name!r} is of type {kind}{remedy.format(column.setting)}")


def _remedy(column: Column, schema: pa.Schema, *, is_first: bool) -> str:
    """Complete the message on a missing column."""
    names = ", ".join(schema.names) or "none"
    if not is_first and column.use != "domain" and not column.setting.startswith("data.validation."):
        texts = "; off-policy, data.validation.text_key reads texts" if column.ours != TEXT else ""
        return f" (only {names}), and all training and validation files need the same columns; convert it{texts}"
    if column.use == "teacher":
        return (
            ", in which aggregation.type=routed looks up each row's teacher; add it, set aggregation.key to one of its "
            f"columns ({names}), or use another aggregation"
        )
    if column.use in ("prompt", "field"):
        return f", which {column.setting} names; write one of its columns there: {names}"
    advice = "".join(f", or write {described(reading)}" for reading in readings(schema))
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
                f"list of objects or its JSON text; set {column.setting} to such a column, or leave it out to read "
                "texts"
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
