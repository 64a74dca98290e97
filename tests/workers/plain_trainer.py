"""The reference trainer (tests/reference/trainer.py) and its inputs for the batches of a run's workers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Batch, TeacherRows, TokenRows
from tests.campaign.plain import Rows, plain_run
from tests.reference import trainer


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def plain_training(plan: Plan, batches: list[Batch]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return curve and final weights."""
    curve, weights = trainer.train(plain_run(plan, [plain_rows(batch) for batch in batches]))
    tokens = [{"student_tokens": int(batch.student.lengths.sum())} for batch in batches]
    names = ("ce", "kd/cross", "kd/same", "grad_norm", "lr")
    points = ({name: point[name] for name in names} for point in curve)
    return [a | b for a, b in zip(points, tokens, strict=True)], {name: each.float() for name, each in weights.items()}


def plain_rows(batch: Batch, routes: Sequence[int | None] = ()) -> Rows:
    """routes: the teacher that each text names."""
    rows = []
    for b, route in enumerate(routes or [None] * len(batch)):
        student = _tokens(batch.student, b)
        teachers = [_teacher(rows_of_teacher, student, b) for rows_of_teacher in batch.teachers]
        rows.append(student | {"sampled": False, "route": route, "teachers": teachers})
    return rows


def _tokens(rows: TokenRows, b: int) -> dict[str, Any]:
    """A teacher that is not asked about a text has a token of padding, which is not scored."""
    length = max(1, int(rows.lengths[b]))
    names = {"ids": rows.ids, "scored": rows.loss_mask, "num_bytes": rows.num_bytes}
    return {name: values[b, :length].tolist() for name, values in names.items()}


def _teacher(rows: TeacherRows, student: dict[str, Any], b: int) -> dict[str, Any]:
    """A teacher with the student's tokenizer has a chunk for each scored token."""
    if rows.chunks is None:
        places = [i if is_scored else -1 for i, is_scored in enumerate(student["scored"])]
        return student | {"chunks": (places, places), "stop": math.inf}
    own = _tokens(rows.tokens, b)
    sides = zip((rows.chunks.student, rows.chunks.teacher), (student, own), strict=True)
    chunks = tuple(chunk_ids[b, : len(side["ids"])].tolist() for chunk_ids, side in sides)
    return own | {"chunks": chunks, "stop": math.inf}


def sequences(ids: Tensor, lengths: Tensor) -> list[Tensor]:
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
