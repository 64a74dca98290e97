"""The teacher with the fewest bits per byte."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from nemo_opd.aggregation.scores import bits_per_byte, score_tensors
from nemo_opd.types import SequenceScores


def select_teacher(scores: Sequence[SequenceScores], *, per: Literal["sequence", "batch"]) -> Tensor:
    """Return the index of the teacher with the fewest bits per byte, int64 [B], per sequence or for the whole batch.

    Ties go to the first teacher; a teacher without a scored byte comes last (methods.md §6.3).
    """
    if per == "sequence":
        return bits_per_byte(scores).argmin(0)
    totals = [SequenceScores(*(tensor.sum(0, keepdim=True) for tensor in score_tensors(score))) for score in scores]
    return bits_per_byte(totals).argmin(0).expand(len(scores[0].bits))
