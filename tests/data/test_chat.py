"""Masks, bytes and chunks of conversations, cut and uncut, against the templates' text."""

from typing import Any

import numpy as np
import pytest

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.data.conversations import ChatSampleMaker
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer
from nemo_opd.data.row_types import Conversation
from nemo_opd.data.samples import SameTokenizer, Sample, Tokens
from nemo_opd.errors import DataError
from tests.tokenizers_fixture import byte_level

STUDENT = "<|begin_of_text|>{% for m in messages %}# {{ m.role }}\n{{ m.content }}<|eot_id|>{% endfor %}"
STUDENT += "{% if add_generation_prompt %}# assistant\n{% endif %}"
TEACHER = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEACHER += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CONVERSATION = Conversation(
    [
        {"role": "user", "content": "The quick brown fox?"},
        {"role": "assistant", "content": "jumps over 123 dogs"},
        {"role": "user", "content": "def f(x)"},
        {"role": "assistant", "content": "the lazy dog sleeps"},
    ]
)


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Any, Any]:
    student = byte_level(610)
    teacher = byte_level(455, r"\p{N}|[^\s\p{L}\p{N}]+|\s?\p{L}+|\s+", "<|im_end|>", ("<|endoftext|>", "<|im_start|>"))
    student.chat_template, teacher.chat_template = STUDENT, TEACHER
    return student, teacher


def make(tokenizers: tuple[Any, Any], student_length: int = 999, teacher_length: int = 999) -> Sample:
    student, teacher = tokenizers
    cross = CrossTokenizer(ChatEncoder.of(teacher, teacher_length, {}), TokenAligner(student, teacher))
    return ChatSampleMaker(ChatEncoder.of(student, student_length, {}), (cross, SameTokenizer()))(CONVERSATION)


def spelled(tokenizer: Any, tokens: Tokens, mask: np.ndarray) -> bytes:
    pieces = pieces_of(tokenizer)
    return b"".join(
        pieces.bytes_of(i) or tokenizer.convert_ids_to_tokens(i).encode() for i in tokens.ids[mask].tolist()
    )


def test_only_the_assistants_messages_are_learned(tokenizers: tuple[Any, Any]) -> None:
    sample = make(tokenizers)
    sides = ((sample.student, "<|eot_id|>"), (sample.teachers[0].tokens, "<|im_end|>"))
    for tokenizer, (tokens, end) in zip(tokenizers, sides, strict=True):
        expected = f"jumps over 123 dogs{end}the lazy dog sleeps{end}"
        assert spelled(tokenizer, tokens, tokens.loss_mask) == expected.encode()
        contents = "".join(message["content"] for message in CONVERSATION.messages)
        assert tokens.num_bytes.sum() == len(contents.encode())
        assert spelled(tokenizer, tokens, tokens.num_bytes > 0) == contents.encode()
    assert sample.teachers[1].tokens is sample.student


def test_chunks_are_what_both_sides_learn(tokenizers: tuple[Any, Any]) -> None:
    """Catches chunks in users' turns."""
    sample = make(tokenizers)
    chunks = sample.teachers[0].chunks
    assert chunks is not None
    assert ((chunks.student >= 0) == sample.student.loss_mask).all()
    assert ((chunks.teacher >= 0) == sample.teachers[0].tokens.loss_mask).all()


@pytest.mark.parametrize("cut_side", ["student", "teacher"])
@pytest.mark.parametrize("length", [3, 25, 33, 40])
def test_a_cut_conversation_keeps_whole_chunks(tokenizers: tuple[Any, Any], length: int, cut_side: str) -> None:
    """Catches chunks that are cut in the middle, and a teacher that reads beyond a cut student."""
    full = make(tokenizers)
    cut = make(tokenizers, **{f"{cut_side}_length": length})
    chunks, all_chunks = cut.teachers[0].chunks, full.teachers[0].chunks
    assert chunks is not None
    assert all_chunks is not None
    student_length, teacher_length = len(cut.student), len(cut.teachers[0].tokens)
    assert length == (student_length if cut_side == "student" else teacher_length)
    gone = {*all_chunks.student[student_length:].tolist(), *all_chunks.teacher[teacher_length:].tolist()}
    for ids, uncut in ((chunks.student, all_chunks.student), (chunks.teacher, all_chunks.teacher)):
        expected = [-1 if c in gone else c for c in uncut[: len(ids)].tolist()]
        assert (ids >= 0).tolist() == [c >= 0 for c in expected]
    assert teacher_length < len(full.teachers[0].tokens)


def test_a_token_that_the_model_cannot_read(tokenizers: tuple[Any, Any]) -> None:
    encoder = ChatEncoder.of(tokenizers[0], 99, {}, vocab_size=300)
    with pytest.raises(DataError, match="for which the model has no embedding"):
        encoder(CONVERSATION)
