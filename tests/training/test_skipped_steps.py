"""Skipped steps are counted and reported, and too many in a row end a run (methods.md §12)."""

import math

import pytest

from nemo_opd.aggregation import PART
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import NotFiniteError
from nemo_opd.training.step_metrics import SkippedSteps
from nemo_opd.types import Last, Mean, Metric
from nemo_opd.workers.step import IS_TAKEN
from tests.composition import compose


def metrics_of(ce: float = 2.0, cross: float = 1.0, same: float = 1.0, norm: float = 1.0) -> dict[str, Metric]:
    raw = {"ce": Mean(ce, 1), f"{PART}0": Mean(cross, 1), f"{PART}1": Mean(same, 1), "grad_norm": Last(norm)}
    return raw | {IS_TAKEN: Last(float(all(math.isfinite(metric.value()) for metric in raw.values())))}


GOOD, BAD = metrics_of(), metrics_of(cross=math.nan)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (metrics_of(cross=math.inf), "teacher cross (inf) is not finite;"),
        (metrics_of(cross=math.nan, same=math.inf), "teacher cross (nan), teacher same (inf) are not finite;"),
        (metrics_of(ce=math.nan, norm=math.nan), "CE (nan) is not finite, so the student's own logits are not;"),
        (metrics_of(norm=math.inf), "the gradient's norm is inf, although all terms of the loss are finite;"),
    ],
)
def test_the_message_names_the_step_and_the_term(metrics: dict[str, Metric], reason: str) -> None:
    message = SkippedSteps(compose()).observe(7, metrics)
    assert message is not None
    assert message.startswith(f"step 7: {reason} the step is skipped")


def test_teachers_with_averaged_logits_are_named_together() -> None:
    config = compose(
        "aggregation=averaged_logits", "teachers.0.type=same_tokenizer", "teachers.0.model=demo:teacher_same"
    )
    metrics = {"ce": Mean(2.0, 1), f"{PART}0": Mean(math.nan, 1), "grad_norm": Last(1.0), IS_TAKEN: Last(0.0)}
    message = SkippedSteps(config).observe(1, metrics)
    assert message is not None
    assert "teachers cross, same together (nan) is not finite" in message


def test_the_policy_is_a_term() -> None:
    config = compose("loss=grpo", config_name="on_policy_demo")
    metrics = {"ce": Mean(0.0, 0), "policy/loss": Mean(math.inf, 3), "grad_norm": Last(1.0), IS_TAKEN: Last(0.0)}
    message = SkippedSteps(config).observe(1, metrics)
    assert message is not None
    assert "policy (inf) is not finite" in message


def test_so_many_in_a_row_end_the_run() -> None:
    """Bug: a run that no longer learns continues to its end and exits 0."""
    skipped = SkippedSteps(limited(2))
    for step, metrics in enumerate([BAD, GOOD, BAD], start=1):
        skipped.observe(step, metrics)
        skipped.require_progress()
    skipped.observe(4, BAD)
    with pytest.raises(NotFiniteError, match=r"^step 4: teacher cross \(nan\) is not finite; the last 2 steps"):
        skipped.require_progress()
    assert skipped.total == 3


def test_a_teacher_in_float16_is_offered_bfloat16() -> None:
    skipped = SkippedSteps(limited(1, "teachers.1.dtype=float16"))
    skipped.observe(1, BAD)
    with pytest.raises(NotFiniteError, match=r"teachers\.1\.dtype=bfloat16 if a teacher overflows in float16"):
        skipped.require_progress()


def test_counts_survive_a_resume() -> None:
    """Bug: a run that is resumed after skipped steps counts them from 0 again."""
    first, second = SkippedSteps(limited(3)), SkippedSteps(limited(3))
    for step in (1, 2):
        first.observe(step, BAD)
    second.load_state_dict(first.state_dict())
    second.require_progress()
    second.observe(3, BAD)
    assert second.total == 3
    with pytest.raises(NotFiniteError):
        second.require_progress()


@pytest.mark.parametrize("validated", [math.nan, math.inf])
def test_a_run_does_not_end_well_with_a_student_that_has_diverged(validated: float) -> None:
    """Bug: after fewer skipped steps than end a run, the student is exported and the closing table says nan."""
    skipped = SkippedSteps(limited(5))
    for step in (3, 4):
        skipped.observe(step, metrics_of(ce=math.nan, norm=math.nan))
    with pytest.raises(NotFiniteError, match=r"validation gives (nan|inf) .* the last 2 steps were skipped"):
        skipped.require_sound_end(validated)
    skipped.require_sound_end(2.0)


def test_without_validation_the_last_step_decides() -> None:
    """Bug: a teacher that overflows makes the student count as diverged. All terms together do, also after a resume."""
    skipped, resumed = SkippedSteps(limited(5)), SkippedSteps(limited(5))
    skipped.observe(1, BAD)
    skipped.require_sound_end(None)
    skipped.observe(2, metrics_of(ce=math.nan, cross=math.nan, same=math.nan))
    resumed.load_state_dict(skipped.state_dict())
    for steps in (skipped, resumed):
        with pytest.raises(NotFiniteError, match=r"^the last step was skipped: the student has diverged"):
            steps.require_sound_end(None)
    skipped.observe(3, GOOD)
    skipped.require_sound_end(None)


def limited(number: int, *overrides: str) -> RunConfig:
    return compose(f"train.max_skipped_steps={number}", *overrides)
