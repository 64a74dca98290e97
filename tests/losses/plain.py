"""A loss's settings and batches as tests/reference takes them, and what a batch costs by it."""

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
    """With what methods.md §5 says of weights and sizes that are not given."""
    settings = term.model_dump()
    defaults = dict.fromkeys(("coverage_coef", "common_weight", "uncommon_weight"), 1.0) | {"uncommon_topk": 8192}
    return settings | {key: value for key, value in defaults.items() if settings.get(key) is None}


def plain_maps(projection: ProjectionMatrix, pieces: Sequence[bytes | None], kind: str | None = None) -> dict[str, Any]:
    """pieces: of the teacher's tokens. kind: of the maps of `byte_prefix` and `shared_prefix`; None: their defaults."""
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


def plain_texts(batch: Batch, **of_sampling: Tensor) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each sequence as the student sees it, whose logits get a gradient, and as the teacher does.

    of_sampling: `behaviour` and `drawn` [B, S]; every token of a chunk is sampled.
    """
    texts = []
    for b in range(len(batch)):
        chunks = batch.student_chunk_id[b].tolist(), batch.teacher_chunk_id[b].tolist()
        z = batch.student[b].detach().clone().requires_grad_()
        scored = [chunk >= 0 for chunk in chunks[0]]
        one = {"ids": batch.student_ids[b].tolist(), "z": z, "scored": scored, "sampled": True}
        one |= {name: values[b].tolist() for name, values in of_sampling.items()}
        own = {"ids": batch.teacher_ids[b].tolist(), "w": batch.teacher[b], "chunks": chunks, "stop": math.inf}
        texts.append((one, own))
    return texts


def compared_chunks(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> list[tuple[int, list[int], list[int]]]:
    """Row, student positions and teacher positions of each chunk that the reference compares."""
    found = []
    for b, chunks in enumerate(zip(student_chunk_id.tolist(), teacher_chunk_id.tolist(), strict=True)):
        places = [range(len(side)) for side in chunks]
        one = {"ids": places[0], "z": torch.zeros(len(places[0]), 1)}
        own = {"ids": places[1], "w": torch.zeros(len(places[1]), 1), "chunks": chunks, "stop": math.inf}
        found += [(b, x, y) for _, x, y, _, _ in reference.aligned(one, own)]
    return found


def _within(maps: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """What the maps hold of tokens that have logits."""
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
    """A sum over the units of a batch, not divided."""

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
    **of_sampling: Any,
) -> Cost:
    """By the reference. weights: of sequences. units_of: tests/reference/truncated.py has another one."""
    settings, texts = plain_term(term), plain_texts(batch, **of_sampling)
    maps = _within(plain_maps(batch.projection, pieces, settings.get("pieces")), batch)
    maps["kept"] = kept_columns({"term": settings, "maps": maps}, texts)
    by_text = [units_of(settings, one, own, maps) for one, own in texts]
    total, num_units, reported = torch.zeros((), dtype=torch.float64), sum(map(len, by_text)), 0.0
    for weight, units in zip(weights or [1.0] * len(texts), by_text, strict=True):
        divisor = max(1, len(units)) if term.type == "tcad" else 1
        total = total + weight * sum(trained for trained, _ in units) / divisor
        reported += sum(float(shown) for _, shown in units)
    gradient = torch.stack(torch.autograd.grad(total, [one["z"] for one, _ in texts]))
    return Cost(total.detach(), gradient, reported, num_units)


def narrowed(batch: Batch, projection: ProjectionMatrix) -> Batch:
    """With the vocabularies of another projection, and its first pair at every place."""
    sizes = projection.student_vocab_size, projection.teacher_vocab_size
    pair = projection.shared_pairs[0].tolist()
    return replace(
        batch.with_logits(batch.student[..., : sizes[0]], batch.teacher[..., : sizes[1]]),
        student_ids=torch.full_like(batch.student_ids, pair[0]),
        teacher_ids=torch.full_like(batch.teacher_ids, pair[1]),
        projection=projection,
    )
