"""Teacher mapped onto the student's vocabulary by the first piece of each teacher token (methods.md §5.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError, ProjectionError, check_choice
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import GradientSink, UnitRows
from nemo_opd.losses.cells import CommonCells
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, first_position_term
from nemo_opd.losses.chunk_merge import chunk_loss
from nemo_opd.losses.divergence import Divergence, compare_logits
from nemo_opd.losses.fused import fused
from nemo_opd.losses.piece_tree import first_pieces
from nemo_opd.losses.position_targets import position_loss
from nemo_opd.losses.prefixes import ADD_MAPS, Chains, MovedMass, PrefixRanges
from nemo_opd.losses.sparse_projection import project, pull_back
from nemo_opd.losses.support import split

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_LIVE_COPIES = 6
"""Tensors of the size of a chain's positions that are alive at the memory peak."""


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

    u(v) = Σ q over the teacher tokens whose first piece is v: the first token of the student's spelling, or with
    pieces="longest_prefix" the longest student token that is a prefix. If a chunk is one student token x and several
    teacher tokens y_1..y_n, a chain-factorised lower bound of the teacher's mass on x moves from y_1's first piece to
    x: q_1(y_1)···q_{n−1}(y_{n−1}) · Σ q_n over the tokens that begin with y_n. Cells are the first pieces, x if it is
    not one, and a rest cell if both sides have other tokens; student and teacher are renormalised on the cells.
    continuation_weight: factor of the `alm` term of chunks with several tokens on a side.

    positions="all" also compares student tokens that begin inside of a teacher token; `kd` and the default `normalizer`
    then count positions. Inside a teacher token, u sums the teacher tokens whose pieces begin with the student's tokens
    so far; after an unusual spelling those whose bytes do, by the longest student token that begins the bytes after.
    ends, for teacher tokens that would have ended there: "drop" leaves them out, "rest" puts them into the rest cell,
    "cover" does so too and adds teacher tokens that began one token earlier and reach this position.

    Raises ConfigError for shapes, sizes or names that do not fit, ProjectionError for a projection without the maps.
    """
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    compare = Divergence(divergence, beta, mixed_weight)
    check_choice("positions", positions, ("starts", "all"))
    if positions == "all":
        if continuation_weight:
            raise ConfigError(
                f"continuation_weight={continuation_weight}: positions=all already compares the positions after a "
                "chunk's first; leave it out, or choose positions=starts"
            )
        return position_loss(inputs, projection, compare, ends, pieces)
    first = projection.byte_prefix if pieces == "longest_prefix" else first_pieces(projection, pieces)
    if first is None:
        raise ProjectionError(f"byte_prefix needs the map of that name, {ADD_MAPS}")
    cells = CommonCells.of_prefixes(first, inputs.student_size, inputs.teacher_size, inputs.device)
    chains = Chains.of(inputs, PrefixRanges.of(projection, inputs.teacher_size, inputs.device))

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        bound = _Bound.of(chains.moved(inputs, part), cells)
        if inputs.is_truncated:
            log_q, log_rest = split(teacher)
            return compare.of_logits(
                *cells.reached(bound.teacher_cells(log_q, cells), bound.student_cells(student, cells), log_rest)
            )
        return compare.of_logits(bound.teacher_cells(teacher, cells), bound.student_cells(student, cells))

    def unit_loss_onto(student: UnitRows, teacher: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        return _add_comparison(student, teacher, _Bound.of(chains.moved(inputs, part), cells), cells, compare, onto)

    term = first_position_term(
        inputs,
        unit_loss,
        cells_per_unit=cells.cells_per_unit(inputs.student_size, inputs.teacher_size) + 2 * cells.num_cells,
        positions=(chains.positions.offsets, _LIVE_COPIES * inputs.teacher_size),
        compare_onto=unit_loss_onto,
        further_aheads=[chains.ahead],
    )
    return chunk_loss(inputs, term, continuation_weight=continuation_weight)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Mass moved to the realised student tokens x, and their cells."""

    moved: MovedMass
    column: Tensor
    """int64 [u, 1]: the cell of x; arbitrary if x has none."""
    is_apart: Tensor
    """bool [u, 1]: x receives mass but is not the first piece of any teacher token, so it gets an additional cell."""

    @staticmethod
    def of(moved: MovedMass, cells: CommonCells) -> _Bound:
        column = cells.column_of(moved.realised)
        return _Bound(moved, column.clamp(min=0), (column < 0) & moved.is_chain)

    def teacher_cells(self, teacher: Tensor, cells: CommonCells) -> Tensor:
        """Map logits [u, W] to log-masses of the cells and the additional cell of x, [u, X + 1].

        The moved share is removed before summing, which avoids the difference of nearly equal masses.
        """
        first = self.moved.first_teacher
        log_first = teacher.gather(1, first)
        moved = log_first + self.moved.log_moved
        remaining = UnitRows(teacher.scatter(1, first, log_first + self.moved.log_kept), None)
        log_u, _ = project.function(remaining, cells.teacher, has_shares=False)
        log_x = torch.logaddexp(log_u.gather(1, self.column), moved.masked_fill(self.is_apart, -math.inf))
        apart = moved.masked_fill(~self.is_apart, -math.inf)
        return torch.cat([log_u.scatter(1, self.column, log_x), apart], 1)

    def student_cells(self, student: Tensor, cells: CommonCells) -> Tensor:
        """Map logits [u, V] to log-masses of the same cells, [u, X + 1]."""
        log_p = cells.student.log_project(self._without_apart(student))
        return torch.cat([log_p, self._apart(student)], 1)

    def student_cells_and_shares(self, student: Tensor, cells: CommonCells) -> tuple[Tensor, Tensor]:
        """Return `student_cells` without an autograd graph, and the shares from `project`."""
        log_p, shares = project.function(UnitRows(self._without_apart(student), None), cells.student)
        return torch.cat([log_p, self._apart(student)], 1), shares

    def pull_back(self, gradient: Tensor, shares: Tensor, cells: CommonCells) -> Tensor:
        """Turn a gradient for the student's cells [u, X + 1] into a gradient for its logits [u, V]."""
        logit_gradient = pull_back.function(gradient[:, :-1], shares, cells.student)
        x_gradient = torch.where(self.is_apart, gradient[:, -1:], logit_gradient.gather(1, self.moved.realised))
        return logit_gradient.scatter_(1, self.moved.realised, x_gradient)

    def _without_apart(self, student: Tensor) -> Tensor:
        """Mask the logits [u, V] of realised tokens with an additional cell."""
        log_x = student.gather(1, self.moved.realised).masked_fill(self.is_apart, torch.finfo(student.dtype).min)
        return student.scatter(1, self.moved.realised, log_x)

    def _apart(self, student: Tensor) -> Tensor:
        return student.gather(1, self.moved.realised).masked_fill(~self.is_apart, -math.inf)


@fused
def _add_comparison(
    student: UnitRows, teacher: UnitRows, bound: _Bound, cells: CommonCells, divergence: Divergence, onto: GradientSink
) -> Tensor:
    """Compare logits/τ of units on the cells of `bound` → [u], and add the gradient to `onto`."""
    student_logits = student.gather()
    teacher_cells = bound.teacher_cells(teacher.gather().to(student_logits.dtype), cells)
    student_cells, shares = bound.student_cells_and_shares(student_logits, cells)
    comparison = compare_logits(teacher_cells, student_cells, divergence)
    onto.add(bound.pull_back(comparison.gradient, shares, cells))
    return comparison.value
