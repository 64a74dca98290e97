"""Compared positions of an aligned chunk, merging of several positions, and the chunk loss (methods.md §5.2).

`arguments.chunk_units` finds the rows that predict the first tokens of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.alm import likelihood_term
from nemo_opd.losses.arguments import next_tokens, over
from nemo_opd.losses.chunk_loss import ChunkInputs, ChunkPositions, Compare, CompareOnto, OnCells, first_position_term
from nemo_opd.losses.support import require_whole

_LIVE_COPIES = 5
"""Tensors of the size of a block's positions that are alive before positions are merged."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Rule for the positions of a chunk that are compared.

    `term` and `teacher_rows` must use the same rows. `ChunkInputs.units` always has the rows of first tokens, since
    `continuation_weight` starts from them.
    """

    kind: str
    """first: each side's first position of the chunk. For parity with other systems: mean, over all
    positions; observed, the first position's distribution times the probabilities of the chunk's later tokens.
    """
    arithmetic_student: bool = False
    """mean: average the student's probabilities instead of their logarithms. The teacher's mean is geometric."""
    teacher_columns: Tensor | None = None
    """int64 [X]: compared columns of the teacher, normalised before merging, or None for all. Not with first, which
    does not normalise.
    """

    def __post_init__(self) -> None:
        check_choice("merge", self.kind, ("first", "mean", "observed"))

    def term(
        self,
        inputs: ChunkInputs,
        compare: Compare,
        *,
        cells_per_unit: int,
        compare_onto: CompareOnto | None = None,
        on_cells: OnCells | None = None,
    ) -> Term:
        """Build `first_position_term`, or its equivalent for merged positions.

        For merged positions `compare` takes log-probabilities [u, V] and [u, W or X] with sums of at most 1.
        """
        if self.kind == "first":
            return first_position_term(
                inputs, compare, cells_per_unit=cells_per_unit, compare_onto=compare_onto, on_cells=on_cells
            )
        require_whole(inputs.teacher, f"merge={self.kind}", "it multiplies distributions")
        return self._merged_term(inputs, compare, cells_per_unit=cells_per_unit)

    def teacher_rows(self, inputs: ChunkInputs) -> Tensor:
        """Return the compared teacher rows: int64 [R], indices into [B·T]."""
        if self.kind == "first":
            return inputs.units.teacher_rows
        return ChunkPositions.of(inputs.units.teacher_rows, inputs.units.teacher_lengths).rows

    def _merged_term(self, inputs: ChunkInputs, compare: Compare, *, cells_per_unit: int) -> Term:
        units, temperature = inputs.units, inputs.temperature
        student = ChunkPositions.of(units.student_rows, units.student_lengths)
        teacher = ChunkPositions.of(units.teacher_rows, units.teacher_lengths)
        ahead = inputs.teacher_ahead(teacher.rows, teacher.offsets)

        def loss_of(student_logits: Tensor, part: slice) -> Tensor:
            teacher_logits = over(ahead.of(part).to(inputs.dtype), temperature)
            if self.teacher_columns is not None:
                teacher_logits = teacher_logits.index_select(1, self.teacher_columns)
            log_q = self._merged(teacher, teacher_logits, inputs.teacher_ids, part)
            arithmetic = self.arithmetic_student
            log_p = self._merged(student, over(student_logits, temperature), inputs.student_ids, part, arithmetic)
            return compare(log_p, log_q, part)

        student_cells = (student.offsets, _LIVE_COPIES * inputs.student_size)
        teacher_cells = (teacher.offsets, _LIVE_COPIES * inputs.teacher_size)
        cells = unit_cells(len(units), cells_per_unit, student_cells, teacher_cells)
        term = inputs.term(student.rows, loss_of, cells, student.offsets, ahead=ahead)
        return term.times(temperature**2)

    def _merged(
        self, positions: ChunkPositions, logits: Tensor, ids: Tensor, part: slice, arithmetic: bool = False
    ) -> Tensor:
        """Merge logits/τ [R, X] of a part's positions into one log-distribution per unit, [u, X]."""
        log_p = logits.log_softmax(-1)
        if self.kind == "observed":
            return _observed_product(positions, log_p, ids, part)
        if not arithmetic:
            return positions.mean(log_p, part)
        return positions.log_sum_exp(log_p, part) - positions.lengths[part].to(log_p.dtype).log().unsqueeze(1)


def _observed_product(positions: ChunkPositions, log_p: Tensor, ids: Tensor, part: slice) -> Tensor:
    """Compute log(p_1 · Π_{j>1} p_j(x_j)): [R, X] → [u, X]."""
    span = positions.span(part)
    is_first = positions.place[span] == 0
    realised = next_tokens(ids, positions.rows[span]).long().unsqueeze(1)
    following = log_p.gather(1, realised).masked_fill(is_first.unsqueeze(1), 0)
    return log_p[is_first] + positions.sum(following, part)


def chunk_loss(
    inputs: ChunkInputs, term: Term, *, continuation_weight: float, single_units: int | None = None
) -> PlannedLoss:
    """Plan (term + continuation_weight · `likelihood_term` of chunks with several tokens) / normalizer, and `kd`.

    single_units: number of units of `term` if it skips chunks with several tokens; those then count as units only if
    the weight is above 0. By default `term` has all units of `inputs`. Raises ConfigError for a negative weight.
    """
    if not continuation_weight >= 0:
        raise ConfigError(f"continuation_weight={continuation_weight} would maximise the term; give 0 or more")
    terms, count = [term], len(inputs.units) if single_units is None else single_units
    if continuation_weight:
        longer = replace(inputs, units=inputs.units.where(inputs.units.have_several_tokens))
        terms.append(likelihood_term(longer, inputs.temperature).times(continuation_weight))
        count += 0 if single_units is None else len(longer.units)
    return inputs.planned(terms, count)
