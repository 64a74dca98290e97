"""The teacher, brought onto the student's vocabulary by byte prefixes, at each chunk's first position (METHODS §5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_opd.errors import ProjectionError
from nemo_opd.losses.alm import ChunkTokens, log1mexp, log_surprise
from nemo_opd.losses.cell_map import CommonCells
from nemo_opd.losses.chunk_loss import ChunkInputs, first_position_loss
from nemo_opd.losses.chunked import compute_dtype
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.made_once import made_once
from nemo_opd.types import LossOutput

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_HOW = (
    "which this projection does not have; add it with nemo_opd.projection.add_byte_prefix or "
    "tools/projection/byte_prefix.py, or use projection: auto"
)


@dataclass(frozen=True, slots=True)
class PrefixRanges:
    """Which teacher tokens begin with which others, as ranges of the tokens in byte order."""

    order: Tensor
    """int64 [W]: tokens in byte order, those without bytes last."""
    place: Tensor
    """int64 [W]: where a token stands in `order`."""
    begin: Tensor
    """int64 [W]: order[begin:end] are the tokens whose bytes begin with the token's own."""
    end: Tensor
    """int64 [W]"""

    @staticmethod
    def of(projection: ProjectionMatrix, teacher_vocab_size: int, device: torch.device) -> PrefixRanges:
        """Among the first `teacher_vocab_size` tokens; made once as long as the matrix lives.

        Raises ProjectionError for a projection without a byte order.
        """
        byte_order = projection.teacher_byte_order
        if byte_order is None:
            raise ProjectionError(f"byte_prefix needs the byte order of the teacher's tokens, {_HOW}")
        return made_once(
            lambda: PrefixRanges._within(torch.from_numpy(byte_order).to(device), teacher_vocab_size),
            (byte_order,),
            PrefixRanges,
            teacher_vocab_size,
            device,
        )

    @staticmethod
    def _within(byte_order: Tensor, teacher_vocab_size: int) -> PrefixRanges:
        order, begin, end = byte_order.long().T
        is_inside = order < teacher_vocab_size
        inside_before = torch.cat([is_inside.new_zeros(1).long(), is_inside.cumsum(0)])
        inside = order[is_inside]
        return PrefixRanges(
            inside,
            inside.argsort(),
            inside_before[begin[:teacher_vocab_size]],
            inside_before[end[:teacher_vocab_size]],
        )


def byte_prefix(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    projection: ProjectionMatrix,
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> LossOutput:
    """τ² · Σ divergence(u, p) over chunks / normalizer (METHODS §5), and the metric `kd` in nats per chunk.

    u(v) = Σ q over the teacher tokens whose longest student prefix is v. Where a chunk is one student token x and the
    teacher tokens y_1..y_n, the chain-factorised bound of what the teacher gives x moves from φ(y_1) to x:
    q_1(y_1)···q_{n−1}(y_{n−1}) · Σ q_n over the tokens that begin with y_n.
    Cells are the student tokens that some teacher token reaches, x where it is none of them, and one for the rest where
    both sides have one; student and teacher are renormalised on them. Unshifted logits [B, S, V] and [B, T, W]; ids and
    chunk ids [B, S] and [B, T], chunk ids −1 or non-decreasing; a chunk with token 0 of either side is no unit.
    Vocabulary sizes default to the projection's. normalizer: units of the global batch, by default of this call.
    chunk_size: units computed at a time, by default what fits a byte budget. Raises ConfigError for shapes, sizes or
    names that do not fit, ProjectionError for a projection without Φ and the teacher's byte order.
    """
    inputs = ChunkInputs.of(
        student_logits,
        teacher_logits,
        student_ids=student_ids,
        teacher_ids=teacher_ids,
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
        temperature=temperature,
        projection=projection,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    compare = Divergence(divergence, beta, mixed_weight)
    cells = _reached_cells(projection, inputs)
    ranges = PrefixRanges.of(projection, inputs.teacher_size, student_logits.device)
    chain = _Chain.of(inputs, cells, ranges, chunk_size)

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        return compare(chain.teacher_cells(teacher, cells, part), chain.student_cells(student, cells, part))

    return first_position_loss(
        inputs,
        unit_loss,
        cells_per_unit=cells.cells_per_unit(inputs.student_size, inputs.teacher_size) + 2 * cells.num_cells,
        normalizer=normalizer,
        chunk_size=chunk_size,
    )


def _reached_cells(projection: ProjectionMatrix, inputs: ChunkInputs) -> CommonCells:
    if projection.byte_prefix is None:
        raise ProjectionError(f"byte_prefix needs the map of that name, {_HOW}")
    device, sizes = inputs.student_logits.device, (inputs.student_size, inputs.teacher_size)
    return CommonCells.of_prefixes(projection.byte_prefix, *sizes, device)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The bound of each unit, and where it goes. Units of other chunks than 1:n move nothing."""

    first_teacher: Tensor
    """int64 [U, 1]: y_1."""
    realised: Tensor
    """int64 [U, 1]: x."""
    column: Tensor
    """int64 [U, 1]: the cell of x, or any where it has none."""
    is_apart: Tensor
    """bool [U, 1]: x takes mass, but no teacher token reaches it; it is a cell of its own."""
    log_moved: Tensor
    """[U, 1]: log of the share of q(y_1) that moves to x."""
    log_kept: Tensor
    """[U, 1]: log of the share that stays."""

    @staticmethod
    def of(inputs: ChunkInputs, cells: CommonCells, prefixes: PrefixRanges, chunk_size: int | None) -> _Chain:
        units = inputs.units
        is_chain = (units.student_lengths == 1) & (units.teacher_lengths > 1)
        dtype = compute_dtype(inputs.student_logits)
        log_moved = torch.full((len(units), 1), -math.inf, dtype=dtype, device=is_chain.device)
        log_kept = torch.zeros_like(log_moved)
        surprise = _log_surprise_of_continuations(inputs, is_chain, prefixes, chunk_size).to(dtype).unsqueeze(1)
        log_moved[is_chain], log_kept[is_chain] = -surprise.exp(), log1mexp(surprise)
        realised = _first_ids(inputs.student_ids, units.student_rows)
        column = cells.column_of(realised)
        is_apart = (column < 0) & is_chain.unsqueeze(1)
        first_teacher = _first_ids(inputs.teacher_ids, units.teacher_rows)
        return _Chain(first_teacher, realised, column.clamp(min=0), is_apart, log_moved, log_kept)

    def teacher_cells(self, teacher: Tensor, cells: CommonCells, part: slice) -> Tensor:
        """Logits [u, W] → log u on the cells and on x apart, [u, X + 1].

        The share that stays is taken before the sum, so that no difference of nearly equal masses is formed.
        """
        first, column, is_apart = self.first_teacher[part], self.column[part], self.is_apart[part]
        log_first = teacher.gather(1, first)
        moved = log_first + self.log_moved[part]
        log_u = cells.teacher.log_project(teacher.scatter(1, first, log_first + self.log_kept[part]))
        own = torch.logaddexp(log_u.gather(1, column), moved.masked_fill(is_apart, -math.inf))
        apart = moved.masked_fill(~is_apart, -math.inf)
        return torch.cat([log_u.scatter(1, column, own), apart], 1).log_softmax(-1)

    def student_cells(self, student: Tensor, cells: CommonCells, part: slice) -> Tensor:
        """Logits [u, V] → log p on the same cells, [u, X + 1]."""
        realised, is_apart = self.realised[part], self.is_apart[part]
        log_realised = student.gather(1, realised)
        elsewhere = log_realised.masked_fill(is_apart, torch.finfo(student.dtype).min)
        log_p = cells.student.log_project(student.scatter(1, realised, elsewhere))
        apart = log_realised.masked_fill(~is_apart, -math.inf)
        return torch.cat([log_p, apart], 1).log_softmax(-1)


def _first_ids(ids: Tensor, rows: Tensor) -> Tensor:
    """The ids [U, 1] of the tokens that rows [U] predict."""
    return ids.flatten().index_select(0, rows + 1).long().unsqueeze(1)


@torch.no_grad()
def _log_surprise_of_continuations(
    inputs: ChunkInputs, is_chain: Tensor, prefixes: PrefixRanges, chunk_size: int | None
) -> Tensor:
    """log(−log R) of the units that are chains; R: probability of y_2..y_{n−1} and then of a token that y_n begins."""
    chains = inputs.units.where(is_chain)
    tokens = ChunkTokens.of(chains.teacher_rows + 1, chains.teacher_lengths - 1, inputs.teacher_ids)
    last = tokens.place == (chains.teacher_lengths - 2).repeat_interleave(
        chains.teacher_lengths - 1, output_size=len(tokens.rows)
    )
    begin = torch.where(last, prefixes.begin[tokens.targets], prefixes.place[tokens.targets]).unsqueeze(1)
    end = torch.where(last, prefixes.end[tokens.targets], prefixes.place[tokens.targets] + 1).unsqueeze(1)
    columns = inputs.teacher_logits.flatten(0, 1).narrow(1, 0, inputs.teacher_size)
    found = []
    for part in tokens.parts(8 * inputs.teacher_size, chunk_size):
        logits = columns.index_select(0, tokens.rows[part]).to(compute_dtype(inputs.student_logits))
        ordered = logits.index_select(1, prefixes.order) / inputs.temperature
        places = torch.arange(inputs.teacher_size, device=ordered.device)
        is_meant = (places >= begin[part]) & (places < end[part])
        lowest = torch.finfo(ordered.dtype).min
        meant = ordered.masked_fill(~is_meant, lowest).logsumexp(1)
        odds_against = ordered.masked_fill(is_meant, lowest).logsumexp(1) - meant
        found.append(tokens.sum_over_units(log_surprise(odds_against), part))
    return torch.cat([columns.new_zeros(0, dtype=compute_dtype(inputs.student_logits)), *found])
