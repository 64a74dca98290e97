"""Bytes of a text that all its models predict: the denominator of every bits-per-byte figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.samples import Sample, TeacherSample, Tokens


def compared(sample: Sample) -> Sample:
    """Keep the byte counts of only those tokens whose content all models of the sample predict.

    These models are the student and the teachers that read the text: the routed one, or all. Only complete tokens
    count: a stretch between two token boundaries that all models share counts if each model learns all its tokens from
    the same bytes. So all sides have the same number of bytes. Excluded are the start of a text that some side reads
    without a predictor, text beyond some side's limit, text that a side rewrites, the templates' own text, and marks of
    one role, which may be text on one side only.
    """
    readers = [i for i in range(len(sample.teachers)) if sample.route in (None, i)]
    is_kept = _compared_tokens(sample.student, [sample.teachers[i] for i in readers])
    student = replace(sample.student, num_bytes=np.where(is_kept, sample.student.num_bytes, np.int32(0)))
    teachers = [
        _teacher_bytes(teacher, sample.student, student, is_kept) if i in readers else teacher
        for i, teacher in enumerate(sample.teachers)
    ]
    return replace(sample, student=student, teachers=tuple(teachers))


def _compared_tokens(student: Tokens, teachers: Sequence[TeacherSample]) -> NDArray[np.bool_]:
    """Mark the student's tokens in stretches that are compared completely: bool [S]."""
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
    teacher: TeacherSample, original: Tokens, student: Tokens, is_kept: NDArray[np.bool_]
) -> TeacherSample:
    """Keep the byte counts of a teacher's tokens in the compared stretches.

    original: the student's tokens before their byte counts were reduced to those of `student`.
    """
    if teacher.chunks is None:
        if teacher.tokens is original:
            return replace(teacher, tokens=student)
        return replace(teacher, tokens=replace(teacher.tokens, num_bytes=teacher.at_teacher(student.num_bytes)))
    ours, theirs = teacher.chunks.student, teacher.chunks.teacher
    # One entry more than chunks: id −1, no chunk, reads the last, which stays false.
    is_counted = np.zeros(int(max(ours.max(initial=-1), theirs.max(initial=-1))) + 2, np.bool_)
    is_counted[ours[is_kept & (ours >= 0)]] = True
    num_bytes = np.where(is_counted[theirs], teacher.tokens.num_bytes, np.int32(0))
    return replace(teacher, tokens=replace(teacher.tokens, num_bytes=num_bytes))
