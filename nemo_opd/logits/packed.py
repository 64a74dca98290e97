"""Sequences packed into one row, without padding, and logits with a row for each of their tokens (methods.md §8.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.transfer import together
from nemo_opd.logits.rows import Gradients, TrainableRows
from nemo_opd.types import TokenRows


@dataclass(frozen=True, slots=True)
class Packing:
    """Places of right-padded sequences [B, S] in one row [N] that holds their tokens one after another."""

    lengths: tuple[int, ...]
    """Tokens of each sequence in the row, 1 at least."""
    places: Tensor
    """int64 [B, S]: place in the row, as `places_in_row` returns it."""
    tokens: Tensor
    """int64 [N]: index of each token in [B·S]."""
    positions: Tensor
    """int64 [N]: position of each token in its sequence."""
    bounds: Tensor
    """int32 [B + 1]: where each sequence begins in the row, and where the last ends."""

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
        return Packing(self.lengths, *together([self.places, self.tokens, self.positions, self.bounds], device))


def places_in_row(lengths: Sequence[int], width: int, moved_by: Tensor | None = None) -> Tensor:
    """Return int64 [B, width]: the place of each position in a row that holds sequences of `lengths`.

    moved_by: int64 [B], on the host, is added to the positions of each sequence first. Those before a sequence have the
    place of its first token, those after it that of its last.
    """
    sizes = torch.tensor(lengths).unsqueeze(1)
    positions = torch.arange(width).unsqueeze(0)
    if moved_by is not None:
        positions = (positions + moved_by.unsqueeze(1)).clamp(min=0)
    return sizes.cumsum(0) - sizes + positions.minimum(sizes - 1)


def token_bounds(lengths: Sequence[int]) -> list[int]:
    """Return where each packed sequence begins, and where the last ends."""
    return list(accumulate(lengths, initial=0))


class PackedLogits(TrainableRows):
    """Logits [B, S, X] of padded sequences, from a source [1, N, X] that has a row for each token.

    Losses read no rows of padding; they would be those of the sequence's last token.
    """

    def __init__(self, source: TrainableRows, places: Tensor, block_bytes: int | None = None) -> None:
        """Keep the source. places: int64 [B, S], from `places_in_row`, on its device."""
        self.source, self._places, self.block_bytes = source, places.flatten(), block_bytes
        self.leaves, self.share = source.leaves, source.share
        self.shape = (*places.shape, source.shape[2])
        self.device, self.dtype, self.is_product = source.device, source.dtype, source.is_product

    def read(self, rows: Tensor, width: int) -> Tensor:
        return self.source.read(self._places[rows], width)

    def begin(self, rows: Sequence[Tensor]) -> None:
        if self.share != (0, 1):
            self.source.begin([self._places[each] for each in rows])

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return self.source.reduce(tensor, op)

    def gradients(self) -> Gradients:
        return _PackedGradients(self.source.gradients(), self._places)


class _PackedGradients(Gradients):
    def __init__(self, of_source: Gradients, places: Tensor) -> None:
        self._of_source, self._places = of_source, places
        self.dtype, self.pulls_back = of_source.dtype, of_source.pulls_back

    def columns(self, width: int) -> int:
        return self._of_source.columns(width)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        self._of_source.add(self._places[rows], gradient, onto=onto)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return self._of_source.pull_back(logits, gradient)

    def sums(self) -> tuple[Tensor | None, ...]:
        return self._of_source.sums()
