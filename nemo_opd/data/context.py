"""A teacher's own prompt, made of the student's and of a record's fields (methods.md §13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nemo_opd.alignment.chat_messages import content_text, plain_messages
from nemo_opd.config.context import PROMPT, field_names, filled
from nemo_opd.config.context import Context as ContextSettings
from nemo_opd.data.documents import OTHER, parsed
from nemo_opd.data.record import Message
from nemo_opd.errors import AlignmentError, DataError

Fields = Mapping[str, Any]
"""Values of a record by our names of their columns."""
Content = str | Sequence[Message]
"""A prompt: a text, or messages."""


@dataclass(frozen=True)
class Context:
    """A teacher's prompts. Can be pickled for other processes."""

    settings: ContextSettings
    columns: Mapping[str, str]
    """The user's name of a field → our name of its column."""
    key: str
    """Key of the context in the settings, such as `teachers.0.context`."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Everything that decides what a teacher reads for a record."""
        return self.settings.model_dump_json(), tuple(sorted(self.columns.items()))

    @property
    def num_readings(self) -> int:
        """Prompts that `contents` returns."""
        return 1 + (self.settings.gap_every is not None) + self.settings.contrast

    def contents(self, prompt: Content, fields: Fields) -> tuple[Content, ...]:
        """Return the prompt that the teacher reads and, for the privilege gap, the student's and another record's.

        Raises DataError for a record that no prompt can be made of.
        """
        made = [self.content(prompt, fields)]
        if self.settings.gap_every is not None:
            made.append(prompt)
        if self.settings.contrast:
            others = {name.removeprefix(OTHER): value for name, value in fields.items() if name.startswith(OTHER)}
            made.append(self.content(prompt, others))
        return tuple(made)

    def content(self, prompt: Content, fields: Fields) -> Content:
        """Return the prompt with these fields. Raises DataError as `contents` does."""
        if isinstance(prompt, str):
            return self._text(prompt, fields)
        messages = self._messages(prompt, fields)
        if self.settings.system_prompt is None:
            return messages
        k = _last_of_user(prompt)
        asked = "" if k is None else content_text(prompt[k])
        system = {"role": "system", "content": self._filled(self.settings.system_prompt, asked, fields)}
        return [system, *messages[messages[0]["role"] == "system" :]]

    def response_start(self, messages: Sequence[Message]) -> int | None:
        """Return the first message of the assistant after all that the teacher reads differently; None for none.

        A message that begins the conversation belongs to the prompt. It is the first other one where only the system
        message differs, else the first after the last of the user that is answered.
        """
        by_assistant = [k for k, message in enumerate(messages) if k and message["role"] == "assistant"]
        if not by_assistant or not self.settings.replaces_question:
            return by_assistant[0] if by_assistant else None
        asked = _last_of_user(messages[: by_assistant[-1]])
        return by_assistant[0] if asked is None else next(k for k in by_assistant if k > asked)

    def _text(self, prompt: str, fields: Fields) -> str:
        if self.settings.key is not None:
            return self._written(self.settings.key, fields)
        assert self.settings.template is not None, "a text has no system message"
        return self._filled(self.settings.template, prompt, fields)

    def _messages(self, prompt: Sequence[Message], fields: Fields) -> list[Message]:
        if self.settings.key is not None:
            return self._own_messages(fields[self.columns[self.settings.key]])
        if self.settings.template is None:
            return list(prompt)
        k = _last_of_user(prompt)
        if k is None:
            raise DataError(
                f"it has no message of the user, in whose place {self.key}.template could stand; leave the row out, or "
                f"use {self.key}.system_prompt"
            )
        asked = self._filled(self.settings.template, content_text(prompt[k]), fields)
        return [*prompt[:k], {**prompt[k], "content": asked}, *prompt[k + 1 :]]

    def _own_messages(self, value: Any) -> list[Message]:
        """Return the messages of a field: as they are, as JSON, or a text that the user says."""
        if isinstance(value, str):
            with suppress(DataError):
                value = loaded if isinstance(loaded := parsed(value), list) else value
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        named = f"{self.key}.key={self.settings.key}"
        try:
            messages = plain_messages(parsed(value))
        except AlignmentError as error:
            raise DataError(f"{named} holds no conversation: {error}") from error
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{named} ends with what the assistant says, and the response follows it; leave that message out"
            )
        return messages

    def _filled(self, template: str, prompt: str, fields: Fields) -> str:
        names = dict.fromkeys(field_names(template))
        return filled(template, {name: prompt if name == PROMPT else self._written(name, fields) for name in names})

    def _written(self, name: str, fields: Fields) -> str:
        value = fields[self.columns[name]]
        if isinstance(value, list):
            return "\n\n".join(value)
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _last_of_user(messages: Sequence[Message]) -> int | None:
    return next((k for k in reversed(range(len(messages))) if messages[k]["role"] == "user"), None)


def said_in(content: Content) -> str:
    """Return what a prompt says, without a template's own text."""
    if isinstance(content, str):
        return content
    return "\n".join(map(content_text, content))
