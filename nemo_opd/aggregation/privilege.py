"""The privilege gap: a response's log-probability with the teacher's context minus without it (methods.md §13.1)."""

import math

from nemo_opd.types import Mean, SequenceScores


def gap(with_context: SequenceScores, without_context: SequenceScores) -> Mean:
    """Compute the mean of log q(y | context) − log q(y) over response tokens, in nats.

    Both scores are "log_probability". Sequences that the teacher's maximum length cuts at different tokens are skipped.
    """
    is_same = with_context.num_tokens == without_context.num_tokens
    nats = (without_context.bits - with_context.bits)[is_same].sum() * math.log(2)
    return Mean(float(nats), int(with_context.num_tokens[is_same].sum()))
