"""What a plan and its batches hold, as the plain values that the reference trainer takes."""

from typing import Any

import torch

from nemo_opd.alignment import pieces_of
from nemo_opd.data.collate import NO_CHUNK
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.training.plan import Plan
from nemo_opd.types import Batch, TeacherRows, TokenRows
from tests.campaign.models import tokenizer

Facts = list[dict[str, Any]]
"""By row what no batch holds: reward, prompt, the teacher it is routed to."""


def plain_run(plan: Plan, batches: list[Batch], facts: list[Facts], tokenizers: list[str]) -> dict[str, Any]:
    """tokenizers: of the teachers."""
    config = plan.config
    settings = config.model_dump(warnings=False)
    teachers = [
        {
            "name": teacher.name,
            "model": teacher.model,
            "weight": teacher.weight,
            "vocab_size": plan.teachers[i].vocab_size,
            "term": config.term(i).model_dump(),
            "maps": plain_maps(plan.teachers[i].projection, tokenizers[i]),
        }
        for i, teacher in enumerate(config.active_teachers)
    ]
    return {
        "student": {"model": config.student.model, "vocab_size": plan.student.vocab_size},
        "teachers": teachers,
        "loss": settings["loss"],
        "aggregation": settings["aggregation"],
        "optimizer": {key: value for key, value in settings["student"]["optimizer"].items() if key != "type"},
        "scheduler": settings["student"]["scheduler"],
        "gradient_clip": config.train.gradient_clip,
        "total_steps": plan.total_steps,
        "weighting_beta": None if config.reward is None else config.reward.weighting_beta,
        "batches": [plain_rows(*each) for each in zip(batches, facts, strict=True)],
    }


def plain_maps(projection: ProjectionMatrix | None, name: str) -> dict[str, Any] | None:
    if projection is None:
        return None
    R = torch.zeros(projection.student_vocab_size, projection.teacher_vocab_size, dtype=torch.float64)
    for s, (columns, weights) in enumerate(zip(projection.indices, projection.weights, strict=True)):
        for t, weight in zip(columns.tolist(), weights.tolist(), strict=True):
            if t >= 0:
                R[s, t] = weight
    pieces = pieces_of(tokenizer(name))
    return {
        "R": R,
        "exact": projection.exact.tolist(),
        "phi": projection.byte_prefix.tolist(),
        "psi": (projection.student_shared_prefix.tolist(), projection.teacher_shared_prefix.tolist()),
        "pieces": [piece or None for piece in pieces.as_list()],
    }


def plain_rows(batch: Batch, facts: Facts) -> list[dict[str, Any]]:
    rows = []
    for b, more in enumerate(facts):
        row = plain_tokens(batch.student, b)
        length = len(row["ids"])
        row["sampled"] = batch.sampled is not None and bool(batch.sampled.is_sampled[b])
        row["behaviour"] = None if batch.sampled is None else batch.sampled.logprobs[b, :length].tolist()
        row["teachers"] = [plain_teacher(teacher, b, length) for teacher in batch.teachers]
        rows.append(row | more)
    return rows


def plain_tokens(rows: TokenRows, b: int) -> dict[str, Any]:
    own = slice(int(rows.lengths[b]))
    return {
        "ids": rows.ids[b, own].tolist(),
        "scored": rows.loss_mask[b, own].tolist(),
        "num_bytes": rows.num_bytes[b, own].tolist(),
    }


def plain_teacher(rows: TeacherRows, b: int, student_length: int) -> dict[str, Any]:
    own = plain_tokens(rows.tokens, b)
    if rows.chunks is None:
        return own | {"chunks": None}
    student, teacher = rows.chunks.student[b].tolist(), rows.chunks.teacher[b].tolist()
    assert all(chunk == NO_CHUNK for chunk in student[student_length:])
    return own | {"chunks": (student[:student_length], teacher[: len(own["ids"])])}
