"""Arguments shared by cross-tokenizer losses, and the loss term of chunks' first positions (methods.md §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Required, TypedDict

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, to_list
from nemo_opd.kernels.forms import CellComparison, CellMap, RowLoss
from nemo_opd.logits.blockwise import compute_dtype
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows, TrainableRows, check_shares, logit_rows, trainable_rows
from nemo_opd.logits.term import ChunkLoss, GradientSink, ReadAhead, Term, UnitRows, unit_cells
from nemo_opd.losses.arguments import (
    ChunkUnits,
    check_positions,
    check_sequence_weights,
    check_temperature,
    chunk_units,
    next_tokens,
    over,
    own_columns,
)
from nemo_opd.losses.cross_entropy import surprise
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.support import require_temperature_1

if TYPE_CHECKING:
    from nemo_opd.losses.learned_projection import LearnedProjection
    from nemo_opd.projection import ProjectionMatrix


class ChunkArguments(TypedDict, total=False):
    """Arguments of every chunk loss besides its unshifted logits [B, S, ≥ V] and [B, T, ≥ W]."""

    student_ids: Required[Tensor]
    """[B, S]"""
    teacher_ids: Required[Tensor]
    """[B, T]"""
    student_chunk_id: Required[Tensor]
    """[B, S]: non-decreasing, −1 for tokens outside chunks. Chunks that contain token 0 of either side are skipped."""
    teacher_chunk_id: Required[Tensor]
    """[B, T]"""
    sequence_weights: Tensor | None
    """[B]: weight of each sequence's units, by default 1. Sequences of weight 0 are skipped."""
    normalizer: float | None
    """Divisor of the sum: units of the global batch; by default the units of this call."""
    student_vocab_size: int | None
    """Leading columns of the logits that belong to the vocabulary; by default the projection's size, or all."""
    teacher_vocab_size: int | None
    """The same for the teacher."""
    chunk_size: int | None
    """Units computed at a time; by default as many as fit a byte budget."""


Compare = Callable[[Tensor, Tensor, slice], Tensor]
"""(student logits/τ [u, V], teacher logits/τ [u, W], slice of units) → loss of each unit, [u].

Logits are at the chunks' first positions, cut to the vocabularies, in the compute dtype; only the student's have a
gradient.
"""

CompareOnto = Callable[[UnitRows, UnitRows, slice, GradientSink], Tensor]
"""(student logits/τ, teacher logits/τ, slice of units, sink of the student's gradient) → loss of each unit, [u]."""


@dataclass(frozen=True, slots=True)
class OnCells:
    """A comparison on cells common to both vocabularies."""

    divergence: Divergence
    cells: Callable[[], CellMap]
    """Builds the map when it is first needed."""
    coverage: float = 0.0
    """Factor of −log of the student's mass on the cells."""


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """Checked arguments of a cross-tokenizer loss."""

    student: TrainableRows
    """[B, S, ≥ V]"""
    teacher: LogitRows
    """[B, T, ≥ W]"""
    student_ids: Tensor
    """[B, S]"""
    teacher_ids: Tensor
    """[B, T]"""
    units: ChunkUnits
    """Units of sequences with nonzero weight."""
    student_size: int
    """V: leading columns of the student's head that are its vocabulary."""
    teacher_size: int
    """W"""
    temperature: float
    sequence_weights: Tensor | None
    """[B], or None if all are 1."""
    normalizer: float | None
    chunk_size: int | None

    @classmethod
    def of(
        cls,
        student_logits: Tensor | LogitRows,
        teacher_logits: Tensor | LogitRows,
        *,
        student_ids: Tensor,
        teacher_ids: Tensor,
        student_chunk_id: Tensor,
        teacher_chunk_id: Tensor,
        temperature: float,
        projection: ProjectionMatrix | LearnedProjection | None = None,
        sequence_weights: Tensor | None = None,
        normalizer: float | None = None,
        student_vocab_size: int | None = None,
        teacher_vocab_size: int | None = None,
        chunk_size: int | None = None,
    ) -> ChunkInputs:
        """Check a loss's arguments, mostly `ChunkArguments`.

        Raises ConfigError for shapes or sizes that do not fit, a temperature not above 0, or a truncated teacher at
        another temperature than 1.
        """
        check_temperature(temperature)
        student, teacher = trainable_rows(student_logits), logit_rows(teacher_logits)
        require_temperature_1(teacher, temperature)
        check_positions(student.shape, student_ids=student_ids, student_chunk_id=student_chunk_id)
        check_positions(teacher.shape, teacher_ids=teacher_ids, teacher_chunk_id=teacher_chunk_id)
        check_sequence_weights(sequence_weights, len(student_ids))
        check_shares(student, teacher)
        units = chunk_units(student_chunk_id, teacher_chunk_id)
        if sequence_weights is not None:
            width = student.shape[1]
            (has_weight,) = compute_on_host(
                lambda w, rows: [w[rows // width] != 0], sequence_weights, units.student_rows
            )
            units = units.where(has_weight)
        student_columns, teacher_columns = student.shape[2], teacher.shape[2] - teacher.is_truncated
        student_default = student_columns if projection is None else projection.student_vocab_size
        teacher_default = teacher_columns if projection is None else projection.teacher_vocab_size
        teacher_size = own_columns("teacher_vocab_size", teacher_vocab_size, teacher_default, teacher_columns)
        return cls(
            student,
            teacher.cut(teacher_size),
            student_ids,
            teacher_ids,
            units,
            own_columns("student_vocab_size", student_vocab_size, student_default, student_columns),
            teacher_size,
            temperature,
            sequence_weights,
            normalizer,
            chunk_size,
        )

    @property
    def device(self) -> torch.device:
        return self.student.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which losses are computed."""
        return compute_dtype(self.student)

    @property
    def is_truncated(self) -> bool:
        """Whether the teacher's rows hold only stored tokens, with one more column for the remaining mass."""
        return self.teacher.is_truncated

    @property
    def weights(self) -> Tensor | None:
        """Each unit's sequence weight, [U], or None if all are 1."""
        if self.sequence_weights is None:
            return None
        return self.sequence_weights.index_select(0, self.units.student_rows // self.student.shape[1])

    def teacher_ahead(self, rows: Tensor, begins: Sequence[int] | None = None) -> ReadAhead:
        """Return a block-by-block reader of teacher logits at indices [R] into [B·T], in their stored dtype."""
        return ReadAhead(self.teacher, rows, self.teacher_size + self.is_truncated, begins)

    def term(
        self,
        rows: Tensor,
        loss_of: ChunkLoss,
        cells: Sequence[int],
        begins: Sequence[int] | None = None,
        *,
        ahead: ReadAhead,
    ) -> Term:
        """Build a sum over units weighted by sequence. ahead: a reader from `teacher_ahead`."""
        size, weights = self.student_size, self.weights
        return Term(rows, loss_of, cells, size, begins, weights, chunk_size=self.chunk_size, ahead=ahead)

    def planned(self, terms: Sequence[Term], num_units: int | None = None) -> PlannedLoss:
        """Plan Σ terms / normalizer with the metric `kd`, a mean over `num_units`, by default all units."""
        number = len(self.units) if num_units is None else num_units
        return PlannedLoss.of("kd", self.student, terms, number, self.normalizer)


def first_position_term(
    inputs: ChunkInputs,
    compare: Compare,
    *,
    cells_per_unit: int,
    positions: tuple[Sequence[int], int] | None = None,
    compare_onto: CompareOnto | None = None,
    on_cells: OnCells | None = None,
    further_aheads: Sequence[ReadAhead] = (),
) -> Term:
    """Build the term τ² · Σ compare over units, at the rows that predict chunks' first tokens (methods.md §5, §7.1).

    cells_per_unit: fp32 numbers per unit at the memory peak of a block, with both sides' logits; positions: numbers of
    additional positions, see `unit_cells`. compare_onto: `compare` in closed form; on_cells: `compare` for kernels;
    both are for whole teachers only. further_aheads: readers of additional rows that `compare` uses, in unit order.
    """
    temperature, units = inputs.temperature, inputs.units
    ahead = inputs.teacher_ahead(units.teacher_rows)
    if inputs.is_truncated:
        compare_onto = on_cells = None

    def loss_of(student: Tensor, part: slice) -> Tensor:
        return compare(over(student, temperature), over(ahead.of(part).to(inputs.dtype), temperature), part)

    def closed_form(student: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        assert compare_onto is not None
        teacher = UnitRows(ahead.of(part), None)
        return compare_onto(student.over(temperature), teacher.over(temperature), part, onto.over(temperature))

    def for_kernels(part: slice) -> CellComparison:
        assert on_cells is not None
        assert measure is not None
        return CellComparison(ahead.of(part), temperature, measure, on_cells.cells(), on_cells.coverage)

    cells = unit_cells(len(units), cells_per_unit, *([] if positions is None else [positions]))
    measure = None if on_cells is None else on_cells.divergence.measure
    return replace(
        inputs.term(units.student_rows, loss_of, cells, ahead=ahead).times(temperature**2),
        further_aheads=further_aheads,
        closed_form=None if compare_onto is None else closed_form,
        row_loss=None if measure is None else RowLoss(CellComparison, for_kernels),
    )


@dataclass(frozen=True, slots=True)
class ChunkPositions:
    """Logit rows that predict all tokens of units, grouped by unit; `ChunkUnits` has only the first row of each."""

    rows: Tensor
    """int64 [R]: indices into [B·S]."""
    place: Tensor
    """int64 [R]: index of the token within its unit."""
    lengths: Tensor
    """int64 [U]: number of each unit's tokens."""
    offsets: Sequence[int]
    """[U + 1]: where units begin in `rows`; on the host, to slice it."""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor) -> ChunkPositions:
        """Expand first rows [U] and lengths [U]. Waits for the device if the host does not have the lengths."""
        offsets = offsets_of(lengths)

        def positions(first_rows: Tensor, lengths: Tensor) -> list[Tensor]:
            begin = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=offsets[-1])
            place = torch.arange(offsets[-1], device=lengths.device) - begin
            return [first_rows.repeat_interleave(lengths, output_size=offsets[-1]) + place, place]

        rows, place = compute_on_host(positions, first_rows, lengths)
        return ChunkPositions(rows, place, lengths, offsets)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the fields to pass through `compute_on_host`; `sent` rebuilds the positions from them."""
        return [self.rows, self.place, self.lengths]

    @staticmethod
    def sent(rows: Tensor, place: Tensor, lengths: Tensor) -> ChunkPositions:
        """Rebuild positions from `tensors`."""
        return ChunkPositions(rows, place, lengths, offsets_of(lengths))

    @staticmethod
    def single(rows: Tensor) -> ChunkPositions:
        """Build the positions of one-token units from their rows [U]."""
        return ChunkPositions(rows, torch.zeros_like(rows), torch.ones_like(rows), range(len(rows) + 1))

    def per_position(self, unit_values: Tensor) -> Tensor:
        """Repeat each unit's value at its positions: [U] → [R]."""
        return unit_values.repeat_interleave(self.lengths, output_size=len(self.rows))

    def repeated(self, values: Tensor, units: slice) -> Tensor:
        """Repeat the values of a slice of units at their positions: [u] → [r]."""
        span = self.span(units)
        return values.repeat_interleave(self.lengths[units], output_size=span.stop - span.start)

    def span(self, units: slice) -> slice:
        """Return the positions of a slice of units, as a slice."""
        return slice(self.offsets[units.start], self.offsets[units.stop])

    def targets(self, ids: Tensor) -> Tensor:
        """Return the tokens' ids [R], from ids [B, S]."""
        return self.of_tokens(ids).long()

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the tokens' values [R], from values [B, S]."""
        return next_tokens(values, self.rows)

    def mean(self, values: Tensor, units: slice) -> Tensor:
        """Average over the positions of each unit in a fixed order: [R, X] → [U, X]."""
        return segments_reduced("mean", values, self.lengths[units])

    def sum(self, values: Tensor, units: slice) -> Tensor:
        """Sum over the positions of each unit: [R, …] → [U, …]."""
        return segments_reduced("sum", values, self.lengths[units])

    def log_sum_exp(self, values: Tensor, units: slice) -> Tensor:
        """Compute log Σ exp over the positions of each unit: [R, X] → [U, X]; see `segments_log_sum_exp`."""
        return segments_log_sum_exp(values, self.lengths[units])


def offsets_of(lengths: Tensor) -> list[int]:
    """Return where segments of lengths [U] begin, [U + 1]. Waits for the device unless the host has the lengths."""
    return list(accumulate(to_list(lengths), initial=0))


def places_of_runs(begin: Tensor, lengths: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """Return the run of each place and the place itself, int64 [p] each, for runs of consecutive places.

    begin, lengths: first place and number of places of each run, int64 [r]. num_places: the sum of the lengths.
    """
    run = torch.arange(len(begin), device=begin.device).repeat_interleave(lengths, output_size=num_places)
    return run, torch.arange(num_places, device=begin.device) + (begin - (lengths.cumsum(0) - lengths))[run]


def segments_reduced(reduce: str, values: Tensor, lengths: Tensor) -> Tensor:
    """Reduce consecutive segments of rows in a fixed order: [R, …] and lengths [U] → [U, …]."""
    return torch.segment_reduce(values, reduce, lengths=lengths, axis=0, unsafe=True)


def segments_log_sum_exp(values: Tensor, lengths: Tensor) -> Tensor:
    """Compute log Σ exp of segments: [R, X] → [U, X]. If all are −inf: the lowest finite number, without gradient."""
    values = values.clamp(min=torch.finfo(values.dtype).min)
    peak = segments_reduced("max", values.detach(), lengths)
    mass = (values - peak.repeat_interleave(lengths, dim=0, output_size=len(values))).exp()
    return segments_reduced("sum", mass, lengths).log() + peak


@dataclass(frozen=True, slots=True)
class RealisedChunks:
    """Units of a loss with their tokens and the rows that predict them."""

    positions: ChunkPositions
    targets: Tensor
    """int64 [R]: token ids."""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor, ids: Tensor) -> RealisedChunks:
        """Expand first rows [U] and lengths [U], reading tokens from ids [B, S]."""
        positions = ChunkPositions.of(first_rows, lengths)
        return RealisedChunks(positions, positions.targets(ids))

    def __len__(self) -> int:
        return len(self.positions.lengths)

    def log_likelihood(self, logits: Tensor, part: slice) -> Tensor:
        """Compute each unit's Σ log p(token), [u], from its tokens' logits [R, X]."""
        return self.positions.sum(self.log_probabilities(logits, part), part)

    def log_probabilities(self, logits: Tensor, part: slice) -> Tensor:
        """Compute log p(token), [R], from the tokens' logits [R, X]."""
        return -surprise(logits, self.targets[self.positions.span(part)])
