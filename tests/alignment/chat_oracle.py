"""Real chat templates, written again in Python, to check the tokens of contents and of the model's turns."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment import ChatTokens, Pieces, TokenAligner, align_chat, pieces_of, roles_of
from tests.alignment.oracle import chunks_of

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Segment:
    text: str
    message: int | None = None
    """Index of the message with this content, or None for the template's text."""
    written: bool = False
    """Whether the model has to write it."""


def llama3_1(messages: Messages) -> list[Segment]:
    segments = [Segment("<|begin_of_text|>")]
    for k, message in enumerate(messages):
        is_assistant = message["role"] == "assistant"
        segments += [
            Segment(f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"),
            Segment(message["content"].strip(), k, is_assistant),
            Segment("<|eot_id|>", written=is_assistant),
        ]
    return segments


def gemma3(messages: Messages) -> list[Segment]:
    segments = [Segment("<bos>")]
    has_system = messages[0]["role"] == "system"
    for k, message in list(enumerate(messages))[has_system:]:
        is_assistant = message["role"] == "assistant"
        segments.append(Segment(f"<start_of_turn>{'model' if is_assistant else message['role']}\n"))
        if has_system and k == 1:
            segments += [Segment(messages[0]["content"], 0), Segment("\n\n")]
        segments += [
            Segment(message["content"].strip(), k, is_assistant),
            Segment("<end_of_turn>", written=is_assistant),
            Segment("\n"),
        ]
    return segments


def qwen3(messages: Messages, thinking: bool = True) -> list[Segment]:
    """Render messages without tools.

    thinking: the model writes an empty thinking block; if False, the generation prompt does.
    """
    last_query = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=len(messages))
    segments = []
    for k, message in enumerate(messages):
        is_assistant, content, reasoning = message["role"] == "assistant", message["content"], ""
        segments.append(Segment(f"<|im_start|>{message['role']}\n"))
        if is_assistant and "</think>" in content:
            reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].strip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
        if is_assistant and k > last_query and k == len(messages) - 1:
            content = content.lstrip("\n")
            block = f"<think>\n{reasoning}\n</think>\n\n"
            if reasoning:
                content = block + content
            else:
                segments.append(Segment(block, written=thinking))
        segments += [Segment(content, k, is_assistant), Segment("<|im_end|>", written=is_assistant), Segment("\n")]
    return segments


TEMPLATES: dict[str, Callable[[Messages], list[Segment]]] = {"llama3_1": llama3_1, "qwen3": qwen3, "gemma3": gemma3}


def check_tokens(tokenizer: PreTrainedTokenizerBase, tokens: ChatTokens, segments: list[Segment]) -> None:
    """Check that spans and mask hold the tokens that share a byte with their segments. Pieces give the tokens' ends."""
    extents = token_extents(tokenizer, tokens.ids.tolist())
    normal = [normalised(tokenizer, segment.text).encode() for segment in segments]
    ends = list(accumulate(map(len, normal)))
    assert extents[-1][1] == ends[-1]
    mask = [False] * len(extents)
    for segment, end, data in zip(segments, ends, normal, strict=True):
        inside = [i for i, (a, b) in enumerate(extents) if a < end and b > end - len(data)] if data else []
        if segment.message is not None:
            start, stop = tokens.spans[segment.message].tolist()
            assert list(range(start, stop)) == inside
        for i in inside:
            mask[i] = mask[i] or segment.written
    assert tokens.assistant_mask.tolist() == mask


def token_extents(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[tuple[int, int]]:
    """Return the start and end byte of every token in the normalised text."""
    pieces, specials = spelling(tokenizer)
    lengths = [specials.get(i, int(pieces.lengths[i])) for i in ids]
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@cache
def spelling(tokenizer: PreTrainedTokenizerBase) -> tuple[Pieces, dict[int, int]]:
    """Return the pieces, and the byte length of each special token's name."""
    added = tokenizer.added_tokens_decoder.items()
    return pieces_of(tokenizer), {i: len(token.content.encode()) for i, token in added if token.special}


@cache
def ends_of_turn(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {i for i, roles in roles_of(tokenizer).items() if "end_of_turn" in roles}


@cache
def normalizer_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.backend_tokenizer.normalizer)


def normalised(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Normalise the text: Qwen composes characters, Gemma reads U+2581 as a space."""
    normalizer = normalizer_of(tokenizer)
    if "NFC" in normalizer:
        return unicodedata.normalize("NFC", text)
    return text.replace("▁", " ") if "Replace" in normalizer else text


def check_alignment(aligner: TokenAligner, student: ChatTokens, teacher: ChatTokens) -> None:
    """Check that every chunk lies in one content on both sides, or pairs special tokens between the same contents."""
    alignment = align_chat(aligner, student, teacher)
    for chunk, special in zip(chunks_of(alignment), alignment.special.tolist(), strict=True):
        places = place(student, chunk.student), place(teacher, chunk.teacher)
        assert places[0] == places[1]
        assert special or places[0][0] == "content"
        student_bytes = b"".join(map(aligner.student_pieces.bytes_of, student.ids[slice(*chunk.student)].tolist()))
        teacher_bytes = b"".join(map(aligner.teacher_pieces.bytes_of, teacher.ids[slice(*chunk.teacher)].tolist()))
        assert special or chunk.inexact or student_bytes == teacher_bytes != b""
    for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id):
        used = ids[ids >= 0]
        assert (used[1:] >= used[:-1]).all()


def place(tokens: ChatTokens, extent: tuple[int, int]) -> tuple[str, int]:
    """Return the content that holds these tokens, or the number of contents before them."""
    for k, (start, stop) in enumerate(tokens.spans.tolist()):
        if start <= extent[0] and extent[1] <= stop:
            return "content", k
        assert extent[1] <= start or extent[0] >= stop
    return "template", sum(1 for start, stop in tokens.spans.tolist() if stop <= extent[0] and start <= extent[0])


def turn_ends(tokenizer: PreTrainedTokenizerBase, tokens: ChatTokens) -> list[int]:
    """Return the positions of the template's end-of-turn tokens."""
    ends = ends_of_turn(tokenizer)
    inside = {i for start, stop in tokens.spans.tolist() for i in range(start, stop)}
    return [i for i, token_id in enumerate(tokens.ids.tolist()) if token_id in ends and i not in inside]
