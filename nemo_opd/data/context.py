"""A teacher's own prompt, built from the student's prompt and fields of a record (methods.md §13)."""

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
"""Values of a record, keyed by our column names."""
Content = str | Sequence[Message]
"""A prompt: a text, or messages."""


@dataclass(frozen=True)
class Context:
    """A builder of one teacher's prompts. Picklable."""

    settings: ContextSettings
    columns: Mapping[str, str]
    """The user's name of a field → our column name."""
    key: str
    """Key of the context in the settings, such as `teachers.0.context`."""

    @property
    def identity(self) -> tuple[object, ...]:
        """All settings that determine the teacher's prompts."""
        return self.settings.model_dump_json(), tuple(sorted(self.columns.items()))

    @property
    def num_readings(self) -> int:
        """Number of prompts that `contents` returns."""
        return 1 + (self.settings.gap_every is not None) + self.settings.contrast

    def contents(self, prompt: Content, fields: Fields) -> tuple[Content, ...]:
        """Return the teacher's prompt and, if the settings ask for them, the student's and one with another record's
        fields.

        Raises DataError if no prompt can be built from the record.
        """
        prompts = [self.content(prompt, fields)]
        if self.settings.gap_every is not None:
            prompts.append(prompt)
        if self.settings.contrast:
            other_fields = {name.removeprefix(OTHER): value for name, value in fields.items() if name.startswith(OTHER)}
            prompts.append(self.content(prompt, other_fields))
        return tuple(prompts)

    def content(self, prompt: Content, fields: Fields) -> Content:
        """Return the prompt with these fields. Raises DataError as `contents` does."""
        if isinstance(prompt, str):
            return self._text(prompt, fields)
        messages = self._messages(prompt, fields)
        if self.settings.system_prompt is None:
            return messages
        k = _last_user_message(prompt)
        question = "" if k is None else content_text(prompt[k])
        system = {"role": "system", "content": self._fill(self.settings.system_prompt, question, fields)}
        return [system, *messages[messages[0]["role"] == "system" :]]

    def response_start(self, messages: Sequence[Message]) -> int | None:
        """Return the index of the first assistant message after everything the teacher reads differently, or None.

        An assistant message that begins the conversation belongs to the prompt. The result is the first later one if
        only the system message differs, otherwise the first one after the last user message that is answered.
        """
        by_assistant = [k for k, message in enumerate(messages) if k and message["role"] == "assistant"]
        if not by_assistant or not self.settings.replaces_question:
            return by_assistant[0] if by_assistant else None
        last_user = _last_user_message(messages[: by_assistant[-1]])
        return by_assistant[0] if last_user is None else next(k for k in by_assistant if k > last_user)

    def _text(self, prompt: str, fields: Fields) -> str:
        if self.settings.key is not None:
            return self._format(self.settings.key, fields)
        assert self.settings.template is not None, "a text has no system message"
        return self._fill(self.settings.template, prompt, fields)

    def _messages(self, prompt: Sequence[Message], fields: Fields) -> list[Message]:
        if self.settings.key is not None:
            return self._field_messages(fields[self.columns[self.settings.key]])
        if self.settings.template is None:
            return list(prompt)
        k = _last_user_message(prompt)
        if k is None:
            raise DataError(
                f"it has no user message that {self.key}.template could replace; leave the row out, or use "
                f"{self.key}.system_prompt"
            )
        question = self._fill(self.settings.template, content_text(prompt[k]), fields)
        return [*prompt[:k], {**prompt[k], "content": question}, *prompt[k + 1 :]]

    def _field_messages(self, value: Any) -> list[Message]:
        """Return a field's messages: a list, a list as JSON, or a text as the user's only message."""
        if isinstance(value, str):
            with suppress(DataError):
                value = loaded if isinstance(loaded := parsed(value), list) else value
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        named = f"{self.key}.key={self.settings.key}"
        try:
            messages = plain_messages(parsed(value))
        except AlignmentError as error:
            raise DataError(f"{named} does not hold a conversation: {error}") from error
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{named} ends with an assistant message, and the response follows it; leave that message out"
            )
        return messages

    def _fill(self, template: str, prompt: str, fields: Fields) -> str:
        names = dict.fromkeys(field_names(template))
        return filled(template, {name: prompt if name == PROMPT else self._format(name, fields) for name in names})

    def _format(self, name: str, fields: Fields) -> str:
        value = fields[self.columns[name]]
        if isinstance(value, list):
            return "\n\n".join(value)
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _last_user_message(messages: Sequence[Message]) -> int | None:
    return next((k for k in reversed(range(len(messages))) if messages[k]["role"] == "user"), None)


def prompt_text(content: Content) -> str:
    """Return a prompt's text, without a chat template's own text."""
    if isinstance(content, str):
        return content
    return "\n".join(map(content_text, content))
