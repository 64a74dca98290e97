"""A teacher's own prompt, built from the student's prompt and fields of a record, and the samples of responses after it
(methods.md §13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import ChatRenderer, ChatTokens, TokenAligner, align_chat, locate_tokens
from nemo_opd.alignment.chat_template import content_text, plain_messages
from nemo_opd.config.teacher import PROMPT, field_names, filled
from nemo_opd.config.teacher import Context as ContextSettings
from nemo_opd.data.row_types import OTHER, Message, parsed
from nemo_opd.data.samples import Chunks, HasIdentity, SameTokenizer, TeacherSample, Tokens, require_ids
from nemo_opd.data.text import TextContinuation
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.types import NO_CHUNK, Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Fields = Mapping[str, Any]
"""Values of a record, keyed by our column names."""
Content = str | Sequence[Message]
"""A prompt: a text, or messages."""

LEAST = 16
"""Length of the shortest common run that counts: three or four words, which rarely match by chance."""
_Tools = Sequence[dict[str, Any]] | None
_Scalar = TypeVar("_Scalar", bound=np.generic)
_Reader = TypeVar("_Reader", bound=HasIdentity, covariant=True)


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

    def contents(self, prompt: Content, fields: _Fields) -> tuple[Content, ...]:
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

    def content(self, prompt: Content, fields: _Fields) -> Content:
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

    def _text(self, prompt: str, fields: _Fields) -> str:
        if self.settings.key is not None:
            return self._format(self.settings.key, fields)
        assert self.settings.template is not None, "a text has no system message"
        return self._fill(self.settings.template, prompt, fields)

    def _messages(self, prompt: Sequence[Message], fields: _Fields) -> list[Message]:
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

    def _fill(self, template: str, prompt: str, fields: _Fields) -> str:
        names = dict.fromkeys(field_names(template))
        return filled(template, {name: prompt if name == PROMPT else self._format(name, fields) for name in names})

    def _format(self, name: str, fields: _Fields) -> str:
        value = fields[self.columns[name]]
        if isinstance(value, list):
            return "\n\n".join(value)
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _last_user_message(messages: Sequence[Message]) -> int | None:
    return next((k for k in reversed(range(len(messages))) if messages[k]["role"] == "user"), None)


@dataclass(frozen=True)
class PrivilegedPrompt(Generic[_Reader]):
    """A teacher with a context, around the reader it would be without one."""

    reader: _Reader
    context: Context
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer | None
    """Renderer of the teacher's chat template; None if prompts are texts."""
    vocab_size: int
    """Number of ids that the model can read."""
    max_length: int
    """Longest sequence that it reads, in tokens."""

    @property
    def identity(self) -> tuple[object, ...]:
        """All settings that determine the sample of a record."""
        template = None if self.renderer is None else self.renderer.identity
        return self.reader.identity, self.context.identity, template, self.vocab_size, self.max_length

    def prompt_ids(self, content: Content, tools: _Tools = None, overhang: str = "") -> NDArray[np.int32]:
        """Return the tokens of a prompt and of `overhang`, text of the response that shares the prompt's last token.

        Raises AlignmentError if the chat template rejects the prompt, and DataError for a token that the model cannot
        read or a prompt that leaves no room for a response.
        """
        if isinstance(content, str):
            text = content + overhang
            ids = TextContinuation(self.tokenizer)(text, "", is_ended=False).ids
        else:
            assert self.renderer is not None
            text = self.renderer.prompt(content, tools) + overhang
            ids = locate_tokens(self.tokenizer, text).ids
        require_ids(ids, self.vocab_size, self.tokenizer, text)
        self.require_room(len(ids))
        return ids

    def require_room(self, length: int) -> None:
        """Raise DataError if a prompt of `length` tokens leaves no room for a response."""
        if length >= self.max_length:
            raise DataError(
                f"{self.context.key}: the teacher's prompt has {length} tokens and leaves no room for the response, as "
                f"the teacher reads {self.max_length} at most; shorten the context, or leave the row out"
            )

    def sample(
        self, prompt: Content, fields: _Fields, response: str, sample_in: Callable[[Content], TeacherSample]
    ) -> TeacherSample:
        """Return the sample of a response after this teacher's prompt.

        prompt: the student's. response: its text. sample_in: makes the sample of the response after a given prompt.
        Raises DataError for a record that no prompt can be built from, and the errors of `sample_in`.
        """
        contents = self.context.contents(prompt, fields)
        sample, *variants = map(sample_in, contents)
        leaked = leakage(response, prompt_text(contents[0]), prompt_text(prompt))
        return replace(sample, leakage=leaked, variants=tuple(variant.tokens for variant in variants))

    def unanswered(self, sample: TeacherSample) -> TeacherSample:
        """Return the sample of a text without a response; nothing in it is compared.

        sample: the sample without the context.
        """
        tokens = replace(sample.tokens, loss_mask=np.zeros_like(sample.tokens.loss_mask))
        variants = (tokens,) * ((self.context.settings.gap_every is not None) + self.context.settings.contrast)
        result = replace(sample, tokens=tokens, leakage=(0, 0), variants=variants)
        if sample.chunks is None:
            return replace(result, moved_by=0)
        ours, theirs = (np.full_like(side, NO_CHUNK) for side in (sample.chunks.student, sample.chunks.teacher))
        return replace(result, chunks=Chunks(ours, theirs, 0, 0))


def verbatim(
    reader: SameTokenizer, prompt: NDArray[np.int32], student: Tokens, start: int, max_length: int
) -> TeacherSample:
    """Return the sample of a teacher that reads its own prompt, then the student's tokens from `start` on."""
    response = reader.sample(student).tokens

    def joined(prefix: NDArray[_Scalar], values: NDArray[_Scalar]) -> NDArray[_Scalar]:
        return np.concatenate([prefix, values[start:]])[:max_length]

    zeros = np.zeros_like(prompt)
    mask = joined(zeros.astype(np.bool_), response.loss_mask)
    mask[:1] = False
    tokens = Tokens(joined(prompt, response.ids), mask, joined(zeros, response.num_bytes))
    return TeacherSample(tokens, None, moved_by=len(prompt) - start)


def align_after(
    aligner: TokenAligner, student: ChatTokens, teacher: ChatTokens, starts: tuple[int, int], messages: tuple[int, int]
) -> Alignment:
    """Align two conversations from one token and message of each side on; earlier tokens have no chunk.

    starts: first token of the student and of the teacher. messages: first message that both have. Raises AlignmentError
    as `align_chat` does.
    """
    tails = (side.after(*at) for side, at in zip((student, teacher), zip(starts, messages, strict=True), strict=True))
    return shifted(align_chat(aligner, *tails), *starts)


def shifted(alignment: Alignment, student: int, teacher: int) -> Alignment:
    """Shift an alignment behind this many more tokens of each side, which have no partner."""

    def shift_ids(number: int, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.concatenate([np.full(number, -1, np.int32), ids])

    return replace(
        alignment,
        student_chunk_id=shift_ids(student, alignment.student_chunk_id),
        teacher_chunk_id=shift_ids(teacher, alignment.teacher_chunk_id),
        bounds=(alignment.bounds + np.array([student, student, teacher, teacher])).astype(np.int32),
    )


def prompt_text(content: Content) -> str:
    """Return a prompt's text, without a chat template's own text."""
    if isinstance(content, str):
        return content
    return "\n".join(map(content_text, content))


def leakage(response: str, context: str, prompt: str) -> tuple[int, int]:
    """Return how many bytes of the response leak from the context, and how many it has, in UTF-8.

    A byte leaks if it lies in a run of at least `LEAST` bytes that occurs in the context and not in the prompt, which
    the student reads itself. prompt: the student's.
    """
    data = response.encode()
    leaked = _windows(context.encode()) - _windows(prompt.encode())
    count = counted_to = 0
    for start in range(len(data) - LEAST + 1):
        if data[start : start + LEAST] in leaked:
            stop = start + LEAST
            count += stop - max(start, counted_to)
            counted_to = stop
    return count, len(data)


def _windows(data: bytes) -> set[bytes]:
    return {data[start : start + LEAST] for start in range(len(data) - LEAST + 1)}
