"""Share of the teacher's probability on tokens that a loss maps into the student's vocabulary (methods.md §5.14)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, on_host
from nemo_opd.logits.blockwise import compute_dtype
from nemo_opd.logits.planned import PlannedLoss, Readings
from nemo_opd.losses.arguments import next_tokens
from nemo_opd.losses.prefixes import first_pieces
from nemo_opd.losses.sparse_projection import cached_by_array
from nemo_opd.types import Mean, Metric

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

STRIDE = 16
"""Metrics of the teacher's distribution measure only tokens, or aligned chunks, 1, 17, 33, …."""


def teacher_images(loss: str, projection: ProjectionMatrix, pieces: str = "spelling") -> NDArray[np.bool_] | None:
    """Return which teacher tokens a loss type maps: bool [W], or None if it uses no map or the projection lacks it.

    pieces: `byte_prefix`'s setting.
    The probability of unmapped tokens goes into a rest cell or is left out.
    """
    tokens = np.arange(projection.teacher_vocab_size)
    if loss == "p_kl":
        return np.isin(tokens, projection.indices)
    if loss in ("gold", "strict"):
        return np.isin(tokens, projection.shared_pairs[:, 1])
    if loss == "byte_prefix" and pieces == "spelling":
        return None if projection.teacher_spellings is None else first_pieces(projection, pieces) >= 0
    if loss in ("byte_prefix", "escd") and projection.byte_prefix is not None:
        return projection.byte_prefix >= 0
    if loss == "shared_prefix" and projection.teacher_shared_prefix is not None:
        return projection.teacher_shared_prefix >= 0
    return None


def with_image_mass(plan: PlannedLoss, images: NDArray[np.bool_], student_chunk_id: Tensor) -> PlannedLoss:
    """Add the metric `kd_mass` to a chunk loss: the mean of the teacher's mass on tokens with an image.

    images: bool [W]. Measured at the first positions of every 16th chunk, numbered by `student_chunk_id` [B, S], in the
    rows that the loss reads: without another product with the teacher's head.
    """
    term = plan.terms[0]
    assert term.ahead is not None
    ahead = term.ahead

    def measured(rows: Tensor, chunk_id: Tensor) -> list[Tensor]:
        first = rows if term.begins is None else rows[torch.tensor(term.begins[:-1], device=rows.device)]
        units = (next_tokens(chunk_id, first) % STRIDE == 1).nonzero().squeeze(1)
        return [units, ahead.first_rows(units)]

    units, teacher_rows = compute_on_host(measured, term.rows, student_chunk_id)
    host_units = on_host(units)
    unit_list = (units if host_units is None else host_units).tolist()
    readings = Readings.of(plan.source, len(unit_list), 1)

    def watch(part: slice, rows: Tensor) -> None:
        measured = slice(bisect_left(unit_list, part.start), bisect_left(unit_list, part.stop))
        if measured.start < measured.stop:
            places = teacher_rows[measured] - ahead.span(part).start
            logits = rows.index_select(0, places).to(compute_dtype(plan.source))
            readings.put(measured, logits.softmax(1) @ _on_device(images, logits))

    ahead.watch = watch

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        masses = readings.gather()
        return plan.metrics_of(weighted, unweighted) | {"kd_mass": Mean(masses.sum(), masses.shape[1])}

    return replace(plan, metrics_of=metrics_of)


def _on_device(images: NDArray[np.bool_], like: Tensor) -> Tensor:
    """Return 1 for teacher tokens with an image and 0 for tokens without, in the dtype of logits [u, W]: [W, 1]."""
    size, dtype, device = like.shape[1], like.dtype, like.device
    key = (with_image_mass, size, dtype, device)
    return cached_by_array(lambda: torch.from_numpy(images[:size]).to(device, dtype).unsqueeze(1), (images,), *key)
