"""Plans and batches in the form that the reference trainer (tests/reference/trainer.py) takes, and its results."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Batch, SampledRows, TeacherRows, TokenRows
from tests.losses.plain import plain_maps, plain_term
from tests.reference import trainer

Rows = list[dict[str, Any]]

Facts = list[dict[str, Any]]
"""Values of a row that are not in its sample: reward, prompt, route."""


def plain_run(plan: Plan, batches: Sequence[Rows], pieces: Sequence[Sequence[bytes]] = ()) -> dict[str, Any]:
    """Return the settings as plain values. pieces: bytes of each teacher's tokens, for losses that use them."""
    config = plan.config
    settings = config.model_dump(warnings=False)
    projections = [teacher.projection for teacher in plan.teachers]
    teachers = [
        {
            "name": teacher.name,
            "model": teacher.model,
            "weight": teacher.weight,
            "vocab_size": plan.teachers[i].vocab_size,
            "is_same": teacher.type == "same_tokenizer",
            "term": plain_term(config.term(i)),
            "maps": projection and plain_maps(projection, pieces[i] if pieces else ()),
        }
        for i, (teacher, projection) in enumerate(zip(config.active_teachers, projections, strict=True))
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


def plain_rows(samples: Sequence[Sample], sampled: SampledRows | None, facts: Facts) -> Rows:
    """Return the rows of a batch of samples."""
    rows = []
    for b, (sample, more) in enumerate(zip(samples, facts, strict=True)):
        row = plain_tokens(sample.student) | {"sampled": False}
        if sampled is not None and sampled.is_sampled[b]:
            length = len(sample.student)
            behaviour, drawn = (
                logprobs[b, :length].tolist() for logprobs in (sampled.logprobs, sampled.behaviour_logprobs)
            )
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
        chunk_ids = [i if scored else -1 for i, scored in enumerate(student.loss_mask.tolist())]
        return plain_tokens(student) | {"chunks": (chunk_ids, chunk_ids), "stop": len(chunk_ids)}
    chunks = teacher.chunks.student.tolist(), teacher.chunks.teacher.tolist()
    return plain_tokens(teacher.tokens) | {"chunks": chunks, "stop": teacher.chunks.stop}


def rows_of_batch(batch: Batch, routes: Sequence[int | None] = ()) -> Rows:
    """Return the rows of a batch without rollouts. routes: the only teacher of each text."""
    samples = [
        Sample(_tokens(batch.student, b), tuple(_teacher_sample(teacher, b) for teacher in batch.teachers))
        for b in range(len(batch))
    ]
    return plain_rows(samples, None, [{"route": route} for route in routes or [None] * len(batch)])


def _tokens(rows: TokenRows, b: int) -> Tokens:
    """Return a sequence; one padding token if it is empty, as for a teacher that does not get the text."""
    length = max(1, int(rows.lengths[b]))
    return Tokens(*(values[b, :length].numpy() for values in (rows.ids, rows.loss_mask, rows.num_bytes)))


def _teacher_sample(rows: TeacherRows, b: int) -> TeacherSample:
    tokens, chunks = _tokens(rows.tokens, b), rows.chunks
    if chunks is None:
        return TeacherSample(tokens, None)
    limits = {"changed_from": sys.maxsize, "stop": sys.maxsize}
    return TeacherSample(tokens, Chunks(chunks.student[b].numpy(), chunks.teacher[b].numpy(), **limits))


def plain_training(plan: Plan, batches: list[Batch]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the reference's curve and final weights."""
    curve, weights = trainer.train(plain_run(plan, [rows_of_batch(batch) for batch in batches]))
    tokens = [{"student_tokens": int(batch.student.lengths.sum())} for batch in batches]
    names = ("ce", "kd/cross", "kd/same", "grad_norm", "lr")
    points = ({name: point[name] for name in names} for point in curve)
    weights = {name: weight.float() for name, weight in weights.items()}
    return [a | b for a, b in zip(points, tokens, strict=True)], weights


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def sequences(ids: Tensor, lengths: Tensor) -> list[Tensor]:
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
