"""The objective of a global step, computed from reduced metrics (methods.md §7.3)."""

import json
import math

import pytest

from nemo_opd.aggregation import PART
from nemo_opd.config.objective import PKLLoss
from nemo_opd.training.step_metrics import KDScale, objective_values
from nemo_opd.types import Mean
from tests.composition import compose
from tests.tiny import Tiny


def test_loss_is_the_sum_of_the_parts_and_ce(tiny: Tiny) -> None:
    config = compose(*tiny.overrides("loss.kd_weight=3", "loss.ce_weight=0.25"))
    raw = {"kd/cross": Mean(8.0, 4), "kd/same": Mean(5.0, 10)}
    parts = {f"{PART}0": Mean(0.7 * 8.0, 4), f"{PART}1": Mean(0.2 * 5.0, 10)}
    values = objective_values(config, {"ce": Mean(30.0, 10), **raw, **parts}, 1.5, "train")
    assert values.keys() == {"train/ce", "train/kd/cross", "train/kd/same", "train/kd", "train/loss"}
    assert values["train/ce"] == pytest.approx(3.0)
    assert values["train/kd/cross"] == pytest.approx(2.0)
    assert values["train/kd/same"] == pytest.approx(0.5)
    assert values["train/kd"] == pytest.approx(0.7 * 2.0 + 0.2 * 0.5)
    assert values["train/loss"] == pytest.approx(0.25 * 3.0 + 3 * 1.5 * 1.5)


def test_a_teacher_without_a_unit_has_no_kd(tiny: Tiny) -> None:
    """Bug: a KD of 0 for a teacher that read none of the texts."""
    metrics = {"ce": Mean(6.0, 2), "kd/cross": Mean(0.0, 0), "kd/same": Mean(5.0, 10)}
    values = objective_values(
        compose(*tiny.overrides()), metrics | {f"{PART}0": Mean(0.0, 10), f"{PART}1": Mean(5.0, 10)}, 1.0, "val"
    )
    assert "val/kd/cross" not in values
    assert values["val/kd"] == values["val/kd/same"] == 0.5


def test_without_a_text_of_the_data_there_is_no_ce(tiny: Tiny) -> None:
    """Bug: a CE of 0 in every step of a run on the student's samples."""
    metrics = {"ce": Mean(0.0, 0), "kd/cross": Mean(4.0, 2), f"{PART}0": Mean(4.0, 2)}
    values = objective_values(compose(*tiny.overrides()), metrics, 1.0, "train")
    assert "train/ce" not in values
    assert values["train/loss"] == 2.0


def test_without_kd_weight_there_is_no_kd(tiny: Tiny) -> None:
    """Bug: a KD of 0 in the log, which looks like a perfect student."""
    config = compose(*tiny.overrides("loss.kd_weight=0", "loss.ce_weight=2"))
    assert config.active_teachers == ()
    assert objective_values(config, {"ce": Mean(6.0, 2)}, 1.0, "val") == {"val/ce": 3.0, "val/loss": 6.0}


def step_of(ce: float, kd: float, ce_units: float = 10, kd_units: float = 4) -> dict[str, Mean]:
    """Return reduced metrics of a step with these mean terms."""
    return {"ce": Mean(ce * ce_units, ce_units), f"{PART}0": Mean(kd * kd_units, kd_units)}


def after(*steps: dict[str, Mean], **settings: float) -> KDScale:
    scale = KDScale(PKLLoss(scaling="dynamic", **settings))
    for step in steps:
        scale.update(step)
    return scale


def by_age(pairs: list[tuple[float, float]], decay: float) -> float:
    """Return the closed form: the ratio of two sums over steps, each step weighted by decay^age."""
    weights = [decay ** (len(pairs) - 1 - i) for i in range(len(pairs))]
    ce, kd = (sum(weight * pair[side] for weight, pair in zip(weights, pairs, strict=True)) for side in (0, 1))
    return ce / kd


def test_dynamic_scale_is_the_ratio_of_two_moving_averages() -> None:
    """Bugs: a mean of ratios, a scale that includes its own step, a first step that weighs as much as a hundred."""
    pairs = [(4.0, 2.0), (3.0, 3.0), (2.0, 8.0), (5.0, 0.5)]
    assert after().value == 1
    for number in range(1, len(pairs) + 1):
        scale = after(*(step_of(*pair) for pair in pairs[:number]), scaling_decay=0.9)
        assert scale.value == pytest.approx(by_age(pairs[:number], 0.9), rel=1e-12)


def test_one_step_with_little_kd_changes_little() -> None:
    """Bug: a ratio of 3e6 in one step raises a mean of ratios by 30,000 for a hundred steps."""
    usual, little = step_of(3.0, 1.0), step_of(3.0, 1e-6)
    assert after(*[usual] * 5, little).value == pytest.approx(3.0 * 6 / 5, rel=0.02)
    assert after(little, *[usual] * 5).value == pytest.approx(3.0 * 6 / 5, rel=0.02)


@pytest.mark.parametrize(
    "incomplete",
    [
        step_of(0.0, 0.8, ce_units=0),
        step_of(3.0, 0.0, kd_units=0),
        {"ce": Mean(3.0, 1)},
        step_of(math.inf, 1.0),
        step_of(3.0, math.nan),
    ],
    ids=["no CE units", "no KD units", "no teacher", "infinite CE", "NaN KD"],
)
def test_a_step_without_both_terms_changes_nothing(incomplete: dict[str, Mean]) -> None:
    """Bug: a batch of samples has CE 0, and KD is multiplied by 0 from then on."""
    assert after(incomplete).value == 1
    assert after(step_of(3.0, 2.0), incomplete).value == pytest.approx(1.5)


def test_the_scale_is_capped() -> None:
    """Bug: an infinite scale for a student that starts as its teacher, whose KD is 0 or rounding noise."""
    assert after(step_of(3.0, 1e-9)).value == 100
    assert after(step_of(3.0, 0.0), scaling_cap=7.0).value == 7
    assert after(step_of(3.0, 1.0), scaling_cap=7.0).value == pytest.approx(3.0)


def test_a_negative_kd_is_not_turned_round() -> None:
    """Bug: the KD of an unnormalised truncated divergence is negative, and a negative scale trains against it."""
    assert after(step_of(3.0, -0.5)).value == pytest.approx(6.0)


def test_fixed_scale_is_one() -> None:
    scale = KDScale(PKLLoss(scaling="fixed"))
    scale.update(step_of(4.0, 2.0))
    assert scale.value == 1.0


def test_scale_continues_from_its_state() -> None:
    """Bug: a checkpoint lacks a part of the state, so a resumed run has another scale."""
    first, second = after(step_of(4.0, 2.0), step_of(0.1, 0.3)), after()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for scale in (first, second):
        scale.update(step_of(9.0, 3.0))
    assert first.value == second.value
