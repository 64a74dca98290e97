"""Serialization of samples."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens


def encoded(samples: Sequence[Sample]) -> bytes:
    """Serialize samples as compressed arrays, keyed by the sample's index and the array's name."""
    arrays = {
        f"{k}/{name}": np.ascontiguousarray(array)
        for k, sample in enumerate(samples)
        for name, array in _arrays(sample).items()
    }
    return zlib.compress(save(arrays), level=1)


def decoded(value: bytes) -> tuple[Sample, ...]:
    """Reverse `encoded`. Raises zlib.error, SafetensorError, KeyError or ValueError for other bytes."""
    by_sample: dict[int, dict[str, NDArray[Any]]] = defaultdict(dict)
    for path, array in load(zlib.decompress(value)).items():
        number, _, name = path.partition("/")
        by_sample[int(number)][name] = array
    return tuple(_sample(by_sample[k]) for k in range(len(by_sample)))


def _arrays(sample: Sample) -> dict[str, NDArray[Any]]:
    arrays = _named(sample.student, "student")
    for i, teacher in enumerate(sample.teachers):
        arrays[f"{i}.cross"] = np.array(teacher.chunks is not None)
        if teacher.tokens is not sample.student:
            arrays |= _named(teacher.tokens, f"{i}")
        if teacher.chunks is not None:
            arrays |= {f"{i}.student_chunk": teacher.chunks.student, f"{i}.teacher_chunk": teacher.chunks.teacher}
            arrays[f"{i}.marks"] = teacher.chunks.marks
            arrays |= {f"{i}.limits": np.array([teacher.chunks.changed_from, teacher.chunks.stop])}
        if teacher.moved_by is not None:
            arrays[f"{i}.moved_by"] = np.array(teacher.moved_by)
        if teacher.leakage is not None:
            arrays[f"{i}.leakage"] = np.array(teacher.leakage)
        for k, tokens in enumerate(teacher.variants):
            arrays |= _named(tokens, f"{i}.variants.{k}")
    return arrays


def _sample(arrays: dict[str, NDArray[Any]]) -> Sample:
    student = _tokens(arrays, "student")
    num_teachers = sum(name.endswith(".cross") for name in arrays)

    def teacher(i: int) -> TeacherSample:
        tokens = _tokens(arrays, f"{i}") if f"{i}.ids" in arrays else student
        moved_by = arrays[f"{i}.moved_by"].item() if f"{i}.moved_by" in arrays else None
        leakage = tuple(arrays[f"{i}.leakage"].tolist()) if f"{i}.leakage" in arrays else None
        num_variants = sum(name.startswith(f"{i}.variants.") and name.endswith(".ids") for name in arrays)
        variants = tuple(_tokens(arrays, f"{i}.variants.{k}") for k in range(num_variants))
        return TeacherSample(tokens, _chunks(arrays, i), moved_by, leakage, variants)

    return Sample(student, tuple(teacher(i) for i in range(num_teachers)))


def _chunks(arrays: dict[str, NDArray[Any]], i: int) -> Chunks | None:
    if not arrays[f"{i}.cross"]:
        return None
    changed_from, stop = arrays[f"{i}.limits"].tolist()
    ours, theirs, marks = (arrays[f"{i}.{name}"] for name in ("student_chunk", "teacher_chunk", "marks"))
    return Chunks(ours, theirs, changed_from, stop, marks)


def _named(side: Tokens, name: str) -> dict[str, NDArray[Any]]:
    return {f"{name}.ids": side.ids, f"{name}.loss_mask": side.loss_mask, f"{name}.num_bytes": side.num_bytes}


def _tokens(arrays: dict[str, NDArray[Any]], name: str) -> Tokens:
    return Tokens(arrays[f"{name}.ids"], arrays[f"{name}.loss_mask"], arrays[f"{name}.num_bytes"])
