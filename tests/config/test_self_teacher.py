"""Settings of teachers with the student's weights: inherited and excluded ones."""

import copy
import re
from typing import Any

import pytest

from nemo_opd.checkpoint.run_directory import identity, require_same_run
from nemo_opd.config.run import from_dict
from nemo_opd.errors import CheckpointError
from tests.config.settings import CROSS, SAME, VALID, message_of

EMA = {"name": "mean", "type": "same_tokenizer", "weights": "ema"}
LIVE = {"name": "live", "type": "same_tokenizer", "weights": "student"}


def with_teachers(*teachers: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return copy.deepcopy(VALID) | {"teachers": [*teachers]} | sections


def test_a_self_teacher_is_what_the_student_is() -> None:
    """Bugs: a teacher's defaults instead of the student's settings; a lost template of the teacher; the student's
    settings written into the config.
    """
    student = {
        "model": "/m",
        "tokenizer": "/t",
        "dtype": "float32",
        "attn_implementation": "eager",
        "parallelism": {"tp": 2},
        "chat_template": "/s.jinja",
    }
    live = {**LIVE, "type": "cross_tokenizer", "chat_template": "/own.jinja"}
    data = VALID["data"] | {"messages_key": "messages"}
    config = from_dict(with_teachers(EMA, live, student=student, data=data))

    for teacher in config.active_teachers:
        for name in ("model", "tokenizer", "dtype", "attn_implementation", "parallelism", "compile"):
            assert getattr(teacher, name) == getattr(config.student, name)
    assert [teacher.chat_template for teacher in config.active_teachers] == ["/s.jinja", "/own.jinja"]
    assert all(teacher.model is None for teacher in config.teachers)
    assert from_dict(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ({"model": "/e"}, r"teachers.0.model=/e: weights=ema uses the student's weights and no other model; leave"),
        ({"weights": "frozen"}, "teachers.0.model: required, but not given; name the teacher's, or write weights: "),
        ({"tokenizer": "/t"}, "teachers.0.tokenizer=/t has no effect: with weights=ema mean computes in the student's"),
        ({"dtype": "float32"}, "teachers.0.dtype=float32 has no effect: .*set student.dtype, or leave it out"),
        ({"parallelism": {"tp": 2}}, "teachers.0.parallelism.tp=2 has no effect: .*; set student.parallelism.tp, or "),
        (
            {"adapters": False},
            "teachers.0.adapters=false has no effect with weights=ema; write teachers.0.weights=student",
        ),
        ({"weights": "student", "adapters": False}, "teachers.0.adapters=false has no effect: the student has none"),
        (
            {"weights": "student", "ema_decay": 0.9},
            "teachers.0.ema_decay=0.9 has no effect with weights=student",
        ),
        ({"weights": "student", "offload": True}, "teachers.0.offload=true has no effect: the weights are the student"),
        ({"ema_decay": 1.0}, "teachers.0.ema_decay=1.0: must be less than 1"),
        ({"fused_layers": False}, "teachers.0.fused_layers=false has no effect: .*set student.fused_layers, or leave"),
        ({"cache": "/c"}, "teachers.0.weights=ema: the answers in cache=/c are a frozen teacher's"),
        ({"type": "cached", "cache": "/c"}, "teachers.0.weights=ema: the answers in cache=/c are a frozen"),
    ],
)
def test_what_does_not_go_together(teacher: dict[str, Any], says: str) -> None:
    assert re.match(says, message_of(with_teachers(EMA | teacher)))


def test_placements() -> None:
    separate = {"placement": "separate"}
    assert message_of(with_teachers(EMA, LIVE, cluster=separate)).startswith("cluster.placement=separate: every teache")
    from_dict(with_teachers(EMA, CROSS, cluster=separate))


def test_a_run_is_another_with_other_weights() -> None:
    """Bugs: a run of an older version cannot be resumed; a run resumes with a different decay."""
    run, changed = from_dict(with_teachers(EMA)), from_dict(with_teachers(EMA | {"ema_decay": 0.5}))
    with pytest.raises(CheckpointError, match=r"teachers\.0\.ema_decay=0\.5, there 0\.99"):
        require_same_run(identity(run), identity(changed), "step_000005")
    frozen = identity(from_dict(with_teachers(SAME | {"name": "mean"})))
    new = re.compile(r"teachers\.\d\.(weights|ema_decay|adapters)")
    older = {key: value for key, value in frozen.items() if not new.fullmatch(key)}
    require_same_run(older, frozen, "step_000005")
    with pytest.raises(CheckpointError, match=r"teachers\.0\.weights='ema', there 'frozen'"):
        require_same_run(older, identity(run), "step_000005")
