"""Teacher targets at every student position (methods.md §5.7), and kinds of positions (§5.14)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.term import ReadAhead, unit_cells
from nemo_opd.losses.arguments import chunk_starts, next_tokens, over
from nemo_opd.losses.cells import CommonCells
from nemo_opd.losses.chunk_loss import ChunkInputs
from nemo_opd.losses.divergence import Divergence, compare_logits
from nemo_opd.losses.fused import fused, log_sum_exp, softmax
from nemo_opd.losses.piece_tree import PieceTree, first_pieces
from nemo_opd.losses.position_units import ChildMasses, KeptShares, NodePositions, PositionUnits, child_masses
from nemo_opd.losses.prefixes import Chains, PrefixRanges
from nemo_opd.losses.support import joined, split
from nemo_opd.types import ChunkRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


POSITION_KINDS = ("start", "inside", "later", "unaligned")
"""start: first token of a chunk. inside: begins inside the chunk's first teacher token. later: begins inside a later
teacher token of the chunk. unaligned: in no chunk that losses use.
"""
_START, _INSIDE, _LATER, _UNALIGNED = range(len(POSITION_KINDS))
_COPIES_OF_TEACHER, _COPIES_OF_STUDENT, _COPIES_PER_TOKEN = 6, 12, 12
"""fp32 numbers at the memory peak of a block, per column of a row or per teacher token below a node."""


def position_loss(
    inputs: ChunkInputs, projection: ProjectionMatrix, compare: Divergence, ends: str, pieces: str
) -> PlannedLoss:
    """Plan τ² · Σ divergence / normalizer over the compared student positions, and `kd` in nats per position.

    Raises ConfigError for unknown ends, or for `drop` with a divergence other than forward KL.
    """
    check_choice("ends", ends, ("drop", "cover", "rest"))
    if ends == "drop" and compare.forward_share != 1:
        raise ConfigError(
            f"divergence={compare.kind} with ends=drop: these targets are exact only in the mean over texts, so the "
            "divergence must be linear in them; choose divergence=forward_kl or ends=cover"
        )
    targets = Targets.of(inputs, projection, ends, pieces)
    temperature, student = inputs.temperature, targets.positions.student

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        return student.sum(_Comparison.apply(over(logits, temperature), *targets.of_part(part), compare), part)

    term = inputs.term(student.rows, loss_of, targets.cells, student.offsets, ahead=targets.ahead)
    term = replace(term.times(temperature**2), further_aheads=[targets.ahead_before, targets.chains.ahead])
    return inputs.planned([term], len(student.rows))


class _Comparison(torch.autograd.Function):
    """Divergence of positions [p]; saves only the gradient, computed in forward."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, log_t: Tensor, log_rest: Tensor, compare: Divergence) -> Tensor:
        value, shares, is_unreached, of_rest = _compare(student, log_t, log_rest, compare)
        ctx.save_for_backward(shares, is_unreached, of_rest)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        shares, is_unreached, of_rest = ctx.saved_tensors
        return _gradient(shares, is_unreached, of_rest, grad_output.unsqueeze(1)), None, None, None


@fused
def _compare(
    student: Tensor, log_t: Tensor, log_rest: Tensor, compare: Divergence
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare logits/τ [p, V] with log-masses of the tokens [p, V] and of a rest cell [p, 1].

    Return the value [p], what `_gradient` needs of each token [p, V] and whether the teacher gives it no mass, and the
    gradient for the student's rest cell [p, 1].
    """
    is_unreached = log_t == -torch.inf
    unreached_p, log_unreached = softmax.function(student.masked_fill(~is_unreached, torch.finfo(student.dtype).min))
    is_empty = ~(is_unreached & (student > -torch.inf)).any(1, keepdim=True)
    log_rest = log_rest.masked_fill(is_empty, -torch.inf)
    if not compare.is_finite_without_teacher:
        is_empty = is_empty | (log_rest == -torch.inf)
    student_rest = log_unreached.to(student.dtype).masked_fill(is_empty, -torch.inf)
    student_cells = torch.cat([student.masked_fill(is_unreached, -torch.inf), student_rest], 1)
    comparison = compare_logits(torch.cat([log_t, log_rest], 1), student_cells, compare)
    of_rest = comparison.gradient[:, -1:].masked_fill(is_empty, 0)
    shares = torch.where(is_unreached, unreached_p, comparison.gradient[:, :-1])
    return comparison.value, shares, is_unreached, of_rest


@fused
def _gradient(shares: Tensor, is_unreached: Tensor, of_rest: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient for logits/τ [p, V]: tokens without mass share the rest's gradient. grad_output: [p, 1]."""
    return shares * torch.where(is_unreached, of_rest * grad_output, grad_output)


@dataclass(frozen=True, slots=True)
class Targets:
    """Teacher log-masses of student tokens and of a rest cell, at the compared positions of each chunk."""

    inputs: ChunkInputs
    ends: str
    positions: PositionUnits
    tree: PieceTree
    first: CommonCells
    """Cells of the teacher tokens' first pieces."""
    chains: Chains
    ahead: ReadAhead
    """Reader of the row that predicts each unit's first teacher token."""
    ahead_before: ReadAhead
    """Reader of the preceding row, for units that need it."""

    @staticmethod
    def of(inputs: ChunkInputs, projection: ProjectionMatrix, ends: str, pieces: str) -> Targets:
        sizes, units = (inputs.student_size, inputs.teacher_size), inputs.units
        tree_on = partial(PieceTree.of, projection, pieces, *sizes)
        positions = PositionUnits.of(units, inputs.student_ids, inputs.teacher_ids, tree_on, has_before=ends == "cover")
        prefixes = PrefixRanges.of(projection, inputs.teacher_size, inputs.device)
        return Targets(
            inputs,
            ends,
            positions,
            tree_on(inputs.device),
            CommonCells.of_prefixes(first_pieces(projection, pieces), *sizes, inputs.device),
            Chains.of(inputs, prefixes, positions.student.lengths),
            inputs.teacher_ahead(units.teacher_rows),
            inputs.teacher_ahead(positions.rows_before.rows, positions.rows_before.offsets),
        )

    @property
    def cells(self) -> list[int]:
        """[U + 1]: fp32 numbers of the units, as `unit_cells` counts them."""
        student_size, teacher_size = self.inputs.student_size, self.inputs.teacher_size
        return list(
            unit_cells(
                len(self.inputs.units),
                _COPIES_OF_TEACHER * teacher_size + 3 * self.first.teacher.num_entries + 2 * self.first.num_cells,
                (self.positions.student.offsets, _COPIES_OF_STUDENT * student_size),
                (self.chains.positions.offsets, _COPIES_OF_TEACHER * teacher_size),
                (self.positions.rows_before.offsets, _COPIES_OF_TEACHER * teacher_size),
                (self.positions.inside.unit_offsets, _COPIES_PER_TOKEN),
                (self.positions.before.unit_offsets, _COPIES_PER_TOKEN),
            )
        )

    @torch.no_grad()
    def of_part(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return unnormalised log-masses of student tokens [p, V] and of a rest cell [p, 1] at a part's positions."""
        masses = _PartMasses(self, part)
        masses.add_boundaries()
        masses.add_inside()
        masses.add_moved()
        masses.add_before()
        return masses.result()


class _PartMasses:
    """Accumulator of log-masses at a part's positions, [p, V + 1]; the last column is a rest cell.

    Each position's masses share an arbitrary factor, which the divergence normalises away.
    """

    def __init__(self, targets: Targets, part: slice) -> None:
        inputs, student = targets.inputs, targets.positions.student
        self._targets, self._part, self._span = targets, part, student.span(part)
        self._size = inputs.student_size
        self._q = self._read(targets.ahead)
        device, num_units = self._q.log_p.device, part.stop - part.start
        per_unit = student.lengths[part]
        self._last = per_unit.cumsum(0) - 1
        """int64 [u]: each unit's last position."""
        self._first = self._last - per_unit + 1
        self._unit = torch.arange(num_units, device=device).repeat_interleave(
            per_unit, output_size=self._span.stop - self._span.start
        )
        """int64 [p]: each position's unit."""
        self._moved = targets.chains.moved(inputs, part)
        self._table = self._q.log_p.new_full((len(self._unit), self._size + 1), -torch.inf)
        self._log_missing = self._q.log_p.new_full((len(self._unit), 1), -torch.inf)
        """[p, 1]: log-mass of tokens that would count here but are not stored by a truncated teacher."""

    def _read(self, ahead: ReadAhead) -> _Rows:
        inputs = self._targets.inputs
        rows = over(ahead.of(self._part).to(inputs.dtype), inputs.temperature)
        if inputs.is_truncated:
            return _Rows(*split(rows), torch.zeros_like(rows[:, :1]))
        log_sum = log_sum_exp(rows) if self._targets.ends == "cover" else torch.zeros_like(rows[:, 0])
        return _Rows(rows, None, log_sum.unsqueeze(1))

    def add_boundaries(self) -> None:
        """Add all teacher tokens by their first piece, at the first position of each unit."""
        moved, cells = self._moved, self._targets.first
        # A chain whose last student token begins inside a teacher token moves no mass at the boundary.
        log_kept = moved.log_kept.masked_fill((self._last > self._first).unsqueeze(1), 0)
        log_first = self._q.log_p.gather(1, moved.first_teacher)
        log_mass = cells.teacher.log_project(self._q.log_p.scatter(1, moved.first_teacher, log_first + log_kept))
        columns = cells.student.columns
        boundary = self._table.new_full((len(self._first), self._size + 1), -torch.inf)
        boundary.index_copy_(1, torch.where(columns < 0, self._size, columns), log_mass)
        self._table.index_copy_(0, self._first, boundary)
        if self._q.log_unknown is not None:
            self._log_missing.index_copy_(0, self._first, self._q.log_unknown)

    def add_inside(self) -> None:
        """Add the teacher tokens below each node, at positions inside a teacher token."""
        nodes, moved = self._targets.positions.inside, self._moved
        position = nodes.units.rows[nodes.units.span(self._part)] - self._span.start
        unit = self._unit[position]
        is_chain = moved.is_chain.squeeze(1)[unit] & (position == self._last[unit])
        shares = KeptShares(
            moved.first_teacher.squeeze(1)[unit].masked_fill(~is_chain, -1), moved.log_kept.squeeze(1)[unit]
        )
        self._add(self._masses_below(nodes, self._q, unit, shares), self._q, self._unit)

    def add_moved(self) -> None:
        """Add the mass moved to the realised student token from the teacher tokens that it spans."""
        moved = self._moved
        log_moved = self._q.log_p.gather(1, moved.first_teacher) + moved.log_moved
        self._log_add(self._last, moved.realised.squeeze(1), log_moved.squeeze(1))

    def add_before(self) -> None:
        """Scale the masses by r, the preceding teacher token's probability, and add tokens that began there."""
        targets = self._targets
        nodes, rows = targets.positions.before, targets.positions.rows_before
        q, span = self._read(targets.ahead_before), rows.span(self._part)
        if span.start == span.stop:
            return
        has_row = rows.lengths[self._part]
        realised = next_tokens(targets.inputs.teacher_ids, rows.rows[span]).long().unsqueeze(1)
        row = (has_row.cumsum(0) - 1).clamp(min=0)[self._unit]
        log_r = (q.log_p.gather(1, realised) - q.log_sum)[row]
        log_r = torch.where((has_row > 0)[self._unit].unsqueeze(1), log_r, 0)
        self._table += log_r
        self._log_missing += log_r
        row_of_node = row[nodes.units.rows[nodes.units.span(self._part)] - self._span.start]
        children = self._masses_below(nodes, q, row_of_node, KeptShares.all(row_of_node, q.log_p.dtype))
        shift = (self._q.log_sum[self._unit] - q.log_sum[row]).squeeze(1)
        self._add(replace(children, log_mass=children.log_mass + shift[children.position]), q, row)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the log-masses of student tokens [p, V] and of a rest cell [p, 1].

        If a truncated teacher misses more of a position's mass than it stores, everything goes into the rest, which
        makes the position a constant.
        """
        log_t, log_rest = self._table[:, :-1], self._table[:, -1:]
        if self._targets.ends == "drop":
            log_rest = torch.full_like(log_rest, -torch.inf)
        if self._q.log_unknown is None:
            return log_t, log_rest
        is_left_out = joined(log_t, log_rest) < self._log_missing
        log_rest = torch.logaddexp(log_rest, self._log_missing).masked_fill(is_left_out, 0)
        return log_t.masked_fill(is_left_out, -torch.inf), log_rest

    def _masses_below(self, nodes: NodePositions, q: _Rows, row: Tensor, shares: KeptShares) -> ChildMasses:
        tree, is_truncated = self._targets.tree, self._targets.inputs.is_truncated
        return child_masses(nodes, tree, q.log_p, row, self._part, self._span.start, shares, is_truncated=is_truncated)

    def _add(self, children: ChildMasses, q: _Rows, row: Tensor) -> None:
        """Add masses below nodes. row: int64 [p], each position's row in q; arbitrary for positions without a node."""
        is_boundary = (self._first[self._unit] == torch.arange(len(self._unit), device=row.device))[children.position]
        # At a boundary the target already contains these tokens; ends=drop leaves them out everywhere.
        has_ended = children.cell == self._size
        is_left_out = has_ended if self._targets.ends == "drop" else is_boundary & has_ended
        self._log_add(children.position, children.cell, children.log_mass.masked_fill(is_left_out, -torch.inf))
        if q.log_unknown is None or children.num_unknown is None:
            return
        unknown = torch.zeros_like(self._log_missing).squeeze(1)
        unknown.index_add_(0, children.position, children.num_unknown.masked_fill(is_left_out, 0))
        share = unknown / (q.log_p == -torch.inf).sum(1).clamp(min=1)[row]
        missing = q.log_unknown[row] + share.log().unsqueeze(1)
        self._log_missing = torch.logaddexp(self._log_missing, missing)

    def _log_add(self, position: Tensor, cell: Tensor, log_mass: Tensor) -> None:
        """Add masses [r] to distinct cells."""
        place = position * (self._size + 1) + cell
        flat = self._table.view(-1)
        flat.index_copy_(0, place, torch.logaddexp(flat[place], log_mass))


@dataclass(frozen=True, slots=True)
class _Rows:
    """A teacher's logits/τ, not normalised, so that equal logits stay equal."""

    log_p: Tensor
    """[u, W]"""
    log_unknown: Tensor | None
    """[u, 1]: log-mass of tokens that are not stored, or None for a full teacher."""
    log_sum: Tensor
    """[u, 1]: log Σ exp of a full teacher with ends=cover, otherwise 0."""


def position_kinds(chunks: ChunkRows, student: TokenRows, teacher: TokenRows) -> Tensor:
    """Return the kind of each student token, as an index into `POSITION_KINDS`: int64 [B, S].

    In a chunk of several teacher tokens the bytes of both sides tell the end of the first one. −1 in such chunks if the
    teacher's bytes are not counted, as not all models predict them.
    """
    is_start, teacher_position = chunk_starts(chunks.student, chunks.teacher)
    place = torch.arange(is_start.shape[1], device=is_start.device).expand_as(is_start)
    start = place.where(is_start, -1).cummax(1).values
    has_start, start = start >= 0, start.clamp(min=0)
    is_aligned = has_start & (chunks.student >= 0) & (chunks.student == chunks.student.gather(1, start))
    bytes_before = student.num_bytes.cumsum(1) - student.num_bytes
    offset = bytes_before - bytes_before.gather(1, start)
    first = teacher_position.gather(1, start)
    following = (first + 1).clamp(max=chunks.teacher.shape[1] - 1)
    is_single = (following == first) | (chunks.teacher.gather(1, following) != chunks.teacher.gather(1, first))
    first_bytes = teacher.num_bytes.gather(1, first)
    kinds = torch.where(is_single | (offset < first_bytes), _INSIDE, _LATER).where(is_single | (first_bytes > 0), -1)
    return kinds.where(~is_start, _START).where(is_aligned, _UNALIGNED)
