"""Every setting is decided on once: it may change when a run is continued, or it may not."""

from nemo_opd.checkpoint.free_settings import BOUND, FREE, FREE_KEYS, decided_in, fields
from nemo_opd.config import RunConfig


def test_every_field_is_decided_on_once() -> None:
    """A field that is added to the settings fails here until someone says whether a run may go on with another."""
    decisions = {
        f"{model.__name__}.{name}": (decided_in(FREE, model, name), decided_in(BOUND, model, name))
        for _, model, name in fields(RunConfig)
    }

    assert len(decisions) > 150  # the walk itself works
    assert [field for field, (free, bound) in decisions.items() if free == bound] == []


def test_the_tables_name_only_fields_that_there_are() -> None:
    """Catches a decision that a renamed field has left behind."""
    named = [(model, name) for table in (FREE, BOUND) for model, names in table.items() for name in names.split()]

    assert [f"{model.__name__}.{name}" for model, name in named if name not in model.model_fields] == []


def test_a_key_has_the_same_decision_in_every_kind_of_a_section() -> None:
    """Keys are compared without the type of their section."""
    bound = {key for key, model, name in fields(RunConfig) if not decided_in(FREE, model, name)}

    assert bound & FREE_KEYS == set()


def test_what_an_issue_of_operation_changes_is_free() -> None:
    for key in ("url", "command", "options", "concurrency", "retries", "request_timeout_s", "start_timeout_s"):
        assert f"rollout.{key}" in FREE_KEYS
    assert {"evaluation", "health.action", "logging.wandb.mode", "data.validation"} <= FREE_KEYS
    assert "teachers.*.offload" in FREE_KEYS
