"""Weights of teachers by how sure each is of a sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_opd.aggregation.scores import bits_per_byte
from nemo_opd.config.aggregation import Score
from nemo_opd.types import SequenceScores


def sequence_weights(
    scores: Sequence[SequenceScores], *, score: Score, alpha: float, priors: Sequence[float]
) -> Tensor:
    """Compute softmax_i(alpha · score_i + log prior_i) by sequence: float32 [teachers, B], detached (methods.md §6.1).

    score_i is −bits per byte, −entropy in bits per byte, or the largest probability per byte: 2^(−its bits per byte),
    the geometric mean over bytes. priors: of each teacher, above 0; where all are equally sure, weights are as these. A
    teacher without a scored byte in a sequence has no weight there; where none has one, priors decide alone. A teacher
    whose score is NaN has a weight of NaN, and the others are as without it: the metrics then name the teacher, and
    the step is not taken (methods.md §12).
    """
    bits = bits_per_byte(scores)
    score_IB = torch.exp2(-bits) if score == "max_probability" else -bits
    log_prior_I1 = torch.tensor(priors, dtype=bits.dtype).log().unsqueeze(1)
    has_bytes = bits.isfinite()
    weights = (alpha * score_IB + log_prior_I1).masked_fill(~has_bytes, -torch.inf).softmax(0)
    weights = torch.where(has_bytes.any(0), weights, log_prior_I1.softmax(0))
    return weights.masked_fill(bits.isnan(), torch.nan).float()
