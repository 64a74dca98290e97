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

    Messages are plain; those of the assistant at the end are the response and no part of the prompt.
    Raises DataError, naming the row, for a conversation that is malformed or without a user's message.
    """
    if not indices:
        return []
    rows = read_rows(columns, list(indices))
    nothing = [None] * len(indices)
    answers, responses = rows.get(ANSWER, nothing), rows.get(RESPONSE, nothing)
    contents = rows[TEXT] if TEXT in rows else rows[MESSAGES]
    tools = rows.get(TOOLS, nothing)
    read = [
        _text_prompt(*row) if TEXT in rows else _chat_prompt(*row)
        for row in zip(indices, contents, tools, answers, responses, strict=True)
    ]
    fields = fields_of(rows, len(indices))
    users = {ours: name for name, ours in (names or {}).items()}
    rows |= {name: list(map(parsed, rows[name])) for name in (MESSAGES, TOOLS) if name in rows}
    known = {users.get(name, name.removeprefix(ROW)): rows[name] for name in rows if not name.startswith(OTHER)}
    return [
        replace(prompt, fields=own, row={name: values[i] for name, values in known.items()})
        for i, (prompt, own) in enumerate(zip(read, fields, strict=True))
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
            f"row {index} (counted from 0 over all files) has no message of a user for the student to answer (roles: "
            f"{', '.join(str(message['role']) for message in plain)}); leave it out of the data"
        )
    asked, answered = _without_last_turn(plain)
    return Prompt(index, asked, tools=tools, answer=written(answer), response=answered)


def _without_last_turn(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
    """Split the assistant's messages at the end off: the messages before, and their text."""
    stop = len(messages)
    while stop and messages[stop - 1]["role"] == "assistant":
        stop -= 1
    said = "\n".join(message["content"] for message in messages[stop:] if message["content"])
    return list(messages[:stop]), said or None
