"""The teacher on the student's vocabulary by byte prefixes, at each chunk's first position (methods.md §5.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.transfer import planned, together
from nemo_opd.errors import ProjectionError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.read_ahead import ReadAhead
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Onto, UnitRows
from nemo_opd.losses.alm import log1mexp, log_surprise
from nemo_opd.losses.arguments import over
from nemo_opd.losses.cell_map import CommonCells
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, first_position_term
from nemo_opd.losses.chunk_positions import ChunkPositions
from nemo_opd.losses.continuation import chunk_loss
from nemo_opd.losses.divergence import Divergence, compare_logits
from nemo_opd.losses.fused import fused
from nemo_opd.losses.made_once import made_once
from nemo_opd.losses.reduction import next_tokens
from nemo_opd.losses.softmax import log_sum_exp
from nemo_opd.losses.sparse_projection import project, pull_back
from nemo_opd.losses.truncated import require_temperature_1, split

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_LIVE_COPIES = 6
"""Tensors of the size of a chain's positions alive at their peak."""
_HOW = (
    "which this projection does not have; add it with nemo_opd.projection.add_byte_prefix or "
    "nemo-opd projection byte-prefix, or use projection: auto"
)


@dataclass(frozen=True, slots=True)
class PrefixRanges:
    """Which teacher tokens begin with which others, as ranges of the tokens in byte order, those without bytes last."""

    place: Tensor
    """int64 [W]: where a token stands in that order."""
    begin: Tensor
    """int64 [W]: begin ≤ place < end are the tokens whose bytes begin with the token's own."""
    end: Tensor
    """int64 [W]"""

    @staticmethod
    def of(projection: ProjectionMatrix, teacher_vocab_size: int, device: torch.device) -> PrefixRanges:
        """Return the ranges among the first `teacher_vocab_size` tokens; made once as long as the matrix lives.

        Raises ProjectionError for a projection without a byte order.
        """
        byte_order = projection.teacher_byte_order
        if byte_order is None:
            raise ProjectionError(f"byte_prefix needs the byte order of the teacher's tokens, {_HOW}")
        return made_once(
            lambda: PrefixRanges(
                *together(PrefixRanges._within(torch.from_numpy(byte_order), teacher_vocab_size), device)
            ),
            (byte_order,),
            PrefixRanges,
            teacher_vocab_size,
            device,
        )

    @staticmethod
    def _within(byte_order: Tensor, teacher_vocab_size: int) -> list[Tensor]:
        """Return `place`, `begin` and `end` on the host, which waits for no device to count the tokens."""
        order, begin, end = byte_order.long().T
        is_inside = order < teacher_vocab_size
        inside_before = torch.cat([is_inside.new_zeros(1).long(), is_inside.cumsum(0)])
        bounds = (inside_before[each[:teacher_vocab_size]] for each in (begin, end))
        return [order[is_inside].argsort(), *bounds]


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
    continuation_weight: float = 0.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ divergence(u, p) / normalizer over chunks, and `kd` in nats per chunk (methods.md §5.7).

    u(v) = Σ q over the teacher tokens whose longest student prefix is v. Where a chunk is one student token x and the
    teacher tokens y_1..y_n, the chain-factorised bound of what the teacher gives x moves from φ(y_1) to x:
    q_1(y_1)···q_{n−1}(y_{n−1}) · Σ q_n over the tokens that begin with y_n. Cells are the student tokens that some
    teacher token reaches, x where it is none of them, and one for the rest where both sides have one; student and
    teacher are renormalised on them. continuation_weight: factor of the chunk's `alm` term, added where it has several
    tokens on a side. Raises ConfigError for shapes, sizes or names that do not fit, ProjectionError for a projection
    without Φ and the teacher's byte order.
    """
    inputs = ChunkInputs.of(
        student_logits, teacher_logits, temperature=temperature, projection=projection, takes_truncated=True, **shared
    )
    require_temperature_1(inputs.teacher, temperature)
    compare = Divergence(divergence, beta, mixed_weight)
    cells = _reached_cells(projection, inputs)
    chains = _Chains.of(inputs, PrefixRanges.of(projection, inputs.teacher_size, inputs.device))

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        bound = chains.bound(inputs, cells, part)
        if inputs.is_truncated:
            log_q, rest = split(teacher)
            on_cells = bound.teacher_cells(log_q, cells), bound.student_cells(student, cells)
            return compare.of_logits(*cells.reached(*on_cells, rest))
        return compare.of_logits(bound.teacher_cells(teacher, cells), bound.student_cells(student, cells))

    def unit_loss_onto(student: UnitRows, teacher: UnitRows, part: slice, onto: Onto) -> Tensor:
        return _add_comparison(student, teacher, chains.bound(inputs, cells, part), cells, compare, onto)

    term = first_position_term(
        inputs,
        unit_loss,
        cells_per_unit=cells.cells_per_unit(inputs.student_size, inputs.teacher_size) + 2 * cells.num_cells,
        positions=(chains.positions.offsets, _LIVE_COPIES * inputs.teacher_size),
        compare_onto=None if inputs.is_truncated else unit_loss_onto,
        further_ahead=chains.ahead,
    )
    return chunk_loss(inputs, term, continuation_weight=continuation_weight)


def _reached_cells(projection: ProjectionMatrix, inputs: ChunkInputs) -> CommonCells:
    if projection.byte_prefix is None:
        raise ProjectionError(f"byte_prefix needs the map of that name, {_HOW}")
    device, sizes = inputs.device, (inputs.student_size, inputs.teacher_size)
    return CommonCells.of_prefixes(projection.byte_prefix, *sizes, device)


@dataclass(frozen=True, slots=True)
class _Chains:
    """Chunks of one student token and several teacher tokens, among all units."""

    is_chain: Tensor
    """bool [U, 1]"""
    positions: ChunkPositions
    """Positions of y_2..y_n, where a unit is a chain; none elsewhere."""
    begin: Tensor
    """int64 [R, 1]: what continues the chain there, as a range of the byte order."""
    end: Tensor
    """int64 [R, 1]"""
    prefixes: PrefixRanges
    ahead: ReadAhead
    """The teacher's rows at the positions."""

    @staticmethod
    def of(inputs: ChunkInputs, prefixes: PrefixRanges) -> _Chains:
        """Find the chains. Up to y_{n−1} the token itself continues one; at y_n any token that begins with it."""
        units = inputs.units
        is_chain, lengths, begins = planned(
            lambda m, n, rows: [(m == 1) & (n > 1), (n - 1) * ((m == 1) & (n > 1)), rows + 1],
            units.student_lengths,
            units.teacher_lengths,
            units.teacher_rows,
        )
        positions = ChunkPositions.of(begins, lengths)
        targets = positions.targets(inputs.teacher_ids)
        last = positions.place == positions.per_position(lengths) - 1
        begin = torch.where(last, prefixes.begin[targets], prefixes.place[targets])
        end = torch.where(last, prefixes.end[targets], prefixes.place[targets] + 1)
        ahead = inputs.teacher_ahead(positions.rows, positions.offsets)
        return _Chains(is_chain.unsqueeze(1), positions, begin.unsqueeze(1), end.unsqueeze(1), prefixes, ahead)

    def bound(self, inputs: ChunkInputs, cells: CommonCells, part: slice) -> _Bound:
        is_chain, surprise = self.is_chain[part], self._log_surprise(inputs, part)
        realised = next_tokens(inputs.student_ids, inputs.units.student_rows[part]).long().unsqueeze(1)
        column = cells.column_of(realised)
        return _Bound(
            first_teacher=next_tokens(inputs.teacher_ids, inputs.units.teacher_rows[part]).long().unsqueeze(1),
            realised=realised,
            column=column.clamp(min=0),
            is_apart=(column < 0) & is_chain,
            log_moved=(-surprise.exp()).masked_fill(~is_chain, -math.inf),
            log_kept=log1mexp(surprise).masked_fill(~is_chain, 0),
        )

    @torch.no_grad()
    def _log_surprise(self, inputs: ChunkInputs, part: slice) -> Tensor:
        """Compute log(−log R) [u, 1] of chains; R: probability of y_2..y_{n−1} and then of a token that y_n begins."""
        span = self.positions.span(part)
        logits = over(self.ahead.of(part).to(inputs.dtype), inputs.temperature)
        place = self.prefixes.place
        is_meant = (place >= self.begin[span]) & (place < self.end[span])
        # What is not known of a truncated teacher is not meant: the bound stays one.
        is_meant = F.pad(is_meant, (0, logits.shape[1] - is_meant.shape[1]))
        odds_against = _log_mass(logits, ~is_meant) - _log_mass(logits, is_meant)
        return self.positions.log_sum_exp(log_surprise(odds_against), part)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Lower bound of the teacher's mass for the realised student token, and its cell. Other units move nothing."""

    first_teacher: Tensor
    """int64 [u, 1]: y_1."""
    realised: Tensor
    """int64 [u, 1]: x."""
    column: Tensor
    """int64 [u, 1]: the cell of x, or any where it has none."""
    is_apart: Tensor
    """bool [u, 1]: x takes mass, but no teacher token reaches it; it is a separate cell."""
    log_moved: Tensor
    """[u, 1]: log of the share of q(y_1) that moves to x."""
    log_kept: Tensor
    """[u, 1]: log of the share that stays."""

    def teacher_cells(self, teacher: Tensor, cells: CommonCells) -> Tensor:
        """Map logits [u, W] to those of u on the cells and on x apart, [u, X + 1].

        The share that stays is taken before the sum, so that no difference of nearly equal masses is formed.
        """
        log_first = teacher.gather(1, self.first_teacher)
        moved = log_first + self.log_moved
        kept = UnitRows(teacher.scatter(1, self.first_teacher, log_first + self.log_kept), None)
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
        own = torch.where(self.is_apart, gradient[:, -1:], of_tokens.gather(1, self.realised))
        return of_tokens.scatter_(1, self.realised, own)

    def _elsewhere(self, student: Tensor) -> Tensor:
        """Return logits without x where it is apart."""
        own = student.gather(1, self.realised).masked_fill(self.is_apart, torch.finfo(student.dtype).min)
        return student.scatter(1, self.realised, own)

    def _apart(self, student: Tensor) -> Tensor:
        return student.gather(1, self.realised).masked_fill(~self.is_apart, -math.inf)


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


def _log_mass(logits: Tensor, is_counted: Tensor) -> Tensor:
    """Compute log Σ exp of the counted columns: [R, W] → [R, 1]."""
    return log_sum_exp(torch.where(is_counted, logits, torch.finfo(logits.dtype).min)).unsqueeze(1)
