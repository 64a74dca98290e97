"""All positions of aligned chunks on one side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import on_host, planned
from nemo_opd.losses.reduction import next_tokens


@dataclass(frozen=True, slots=True)
class ChunkPositions:
    """The logit rows that predict the tokens of units, unit after unit."""

    rows: Tensor
    """int64 [R]: indices into [B·S]."""
    place: Tensor
    """int64 [R]: which token of its unit."""
    lengths: Tensor
    """int64 [U]: tokens of each unit."""
    offsets: Sequence[int]
    """[U + 1]: where units begin in `rows`; on the host, since they cut it."""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor) -> ChunkPositions:
        """Expand first rows [U] and lengths [U]. Waits for the device where the host does not know the lengths."""
        offsets = offsets_of(lengths)

        def positions(first_rows: Tensor, lengths: Tensor) -> list[Tensor]:
            begin = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=offsets[-1])
            place = torch.arange(offsets[-1], device=lengths.device) - begin
            return [first_rows.repeat_interleave(lengths, output_size=offsets[-1]) + place, place]

        rows, place = planned(positions, first_rows, lengths)
        return ChunkPositions(rows, place, lengths, offsets)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of positions that `planned` sends; `sent` puts them together again."""
        return [self.rows, self.place, self.lengths]

    @staticmethod
    def sent(rows: Tensor, place: Tensor, lengths: Tensor) -> ChunkPositions:
        return ChunkPositions(rows, place, lengths, offsets_of(lengths))

    @staticmethod
    def single(rows: Tensor) -> ChunkPositions:
        """Make the positions of units [U] of one token each."""
        return ChunkPositions(rows, torch.zeros_like(rows), torch.ones_like(rows), range(len(rows) + 1))

    def per_position(self, of_units: Tensor) -> Tensor:
        """Repeat values of units at their positions: [U] → [R]."""
        return of_units.repeat_interleave(self.lengths, output_size=len(self.rows))

    def span(self, units: slice) -> slice:
        """Return the slice of positions of a slice of units."""
        return slice(self.offsets[units.start], self.offsets[units.stop])

    def targets(self, ids: Tensor) -> Tensor:
        """Return the ids [R] of the tokens, out of [B, S]."""
        return self.of_tokens(ids).long()

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return values of the tokens, [R], out of [B, S]."""
        return next_tokens(values, self.rows)

    def mean(self, values: Tensor, units: slice) -> Tensor:
        """Average over the positions of each unit: [R, X] → [U, X], in a fixed order."""
        return self._reduce("mean", values, units)

    def sum(self, values: Tensor, units: slice) -> Tensor:
        """Sum over the positions of each unit: [R, …] → [U, …]."""
        return self._reduce("sum", values, units)

    def log_sum_exp(self, values: Tensor, units: slice) -> Tensor:
        """Compute log Σ exp over positions: [R, X] → [U, X]; if all are −inf the lowest number, without gradient."""
        return segments_log_sum_exp(values, self.lengths[units])

    def _reduce(self, reduce: str, values: Tensor, units: slice) -> Tensor:
        return segments_reduced(reduce, values, self.lengths[units])


def offsets_of(lengths: Tensor) -> list[int]:
    """Return where segments begin, [U + 1] from lengths [U]. Waits for the device if the host does not know them."""
    known = on_host(lengths)
    return list(accumulate((lengths if known is None else known).tolist(), initial=0))


def segments_reduced(reduce: str, values: Tensor, lengths: Tensor) -> Tensor:
    """Reduce consecutive segments of rows: [R, …] and lengths [U] → [U, …], in a fixed order."""
    return torch.segment_reduce(values, reduce, lengths=lengths, axis=0, unsafe=True)


def segments_log_sum_exp(values: Tensor, lengths: Tensor) -> Tensor:
    """Compute log Σ exp of segments: [R, X] → [U, X]; if all are −inf the lowest number, without gradient."""
    values = values.clamp(min=torch.finfo(values.dtype).min)
    peak = segments_reduced("max", values.detach(), lengths)
    mass = (values - peak.repeat_interleave(lengths, dim=0, output_size=len(values))).exp()
    return segments_reduced("sum", mass, lengths).log() + peak
