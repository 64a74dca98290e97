"""Logits combined from several sources: side by side, or averaged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.aligned import empty_rows
from nemo_opd.logits.rows import LogitRows, logit_rows


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
