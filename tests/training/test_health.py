"""Alarms about an unhealthy on-policy run."""

import pytest

from nemo_opd.config.rollout import Health
from nemo_opd.training.on_policy import FIRST_STEPS, SIGNS, HealthMonitor

WELL = {
    "rollout/response_length": 20.0,
    "rollout/truncation_rate": 0.1,
    "train/entropy": 1.0,
    "rollout/repetition": 0.1,
    "train/mismatch": 0.042,  # two roundings of logits to bf16
}
ILL = {
    "rollout/response_length": 81.0,
    "rollout/truncation_rate": 0.95,
    "train/entropy": 0.01,
    "rollout/repetition": 0.6,
    "train/mismatch": 0.11,
}
LIMITS = Health(patience=3)


def after_a_good_start() -> HealthMonitor:
    monitor = HealthMonitor(LIMITS)
    for _ in range(FIRST_STEPS):
        assert monitor.observe(WELL) == []
    return monitor


def test_the_signs_are_all_there() -> None:
    assert {sign.metric for sign in SIGNS} == WELL.keys() == ILL.keys()


@pytest.mark.parametrize("metric", ILL)
def test_a_sign_is_reported_once_after_some_steps_in_a_row(metric: str) -> None:
    monitor, ill = after_a_good_start(), WELL | {metric: ILL[metric]}

    by_step = [monitor.observe(ill) for _ in range(5)]

    assert [len(alarms) for alarms in by_step] == [0, 0, 1, 0, 0]


def test_a_step_in_between_starts_anew() -> None:
    monitor = after_a_good_start()

    assert not any(monitor.observe(record) for record in (ILL, ILL, WELL, ILL, ILL))
    assert len(monitor.observe(ILL)) == len(ILL)


def test_the_message_has_both_figures_and_a_way_out() -> None:
    monitor = after_a_good_start()
    longer = WELL | {"rollout/response_length": 100.0}

    (alarm,) = [alarm for _ in range(3) for alarm in monitor.observe(longer)]

    assert "100 tokens on average, 20 at first" in alarm
    assert "health.max_length_growth" in alarm


def test_a_value_that_is_high_from_the_start_is_not_an_alarm() -> None:
    """Bug: an alarm for a task whose answers are always cut or certain. Engine and trainer must agree in any task."""
    monitor = HealthMonitor(LIMITS)

    alarms = [alarm for _ in range(20) for alarm in monitor.observe(ILL)]

    assert len(alarms) == 1
    assert "engine and trainer" in alarms[0]


def test_a_resumed_run_knows_its_first_steps_and_its_alarms() -> None:
    uninterrupted, continued = HealthMonitor(LIMITS), HealthMonitor(LIMITS)
    records = [{"eval/greedy": 0.5}, *[WELL] * FIRST_STEPS, *[WELL | {"rollout/repetition": 0.6}] * 3]
    alarms = [uninterrupted.observe(record) for record in records]
    continued.replay(records)

    assert alarms[-1]
    for record in (ILL, ILL, ILL):
        assert continued.observe(record) == uninterrupted.observe(record)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_skipped(value: float) -> None:
    """Bug: a NaN among the first steps makes their mean NaN, and a comparison with NaN never gives an alarm."""
    monitor, skipped = HealthMonitor(LIMITS), dict.fromkeys(WELL, value)
    for _ in range(FIRST_STEPS - 1):
        monitor.observe(WELL)
    assert monitor.observe(skipped) == []
    monitor.observe(WELL)
    by_step = [monitor.observe(record) for record in (ILL, skipped, ILL, ILL)]
    assert [len(alarms) for alarms in by_step] == [0, 0, 0, len(ILL)]
