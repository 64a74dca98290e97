"""The objective of a global step, from metrics that are already reduced (METHODS §7)."""

import pytest

from nemo_opd.aggregation import PART
from nemo_opd.config.loss import PKLLoss
from nemo_opd.training.objective import KDScale, objective_values
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
    """Bug: a KD of 0 for a teacher that none of the texts was given to."""
    metrics = {"ce": Mean(6.0, 2), "kd/cross": Mean(0.0, 0), "kd/same": Mean(5.0, 10)}
    values = objective_values(
        compose(*tiny.overrides()), metrics | {f"{PART}0": Mean(0.0, 10), f"{PART}1": Mean(5.0, 10)}, 1.0, "val"
    )
    assert "val/kd/cross" not in values
    assert values["val/kd"] == values["val/kd/same"] == 0.5


def test_without_kd_weight_there_is_no_kd(tiny: Tiny) -> None:
    """Bug: a KD of 0 in the log, which looks like a perfect student."""
    config = compose(*tiny.overrides("loss.kd_weight=0", "loss.ce_weight=2"))
    assert config.active_teachers == ()
    assert objective_values(config, {"ce": Mean(6.0, 2)}, 1.0, "val") == {"val/ce": 3.0, "val/loss": 6.0}


def recurrence(pairs: list[tuple[float, float]], decay: float) -> list[float]:
    """The scale of every step by its closed form: the first ratio, then an average with weights (1−d)·d^age."""
    scales = [1.0]
    ratios: list[float] = []
    for ce, kd in pairs:
        if kd > 0:
            ratios.append(ce / kd)
        if not ratios:
            scales.append(1.0)
            continue
        last = len(ratios) - 1
        tail = sum((1 - decay) * decay ** (last - i) * ratios[i] for i in range(1, len(ratios)))
        scales.append(decay**last * ratios[0] + tail)
    return scales


def test_dynamic_scale_is_a_moving_average_of_the_steps_before() -> None:
    """Bugs: a scale that knows its own step, a start at 0 instead of the first ratio, a step without KD that counts."""
    pairs = [(3.0, 0.0), (4.0, 2.0), (3.0, 3.0), (2.5, 0.0), (2.0, 8.0), (5.0, 0.5)]
    scale = KDScale(PKLLoss(scaling="dynamic", scaling_decay=0.9))
    seen = [scale.value]
    for ce, kd in pairs:
        scale.update(ce, kd)
        seen.append(scale.value)
    assert seen == pytest.approx(recurrence(pairs, 0.9), rel=1e-12)


def test_fixed_scale_is_one_but_the_ratio_is_known() -> None:
    scale = KDScale(PKLLoss(scaling="fixed"))
    scale.update(4.0, 2.0)
    assert scale.value == 1.0
    assert scale.ratio == 2.0


def test_scale_continues_from_its_ratio() -> None:
    """What a checkpoint stores is enough."""
    first, second = (KDScale(PKLLoss(scaling="dynamic")) for _ in range(2))
    first.update(4.0, 2.0)
    second.ratio = first.ratio
    for scale in (first, second):
        scale.update(9.0, 3.0)
    assert first.value == second.value
