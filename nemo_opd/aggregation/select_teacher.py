"""The teacher with the fewest bits per byte."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from nemo_opd.aggregation.scores import bits_per_byte, sides
from nemo_opd.types import SequenceScores


def select_teacher(scores: Sequence[SequenceScores], *, per: Literal["sequence", "batch"]) -> Tensor:
    """Find the teacher with the fewest bits per byte, int64 [B]: for each sequence, or for all of them together.

    The first of those that are equal; a teacher without a scored byte comes after the others (methods.md §6.3).
    """
    if per == "sequence":
        return bits_per_byte(scores).argmin(0)
    totals = [SequenceScores(*(side.sum(0, keepdim=True) for side in sides(score))) for score in scores]
    return bits_per_byte(totals).argmin(0).expand(len(scores[0].bits))
