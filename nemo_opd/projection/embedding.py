"""Teacher tokens with similar embeddings (methods.md §2.4)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.errors import ProjectionError
from nemo_opd.projection.exact import TokenizerPair, pair_of
from nemo_opd.projection.matrix import Entries, ProjectionMatrix, with_entries
from nemo_opd.projection.retokenization import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_BLOCK_CELLS = 2**25
"""Similarities or embeddings held at a time, in float32: 128 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingSource:
    """Two models' input embeddings and the settings of the embedding pass."""

    student: Tensor
    """[V or more, D]; rows beyond the tokenizer's vocabulary are not read."""
    teacher: Tensor
    """[W or more, E]"""
    weight: float = 0.1
    """Total mass of the nearest tokens, in addition to the 1 that a row already has."""
    temperature: float = 0.05
    """Divisor of cosine similarities before the softmax: smaller is sharper."""
    width: int = 4
    """Number of nearest teacher tokens per row."""
    device: str = "cpu"
    """Device that computes similarities."""


def add_embeddings(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    student_embeddings: Tensor,
    teacher_embeddings: Tensor,
    *,
    weight: float,
    temperature: float,
    width: int,
    progress: Progress | None = None,
    device: str = "cpu",
) -> ProjectionMatrix:
    """Add to each text row that is not exact the teacher text tokens with the nearest embeddings; rows sum to 1 again.

    `student_embeddings` [V or more, D] and `teacher_embeddings` [W or more, E] are the models' input embeddings.
    Orthogonal Procrustes on the exact pairs aligns the spaces. A row's `width` highest cosines enter as softmax(cosine
    / temperature), with total `weight`; entries that a row already has add up.

    Raises ProjectionError for embeddings that are misshapen, not finite or share too few tokens, for settings out of
    range, and for tokenizers of another pair.
    """
    source = EmbeddingSource(student_embeddings, teacher_embeddings, weight, temperature, width, device)
    return embedding_pass(matrix, pair_of(matrix, student_tokenizer, teacher_tokenizer), source, progress)


def embedding_pass(
    matrix: ProjectionMatrix, pair: TokenizerPair, embeddings: EmbeddingSource, progress: Progress | None
) -> ProjectionMatrix:
    for name in ("weight", "temperature", "width"):
        if not 0 < (value := getattr(embeddings, name)) < float("inf"):
            raise ProjectionError(f"the embedding {name} is {value}; give a finite number above 0")
    student_VD = _valid_embeddings("student", embeddings.student, pair.student.pieces.vocab_size)
    teacher_WE = _valid_embeddings("teacher", embeddings.teacher, pair.teacher.pieces.vocab_size)
    rows = np.flatnonzero(pair.student.is_text & ~matrix.exact)
    columns = np.flatnonzero(pair.teacher.is_text)
    anchors = _anchors(matrix, pair)
    spaces = _common_space(student_VD, teacher_WE, anchors, embeddings.device)
    _log.info("embedding spaces of %d and %d dimensions joined by %d exact pairs", *spaces.widths, len(anchors))

    nearest = _nearest(spaces, student_VD, teacher_WE, rows, columns, embeddings, progress)
    indices, weights = with_entries(matrix, rows, nearest, matrix.top_k + min(embeddings.width, len(columns)))
    options = matrix.options.after(
        "embedding",
        embedding_weight=embeddings.weight,
        embedding_temperature=embeddings.temperature,
        embedding_width=embeddings.width,
        embedding_anchors=len(anchors),
    )
    return replace(matrix, indices=indices, weights=weights, options=options)


@dataclass(frozen=True, slots=True, eq=False)
class _CommonSpace:
    """Centres and projections of both sides, onto R = min(D, E) common dimensions."""

    student_centre: Tensor
    """[D]"""
    teacher_centre: Tensor
    """[E]"""
    student_axes: Tensor
    """[D, R], orthonormal"""
    teacher_axes: Tensor
    """[E, R], orthonormal"""

    @property
    def widths(self) -> tuple[int, int]:
        return len(self.student_centre), len(self.teacher_centre)


def _common_space(student_VD: Tensor, teacher_WE: Tensor, anchors: NDArray[np.int64], device: str) -> _CommonSpace:
    """Solve orthogonal Procrustes with the singular vectors of the centred, normalised anchors' cross-covariance.

    With fewer anchors than dimensions, the rotation outside their span would be arbitrary.
    """
    needed = min(student_VD.shape[1], teacher_WE.shape[1])
    if len(anchors) < needed:
        raise ProjectionError(
            f"the vocabularies share {len(anchors)} text tokens, but aligning embeddings of {student_VD.shape[1]} and "
            f"{teacher_WE.shape[1]} dimensions takes {needed}; build the projection without embeddings"
        )
    centres = [_mean(embeddings, anchors[:, side], device) for side, embeddings in enumerate((student_VD, teacher_WE))]
    covariance_DE = torch.zeros(student_VD.shape[1], teacher_WE.shape[1], device=device)
    for block_A2 in _blocks(anchors, sum(covariance_DE.shape)):
        student_AD = F.normalize(_read(student_VD, block_A2[:, 0], device) - centres[0], dim=1)
        covariance_DE += student_AD.T @ F.normalize(_read(teacher_WE, block_A2[:, 1], device) - centres[1], dim=1)
    left_DR, _, right_RE = torch.linalg.svd(covariance_DE, full_matrices=False)
    return _CommonSpace(centres[0], centres[1], left_DR, right_RE.T)


def _mean(embeddings: Tensor, ids: NDArray[np.int64], device: str) -> Tensor:
    total = torch.zeros(embeddings.shape[1], dtype=torch.float64, device=device)
    for block in _blocks(ids, embeddings.shape[1]):
        total += _read(embeddings, block, device).sum(dim=0, dtype=torch.float64)
    return (total / len(ids)).float()


def _read(embeddings: Tensor, ids: NDArray[np.int64], device: str | torch.device) -> Tensor:
    return embeddings[torch.from_numpy(np.ascontiguousarray(ids)).to(embeddings.device)].to(device, torch.float32)


def _nearest(
    spaces: _CommonSpace,
    student_VD: Tensor,
    teacher_WE: Tensor,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    settings: EmbeddingSource,
    progress: Progress | None,
) -> Entries:
    """Compute the entries of `rows`, block by block, against all `columns`."""
    teacher_NR = _directions(teacher_WE, columns, spaces.teacher_centre, spaces.teacher_axes)
    width = min(settings.width, len(columns))
    ids, weights = [np.empty((0, width), np.int64)], [np.empty((0, width), np.float64)]
    for block in _blocks(rows, len(columns)):
        student_BR = _directions(student_VD, block, spaces.student_centre, spaces.student_axes)
        cosine_BK, place_BK = (student_BR @ teacher_NR.T).topk(width, dim=1)
        share_BK = settings.weight * torch.softmax(cosine_BK.double() / settings.temperature, dim=1)
        ids.append(columns[place_BK.cpu().numpy()])
        weights.append(share_BK.cpu().numpy())
        if progress is not None:
            progress(sum(map(len, ids)), len(rows))
    return Entries(
        np.repeat(rows, width),
        np.concatenate(ids).ravel(),
        np.concatenate(weights).ravel(),
        np.ones(len(rows) * width, np.bool_),
    )


def _blocks(rows: NDArray[np.int64], width: int) -> Iterator[NDArray[np.int64]]:
    """Yield `rows` in blocks of at most `_BLOCK_CELLS` numbers, with `width` numbers per row."""
    size = max(1, _BLOCK_CELLS // max(1, width))
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _directions(embeddings: Tensor, ids: NDArray[np.int64], centre: Tensor, axes: Tensor) -> Tensor:
    """Compute unit vectors of ids in the common space: [N, R]."""
    directions = torch.empty(len(ids), axes.shape[1], device=axes.device)
    start = 0
    for block in _blocks(ids, embeddings.shape[1]):
        centred = _read(embeddings, block, axes.device) - centre
        directions[start : start + len(block)] = F.normalize(centred @ axes, dim=1)
        start += len(block)
    return directions


def _anchors(matrix: ProjectionMatrix, pair: TokenizerPair) -> NDArray[np.int64]:
    """Return the exact pairs of text tokens, [N, 2]: models use special tokens differently."""
    shared = matrix.shared_pairs.astype(np.int64)
    return shared[pair.student.is_text[shared[:, 0]] & pair.teacher.is_text[shared[:, 1]]]


def _valid_embeddings(side: str, embeddings: Tensor, vocab_size: int) -> Tensor:
    """Check embeddings and return their first `vocab_size` rows."""
    shape = tuple(embeddings.shape)
    if embeddings.ndim != 2 or shape[0] < vocab_size or not shape[1] or not embeddings.is_floating_point():
        raise ProjectionError(
            f"the {side}'s embeddings are {embeddings.dtype} {shape}, but floats [{vocab_size} or more, hidden width] "
            f"are needed, a row for each id of the {side}'s tokenizer; give the input embeddings of its model"
        )
    embeddings = embeddings.detach()[:vocab_size]
    finite = torch.cat([torch.isfinite(part).all(dim=1) for part in embeddings.split(_BLOCK_CELLS // shape[1] or 1)])
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ProjectionError(f"row {row} of the {side}'s embeddings {shape} is not finite; the model file is damaged")
    return embeddings
