"""Which settings may change when a run is continued."""

from nemo_opd.checkpoint.run_directory import FREE_KEYS, fields
from nemo_opd.config import RunConfig


def test_a_key_has_the_same_decision_in_every_kind_of_a_section() -> None:
    """Bug: a field is free in one type of a section only; keys are compared without their section's type."""
    bound = {key for key, is_free in fields(RunConfig) if not is_free}

    assert len(bound) > 100  # the walk itself works
    assert bound & FREE_KEYS == set()


def test_settings_that_results_depend_on_are_bound() -> None:
    """Bug: a section is free in full although results depend on some of its fields."""
    bound = {key for key, is_free in fields(RunConfig) if not is_free}

    assert {"run.seed", "train.global_batch_size", "student.optimizer.lr", "student.lora.rank"} <= bound
    assert {"teachers.*.model", "teachers.*.weight", "loss.type", "rollout.temperature", "reward.type"} <= bound
    assert {"data.train.jsonl_files", "data.packing", "handoff.type", "reward.sandbox.timeout_s"} <= bound


def test_settings_of_operation_are_free() -> None:
    """Bug: a run cannot be continued on another machine or with another server."""
    for key in ("url", "command", "options", "concurrency", "retries", "request_timeout_s", "start_timeout_s"):
        assert f"rollout.{key}" in FREE_KEYS
    assert {"evaluation", "health", "logging", "cluster", "student.parallelism", "data.validation"} <= FREE_KEYS
    assert "teachers.*.offload" in FREE_KEYS
