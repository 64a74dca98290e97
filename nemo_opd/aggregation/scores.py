"""How sure a teacher is of a sequence: one number of bits per byte, whichever score is asked for."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_opd.config.aggregation import Score
from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.blocks import own_share, unit_parts
from nemo_opd.losses.chunked import compute_dtype
from nemo_opd.losses.logit_rows import LogitRows, logit_rows
from nemo_opd.losses.reduction import label_rows
from nemo_opd.losses.term import unit_cells
from nemo_opd.types import SequenceScores, TokenRows

LIVE_COPIES = 4
"""Tensors of a chunk's size alive at its peak."""


def _surprisal(log_p: Tensor, targets: Tensor) -> Tensor:
    return -log_p.gather(1, targets[:, None]).squeeze(1)


def _entropy(log_p: Tensor, targets: Tensor) -> Tensor:
    return torch.special.entr(log_p.exp()).sum(1)


def _surprisal_of_the_likeliest(log_p: Tensor, targets: Tensor) -> Tensor:
    return -log_p.amax(1)


_NATS: dict[Score, Callable[[Tensor, Tensor], Tensor]] = {
    "bits_per_byte": _surprisal,
    "entropy": _entropy,
    "max_probability": _surprisal_of_the_likeliest,
}
"""Log-probabilities [U, W] and tokens [U] → [U]."""


def sequence_scores(
    logits_BTW: Tensor | LogitRows, tokens: TokenRows, *, score: Score, vocab_size: int, chunk_size: int | None = None
) -> SequenceScores:
    """A teacher's bits and bytes of each sequence, over the scored tokens that carry text (METHODS §6).

    Bits of a token: −log2 p(token) (bits_per_byte), the entropy of p (entropy), or −log2 of the largest probability
    (max_probability). Unshifted logits [B, T, W], of which the first `vocab_size` columns count; no more than a chunk
    of them is in fp32. Raises ConfigError for shapes or sizes that do not fit.
    """
    teacher = logit_rows(logits_BTW)
    check_positions(teacher.shape, ids=tokens.ids)
    size = own_columns("vocab_size", vocab_size, teacher.shape[-1], teacher.shape[-1])
    rows = label_rows(tokens.loss_mask & (tokens.num_bytes > 0))
    targets = tokens.ids.flatten()[rows + 1]
    # A place for every token, whose sum does not depend on the order in which a device adds.
    nats = torch.zeros(tokens.ids.numel(), dtype=torch.float64, device=teacher.device)
    parts = unit_parts(teacher, unit_cells(len(rows), LIVE_COPIES * size), chunk_size)
    for part in own_share(teacher, parts, slice(0, 0)):
        log_p = teacher.read(rows[part], size).to(compute_dtype(teacher)).log_softmax(1)
        nats[rows[part]] = _NATS[score](log_p, targets[part]).double()
    nats = teacher.reduce(nats)
    counted_bytes = torch.zeros_like(nats, dtype=torch.int64)
    counted_bytes[rows] = tokens.num_bytes.flatten()[rows + 1].long()
    return SequenceScores(nats.view_as(tokens.ids).sum(1) / math.log(2), counted_bytes.view_as(tokens.ids).sum(1))


def joined(parts: Sequence[SequenceScores], num_rows: int | None = None) -> SequenceScores:
    """Scores of consecutive rows as those of all, on the host; of the first `num_rows`, where others are padding."""
    bits, num_bytes = torch.cat([part.bits for part in parts]), torch.cat([part.num_bytes for part in parts])
    return SequenceScores(bits[:num_rows].cpu(), num_bytes[:num_rows].cpu())


def bits_per_byte(scores: Sequence[SequenceScores]) -> Tensor:
    """float64 [teachers, B]; +inf where a teacher has no byte of a sequence to be scored on."""
    bits = torch.stack([score.bits for score in scores])
    num_bytes = torch.stack([score.num_bytes for score in scores])
    return torch.where(num_bytes > 0, bits / num_bytes.clamp(min=1), torch.inf)
