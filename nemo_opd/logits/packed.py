"""Sequences packed into one row without padding, and their logits (methods.md §8.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.logits.rows import Gradients, TrainableRows
from nemo_opd.types import TokenRows


@dataclass(frozen=True, slots=True)
class Packing:
    """Places of right-padded sequences [B, S] in one row [N] of their concatenated tokens."""

    lengths: tuple[int, ...]
    """Number of tokens of each sequence in the row, at least 1."""
    places: Tensor
    """int64 [B, S]: place in the row, from `places_in_row`."""
    tokens: Tensor
    """int64 [N]: index of each token in [B·S]."""
    positions: Tensor
    """int64 [N]: position of each token in its sequence."""
    bounds: Tensor
    """int32 [B + 1]: first place of each sequence in the row, then the end of the last."""

    @classmethod
    def of(cls, tokens: TokenRows) -> Packing:
        """Pack sequences, on the host."""
        lengths, width = tokens.packed_lengths, tokens.ids.shape[1]
        columns = torch.arange(width)
        is_token = columns < torch.tensor(lengths).unsqueeze(1)
        return cls(
            tuple(lengths),
            places_in_row(lengths, width),
            is_token.flatten().nonzero().squeeze(1),
            columns.expand_as(is_token)[is_token],
            torch.tensor(token_bounds(lengths), dtype=torch.int32),
        )

    def to(self, device: str | torch.device) -> Packing:
        """Return a copy on a device."""
        return Packing(
            self.lengths, *to_device_batched([self.places, self.tokens, self.positions, self.bounds], device)
        )


def places_in_row(lengths: Sequence[int], width: int, moved_by: Tensor | None = None) -> Tensor:
    """Return the place of each position in a row that holds sequences of `lengths`, int64 [B, width].

    moved_by: int64 [B] on the host, added to the positions of each sequence first. Positions before a sequence are
    clamped to its first token, positions after it to its last.
    """
    sizes = torch.tensor(lengths).unsqueeze(1)
    positions = torch.arange(width).unsqueeze(0)
    if moved_by is not None:
        positions = (positions + moved_by.unsqueeze(1)).clamp(min=0)
    return sizes.cumsum(0) - sizes + positions.minimum(sizes - 1)


def token_bounds(lengths: Sequence[int]) -> list[int]:
    """Return the first place of each packed sequence, followed by the end of the last."""
    return list(accumulate(lengths, initial=0))


class PackedLogits(TrainableRows):
    """Logits [B, S, X] of padded sequences, from a source [1, N, X] with a row for each token.

    Losses do not read padding rows; they would be the row of the sequence's last token.
    """

    def __init__(self, source: TrainableRows, places: Tensor, block_bytes: int | None = None) -> None:
        """Wrap a source. places: int64 [B, S] on its device, from `places_in_row`."""
        self.source, self._places, self.block_bytes = source, places.flatten(), block_bytes
        self.leaves, self.share = source.leaves, source.share
        self.shape = (*places.shape, source.shape[2])
        self.device, self.dtype, self.is_product = source.device, source.dtype, source.is_product

    def read(self, rows: Tensor, width: int) -> Tensor:
        return self.source.read(self._places[rows], width)

    def begin(self, rows: Sequence[Tensor]) -> None:
        if self.share != (0, 1):
            self.source.begin([self._places[process_rows] for process_rows in rows])

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return self.source.reduce(tensor, op)

    def gradients(self) -> Gradients:
        return _PackedGradients(self.source.gradients(), self._places)


class _PackedGradients(Gradients):
    def __init__(self, source_gradients: Gradients, places: Tensor) -> None:
        self._source_gradients, self._places = source_gradients, places
        self.dtype, self.pulls_back = source_gradients.dtype, source_gradients.pulls_back

    def columns(self, width: int) -> int:
        return self._source_gradients.columns(width)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        self._source_gradients.add(self._places[rows], gradient, onto=onto)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return self._source_gradients.pull_back(logits, gradient)

    def sums(self) -> tuple[Tensor | None, ...]:
        return self._source_gradients.sums()
