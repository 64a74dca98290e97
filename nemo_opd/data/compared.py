"""The bytes of a text that all its models predict, over which all bits per byte are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.samples import Sample, TeacherSample, Tokens


def compared(sample: Sample) -> Sample:
    """Keep the bytes of those tokens only whose content all models of the sample predict.

    Those models are the student and the teachers that read the text: one where it is routed, else all. Whole tokens
    count: a stretch of text between two places where all of them cut it counts if each of them learns all of its tokens
    from the same bytes. So the numbers of bytes are equal on all sides. Left out are the start of a text that some side
    reads without a predictor, what lies beyond some side's limit, what a side rewrites, templates' own text, and
    marks of one role, which may be text on one side only.
    """
    readers = [i for i in range(len(sample.teachers)) if sample.route in (None, i)]
    is_kept = _kept_tokens(sample.student, [sample.teachers[i] for i in readers])
    student = replace(sample.student, num_bytes=np.where(is_kept, sample.student.num_bytes, np.int32(0)))
    teachers = [
        _teacher_bytes(teacher, sample.student, student, is_kept) if i in readers else teacher
        for i, teacher in enumerate(sample.teachers)
    ]
    return replace(sample, student=student, teachers=tuple(teachers))


def _kept_tokens(student: Tokens, teachers: Sequence[TeacherSample]) -> NDArray[np.bool_]:
    """Mark tokens of the student in stretches that are compared whole: bool [S]."""
    is_read = student.loss_mask.copy()
    opens = np.ones(len(student), np.bool_)
    for teacher in teachers:
        if teacher.chunks is None:
            is_read &= teacher.at_student(teacher.tokens.loss_mask, len(student))
            continue
        chunk = teacher.chunks.student
        is_read &= (chunk >= 0) & ~np.isin(chunk, teacher.chunks.marks)
        opens[1:] &= (chunk[1:] != chunk[:-1]) | (chunk[1:] < 0)
    stretch = np.cumsum(opens) - 1
    is_whole = np.ones(len(student), np.bool_)
    is_whole[stretch[~is_read]] = False
    return is_whole[stretch]


def _teacher_bytes(
    teacher: TeacherSample, before: Tokens, student: Tokens, is_kept: NDArray[np.bool_]
) -> TeacherSample:
    """Keep the bytes of a teacher's tokens in the kept stretches. before: the student's tokens
    that it was made for.
    """
    if teacher.chunks is None:
        if teacher.tokens is before:
            return replace(teacher, tokens=student)
        return replace(teacher, tokens=replace(teacher.tokens, num_bytes=teacher.at_teacher(student.num_bytes)))
    ours, theirs = teacher.chunks.student, teacher.chunks.teacher
    # One place more than there are chunks: −1, no chunk, is the last and stays false.
    is_counted = np.zeros(int(max(ours.max(initial=-1), theirs.max(initial=-1))) + 2, np.bool_)
    is_counted[ours[is_kept & (ours >= 0)]] = True
    num_bytes = np.where(is_counted[theirs], teacher.tokens.num_bytes, np.int32(0))
    return replace(teacher, tokens=replace(teacher.tokens, num_bytes=num_bytes))
