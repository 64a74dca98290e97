"""Divergence of both sides projected onto their shared vocabulary, at chunks' first positions (methods.md §5.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.errors import ProjectionError, check_choice
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.cells import CommonCells, common_cells, common_cells_term
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, OnCells
from nemo_opd.losses.chunk_merge import chunk_loss
from nemo_opd.losses.divergence import Divergence

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@Loss
def shared_prefix(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    pieces: str = "longest_prefix",
    continuation_weight: float = 0.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ divergence(Q, P) / normalizer over chunks, and `kd` in nats per chunk (methods.md §5.8).

    P(x) = Σ p over the student tokens whose longest shared prefix is the shared token x; Q(x) is the same sum for the
    teacher. Tokens without a shared prefix share a rest cell, which counts if both sides have such tokens.
    pieces="spelling": a token that is not shared counts where the first token of its spelling by the other tokenizer
    does, instead of at its longest shared prefix.
    continuation_weight: factor of the `alm` term of chunks with several tokens on a side. Raises ConfigError for
    shapes, sizes or names that do not fit, ProjectionError for a projection without the maps.
    """
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    compare = Divergence(divergence, beta, mixed_weight)
    sizes = inputs.student_size, inputs.teacher_size
    maps = _maps(projection, pieces)
    cells = CommonCells.of(*maps, *sizes, inputs.device)
    on_cells = OnCells(compare, lambda: common_cells(*maps, *sizes, inputs.device))
    term = common_cells_term(inputs, cells, compare, on_cells)
    return chunk_loss(inputs, term, continuation_weight=continuation_weight)


def _maps(projection: ProjectionMatrix, pieces: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the maps onto the shared vocabulary.

    Raises ConfigError for unknown pieces, ProjectionError for a projection without the maps.
    """
    maps = {
        "spelling": (projection.student_shared_spelling, projection.teacher_shared_spelling),
        "longest_prefix": (projection.student_shared_prefix, projection.teacher_shared_prefix),
    }
    check_choice("pieces", pieces, maps)
    student_cells, teacher_cells = maps[pieces]
    if student_cells is None or teacher_cells is None:
        raise ProjectionError(
            f"shared_prefix with pieces={pieces} needs its shared-prefix maps, which this projection lacks; add them "
            "with nemo_opd.projection.add_shared_prefix or nemo-opd projection byte-prefix, or use projection: auto"
        )
    return student_cells, teacher_cells
