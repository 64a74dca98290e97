"""Warnings about the first step's KD: which are given, and which not."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.training.step_metrics import first_kd_warnings
from tests.config.settings import CROSS, SAME, VALID
from tests.tiny import Tiny
from tests.training.launch import run_here

VOCAB = 2048


def config(teacher: dict[str, Any], loss: dict[str, Any], **student: Any) -> RunConfig:
    return from_dict(VALID | {"teachers": [teacher], "loss": loss, "student": {"model": "/m"} | student})


def told(config: RunConfig, kd: float, device: str = "cpu") -> list[str]:
    (name,) = config.active_names
    return list(first_kd_warnings(config, VOCAB, device, {f"train/kd/{name}": kd}))


def test_a_kd_of_0_between_other_models_is_told_with_both() -> None:
    """Catches a copy of the student as its teacher, with which a run trains nothing for days."""
    (warning,) = told(config(SAME, {"type": "same_vocab"}), 0.0)
    for part in ("train/kd/same", "teachers.0.model=/s", "student.model=/m", "train/kd_coverage/same"):
        assert part in warning


@pytest.mark.parametrize(
    ("dtype", "device", "kd", "is_told"),
    [
        ("float32", "cpu", 5e-7, True),
        ("float32", "cpu", 1e-5, False),
        ("bfloat16", "cpu", 5e-4, True),
        ("bfloat16", "cpu", 5e-3, False),  # as of a quantised copy
        ("float32", "cuda", 5e-4, True),  # the student computes in bfloat16
    ],
)
def test_what_rounding_explains(dtype: str, device: str, kd: float, is_told: bool) -> None:
    """Catches a bound that takes a fine-tuned or quantised copy for the student, or one that bf16 noise is above."""
    teacher = SAME | {"dtype": dtype}
    assert bool(told(config(teacher, {"type": "same_vocab"}), kd, device)) == is_told


@pytest.mark.parametrize(
    "teacher",
    [SAME | {"model": "/m"}, {"name": "own", "type": "same_tokenizer", "weights": "ema"}],
)
def test_teachers_that_begin_as_the_student_are_not_told(teacher: dict[str, Any]) -> None:
    """Catches a warning about a self-teacher, or about the student's start as a teacher, which begin at 0."""
    assert told(config(teacher, {"type": "same_vocab"}), 0.0) == []


@pytest.mark.parametrize(
    ("teacher", "loss", "kd", "is_told"),
    [
        (SAME, {"type": "same_vocab"}, 7.7, True),
        (SAME, {"type": "same_vocab"}, 7.5, False),
        (SAME, {"type": "same_vocab", "temperature": 2.0}, 4 * 7.5, False),
        (SAME, {"type": "same_vocab", "temperature": 2.0}, 4 * 7.7, True),
        (SAME, {"type": "same_vocab", "divergence": "reverse_kl"}, 20.0, False),
        (CROSS, {"type": "p_kl"}, 7.7, True),
        (CROSS, {"type": "p_kl", "coverage_coef": 3.0}, 7.7, False),
        (CROSS, {"type": "strict"}, 7.7, True),
        (CROSS, {"type": "strict", "continuation_weight": 1.0}, 7.7, False),
        (CROSS, {"type": "alm"}, 20.0, False),
        (CROSS, {"type": "alm"}, 0.0, False),
        (CROSS, {"type": "uld"}, 0.0, True),
    ],
)
def test_a_kd_above_the_vocabulary(teacher: dict[str, Any], loss: dict[str, Any], kd: float, is_told: bool) -> None:
    """Catches a bound on values that are no KL in nats a unit; log 2048 is 7.62."""
    warnings = told(config(teacher, loss), kd)
    assert bool(warnings) == is_told
    if kd > math.log(VOCAB) and is_told:
        assert "nats, but a student with equal probabilities for all 2048 tokens has at most 7.62" in warnings[0]


@pytest.mark.parametrize("kd", [math.nan, math.inf])
def test_what_is_not_finite_is_told_elsewhere(kd: float) -> None:
    assert told(config(SAME, {"type": "same_vocab"}), kd) == []


def test_a_run_whose_teacher_is_a_copy_of_the_student(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a warning that no run gives, or that is repeated."""
    copy = shutil.copytree(tiny.student, tmp_path / "copy")
    others = [override for override in tiny.overrides() if not override.startswith("teachers")]
    teacher = f"[{{name: copy, type: same_tokenizer, model: {copy}, dtype: float32}}]"
    run_here(tmp_path / "run", [*others, "train.max_steps=2", f"teachers={teacher}", "loss=same_vocab"])
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("step 1: train/kd/copy is 0: copy and the student agree") == 1
