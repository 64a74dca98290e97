"""The shared vocabulary, where both sides have realised the same token (methods.md §5.6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.errors import ConfigError
from nemo_opd.kernels.forms import CellMap
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Onto, UnitRows
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, OnCells, first_position_term
from nemo_opd.losses.continuation import chunk_loss
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.kernel_cells import pairs_and_rest
from nemo_opd.losses.paired_comparison import add_comparison_of_pairs
from nemo_opd.losses.pairs import TokenPairs
from nemo_opd.losses.reduction import ChunkUnits, chunk_units, next_tokens
from nemo_opd.losses.support import Columns
from nemo_opd.losses.truncated import joined, reached_and_rest, require_temperature_1, split

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_NORMALIZATIONS = ("support", "rest")


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

    q̂ and p̂ are q and p on the exact pairs of the projection, all or the `top_k` that the student finds likeliest,
    renormalised (normalization="support") or with one more cell for what each side has elsewhere ("rest"), which is
    left out where only one side has other tokens. continuation_weight: factor of the `alm` term of every chunk of
    several tokens on a side; with one above 0 these chunks are units as well. Raises ConfigError for shapes, sizes or
    names that do not fit, ProjectionError for a projection without exact pairs.
    """
    _check(top_k, normalization)
    inputs = ChunkInputs.of(
        student_logits, teacher_logits, temperature=temperature, projection=projection, takes_truncated=True, **shared
    )
    require_temperature_1(inputs.teacher, temperature)
    is_compared = _are_realised_pairs(inputs.units, inputs.student_ids, inputs.teacher_ids, projection)
    compared = replace(inputs, units=inputs.units.where(is_compared))
    vocabulary = _SharedVocabulary.of(projection, inputs, top_k, normalization)
    compare = Divergence(divergence, beta, mixed_weight)

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        cells = vocabulary.reached if inputs.is_truncated else vocabulary.cells
        return compare.of_logits(*cells(teacher, student))

    def unit_loss_onto(student: UnitRows, teacher: UnitRows, part: slice, onto: Onto) -> Tensor:
        return add_comparison_of_pairs(student, teacher, vocabulary.pairs, compare, vocabulary.has_rest, onto)

    def for_kernels() -> CellMap:
        sizes = inputs.student_size, inputs.teacher_size
        return pairs_and_rest(projection, *sizes, inputs.device, has_rest=vocabulary.has_rest)

    has_closed_form = vocabulary.top_k is None and not inputs.is_truncated
    term = first_position_term(
        compared,
        unit_loss,
        cells_per_unit=_cells_per_unit(inputs, vocabulary),
        compare_onto=unit_loss_onto if has_closed_form else None,
        on_cells=OnCells(compare, for_kernels) if has_closed_form else None,
    )
    return chunk_loss(inputs, term, continuation_weight=continuation_weight, single_units=len(compared.units))


def strict_units(
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    projection: ProjectionMatrix,
    *,
    has_continuation: bool = False,
) -> ChunkUnits:
    """Find chunks of one token a side whose two tokens are an exact pair: ids and chunk ids [B, S] and [B, T].

    has_continuation: also those of several tokens on a side. Their number, `len`, is what `strict` counts as units.
    Raises ProjectionError for a projection without exact pairs.
    """
    units = chunk_units(student_chunk_id, teacher_chunk_id)
    is_unit = _are_realised_pairs(units, student_ids, teacher_ids, projection)
    return units.where(is_unit | units.have_several_tokens if has_continuation else is_unit)


def _are_realised_pairs(
    units: ChunkUnits, student_ids: Tensor, teacher_ids: Tensor, projection: ProjectionMatrix
) -> Tensor:
    """Test whether the realised tokens of units are exact pairs: bool [U], as `planned`."""
    sizes = projection.student_vocab_size, projection.teacher_vocab_size

    def are_pairs(
        student_rows: Tensor, teacher_rows: Tensor, several: Tensor, student_ids: Tensor, teacher_ids: Tensor
    ) -> list[Tensor]:
        partner = TokenPairs.exact(projection, *sizes, student_ids.device).partner
        student = next_tokens(student_ids, student_rows).long()
        teacher = next_tokens(teacher_ids, teacher_rows).long()
        return [~several & (partner.index_select(0, student) == teacher)]

    rows = (units.student_rows, units.teacher_rows, units.have_several_tokens)
    return planned(are_pairs, *rows, student_ids, teacher_ids)[0]


@dataclass(frozen=True, slots=True)
class _SharedVocabulary:
    """Cells of the shared vocabulary that are compared."""

    pairs: TokenPairs
    """X exact pairs."""
    top_k: int | None
    """None: all of them."""
    has_rest: bool
    """Whether either side has a cell for its other tokens; where only one has others, none (methods.md §3.3)."""

    @staticmethod
    def of(
        projection: ProjectionMatrix, inputs: ChunkInputs, top_k: int | None, normalization: str
    ) -> _SharedVocabulary:
        device = inputs.device
        pairs = TokenPairs.exact(projection, inputs.student_size, inputs.teacher_size, device)
        kept = None if top_k is None or top_k >= len(pairs) else top_k
        num_cells = len(pairs) if kept is None else kept
        has_rest = normalization == "rest" and num_cells < min(inputs.student_size, inputs.teacher_size)
        return _SharedVocabulary(pairs, kept, has_rest)

    def cells(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Map logits/τ [U, W] and [U, V] of teacher and student to those of the cells, both [U, cells]."""
        of_teacher, of_student = self._columns(student)
        if self.has_rest:
            return of_teacher.cells(teacher), of_student.cells(student)
        return of_teacher.take(teacher), of_student.take(student)

    def reached(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cells of a truncated teacher [U, W + 1] and of the student, with a rest: both [U, cells + 1]."""
        of_teacher, of_student = self._columns(student)
        log_t, rest = split(teacher)
        log_s = of_student.take(student)
        if not self.has_rest:
            return reached_and_rest(of_teacher.take(log_t), log_s, rest)
        others = log_t.scatter(1, of_teacher.index, -torch.inf)
        return reached_and_rest(of_teacher.take(log_t), log_s, joined(rest, others), of_student.cells(student)[:, -1:])

    def _columns(self, student: Tensor) -> tuple[Columns, Columns]:
        """Return the columns of the cells in each row of teacher and student; a constant."""
        if self.top_k is None:
            every = (self.pairs.teacher, self.pairs.student)
            of_teacher, of_student = (Columns(tokens.expand(len(student), -1)) for tokens in every)
            return of_teacher, of_student
        shared = student.detach().index_select(1, self.pairs.student)
        best = shared.topk(self.top_k, dim=-1, sorted=False).indices
        return Columns(self.pairs.teacher[best]), Columns(self.pairs.student[best])

    @property
    def num_cells(self) -> int:
        return len(self.pairs) if self.top_k is None else self.top_k


def _check(top_k: int | None, normalization: str) -> None:
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: strict compares at least 1 pair; give a larger number, or none for all")
    if top_k == 1 and normalization == "support":
        raise ConfigError(
            "top_k=1 with normalization=support: one pair renormalised is 1 on both sides, and nothing is learned; "
            "give a larger number, or normalization=rest"
        )
    if normalization not in _NORMALIZATIONS:
        raise ConfigError(
            f"normalization={normalization!r}: strict has no such normalization; "
            f"choose from {', '.join(_NORMALIZATIONS)}"
        )


def _cells_per_unit(inputs: ChunkInputs, shared: _SharedVocabulary) -> int:
    """Count fp32 numbers alive per unit at the peak of a chunk; an int64 column index counts as two."""
    return 7 * inputs.student_size + 5 * inputs.teacher_size + 16 * shared.num_cells
