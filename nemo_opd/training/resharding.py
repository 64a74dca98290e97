"""Resolution of `reshard_after_forward: auto` and `sync_each_micro_batch: auto` by the memory estimate."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, TypeVar

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.training.memory import MemoryInputs, estimate

_Item = int | Literal["student", "gradients"]
"""Item that may stay unsharded: a teacher's weights (its index), the student's weights, or its gradients."""
_Model = TypeVar("_Model", Student, Teacher)


def resolve_resharding(config: RunConfig, situation: MemoryInputs) -> RunConfig:
    """Resolve every `reshard_after_forward: auto` and `sync_each_micro_batch: auto` in the settings.

    They become false if the unsharded item fits easily without more offloading. Items are tried in this order: the
    teachers' weights, smallest first, the student's weights, its gradients. They become true on CPU, with unknown GPU
    memory, and for offloaded models.
    """
    unsharded: list[_Item] = []
    for item in _undecided(config, situation) if situation.machine.device_bytes is not None else ():
        if estimate(_resolved(config, [*unsharded, item]), situation).fits_easily:
            unsharded.append(item)
    return _resolved(config, unsharded)


def _undecided(config: RunConfig, situation: MemoryInputs) -> Iterator[_Item]:
    """Yield the items with `auto` in the order of trial."""
    sizes = [setup.size.parameters for setup in situation.teachers]
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        if config.teachers[i].has_model and _may_stay_gathered(config.teachers[i]):
            yield i
    if _may_stay_gathered(config.student):
        yield "student"
    if config.student.sync_each_micro_batch == "auto" and config.student.offload is not True:
        yield "gradients"


def _may_stay_gathered(model: Student | Teacher) -> bool:
    return model.parallelism.reshard_after_forward == "auto" and model.offload in (False, "auto")


def _resolved(config: RunConfig, unsharded: Collection[_Item]) -> RunConfig:
    teachers = tuple(
        _with_resharding(teacher, reshards=i not in unsharded) for i, teacher in enumerate(config.teachers)
    )
    student = _with_resharding(config.student, reshards="student" not in unsharded)
    if student.sync_each_micro_batch == "auto":
        student = student.model_copy(update={"sync_each_micro_batch": "gradients" not in unsharded})
    return config.model_copy(update={"teachers": teachers, "student": student})


def _with_resharding(model: _Model, *, reshards: bool) -> _Model:
    if model.parallelism.reshard_after_forward != "auto":
        return model
    return model.with_parallelism(reshard_after_forward=reshards)
