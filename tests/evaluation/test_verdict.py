"""The verdict on a run."""

from dataclasses import replace

import pytest

from nemo_opd.evaluation.estimates import ratio_difference
from nemo_opd.evaluation.verdict import Arm, Setup, compared, judge, teacher_effect
from nemo_opd.logging.interface import ClosingRow, ClosingTable
from nemo_opd.logging.scores import TextBits

SIZES = (100, 200, 300, 400)
SEED = {"run": {"seed": 0}}
SETUP = Setup(("large",), {"student": 10_000, "large": 20_000}, 50)


def bits(step: int, *rates: float) -> TextBits:
    return TextBits(step, tuple(rate * size for rate, size in zip(rates, SIZES, strict=True)), SIZES)


def arm(name: str, start: float, *end: float, step: int = 10, seed: int = 0) -> Arm:
    return Arm(name, bits(0, *[start] * 4), bits(step, *end), {"run": {"seed": seed}})


def closing(start: float, after: float, teacher: float) -> ClosingTable:
    return ClosingTable(
        before=ClosingRow("student before", start, "", start),
        after=ClosingRow("student after", after, "10 steps", after),
        teachers=(ClosingRow("teacher large", None, "", teacher),),
    )


def test_ratio_difference_weighs_texts_by_their_bytes() -> None:
    """Catches a mean of the texts' rates: a long text would count as much as a short one."""
    estimate = ratio_difference([100.0, 900.0], [200.0, 900.0], [100, 900], 0.95)
    assert estimate.value == pytest.approx(-0.1)
    assert estimate.low < estimate.value < estimate.high


@pytest.mark.parametrize(
    ("with_teacher", "answer", "against"),
    [
        ((1.5, 1.51, 1.49, 1.5), "The teacher helped", "b is better than a: 1.499 bits per byte against 1.700"),
        ((1.9, 1.91, 1.89, 1.9), "The teacher made it worse", "b is worse than a"),
        ((1.6, 1.8, 1.71, 1.69), "cannot be told", "b may be better or worse than a, as the interval includes 0"),
        ((1.7001, 1.7001, 1.7001, 1.7001), "cannot be told", "b may be better or worse than a, as rounding may"),
    ],
)
def test_teachers_helped_only_beyond_the_interval(with_teacher: tuple[float, ...], answer: str, against: str) -> None:
    """Catches a swapped sign, and a verdict from the mean alone when texts disagree."""
    effect, sentence = teacher_effect(arm("this run", 2.0, *with_teacher), arm("baseline", 2.0, 1.7, 1.7, 1.7, 1.7))
    assert answer in sentence
    assert answer.endswith(effect)
    assert str(compared(arm("b", 2.5, *with_teacher), arm("a", 2.0, 1.7, 1.7, 1.7, 1.7, step=20))).startswith(against)


def test_runs_validated_on_other_texts_are_not_compared() -> None:
    run = arm("b", 2.0, 1.5, 1.5, 1.5, 1.5)
    assert compared(run, Arm("a", None, TextBits(10, (1.0, 1.0), (1, 1)))) is None
    assert compared(Arm("a", None, None), run) is None


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        (None, "set run.baseline"),
        (arm("baseline", 2.0, 1.7, 1.7, 1.7, 1.7, step=20), "took 20 steps"),
        (arm("baseline", 2.1, 1.7, 1.7, 1.7, 1.7), "started at 2.100"),
        (arm("baseline", 2.0, 1.7, 1.7, 1.7, 1.7, seed=1), "run.seed is 1 in baseline and 0 in this run"),
        (replace(arm("baseline", 2.0, 1.7, 1.7, 1.7, 1.7), rates={1: 1e-3, 2: 1e-3}), "learning rates at step 2"),
        (Arm("baseline", None, None), "no figures per validation text"),
        (Arm("baseline", TextBits(0, (2.0, 2.0), (1, 1)), TextBits(10, (1.0, 1.0), (1, 1)), SEED), "other texts"),
    ],
)
def test_runs_that_differ_give_no_verdict(baseline: Arm | None, reason: str) -> None:
    """Catches a comparison of runs with other texts, steps, starts or learning rates."""
    this_run = replace(arm("this run", 2.0, 1.5, 1.5, 1.5, 1.5), rates={1: 1e-3, 2: 2e-3})
    effect, sentence = teacher_effect(this_run, baseline)
    assert effect == "cannot be told"
    assert sentence.startswith("Whether the teacher helped cannot be told")
    assert reason in sentence


def test_verdict_says_the_gap() -> None:
    """Catches a share of the gap over different bytes, or from the wrong end."""
    verdict = judge(closing(2.0, 1.5, 1.0), [], SETUP, arm("this run", 2.0, 1.5, 1.5, 1.5, 1.5), None)
    assert "-25.0 %" in verdict.sentences[0]
    assert "over 4 texts" in verdict.sentences[0]
    assert "50.0 % of the gap is closed" in verdict.sentences[1]
    assert not verdict.is_worse
    assert not verdict.remarks


def test_doubtful_results_have_remarks() -> None:
    """Catches a run that ends worse, with a worse and smaller teacher or after many epochs, and says nothing."""
    records = [
        {"step": 5, "epoch": 20, "val/bits_per_byte": 1.8},
        {"step": 10, "epoch": 99, "val/bits_per_byte": 3e5},
    ]
    setup = Setup(("large",), {"student": 10_000, "large": 5_000}, 20)
    verdict = judge(closing(2.0, 3e5, 2.5), records, setup, arm("this run", 2.0, 3e5, 3e5, 3e5, 3e5), None)
    assert verdict.is_worse
    expected = ("worse than before", "better at step 5", "worse than the student did", "smaller", "20 texts in 100")
    assert len(verdict.remarks) == len(expected)
    for text, remark in zip(expected, verdict.remarks, strict=True):
        assert text in remark


def test_a_rise_without_an_interval_is_not_worse() -> None:
    """Catches a model withheld because of a single mean, without figures per text."""
    verdict = judge(closing(2.0, 2.01, 1.0), [], SETUP, Arm("this run", None, None), None)
    assert not verdict.is_worse


@pytest.mark.parametrize(
    ("after", "text"),
    [(2.5, "the gap has grown"), (2.0001, "the gap has not changed"), (0.9, "it passed the teacher")],
)
def test_a_gap_that_grew_stayed_or_closed(after: float, text: str) -> None:
    """Catches "-50.0 % of the gap is closed", and more than 100 %."""
    verdict = judge(closing(2.0, after, 1.0), [], SETUP, arm("this run", 2.0, *[after] * 4), None)
    assert text in verdict.sentences[1]


def test_a_teacher_that_is_hardly_better_has_no_gap() -> None:
    """Catches thousands of per cent of a gap that is only rounding."""
    verdict = judge(closing(2.0, 1.5, 1.9999), [], SETUP, arm("this run", 2.0, 1.5, 1.5, 1.5, 1.5), None)
    assert not any("of the gap" in sentence for sentence in verdict.sentences)


def test_a_rise_within_the_interval_is_not_worse() -> None:
    """Catches an export refused by chance: one of four texts got worse."""
    verdict = judge(closing(2.0, 2.01, 1.0), [], SETUP, arm("this run", 2.0, 1.9, 2.2, 1.95, 2.0), None)
    assert not verdict.is_worse
