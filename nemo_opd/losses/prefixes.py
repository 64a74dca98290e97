"""Teacher mass that moves along chains: chunks of one student token and several teacher tokens (methods.md §5.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, to_device_batched
from nemo_opd.errors import ProjectionError
from nemo_opd.logits.term import ReadAhead
from nemo_opd.losses.alm import log1mexp, log_surprise
from nemo_opd.losses.arguments import next_tokens, over
from nemo_opd.losses.chunk_loss import ChunkInputs, ChunkPositions
from nemo_opd.losses.fused import log_sum_exp
from nemo_opd.losses.sparse_projection import cached_while_alive

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

ADD_MAPS = (
    "which this projection lacks; add it with nemo_opd.projection.add_byte_prefix or "
    "nemo-opd projection byte-prefix, or use projection: auto"
)


@dataclass(frozen=True, slots=True)
class Chains:
    """Chunks, among all units, whose last student token x ends beyond their first teacher token."""

    is_chain: Tensor
    """bool [U, 1]"""
    last_rows: Tensor
    """int64 [U]: indices into [B·S] of the logits that predict x."""
    positions: ChunkPositions
    """Positions of y_2..y_n of each chain; empty for other units."""
    begin: Tensor
    """int64 [R, 1]: start of the byte-order range of tokens that continue the chain."""
    end: Tensor
    """int64 [R, 1]: end of that range, exclusive."""
    prefixes: PrefixRanges
    ahead: ReadAhead
    """Reader of the teacher's rows at the positions."""

    @staticmethod
    def of(inputs: ChunkInputs, prefixes: PrefixRanges, num_compared: Tensor | None = None) -> Chains:
        """Find the chains. Up to y_{n−1} the realised token continues a chain; at y_n any token that begins with it.

        num_compared: int64 [U], number of a chunk's leading student tokens that are compared, by default 1. A chunk
        with more student tokens is not a chain.
        """
        units = inputs.units

        def chains(m: Tensor, n: Tensor, rows: Tensor, student_rows: Tensor, *compared: Tensor) -> list[Tensor]:
            (number,) = compared or (torch.ones_like(m),)
            is_chain = (m == number) & (n > 1)
            return [is_chain, (n - 1) * is_chain, rows + 1, student_rows + number - 1]

        fields = (units.student_lengths, units.teacher_lengths, units.teacher_rows, units.student_rows)
        optional = () if num_compared is None else (num_compared,)
        is_chain, lengths, begins, last_rows = compute_on_host(chains, *fields, *optional)
        positions = ChunkPositions.of(begins, lengths)
        targets = positions.targets(inputs.teacher_ids)
        last = positions.place == positions.per_position(lengths) - 1
        begin = torch.where(last, prefixes.begin[targets], prefixes.place[targets])
        end = torch.where(last, prefixes.end[targets], prefixes.place[targets] + 1)
        ahead = inputs.teacher_ahead(positions.rows, positions.offsets)
        bounds = begin.unsqueeze(1), end.unsqueeze(1)
        return Chains(is_chain.unsqueeze(1), last_rows, positions, *bounds, prefixes, ahead)

    def moved(self, inputs: ChunkInputs, part: slice) -> MovedMass:
        """Compute the mass that moves in a part's units."""
        is_chain, surprise = self.is_chain[part], self._log_surprise(inputs, part)
        return MovedMass(
            first_teacher=next_tokens(inputs.teacher_ids, inputs.units.teacher_rows[part]).long().unsqueeze(1),
            realised=next_tokens(inputs.student_ids, self.last_rows[part]).long().unsqueeze(1),
            is_chain=is_chain,
            log_moved=(-surprise.exp()).masked_fill(~is_chain, -math.inf),
            log_kept=log1mexp(surprise).masked_fill(~is_chain, 0),
        )

    @torch.no_grad()
    def _log_surprise(self, inputs: ChunkInputs, part: slice) -> Tensor:
        """Compute log(−log R) [u, 1]; R: probability of y_2..y_{n−1}, then of a token that begins with y_n."""
        span = self.positions.span(part)
        logits = over(self.ahead.of(part).to(inputs.dtype), inputs.temperature)
        place = self.prefixes.place
        continues = (place >= self.begin[span]) & (place < self.end[span])
        # The unknown mass of a truncated teacher does not count, so that R stays a lower bound.
        continues = F.pad(continues, (0, logits.shape[1] - continues.shape[1]))
        odds_against = _log_mass(logits, ~continues) - _log_mass(logits, continues)
        return self.positions.log_sum_exp(log_surprise(odds_against), part)


@dataclass(frozen=True, slots=True)
class MovedMass:
    """Lower bound of the teacher's mass on the realised student token x. Units without a chain move nothing."""

    first_teacher: Tensor
    """int64 [u, 1]: y_1."""
    realised: Tensor
    """int64 [u, 1]: x."""
    is_chain: Tensor
    """bool [u, 1]"""
    log_moved: Tensor
    """[u, 1]: log of the share of q(y_1) that moves to x."""
    log_kept: Tensor
    """[u, 1]: log of the share that stays."""


@dataclass(frozen=True, slots=True)
class PrefixRanges:
    """Prefix relation of teacher tokens, as ranges of the byte order; tokens without bytes come last."""

    place: Tensor
    """int64 [W]: a token's place in the byte order."""
    begin: Tensor
    """int64 [W]: places begin ≤ i < end hold the tokens whose bytes begin with this token's bytes."""
    end: Tensor
    """int64 [W]"""

    @staticmethod
    @cached_while_alive
    def of(projection: ProjectionMatrix, teacher_vocab_size: int, device: torch.device) -> PrefixRanges:
        """Return the ranges among the first `teacher_vocab_size` tokens; cached while the matrix lives.

        Raises ProjectionError for a projection without a byte order.
        """
        if projection.teacher_byte_order is None:
            raise ProjectionError(f"byte_prefix needs the byte order of the teacher's tokens, {ADD_MAPS}")
        # On the host, where counting tokens does not wait for a device.
        order, begin, end = torch.from_numpy(projection.teacher_byte_order).long().T
        is_inside = order < teacher_vocab_size
        inside_before = torch.cat([is_inside.new_zeros(1).long(), is_inside.cumsum(0)])
        bounds = (inside_before[bound[:teacher_vocab_size]] for bound in (begin, end))
        return PrefixRanges(*to_device_batched([order[is_inside].argsort(), *bounds], device))


def _log_mass(logits: Tensor, mask: Tensor) -> Tensor:
    """Compute log Σ exp of the columns in a mask: [R, W] and bool [R, W] → [R, 1]."""
    return log_sum_exp(torch.where(mask, logits, torch.finfo(logits.dtype).min)).unsqueeze(1)
