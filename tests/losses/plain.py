"""A loss's settings and batches in the form of tests/reference, and the reference's loss of a batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_opd.config.loss import LossTerm
from nemo_opd.projection import ProjectionMatrix
from tests.losses.cases import Batch
from tests.reference import losses as reference
from tests.reference.trainer import kept_columns


def plain_term(term: LossTerm) -> dict[str, Any]:
    """Return the settings with the defaults of methods.md §5 for weights and sizes that are None."""
    settings = term.model_dump()
    defaults = dict.fromkeys(("coverage_coef", "common_weight", "uncommon_weight"), 1.0) | {"uncommon_topk": 8192}
    return settings | {key: value for key, value in defaults.items() if settings.get(key) is None}


def plain_maps(projection: ProjectionMatrix, pieces: Sequence[bytes | None], kind: str | None = None) -> dict[str, Any]:
    """Return the maps of methods.md §2. pieces: bytes of the teacher's tokens. kind: `pieces` setting of `byte_prefix`
    and `shared_prefix`, or None for the defaults.
    """
    R = torch.zeros(projection.student_vocab_size, projection.teacher_vocab_size, dtype=torch.float64)
    for s, (columns, weights) in enumerate(zip(projection.indices, projection.weights, strict=True)):
        for t, weight in zip(columns.tolist(), weights.tolist(), strict=True):
            if t >= 0:
                R[s, t] = weight
    maps = {"R": R, "exact": projection.exact.tolist(), "pieces": [piece or None for piece in pieces]}
    if kind == "longest_prefix":
        maps["phi"] = None if projection.byte_prefix is None else projection.byte_prefix.tolist()
    elif projection.teacher_spellings is not None:
        ids, ends = projection.teacher_spellings.tolist(), projection.teacher_spelling_ends.tolist()
        maps["phi"] = [ids[start] if start < end else -1 for start, end in zip([0, *ends], ends, strict=False)]
    shared = (projection.student_shared_prefix, projection.teacher_shared_prefix)
    if kind == "spelling":
        shared = (projection.student_shared_spelling, projection.teacher_shared_spelling)
    if shared[0] is not None:
        maps["psi"] = tuple(side.tolist() for side in shared)
    return maps


def plain_texts(batch: Batch, **sampling: Tensor) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the student's and the teacher's side of each sequence; the student's logits get a gradient.

    sampling: `behaviour` and `drawn` [B, S]; every token of a chunk is sampled.
    """
    texts = []
    for b in range(len(batch)):
        chunks = batch.student_chunk_id[b].tolist(), batch.teacher_chunk_id[b].tolist()
        z = batch.student[b].detach().clone().requires_grad_()
        scored = [chunk >= 0 for chunk in chunks[0]]
        student_side = {"ids": batch.student_ids[b].tolist(), "z": z, "scored": scored, "sampled": True}
        student_side |= {name: values[b].tolist() for name, values in sampling.items()}
        teacher_side = {"ids": batch.teacher_ids[b].tolist(), "w": batch.teacher[b], "chunks": chunks, "stop": math.inf}
        texts.append((student_side, teacher_side))
    return texts


def compared_chunks(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> list[tuple[int, list[int], list[int]]]:
    """Return row, student positions and teacher positions of each chunk that the reference compares."""
    compared = []
    for b, chunks in enumerate(zip(student_chunk_id.tolist(), teacher_chunk_id.tolist(), strict=True)):
        places = [range(len(side)) for side in chunks]
        student_side = {"ids": places[0], "z": torch.zeros(len(places[0]), 1)}
        teacher_side = {"ids": places[1], "w": torch.zeros(len(places[1]), 1), "chunks": chunks, "stop": math.inf}
        compared += [(b, x, y) for _, x, y, _, _ in reference.aligned(student_side, teacher_side)]
    return compared


def _within(maps: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Drop tokens without logits from the maps."""
    R, sizes = (
        maps["R"][: batch.student.shape[2], : batch.teacher.shape[2]],
        (batch.student.shape[2], batch.teacher.shape[2]),
    )
    exact = [is_exact and bool(row.any()) for is_exact, row in zip(maps["exact"], R, strict=False)]
    cut = {"R": R, "exact": exact}
    if "psi" in maps:
        cut["psi"] = tuple(side[:size] for side, size in zip(maps["psi"], sizes, strict=True))
    return maps | cut


@dataclass(frozen=True)
class Cost:
    """Sums over the units of a batch."""

    loss: Tensor
    gradient: Tensor
    """[B, S, V]"""
    reported: float
    num_units: int


def cost(
    term: LossTerm,
    batch: Batch,
    pieces: Sequence[bytes | None] = (),
    weights: Sequence[float] = (),
    units_of: Callable[..., list[reference.Unit]] = reference.units,
    **sampling: Any,
) -> Cost:
    """Compute a batch's loss with the reference. weights: one per sequence. units_of: tests/reference/truncated.py has
    another one.
    """
    settings, texts = plain_term(term), plain_texts(batch, **sampling)
    maps = _within(plain_maps(batch.projection, pieces, settings.get("pieces")), batch)
    maps["kept"] = kept_columns({"term": settings, "maps": maps}, texts)
    by_text = [units_of(settings, student_side, teacher_side, maps) for student_side, teacher_side in texts]
    total, num_units, reported = torch.zeros((), dtype=torch.float64), sum(map(len, by_text)), 0.0
    for weight, units in zip(weights or [1.0] * len(texts), by_text, strict=True):
        divisor = max(1, len(units)) if term.type == "tcad" else 1
        total = total + weight * sum(trained for trained, _ in units) / divisor
        reported += sum(float(reported_value) for _, reported_value in units)
    gradient = torch.stack(torch.autograd.grad(total, [student_side["z"] for student_side, _ in texts]))
    return Cost(total.detach(), gradient, reported, num_units)


def narrowed(batch: Batch, projection: ProjectionMatrix) -> Batch:
    """Return the batch with the vocabularies of another projection, and its first pair at every position."""
    sizes = projection.student_vocab_size, projection.teacher_vocab_size
    pair = projection.shared_pairs[0].tolist()
    return replace(
        batch.with_logits(batch.student[..., : sizes[0]], batch.teacher[..., : sizes[1]]),
        student_ids=torch.full_like(batch.student_ids, pair[0]),
        teacher_ids=torch.full_like(batch.teacher_ids, pair[1]),
        projection=projection,
    )
