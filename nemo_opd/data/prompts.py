"""Rows of a dataset as prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_opd.alignment.chat_messages import plain_messages
from nemo_opd.data.documents import (
    ANSWER,
    MESSAGES,
    OTHER,
    RESPONSE,
    ROW,
    TEXT,
    TOOLS,
    Columns,
    fields_of,
    parsed,
    read_rows,
)
from nemo_opd.data.record import Message, Prompt, written
from nemo_opd.errors import AlignmentError, DataError


def read_prompts(columns: Columns, indices: Sequence[int], names: Mapping[str, str] | None = None) -> list[Prompt]:
    """Read the prompts of these rows, in order. names: the user's name of a column → ours, for `Prompt.row`.

    Messages are plain. Assistant messages at the end are the response, not part of the prompt. Raises DataError, naming
    the row, for a conversation that is malformed or without a user message.
    """
    if not indices:
        return []
    rows = read_rows(columns, list(indices))
    nothing = [None] * len(indices)
    answers, responses = rows.get(ANSWER, nothing), rows.get(RESPONSE, nothing)
    contents = rows[TEXT] if TEXT in rows else rows[MESSAGES]
    tools = rows.get(TOOLS, nothing)
    prompts = [
        _text_prompt(*row) if TEXT in rows else _chat_prompt(*row)
        for row in zip(indices, contents, tools, answers, responses, strict=True)
    ]
    fields = fields_of(rows, len(indices))
    user_names = {ours: name for name, ours in (names or {}).items()}
    rows |= {name: list(map(parsed, rows[name])) for name in (MESSAGES, TOOLS) if name in rows}
    row_columns = {
        user_names.get(name, name.removeprefix(ROW)): rows[name] for name in rows if not name.startswith(OTHER)
    }
    return [
        replace(prompt, fields=fields[i], row={name: values[i] for name, values in row_columns.items()})
        for i, prompt in enumerate(prompts)
    ]


def _text_prompt(index: int, text: str, _: None, answer: object, response: str | None) -> Prompt:
    return Prompt(index, text, answer=written(answer), response=response)


def _chat_prompt(index: int, messages: Any, tools: Any, answer: object, _: str | None) -> Prompt:
    try:
        plain = plain_messages(parsed(messages))
        tools = parsed(tools) or None
    except (AlignmentError, DataError) as error:
        raise DataError(f"row {index} (counted from 0 over all files): {error}") from error
    if not any(message["role"] == "user" for message in plain):
        raise DataError(
            f"row {index} (counted from 0 over all files) has no user message for the student to answer (roles: "
            f"{', '.join(str(message['role']) for message in plain)}); leave it out of the data"
        )
    question, response = _without_last_turn(plain)
    return Prompt(index, question, tools=tools, answer=written(answer), response=response)


def _without_last_turn(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
    """Split off the assistant messages at the end; return the messages before them, and their text."""
    stop = len(messages)
    while stop and messages[stop - 1]["role"] == "assistant":
        stop -= 1
    text = "\n".join(message["content"] for message in messages[stop:] if message["content"])
    return list(messages[:stop]), text or None
