"""Teacher weights per sequence from their confidence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_opd.aggregation.scores import bits_per_byte
from nemo_opd.config.aggregation import Score
from nemo_opd.types import SequenceScores


def sequence_weights(
    scores: Sequence[SequenceScores], *, score: Score, alpha: float, priors: Sequence[float]
) -> Tensor:
    """Compute softmax_i(alpha · score_i + log prior_i) per sequence: float32 [teachers, B], detached (methods.md §6.1).

    score_i is −bits per byte, −entropy in bits per byte, or the largest probability per byte: 2^(−its bits per byte),
    the geometric mean over bytes. priors: one per teacher, above 0; with equal scores the weights are proportional to
    them. A teacher without a scored byte in a sequence gets weight 0; if all lack one, only the priors count. A NaN
    score gives its teacher a weight of NaN and does not affect the other teachers: the metrics then name the teacher,
    and the step is skipped (methods.md §12).
    """
    bits = bits_per_byte(scores)
    score_IB = torch.exp2(-bits) if score == "max_probability" else -bits
    log_prior_I1 = torch.tensor(priors, dtype=bits.dtype).log().unsqueeze(1)
    has_bytes = bits.isfinite()
    weights = (alpha * score_IB + log_prior_I1).masked_fill(~has_bytes, -torch.inf).softmax(0)
    weights = torch.where(has_bytes.any(0), weights, log_prior_I1.softmax(0))
    return weights.masked_fill(bits.isnan(), torch.nan).float()
