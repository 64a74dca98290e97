"""Warnings about the KD of the first step."""

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


def warnings_of(config: RunConfig, kd: float, device: str = "cpu") -> list[str]:
    (name,) = config.active_names
    return list(first_kd_warnings(config, VOCAB, device, {f"train/kd/{name}": kd}))


def test_a_kd_of_0_between_different_models_names_both() -> None:
    """Catches a copy of the student as its teacher: a run that trains nothing for days."""
    (warning,) = warnings_of(config(SAME, {"type": "same_vocab"}), 0.0)
    for part in ("train/kd/same", "teachers.0.model=/s", "student.model=/m", "train/kd_coverage/same"):
        assert part in warning


@pytest.mark.parametrize(
    ("dtype", "device", "kd", "is_warned"),
    [
        ("float32", "cpu", 5e-7, True),
        ("float32", "cpu", 1e-5, False),
        ("bfloat16", "cpu", 5e-4, True),
        ("bfloat16", "cpu", 5e-3, False),  # a quantised copy
        ("float32", "cuda", 5e-4, True),  # the student computes in bfloat16
    ],
)
def test_a_kd_within_rounding_is_warned_of(dtype: str, device: str, kd: float, is_warned: bool) -> None:
    """Catches a bound above the KD of a fine-tuned or quantised copy, or below the noise of bf16."""
    teacher = SAME | {"dtype": dtype}
    assert bool(warnings_of(config(teacher, {"type": "same_vocab"}), kd, device)) == is_warned


@pytest.mark.parametrize(
    "teacher",
    [SAME | {"model": "/m"}, {"name": "own", "type": "same_tokenizer", "weights": "ema"}],
)
def test_teachers_that_begin_as_the_student_give_no_warning(teacher: dict[str, Any]) -> None:
    """Catches a warning about a self-teacher, or about the student's initial model as its teacher: both begin at 0."""
    assert warnings_of(config(teacher, {"type": "same_vocab"}), 0.0) == []


@pytest.mark.parametrize(
    ("teacher", "loss", "kd", "is_warned"),
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
def test_a_kd_above_the_vocabulary(teacher: dict[str, Any], loss: dict[str, Any], kd: float, is_warned: bool) -> None:
    """Catches a bound on values that are not a KL in nats per unit; log 2048 is 7.62."""
    warnings = warnings_of(config(teacher, loss), kd)
    assert bool(warnings) == is_warned
    if kd > math.log(VOCAB) and is_warned:
        assert "nats, but a student with equal probabilities for all 2048 tokens has at most 7.62" in warnings[0]


@pytest.mark.parametrize("kd", [math.nan, math.inf])
def test_a_kd_that_is_not_finite_gives_no_warning_here(kd: float) -> None:
    assert warnings_of(config(SAME, {"type": "same_vocab"}), kd) == []


def test_a_run_whose_teacher_is_a_copy_of_the_student(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a warning that the run does not print, or prints in every step."""
    copy = shutil.copytree(tiny.student, tmp_path / "copy")
    overrides = [override for override in tiny.overrides() if not override.startswith("teachers")]
    teacher = f"[{{name: copy, type: same_tokenizer, model: {copy}, dtype: float32}}]"
    run_here(tmp_path / "run", [*overrides, "train.max_steps=2", f"teachers={teacher}", "loss=same_vocab"])
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("step 1: train/kd/copy is 0: copy and the student agree") == 1
