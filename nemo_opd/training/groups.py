"""Process groups of a run's models."""

from typing import Any

from nemo_opd.cluster.base import Cluster, Group
from nemo_opd.config.on_policy import confidence_alphas
from nemo_opd.training.plan import Plan
from nemo_opd.workers.stored_teacher import CachedTeacherWorker, ServedTeacherWorker
from nemo_opd.workers.student import StudentWorker
from nemo_opd.workers.teacher import TeacherWorker


def separate(plan: Plan) -> list[int]:
    """Return the indices of teachers in separate processes."""
    return [i for i, settings in enumerate(plan.config.active_teachers) if not settings.is_student]


def teacher_group(cluster: Cluster, plan: Plan, i: int) -> Group:
    """Start the group of a teacher in separate processes."""
    settings = plan.config.active_teachers[i]
    worker: type[TeacherWorker] = TeacherWorker
    if not settings.is_computed:
        worker = ServedTeacherWorker if settings.cache is None else CachedTeacherWorker
    return cluster.group(f"teacher {settings.name}", worker, _teacher_arguments(plan, i), plan.placement.teachers[i])


def _teacher_arguments(plan: Plan, i: int) -> dict[str, Any]:
    """Return the arguments of a teacher's workers."""
    settings = plan.config.active_teachers[i]
    alpha = confidence_alphas(plan.config)[i]
    return {
        "settings": settings,
        "key": "student.model" if settings.is_student else f"teachers.{i}.model",
        "vocab_size": plan.teachers[i].vocab_size,
        "device": plan.device,
        "transport": plan.transport,
        "handoff": plan.config.handoff.type,
        "score": plan.config.aggregation.score if alpha is None else "log_probability",
        "readers": plan.deliveries[i].readers,
        "num_slots": 1 if settings.is_student else 1 + plan.lookahead,
        "empties_cache": plan.empties_cache,
        "shares_process": settings.is_student or plan.config.cluster.launcher == "local",
    }


def student_group(cluster: Cluster, plan: Plan) -> Group:
    """Start the student's group."""
    return cluster.group(
        "student",
        StudentWorker,
        {
            "config": plan.config,
            "projections": [teacher.projection for teacher in plan.teachers],
            "total_steps": plan.total_steps,
            "vocab_size": plan.student_vocab_size,
            "teacher_vocab_sizes": [teacher.vocab_size for teacher in plan.teachers],
            "device": plan.device,
            "transport": plan.transport,
            "block_bytes": plan.memory.block_bytes,
            "empties_cache": plan.empties_cache,
            "end_ids": plan.sampled_end_ids,
            "own_teachers": {
                i: _teacher_arguments(plan, i)
                for i, settings in enumerate(plan.config.active_teachers)
                if settings.is_student
            },
        },
        plan.placement.student,
    )
