"""Logits combined from several sources, sharded over ranks, or in packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.collectives import VocabularyShards
from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.errors import ConfigError
from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.rows import Gradients, LogitRows, TensorLogits, TrainableRows, empty_rows, logit_rows
from nemo_opd.types import TokenRows


class SideBySideLogits(LogitRows):
    """Logits whose columns are split over several sources: shards of a head or of logits, maybe uneven."""

    def __init__(self, sources: Sequence[LogitRows]) -> None:
        """Raise ConfigError unless the sources have the same positions and dtype and none has a `share`."""
        shapes = [source.shape for source in sources]
        kinds = {(source.shape[:2], source.dtype, source.share) for source in sources}
        if len(kinds) != 1 or sources[0].share != (0, 1):
            raise ConfigError(
                f"logits to be read side by side are {shapes} in {sorted({str(s.dtype) for s in sources})}; sequences, "
                "positions and dtype must be the same, and none may be spread over the ranks of a group"
            )
        self.sources = list(sources)
        self.shape = (*shapes[0][:2], sum(shape[2] for shape in shapes))
        self.device, self.dtype = sources[0].device, sources[0].dtype
        self.is_product = any(source.is_product for source in sources)

    def read(self, rows: Tensor, width: int) -> Tensor:
        begins = accumulate((source.shape[2] for source in self.sources), initial=0)
        widths = (
            min(max(0, width - begin), source.shape[2]) for begin, source in zip(begins, self.sources, strict=False)
        )
        parts = [source.read(rows, columns) for source, columns in zip(self.sources, widths, strict=True)]
        return torch.cat(parts, 1, out=empty_rows(len(rows), width, self.dtype, self.device))


class AveragedLogits(LogitRows):
    """Σ weights[i] · z_i / Σ weights of several teachers with one vocabulary (methods.md §6.2)."""

    def __init__(self, sources: Sequence[Tensor | LogitRows], weights: Sequence[float]) -> None:
        """Raise ConfigError unless each source has a weight ≥ 0, not all 0, and all cover the same positions.

        Some sources may be spread over the ranks of a group, but all of them over the same group.
        """
        if len(sources) != len(weights) or min(weights, default=-1.0) < 0 or not sum(weights):
            raise ConfigError(
                f"{len(sources)} logits with weights {list(weights)}: give one weight each, 0 or more and not all 0"
            )
        self.sources = [logit_rows(source) for source in sources]
        self.weights = [weight / sum(weights) for weight in weights]
        shapes = [source.shape for source in self.sources]
        if len({shape[:2] for shape in shapes}) > 1:
            raise ConfigError(f"logits to be averaged are {shapes}; sequences and positions must be the same")
        shares = {source.share for source in self.sources} - {(0, 1)}
        if len(shares) > 1:
            raise ConfigError(
                f"logits to be averaged are spread over groups of {sorted(ranks for _, ranks in shares)} ranks; "
                "spread them over one group, or give them whole"
            )
        self.shape = (*shapes[0][:2], min(shape[2] for shape in shapes))
        self._shared = max(self.sources, key=lambda source: source.share[1])
        self.device, self.share = self._shared.device, self._shared.share
        self.is_product = any(source.is_product for source in self.sources)
        self.dtype = torch.promote_types(self.sources[0].dtype, torch.float32)

    def read(self, rows: Tensor, width: int) -> Tensor:
        mean = torch.zeros((), dtype=self.dtype, device=self.device)
        for source, weight in zip(self.sources, self.weights, strict=True):
            mean = mean + weight * source.read(rows, width)
        return mean

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return self._shared.reduce(tensor, op)


class VocabParallelLogits(TrainableRows):
    """Logits whose columns are sharded over the ranks of a group; a rank reads whole rows, for its share of the blocks.

    Each read and each gradient is an exchange between rows and column shards. Hidden states are the same on every rank
    and get the full gradient on each; a shard of logits or of a head gets the gradient of its columns.
    """

    def __init__(self, local: TensorLogits | HeadLogits, shards: VocabularyShards) -> None:
        """Wrap the local shard. local: this rank's columns."""
        self.local = local
        self.leaves = local.leaves
        self.device, self.dtype, self.is_product = local.device, local.dtype, local.is_product
        self.shards = shards
        self.shape = (*local.shape[:2], sum(self.shards.num_columns))
        self.share = (self.shards.rank, self.shards.num_ranks)
        self._announced: tuple[Tensor, list[int]] | None = None

    def begin(self, rows: Sequence[Tensor]) -> None:
        self._announced = (torch.cat(list(rows)), [len(rank_rows) for rank_rows in rows]) if rows else None

    def all_ranks_rows(self, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Return the rows of all ranks in rank order, and their counts. Collective unless they were announced."""
        if self._announced is None:
            return self.shards.gather_rows(rows)
        assert self._announced[1][self.shards.rank] == len(rows)
        return self._announced

    def read(self, rows: Tensor, width: int) -> Tensor:
        widths = self.shards.widths(width)
        all_rows, counts = self.all_ranks_rows(rows)
        columns = self.local.read(all_rows, widths[self.shards.rank])
        return self.shards.to_rows(columns, counts, widths, empty_rows(len(rows), width, self.dtype, self.device))

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return self.shards.reduce(tensor, op)

    def gradients(self) -> Gradients:
        return _VocabParallelGradients(self)


class _VocabParallelGradients(Gradients):
    def __init__(self, source: VocabParallelLogits) -> None:
        self._source, self._local = source, source.local.gradients()
        self.dtype, self.pull_back = self._local.dtype, self._local.pull_back

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        shards = self._source.shards
        all_rows, counts = self._source.all_ranks_rows(rows)
        gradient = gradient.to(self.dtype)
        self._local.add(all_rows, shards.to_columns(gradient, counts, shards.widths(gradient.shape[1])), onto=onto)

    def sums(self) -> tuple[Tensor | None, ...]:
        sums = self._local.sums()
        if isinstance(self._source.local, HeadLogits) and sums[0] is not None:
            self._source.reduce(sums[0])
        return sums


class ContextParallelLogits(TrainableRows):
    """Logits that every rank of a group has: each computes a share of the units, and gets that share's gradient."""

    def __init__(self, source: TrainableRows, group: dist.ProcessGroup) -> None:
        """Wrap logits of all positions. source: may have a share itself, over ranks with the same rank in `group`."""
        self.source, self.group = source, group
        self.leaves, self.shape = source.leaves, source.shape
        self.device, self.dtype, self.is_product = source.device, source.dtype, source.is_product
        index, processes = source.share
        self.share = (dist.get_rank(group) * processes + index, dist.get_world_size(group) * processes)

    def begin(self, rows: Sequence[Tensor]) -> None:
        _, processes = self.source.share
        first = dist.get_rank(self.group) * processes
        self.source.begin(rows[first : first + processes])

    def read(self, rows: Tensor, width: int) -> Tensor:
        return self.source.read(rows, width)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        tensor = self.source.reduce(tensor, op)
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def gradients(self) -> Gradients:
        return self.source.gradients()


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
        self.dtype, self.pull_back = source_gradients.dtype, source_gradients.pull_back

    def columns(self, width: int) -> int:
        return self._source_gradients.columns(width)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        self._source_gradients.add(self._places[rows], gradient, onto=onto)

    def sums(self) -> tuple[Tensor | None, ...]:
        return self._source_gradients.sums()
