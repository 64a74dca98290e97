"""Samples of a conversation's beginning equal samples of the whole conversation, token for token."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unicodedata import is_normalized

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import LocatedTokens, RenderedChat, TokenAligner, locate_tokens
from nemo_opd.data import conversations as conversation_makers
from nemo_opd.data import encoders
from nemo_opd.data.conversations import ChatSampleMaker
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer
from nemo_opd.data.row_types import Conversation
from nemo_opd.data.samples import Sample
from tests.alignment.chat_fixture import assistant, call, small_chat, tool, user
from tests.data.test_beginning import WORDS, long_texts
from tests.tokenizers_fixture import real_tokenizer

WITH_A_TEMPLATE = ("llama3_1", "qwen3", "gemma3")
PROSE = "The quick brown fox jumps over the lazy dog. "
texts = st.one_of(st.sampled_from(["", " ", "no", "<think>\nwhy\n</think>\n\nyes"]), long_texts(WORDS))
lengths = st.sampled_from((1, 3, 17, 64, 300))


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages: list[dict[str, object]] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(texts)))
        match draw(st.integers(0, 3)):
            case 0:
                messages.append(assistant(draw(texts), reasoning_content=draw(texts)))
            case 1:
                messages.append(assistant("", tool_calls=[call("look", {"up": draw(texts)})]))
                messages += [tool(draw(texts)), assistant(draw(texts))]
            case _:
                messages.append(assistant(draw(texts)))
    return Conversation(messages)


@cache
def encoder(name: str) -> ChatEncoder:
    small = name in ("trimmed", "plain")
    return ChatEncoder.of(small_chat(name) if small else real_tokenizer(name), 10**6, {})


@cache
def aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(encoder(student).tokenizer, encoder(teacher).tokenizer)


def maker(student: str, teachers: Sequence[str], length: int) -> ChatSampleMaker:
    readers = tuple(CrossTokenizer(encoder(name), aligner(student, name)) for name in teachers)
    return ChatSampleMaker(replace(encoder(student), max_length=length), readers)


def locate_whole(side: ChatEncoder, rendered: RenderedChat, limit: int) -> LocatedTokens:
    return locate_tokens(side.tokenizer, rendered.text)


def flat(sample: Sample) -> list[object]:
    """Return the values that a batch takes from a sample."""
    sides = [sample.student, *(teacher.tokens for teacher in sample.teachers)]
    values: list[object] = [[side.ids.tolist(), side.loss_mask.tolist(), side.num_bytes.tolist()] for side in sides]
    for teacher in sample.teachers:
        assert teacher.chunks is not None
        chunks = teacher.chunks
        marks = np.intersect1d(chunks.marks, chunks.student)
        values += [*(ids.tolist() for ids in chunks.compared), chunks.histories, marks.tolist()]
    return values


def assert_same(make: ChatSampleMaker, conversation: Conversation) -> None:
    """Compare with the conversation tokenized completely and, if no tokenizer rewrites it, aligned completely."""
    bounded = flat(make(conversation))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation_makers, "locate_beginning", locate_whole)
        assert bounded == flat(make(conversation))
        if is_normalized("NFC", str(conversation.messages)):
            patch.setattr(conversation_makers, "locate_up_to", locate_whole)
            assert bounded == flat(make(conversation))


@pytest.mark.tokenizers
@pytest.mark.parametrize("family", WITH_A_TEMPLATE)
@settings(max_examples=8)
@given(conversation=conversations(), length=lengths)
def test_samples_are_those_of_the_whole_conversation(family: str, conversation: Conversation, length: int) -> None:
    """Bug: a sample depends on its cut, for templates that drop thinking, quote tools' answers or reformat calls."""
    teachers = [name for name in WITH_A_TEMPLATE if name != family]
    make = maker(family, teachers, 10**6)
    try:
        make(conversation)
    except Exception:
        return  # refused by a template
    assert_same(maker(family, teachers, length), conversation)


@pytest.mark.tokenizers
def test_text_after_the_cut_is_not_aligned() -> None:
    """Bug: if the student's tokenizer rewrites a text, tokens after the cut changed the compared tokens."""
    rewritten = user("the fox a" + "\u0301" * 100 + "the fox " * 500)
    assert_same(maker("qwen3", ["llama3_1"], 17), Conversation([rewritten, assistant("no")]))


@pytest.mark.parametrize("family", ["trimmed", "plain"])
@settings(max_examples=20)
@given(contents=st.lists(texts, min_size=2, max_size=4), length=lengths)
def test_small_tokenizers(family: str, contents: list[str], length: int) -> None:
    teacher = "plain" if family == "trimmed" else "trimmed"
    messages = [(user, assistant)[k % 2](text) for k, text in enumerate(contents)]
    assert_same(maker(family, [teacher], length), Conversation(messages))


@pytest.mark.parametrize("number", [1, 500])
def test_the_tokenized_part_does_not_grow_with_the_conversation(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a conversation of 30 MB was tokenized completely, which took a minute."""
    read: list[int] = []

    def counted(tokenizer: Any, text: str) -> LocatedTokens:
        read.append(len(text))
        return locate_tokens(tokenizer, text)

    monkeypatch.setattr(encoders, "locate_tokens", counted)
    messages = [user("Go on."), assistant(PROSE * (100_000 // number))] * number
    sample = maker("trimmed", ["plain"], 50)(Conversation(messages))
    assert len(sample.student) == 50
    assert sum(read) < 10_000
