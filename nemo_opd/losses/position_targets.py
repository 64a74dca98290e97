"""The teacher on the student's vocabulary at every student position (methods.md §5.7)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.read_ahead import ReadAhead
from nemo_opd.logits.term import unit_cells
from nemo_opd.losses.arguments import over
from nemo_opd.losses.cell_map import CommonCells
from nemo_opd.losses.chunk_loss import ChunkInputs
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.node_masses import ChildMasses, KeptShares, child_masses
from nemo_opd.losses.piece_tree import PieceTree, first_pieces
from nemo_opd.losses.position_units import NodePositions, PositionUnits
from nemo_opd.losses.prefix_chains import Chains, PrefixRanges
from nemo_opd.losses.reduction import next_tokens
from nemo_opd.losses.softmax import log_sum_exp
from nemo_opd.losses.truncated import joined, reached_and_rest, split

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

ENDS = ("drop", "cover", "rest")
_COPIES_OF_TEACHER, _COPIES_OF_STUDENT, _COPIES_PER_TOKEN = 6, 12, 12
"""fp32 numbers alive at the peak of a block, per column of a row or teacher token below a node."""


def position_loss(
    inputs: ChunkInputs, projection: ProjectionMatrix, compare: Divergence, ends: str, pieces: str
) -> PlannedLoss:
    """Plan τ² · Σ divergence / normalizer over the compared student positions, and `kd` in nats per position.

    Raises ConfigError for ends that are unknown, or `drop` with another divergence than forward KL.
    """
    _check(ends, compare)
    targets = _Targets.of(inputs, projection, ends, pieces)
    temperature, student = inputs.temperature, targets.positions.student

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        log_t, rest = targets.of_part(part)
        of_teacher, of_student = reached_and_rest(log_t, over(logits, temperature), rest)
        if not compare.is_finite_without_teacher:
            is_empty = of_teacher[:, -1:] == -torch.inf
            of_student = torch.cat([of_student[:, :-1], of_student[:, -1:].masked_fill(is_empty, -torch.inf)], 1)
        return student.sum(compare.of_logits(of_teacher, of_student), part)

    term = inputs.term(student.rows, loss_of, targets.cells, student.offsets, ahead=targets.ahead)
    term = replace(term.times(temperature**2), further_aheads=[targets.ahead_before, targets.chains.ahead])
    return inputs.planned([term], len(student.rows))


def _check(ends: str, compare: Divergence) -> None:
    if ends not in ENDS:
        raise ConfigError(f"ends={ends!r}: byte_prefix has no such ends; choose from {', '.join(ENDS)}")
    if ends == "drop" and compare.forward_share != 1:
        raise ConfigError(
            f"divergence={compare.kind}: with ends=drop a target holds in the mean over texts, and of the divergences "
            "only forward_kl is linear in it; choose divergence=forward_kl or ends=cover"
        )


@dataclass(frozen=True, slots=True)
class _Targets:
    """The teacher's log-masses of student tokens, and of a rest, at the compared positions of each chunk."""

    inputs: ChunkInputs
    ends: str
    positions: PositionUnits
    tree: PieceTree
    first: CommonCells
    """Teacher tokens by their first piece."""
    chains: Chains
    ahead: ReadAhead
    """The row that predicts each unit's first teacher token."""
    ahead_before: ReadAhead
    """The row before, of units that need it."""

    @staticmethod
    def of(inputs: ChunkInputs, projection: ProjectionMatrix, ends: str, pieces: str) -> _Targets:
        sizes, units = (inputs.student_size, inputs.teacher_size), inputs.units

        def tree_on(device: torch.device) -> PieceTree:
            return PieceTree.of(projection, pieces, *sizes, device)

        positions = PositionUnits.of(units, inputs.student_ids, inputs.teacher_ids, tree_on, has_before=ends == "cover")
        prefixes = PrefixRanges.of(projection, inputs.teacher_size, inputs.device)
        return _Targets(
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
        """[U + 1]: as `unit_cells`."""
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
        """Return log-masses [p, V] and of the rest [p, 1] at a part's positions; they need not sum to 1."""
        masses = _PartMasses(self, part)
        masses.add_boundaries()
        masses.add_inside()
        masses.add_moved()
        masses.add_before()
        return masses.finished()


class _PartMasses:
    """Log-masses of a part's positions while they are put together, [p, V + 1]; the last column is the rest.

    A position's have a common factor, which a divergence takes out.
    """

    def __init__(self, targets: _Targets, part: slice) -> None:
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
        """int64 [p]"""
        self._moved = targets.chains.moved(inputs, part)
        self._table = self._q.log_p.new_full((len(self._unit), self._size + 1), -torch.inf)
        self._log_missing = self._q.log_p.new_full((len(self._unit), 1), -torch.inf)
        """[p, 1]: log of the mass of tokens that the teacher does not know and that would count here."""

    def _read(self, ahead: ReadAhead) -> _Rows:
        inputs = self._targets.inputs
        rows = over(ahead.of(self._part).to(inputs.dtype), inputs.temperature)
        if inputs.is_truncated:
            return _Rows(*split(rows), torch.zeros_like(rows[:, :1]))
        log_sum = log_sum_exp(rows) if self._targets.ends == "cover" else torch.zeros_like(rows[:, 0])
        return _Rows(rows, None, log_sum.unsqueeze(1))

    def add_boundaries(self) -> None:
        """Put the teacher's tokens by their first piece at the first position of each unit."""
        moved, cells = self._moved, self._targets.first
        # A chain that begins inside moves nothing here.
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
        """Put the tokens below each node at the positions inside of a teacher token."""
        nodes, moved = self._targets.positions.inside, self._moved
        position = nodes.units.rows[nodes.units.span(self._part)] - self._span.start
        unit = self._unit[position]
        is_chain = moved.is_chain.squeeze(1)[unit] & (position == self._last[unit])
        kept = KeptShares(
            moved.first_teacher.squeeze(1)[unit].masked_fill(~is_chain, -1), moved.log_kept.squeeze(1)[unit]
        )
        self._add(self._below(nodes, self._q, unit, kept), self._q, self._unit)

    def add_moved(self) -> None:
        """Add the mass that the realised student token takes from the tokens that it spans."""
        moved = self._moved
        log_moved = self._q.log_p.gather(1, moved.first_teacher) + moved.log_moved
        self._log_add(self._last, moved.realised.squeeze(1), log_moved.squeeze(1))

    def add_before(self) -> None:
        """Add the tokens that began a teacher token earlier, and multiply all others with the probability of that."""
        targets = self._targets
        nodes, rows = targets.positions.before, targets.positions.rows_before
        q, span = self._read(targets.ahead_before), rows.span(self._part)
        if span.start == span.stop:
            return
        has_row = rows.lengths[self._part]
        ended = next_tokens(targets.inputs.teacher_ids, rows.rows[span]).long().unsqueeze(1)
        row = (has_row.cumsum(0) - 1).clamp(min=0)[self._unit]
        log_r = (q.log_p.gather(1, ended) - q.log_sum)[row]
        log_r = torch.where((has_row > 0)[self._unit].unsqueeze(1), log_r, 0)
        self._table += log_r
        self._log_missing += log_r
        row_of_node = row[nodes.units.rows[nodes.units.span(self._part)] - self._span.start]
        children = self._below(nodes, q, row_of_node, KeptShares.all(row_of_node, q.log_p.dtype))
        shift = (self._q.log_sum[self._unit] - q.log_sum[row]).squeeze(1)
        self._add(replace(children, log_mass=children.log_mass + shift[children.position]), q, row)

    def finished(self) -> tuple[Tensor, Tensor]:
        """Return the log-masses [p, V] and of the rest [p, 1].

        If a teacher knows less of a position than it does not know, all of it is in the rest, which teaches nothing.
        """
        log_t, rest = self._table[:, :-1], self._table[:, -1:]
        if self._targets.ends == "drop":
            rest = torch.full_like(rest, -torch.inf)
        if self._q.log_unknown is None:
            return log_t, rest
        is_left_out = joined(log_t, rest) < self._log_missing
        rest = torch.logaddexp(rest, self._log_missing).masked_fill(is_left_out, 0)
        return log_t.masked_fill(is_left_out, -torch.inf), rest

    def _below(self, nodes: NodePositions, q: _Rows, row: Tensor, kept: KeptShares) -> ChildMasses:
        tree, is_truncated = self._targets.tree, self._targets.inputs.is_truncated
        return child_masses(nodes, tree, q.log_p, row, self._part, self._span.start, kept, is_truncated=is_truncated)

    def _add(self, children: ChildMasses, q: _Rows, row: Tensor) -> None:
        """Add masses below nodes. row: int64 [p], of each position in q; any for positions without a node."""
        is_boundary = (self._first[self._unit] == torch.arange(len(self._unit), device=row.device))[children.position]
        # At a boundary the target has these tokens already; dropped ones would not count.
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
        """Add masses [r] in cells of which none comes twice."""
        place = position * (self._size + 1) + cell
        flat = self._table.view(-1)
        flat.index_copy_(0, place, torch.logaddexp(flat[place], log_mass))


@dataclass(frozen=True, slots=True)
class _Rows:
    """A teacher's logits/τ. They are not normalised, so that equal logits stay equal."""

    log_p: Tensor
    """[u, W]"""
    log_unknown: Tensor | None
    """[u, 1]: of all tokens that are not known; None: all are."""
    log_sum: Tensor
    """[u, 1]: log Σ exp of a whole teacher with ends=cover, else 0."""
