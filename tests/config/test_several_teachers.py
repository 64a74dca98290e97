"""Messages about invalid aggregations: key, value, reason and remedy."""

import copy
from typing import Any

import pytest

from nemo_opd.config.composition import from_yaml, to_yaml
from nemo_opd.config.run import from_dict
from tests.config.settings import CROSS, SAME, VALID, changed, message_of

OTHER = SAME | {"name": "other"}


def with_(aggregation: dict[str, Any], *teachers: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return copy.deepcopy(VALID) | {"aggregation": aggregation, "teachers": list(teachers or (CROSS, SAME)), **sections}


@pytest.mark.parametrize(
    ("aggregation", "setting"),
    [
        ({"type": "select_teacher"}, "aggregation.type=select_teacher"),
        ({"type": "routed"}, "aggregation.type=routed"),
        ({"type": "averaged_logits"}, "aggregation.type=averaged_logits"),
        ({"type": "weighted_sum", "weights": "entropy"}, "aggregation.weights=entropy"),
        ({"type": "weighted_sum", "vocabulary_scaling": True}, "aggregation.vocabulary_scaling=true"),
    ],
)
def test_several_teachers_are_aggregated(aggregation: dict[str, Any], setting: str) -> None:
    assert message_of(with_(aggregation, SAME)) == (
        f"{setting} needs several teachers, but there is one (same); name more teachers, or write "
        "aggregation=weighted_sum"
    )


def test_alpha_needs_scores() -> None:
    message = message_of(changed("aggregation", {"type": "weighted_sum", "alpha": 2}))
    assert message.startswith("aggregation.alpha=2 has no effect with weights=static; write aggregation.weights=bits")
    assert message_of(changed("aggregation", {"type": "weighted_sum", "weights": "entropy", "alpha": 0})).startswith(
        "aggregation.alpha=0: must be greater than 0"
    )
    assert message_of(changed("aggregation", {"type": "weighted_sum", "weights": "vote", "alpha": 2})).startswith(
        "aggregation.weights='vote': must be 'static', 'bits_per_byte', 'entropy' or 'max_probability'"
    )


def test_a_key_of_another_aggregation_is_unknown() -> None:
    assert message_of(changed("aggregation", {"type": "routed", "per": "batch"})).startswith(
        "aggregation.per='batch': there is no such key; it belongs to aggregation.type=select_teacher;"
    )
    assert message_of(changed("aggregation.type", "vote")) == (
        "aggregation.type='vote': choose one of 'weighted_sum', 'averaged_logits', 'select_teacher', 'routed'"
    )


def test_averaged_logits_need_one_tokenizer_and_one_loss() -> None:
    averaged = {"type": "averaged_logits"}
    assert message_of(with_(averaged, SAME, CROSS)) == (
        "aggregation.type=averaged_logits averages the columns of one vocabulary, but teachers.1 (cross) is of type "
        "cross_tokenizer; use aggregation=weighted_sum, or remove that teacher"
    )
    with_loss = OTHER | {"loss": {"type": "same_vocab"}}
    assert message_of(with_(averaged, SAME, with_loss)).startswith(
        "teachers.1.loss.type=same_vocab: aggregation.type=averaged"
    )
    assert from_dict(with_(averaged, SAME, OTHER | {"weight": 0})).aggregation.score is None


@pytest.mark.parametrize(
    "aggregation",
    [{"type": "select_teacher"}, {"type": "routed"}, {"type": "weighted_sum", "weights": "bits_per_byte"}],
)
def test_compared_teachers_have_a_weight(aggregation: dict[str, Any]) -> None:
    """Bug: a teacher of weight 0 gets texts, or a share of the softmax, and teaches nothing."""
    message = message_of(with_(aggregation, CROSS, SAME | {"weight": 0}))
    assert message.startswith("teachers.1.weight=0: aggregation.")
    assert "would give texts to same" in message


@pytest.mark.parametrize("type_", ["select_teacher", "routed"])
def test_picked_teachers_weigh_the_same(type_: str) -> None:
    message = message_of(with_({"type": type_}, CROSS, SAME | {"weight": 0.5}))
    assert message.startswith(f"teachers.1.weight=0.5: with aggregation.type={type_} a text has one teacher")
    assert "teachers.0.weight=1; make them equal" in message
    halves = [teacher | {"weight": 0.5} for teacher in (CROSS, SAME)]
    assert from_dict(with_({"type": type_}, *halves)).aggregation.type == type_


def test_routes_have_a_column() -> None:
    routed = {"type": "routed", "key": "text"}
    assert message_of(with_(routed)) == (
        "aggregation.key=text is the column of data.text_key too; name the one with the teacher"
    )
    chat = {"train": {"jsonl_files": "/a"}, "messages_key": "chat", "tools_key": "text"}
    assert "data.tools_key too" in message_of(with_(routed, data=chat))
    chat["tools_key"] = None
    assert from_dict(with_(routed, data=chat)).routing is not None
    files = {"train": {"jsonl_files": "/a"}, "validation": {"text_files": "*.txt"}}
    assert message_of(with_({"type": "routed"}, data=files)).startswith(
        "data.validation.text_files have no column 'teacher' (aggregation.key)"
    )


@pytest.mark.parametrize("key", ["kd_weight", "ce_weight"])
def test_compared_gradients_are_both_there(key: str) -> None:
    data = with_({"type": "weighted_sum"}, loss={"type": "p_kl", key: 0}, logging={"gradients_every": 10})
    assert message_of(data) == (
        f"logging.gradients_every=10 compares the KD gradient with the CE gradient, but loss.{key}=0; raise it, or "
        "write logging.gradients_every=null"
    )
    assert message_of(changed("logging.gradients_every", 0)).startswith("logging.gradients_every=0: must be greater")


def test_without_kd_nothing_is_routed() -> None:
    """Bug: a column of routes is required although no teacher is loaded."""
    assert from_dict(with_({"type": "routed"}, loss={"type": "p_kl", "kd_weight": 0})).routing is None


def test_a_resolved_config_is_valid(tmp_path: Any) -> None:
    """Bug: a rule refuses a default that is written out."""
    for aggregation in ({"type": "weighted_sum"}, {"type": "weighted_sum", "weights": "entropy", "alpha": 3.0}):
        config = from_dict(with_(aggregation))
        (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        assert from_yaml(tmp_path / "config.yaml") == config
