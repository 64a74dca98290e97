"""What a plan and its batches hold, as the plain values that the reference trainer takes."""

from collections.abc import Sequence
from typing import Any

from nemo_opd.data.samples import Sample, TeacherSample, Tokens
from nemo_opd.preflight.plan import Plan
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import SampledRows
from tests.losses.plain import plain_maps, plain_term

Rows = list[dict[str, Any]]

Facts = list[dict[str, Any]]
"""By row what no sample holds: reward, prompt, the teacher it is routed to."""


def plain_run(plan: Plan, batches: Sequence[Rows], pieces: Sequence[Sequence[bytes]] = ()) -> dict[str, Any]:
    """pieces: by teacher, of its tokens, for losses that read them."""
    config = plan.config
    settings = config.model_dump(warnings=False)
    teachers = [
        {
            "name": teacher.name,
            "model": teacher.model,
            "weight": teacher.weight,
            "vocab_size": plan.teachers[i].vocab_size,
            "is_same": teacher.type == "same_tokenizer",
            "term": plain_term(config.term(i)),
            "maps": _maps(plan.teachers[i].projection, pieces[i] if pieces else ()),
        }
        for i, teacher in enumerate(config.active_teachers)
    ]
    return {
        "student": {"model": config.student.model, "vocab_size": plan.student_vocab_size},
        "teachers": teachers,
        "loss": settings["loss"],
        "aggregation": settings["aggregation"],
        "optimizer": {key: value for key, value in settings["student"]["optimizer"].items() if key != "type"},
        "scheduler": settings["student"]["scheduler"],
        "gradient_clip": config.train.gradient_clip,
        "total_steps": plan.total_steps,
        "weighting_beta": None if config.reward is None else config.reward.weighting_beta,
        "batches": batches,
    }


def _maps(projection: ProjectionMatrix | None, pieces: Sequence[bytes]) -> dict[str, Any] | None:
    return None if projection is None else plain_maps(projection, pieces)


def plain_rows(samples: Sequence[Sample], sampled: SampledRows | None, facts: Facts) -> list[dict[str, Any]]:
    """Of a batch that was made of these samples."""
    rows = []
    for b, (sample, more) in enumerate(zip(samples, facts, strict=True)):
        row = plain_tokens(sample.student) | {"sampled": False}
        if sampled is not None and sampled.is_sampled[b]:
            length = len(sample.student)
            behaviour, drawn = (each[b, :length].tolist() for each in (sampled.logprobs, sampled.behaviour_logprobs))
            row |= {"sampled": True, "behaviour": behaviour, "drawn": drawn}
        row["teachers"] = [plain_teacher(teacher, sample.student) for teacher in sample.teachers]
        rows.append(row | more)
    return rows


def plain_tokens(tokens: Tokens) -> dict[str, Any]:
    return {
        "ids": tokens.ids.tolist(),
        "scored": tokens.loss_mask.tolist(),
        "num_bytes": tokens.num_bytes.tolist(),
    }


def plain_teacher(teacher: TeacherSample, student: Tokens) -> dict[str, Any]:
    """A teacher with the student's tokenizer has a chunk for each scored token."""
    if teacher.chunks is None:
        each = [i if scored else -1 for i, scored in enumerate(student.loss_mask.tolist())]
        return plain_tokens(student) | {"chunks": (each, each), "stop": len(each)}
    chunks = teacher.chunks.student.tolist(), teacher.chunks.teacher.tolist()
    return plain_tokens(teacher.tokens) | {"chunks": chunks, "stop": teacher.chunks.stop}
