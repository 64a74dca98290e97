"""escd against strings and sets, and the sets of completions against a search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.planned import UnitLossRecorder
from nemo_opd.losses import byte_prefix, escd
from nemo_opd.losses.escd import CompletionSets
from nemo_opd.projection import ProjectionMatrix
from tests.losses.cases import bytes_of, random_logits
from tests.reference import completions as reference

STUDENT = [b"B", b"Br", b"ead", b"eads", b"e", b"a", b"d", b"s", b"r", b"ea", None, b"ds", b"re"]
TEACHER = [b"Bread", b"Breads", b"Break", b"Br", b"e", b"a", b"d", b"s", b"dre", b"eas", None, b"er", b"x", b"er"]
"""Bread and Breads form a group, and so do er and er. Break cannot be completed after Br, and x has no completion."""
LENGTH = 40


def projection() -> ProjectionMatrix:
    empty = np.full((len(STUDENT), 1), -1)
    pieces = [reference.first_piece(text, STUDENT) for text in TEACHER]
    return ProjectionMatrix(
        empty,
        np.zeros(empty.shape),
        teacher_vocab_size=len(TEACHER),
        byte_prefix=[-1 if piece is None else piece for piece in pieces],
        **bytes_of(STUDENT, TEACHER),
    )


def arguments() -> dict[str, Tensor | ProjectionMatrix]:
    ids = torch.arange(LENGTH)[None] * 7 % len(STUDENT)
    chunks = torch.arange(LENGTH)[None]
    names = ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id")
    return dict(zip(names, (ids, ids % len(TEACHER), chunks, chunks), strict=True)) | {"projection": projection()}


def logits() -> tuple[Tensor, Tensor]:
    return random_logits(1, LENGTH, len(STUDENT), 0), random_logits(1, LENGTH, len(TEACHER), 1)


@pytest.mark.parametrize(("weight", "tau"), [(1.0, 1.0), (0.0, 1.0), (0.3, 2.0)])
def test_value_equals_strings_and_sets(weight: float, tau: float) -> None:
    """Catches a root of another chunk, a child of another token, a group that is not the component, a renormalised
    weight, and completions that exceed the token or are renormalised.
    """
    student, teacher = logits()
    inputs = arguments()
    out = escd(student, teacher, **inputs, completion_weight=weight, temperature=tau)
    ids = inputs["student_ids"][0].tolist()
    sides = student[0].tolist(), teacher[0].tolist()
    expected = reference.escd(*sides, ids, STUDENT, TEACHER, weight, tau)
    without = reference.escd(*sides, ids, STUDENT, TEACHER, 0.0, tau)
    assert out.loss.item() == pytest.approx(expected / (LENGTH - 1), rel=1e-10)
    assert (expected > without + 1) == (weight > 0)


def test_gradient() -> None:
    """Catches a gradient that misses the softmax of the child or counts a token for only one set."""
    student, teacher = (side[:, :12] for side in logits())
    inputs = {name: value[:, :12] if isinstance(value, Tensor) else value for name, value in arguments().items()}
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: escd(z, teacher, **inputs, chunk_size=5).loss, student)


TEXTS = st.lists(st.text("ab", max_size=4).map(str.encode), min_size=1, max_size=12)


@given(TEXTS, TEXTS)
def test_sets_equal_a_search(student: list[bytes], teacher: list[bytes]) -> None:
    """Catches wrong bounds of a range of bytes, tokens with equal bytes, and tokens without bytes."""
    empty = np.full((len(student), 1), -1)
    matrix = ProjectionMatrix(
        empty, np.zeros(empty.shape), teacher_vocab_size=len(teacher), **bytes_of(student, teacher)
    )
    sets = CompletionSets.of(matrix, len(student), len(teacher), torch.device("cpu"))
    for token, begun in enumerate(student):
        computed = set()
        for pair in range(int(sets.first_pair[token]), int(sets.first_pair[token] + sets.num_pairs[token])):
            runs = (
                (sets.teacher_tokens, sets.member_begin[pair], sets.num_members[pair]),
                (sets.student_tokens, sets.completion_begin[pair], sets.num_completions[pair]),
            )
            computed.add(tuple(frozenset(tokens[begin : begin + number].tolist()) for tokens, begin, number in runs))
        expected = set()
        for group in reference.components(sorted({t for t in teacher if t and t not in student})):
            shortest = min(group, key=len)
            ending = shortest[len(begun) :]
            if begun and shortest.startswith(begun) and ending:
                members = frozenset(i for i, t in enumerate(teacher) if t in group)
                completing = frozenset(i for i, t in enumerate(student) if t.startswith(ending))
                expected |= {(members, completing)} if completing else set()
        assert computed == expected


def test_the_teacher_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches completions that need a second product with the teacher's head."""
    rows_read: list[tuple[int, int]] = []
    read = HeadLogits.read

    def counted(self: HeadLogits, rows: Tensor, width: int) -> Tensor:
        rows_read.append((width, len(rows)))
        return read(self, rows, width)

    monkeypatch.setattr(HeadLogits, "read", counted)
    heads = [HeadLogits(side, Head(torch.eye(side.shape[2], dtype=side.dtype))) for side in logits()]
    heads[0].leaves[0].requires_grad_()
    escd(*heads, **arguments())
    assert sum(number for width, number in rows_read if width == len(TEACHER)) == LENGTH - 1


def test_losses_are_recorded_at_their_chunk() -> None:
    """Catches a child's loss at the token of another chunk, or beyond the last token of the batch."""
    student, teacher = logits()
    plan = escd.plan(student, teacher, **arguments())
    recorder = UnitLossRecorder.of(plan)
    recorder.plan.compute()
    assert recorder.is_unit()[0].tolist() == [False, *[True] * (LENGTH - 1)]
    assert recorder.losses().sum().item() == pytest.approx(plan.compute().metrics["kd"].total.item(), rel=1e-10)


def test_root_is_byte_prefix() -> None:
    """Without chunks of one student and several teacher tokens, the first term is byte_prefix with
    pieces=longest_prefix.
    """
    student, teacher = logits()
    with_order = {"teacher_byte_order": np.stack([np.arange(14), np.arange(14), np.arange(14) + 1], 1)}
    changed = {name: getattr(projection(), name) for name in ("byte_prefix", "student_bytes", "student_byte_ends")}
    changed |= {name: getattr(projection(), name) for name in ("teacher_bytes", "teacher_byte_ends")}
    empty = np.full((len(STUDENT), 1), -1)
    matrix = ProjectionMatrix(empty, np.zeros(empty.shape), teacher_vocab_size=14, **changed, **with_order)
    inputs = arguments() | {"projection": matrix}
    values = [
        escd(student, teacher, **inputs, completion_weight=0).loss,
        byte_prefix(student, teacher, **inputs, pieces="longest_prefix").loss,
    ]
    torch.testing.assert_close(*values)
