"""Teachers that read the student's response after another prompt (methods.md §13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import ChatRenderer, ChatTokens, TokenAligner, align_chat, locate_tokens
from nemo_opd.data.context import Content, Context, Fields, prompt_text
from nemo_opd.data.continuation import TextContinuation
from nemo_opd.data.leakage import leakage
from nemo_opd.data.samples import Chunks, HasIdentity, SameTokenizer, TeacherSample, Tokens, require_ids
from nemo_opd.errors import DataError
from nemo_opd.types import NO_CHUNK, Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Tools = Sequence[dict[str, Any]] | None
_Scalar = TypeVar("_Scalar", bound=np.generic)
_Reader = TypeVar("_Reader", bound=HasIdentity, covariant=True)


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
        self, prompt: Content, fields: Fields, response: str, sample_in: Callable[[Content], TeacherSample]
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
        variants = (tokens,) * (self.context.num_readings - 1)
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
