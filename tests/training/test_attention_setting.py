"""An attention implementation that the machine lacks is refused before anything starts."""

from typing import Literal

import pytest

from nemo_opd.config.model import Student
from nemo_opd.errors import ModelError
from nemo_opd.preflight import model_info
from nemo_opd.preflight.model_info import read_model_info
from tests.tiny import Tiny

NAME: Literal["flash_attention_2"] = "flash_attention_2"


def refused(tiny: Tiny, device: str, dtype: Literal["auto", "float32"] = "auto") -> str:
    student = Student(model=str(tiny.student), attn_implementation=NAME, dtype=dtype)
    with pytest.raises(ModelError) as caught:
        read_model_info(student, "student", device)
    return str(caught.value)


def test_a_cpu_has_no_flash_attention(tiny: Tiny) -> None:
    assert refused(tiny, "cpu").startswith(
        f"student.attn_implementation={NAME}: it needs a GPU, and cluster.device is cpu; leave it out"
    )


def test_flash_attention_does_not_compute_in_fp32(tiny: Tiny) -> None:
    assert "student.dtype is float32" in refused(tiny, "cuda", "float32")


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_info._FLASH, NAME, (lambda: False, "flash-attn"))


def test_a_package_that_is_missing_is_named(tiny: Tiny, without_package: None) -> None:
    assert "the package flash-attn is not installed; leave it out" in refused(tiny, "cuda")


def test_scores_that_eager_attention_keeps_are_estimated(tiny: Tiny) -> None:
    sizes = [
        read_model_info(Student(model=str(tiny.student), attn_implementation=name), "student", "cpu").size
        for name in ("eager", "sdpa")
    ]
    assert [size.layers[0].score_heads > 0 for size in sizes] == [True, False]
