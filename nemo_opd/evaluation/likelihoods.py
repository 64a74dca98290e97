"""Likelihoods of continuations: batches by length, and what a model finds of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.aggregation import TokenScore, nats_by_score
from nemo_opd.config.evaluation import QuestionSets
from nemo_opd.distributed.transfer import moved
from nemo_opd.logits.packed import Packing
from nemo_opd.logits.rows import LogitRows
from nemo_opd.models.head import Headless, WithHead
from nemo_opd.types import PAD_ID, TokenRows


@dataclass(frozen=True, slots=True)
class Scored:
    """A sequence of which the last tokens are scored."""

    ids: NDArray[np.int32]
    num_scored: int
    """Number of its last tokens, one at least before them."""


Scorer = Callable[[Sequence[Scored]], list[tuple[float, bool]]]
"""Log-probability of what is scored of each sequence, in nats, and whether each of its tokens is the likeliest."""

_EMPTY = Scored(np.zeros(1, np.int32), 0)
"""A sequence that costs one position."""


def longest_request(settings: QuestionSets, positions: int | None) -> int:
    """Return the most tokens before the last one of a benchmark's request, to a model with this number of positions.

    The last token is predicted only, but read all the same.
    """
    return settings.benchmark_length if positions is None else min(settings.benchmark_length, positions - 1)


def token_rows(rows: Sequence[Scored]) -> TokenRows:
    """Return right-padded sequences, with a mask of what is scored."""
    lengths = torch.tensor([len(row.ids) for row in rows], dtype=torch.int64)
    ids = torch.full((len(rows), int(lengths.max())), PAD_ID, dtype=torch.int64)
    for own, row in zip(ids, rows, strict=True):
        own[: len(row.ids)] = torch.from_numpy(row.ids.astype(np.int64))
    columns = torch.arange(ids.shape[1])
    firsts = lengths - torch.tensor([row.num_scored for row in rows])
    mask = (columns >= firsts.unsqueeze(1)) & (columns < lengths.unsqueeze(1))
    return TokenRows(ids=ids, lengths=lengths, loss_mask=mask, num_bytes=mask.int())


def likelihoods(logits: LogitRows, tokens: TokenRows) -> Tensor:
    """Return the log-probability of the scored tokens, and of the likeliest ones in their places: float64 [B, 2], nats.

    All columns of the head count, as in transformers' own logits.
    """
    scores: list[TokenScore] = ["log_probability", "max_probability"]
    nats = nats_by_score(logits, tokens, tokens.loss_mask, scores, vocab_size=logits.shape[2])
    return -nats.sum(2).T


def read(source: Headless | WithHead, tokens: TokenRows, micro_batches: Iterable[slice], device: str) -> Tensor:
    """Return the likelihoods of the sequences of consecutive microbatches, float64 [B, 2], on the host."""
    found = []
    for sequences in micro_batches:
        micro = tokens.rows(sequences.start, sequences.stop)
        packing, micro = Packing.of(micro).to(device), moved(micro, device)
        found.append(likelihoods(source.whole(source(micro.ids, packing), packing), micro))
    return torch.cat(found).cpu()


def answers(found: Tensor) -> list[tuple[float, bool]]:
    """Return a Scorer's answers, from log-probabilities [B, 2] as `likelihoods` returns them."""
    return [(own, own == best) for own, best in found.tolist()]


def batches(rows: Sequence[Scored], num_ranks: int, budget: int) -> Iterator[tuple[list[int], list[list[Scored]]]]:
    """Yield the numbers of sequences of about the same length and, by rank, the sequences, equally many for each.

    budget: tokens of each rank at most, unless one sequence is longer. The longest come first.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    start = 0
    while start < len(order):
        each = max(1, budget // len(rows[order[start]].ids))
        numbers = order[start : start + each * num_ranks]
        padded = [rows[i] for i in numbers] + [_EMPTY] * (-len(numbers) % num_ranks)
        yield numbers, [padded[rank::num_ranks] for rank in range(num_ranks)]
        start += len(numbers)
