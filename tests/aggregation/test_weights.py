"""Weights and choices against plain arithmetic."""

import math

import pytest
import torch

from nemo_opd.aggregation.rules import select_teacher, sequence_weights, teacher_weights
from nemo_opd.config.objective import WeightedSum
from nemo_opd.types import SequenceScores


def scores(bits: list[float], num_bytes: list[int]) -> SequenceScores:
    return SequenceScores(torch.tensor(bits, dtype=torch.float64), torch.tensor(num_bytes), torch.tensor(num_bytes))


FIRST, SECOND = scores([8.0, 30.0, 5.0, 0.0], [4, 10, 5, 0]), scores([9.0, 10.0, 0.0, 0.0], [4, 8, 0, 0])
"""The second teacher cannot score sequence 2, and neither can score sequence 3."""
EQUAL = (2.0, 2.0)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 20.0])
def test_softmax_of_scores(alpha: float) -> None:
    """Bugs: bits per sequence instead of per byte, a wrong sign, NaN without bytes."""
    weights = sequence_weights([FIRST, SECOND], score="bits_per_byte", alpha=alpha, priors=EQUAL)
    for b, (ours, theirs) in enumerate([(2.0, 2.25), (3.0, 1.25)]):
        share = math.exp(-alpha * ours) / (math.exp(-alpha * ours) + math.exp(-alpha * theirs))
        assert weights[:, b].tolist() == pytest.approx([share, 1 - share], rel=1e-6)
    assert weights[:, 2:].tolist() == [[1.0, 0.5], [0.0, 0.5]]
    assert torch.equal(weights, sequence_weights([FIRST, SECOND], score="entropy", alpha=alpha, priors=EQUAL))


def test_probability_per_byte() -> None:
    """A larger probability per byte is a larger weight, and it is at most 1 for tokens of any length."""
    weights = sequence_weights([FIRST, SECOND], score="max_probability", alpha=5.0, priors=EQUAL)
    ours, theirs = math.exp(5 * 2**-2.0), math.exp(5 * 2**-2.25)
    assert float(weights[0, 0]) == pytest.approx(ours / (ours + theirs), rel=1e-6)
    assert weights[:, 2:].tolist() == [[1.0, 0.5], [0.0, 0.5]]


def test_teachers_that_are_equally_sure_weigh_as_their_own_weights_say() -> None:
    """Bugs: the total depends on the number of teachers; weights multiply a softmax that has them already."""
    equal = sequence_weights([FIRST, FIRST], score="entropy", alpha=2.0, priors=(0.3, 0.9))
    assert equal.flatten().tolist() == pytest.approx([0.25] * 4 + [0.75] * 4, rel=1e-6)
    weights = sequence_weights([FIRST, SECOND], score="bits_per_byte", alpha=1.0, priors=(0.3, 0.9))
    odds = 0.3 / 0.9 * math.exp(2.25 - 2.0)
    assert float(weights[0, 0]) == pytest.approx(odds / (1 + odds), rel=1e-6)
    assert weights[:, 3].tolist() == pytest.approx([0.25, 0.75])


def test_a_sharp_softmax_is_finite() -> None:
    assert sequence_weights([FIRST, SECOND], score="entropy", alpha=1e30, priors=EQUAL).sum(0).tolist() == [1.0] * 4


def test_fewest_bits_per_byte() -> None:
    assert select_teacher([FIRST, SECOND], per="sequence").tolist() == [0, 1, 0, 0]
    assert select_teacher([SECOND, FIRST], per="sequence").tolist() == [1, 0, 1, 0]
    # The batch has 43/19 and 19/12 bits per byte.
    assert select_teacher([FIRST, SECOND], per="batch").tolist() == [1] * 4


@pytest.mark.parametrize("per", ["sequence", "batch"])
def test_the_first_of_equals(per: str) -> None:
    assert select_teacher([FIRST, FIRST, FIRST], per=per).tolist() == [0] * 4


def test_vocabulary_scaling() -> None:
    sizes, weights = (32_000, 128_256), (0.5, 2.0)
    assert teacher_weights(WeightedSum(), weights, sizes) == [0.5, 2.0]
    scaled = teacher_weights(WeightedSum(vocabulary_scaling=True), weights, sizes)
    factor = math.log2(128_256) / math.log2(32_000)
    assert scaled == pytest.approx([0.5, 2.0 * factor], rel=1e-12)
    dynamic = WeightedSum(weights="entropy", vocabulary_scaling=True)
    assert teacher_weights(dynamic, weights, sizes) == pytest.approx([1.0, factor], rel=1e-12)


def test_a_score_that_is_nan_makes_its_own_weight_nan() -> None:
    """Bug: a teacher that overflows gets weight 0 as if it had no text, and the run goes on."""
    broken = scores([math.nan, 10.0, math.nan, 0.0], [4, 8, 3, 0])
    weights = sequence_weights([FIRST, broken, SECOND], score="bits_per_byte", alpha=1.0, priors=(1.0, 1.0, 1.0))
    alone = sequence_weights([FIRST, SECOND], score="bits_per_byte", alpha=1.0, priors=(1.0, 1.0))
    assert weights.isnan().tolist() == [[False] * 4, [True, False, True, False], [False] * 4]
    assert torch.equal(weights[[0, 2]][:, [0, 2]], alone[:, [0, 2]])


def test_a_score_that_is_nan_is_chosen() -> None:
    """So the NaN reaches the loss, which names the teacher; comparing with NaN would skip it."""
    broken = scores([math.nan, 10.0, 0.0, 0.0], [4, 8, 0, 0])
    assert select_teacher([FIRST, broken], per="sequence").tolist() == [1, 1, 0, 0]
    assert select_teacher([FIRST, broken], per="batch").tolist() == [1] * 4
