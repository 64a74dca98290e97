"""Records of a dataset: documents, prompts and their rollouts, and the columns that they are read from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Message = dict[str, Any]
FinishReason = Literal["stop", "length"]
"""Reason why a turn ended. stop: the model ended it with one of the sampled tokens; length: it was cut."""

TEXT = "text"
MESSAGES = "messages"
TOOLS = "tools"
PROMPT = "prompt."
"""Prefix of columns with a prompt, numbered in the order in which their texts are joined."""
COMPLETION = "completion"
TEACHER = "teacher"
ANSWER = "answer"
RESPONSE = "response"
DOMAIN = "domain"
"""Our column names in a dataset from `document_sources.load_documents`, whatever the user's names are. Only prompts
have answers and responses; only validation texts have domains.
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the prompts' dataset."""

    index: int
    """Number of the row, shared by all rollouts of the prompt."""
    content: str | Sequence[Message]
    """A text to continue, or the messages before the assistant's turn."""
    tools: Sequence[dict[str, Any]] | None = None
    answer: str | None = None
    """Answer that a verifiable reward compares with."""
    response: str | None = None
    """The dataset's own continuation, if it has one."""
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Values of the row that teachers' contexts may read, keyed by our column names."""
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values of the row keyed by the user's column names: all of them if a reward may read any column, otherwise the
    columns that settings name.
    """


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled sequence: tokens of the prompt, the student and its environment (methods.md §10.1)."""

    prompt: Prompt
    """Prompt, including messages and tools that the environment added before the first turn."""
    sample: int
    """Index among the prompt's rollouts."""
    ids: NDArray[np.int32]
    """[S], including the prompt."""
    loss_mask: NDArray[np.bool_]
    """[S]: True for tokens that the student sampled, including its end-of-turn tokens."""
    logprobs: NDArray[np.float32]
    """[S]: the engine's log-probabilities at temperature 1, before top-p or top-k; 0 for tokens that were not sampled.
    """
    behaviour_logprobs: NDArray[np.float32]
    """[S]: log-probabilities of the sampling policy, after temperature, top-k and top-p; 0 elsewhere."""
    turns: NDArray[np.int32]
    """[M, 2]: range [start, stop) of the tokens that the student sampled in each turn."""
    responses: tuple[str, ...]
    """Text of each turn, without special tokens."""
    messages: tuple[Message, ...]
    """Conversation through the student's last turn; empty if the prompt is a text. The student's messages have the
    turn's text, including calls, as content, and no `tool_calls`.
    """
    finish_reason: FinishReason
    """Reason why the last turn ended. All earlier turns ended with `stop`."""
    version: int
    """Version of the weights that sampled the last turn; −1 for a continuation from the dataset."""
    env_reward: float | None = None
    """Sum of the environment's rewards over all turns; None without an environment."""
    env_done: bool | None = None
    """Whether the environment ended the rollout; False if turns or tokens ran out, None without an environment."""
    num_calls: int = 0
    """Tool calls that the environment answered."""
    num_failed_calls: int = 0
    """Tool calls that were malformed or led to an error."""
    num_cut_responses: int = 0
    """Environment messages that were cut."""
    before: str = ""
    """Beginning of the dataset's continuation of a text, as far as it shares the prompt's last token, before the turn.
    """

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def turn_messages(self) -> list[int]:
        """Index of each turn in `messages`: the last M assistant messages, as environments use other roles."""
        by_assistant = [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]
        return by_assistant[len(by_assistant) - len(self.turns) :]


class Columns(Protocol):
    """A Hugging Face dataset with the columns above, or anything with the same interface."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int], /) -> Mapping[str, list[Any]]: ...


def read_documents(columns: Columns, indices: list[int]) -> Sequence[Document]:
    """Read the documents of these rows. Raises DataError for a conversation that is malformed JSON."""
    rows = read_rows(columns, indices)
    contents: Sequence[_Content] = rows.get(TEXT, [])
    if TEXT not in rows:
        tools = rows.get(TOOLS, [None] * len(indices))
        conversations = zip(rows[MESSAGES], tools, fields_of(rows, len(indices)), strict=True)
        contents = [
            Conversation(parsed(messages), parsed(offered), fields) for messages, offered, fields in conversations
        ]
    if TEACHER not in rows:
        return contents
    return [Routed(content, teacher) for content, teacher in zip(contents, rows[TEACHER], strict=True)]


def read_rows(columns: Columns, indices: list[int]) -> dict[str, list[Any]]:
    """Read columns of these rows, with the values that the user wrote as far as Arrow keeps them.

    Columns of prompts and completions are also joined into a column of messages.
    Arrow gives every object all keys that any row has; null values are dropped from messages, tools and contexts.
    Objects that Arrow stores as JSON keep the user's own nulls.
    """
    rows = _read_columns(columns, indices)
    if f"{PROMPT}0" not in rows:
        return rows
    prompts = zip(*(rows[name] for name in rows if name.startswith(PROMPT)), strict=True)
    completions = rows.get(COMPLETION, [None] * len(indices))
    pairs = zip(prompts, completions, strict=True)
    return rows | {MESSAGES: [_messages(parts, "user") + _messages([text], "assistant") for parts, text in pairs]}


def _messages(values: Iterable[Any], role: str) -> list[Message]:
    """Return the messages in these values, then their texts as one message of this role."""
    texts = [value for value in values if isinstance(value, str)]
    messages = [message for value in values if isinstance(value, list) for message in value]
    text = "\n\n".join(filter(None, texts))
    return [*messages, {"role": role, "content": text}] if text else messages


def holds_conversations(columns: Iterable[str]) -> bool:
    """Return whether columns with our names are those of conversations."""
    return not {MESSAGES, f"{PROMPT}0"}.isdisjoint(columns)


def _read_columns(columns: Columns, indices: list[int]) -> dict[str, list[Any]]:
    dataset: Any = columns
    if hasattr(columns, "with_format") and _has_objects(dataset.data.schema):
        table = dataset.with_format("arrow")[indices]
        return {
            name: [_arrow_value(value, column.type, has_added_nulls=_is_document(name)) for value in column.to_pylist()]
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    rows = columns[indices]
    return {name: [_without_nulls(v) for v in rows[name]] if _is_document(name) else rows[name] for name in rows}


def _has_objects(schema: pa.Schema) -> bool:
    import pyarrow as pa

    return any(pa.types.is_nested(field.type) or isinstance(field.type, pa.JsonType) for field in schema)


def _is_document(column: str) -> bool:
    return column in (MESSAGES, TOOLS, COMPLETION) or column.startswith(PROMPT) or is_field(column)


def _arrow_value(value: Any, dtype: pa.DataType, has_added_nulls: bool) -> Any:
    """Convert a value returned by `to_pylist` to the value that the user wrote."""
    import pyarrow as pa

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


def texts_hash(documents: Iterable[Document | Prompt]) -> str:
    """Return a short hash of texts, conversations or prompts with their responses, in order.

    Fields that teachers' contexts read and the teacher that a document names do not matter.
    """
    digest = hashlib.blake2b(digest_size=6)
    for document in documents:
        digest.update(json.dumps(_hashed_content(document), ensure_ascii=False, default=str).encode() + b"\n")
    return digest.hexdigest()


def _hashed_content(document: Document | Prompt) -> object:
    if isinstance(document, Prompt):
        return [document.content, document.tools, document.response]
    content = document.content if isinstance(document, Routed) else document
    return content if isinstance(content, str) else [content.messages, content.tools]


def is_field(column: str) -> bool:
    """Return whether teachers' contexts may read a column."""
    return column.startswith((FIELD, OTHER)) or column in (ANSWER, RESPONSE)


def fields_of(rows: Mapping[str, list[Any]], number: int) -> list[dict[str, Any]]:
    """Return the columns that contexts read, as one mapping for each of `number` rows."""
    names = [name for name in rows if is_field(name)]
    return [{name: rows[name][i] for name in names} for i in range(number)]


def answer_text(answer: object) -> str | None:
    """Write an answer as text: 72.0 as 72, and a list, such as MBPP's `test_list`, as JSON."""
    if answer is None:
        return None
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return json.dumps(list(answer), ensure_ascii=False)
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)
