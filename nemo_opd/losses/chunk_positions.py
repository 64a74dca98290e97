"""Positions of aligned chunks on one side, and reductions over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, on_host
from nemo_opd.losses.reduction import next_tokens


@dataclass(frozen=True, slots=True)
class ChunkPositions:
    """Logit rows that predict the tokens of units, grouped by unit."""

    rows: Tensor
    """int64 [R]: indices into [B·S]."""
    place: Tensor
    """int64 [R]: index of the token within its unit."""
    lengths: Tensor
    """int64 [U]: number of each unit's tokens."""
    offsets: Sequence[int]
    """[U + 1]: where units begin in `rows`; on the host, to slice it."""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor) -> ChunkPositions:
        """Expand first rows [U] and lengths [U]. Waits for the device if the host does not have the lengths."""
        offsets = offsets_of(lengths)

        def positions(first_rows: Tensor, lengths: Tensor) -> list[Tensor]:
            begin = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=offsets[-1])
            place = torch.arange(offsets[-1], device=lengths.device) - begin
            return [first_rows.repeat_interleave(lengths, output_size=offsets[-1]) + place, place]

        rows, place = compute_on_host(positions, first_rows, lengths)
        return ChunkPositions(rows, place, lengths, offsets)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the fields to pass through `compute_on_host`; `sent` rebuilds the positions from them."""
        return [self.rows, self.place, self.lengths]

    @staticmethod
    def sent(rows: Tensor, place: Tensor, lengths: Tensor) -> ChunkPositions:
        """Rebuild positions from `tensors`."""
        return ChunkPositions(rows, place, lengths, offsets_of(lengths))

    @staticmethod
    def single(rows: Tensor) -> ChunkPositions:
        """Build the positions of one-token units from their rows [U]."""
        return ChunkPositions(rows, torch.zeros_like(rows), torch.ones_like(rows), range(len(rows) + 1))

    def per_position(self, unit_values: Tensor) -> Tensor:
        """Repeat each unit's value at its positions: [U] → [R]."""
        return unit_values.repeat_interleave(self.lengths, output_size=len(self.rows))

    def span(self, units: slice) -> slice:
        """Return the positions of a slice of units, as a slice."""
        return slice(self.offsets[units.start], self.offsets[units.stop])

    def targets(self, ids: Tensor) -> Tensor:
        """Return the tokens' ids [R], from ids [B, S]."""
        return self.of_tokens(ids).long()

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the tokens' values [R], from values [B, S]."""
        return next_tokens(values, self.rows)

    def mean(self, values: Tensor, units: slice) -> Tensor:
        """Average over the positions of each unit in a fixed order: [R, X] → [U, X]."""
        return self._reduce("mean", values, units)

    def sum(self, values: Tensor, units: slice) -> Tensor:
        """Sum over the positions of each unit: [R, …] → [U, …]."""
        return self._reduce("sum", values, units)

    def log_sum_exp(self, values: Tensor, units: slice) -> Tensor:
        """Compute log Σ exp over the positions of each unit: [R, X] → [U, X]; see `segments_log_sum_exp`."""
        return segments_log_sum_exp(values, self.lengths[units])

    def _reduce(self, reduce: str, values: Tensor, units: slice) -> Tensor:
        return segments_reduced(reduce, values, self.lengths[units])


def offsets_of(lengths: Tensor) -> list[int]:
    """Return where segments of lengths [U] begin, [U + 1]. Waits for the device unless the host has the lengths."""
    host_lengths = on_host(lengths)
    return list(accumulate((lengths if host_lengths is None else host_lengths).tolist(), initial=0))


def segments_reduced(reduce: str, values: Tensor, lengths: Tensor) -> Tensor:
    """Reduce consecutive segments of rows in a fixed order: [R, …] and lengths [U] → [U, …]."""
    return torch.segment_reduce(values, reduce, lengths=lengths, axis=0, unsafe=True)


def segments_log_sum_exp(values: Tensor, lengths: Tensor) -> Tensor:
    """Compute log Σ exp of segments: [R, X] → [U, X]. If all are −inf: the lowest finite number, without gradient."""
    values = values.clamp(min=torch.finfo(values.dtype).min)
    peak = segments_reduced("max", values.detach(), lengths)
    mass = (values - peak.repeat_interleave(lengths, dim=0, output_size=len(values))).exp()
    return segments_reduced("sum", mass, lengths).log() + peak
