"""The privilege gap: log-probability of a response with a teacher's context, less that without (methods.md §13.1)."""

import math

from nemo_opd.types import Mean, SequenceScores


def gap(given: SequenceScores, without: SequenceScores) -> Mean:
    """Return the mean of log q(y | given) − log q(y) over the tokens of responses, in nats.

    Both are of score="log_probability". A sequence that the teacher's length cuts elsewhere in one of them is left out.
    """
    is_same = given.num_tokens == without.num_tokens
    nats = (without.bits - given.bits)[is_same].sum() * math.log(2)
    return Mean(float(nats), int(given.num_tokens[is_same].sum()))
