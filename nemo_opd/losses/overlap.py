"""Overlap of the student's and the teacher's likeliest tokens (methods.md §10.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.readings import plan_readings
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import unit_cells
from nemo_opd.losses.array_cache import cached_by_array
from nemo_opd.losses.chunk_loss import ChunkInputs
from nemo_opd.losses.label_positions import LabelPositions
from nemo_opd.losses.pairs import TokenPairs
from nemo_opd.losses.support import largest
from nemo_opd.types import Mean, Metric

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_TOP_K = 16
"""Compared tokens per side."""
_LIVE_COPIES = 3
"""Tensors of the size of a side's rows that are alive at a block's memory peak."""


def plan_overlap(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    mask: Tensor,
    top_k: int = _TOP_K,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Plan the metric `overlap`: the mean of |student's top_k ∩ teacher's top_k| / top_k over scored tokens.

    Unshifted logits [B, S, V] and [B, S, W] of one vocabulary and mask [B, S], as in `same_vocab`. Raises ConfigError
    for shapes or sizes that do not fit.
    """
    places = LabelPositions.of(
        student_logits,
        teacher_logits,
        mask=mask,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    k, ahead = min(top_k, places.size), places.teacher_ahead()

    def read(logits: Tensor, part: slice) -> Tensor:
        return _shared(largest(logits, k), largest(ahead.of(part), k))

    return plan_readings(
        places.student,
        places.student_rows,
        read,
        _mean,
        num_values=1,
        cells=unit_cells(len(places), 2 * _LIVE_COPIES * places.size),
        width=places.size,
        chunk_size=chunk_size,
        ahead=ahead,
    )


def plan_chunk_overlap(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    images: NDArray[np.bool_] | None = None,
    top_k: int = _TOP_K,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Plan `overlap` at the first positions of aligned chunks, replacing student tokens by their exact partners.

    Tokens without a partner never match, so 1 may be out of reach. images, bool [W]: teacher tokens whose share of the
    probability is the metric `kd_mass`. Other arguments as for `p_kl`. Raises ConfigError for shapes or sizes that do
    not fit, ProjectionError for a projection without exact pairs.
    """
    inputs = ChunkInputs.of(
        student_logits,
        teacher_logits,
        student_ids=student_ids,
        teacher_ids=teacher_ids,
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
        temperature=1.0,
        projection=projection,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    sizes = inputs.student_size, inputs.teacher_size
    partner = TokenPairs.exact(projection, *sizes, inputs.device).partner
    k, ahead = min(top_k, *sizes), inputs.teacher_ahead(inputs.units.teacher_rows)
    has_image = None if images is None else _on_device(images, inputs)

    def read(logits: Tensor, part: slice) -> Tensor:
        teacher = ahead.of(part)
        shared = _shared(partner[largest(logits, k)], largest(teacher, k))
        if has_image is None:
            return shared
        return torch.cat([shared, teacher.to(inputs.dtype).softmax(1) @ has_image], 1)

    return plan_readings(
        inputs.student,
        inputs.units.student_rows,
        read,
        _mean,
        num_values=1 if images is None else 2,
        cells=unit_cells(len(inputs.units), _LIVE_COPIES * sum(sizes)),
        width=inputs.student_size,
        chunk_size=chunk_size,
        ahead=ahead,
    )


def _on_device(images: NDArray[np.bool_], inputs: ChunkInputs) -> Tensor:
    """Return 1 for teacher tokens with an image and 0 for tokens without, [W, 1]."""
    size, dtype, device = inputs.teacher_size, inputs.dtype, inputs.device
    key = (plan_chunk_overlap, size, dtype, device)
    return cached_by_array(lambda: torch.from_numpy(images[:size]).to(device, dtype).unsqueeze(1), (images,), *key)


def _shared(first: Tensor, second: Tensor) -> Tensor:
    """Compute the share of a row's entries that the other tensor's row also contains: [U, k] and [U, k] → [U, 1]."""
    return (first.unsqueeze(2) == second.unsqueeze(1)).any(2).double().mean(1, keepdim=True)


def _mean(readings: Tensor) -> dict[str, Metric]:
    names = ("overlap", "kd_mass")
    return {name: Mean(values.sum(), readings.shape[1]) for name, values in zip(names, readings, strict=False)}
