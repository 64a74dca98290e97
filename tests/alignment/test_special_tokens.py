"""Special tokens: pairing by role and place, and no chunk across one."""

import pytest

from nemo_opd.alignment import TokenAligner
from nemo_opd.errors import AlignmentError
from tests.alignment.conftest import Pair, small_pair
from tests.tokenizers_fixture import byte_level, encode, sentencepiece


@pytest.fixture(scope="module")
def tokenizers() -> Pair:
    """Return two byte-level tokenizers with the eos `<|eot_id|>` and `<|im_end|>`."""
    return small_pair("byte-byte")


def ids_of(tokenizer: object, *parts: str) -> list[int]:
    """Return the ids of a sequence of texts and special tokens."""
    ids: list[int] = []
    for part in parts:
        ids += [tokenizer.convert_tokens_to_ids(part)] if part.startswith("<|") else encode(tokenizer, part)
    return ids


def test_a_special_token_pairs_only_at_the_same_byte(tokenizers: Pair) -> None:
    student, teacher = tokenizers
    s_ids, t_ids = ids_of(student, "The", "<|eot_id|>", " fox"), ids_of(teacher, "The fox", "<|im_end|>")
    alignment = TokenAligner(*tokenizers).align(s_ids, t_ids)
    assert not alignment.special.any()
    assert alignment.student_chunk_id[s_ids.index(student.eos_token_id)] == -1
    assert alignment.teacher_chunk_id[-1] == -1
    assert alignment.student_chunk_id[-1] == alignment.teacher_chunk_id[-2]


def test_no_chunk_spans_a_special_token(tokenizers: Pair) -> None:
    """Bug: the teacher's `The` makes a chunk with the student's `T` and `he` although a special token is between."""
    student, teacher = tokenizers
    (teacher_id,) = ids_of(teacher, "The")
    first, second = ids_of(student, "T"), ids_of(student, "he")
    aligner = TokenAligner(*tokenizers)
    assert aligner.align([*first, *second], [teacher_id]).num_chunks == 1
    assert aligner.align([*first, student.eos_token_id, *second], [teacher_id]).num_chunks == 0


def test_several_special_tokens_at_one_place_pair_in_order(tokenizers: Pair) -> None:
    student, teacher = tokenizers
    s_ids = ids_of(student, "<|eot_id|>", "<|begin_of_text|>", "<|eot_id|>", "fox")
    t_ids = ids_of(teacher, "<|im_start|>", "<|im_end|>", "<|im_end|>", "fox")
    alignment = TokenAligner(*tokenizers).align(s_ids, t_ids)
    assert alignment.student_chunk_id[:3].tolist() == [0, -1, 1]
    assert alignment.teacher_chunk_id[:3].tolist() == [-1, 0, 1]


def test_a_difference_with_special_tokens_inside_makes_no_chunk(tokenizers: Pair) -> None:
    student, teacher = tokenizers
    s_ids = ids_of(student, "The ab", "<|eot_id|>", "cd fox")
    t_ids = ids_of(teacher, "The xy", "<|im_end|>", "zw fox")
    alignment = TokenAligner(*tokenizers).align(s_ids, t_ids)
    assert not alignment.inexact.any()
    wall = s_ids.index(student.eos_token_id)
    assert (alignment.student_chunk_id[wall - 1 : wall + 2] == -1).all()
    assert alignment.student_chunk_id[0] == 0
    assert alignment.student_chunk_id[-1] == alignment.num_chunks - 1


def test_overrides_pair_what_nothing_else_would(tokenizers: Pair) -> None:
    student, teacher = tokenizers
    s_ids, t_ids = ids_of(student, "<|begin_of_text|>", "fox"), ids_of(teacher, "<|im_start|>", "fox")
    assert TokenAligner(*tokenizers).align(s_ids, t_ids).student_chunk_id[0] == -1
    roles = {"<|begin_of_text|>": "opening", "<|im_start|>": ["start_of_turn", "opening"]}
    assert TokenAligner(*tokenizers, roles=roles).align(s_ids, t_ids).student_chunk_id[0] == 0
    with pytest.raises(AlignmentError, match="<nowhere>"):
        TokenAligner(*tokenizers, roles={"<nowhere>": "x"})


def test_added_tokens_are_text_unless_both_sides_mean_them() -> None:
    """Bug: an added token like Qwen's `<think>` is always special, or always text; it pairs only with its like."""
    plain, thinking, brackets = byte_level(460), byte_level(470), byte_level(480)
    thinking.add_tokens(["<think>"])
    brackets.add_tokens(["[THINK]"])
    ids = encode(thinking, "a<think>b")
    assert TokenAligner(thinking, plain).align(ids, encode(plain, "a<think>b")).special.sum() == 0
    paired = TokenAligner(thinking, brackets).align(ids, encode(brackets, "a[THINK]b"))
    assert paired.special.tolist() == [False, True, False]
    assert not paired.inexact.any()


def test_unknown_token_is_a_wall() -> None:
    tokenizer = sentencepiece()
    alignment = TokenAligner(tokenizer, byte_level()).align([tokenizer.unk_token_id], encode(byte_level(), "x"))
    assert alignment.student_chunk_id.tolist() == [-1]
