"""Likelihoods of continuations, in batches of similar length, and bits per byte of two models on the same texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nemo_opd.aggregation import TokenScore, nats_by_score
from nemo_opd.alignment import TokenAligner
from nemo_opd.config.evaluation import QuestionSets
from nemo_opd.data.collate import collate
from nemo_opd.data.encoders import CrossTokenizer, Encoder
from nemo_opd.data.samples import Sample
from nemo_opd.data.text import TextSampleMaker, TextWindowMaker
from nemo_opd.distributed.transfer import to_device
from nemo_opd.errors import DataError
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sources import Packing
from nemo_opd.losses.logit_metrics import bits_per_byte
from nemo_opd.models.causal_model import HiddenStateModel, LogitModel
from nemo_opd.progress import tracked
from nemo_opd.types import PAD_ID, Batch, Mean, TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_WINDOWS = 16
"""Windows per batch."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sequence whose last tokens are scored."""

    ids: NDArray[np.int32]
    num_scored: int
    """Number of scored tokens at the end; at least one token precedes them."""


Scorer = Callable[[Sequence[Scored]], list[tuple[float, bool]]]
"""Function that returns for each sequence the log-probability of its scored tokens in nats, and whether each of them is
the likeliest.
"""
_EMPTY = Scored(np.zeros(1, np.int32), 0)
"""A padding sequence with one position."""


def longest_request(settings: QuestionSets, positions: int | None) -> int:
    """Return the maximum tokens of a benchmark's request before its last one, for a model with `positions`.

    The last token is only predicted, but takes a position as well.
    """
    return settings.benchmark_length if positions is None else min(settings.benchmark_length, positions - 1)


def batches(rows: Sequence[Scored], num_ranks: int, budget: int) -> Iterator[tuple[list[int], list[list[Scored]]]]:
    """Yield batches of similar length: the sequences' indices, and the sequences of each rank, equally many.

    budget: maximum tokens per rank, unless one sequence is longer. The longest come first.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    start = 0
    while start < len(order):
        per_rank = max(1, budget // len(rows[order[start]].ids))
        indices = order[start : start + per_rank * num_ranks]
        padded = [rows[i] for i in indices] + [_EMPTY] * (-len(indices) % num_ranks)
        yield indices, [padded[rank::num_ranks] for rank in range(num_ranks)]
        start += len(indices)


def token_rows(rows: Sequence[Scored]) -> TokenRows:
    """Return right-padded sequences with a mask of the scored tokens."""
    lengths = torch.tensor([len(row.ids) for row in rows], dtype=torch.int64)
    ids = torch.full((len(rows), int(lengths.max())), PAD_ID, dtype=torch.int64)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row.ids)] = torch.from_numpy(row.ids.astype(np.int64))
    columns = torch.arange(ids.shape[1])
    firsts = lengths - torch.tensor([row.num_scored for row in rows])
    mask = (columns >= firsts.unsqueeze(1)) & (columns < lengths.unsqueeze(1))
    return TokenRows(ids=ids, lengths=lengths, loss_mask=mask, num_bytes=mask.int())


def read(
    source: HiddenStateModel | LogitModel, tokens: TokenRows, micro_batches: Iterable[slice], device: str
) -> Tensor:
    """Return the `_likelihoods` of all microbatches, one after another: float64 [B, 2], on the host."""
    results = []
    for sequences in micro_batches:
        micro = tokens.rows(sequences.start, sequences.stop)
        packing, micro = Packing.of(micro).to(device), to_device(micro, device)
        results.append(_likelihoods(source.whole(source(micro.ids, packing), packing), micro))
    return torch.cat(results).cpu()


def continue_greedily(
    source: HiddenStateModel | LogitModel,
    tokens: TokenRows,
    micro_batches: Iterable[slice],
    device: str,
    *,
    vocab_size: int,
) -> Tensor:
    """Fill the N scored positions at the end of each sequence with the likeliest tokens: int64 [B, N], on the host.

    Each token costs a forward pass of the whole sequence, as in validation: unlike sampling with a cache, this needs no
    more memory than training, whatever the model and its parallelism. vocab_size: columns that are tokens.
    """
    results = []
    for sequences in micro_batches:
        micro = tokens.rows(sequences.start, sequences.stop)
        (num_rows, width), num_new = micro.ids.shape, int(micro.loss_mask[0].sum())
        packing = Packing.of(micro).to(device)
        micro = to_device(replace(micro, ids=micro.ids.clone()), device)
        rows = torch.arange(num_rows, device=device)
        positions = micro.lengths - num_new
        for _ in range(num_new):  # later positions do not matter to a causal model
            logits = source.whole(source(micro.ids, packing), packing)
            micro.ids[rows, positions] = logits.read(rows * width + positions - 1, vocab_size).argmax(-1)
            positions = positions + 1
        results.append(micro.ids[micro.loss_mask].view(num_rows, num_new))
    return torch.cat(results).cpu()


def _likelihoods(logits: LogitRows, tokens: TokenRows) -> Tensor:
    """Return the log-probabilities of the scored tokens and of the likeliest tokens there: float64 [B, 2], in nats.

    The softmax is over all columns of the head, as in transformers.
    """
    scores: list[TokenScore] = ["log_probability", "max_probability"]
    nats = nats_by_score(logits, tokens, tokens.loss_mask, scores, vocab_size=logits.shape[2])
    return -nats.sum(2).T


def answers(log_probabilities: Tensor) -> list[tuple[float, bool]]:
    """Return a Scorer's answers for the result [B, 2] of `_likelihoods`."""
    return [(scored, scored == best) for scored, best in log_probabilities.tolist()]


def same_texts(
    texts: Sequence[str],
    new: PreTrainedTokenizerBase,
    old: PreTrainedTokenizerBase,
    aligner: TokenAligner,
    *,
    max_length: int,
    num_old_rows: int,
) -> list[Batch]:
    """Cut texts into windows of at most `max_length` tokens of the new tokenizer; the old one is the batches' teacher.

    It reads at most as many of its own tokens of a window.

    num_old_rows: ids that the old model can read. Raises DataError if no byte is predicted by both models.
    """
    reader = CrossTokenizer(Encoder.of(old, max_length, append_eos=False, vocab_size=num_old_rows), aligner)
    student = Encoder.of(new, max_length, append_eos=False)
    windows_of = TextWindowMaker(TextSampleMaker(student, (reader,)))
    samples: list[Sample] = [window for text in texts if text for window in windows_of(text)]
    batches = [collate(samples[start : start + _WINDOWS]) for start in range(0, len(samples), _WINDOWS)]
    if not any(int(batch.shared_student.num_bytes.sum()) for batch in batches):
        raise DataError("the texts have no byte that both models predict; give longer texts")
    return batches


def mean_bits_per_byte(model: PreTrainedModel, rows: Sequence[TokenRows], *, vocab_size: int) -> Mean:
    """Return the model's mean bits per byte over all rows. vocab_size: size of its tokenizer's vocabulary."""
    is_linear = type(model.get_output_embeddings()) is nn.Linear
    source = HiddenStateModel(model, key="model") if is_linear else LogitModel(model)
    device = str(model.device)
    bits = num_bytes = 0.0
    with torch.no_grad():
        for batch in tracked(rows, "bits per byte", "batches"):
            packing, tokens = Packing.of(batch).to(device), to_device(batch, device)
            mean = bits_per_byte(source.whole(source(tokens.ids, packing), packing), tokens, vocab_size=vocab_size)
            bits, num_bytes = bits + float(mean.total), num_bytes + float(mean.count)
    return Mean(bits, num_bytes)
