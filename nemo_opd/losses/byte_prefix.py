"""The teacher on the student's vocabulary by the student tokens that begin its tokens (methods.md §5.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Onto, UnitRows
from nemo_opd.losses.cell_map import CommonCells
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, first_position_term
from nemo_opd.losses.continuation import chunk_loss
from nemo_opd.losses.divergence import Divergence, compare_logits
from nemo_opd.losses.fused import fused
from nemo_opd.losses.piece_tree import first_pieces
from nemo_opd.losses.position_targets import position_loss
from nemo_opd.losses.prefix_chains import ADD_MAPS, Chains, MovedMass, PrefixRanges
from nemo_opd.losses.sparse_projection import project, pull_back
from nemo_opd.losses.truncated import require_temperature_1, split

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_LIVE_COPIES = 6
"""Tensors of the size of a chain's positions alive at their peak."""


@Loss
def byte_prefix(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    positions: str = "starts",
    ends: str = "drop",
    pieces: str = "spelling",
    continuation_weight: float = 0.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ divergence(u, p) / normalizer over chunks, and `kd` in nats per chunk (methods.md §5.7).

    u(v) = Σ q over the teacher tokens whose first piece is v: the first token of the student's own spelling, or with
    pieces="longest_prefix" the longest student token that begins them. Where a chunk is one student token x and the
    teacher tokens y_1..y_n, the chain-factorised bound of what the teacher gives x moves from φ(y_1) to x:
    q_1(y_1)···q_{n−1}(y_{n−1}) · Σ q_n over the tokens that begin with y_n. Cells are the student tokens that some
    teacher token reaches, x where it is none of them, and one for the rest where both sides have one; student and
    teacher are renormalised on them. continuation_weight: factor of the chunk's `alm` term, added where it has several
    tokens on a side.

    positions="all" compares every student token that begins inside of a teacher token as well, and divides by their
    number; `kd` is then in nats per position. u is made of the teacher tokens whose pieces begin with the student's
    tokens so far. ends: what becomes of teacher tokens that would have ended there: left out ("drop"), in the rest cell
    ("rest"), or there with the tokens that began a teacher token earlier and go on ("cover").

    Raises ConfigError for shapes, sizes or names that do not fit, ProjectionError for a projection without the maps.
    """
    inputs = ChunkInputs.of(
        student_logits, teacher_logits, temperature=temperature, projection=projection, takes_truncated=True, **shared
    )
    require_temperature_1(inputs.teacher, temperature)
    compare = Divergence(divergence, beta, mixed_weight)
    if positions == "all":
        if continuation_weight:
            raise ConfigError(
                f"continuation_weight={continuation_weight}: with positions=all the positions after a chunk's first "
                "are compared already; leave it out, or choose positions=starts"
            )
        return position_loss(inputs, projection, compare, ends, pieces)
    if positions != "starts":
        raise ConfigError(f"positions={positions!r}: byte_prefix has no such positions; choose from starts, all")
    cells = _reached_cells(projection, inputs, pieces)
    chains = Chains.of(inputs, PrefixRanges.of(projection, inputs.teacher_size, inputs.device))

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        bound = _Bound.of(chains.moved(inputs, part), cells)
        if inputs.is_truncated:
            log_q, rest = split(teacher)
            on_cells = bound.teacher_cells(log_q, cells), bound.student_cells(student, cells)
            return compare.of_logits(*cells.reached(*on_cells, rest))
        return compare.of_logits(bound.teacher_cells(teacher, cells), bound.student_cells(student, cells))

    def unit_loss_onto(student: UnitRows, teacher: UnitRows, part: slice, onto: Onto) -> Tensor:
        return _add_comparison(student, teacher, _Bound.of(chains.moved(inputs, part), cells), cells, compare, onto)

    term = first_position_term(
        inputs,
        unit_loss,
        cells_per_unit=cells.cells_per_unit(inputs.student_size, inputs.teacher_size) + 2 * cells.num_cells,
        positions=(chains.positions.offsets, _LIVE_COPIES * inputs.teacher_size),
        compare_onto=None if inputs.is_truncated else unit_loss_onto,
        further_aheads=[chains.ahead],
    )
    return chunk_loss(inputs, term, continuation_weight=continuation_weight)


def _reached_cells(projection: ProjectionMatrix, inputs: ChunkInputs, pieces: str) -> CommonCells:
    first = projection.byte_prefix if pieces == "longest_prefix" else first_pieces(projection, pieces)
    if first is None:
        raise ProjectionError(f"byte_prefix needs the map of that name, {ADD_MAPS}")
    return CommonCells.of_prefixes(first, inputs.student_size, inputs.teacher_size, inputs.device)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The realised student tokens that take mass, and their cells."""

    moved: MovedMass
    column: Tensor
    """int64 [u, 1]: the cell of x, or any where it has none."""
    is_apart: Tensor
    """bool [u, 1]: x takes mass, but no teacher token reaches it; it is a separate cell."""

    @staticmethod
    def of(moved: MovedMass, cells: CommonCells) -> _Bound:
        column = cells.column_of(moved.realised)
        return _Bound(moved, column.clamp(min=0), (column < 0) & moved.is_chain)

    def teacher_cells(self, teacher: Tensor, cells: CommonCells) -> Tensor:
        """Map logits [u, W] to those of u on the cells and on x apart, [u, X + 1].

        The share that stays is taken before the sum, so that no difference of nearly equal masses is formed.
        """
        first = self.moved.first_teacher
        log_first = teacher.gather(1, first)
        moved = log_first + self.moved.log_moved
        kept = UnitRows(teacher.scatter(1, first, log_first + self.moved.log_kept), None)
        log_u, _ = project.function(kept, cells.teacher, has_shares=False)
        own = torch.logaddexp(log_u.gather(1, self.column), moved.masked_fill(self.is_apart, -math.inf))
        apart = moved.masked_fill(~self.is_apart, -math.inf)
        return torch.cat([log_u.scatter(1, self.column, own), apart], 1)

    def student_cells(self, student: Tensor, cells: CommonCells) -> Tensor:
        """Map logits [u, V] to those on the same cells, [u, X + 1]."""
        log_p = cells.student.log_project(self._elsewhere(student))
        return torch.cat([log_p, self._apart(student)], 1)

    def student_cells_and_shares(self, student: Tensor, cells: CommonCells) -> tuple[Tensor, Tensor]:
        """Return the same without a graph, and the shares of `project`."""
        log_p, shares = project.function(UnitRows(self._elsewhere(student), None), cells.student)
        return torch.cat([log_p, self._apart(student)], 1), shares

    def pull_back(self, gradient: Tensor, shares: Tensor, cells: CommonCells) -> Tensor:
        """Turn the gradient with respect to the student's cells [u, X + 1] into that of its logits [u, V]."""
        of_tokens = pull_back.function(gradient[:, :-1], shares, cells.student)
        own = torch.where(self.is_apart, gradient[:, -1:], of_tokens.gather(1, self.moved.realised))
        return of_tokens.scatter_(1, self.moved.realised, own)

    def _elsewhere(self, student: Tensor) -> Tensor:
        """Return logits without x where it is apart."""
        own = student.gather(1, self.moved.realised).masked_fill(self.is_apart, torch.finfo(student.dtype).min)
        return student.scatter(1, self.moved.realised, own)

    def _apart(self, student: Tensor) -> Tensor:
        return student.gather(1, self.moved.realised).masked_fill(~self.is_apart, -math.inf)


@fused
def _add_comparison(
    student: UnitRows, teacher: UnitRows, bound: _Bound, cells: CommonCells, of: Divergence, onto: Onto
) -> Tensor:
    """Compare logits/τ of units on the cells of `bound` → [u], and add the gradient."""
    own = student.taken()
    of_teacher = bound.teacher_cells(teacher.taken().to(own.dtype), cells)
    of_student, shares = bound.student_cells_and_shares(own, cells)
    found = compare_logits(of_teacher, of_student, of)
    onto.add(bound.pull_back(found.gradient, shares, cells))
    return found.value
