"""Divergence on the shared vocabulary, at chunks in which both sides realise the same token (methods.md §5.6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.kernels.forms import CellMap
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import GradientSink, UnitRows
from nemo_opd.losses.arguments import ChunkUnits, chunk_units, next_tokens
from nemo_opd.losses.cells import add_comparison_of_pairs, pairs_and_rest
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, OnCells, first_position_term
from nemo_opd.losses.chunk_merge import chunk_loss
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.sparse_projection import TokenPairs
from nemo_opd.losses.support import Columns, joined, split, with_tail_cell

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@Loss
def strict(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    top_k: int | None = None,
    normalization: str = "support",
    continuation_weight: float = 0.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ divergence(q̂, p̂) / normalizer over `strict_units`, and `kd` in nats per unit (methods.md §5.6).

    q̂ and p̂ are q and p on the projection's exact pairs, or on the student's `top_k` likeliest of them, renormalised
    (normalization="support") or with one more cell for each side's other tokens ("rest"), which is left out if only one
    side has other tokens. continuation_weight: factor of the `alm` term of chunks with several tokens on a side; above
    0 these chunks count as units too. Raises ConfigError for shapes, sizes or names that do not fit, ProjectionError
    for a projection without exact pairs.
    """
    _check(top_k, normalization)
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    is_compared = _are_realised_pairs(inputs.units, inputs.student_ids, inputs.teacher_ids, projection)
    single_inputs = replace(inputs, units=inputs.units.where(is_compared))
    vocabulary = _SharedVocabulary.of(projection, inputs, top_k, normalization)
    compare = Divergence(divergence, beta, mixed_weight)

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        cells = vocabulary.reached if inputs.is_truncated else vocabulary.cells
        return compare.of_logits(*cells(teacher, student))

    def unit_loss_onto(student: UnitRows, teacher: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        return add_comparison_of_pairs(student, teacher, vocabulary.pairs, compare, vocabulary.has_rest, onto)

    def for_kernels() -> CellMap:
        sizes = inputs.student_size, inputs.teacher_size
        return pairs_and_rest(projection, *sizes, inputs.device, vocabulary.has_rest)

    has_closed_form = vocabulary.top_k is None
    term = first_position_term(
        single_inputs,
        unit_loss,
        # An int64 column index counts as two numbers.
        cells_per_unit=7 * inputs.student_size + 5 * inputs.teacher_size + 16 * vocabulary.num_cells,
        compare_onto=unit_loss_onto if has_closed_form else None,
        on_cells=OnCells(compare, for_kernels) if has_closed_form else None,
    )
    return chunk_loss(inputs, term, continuation_weight=continuation_weight, single_units=len(single_inputs.units))


def strict_units(
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    projection: ProjectionMatrix,
    *,
    has_continuation: bool = False,
) -> ChunkUnits:
    """Find the units of `strict` in ids and chunk ids [B, S] and [B, T]: one-token chunks that are an exact pair.

    has_continuation: include chunks with several tokens on a side. Raises ProjectionError for a projection without
    exact pairs.
    """
    units = chunk_units(student_chunk_id, teacher_chunk_id)
    is_unit = _are_realised_pairs(units, student_ids, teacher_ids, projection)
    return units.where(is_unit | units.have_several_tokens if has_continuation else is_unit)


def _are_realised_pairs(
    units: ChunkUnits, student_ids: Tensor, teacher_ids: Tensor, projection: ProjectionMatrix
) -> Tensor:
    """Test whether units are one token per side and an exact pair: bool [U], through `compute_on_host`."""
    sizes = projection.student_vocab_size, projection.teacher_vocab_size

    def are_pairs(
        student_rows: Tensor, teacher_rows: Tensor, several: Tensor, student_ids: Tensor, teacher_ids: Tensor
    ) -> list[Tensor]:
        partner = TokenPairs.exact(projection, *sizes, student_ids.device).partner
        student = next_tokens(student_ids, student_rows).long()
        teacher = next_tokens(teacher_ids, teacher_rows).long()
        return [~several & (partner.index_select(0, student) == teacher)]

    rows = (units.student_rows, units.teacher_rows, units.have_several_tokens)
    return compute_on_host(are_pairs, *rows, student_ids, teacher_ids)[0]


@dataclass(frozen=True, slots=True)
class _SharedVocabulary:
    """Compared cells of the shared vocabulary."""

    pairs: TokenPairs
    """X exact pairs."""
    top_k: int | None
    """Pairs compared per unit, or None for all."""
    has_rest: bool
    """Whether both sides have a cell for other tokens; not if only one side has other tokens (methods.md §3.3)."""

    @staticmethod
    def of(
        projection: ProjectionMatrix, inputs: ChunkInputs, top_k: int | None, normalization: str
    ) -> _SharedVocabulary:
        device = inputs.device
        pairs = TokenPairs.exact(projection, inputs.student_size, inputs.teacher_size, device)
        num_chosen = None if top_k is None or top_k >= len(pairs) else top_k
        num_cells = len(pairs) if num_chosen is None else num_chosen
        has_rest = normalization == "rest" and num_cells < min(inputs.student_size, inputs.teacher_size)
        return _SharedVocabulary(pairs, num_chosen, has_rest)

    def cells(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Map logits/τ of teacher [U, W] and student [U, V] to logits of the cells, both [U, cells]."""
        teacher_columns, student_columns = self._columns(student)
        if self.has_rest:
            return teacher_columns.cells(teacher), student_columns.cells(student)
        return teacher_columns.take(teacher), student_columns.take(student)

    def reached(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Map a truncated teacher [U, W + 1] and the student [U, V] to cells with a rest, both [U, cells + 1]."""
        teacher_columns, student_columns = self._columns(student)
        log_t, log_rest = split(teacher)
        cells_t, cells_s = teacher_columns.take(log_t), student_columns.take(student)
        if not self.has_rest:
            return with_tail_cell(cells_t, cells_s, log_rest)
        outside = log_t.scatter(1, teacher_columns.index, -torch.inf)
        return with_tail_cell(cells_t, cells_s, joined(log_rest, outside), student_columns.cells(student)[:, -1:])

    def _columns(self, student: Tensor) -> tuple[Columns, Columns]:
        """Return each row's compared columns of teacher and student, without a gradient."""
        if self.top_k is None:
            num_units = len(student)
            return Columns(self.pairs.teacher.expand(num_units, -1)), Columns(self.pairs.student.expand(num_units, -1))
        shared = student.detach().index_select(1, self.pairs.student)
        best = shared.topk(self.top_k, dim=-1, sorted=False).indices
        return Columns(self.pairs.teacher[best]), Columns(self.pairs.student[best])

    @property
    def num_cells(self) -> int:
        return len(self.pairs) if self.top_k is None else self.top_k


def _check(top_k: int | None, normalization: str) -> None:
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: strict compares at least 1 pair; give a larger number, or None for all")
    if top_k == 1 and normalization == "support":
        raise ConfigError(
            "top_k=1 with normalization=support: one renormalised pair is 1 on both sides, and nothing is learned; "
            "give a larger number, or normalization=rest"
        )
    check_choice("normalization", normalization, ("support", "rest"))
