"""Weights that stay gathered and gradients that are reduced once a step, where settings leave it to the estimate."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, TypeVar

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.training.memory import Situation, estimate

_Kept = int | Literal["student", "gradients"]
"""Weights of a teacher, by its index, or of the student; or the student's gradients."""
_Model = TypeVar("_Model", Student, Teacher)


def settle_kept(config: RunConfig, situation: Situation) -> RunConfig:
    """Return the settings with every `reshard_after_forward: auto` and `sync_each_micro_batch: auto` decided.

    They are false where what is then kept fits easily without more offloading, tried in this order: the teachers'
    weights, the smallest first, the student's weights, its gradients. They are true on CPU, where the GPU's memory is
    unknown, and for models that are offloaded.
    """
    kept: list[_Kept] = []
    for each in _undecided(config, situation) if situation.machine.device_bytes is not None else ():
        if estimate(_decided(config, [*kept, each]), situation).fits_easily:
            kept.append(each)
    return _decided(config, kept)


def _undecided(config: RunConfig, situation: Situation) -> Iterator[_Kept]:
    sizes = [setup.size.parameters for setup in situation.teachers]
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        if config.teachers[i].has_model and _may_stay(config.teachers[i]):
            yield i
    if _may_stay(config.student):
        yield "student"
    if config.student.sync_each_micro_batch == "auto" and config.student.offload is not True:
        yield "gradients"


def _may_stay(model: Student | Teacher) -> bool:
    return model.parallelism.reshard_after_forward == "auto" and model.offload in (False, "auto")


def _decided(config: RunConfig, kept: Collection[_Kept]) -> RunConfig:
    teachers = tuple(_with_weights(teacher, is_kept=i in kept) for i, teacher in enumerate(config.teachers))
    student = _with_weights(config.student, is_kept="student" in kept)
    if student.sync_each_micro_batch == "auto":
        student = student.model_copy(update={"sync_each_micro_batch": "gradients" not in kept})
    return config.model_copy(update={"teachers": teachers, "student": student})


def _with_weights(model: _Model, *, is_kept: bool) -> _Model:
    if model.parallelism.reshard_after_forward != "auto":
        return model
    return model.with_parallelism(reshard_after_forward=not is_kept)
